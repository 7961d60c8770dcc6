"""The proof on numbers: with its writers zeroed, every block is the identity on the residual stream.

If that holds, scaling the writers scales the branches and nothing else, which is what the rules ask for.
If it does not, something else writes to the stream, and the error says where and how much.
"""

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


def prove(f: Findings, parts: dict[str, Part], example: Any) -> dict[str, float]:
    """Zero the writers and look. Returns by what constant the model multiplies each embedding on its way in."""
    model = f.trace.model
    readout_is_linear(f)
    saved = {name: model.get_parameter(name).detach().clone() for name in f.writer_names}
    with torch.no_grad():
        for name in saved:
            model.get_parameter(name).fill_(-parts[name].offset)
    t = anatomy.trace(model, example)
    blocks_are_identity(f, t)
    nothing_else_writes(f, t)
    scales = embedding_scales(f, t)
    with torch.no_grad():
        for name, value in saved.items():
            model.get_parameter(name).copy_(value)
    return scales


def blocks_are_identity(f: Findings, t: anatomy.Trace) -> None:
    for name, output in t.outputs.items():
        if not any(s.pattern.fullmatch(name) for s in f.stacks) or name not in t.inputs:
            continue
        given = t.inputs[name]
        if given.shape != output.shape:
            continue  # this block's sum stands outside it; nothing_else_writes covers that
        leak = relative(output - given, given)
        if leak > TOLERANCE and relative(output, given) > TOLERANCE:  # a block that returns zero is a bare branch
            raise leaked(name, leak, f)


def nothing_else_writes(f: Findings, t: anatomy.Trace) -> None:
    """With the writers at zero, no other parameter of a block may reach the stream."""
    writers = set(f.writer_names)
    others = {n: p for n, p in f.trace.model.named_parameters() if f.in_stack(n) and n not in writers}
    root = t.inputs[f.stream_reader]
    if not others:
        return
    try:
        grads = torch.autograd.grad(root.square().sum(), list(others.values()), allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        raise UserError(
            f"the backward pass fails on this model: {error}",
            fix="make it trainable first (an in-place `x += f(x)` on the stream is a common reason)",
        ) from error
    for (name, _), grad in zip(others.items(), grads, strict=True):
        if grad is not None and (size := grad.abs().max().item()) > TOLERANCE:
            raise leaked(name, size, f)


def leaked(where: str, size: float, f: Findings) -> UserError:
    return UserError(
        f"with its writers zeroed, '{where}' still changes the residual stream (by {size:.2g}, relative to the stream): "
        f"the writers found are {', '.join(sorted(set(f.writer_names))[:4])}, …",
        fix="name every parameter that writes last into a branch: writers=[…]; a block must be x + f(x), nothing scaled, "
        "replaced or normed on the way",
    )


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
    root = t.inputs[f.stream_reader]
    grads = torch.autograd.grad(root.sum(), [f.trace.model.get_parameter(n) for n in tables]) if tables else ()
    return {name: grad.sum().item() / root.numel() for name, grad in zip(tables, grads, strict=True)}


def relative(difference: Tensor, reference: Tensor) -> float:
    return float(difference.detach().norm() / reference.detach().norm().clamp_min(1e-30))
