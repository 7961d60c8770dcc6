"""How much larger each parameter is than in the base: m_N of its fan-in, m_out of its fan-out, m_L of its stack.

m_L is the ratio of the numbers of residual branches, as the paper's 2L is, where the base is a model.
"""

import math

from torch import nn

from completep.anatomy.blocks import Stack
from completep.anatomy.names import named_parameters
from completep.anatomy.roles import Anatomy, Part
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
        depths = {s.stem: s.depth(shapes) for s in anatomy.blocks}
        if isinstance(base, Shape):
            if len(depths) > 1:
                what = f"the model has several stacks ({some(list(depths))}); one depth does not describe the base"
                raise UserError(what, fix="pass base as a factory")
            base_depths, self.base, self.base_shapes = dict.fromkeys(depths, base.depth), base, None
        else:
            base_depths = {s.stem: s.depth(base) for s in anatomy.blocks}
            self.base = Shape(base[name][axis], sum(base_depths.values()))
            self.base_shapes = _by_template(base, anatomy)
            self.base_names = list(base)
        self.anatomy, self.shapes = anatomy, shapes
        self.target = Shape(shapes[name][axis], sum(depths.values()))
        self.depth = {stem: depths[stem] / base_depths[stem] for stem in depths}
        if not isinstance(base, Shape):
            self.depth = {s.stem: _branches(anatomy, s, shapes) / _branches(anatomy, s, base) for s in anatomy.blocks}
        self.m_N = self.target.width / self.base.width
        self.m_L = self.target.depth / self.base.depth

    def of(self, name: str) -> tuple[float, float, float]:
        """(m_N, m_out, m_L) of one parameter."""
        stack = self.anatomy.stack_of(name)
        if stack is not None and not stack.side:
            return *self._fans(name), self.depth[stack.stem]
        acts_inside = stack is not None or self.anatomy.part(name).role.trait.layered
        return *self._fans(name), max(self.depth.values()) if acts_inside else self.m_L

    def along(self, template: str, dimension: int) -> float:
        """The ratio of one dimension of a parameter, by which a further axis is known."""
        name = next((n for n in self.shapes if self.anatomy.template(n) == template), None)
        if name is None or self.base_shapes is None:
            what = f"the rules need the size of '{template}', "
            what += "which this model does not have" if name is None else "and the base is only a Shape"
            raise UserError(
                what, fix="pass base as a factory, and a model of the family that the rules were measured on"
            )
        return self.shapes[name][dimension] / self.base_shapes[template][dimension]

    def is_assumed(self, name: str) -> bool:
        """True if the base is only a Shape, and a side of this parameter need not grow with the model's width."""
        part, shape, width = self.anatomy.part(name), self.shapes[name], self.target.width
        if self.base_shapes is not None or self.anatomy.stack_of(name) is None:
            return False
        if part.role.trait.fan not in ("matrix", "vector"):
            return False
        fan_in = product(shape, part.fan_in)
        sides = (fan_in, math.prod(shape) // fan_in) if part.fan_in else shape
        return any(side % width for side in sides)

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
        growth = math.prod(shape) / math.prod(base) * self._experts(name)
        if part.fan_in:
            m_N = product(shape, part.fan_in) / product(base, part.fan_in) / self._flat_experts(part)
            return m_N, growth / m_N
        if fan == "matrix":
            return (m_N := self._bare(name, base)), m_N
        if sum(n != b for n, b in zip(shape, base, strict=True)) > 1:
            what = f"'{name}' acts entry by entry, but two of its axes grow, from {base} to {shape}: it may be a matrix"
            raise UserError(what, fix="use an nn.Linear for it, or derive its rule: completep derive")
        return self.m_N, growth

    def _experts(self, name: str) -> float:
        """The ratio of the numbers of experts, for a parameter of one expert in a list: all of them are one fan-out."""
        stack = self.anatomy.stack_of(name)
        if stack is None or stack.expert(name) is None:
            return 1.0
        return stack.experts(self.shapes) / stack.experts(self.base_names)

    def _flat_experts(self, part: Part) -> float:
        """The ratio of the numbers of experts that are stored one after the other along the fan-in."""
        return 1.0 if part.experts is None else self.along(*part.experts)

    def _bare(self, name: str, base: Dimensions) -> float:
        """A bare parameter does not show its fan-in axis. That does not matter if all axes that grow have one ratio."""
        grown = [n / b for n, b in zip(self.shapes[name], base, strict=True) if n != b]
        if len(grown) == 1 or len(set(grown)) > 1:
            growth = f"'{name}' is a bare parameter that grows from {base} to {self.shapes[name]}"
            raise UserError(f"{growth}: completep cannot tell which axis is its fan-in", fix="use an nn.Linear for it")
        return grown[0] if grown else 1.0


def _branches(anatomy: Anatomy, stack: Stack, shapes: Shapes) -> int:
    """How many branches the blocks of a stack add to the stream, by the parameters that end them.

    The paper's depth of 2L counts branches. In a stack of equal blocks this makes no difference.
    """
    ends = {p: branch for branch in anatomy.branches for p in branch.parameters}
    branches = set()
    for name in shapes:
        if (match := stack.pattern.match(name)) and (end := ends.get(anatomy.template(name))) is not None:
            branches.add((match.group(1), end))
    return max(len(branches), 1)


def _by_template(shapes: Shapes, anatomy: Anatomy) -> Shapes:
    table: Shapes = {}
    for name, shape in shapes.items():
        first = table.setdefault(anatomy.template(name), shape)
        if first != shape:
            what = f"the blocks of the base differ: '{name}' is {shape}, its counterpart in another block is {first}"
            raise UserError(what, fix="use a base whose blocks all have the same shapes")
    return table
