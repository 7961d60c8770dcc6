"""Gradients of bare vectors, added up without their signs: decays, gates, layer scales and shifts that no module holds.

The gradient of such a vector is a sum over tokens. At init its terms cancel, which leaves noise and hides the scaling
of the aligned gradient. The terms are seen where the vector first meets an activation: there it is expanded to the size
of the activation, and the gradient of the expanded copy has one entry per term.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ELEMENTWISE = {
    "mul", "__mul__", "__rmul__", "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "div", "__truediv__",
    "__rtruediv__",
}  # fmt: skip


class BareGradients(TorchFunctionMode):
    """Follows vectors through a forward pass. After the backward pass, `unsigned` has Σ |term| by name."""

    def __init__(self, vectors: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.vectors = vectors
        self.origin = {id(p): name for name, p in vectors.items()}  # tensors that depend on one vector only
        self.kept: list[Tensor] = list(vectors.values())  # so that no id is used again
        self.terms: dict[str, list[tuple[Tensor, Tensor]]] = {}  # (a tensor of the vector alone, Σ |its terms|)

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [a for a in args if isinstance(a, Tensor)]
        names = {self.origin.get(id(t)) for t in tensors if t.requires_grad}
        name = next(iter(names)) if len(names) == 1 else None
        if getattr(func, "__name__", "") in ELEMENTWISE and len(tensors) == 2 and names - {None} and name is None:
            args = [self._expanded(a, tensors) if id(a) in self.origin else a for a in args]
        result = func(*args, **kwargs)
        if name is not None and isinstance(result, Tensor) and result.requires_grad:
            self.origin[id(result)] = name
            self.kept.append(result)
            if tensors and result.numel() > self.vectors[name].numel():  # the model has expanded it
                self._watch(name, tensors[0], result)
        return result

    def _expanded(self, small: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))  # type: ignore[no-untyped-call]
        large = small.expand(shape)
        self._watch(self.origin[id(small)], small, large)
        return large

    def _watch(self, name: str, small: Tensor, large: Tensor) -> None:
        def keep(gradient: Tensor) -> None:
            self.terms.setdefault(name, []).append((small, gradient.abs().sum_to_size(small.shape)))

        large.register_hook(keep)  # type: ignore[no-untyped-call]

    def unsigned(self) -> dict[str, Tensor]:
        """By name, for the vectors whose entries were each seen in one place: a vector may have an entry per layer."""
        gradient_of = {}
        for name, places in self.terms.items():
            gradients = torch.stack([self._back(name, small, sums) for small, sums in places])
            if ((gradients != 0).sum(0) <= 1).all():
                gradient_of[name] = gradients.sum(0)
        return gradient_of

    def _back(self, name: str, small: Tensor, sums: Tensor) -> Tensor:
        vector = self.vectors[name]
        if small is vector:
            return sums.abs()
        (gradient,) = torch.autograd.grad(small, vector, sums, retain_graph=True)
        return gradient.abs()
