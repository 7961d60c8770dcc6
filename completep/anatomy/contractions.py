"""Which axes of a bare parameter a matrix product sums over, and which axis counts experts: no module shows them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "baddbmm", "grouped_mm", "_grouped_mm")
BY_EXPERT = ("bmm", "baddbmm", "grouped_mm", "_grouped_mm")  # the first axis of the second operand counts matrices


class Contractions(TorchFunctionMode):
    """Sees the products of a forward pass. `axes` is by id of the parameter; none if its products differ.

    `experts` is the axis of a tensor that stacks one matrix per expert: each product takes one of them, or all of them
    side by side for different rows of its input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.axes: dict[int, tuple[int, ...]] = {}
        self.experts: dict[int, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        tensors = [a for a in args if isinstance(a, Tensor)]
        if name == "linear" and len(tensors) > 1:
            self._record(tensors[1], (1,))
        elif name == "einsum" and len(tensors) == 2 and isinstance(args[0], str):
            for tensor, axes in zip(tensors, summed_axes(args[0]), strict=True):
                self._record(tensor, axes)
        elif name in PRODUCTS and len(tensors) > 1:
            left, right = tensors[:2] if "grouped" in name else tensors[-2:]
            left, right = (right, left) if name == "__rmatmul__" else (left, right)
            self._record(left, (left.dim() - 1,))
            self._record(right, (max(right.dim() - 2, 0),), stacked=name in BY_EXPERT and right.dim() == 3)
        return func(*args, **(kwargs or {}))

    def _record(self, operand: Tensor, axes: tuple[int, ...], stacked: bool = False) -> None:
        parameter = operand if isinstance(operand, nn.Parameter) else operand._base
        if not isinstance(parameter, nn.Parameter):
            return
        one_of = parameter.dim() == 3 and operand.numel() * parameter.shape[0] == parameter.numel()
        if parameter.numel() != operand.numel() and not one_of:
            return
        if stacked or (one_of and operand.dim() == 2):
            self.experts[id(parameter)] = 0
        own = _axes_of(parameter, operand, axes)
        known = self.axes.setdefault(id(parameter), own)
        self.axes[id(parameter)] = own if own == known else ()


def _axes_of(parameter: Tensor, view: Tensor, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a parameter that these axes of a transposed view are; none if the view is no transposition.

    The view may be one of the matrices that a three-dimensional parameter stacks.
    """
    places = list(zip(parameter.shape, parameter.stride(), strict=True))
    if view.numel() != parameter.numel():
        places[0] = (-1, -1)
    wanted = [(view.shape[a], view.stride(a)) for a in axes]
    if not all(places.count(place) == 1 for place in wanted):
        return ()
    return tuple(sorted(places.index(place) for place in wanted))


def summed_axes(equation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of two operands that an einsum sums over; none if the equation has an ellipsis."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    left, right = inputs.split(",")
    if "." in inputs:
        return (), ()
    both = {letter for letter in left if letter in right and letter not in output}
    first, second = (tuple(i for i, letter in enumerate(side) if letter in both) for side in (left, right))
    return first, second
