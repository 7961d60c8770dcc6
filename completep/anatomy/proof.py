"""The proof on numbers: a block writes to the stream with its writers only, and linearly.

With every writer at zero, each block must be the identity on the residual stream. So the stream must be the same before
every block and after the last one, in evaluation mode and in training mode. With the writers of one branch restored,
the stream must change, and twice as much when they are doubled. Then scaling the writers scales the branches and
nothing else, as the rules require.

Comparisons are written so that NaN fails them. Numbers that are not finite are an error of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from completep.anatomy.blocks import is_expert
from completep.anatomy.calls import Call
from completep.anatomy.dissect import Dissection
from completep.anatomy.modes import training_without_dropout
from completep.anatomy.names import plain
from completep.anatomy.readouts import Head
from completep.anatomy.roles import Part
from completep.anatomy.stream import Leaf, used_parameters
from completep.anatomy.trace import Example, Trace, stream_of, trace
from completep.errors import UserError, some

Parts = Mapping[str, Part]
TOLERANCE = 1e-4  # float32 rounding in a small model; a real leak is of order one


@dataclass(frozen=True)
class Proven:
    """What the proof measures on its way."""

    scales: dict[str, float]  # the constant by which the model multiplies each embedding before the stream
    unchecked: tuple[str, ...]  # what it could not look at


def randomise_(model: nn.Module, seed: int = 0) -> None:
    """Random numbers everywhere, so that zeros and ones from the constructor hide nothing."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # it would remove gradients that the proof needs
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * max(p[0].numel(), 1) ** -0.5 if p.dim() > 1 else 1 + 0.3 * noise)


@torch.no_grad()
def set_parameters_(model: nn.Module, values: Mapping[str, Tensor | float]) -> None:
    for name, value in values.items():
        parameter = model.get_parameter(name)
        parameter.copy_(value) if isinstance(value, Tensor) else parameter.fill_(value)


def set_stream_scales_(model: nn.Module, part: Callable[[str], Part]) -> None:
    """Numbers that multiply the stream take their first values, at which the stream passes unchanged."""
    starts: dict[str, Tensor | float] = {}
    for name, parameter in model.named_parameters():
        known = part(plain(name))
        if known.values is not None and len(known.values) == parameter.numel():
            starts[name] = torch.tensor(known.values).view_as(parameter)
        elif (
            known.values is not None and known.constant is not None
        ):  # one number per layer, in another number of layers
            starts[name] = known.constant
    set_parameters_(model, starts)


def prove(d: Dissection, parts: Parts, heads: Sequence[Head], example: Example) -> Proven:
    """Check the roles. `heads` are those of further results."""
    _refuse_nonfinite(d, d.trace, "with random parameters")
    _check_readouts([d.trace.made_by[h.readout.node] for h in (d.head, *heads) if h.readout.site])
    values = {name: d.trace.model.get_parameter(name).detach().clone() for name in d.writer_names}
    set_parameters_(d.trace.model, {name: -parts[name].offset for name in values})
    t = trace(d.trace.model, example)
    _check_stream(d, t, example)
    scales = _embedding_scales(d, t)  # first, since the next lines change parameters that this graph needs
    unchecked = _check_training_mode(d, example)
    _check_branches(d, parts, values, example, d.tap.seen(t).detach())
    return Proven(scales, unchecked)


def _check_readouts(calls: Sequence[Call]) -> None:
    """Logits must be linear in the readout's input; otherwise a multiplier there means something else."""
    for call in calls:
        assert call.given is not None
        x = call.given.detach()
        with torch.no_grad():
            zero, one, two = (call.again(k * x) for k in (0.0, 1.0, 2.0))
        if not relative((two - zero) - 2 * (one - zero), one) <= TOLERANCE:
            what = f"the readout '{call.site}' is not linear in its input"
            raise UserError(what, fix="let forward end in an nn.Linear")


def _refuse_nonfinite(d: Dissection, t: Trace, when: str) -> None:
    """NaN and inf prove nothing. The first module that returns them is named."""
    stream = [t.inputs[n] for n in d.readers] + [d.tap.seen(t)] + [t.outputs[n] for n in d.carriers]
    if all(tensor.isfinite().all() for tensor in (*stream, t.logits)):
        return
    name = next((n for n, tensor in t.outputs.items() if not tensor.isfinite().all()), None)
    source = "the logits" if name is None else f"the output of '{name}' ({type(t.module(name)).__name__})"
    what = f"{when}, {source} is not finite, so nothing can be proven"
    raise UserError(what, fix="let it return finite numbers, also for an input of zeros: a norm needs an eps")


def _check_stream(d: Dissection, t: Trace, example: Example, mode: str = "") -> None:
    """Every module that reads or returns the stream must see the same stream. A bare branch returns nothing."""
    _refuse_nonfinite(d, t, f"with all writers at zero{mode}")
    first = t.inputs[d.readers[0]]

    def difference(x: Tensor) -> float:  # a pooled stream has a different size and cannot be compared
        return relative(x.reshape(first.shape) - first, first) if x.numel() == first.numel() else 0.0

    def refuse(what: str, size: float) -> None:
        _refuse_noise(d, example, mode)
        raise _leak(what, size, d, mode)

    for name in d.readers:
        if not (size := difference(t.inputs[name])) <= TOLERANCE:
            refuse(f"the stream before '{name}' is not what it was before '{d.readers[0]}'", size)
    for name in d.carriers:
        if not (size := difference(t.outputs[name])) <= TOLERANCE and not relative(t.outputs[name], first) <= TOLERANCE:
            refuse(f"'{name}' still changes the residual stream", size)
    if not (size := difference(d.tap.seen(t))) <= TOLERANCE:
        refuse("the stream after the last block is not what it was before the first", size)


@torch.no_grad()
def _refuse_noise(d: Dissection, example: Example, mode: str = "") -> None:
    """Where the proof fails, the reason may be that two passes over one input differ."""
    with training_without_dropout(d.trace.model) if mode else nullcontext():
        one, two = (stream_of(d.trace.model, d.tap, example)[0] for _ in range(2))
    if torch.equal(one, two):
        return
    what = f"forward draws random numbers{mode or ' in evaluation mode'}, and they reach the residual stream: "
    places = "inside a branch or on the embedding, since noise on the stream adds up over depth"
    fix = f"remove the noise, or add it {places}" if mode else f"remove the noise, or add it only in training, {places}"
    raise UserError(f"{what}two passes over one input differ by {relative(two - one, one):.2g}", fix=fix)


def _check_training_mode(d: Dissection, example: Example) -> tuple[str, ...]:
    """A branch that runs only in training mode would have no multiplier."""
    try:
        with torch.random.fork_rng(devices=[]), training_without_dropout(d.trace.model):
            torch.default_generator.manual_seed(0)  # layers that are dropped at random are always the same ones
            t = trace(d.trace.model, example)
    except UserError as error:
        return (f"training mode, in which the model cannot be run on the example: {error.what}",)
    used = used_parameters(t) - used_parameters(d.trace)
    if more := sorted(name for name in used if not is_expert(name, d.stacks)):  # routing may choose other experts
        what = f"{some(more)} act on the logits in training mode only, so the proof cannot check them"
        raise UserError(what, fix="let forward do the same in both modes, except for dropout")
    last = d.tap.module(t.model)
    given = [*d.readers, *([] if d.tap.returned else [last])]
    returned = [*d.carriers, *([last] if d.tap.returned else [])]
    missing = [n for n in given if n not in t.inputs] + [n for n in returned if n not in t.outputs]
    if missing:
        return (f"training mode, in which {some(missing)} did not run",)
    _check_stream(d, t, example, " in training mode")
    return ()


def _leak(what: str, size: float, d: Dissection, mode: str) -> UserError:
    writers = some(sorted({d.template(n) for n in d.writer_names}), 4)
    leak = f"with all writers ({writers}) at zero{mode}, {what}: the relative difference is {size:.2g}"
    if mode:  # in evaluation mode these writers were complete, so training mode must differ
        return UserError(leak, fix="let forward do the same in both modes, except for dropout")
    return UserError(leak, fix="name all writers: writers=[…]; a block must be x + f(x), and not scale or normalise x")


@torch.no_grad()
def _check_branches(d: Dissection, parts: Parts, values: Mapping[str, Tensor], example: Example, rest: Tensor) -> None:
    """One branch at a time, with all others at zero: it must add something, and twice that when doubled."""
    model = d.trace.model
    checked: set[tuple[str, ...]] = set()
    for leaf in d.writers:
        kind = tuple(map(d.template, leaf.parameters))
        if kind in checked:  # its counterpart in another block runs the same code
            continue
        checked.add(kind)
        enders = _with_other_experts(leaf, d)
        added = []
        for k in (1.0, 2.0):
            set_parameters_(model, {n: k * (values[n] + parts[n].offset) - parts[n].offset for n in enders})
            added.append(stream_of(model, d.tap, example)[0] - rest)
        once, twice = added
        writers = ", ".join(leaf.parameters)
        linear = relative(twice - 2 * once, once) <= 10 * TOLERANCE
        if not linear:
            _refuse_noise(d, example)
        set_parameters_(model, {n: -parts[n].offset for n in enders})
        if not relative(once, rest) > TOLERANCE:
            what = f"{writers}: named as a writer, but adds nothing to the stream without the others"
            raise UserError(what, fix="name only the parameters of the last operation of each branch")
        if not linear:
            what = f"a branch is not linear in {writers}: doubling them does not double what it adds to the stream"
            fix = "end the branch in a plain linear layer or norm that is used once, with nothing after it"
            raise UserError(what, fix=fix)


def _with_other_experts(leaf: Leaf, d: Dissection) -> list[str]:
    """The parameters of a writer. The experts of a list are one branch: routing chooses which of them run."""
    if not any(is_expert(name, d.stacks) for name in leaf.parameters):
        return list(leaf.parameters)
    kind = {d.template(name) for name in leaf.parameters}
    block = next(s.pattern.match(name) for name in leaf.parameters for s in d.stacks if s.expert(name) is not None)
    assert block is not None
    return [name for name in d.writer_names if d.template(name) in kind and name.startswith(f"{block.group(0)}.")]


def _embedding_scales(d: Dissection, t: Trace) -> dict[str, float]:
    """By weight: the factor from a table or input projection into the stream."""
    entries = [e for e in d.entries if e.site and e.parameters]
    if not entries or d.normed_entry:  # a norm after the embedding hides its scale
        return {}
    stream = d.tap.seen(t)
    sources = [_source(e, t) for e in entries]
    try:
        grads = torch.autograd.grad(stream.sum(), sources)
    except RuntimeError as error:
        what = f"the backward pass fails on this model: {error}"
        fix = "make the model trainable first (a common cause is an in-place `x += f(x)` on the stream)"
        raise UserError(what, fix=fix) from error
    shares = [_share(t.outputs[e.site or ""], stream) for e in entries]
    return {e.parameters[0]: g.sum().item() / n for e, g, n in zip(entries, grads, shares, strict=True)}


def _share(made: Tensor, stream: Tensor) -> int:
    """How many numbers of the stream come from an entry: all, or its own if tokens of another kind stand beside it."""
    beside = made.dim() > 2 and made.shape[0] == stream.shape[0] and made.numel() < stream.numel()
    return made.numel() if beside else stream.numel()


def _source(entry: Leaf, t: Trace) -> Tensor:
    """The stream is linear in the rows of a table and in the output of an input projection."""
    assert entry.site is not None
    table = isinstance(t.module(entry.site), nn.Embedding)
    return t.model.get_parameter(entry.parameters[0]) if table else t.outputs[entry.site]


def relative(difference: Tensor, reference: Tensor) -> float:
    """The size of a difference. It is NaN if one of the numbers is not finite."""
    return float(difference.detach().norm() / reference.detach().norm().clamp_min(1e-30))
