"""The role of each parameter, from its module, its place in the stream, and your patterns.

A parameter without a role is an error that lists all of them: nothing is treated as something else.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from torch import Tensor, nn
from torch.autograd.graph import Node

from completep.anatomy.blocks import Stack, find_stacks, in_stack, is_expert, matches, template
from completep.anatomy.calls import Call
from completep.anatomy.kinds import fan_in_axes, is_convolution, is_linear
from completep.anatomy.norms import measure_vectors
from completep.anatomy.stream import (
    Leaf,
    Readout,
    activation_of,
    elementwise_parameters,
    find_readout,
    first_product,
    held,
    is_readable,
    multiplied_parameters,
    norms_before,
    op,
    passes,
    refuse_unreadable,
    sources,
    stream_leaves,
)
from completep.anatomy.trace import Example, Trace, trace
from completep.errors import UserError, some
from completep.rules.table import Role

Value = TypeVar("Value", float, Tensor)


@dataclass(frozen=True)
class Part:
    """What one parameter is, and what its counterparts in all other blocks are."""

    role: Role
    fan_in: tuple[int, ...] = ()  # the axes that a matrix sums over; none for vectors and tables
    start: float = 0.0  # the value that a vector starts at: 1 for a gain, 0 for a bias
    offset: float = 0.0  # 1 where the model uses (1 + gain), as Gemma does
    kept: bool = False  # the table has no start for it, so it keeps the values of its constructor
    constant: float | None = None  # what the specimen's constructor fills a kept part with, if that is one number

    def folded(self, value: Value, c: float) -> Value:
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
    heads: tuple[Site, ...]  # further readouts that you named, such as a value head
    norms: frozenset[str]  # modules that normalise their input
    tables: Mapping[str, float]  # weights of tables and input projections, each with its factor into the stream
    width: tuple[str, int]  # the parameter and axis that N is read from
    specimen_width: int
    final_norm: str | None  # the norm closest to the readout
    stream_reader: str  # the module whose input is the stream after the last block
    tied: bool
    unchecked: tuple[str, ...] = ()  # what the proof could not look at
    gates: frozenset[str] = frozenset()  # parameters that make factors on the branches

    def template(self, name: str) -> str:
        return template(name, self.stacks)

    def part(self, name: str) -> Part:
        return self.parts[self.template(name)]

    @property
    def readout_rows(self) -> tuple[str, ...]:
        """The parameters with a row per logit."""
        weight, width_axis = self.width
        biases = [name for name, part in self.parts.items() if part.role is Role.UNEMBEDDING_BIAS]
        return (weight, *biases) if width_axis == 1 else ()

    def stack_of(self, name: str) -> Stack | None:
        return next((s for s in self.stacks if s.pattern.match(name)), None)


@dataclass(frozen=True)
class Dissection:
    """What one run of a specimen shows, under the specimen's own parameter names."""

    trace: Trace
    stacks: tuple[Stack, ...]
    readout: Readout
    final_norms: tuple[str, ...]
    head_layers: tuple[str, ...]  # linear layers between the stream and the readout, nearest to the readout first
    stream_reader: str  # the module whose input is the stream after the last block
    root: Tensor  # the stream after the last block, pooled if the model pools before its final norm
    writers: tuple[Leaf, ...]
    entries: tuple[Leaf, ...]  # embeddings and input projections
    entry_norms: tuple[str, ...]
    readers: tuple[str, ...]  # modules that are given the stream, in the order in which they run
    carriers: tuple[str, ...]  # modules that return the stream or a part of it

    @cached_property
    def elementwise(self) -> set[str]:
        """The parameters of blocks that act entry by entry."""
        return elementwise_parameters(self.trace, self.stacks)

    @cached_property
    def multiplied(self) -> set[str]:
        """The parameters that are factors of a matrix product."""
        return multiplied_parameters(self.trace)

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
    readout = find_readout(t)
    head = _head(readout, t, stacks)
    if not head.norms and not head.layers and readout.site is None:
        what = "the readout is a bare matrix product without a norm before it: its input is not the input of any module"
        raise UserError(what, fix="use nn.Linear for the readout")
    root = t.inputs[head.reader]
    assert root.grad_fn is not None
    leaves, sums = _walk(root.grad_fn, t, stacks, writers)
    inner = [n for n in t.outputs if in_stack(n, stacks)]
    inner.sort(key=lambda n: not any(s.pattern.fullmatch(n) for s in stacks))  # errors should name whole blocks first
    readers = tuple(n for n in inner if n in t.inputs and t.inputs[n].grad_fn in sums)
    carriers = tuple(n for n in inner if t.nodes[n] in sums)
    found = (readout, head.norms, head.layers, head.reader, root)
    return Dissection(t, stacks, *found, *leaves, readers, carriers)


@dataclass(frozen=True)
class Head:
    """What stands between the stream and the readout: norms, and layers with activations, nearest to the readout first.

    The MLM head of ModernBERT is norm → layer → GELU → norm → readout.
    """

    norms: tuple[str, ...]
    layers: tuple[str, ...]
    reader: str  # the module that is given the stream


def _head(readout: Readout, t: Trace, stacks: tuple[Stack, ...]) -> Head:
    norms: list[Call] = []
    layers: list[str] = []
    node, reader = activation_of(readout, t), readout.site or ""
    while True:
        norms += (more := norms_before(node, t))
        if inside := [call.site for call in more if in_stack(call.site, stacks)]:
            raise _post_norm(inside[0])
        reader = more[-1].site if more else reader
        root = node if not more else more[-1].node_before()
        layer = _layer_of_head(root, t, stacks)
        if layer is None:
            return Head(tuple(call.site for call in norms), tuple(layers), reader)
        layers.append(layer)
        node, reader = _call_of(layer, t).node_before(), layer


def _layer_of_head(root: Node, t: Trace, stacks: tuple[Stack, ...]) -> str | None:
    """The linear layer whose output an activation follows, if that stands here and not the stream."""
    if passes(root) or op(root) in ("Add", "Sub") or root in t.made_by:
        return None
    layer = first_product(root, t)
    if layer is None or in_stack(layer, stacks) or not is_linear(t.module(layer)):
        return None
    return layer if t.inputs[layer].grad_fn is not None else None


def _call_of(site: str, t: Trace) -> Call:
    return next(call for call in t.made_by.values() if call.site == site)


def _post_norm(name: str) -> UserError:
    what = f"this model is post-LN, which has no rule: the residual stream itself passes through the norm '{name}'"
    return UserError(what, fix="use pre-norm blocks, x + f(norm(x)); for torch's encoder layer: norm_first=True")


Leaves = tuple[tuple[Leaf, ...], tuple[Leaf, ...], tuple[str, ...]]  # writers, entries, norms after the embedding


def _walk(root: Node, t: Trace, stacks: tuple[Stack, ...], named: Sequence[str] | None) -> tuple[Leaves, set[Node]]:
    """The terms of the stream that ends at `root`, sorted, and the nodes of the stream."""
    writers: list[Leaf] = []
    entries: list[Leaf] = []
    norms: dict[Node, Call] = {}
    todo = [root]
    sums: set[Node] = set()
    while todo:
        nodes = sums if not norms else set()  # nodes before an embedding norm are not the stream
        for leaf in stream_leaves(todo.pop(), t, nodes):
            names = leaf.parameters or ((leaf.site,) if leaf.site else ())
            if not is_readable(leaf, t) or any(in_stack(name, stacks) for name in names):
                writers.append(leaf)
            elif leaf.site in t.norms and leaf.node is not None:
                norms[leaf.node] = t.made_by[leaf.node]
                todo.append(norms[leaf.node].node_before())
            else:
                _refuse_outer_matrix(leaf, t)
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
    return (tuple(writers), tuple(entries), tuple(call.site for call in norms.values())), stream


def _idle_experts(writers: list[Leaf], t: Trace, stacks: tuple[Stack, ...]) -> list[Leaf]:
    """The ends of experts in a list that the example was not routed to: they are those of the others."""
    known = {leaf.site for leaf in writers}
    ends = {template(leaf.site, stacks): leaf for leaf in writers if leaf.site and is_expert(leaf.site, stacks)}
    idle = []
    for name, module in t.model.named_modules():
        if name not in known and is_expert(name, stacks) and template(name, stacks) in ends:
            own = tuple(t.parameters[id(p)] for p in module.parameters(recurse=False))
            idle.append(Leaf(name, own, gates=ends[template(name, stacks)].gates))
    return idle


def _refuse_outer_gates(writers: list[Leaf], stacks: tuple[Stack, ...]) -> None:
    """The gradient of a gate that all blocks share sums over depth, and no rule covers that."""
    for name in (name for leaf in writers for name in leaf.gates):
        if not in_stack(name, stacks):
            what = f"'{name}' stands outside the blocks and multiplies their branches, so its gradient sums over depth"
            raise UserError(what, fix="give every block a gate of its own")


def _no_embedding(writers: list[Leaf], t: Trace) -> UserError:
    if norm := next((w.site for w in writers if w.site in t.norms), None):
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


def assign(
    d: Dissection, patterns: Mapping[str, Role], constants: Mapping[str, float], deliberate: Collection[str] = ()
) -> dict[str, Part]:
    """The part of each parameter, by its name in the specimen.

    `constants` are the values of the parameters that the constructor filled with a single number. Biases in
    `deliberate` start where the constructor put them.
    """
    parts: dict[str, Part] = {}
    unknown: dict[str, nn.Parameter] = {}
    unused = set(patterns)
    norms = {n: p for site, module in d.trace.model.named_modules() for n, p in _norm_parts(d, site, module).items()}
    for name, parameter in d.trace.model.named_parameters():
        part = norms.get(name) or _part(d, name, parameter)
        if part is not None and part.role is Role.HIDDEN_BIAS and name in deliberate:
            part = replace(part, kept=True)
        given = {pattern: role for pattern, role in patterns.items() if matches(name, (pattern,))}
        unused -= given.keys()
        if given:
            part = _given_part(d, name, parameter, part, list(given.values())[-1])
        if part is not None and part.kept:
            part = replace(part, constant=_common(constants, name, d))
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


def _given_part(d: Dissection, name: str, parameter: nn.Parameter, found: Part | None, role: Role) -> Part:
    """The part of a parameter whose role you gave. If the table has no start for it, its constructor's values stay."""
    if role.trait.matrix and parameter.dim() < 2:
        vector = Role.BLOCK_NORM if in_stack(name, d.stacks) else Role.FINAL_NORM
        what = f"roles: '{name}' has shape {tuple(parameter.shape)}, but Role.{role.name} is for matrices"
        raise UserError(what, fix=f"use a role for vectors: roles={{'{d.template(name)}': Role.{vector.name}}}")
    if found is not None:
        kept = found.kept or role is Role.BLOCK_VECTOR or (found.role.trait.matrix and not role.trait.matrix)
        return replace(found, role=role, kept=kept)
    module = d.trace.module(name.rpartition(".")[0])
    if is_linear(module) or is_convolution(module):
        axes = fan_in_axes(module, parameter.dim()) if parameter.dim() > 1 else ()
        return Part(role, fan_in=axes, kept=parameter.dim() > 1 and not role.trait.matrix)
    return Part(role, fan_in=d.trace.summed[name] if role.trait.matrix else (), kept=not role.trait.matrix)


def _common(constants: Mapping[str, float], name: str, d: Dissection) -> float | None:
    """The number that a parameter and its counterparts in all other blocks start at, if it is the same."""
    counterparts = [n for n in d.trace.parameters.values() if d.template(n) == d.template(name)]
    values = {constants.get(n) for n in counterparts}
    return values.pop() if len(values) == 1 else None


class NoRoleError(UserError):
    """Lists all parameters without a role, with guesses to paste and correct."""

    def __init__(self, guesses: Mapping[str, Role]) -> None:
        pasted = [f"{template!r}: Role.{role.name}" for template, role in guesses.items()]
        what = f"{len(guesses)} parameters have no role: {some(list(guesses))}"
        super().__init__(what, fix="name their roles, for example roles={" + ", ".join(pasted[:6]) + "}")
        self.guesses = dict(guesses)  # by template


def _no_role(d: Dissection, unknown: Mapping[str, nn.Parameter]) -> NoRoleError:
    guesses: dict[str, Role] = {}
    for name, parameter in unknown.items():
        matrix = parameter.dim() > 1 and (name in d.multiplied or not in_stack(name, d.stacks))
        guesses[d.template(name)] = _guess(d, name, matrix)
    return NoRoleError(guesses)


def _guess(d: Dissection, name: str, matrix: bool) -> Role:
    """A role that fits the place and use of a parameter. All vectors inside a block have the same rule."""
    if in_stack(name, d.stacks):
        multiplies = type(d.trace.module(name.rpartition(".")[0])).__name__.lower()
        return Role.HIDDEN if matrix else Role.BLOCK_NORM if "norm" in multiplies else Role.HIDDEN_BIAS
    if reads_final_stream(d, name.rpartition(".")[0]):
        return Role.UNEMBEDDING if matrix else Role.UNEMBEDDING_BIAS
    return Role.EMBEDDING if matrix else Role.FINAL_NORM


def further_heads(d: Dissection, parts: Mapping[str, Part]) -> list[Call]:
    """The layers beside the readout that you named as unembeddings. They must read what the readout reads."""
    heads = []
    for name, part in parts.items():
        if part.role is not Role.UNEMBEDDING or name == d.readout.weight:
            continue
        site = name.rpartition(".")[0]
        if not reads_final_stream(d, site):
            what = f"roles: '{name}' is given Role.UNEMBEDDING, but '{site}' does not read what the readout reads"
            raise UserError(what, fix="use an nn.Linear that reads the stream after the final norm, or another role")
        heads.append(next(call for call in d.trace.made_by.values() if call.site == site))
    return heads


def reads_final_stream(d: Dissection, site: str) -> bool:
    """True if a linear layer reads what the readout reads: the stream after the last block and the final norm."""
    if site not in d.trace.inputs or not is_linear(d.trace.module(site)):
        return False
    node = d.trace.inputs[site].grad_fn
    return node is not None and bool(sources(node) & sources(activation_of(d.readout, d.trace)))


def _part(d: Dissection, name: str, parameter: nn.Parameter) -> Part | None:
    owner, _, attribute = name.rpartition(".")
    module = d.trace.module(owner)
    if name == d.readout.bias:
        return Part(Role.UNEMBEDDING_BIAS)
    if in_stack(name, d.stacks):
        found = _expert_part(d, name, parameter) or _hidden_part(module, attribute, parameter)
        return Part(Role.BLOCK_VECTOR, kept=True) if found is None and name in d.elementwise else found
    if owner in d.head_layers:
        matrix = parameter.dim() > 1
        return Part(Role.HEAD, fan_in=fan_in_axes(module, parameter.dim())) if matrix else Part(Role.HEAD_BIAS)
    entry = next((leaf for leaf in d.entries if name in leaf.parameters), None)
    if entry is not None:
        return Part(Role.EMBEDDING_BIAS if attribute == "bias" and entry.site else Role.EMBEDDING)
    if name == d.readout.weight:
        axes = fan_in_axes(module, parameter.dim()) if d.readout.site else (width_axis(d),)
        return Part(Role.UNEMBEDDING, fan_in=axes)
    return None


def _expert_part(d: Dissection, name: str, parameter: nn.Parameter) -> Part | None:
    """The parts of a mixture of experts: tensors that stack a matrix or a bias per expert, and the router.

    A router is a matrix beside the experts that makes one number per expert.
    """
    if is_expert(name, d.stacks) and parameter.dim() == 2 and is_linear(d.trace.module(name.rpartition(".")[0])):
        return Part(Role.EXPERT, fan_in=_fan_in(d, name))
    if name in d.trace.experts:
        axes = d.trace.summed[name]
        routed = any(_is_router(d, n) for n in d.trace.parameters.values() if _parent(n) == _parent(name))
        return Part(Role.EXPERT if routed else Role.HIDDEN, fan_in=axes) if axes else None
    holder = name.rpartition(".")[0]
    counts = {d.trace.model.get_parameter(n).shape[a] for n, a in d.trace.experts.items() if n.startswith(f"{holder}.")}
    if parameter.dim() == 2 and parameter.shape[0] in counts and not d.trace.summed[name]:
        return Part(Role.HIDDEN_BIAS)
    if _is_router(d, name):
        return Part(Role.ROUTER, fan_in=_fan_in(d, name))
    return Part(Role.HIDDEN_BIAS) if parameter.dim() == 1 and parameter.numel() in _beside(d, name) else None


def _is_router(d: Dissection, name: str) -> bool:
    shape, axes = d.trace.model.get_parameter(name).shape, _fan_in(d, name)
    return len(shape) == 2 and len(axes) == 1 and shape[1 - axes[0]] in _beside(d, name)


def _fan_in(d: Dissection, name: str) -> tuple[int, ...]:
    module = d.trace.module(name.rpartition(".")[0])
    return fan_in_axes(module, 2) if is_linear(module) else d.trace.summed[name]


def _beside(d: Dissection, name: str) -> set[int]:
    """The numbers of experts in the modules beside that of a parameter: in stacked tensors and in lists."""
    family = _parent(name)
    stacked = {d.trace.model.get_parameter(n).shape[a] for n, a in d.trace.experts.items() if _parent(n) == family}
    lists = [f"{s.stem}{m.group(1)}.{e}" for s in d.stacks if (m := s.pattern.match(name)) for e in s.lists]
    counts = {
        sum(module.startswith(e) and module[len(e) :].isdecimal() for module, _ in d.trace.model.named_modules())
        for e in lists
        if _parent(e) == family
    }
    return stacked | (counts - {0})


def _parent(name: str) -> str:
    """The module that holds the module of a parameter."""
    return name.rpartition(".")[0].rpartition(".")[0]


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
    """The parts of a module's parameters, if it is a norm and is where the rules expect one."""
    outside = site in d.final_norms or site in d.entry_norms
    if site not in d.trace.norms or not (outside or in_stack(site, d.stacks)):
        return {}
    call = next(call for call in d.trace.made_by.values() if call.site == site)
    role = Role.FINAL_NORM if outside else Role.QK_NORM if _is_per_head(d, call) else Role.BLOCK_NORM
    return {f"{site}.{v.name}": Part(role, start=v.start, offset=v.offset) for v in measure_vectors(call)}


def _is_per_head(d: Dissection, call: Call) -> bool:
    """A norm that acts on each head, with one gain for all heads, normalises more rows than there are tokens."""
    x, stream = call.made, d.trace.inputs[d.readers[0]]
    gains = list(call.module.parameters())
    if any(gain.dim() > 1 for gain in gains):  # every head has its own gains
        return False
    length = max((gain.numel() for gain in gains), default=x.shape[-1])
    tokens = stream.numel() // stream.shape[-1]
    return x.dim() > stream.dim() or x.numel() // length > tokens
