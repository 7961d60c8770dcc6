"""Norms, known by what they do: the output stays the same when the input is scaled. Names and classes do not matter."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from completep.anatomy.calls import Call
from completep.anatomy.kinds import is_product

TOLERANCE = 1e-2  # a norm's own ε remains visible
INVARIANT = 1e-3  # the same, to first order


@dataclass(frozen=True)
class NormVector:
    """A gain or bias of a norm."""

    name: str  # in the norm
    start: float  # 0 for a bias, 1 for a gain w, 0 for a gain that is used as 1 + w
    offset: float  # 1 for a gain that is used as 1 + w


def may_be_norm(module: nn.Module) -> bool:
    """A single module that holds nothing but gains and biases: one per feature, or one per feature of each head."""
    single = not any(True for _ in module.children()) and not is_product(module)
    return single and all(p.dim() in (1, 2) for p in module.parameters(recurse=False))


@torch.no_grad()
def normalises(call: Call) -> bool:
    """True if scaling the input does not change the output, but changing it does.

    Other arguments, such as the gate of a gated norm, stay as they are.
    """
    if call.given is None or call.given.shape != call.made.shape or not may_be_norm(call.module):
        return False
    x = _unit(call.given)
    plain, scaled, other = (call.again(y) for y in (x, 3 * x, -x))
    return _close(plain, scaled) and not _close(plain, other)


def _unit(x: Tensor) -> Tensor:
    """The tensor with every row at size one, where a norm's own ε hardly matters."""
    return x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)  # false for NaN


@torch.no_grad()
def measure_vectors(call: Call) -> list[NormVector]:
    """The gains and biases of a norm. They are measured, since norms differ in names and in w or 1 + w.

    A parameter that is neither is left out, and so has no role.
    """
    assert call.given is not None
    module, x = call.module, _unit(call.given)
    saved = {name: p.detach().clone() for name, p in module.named_parameters()}
    for p in module.parameters():
        p.zero_()
    at_zero = call.again(x)
    offset = 1.0 if at_zero.abs().max() > 1e-6 else 0.0
    vectors = []
    for name, p in module.named_parameters():
        p.fill_(1.0)
        change = call.again(x) - at_zero
        p.zero_()
        if torch.allclose(change, torch.ones_like(change), atol=1e-5):
            vectors.append(NormVector(name, start=0.0, offset=0.0))  # it is added: a bias
        elif offset == 0.0 or torch.allclose(change, at_zero, rtol=1e-3, atol=1e-5):
            vectors.append(NormVector(name, start=1.0 - offset, offset=offset))  # it multiplies: a gain
    for name, p in module.named_parameters():
        p.copy_(saved[name])
    return vectors


def is_invariant(made: Tensor, given: Tensor) -> bool:
    """True if scaling a tensor does not change what was made of it, by Euler's theorem, but changing it does."""
    weights = torch.randn(made.shape, generator=torch.Generator().manual_seed(0), dtype=made.dtype)
    (grad,) = torch.autograd.grad((made * weights).sum(), [given], retain_graph=True, allow_unused=True)
    if grad is None or not grad.norm() > 0:
        return False
    along = (grad * given.detach()).sum(-1)
    sizes = grad.norm(dim=-1) * given.detach().norm(dim=-1)
    return bool((along.abs() <= INVARIANT * sizes.clamp_min(1e-30)).all())
