"""The proof on numbers: the writers are all that a block writes with, and what it writes is linear in them.

With every writer at zero, each block must be the identity on the residual stream, and the stream must be the same before every
block and after the last. With one branch's writers back, the stream must move, and move twice as far when they are doubled.
Then scaling the writers scales the branches and nothing else, which is what the rules ask for. If not, the error says where.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from completep.errors import UserError
from completep.rules import anatomy
from completep.rules.roles import Findings, Part

TOLERANCE = 1e-4  # float32 rounding through a small model; a real leak is of order one


def randomise_(model: nn.Module, seed: int = 0) -> None:
    """Generic numbers everywhere, so that nothing is hidden by a zero or a one that a constructor put there."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # it would swallow gradients that the proof looks at
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * max(p[0].numel(), 1) ** -0.5 if p.dim() > 1 else 1 + 0.3 * noise)


@torch.no_grad()
def set_writers_(model: nn.Module, values: "Mapping[str, Tensor | float]") -> None:
    for name, value in values.items():
        parameter = model.get_parameter(name)
        parameter.copy_(value) if isinstance(value, Tensor) else parameter.fill_(value)


@contextmanager
def zeroed(model: nn.Module, parts: Mapping[str, Part], names: "list[str]") -> Iterator[dict[str, Tensor]]:
    """The model with these parameters acting as zero; gives their real values and puts them back."""
    saved = {name: model.get_parameter(name).detach().clone() for name in names}
    set_writers_(model, {name: -parts[name].offset for name in names})
    try:
        yield saved
    finally:
        set_writers_(model, saved)


def prove(f: Findings, parts: dict[str, Part], example: Any) -> dict[str, float]:
    """Returns by what constant the model multiplies each embedding on its way into the stream."""
    readout_is_linear(f)
    with zeroed(f.trace.model, parts, f.writer_names) as values:
        t = anatomy.trace(f.trace.model, example)
        stream_is_untouched(f, t)
        scales = embedding_scales(f, t)
        branches_are_linear(f, parts, values, example, t.inputs[f.stream_reader].detach())
    return scales


def stream_is_untouched(f: Findings, t: anatomy.Trace) -> None:
    """Wherever a module reads the stream or gives it out, it is the same stream; a bare branch gives out nothing."""
    first = t.inputs[f.readers[0]]

    def off(x: Tensor) -> float:  # a pooled stream has another size, and cannot be compared
        return relative(x.reshape(first.shape) - first, first) if x.numel() == first.numel() else 0.0

    for name in f.readers:
        if (size := off(t.inputs[name])) > TOLERANCE:
            raise leaked(f"the stream before '{name}' is not what it was before '{f.readers[0]}'", size, f)
    for name in f.carriers:
        if (size := off(t.outputs[name])) > TOLERANCE and relative(t.outputs[name], first) > TOLERANCE:
            raise leaked(f"'{name}' still changes the residual stream", size, f)
    if (size := off(t.inputs[f.stream_reader])) > TOLERANCE:
        raise leaked("the stream after the last block is not what it was before the first", size, f)


def leaked(what: str, size: float, f: Findings) -> UserError:
    return UserError(
        f"with all writers zeroed, {what}: it differs by {size:.2g}, relative to the stream; "
        f"the writers are {', '.join(sorted({f.template(n) for n in f.writer_names})[:4])}",
        fix="name every parameter that writes last into a branch: writers=[…]; a block must be x + f(x), with nothing scaled, "
        "replaced or normed on the way",
    )


@torch.no_grad()
def branches_are_linear(
    f: Findings, parts: dict[str, Part], values: dict[str, Tensor], example: Any, rest: Tensor
) -> None:
    """One branch at a time, all others at zero: what it adds must be there, and double with its writers."""
    seen: set[tuple[str, ...]] = set()
    for leaf in f.writers:
        like = tuple(f.template(n) for n in leaf.parameters)
        if like in seen:  # its like in another block runs the same code
            continue
        seen.add(like)
        once, twice = (
            _stream_with(f, {n: k * (values[n] + parts[n].offset) - parts[n].offset for n in leaf.parameters}, example)
            - rest
            for k in (1.0, 2.0)
        )
        set_writers_(f.trace.model, {n: -parts[n].offset for n in leaf.parameters})
        who = ", ".join(leaf.parameters)
        if relative(once, rest) <= TOLERANCE:
            raise UserError(
                f"{who}: named as a writer, but without the others it adds nothing to the stream",
                fix="name only the parameters of the last operation of each branch",
            )
        if relative(twice - 2 * once, once) > 10 * TOLERANCE:
            raise UserError(
                f"a branch is not linear in {who}: doubling them does not double what it adds to the stream",
                fix="end the branch in a plain linear layer or norm, used once, with nothing after it",
            )


def _stream_with(f: Findings, values: "dict[str, Tensor]", example: Any) -> Tensor:
    set_writers_(f.trace.model, values)
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = anatomy.first_tensor(args)
        seen.append(given if given is not None else anatomy.first_tensor(kwargs))  # type: ignore[arg-type]

    handle = f.trace.model.get_submodule(f.stream_reader).register_forward_pre_hook(keep, with_kwargs=True)
    try:
        anatomy.call(f.trace.model, example)
    finally:
        handle.remove()
    return seen[0]


def readout_is_linear(f: Findings) -> None:
    """Logits must be linear in the readout, or a multiplier on them means something else."""
    if f.readout.site is None:
        return
    module, given = f.trace.model.get_submodule(f.readout.site), f.trace.inputs[f.readout.site].detach()
    with torch.no_grad():
        zero, one, two = (module(k * given) for k in (0.0, 1.0, 2.0))
    if relative((two - zero) - 2 * (one - zero), one) > TOLERANCE:
        raise UserError(
            f"the readout '{f.readout.site}' is not linear in its input", fix="let forward end in an nn.Linear"
        )


def embedding_scales(f: Findings, t: anatomy.Trace) -> dict[str, float]:
    tables = [
        e.parameters[0] for e in f.entries if e.site and isinstance(f.trace.model.get_submodule(e.site), nn.Embedding)
    ]
    weights = [f.trace.model.get_parameter(n) for n in tables]
    root = t.inputs[f.stream_reader]
    if not tables or f.entry_norms:
        return dict.fromkeys(tables, 1.0)
    try:
        grads = torch.autograd.grad(root.sum(), weights)
    except RuntimeError as error:
        raise UserError(
            f"the backward pass fails on this model: {error}",
            fix="make it trainable first (an in-place `x += f(x)` on the stream is a common reason)",
        ) from error
    return {name: grad.sum().item() / root.numel() for name, grad in zip(tables, grads, strict=True)}


def relative(difference: Tensor, reference: Tensor) -> float:
    return float(difference.detach().norm() / reference.detach().norm().clamp_min(1e-30))
