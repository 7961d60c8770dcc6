"""A specimen, dissected: its readouts, the terms of its stream, and the modules that see the stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.autograd.graph import Node

from completep.anatomy.blocks import Stack, find_stacks, find_tables, in_stack, is_expert, matches, template
from completep.anatomy.norms import is_invariant
from completep.anatomy.readouts import Head, Readout, find_heads, post_norm, refuse_shared_products
from completep.anatomy.stream import (
    Leaf,
    below,
    elementwise_parameters,
    from_blocks,
    held,
    is_readable,
    multiplied_parameters,
    refuse_unreadable,
    stream_leaves,
    tensor_of,
    used_parameters,
)
from completep.anatomy.trace import Example, Tap, Trace, trace
from completep.errors import UserError, some


@dataclass(frozen=True)
class Dissection:
    """What one run of a specimen shows, under the specimen's own parameter names."""

    trace: Trace
    stacks: tuple[Stack, ...]
    head: Head  # what makes the logits
    heads: tuple[Head, ...]  # what makes further results, such as a value
    writers: tuple[Leaf, ...]
    entries: tuple[Leaf, ...]  # embeddings and input projections
    entry_norms: tuple[str, ...]
    normed_entry: bool  # a norm follows the embedding, with or without a module
    scales: frozenset[str]  # parameters that multiply the stream by one number, or mix the embedding into it
    readers: tuple[str, ...]  # modules that are given the stream, in the order in which they run
    carriers: tuple[str, ...]  # modules that return the stream or a part of it

    @property
    def readout(self) -> Readout:
        return self.head.readout

    @property
    def tap(self) -> Tap:
        return self.head.tap

    @cached_property
    def final_norms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(norm for head in (self.head, *self.heads) for norm in head.norms))

    @cached_property
    def elementwise(self) -> set[str]:
        """The parameters of blocks that act entry by entry."""
        return elementwise_parameters(self.trace, self.stacks)

    @cached_property
    def multiplied(self) -> set[str]:
        """The parameters that are factors of a matrix product."""
        return set(multiplied_parameters(self.trace))

    @cached_property
    def reading(self) -> set[str]:
        """The parameters that are multiplied with activations, not with inputs."""
        return {name for name, activations in multiplied_parameters(self.trace).items() if activations}

    @cached_property
    def used(self) -> set[str]:
        """The parameters that some result depends on."""
        return used_parameters(self.trace)

    @cached_property
    def known(self) -> set[str]:
        """The parameters that affect a result which reads the stream after the last block."""
        readouts = {name for head in (self.head, *self.heads) for name in head.parameters}
        return readouts | used_parameters(self.trace, [head.readout.node for head in (self.head, *self.heads)])

    @property
    def stream(self) -> Tensor:
        """The stream before the first module that reads it."""
        return self.trace.inputs[self.readers[0]]

    @property
    def writer_names(self) -> list[str]:
        return [name for leaf in self.writers for name in leaf.parameters]

    def template(self, name: str) -> str:
        return template(name, self.stacks)


def dissect(specimen: nn.Module, example: Example, writers: Sequence[str] | None) -> Dissection:
    """Run the specimen once and walk from its logits down to its embeddings."""
    stacks = find_stacks(specimen)
    if not stacks:
        what = f"no repeated blocks in {type(specimen).__name__}: its depth is not defined (zero layers?)"
        raise UserError(what, fix="keep at least one block, all of one class, in an nn.ModuleList or nn.Sequential")
    t = trace(specimen, example)
    head, heads = find_heads(t, stacks)
    refuse_shared_products((head, *heads), t)
    assert head.root.grad_fn is not None
    walked = _walk(head.root.grad_fn, t, stacks, writers)
    inner = [n for n in t.outputs if in_stack(n, stacks)]
    inner.sort(key=lambda n: not any(s.pattern.fullmatch(n) for s in stacks))  # errors should name whole blocks first
    readers = tuple(n for n in inner if n in t.inputs and t.inputs[n].grad_fn in walked.stream)
    carriers = tuple(n for n in inner if t.nodes[n] in walked.stream)
    if not readers:
        what = "no module of the blocks is given what the readout reads, before the last norms and layers"
        raise UserError(
            what, fix="let the readout read the stream after the last block, through norms and nn.Linear only"
        )
    sites = {leaf.site for leaf in walked.entries}
    tables = [s for s in find_tables(specimen, stacks) if not any(s.pattern.match(site) for site in sites if site)]
    stream_parts = (walked.writers, walked.entries, walked.norms, walked.normed, walked.scales)
    return Dissection(t, (*stacks, *tables), head, heads, *stream_parts, readers, carriers)


@dataclass(frozen=True)
class Walked:
    """The terms of the stream, sorted."""

    writers: tuple[Leaf, ...]
    entries: tuple[Leaf, ...]
    norms: tuple[str, ...]  # after the embedding
    normed: bool
    scales: frozenset[str]
    stream: set[Node]


def _walk(root: Node, t: Trace, stacks: tuple[Stack, ...], named: Sequence[str] | None) -> Walked:
    """The terms of the stream that ends at `root`."""
    writers: list[Leaf] = []
    entries: list[Leaf] = []
    norms: dict[Node, str | None] = {}  # those after the embedding, with their modules
    todo = [root]
    sums: set[Node] = set()
    scales: set[str] = set()
    while todo:
        nodes = sums if not norms else set()  # nodes before an embedding norm are not the stream
        for leaf in stream_leaves(todo.pop(), t, stacks, nodes, scales):
            names = leaf.parameters or ((leaf.site,) if leaf.site else ())
            if leaf.site in t.norms and leaf.node is not None and not in_stack(leaf.site or "", stacks):
                norms[leaf.node] = leaf.site
                todo.append(t.made_by[leaf.node].node_before())
            elif leaf.node is not None and (before := _before_functional_norm(leaf, t, stacks)) is not None:
                norms[leaf.node] = None
                todo.append(before)
            elif not is_readable(leaf, t) or any(in_stack(name, stacks) for name in names):
                writers.append(leaf)
            else:
                _refuse_outer_matrix(leaf, t, stacks)
                entries.append(leaf)
    if named is None:
        refuse_unreadable(writers, t, stacks)
    _refuse_outer_gates(writers, stacks)
    writers = held(writers, entries, t)
    writers += _idle_experts(writers, t, stacks)
    if not entries and not norms:
        raise _no_embedding(writers, t)
    if named is not None:
        writers = _named_writers(writers, entries, named, t)
    _check_writers(writers, stacks)
    ends = list(norms) if len(norms) == 1 else [e.node for e in entries] if len(entries) == 1 else []
    stream = sums | {node for node in ends if node is not None}
    modules = tuple(site for site in norms.values() if site is not None)
    return Walked(tuple(writers), tuple(entries), modules, bool(norms), frozenset(scales), stream)


def _before_functional_norm(leaf: Leaf, t: Trace, stacks: tuple[Stack, ...]) -> Node | None:
    """The embedding behind a norm without a module, which is known by what it does: rms_norm(table(ids))."""
    node = leaf.node
    if node is None or is_readable(leaf, t) or node not in t.made or from_blocks(node, t, stacks):
        return None
    todo, seen = below(node), set(below(node))
    while todo:
        current = todo.pop(0)
        given = tensor_of(current, t)
        if given is not None and given.shape == t.made[node].shape and is_invariant(t.made[node], given):
            return current
        new = [child for child in below(current) if child not in seen] if current not in t.made_by else []
        seen.update(new)
        todo += new
    return None


def _idle_experts(writers: list[Leaf], t: Trace, stacks: tuple[Stack, ...]) -> list[Leaf]:
    """Experts that the example did not reach end a branch too: they get the same ends as the experts that ran."""
    known = {leaf.site for leaf in writers}
    ends = {template(leaf.site, stacks): leaf for leaf in writers if leaf.site and is_expert(leaf.site, stacks)}
    idle = []
    for name, module in t.model.named_modules():
        if name not in known and is_expert(name, stacks) and template(name, stacks) in ends:
            parameters = tuple(t.parameters[id(p)] for p in module.parameters(recurse=False))
            idle.append(Leaf(name, parameters, gates=ends[template(name, stacks)].gates))
    return idle


def _refuse_outer_gates(writers: list[Leaf], stacks: tuple[Stack, ...]) -> None:
    """The gradient of a gate that all blocks share sums over depth, and no rule covers that."""
    for name in (name for leaf in writers for name in leaf.gates):
        if not in_stack(name, stacks):
            what = f"'{name}' stands outside the blocks and multiplies their branches, so its gradient sums over depth"
            raise UserError(what, fix="give every block a gate of its own")


def _no_embedding(writers: list[Leaf], t: Trace) -> UserError:
    if norm := next((w.site for w in writers if w.site in t.norms), None):
        return post_norm(norm)
    what = "the stream before the readout does not reach back to an embedding: a block replaces it, not adds to it"
    return UserError(what, fix="use residual blocks: x + f(x)")


def _check_writers(writers: list[Leaf], stacks: tuple[Stack, ...]) -> None:
    """Every branch can be scaled, and every stack has a branch."""
    for leaf in writers:
        if not leaf.parameters:
            raise UserError(f"'{leaf.site}' ends a branch but has no parameters to scale", fix="give that norm a gain")
    for stack in stacks:
        if not any(stack.pattern.match(n) for w in writers for n in w.parameters):
            what = f"no block of '{stack.stem}*' adds anything to the residual stream that reaches the logits"
            fix = "an encoder–decoder or auxiliary stack has no rule here; parametrize the decoder alone"
            raise UserError(what, fix=fix)


def _refuse_outer_matrix(leaf: Leaf, t: Trace, stacks: tuple[Stack, ...]) -> None:
    """A linear layer outside the blocks may read inputs, or embeddings as wide as the stream, but nothing of blocks.

    Where embeddings have a width of their own (OPT's word_embed_proj_dim), their rows and a tied readout would need it.
    """
    node = t.inputs[leaf.site].grad_fn if leaf.site in t.inputs else None
    if node is None or leaf.site is None:
        return
    if t.inputs[leaf.site].shape[-1] != t.outputs[leaf.site].shape[-1]:
        what = f"'{leaf.site}' is a matrix outside the blocks between embeddings and a stream of another width"
        raise UserError(what, fix="use embeddings as wide as the stream (for OPT: word_embed_proj_dim = hidden_size)")
    if from_blocks(node, t, stacks):
        what = f"'{leaf.site}' is a matrix outside the blocks that reads what blocks made, and the stream takes it in"
        raise UserError(what, fix="put it into a block, where it is part of a branch, or build the model without it")


def _named_writers(leaves: list[Leaf], entries: list[Leaf], patterns: Sequence[str], t: Trace) -> list[Leaf]:
    """The writers that you named, instead of those in the graph; the proof checks them."""
    names = [n for n in t.parameters.values() if matches(n, patterns)]
    if not names:
        known = some(list(t.parameters.values()), 4)
        raise UserError(f"writers={patterns!r} match no parameter", fix=f"names look like: {known}")
    sites = {name: leaf.site for leaf in leaves for name in leaf.parameters}
    stream = {module for leaf in entries for module in leaf.inside}
    holders = [m for leaf in leaves for m in leaf.inside if m not in stream]  # they return a whole branch
    for name in names:
        sites.setdefault(name, next((h for h in holders if name.startswith(f"{h}.")), None))
    return [Leaf(sites[name], (name,)) for name in names]
