"""The role of each parameter, from its module, its place in the stream, and your patterns.

A parameter without a role is an error that lists all of them: nothing is treated as something else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from completep.anatomy.blocks import Stack, find_stacks, matches, template
from completep.anatomy.kinds import fan_in_axes, is_convolution, is_linear, is_norm
from completep.anatomy.stream import Leaf, Readout, activation_of, find_readout, norms_before, stream_leaves
from completep.anatomy.trace import Example, Trace, trace
from completep.errors import UserError, some
from completep.rules.table import Role


@dataclass(frozen=True)
class Part:
    """What one parameter is, and what its counterparts in all other blocks are."""

    role: Role
    fan_in: tuple[int, ...] = ()  # the axes that a matrix sums over; none for vectors and tables
    start: float = 0.0  # the value that a vector starts at: 1 for a gain, 0 for a bias
    offset: float = 0.0  # 1 where the model uses (1 + gain), as Gemma does

    def folded(self, value: float, c: float) -> float:
        """An entry of a vector in the folded coordinates, w' = c·(w + offset) - offset."""
        return c * (value + self.offset) - self.offset


@dataclass(frozen=True)
class Site:
    """A place in the forward pass where a multiplier acts, and the parameters that can hold it instead."""

    module: str | None  # template of the module; None if the branch has no module at its end
    parameters: tuple[str, ...]  # templates


@dataclass(frozen=True)
class Anatomy:
    """Everything that the rules need to know about a model, in templates, so that it holds at any size."""

    stacks: tuple[Stack, ...]
    parts: Mapping[str, Part]
    branches: tuple[Site, ...]
    readout: Site
    tables: Mapping[str, float]  # embedding weights, each with the constant that the model multiplies it by
    width: tuple[str, int]  # the parameter and axis that N is read from
    specimen_width: int
    final_norm: str | None  # the norm closest to the readout
    stream_reader: str  # the module whose input is the stream after the last block
    tied: bool

    def template(self, name: str) -> str:
        return template(name, self.stacks)

    def part(self, name: str) -> Part:
        return self.parts[self.template(name)]

    def stack_of(self, name: str) -> Stack | None:
        return next((s for s in self.stacks if s.pattern.match(name)), None)


@dataclass(frozen=True)
class Dissection:
    """What one run of a specimen shows, under the specimen's own parameter names."""

    trace: Trace
    stacks: tuple[Stack, ...]
    readout: Readout
    final_norms: tuple[str, ...]
    root: Tensor  # the stream after the last block, pooled if the model pools before its final norm
    writers: tuple[Leaf, ...]
    entries: tuple[Leaf, ...]  # embeddings and input projections
    entry_norms: tuple[str, ...]
    readers: tuple[str, ...]  # modules that are given the stream, in the order in which they run
    carriers: tuple[str, ...]  # modules that return the stream or a part of it

    @property
    def writer_names(self) -> list[str]:
        return [name for leaf in self.writers for name in leaf.parameters]

    @property
    def stream_reader(self) -> str:
        """The module whose input is the stream after the last block."""
        site = self.final_norms[-1] if self.final_norms else self.readout.site
        assert site is not None  # dissect() refuses a bare readout without a norm
        return site

    def template(self, name: str) -> str:
        return template(name, self.stacks)


def in_stack(name: str, stacks: Sequence[Stack]) -> bool:
    return any(s.pattern.match(name) for s in stacks)


def dissect(specimen: nn.Module, example: Example, writers: Sequence[str] | None) -> Dissection:
    """Run the specimen once and walk from its logits down to its embeddings."""
    stacks = find_stacks(specimen)
    if not stacks:
        what = f"no repeated blocks in {type(specimen).__name__}: its depth is not defined (zero layers?)"
        raise UserError(what, fix="keep at least one block, all of one class, in an nn.ModuleList or nn.Sequential")
    t = trace(specimen, example)
    readout = find_readout(t)
    final_norms = norms_before(activation_of(readout, t), t)
    if norms_in_blocks := [n for n in final_norms if in_stack(n, stacks)]:
        raise _post_norm(norms_in_blocks[0])
    if not final_norms and readout.site is None:
        what = "the readout is a bare matrix product without a norm before it: its input is not the input of any module"
        raise UserError(what, fix="use nn.Linear for the readout")
    root = t.inputs[final_norms[-1] if final_norms else readout.site or ""]
    assert root.grad_fn is not None
    leaves, sums = _walk(root.grad_fn, t, stacks, writers)
    inner = [n for n in t.outputs if in_stack(n, stacks)]
    inner.sort(key=lambda n: not any(s.pattern.fullmatch(n) for s in stacks))  # errors should name whole blocks first
    readers = tuple(n for n in inner if n in t.inputs and t.inputs[n].grad_fn in sums)
    carriers = tuple(n for n in inner if t.nodes[n] in sums)
    return Dissection(t, stacks, readout, tuple(final_norms), root, *leaves, readers, carriers)


def _post_norm(name: str) -> UserError:
    what = f"this model is post-LN, which has no rule: the residual stream itself passes through the norm '{name}'"
    return UserError(what, fix="use pre-norm blocks, x + f(norm(x)); for torch's encoder layer: norm_first=True")


Leaves = tuple[tuple[Leaf, ...], tuple[Leaf, ...], tuple[str, ...]]  # writers, entries, norms after the embedding


def _walk(root: Node, t: Trace, stacks: tuple[Stack, ...], named: Sequence[str] | None) -> tuple[Leaves, set[Node]]:
    """The terms of the stream that ends at `root`, sorted, and the nodes of the stream."""
    writers: list[Leaf] = []
    entries: list[Leaf] = []
    norms: list[str] = []
    todo = [root]
    sums: set[Node] = set()
    while todo:
        nodes = sums if not norms else set()  # nodes before an embedding norm are not the stream
        for leaf in stream_leaves(todo.pop(), t, nodes, opaque=named is not None):
            names = leaf.parameters or ((leaf.site,) if leaf.site else ())
            if any(in_stack(name, stacks) for name in names):
                writers.append(leaf)
            elif leaf.site is not None and is_norm(t.module(leaf.site)):
                norms.append(leaf.site)
                todo.append(t.node_before(leaf.site))
            else:
                _refuse_outer_matrix(leaf, t)
                entries.append(leaf)
    if not entries and not norms:
        raise _no_embedding(writers, t)
    if named is not None:
        writers = _named_writers(writers, named, t)
    _check_writers(writers, stacks)
    first = [t.nodes[norms[0]]] if len(norms) == 1 else [e.node for e in entries] if len(entries) == 1 else []
    return (tuple(writers), tuple(entries), tuple(norms)), sums | {node for node in first if node is not None}


def _no_embedding(writers: list[Leaf], t: Trace) -> UserError:
    if norm := next((w.site for w in writers if w.site and is_norm(t.module(w.site))), None):
        return _post_norm(norm)
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


def _refuse_outer_matrix(leaf: Leaf, t: Trace) -> None:
    """A linear layer outside the blocks may read the input. There is no rule for one that reads activations."""
    if leaf.site is not None and leaf.site in t.inputs and t.inputs[leaf.site].grad_fn is not None:
        what = f"'{leaf.site}' is a matrix outside the blocks, but neither input projection nor readout: it has no rule"
        raise UserError(what, fix="build the model without it (for OPT: word_embed_proj_dim = hidden_size)")


def _named_writers(leaves: list[Leaf], patterns: Sequence[str], t: Trace) -> list[Leaf]:
    """The writers that you named, instead of those in the graph; the proof checks them."""
    names = [n for n in t.parameters.values() if matches(n, patterns)]
    if not names:
        known = some(list(t.parameters.values()), 4)
        raise UserError(f"writers={patterns!r} match no parameter", fix=f"names look like: {known}")
    sites = {name: leaf.site for leaf in leaves for name in leaf.parameters}
    return [Leaf(sites.get(name), (name,)) for name in names]


def assign(d: Dissection, patterns: Mapping[str, Role], constants: Mapping[str, float]) -> dict[str, Part]:
    """The part of each parameter, by its name in the specimen.

    `constants` are the values of the parameters that the constructor filled with a single number.
    """
    parts: dict[str, Part] = {}
    unknown: dict[str, nn.Parameter] = {}
    unused = set(patterns)
    norms = {n: p for site, module in d.trace.model.named_modules() for n, p in _norm_parts(d, site, module).items()}
    for name, parameter in d.trace.model.named_parameters():
        part = norms.get(name) or _part(d, name, parameter)
        for pattern, role in patterns.items():
            if matches(name, (pattern,)):
                unused.discard(pattern)
                part = replace(part or Part(role, start=constants.get(name, 0.0)), role=role)
        if part is None:
            unknown[name] = parameter
        else:
            parts[name] = part
    if unused:
        known = some(list(d.trace.parameters.values()), 4)
        raise UserError(f"roles: no parameter matches {some(sorted(unused))}", fix=f"names look like: {known}")
    if unknown:
        raise _no_role(d, unknown)
    return parts


def _no_role(d: Dissection, unknown: Mapping[str, nn.Parameter]) -> UserError:
    """Lists all parameters without a role, with guesses to paste and correct."""
    guesses = {}
    for name, parameter in unknown.items():
        inside, kind = in_stack(name, d.stacks), type(d.trace.module(name.rpartition(".")[0])).__name__.lower()
        if parameter.dim() > 1:
            guess = Role.HIDDEN if inside else Role.EMBEDDING
        else:
            in_block = Role.BLOCK_NORM if "norm" in kind else Role.HIDDEN_BIAS
            guess = in_block if inside else Role.FINAL_NORM
        guesses[d.template(name)] = f"{d.template(name)!r}: Role.{guess.name}"
    what = f"{len(guesses)} parameters have no role: {some(list(guesses))}"
    return UserError(what, fix="name their roles, for example roles={" + ", ".join(list(guesses.values())[:6]) + "}")


def _part(d: Dissection, name: str, parameter: nn.Parameter) -> Part | None:
    owner, _, attribute = name.rpartition(".")
    module = d.trace.module(owner)
    if name == d.readout.bias:
        return Part(Role.UNEMBEDDING_BIAS)
    if in_stack(name, d.stacks):
        return _hidden_part(module, attribute, parameter)
    entry = next((leaf for leaf in d.entries if name in leaf.parameters), None)
    if entry is not None:
        return Part(Role.EMBEDDING_BIAS if attribute == "bias" and entry.site else Role.EMBEDDING)
    if name == d.readout.weight:
        axes = fan_in_axes(module, parameter.dim()) if d.readout.site else (width_axis(d),)
        return Part(Role.UNEMBEDDING, fan_in=axes)
    return None


def _hidden_part(module: nn.Module, attribute: str, parameter: nn.Parameter) -> Part | None:
    projections = ("in_proj", "q_proj", "k_proj", "v_proj")
    attention = isinstance(module, nn.MultiheadAttention) and attribute.startswith(projections)
    if not (is_linear(module) or is_convolution(module) or attention):
        return None
    if parameter.dim() == 1:
        return Part(Role.HIDDEN_BIAS)
    return Part(Role.HIDDEN, fan_in=fan_in_axes(module, parameter.dim()))


def width_axis(d: Dissection) -> int:
    """The axis of the readout's matrix that is as long as the stream is wide."""
    weight = d.trace.model.get_parameter(d.readout.weight)
    if d.readout.site is not None:
        return fan_in_axes(d.trace.module(d.readout.site), weight.dim())[0]
    if isinstance(d.trace.module(d.readout.weight.rpartition(".")[0]), nn.Embedding):
        return 1
    if weight.shape[0] == weight.shape[1]:
        what = f"'{d.readout.weight}' is a square bare readout: completep cannot tell which axis is the width"
        raise UserError(what, fix="use an nn.Linear for it")
    return next(axis for axis, n in enumerate(weight.shape) if n == d.root.shape[-1])


def _norm_parts(d: Dissection, site: str, module: nn.Module) -> dict[str, Part]:
    """The parts of a module's parameters, if it is a norm, is where the rules expect one, and really normalises."""
    outside = site in d.final_norms or site in d.entry_norms
    if not is_norm(module) or site not in d.trace.inputs or not (outside or in_stack(site, d.stacks)):
        return {}
    role = Role.FINAL_NORM if outside else Role.QK_NORM if _is_per_head(d, site, module) else Role.BLOCK_NORM
    vectors = _gains_and_biases(module, d.trace.inputs[site].detach())
    return {f"{site}.{name}": Part(role, start=start, offset=offset) for name, start, offset in vectors}


def _is_per_head(d: Dissection, site: str, module: nn.Module) -> bool:
    """A norm that acts on each head, with one gain for all heads, normalises more rows than there are tokens."""
    x, stream = d.trace.inputs[site], d.trace.inputs[d.readers[0]]
    length = max((p.numel() for p in module.parameters()), default=x.shape[-1])
    tokens = stream.numel() // stream.shape[-1]
    return x.dim() > stream.dim() or x.numel() // length > tokens


@torch.no_grad()
def _gains_and_biases(module: nn.Module, x: Tensor) -> list[tuple[str, float, float]]:
    """(name, start, offset) of a norm's vectors. They are measured, since norms differ in names and in w or 1 + w."""
    if not torch.allclose(module(x), module(3 * x), rtol=1e-2, atol=1e-2):
        return []
    saved = {name: p.detach().clone() for name, p in module.named_parameters()}
    vectors = []
    for p in module.parameters():
        p.zero_()
    at_zero = module(x)
    offset = 1.0 if at_zero.abs().max() > 1e-6 else 0.0
    for name, p in module.named_parameters():
        p.fill_(1.0)
        change = module(x) - at_zero
        p.zero_()
        if torch.allclose(change, torch.ones_like(change), atol=1e-5):
            vectors.append((name, 0.0, 0.0))  # it is added: a bias
        elif offset == 0.0 or torch.allclose(change, at_zero, rtol=1e-3, atol=1e-5):
            vectors.append((name, 1.0 - offset, offset))  # it multiplies, as w or as 1 + w: a gain
    for name, p in module.named_parameters():
        p.copy_(saved[name])
    return vectors
