"""How much larger each parameter is than in the base: m_N of its fan-in, m_out of its fan-out, m_L of its stack."""

import math

from torch import nn

from completep.anatomy.names import named_parameters
from completep.anatomy.roles import Anatomy
from completep.config import Shape
from completep.errors import UserError, some

Dimensions = tuple[int, ...]
Shapes = dict[str, Dimensions]


def shapes_of(model: nn.Module) -> Shapes:
    return {name: tuple(p.shape) for name, p in named_parameters(model)}


def product(shape: Dimensions, axes: Dimensions) -> int:
    return math.prod(shape[axis] for axis in axes)


class Ratios:
    """The ratios of a model to its base: from the shape of each parameter, or from N and L if the base is a Shape."""

    def __init__(self, anatomy: Anatomy, shapes: Shapes, base: Shapes | Shape) -> None:
        name, axis = anatomy.width
        depths = {s.stem: s.depth(shapes) for s in anatomy.stacks}
        if isinstance(base, Shape):
            if len(depths) > 1:
                what = f"the model has several stacks ({some(list(depths))}); one depth does not describe the base"
                raise UserError(what, fix="pass base as a factory")
            base_depths, self.base, self.base_shapes = dict.fromkeys(depths, base.depth), base, None
        else:
            base_depths = {s.stem: s.depth(base) for s in anatomy.stacks}
            self.base = Shape(base[name][axis], sum(base_depths.values()))
            self.base_shapes = _by_template(base, anatomy)
        self.anatomy, self.shapes = anatomy, shapes
        self.target = Shape(shapes[name][axis], sum(depths.values()))
        self.depth = {stem: depths[stem] / base_depths[stem] for stem in depths}
        self.m_N = self.target.width / self.base.width
        self.m_L = self.target.depth / self.base.depth

    def of(self, name: str) -> tuple[float, float, float]:
        """(m_N, m_out, m_L) of one parameter."""
        stack = self.anatomy.stack_of(name)
        return *self._fans(name), self.depth[stack.stem] if stack else self.m_L

    def base_shape(self, name: str) -> Dimensions | None:
        return None if self.base_shapes is None else self.base_shapes[self.anatomy.template(name)]

    def _fans(self, name: str) -> tuple[float, float]:
        part, shape, base = self.anatomy.part(name), self.shapes[name], self.base_shape(name)
        fan = part.role.trait.fan
        if fan == "fixed" or (fan == "readout" and base is None):
            return self.m_N, 1.0
        if fan == "model" or base is None:
            return self.m_N, self.m_N
        if fan == "readout":
            return product(shape, part.fan_in) / product(base, part.fan_in), 1.0
        if part.fan_in:
            m_N = product(shape, part.fan_in) / product(base, part.fan_in)
            return m_N, math.prod(shape) / math.prod(base) / m_N
        if fan == "matrix":
            return (m_N := self._bare(name, base)), m_N
        return self.m_N, math.prod(shape) / math.prod(base)

    def _bare(self, name: str, base: Dimensions) -> float:
        """A bare parameter does not show its fan-in axis. That does not matter if all axes that grow have one ratio."""
        grown = [n / b for n, b in zip(self.shapes[name], base, strict=True) if n != b]
        if len(grown) == 1 or len(set(grown)) > 1:
            growth = f"'{name}' is a bare parameter that grows from {base} to {self.shapes[name]}"
            raise UserError(f"{growth}: completep cannot tell which axis is its fan-in", fix="use an nn.Linear for it")
        return grown[0] if grown else 1.0


def _by_template(shapes: Shapes, anatomy: Anatomy) -> Shapes:
    table: Shapes = {}
    for name, shape in shapes.items():
        first = table.setdefault(anatomy.template(name), shape)
        if first != shape:
            what = f"the blocks of the base differ: '{name}' is {shape}, its counterpart in another block is {first}"
            raise UserError(what, fix="use a base whose blocks all have the same shapes")
    return table
