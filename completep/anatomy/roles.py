"""The role of each parameter, from its module, its place in the stream, and your patterns.

A parameter without a role is an error that lists all of them: nothing is treated as something else.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from torch import Tensor, nn

from completep.anatomy.blocks import Stack, in_stack, is_expert, matches, template
from completep.anatomy.calls import Call
from completep.anatomy.dissect import Dissection
from completep.anatomy.kinds import fan_in_axes, is_convolution, is_linear
from completep.anatomy.norms import measure_vectors
from completep.anatomy.readouts import Head, Readout, head_of, linear_readout
from completep.anatomy.trace import Tap
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
    values: tuple[float, ...] | None = None  # of a stream scale: what the specimen's constructor fills it with
    experts: tuple[str, int] | None = None  # a parameter and its axis that count the matrices stored along the fan-in

    def folded(self, value: Value, c: float) -> Value:
        """An entry of a vector in the folded coordinates, w' = c·(w + offset) - offset."""
        return c * (value + self.offset) - self.offset


@dataclass(frozen=True)
class Site:
    """A place in the forward pass where a multiplier acts, and the parameters that can hold it instead."""

    module: str | None  # template of the module; None if the branch has no module at its end
    parameters: tuple[str, ...]  # templates


@dataclass(frozen=True)
class Outlet:
    """A readout: where the logit multiplier acts, and the parameters that can hold it instead."""

    module: str | None  # None if it is a product with a bare parameter
    weight: str
    axis: int  # of the weight, which the product sums over
    parameters: tuple[str, ...]  # the weight, or the norm before it if the weight is an embedding
    norm: str | None = None  # the norm that it reads, if nothing stands between


@dataclass(frozen=True)
class Anatomy:
    """Everything that the rules need to know about a model, in templates, so that it holds at any size."""

    stacks: tuple[Stack, ...]
    parts: Mapping[str, Part]
    branches: tuple[Site, ...]
    readout: Outlet
    heads: tuple[Outlet, ...]  # readouts of further results, such as a value
    readers: Mapping[str, str]  # weights that read a norm which holds a multiplier in the folded form → its gain
    norms: frozenset[str]  # modules that normalise their input
    tables: Mapping[str, float]  # weights of tables and input projections, each with its factor into the stream
    width: tuple[str, int]  # the parameter and axis that N is read from
    specimen_width: int
    final_norm: str | None  # the norm closest to the readout
    tap: Tap  # where the stream after the last block is seen
    tied: bool
    normed_entry: bool = False  # a norm follows the embedding
    unchecked: tuple[str, ...] = ()  # what the proof could not look at
    gates: frozenset[str] = frozenset()  # parameters that make factors on the branches, or on the logits
    conditions: frozenset[str] = frozenset()  # parameters that make shifts and scales for what the last norm returns

    @property
    def outlets(self) -> tuple[Outlet, ...]:
        return self.readout, *self.heads

    @property
    def blocks(self) -> tuple[Stack, ...]:
        """The stacks that are blocks."""
        return tuple(s for s in self.stacks if not s.side)

    @cached_property
    def _templates(self) -> dict[str, str]:
        """Cached, because few names are looked up many times."""
        return {}

    def template(self, name: str) -> str:
        if (known := self._templates.get(name)) is None:
            known = self._templates[name] = template(name, self.stacks)
        return known

    def part(self, name: str) -> Part:
        return self.parts[self.template(name)]

    @property
    def readout_rows(self) -> tuple[str, ...]:
        """The parameters with a row per logit."""
        biases = [name for name, part in self.parts.items() if part.role is Role.UNEMBEDDING_BIAS]
        return (*(o.weight for o in self.outlets), *biases) if all(o.axis == 1 for o in self.outlets) else ()

    def stack_of(self, name: str) -> Stack | None:
        return next((s for s in self.stacks if s.pattern.match(name)), None)


def assign(
    d: Dissection,
    patterns: Mapping[str, Role],
    constants: Mapping[str, float],
    deliberate: Collection[str] = (),
    values: Mapping[str, tuple[float, ...]] | None = None,
) -> dict[str, Part]:
    """The part of each parameter, by its name in the specimen.

    `constants` are the values of the parameters that the constructor filled with a single number, and `values` those of
    all short ones. Biases in `deliberate` start where the constructor put them.
    """
    values = values or {}
    parts: dict[str, Part] = {}
    unknown: dict[str, nn.Parameter] = {}
    unused = set(patterns)
    norms = {n: p for site, module in d.trace.model.named_modules() for n, p in _norm_parts(d, site, module).items()}
    for name, parameter in d.trace.model.named_parameters():
        part = norms.get(name) or _part(d, name, parameter)
        if part is not None and part.role is Role.STREAM_SCALE:
            part = replace(part, values=values.get(name))
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


def _given_part(d: Dissection, name: str, parameter: nn.Parameter, detected: Part | None, role: Role) -> Part:
    """The part of a parameter whose role you gave. If the table has no start for it, its constructor's values stay."""
    if role.trait.matrix and parameter.dim() < 2:
        vector = Role.BLOCK_NORM if in_stack(name, d.stacks) else Role.FINAL_NORM
        what = f"roles: '{name}' has shape {tuple(parameter.shape)}, but Role.{role.name} is for matrices"
        raise UserError(what, fix=f"use a role for vectors: roles={{'{d.template(name)}': Role.{vector.name}}}")
    _refuse_wrong_place(d, name, detected, role)
    if detected is not None:
        kept = detected.kept or role is Role.BLOCK_VECTOR or (detected.role.trait.matrix and not role.trait.matrix)
        return replace(detected, role=role, kept=kept)
    module = d.trace.module(name.rpartition(".")[0])
    if is_linear(module) or is_convolution(module):
        axes = fan_in_axes(module, parameter.dim()) if parameter.dim() > 1 else ()
        return Part(role, fan_in=axes, kept=parameter.dim() > 1 and not role.trait.matrix)
    return Part(role, fan_in=d.trace.summed[name] if role.trait.matrix else (), kept=not role.trait.matrix)


def _refuse_wrong_place(d: Dissection, name: str, detected: Part | None, role: Role) -> None:
    """A role fixes the place of a parameter and whether it is a matrix.

    Refuse a role that the forward pass contradicts.
    """
    if name not in d.used:
        return
    inside = in_stack(name, d.stacks)
    matrix = name in d.multiplied and d.trace.model.get_parameter(name).dim() > 1
    why = ""
    if inside and not role.trait.inside:
        why = "stands inside the blocks"
    elif matrix and not role.trait.matrix:
        why = "is multiplied with activations as a matrix"
    elif matrix and name in d.reading and not inside and role not in (Role.HEAD, Role.UNEMBEDDING):
        why = "is a matrix outside the blocks that reads activations"
    if why:
        right = detected.role if detected is not None else _guess(d, name, matrix)
        derived = "derive its rule: completep derive"
        way = derived if right is None or right is role else f"use Role.{right.name}"
        raise UserError(f"roles: '{name}' is given Role.{role.name}, but it {why}", fix=way)


def _common(constants: Mapping[str, float], name: str, d: Dissection) -> float | None:
    """The number that a parameter and its counterparts in all other blocks start at, if it is the same."""
    counterparts = [n for n in d.trace.parameters.values() if d.template(n) == d.template(name)]
    values = {constants.get(n) for n in counterparts}
    return values.pop() if len(values) == 1 else None


class NoRoleError(UserError):
    """Lists all parameters without a role, with guesses to paste and correct."""

    def __init__(self, guesses: Mapping[str, Role | None], idle: Collection[str] = ()) -> None:
        """`idle` are the templates of layers that forward does not use; no role can be guessed for them."""
        known = {template: role for template, role in guesses.items() if role is not None}
        pasted = [f"{template!r}: Role.{role.name}" for template, role in known.items()]
        what = f"{len(guesses)} parameters have no role: {some(list(guesses))}"
        fix = "name their roles, for example roles={" + ", ".join(pasted[:6]) + "}"
        if idle:
            what += f"; forward does not use {some(list(idle))}, so nothing shows what they are"
            fix = "let forward return the result of that layer, in evaluation and training mode, or remove the layer"
        if others := [template for template, role in guesses.items() if role is None and template not in idle]:
            what += f"; {some(others)} make a result that does not come from the stream after the last block"
            fix = "let that result read the stream after the last block, or leave it out of the model"
        super().__init__(what, fix=fix)
        self.guesses = known if len(known) == len(guesses) else {}  # by template


def _no_role(d: Dissection, unknown: Mapping[str, nn.Parameter]) -> NoRoleError:
    guesses: dict[str, Role | None] = {}
    idle = dict.fromkeys(d.template(name) for name in unknown if _is_idle(d, name))
    for name, parameter in unknown.items():
        matrix = parameter.dim() > 1 and (name in d.multiplied or not in_stack(name, d.stacks))
        guesses[d.template(name)] = _guess(d, name, matrix)
    return NoRoleError(guesses, idle)


def _is_idle(d: Dissection, name: str) -> bool:
    """True for a linear layer outside the blocks that forward does not use: it may be a head, as for a value."""
    linear = is_linear(d.trace.module(name.rpartition(".")[0]))
    return linear and name not in d.used and not in_stack(name, d.stacks)


def _guess(d: Dissection, name: str, matrix: bool) -> Role | None:
    """A role that fits the place and use of a parameter. All vectors inside a block have the same rule."""
    if in_stack(name, d.stacks):
        multiplies = type(d.trace.module(name.rpartition(".")[0])).__name__.lower()
        return Role.HIDDEN if matrix else Role.BLOCK_NORM if "norm" in multiplies else Role.HIDDEN_BIAS
    if (name in d.used and name not in d.known) or _is_idle(d, name):
        return None
    if matrix:
        return Role.HEAD if name in d.multiplied and name in d.reading else Role.EMBEDDING
    return Role.FINAL_NORM


def further_heads(d: Dissection, parts: Mapping[str, Part]) -> list[Head]:
    """The heads of further results, with those that you named. All must read the stream after the last block."""
    heads = list(d.heads)
    known = {head.readout.weight for head in (d.head, *heads)}
    for name, part in parts.items():
        if part.role is not Role.UNEMBEDDING or name in known:
            continue
        site = name.rpartition(".")[0]
        readout = linear_readout(site, d.trace)
        head = None if readout is None else head_of(readout, d.head, d.trace, d.stacks)
        if head is None:
            what = f"roles: '{name}' is given Role.UNEMBEDDING, but '{site}' does not read the stream after the blocks"
            raise UserError(what, fix="use an nn.Linear that reads the stream after the last block, or another role")
        heads.append(head)
    return heads


def _part(d: Dissection, name: str, parameter: nn.Parameter) -> Part | None:
    if any(name in (head.readout.bias, head.readout.scale) for head in (d.head, *d.heads)):
        return Part(Role.UNEMBEDDING_BIAS, kept=not any(name == head.readout.bias for head in (d.head, *d.heads)))
    if name in d.scales:
        return Part(Role.STREAM_SCALE, kept=True)
    owner, _, attribute = name.rpartition(".")
    module = d.trace.module(owner)
    if in_stack(name, d.stacks):
        if isinstance(module, nn.Embedding):
            return Part(Role.BLOCK_TABLE)
        part = _expert_part(d, name, parameter) or _hidden_part(module, attribute, parameter)
        return Part(Role.BLOCK_VECTOR, kept=True) if part is None and name in d.elementwise else part
    return _outer_part(d, name, parameter) if name in d.known else None


def _outer_part(d: Dissection, name: str, parameter: nn.Parameter) -> Part | None:
    """The part of a parameter outside the blocks: a matrix that reads activations, a table, or an unembedding."""
    owner, _, attribute = name.rpartition(".")
    module = d.trace.module(owner)
    readout = next((head.readout for head in (d.head, *d.heads) if head.readout.weight == name), None)
    entry = next((leaf for leaf in d.entries if name in leaf.parameters), None)
    if readout is not None and entry is None and not isinstance(module, nn.Embedding):
        return Part(Role.UNEMBEDDING, fan_in=(readout_axis(d, readout),))
    if is_linear(module) and f"{owner}.weight" in d.reading:
        matrix = parameter.dim() > 1
        return Part(Role.HEAD, fan_in=fan_in_axes(module, parameter.dim())) if matrix else Part(Role.HEAD_BIAS)
    if entry is not None:
        return Part(Role.EMBEDDING_BIAS if attribute == "bias" and entry.site else Role.EMBEDDING)
    if isinstance(module, nn.Embedding) or is_linear(module):  # of a condition, which does not enter the stream itself
        return Part(Role.EMBEDDING if parameter.dim() > 1 else Role.EMBEDDING_BIAS)
    return None


def _expert_part(d: Dissection, name: str, parameter: nn.Parameter) -> Part | None:
    """The parts of a mixture of experts: tensors that hold a matrix or a bias per expert, and the router.

    A router is a matrix beside the experts that makes one number per expert.
    """
    if is_expert(name, d.stacks) and parameter.dim() == 2 and is_linear(d.trace.module(name.rpartition(".")[0])):
        return Part(Role.EXPERT, fan_in=_fan_in(d, name))
    if name in d.trace.stacked:
        return _stacked_part(d, name)
    holder = name.rpartition(".")[0]
    counts = {s.count for n, s in d.trace.stacked.items() if n.startswith(f"{holder}.")}
    if parameter.dim() == 2 and parameter.shape[0] in counts and not d.trace.summed[name]:
        return Part(Role.HIDDEN_BIAS)
    if _is_router(d, name):
        return Part(Role.ROUTER, fan_in=_fan_in(d, name))
    return Part(Role.HIDDEN_BIAS) if parameter.dim() == 1 and parameter.numel() in _beside(d, name) else None


def _stacked_part(d: Dissection, name: str) -> Part | None:
    """A parameter that holds several matrices. They are experts if a router stands beside them."""
    stacking, axes = d.trace.stacked[name], d.trace.summed[name]
    if stacking.added and axes:  # one matrix, whose fan-in has another axis
        return Part(Role.HIDDEN, fan_in=tuple(sorted({*axes, *([0] if stacking.dimensions == 3 else [])})))
    if stacking.count == 1:
        what = f"'{name}' holds one matrix where larger models hold several, so it cannot be seen whether those add up"
        raise UserError(what, fix="use a base with at least two of them: two heads, or two experts")
    routers = [n for n in d.trace.parameters.values() if _parent(n) == _parent(name) and _is_router(d, n)]
    counted = [n for n in routers if stacking.count in d.trace.model.get_parameter(n).shape]
    if stacking.flat is None:
        return Part(Role.EXPERT if routers else Role.HIDDEN, fan_in=axes) if axes else None
    if not counted:
        what = f"'{name}' holds {stacking.count} matrices one after the other along the axis that its products sum over"
        fix = "store them in a tensor with three axes, so that every size shows how many there are"
        raise UserError(what, fix=fix)
    router = counted[0]
    return Part(Role.EXPERT, fan_in=axes, experts=(d.template(router), 1 - _fan_in(d, router)[0]))


def _is_router(d: Dissection, name: str) -> bool:
    shape, axes = d.trace.model.get_parameter(name).shape, _fan_in(d, name)
    return len(shape) == 2 and len(axes) == 1 and shape[1 - axes[0]] in _beside(d, name)


def _fan_in(d: Dissection, name: str) -> tuple[int, ...]:
    module = d.trace.module(name.rpartition(".")[0])
    return fan_in_axes(module, 2) if is_linear(module) else d.trace.summed[name]


def _beside(d: Dissection, name: str) -> set[int]:
    """The numbers of experts in the modules beside that of a parameter: in stacked tensors and in lists."""
    family = _parent(name)
    stacked = {s.count for n, s in d.trace.stacked.items() if _parent(n) == family and s.count > 1 and not s.added}
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


def width_of(d: Dissection) -> tuple[str, int]:
    """The parameter and its axis that are as long as the stream is wide: of what reads the stream first."""
    if d.head.layers:
        module = d.trace.module(d.head.layers[-1])
        return d.trace.parameters[id(module.weight)], fan_in_axes(module, 2)[0]
    return d.readout.weight, readout_axis(d, d.readout)


def readout_axis(d: Dissection, readout: Readout) -> int:
    """The axis of a readout's matrix that its product sums over."""
    weight = d.trace.model.get_parameter(readout.weight)
    if readout.site is not None:
        return fan_in_axes(d.trace.module(readout.site), weight.dim())[0]
    if isinstance(d.trace.module(readout.weight.rpartition(".")[0]), nn.Embedding):
        return 1
    if len(axes := d.trace.summed[readout.weight]) == 1:
        return axes[0]
    if weight.shape[0] == weight.shape[1]:
        what = f"'{readout.weight}' is a square bare readout: completep cannot tell which axis is the width"
        raise UserError(what, fix="use an nn.Linear for it")
    return next(axis for axis, n in enumerate(weight.shape) if n == d.head.root.shape[-1])


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
    x, stream = call.made, d.stream
    gains = list(call.module.parameters())
    if any(gain.dim() > 1 for gain in gains):  # every head has its own gains
        return False
    length = max((gain.numel() for gain in gains), default=x.shape[-1])
    tokens = stream.numel() // stream.shape[-1]
    return x.dim() > stream.dim() or x.numel() // length > tokens
