"""Which axes of a bare parameter its products sum over, and how many matrices it stacks: no module shows them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "baddbmm", "grouped_mm", "_grouped_mm")
DIVIDES = ("div", "__truediv__", "divide", "true_divide")
NEGATES = ("neg", "__neg__", "negative")
SCALES = ("mul", "__mul__", "__rmul__", "multiply", *DIVIDES)
GROUPED = ("grouped_mm", "_grouped_mm")  # the first axis of the second operand counts matrices, for rows of the first
ONE_RANK = 1e-3  # a second singular value below this, relative to the first, is rounding


@dataclass
class Stacking:
    """One parameter that holds several matrices: in a third axis, or flat along one of two.

    `places` are results of its products, each with the axis that counts the matrices there, or None if every product
    takes one of them.
    """

    count: int
    dimensions: int  # of the parameter
    flat: int | None = (
        None  # the axis of the parameter that holds them one after the other, if its products sum over it
    )
    added: bool = False  # its products are added up later, so all of them are one matrix with one fan-in
    places: list[tuple[Tensor, int | None]] = field(default_factory=list)


class Contractions(TorchFunctionMode):
    """Sees the products of a forward pass.

    `axes` is by id of the parameter; none if its products differ. `stacked` are the parameters that hold several
    matrices: each product takes one of them, or all of them side by side. A stack of one cannot show whether several
    would be added up. `made` are the results of all operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.axes: dict[int, tuple[int, ...]] = {}
        self.stacked: dict[int, Stacking] = {}
        self.made: dict[Node, Tensor] = {}
        self.scaled: dict[int, Tensor] = {}  # id of a parameter × a constant → the parameter; `made` keeps the product

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._see(getattr(func, "__name__", ""), args, result)
            if result.grad_fn is not None:
                self.made.setdefault(result.grad_fn, result)
        return result

    def _see(self, name: str, args: Sequence[Any], result: Tensor) -> None:
        tensors = [a for a in args if isinstance(a, Tensor)]
        for operand in tensors:
            if (parameter := self._parameter(operand)) is not None and constant_factor(name, args, operand) is not None:
                self.scaled[id(result)] = parameter
        if name == "linear" and len(tensors) > 1:
            self._record(tensors[1], (1,), result)
        elif name == "einsum" and len(tensors) == 2 and isinstance(args[0], str):
            for operand, (axes, shared) in zip(tensors, letters(args[0]), strict=True):
                self._record(operand, axes, result, shared)
        elif name in PRODUCTS and len(tensors) > 1:
            left, right = tensors[:2] if name in GROUPED else tensors[-2:]
            left, right = (right, left) if name == "__rmatmul__" else (left, right)
            self._record(left, (left.dim() - 1,), result, _side_by_side(left, result))
            shared = {0: None} if name in GROUPED else _side_by_side(right, result)
            self._record(right, (max(right.dim() - 2, 0),), result, shared)

    def _record(
        self,
        operand: Tensor,
        axes: tuple[int, ...],
        result: Tensor,
        shared: "Mapping[int, int | None] | None" = None,
    ) -> None:
        """`axes` of the operand are summed over; `shared` axes count products side by side: operand's → result's."""
        parameter = self._parameter(operand)
        if parameter is None or operand.dim() < 2:
            return
        places = [_place(parameter, operand.shape[a], operand.stride(a)) for a in range(operand.dim())]
        summed = [places[a] for a in axes]
        whole = all(p is not None and p.length == parameter.shape[p.axis] for p in summed)
        inner = all(p is not None and p.step == 1 for p in summed)
        sum_axes = tuple(sorted(p.axis for p in summed if p is not None)) if whole or inner else ()
        known = self.axes.setdefault(id(parameter), sum_axes)
        self.axes[id(parameter)] = sum_axes if sum_axes == known else ()
        count = _matrices(parameter, operand, shared or {})
        if count > 1 or (shared and parameter.dim() == 3):
            stacking = self.stacked.setdefault(id(parameter), Stacking(count, parameter.dim()))
            stacking.flat = sum_axes[0] if inner and not whole and len(sum_axes) == 1 else stacking.flat
            several = [a for a in shared or {} if operand.shape[a] == count]
            stacking.places.append((result, (shared or {})[several[0]] if several else None))

    def _parameter(self, operand: object) -> Tensor | None:
        """The parameter that a tensor is, or is a view or a multiple of."""
        if not isinstance(operand, Tensor):
            return None
        whole = operand if operand._base is None else operand._base
        return whole if isinstance(whole, nn.Parameter) else self.scaled.get(id(whole))

    def settle(self, output: Tensor) -> None:
        """Finds the stacked matrices whose products are added up later, in a backward pass from the output.

        All products of such a sum have the same gradient, except for a constant factor each. Where routing leaves rows
        of zeros, as in Llama 4, they are the products of experts.
        """
        several = {key: s for key, s in self.stacked.items() if s.count > 1}
        places = [
            (key, tensor, axis) for key, s in several.items() for tensor, axis in s.places if tensor.requires_grad
        ]
        if not places:
            return
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=output.dtype)
        total, tensors = (output * weights).sum(), [tensor for _, tensor, _ in places]
        grads = torch.autograd.grad(total, tensors, retain_graph=True, allow_unused=True)
        by_parameter: dict[int, list[tuple[Tensor, int | None]]] = {}
        for (key, _, axis), grad in zip(places, grads, strict=True):
            if grad is not None:
                by_parameter.setdefault(key, []).append((grad, axis))
        for key, gradients in by_parameter.items():
            routed = any(bool((made.detach() == 0).all(-1).any()) for made, _ in several[key].places)
            several[key].added = not routed and _added_up(gradients, several[key].count)


def constant_factor(operation: str, args: Sequence[object], operand: Tensor) -> float | None:
    """What an operation multiplies all entries of an operand by; None if it does something else."""
    if operation in NEGATES:
        return -1.0
    others = [a for a in args if a is not operand]
    if operation not in SCALES or len(others) != 1 or (operation in DIVIDES and args[0] is not operand):
        return None
    other = others[0]
    if isinstance(other, Tensor) and not other.requires_grad and other.numel() == 1:
        other = other.item()
    if not isinstance(other, (int, float)) or (operation in DIVIDES and other == 0):
        return None
    return 1 / other if operation in DIVIDES else float(other)


@dataclass(frozen=True)
class Place:
    """Where an axis of a view lies in its parameter: every `step`-th entry of an axis, `length` of them."""

    axis: int
    length: int
    step: int


def _place(parameter: Tensor, length: int, stride: int) -> Place | None:
    """None if it is no part of one axis, or could be part of several."""
    places = []
    for axis, (size, axis_stride) in enumerate(zip(parameter.shape, parameter.stride(), strict=True)):
        step = stride // axis_stride if axis_stride and stride % axis_stride == 0 else 0
        if step == 1 and (length == size or (length < size and size % length == 0)):
            places.append(Place(axis, length, 1))
        elif step > 1 and length * step == size:
            places.append(Place(axis, length, step))
    whole = [p for p in places if p.step == 1 and p.length == parameter.shape[p.axis]]
    candidates = whole or places
    return candidates[0] if len(candidates) == 1 else None


def _matrices(parameter: Tensor, operand: Tensor, shared: Mapping[int, int | None]) -> int:
    """How many matrices a parameter holds: a view is one of them, or has an axis that counts them."""
    if operand.numel() == parameter.numel():
        return math.prod(operand.shape[a] for a in shared)
    one_of = operand.dim() == 2 and parameter.dim() in (2, 3) and parameter.numel() % operand.numel() == 0
    return parameter.numel() // operand.numel() if one_of else 1


def _side_by_side(operand: Tensor, result: Tensor) -> dict[int, int | None]:
    """The axes before the last two, with the axis of the result that each becomes."""
    if operand.dim() < 3:
        return {}
    return {a: a + result.dim() - operand.dim() for a in range(operand.dim() - 2)}


def _added_up(grads: Sequence[tuple[Tensor, int | None]], count: int) -> bool:
    """True if the gradients of stacked products are one and the same, except for a constant factor each."""
    if grads and all(axis is not None for _, axis in grads):
        return all(_one_rank(g.movedim(axis or 0, 0).flatten(1)) for g, axis in grads)
    shapes = {g.shape for g, _ in grads}
    if len(shapes) != 1 or len(grads) % count:  # routing sends other rows to every matrix
        return False
    return _one_rank(torch.stack([g.flatten() for g, _ in grads]))


def _one_rank(rows: Tensor) -> bool:
    values = torch.linalg.svdvals(rows.double())
    return bool(values[0] > 0) and (len(values) < 2 or float(values[1] / values[0]) < ONE_RANK)


def letters(equation: str) -> "list[tuple[tuple[int, ...], dict[int, int | None]]]":
    """For both operands of an einsum: the axes that it sums over, and those that both have and the result keeps."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    left, right = inputs.split(",")
    if "." in inputs:
        return [((), {}), ((), {})]
    both = set(left) & set(right)
    return [
        (
            tuple(i for i, letter in enumerate(side) if letter in both - set(output)),
            {i: output.index(letter) for i, letter in enumerate(side) if letter in both & set(output)},
        )
        for side in (left, right)
    ]


def summed_axes(equation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of two operands that an einsum sums over; none if the equation has an ellipsis."""
    (first, _), (second, _) = letters(equation)
    return first, second
