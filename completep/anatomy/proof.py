"""The proof on numbers: a block writes to the stream with its writers only, and linearly.

With every writer at zero, each block must be the identity on the residual stream. So the stream must be the same before
every block and after the last one. With the writers of one branch restored, the stream must change, and twice as much
when they are doubled. Then scaling the writers scales the branches and nothing else, as the rules require.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from completep.anatomy.roles import Dissection, Part
from completep.anatomy.trace import Example, Trace, input_of, trace
from completep.errors import UserError, some

Parts = Mapping[str, Part]
TOLERANCE = 1e-4  # float32 rounding in a small model; a real leak is of order one


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


def prove(d: Dissection, parts: Parts, example: Example) -> dict[str, float]:
    """Check the roles. Returns the constant by which the model multiplies each embedding before the stream."""
    _check_readout(d)
    values = {name: d.trace.model.get_parameter(name).detach().clone() for name in d.writer_names}
    set_parameters_(d.trace.model, {name: -parts[name].offset for name in values})
    t = trace(d.trace.model, example)
    _check_stream(d, t)
    scales = _embedding_scales(d, t)  # first, since the next line changes parameters that this graph needs
    _check_branches(d, parts, values, example, t.inputs[d.stream_reader].detach())
    return scales


def _check_readout(d: Dissection) -> None:
    """Logits must be linear in the readout's input; otherwise a multiplier there means something else."""
    if d.readout.site is None:
        return
    module, x = d.trace.module(d.readout.site), d.trace.inputs[d.readout.site].detach()
    with torch.no_grad():
        zero, one, two = (module(k * x) for k in (0.0, 1.0, 2.0))
    if relative((two - zero) - 2 * (one - zero), one) > TOLERANCE:
        what = f"the readout '{d.readout.site}' is not linear in its input"
        raise UserError(what, fix="let forward end in an nn.Linear")


def _check_stream(d: Dissection, t: Trace) -> None:
    """Every module that reads or returns the stream must see the same stream. A bare branch returns nothing."""
    first = t.inputs[d.readers[0]]

    def difference(x: Tensor) -> float:  # a pooled stream has a different size and cannot be compared
        return relative(x.reshape(first.shape) - first, first) if x.numel() == first.numel() else 0.0

    for name in d.readers:
        if (size := difference(t.inputs[name])) > TOLERANCE:
            raise _leak(f"the stream before '{name}' is not what it was before '{d.readers[0]}'", size, d)
    for name in d.carriers:
        if (size := difference(t.outputs[name])) > TOLERANCE and relative(t.outputs[name], first) > TOLERANCE:
            raise _leak(f"'{name}' still changes the residual stream", size, d)
    if (size := difference(t.inputs[d.stream_reader])) > TOLERANCE:
        raise _leak("the stream after the last block is not what it was before the first", size, d)


def _leak(what: str, size: float, d: Dissection) -> UserError:
    writers = some(sorted({d.template(n) for n in d.writer_names}), 4)
    leak = f"with all writers ({writers}) at zero, {what}: the relative difference is {size:.2g}"
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
        added = []
        for k in (1.0, 2.0):
            set_parameters_(model, {n: k * (values[n] + parts[n].offset) - parts[n].offset for n in leaf.parameters})
            added.append(input_of(model, d.stream_reader, example)[0] - rest)
        set_parameters_(model, {n: -parts[n].offset for n in leaf.parameters})
        once, twice = added
        writers = ", ".join(leaf.parameters)
        if relative(once, rest) <= TOLERANCE:
            what = f"{writers}: named as a writer, but adds nothing to the stream without the others"
            raise UserError(what, fix="name only the parameters of the last operation of each branch")
        if relative(twice - 2 * once, once) > 10 * TOLERANCE:
            what = f"a branch is not linear in {writers}: doubling them does not double what it adds to the stream"
            fix = "end the branch in a plain linear layer or norm that is used once, with nothing after it"
            raise UserError(what, fix=fix)


def _embedding_scales(d: Dissection, t: Trace) -> dict[str, float]:
    tables = [e.parameters[0] for e in d.entries if e.site and isinstance(t.module(e.site), nn.Embedding)]
    if not tables or d.entry_norms:
        return dict.fromkeys(tables, 1.0)
    stream = t.inputs[d.stream_reader]
    try:
        grads = torch.autograd.grad(stream.sum(), [t.model.get_parameter(n) for n in tables])
    except RuntimeError as error:
        what = f"the backward pass fails on this model: {error}"
        fix = "make the model trainable first (a common cause is an in-place `x += f(x)` on the stream)"
        raise UserError(what, fix=fix) from error
    return {name: grad.sum().item() / stream.numel() for name, grad in zip(tables, grads, strict=True)}


def relative(difference: Tensor, reference: Tensor) -> float:
    return float(difference.detach().norm() / reference.detach().norm().clamp_min(1e-30))
