"""How much larger each parameter is than its counterpart in the base: m_N of its fan-in, m_out of its fan-out, m_L of its stack."""

import math

from torch import nn

from completep.config import Shape
from completep.errors import UserError, some
from completep.rules.roles import Anatomy
from completep.rules.scaling import named_parameters
from completep.rules.table import Role

Dimensions = tuple[int, ...]


def shapes_of(model: nn.Module) -> dict[str, Dimensions]:
    return {name: tuple(p.shape) for name, p in named_parameters(model)}


class Ratios:
    """m_N and m_L of each parameter: from its own shape where a base model is given, from N and L where only those are."""

    def __init__(
        self,
        found: Anatomy,
        shapes: dict[str, Dimensions],
        base_shapes: "dict[str, Dimensions] | None",
        base: Shape | None,
    ) -> None:
        name, axis = found.width
        self.found, self.shapes, self.width = found, shapes, shapes[name][axis]
        self.base_by_template = None if base_shapes is None else _by_template(base_shapes, found)
        depths = {s.stem: s.depth(list(shapes)) for s in found.stacks}
        if base_shapes is not None:
            base_depths = {s.stem: s.depth(list(base_shapes)) for s in found.stacks}
            base = Shape(base_shapes[name][axis], sum(base_depths.values()))
        else:
            assert base is not None
            if len(depths) > 1:
                raise UserError(
                    f"the model has several stacks ({some(list(depths))}); one depth says too little",
                    fix="give base as a factory",
                )
            base_depths = dict.fromkeys(depths, base.depth)
        self.base = base
        self.depth = {stem: depths[stem] / base_depths[stem] for stem in depths}
        self.m_N = self.width / base.width
        self.m_L = sum(depths.values()) / sum(base_depths.values())

    def of(self, name: str) -> tuple[float, float, float]:
        """(m_N, m_out, m_L) of one parameter."""
        stack = self.found.stack_of(name)
        m_L = self.depth[stack.stem] if stack else self.m_L
        part, shape, base = self.found.parts[self.found.template(name)], self.shapes[name], self.base_shape(name)
        if part.role in (Role.QK_NORM, Role.UNEMBEDDING_BIAS):
            return self.m_N, 1.0, m_L  # as long as a head or the vocabulary, whatever the width
        if part.role is Role.UNEMBEDDING:
            return (product(shape, part.fan_in) / product(base, part.fan_in) if base else self.m_N), 1.0, m_L
        if base is None or part.role in (Role.EMBEDDING, Role.EMBEDDING_BIAS):
            return self.m_N, self.m_N, m_L
        if part.fan_in:
            m_N = product(shape, part.fan_in) / product(base, part.fan_in)
            return m_N, math.prod(shape) / math.prod(base) / m_N, m_L
        if part.role is Role.HIDDEN:
            return (m_N := self._bare(name, base)), m_N, m_L
        return self.m_N, math.prod(shape) / math.prod(base), m_L

    def _bare(self, name: str, base: Dimensions) -> float:
        """A bare parameter does not say which of its axes is summed over; if all that grow grow alike, that does not matter."""
        grown = [n / b for n, b in zip(self.shapes[name], base, strict=True) if n != b]
        if len(grown) == 1 or len(set(grown)) > 1:
            raise UserError(
                f"'{name}' is a bare parameter that grows from {base} to {self.shapes[name]}: I cannot tell which axis is its fan-in",
                fix="hold it in an nn.Linear",
            )
        return grown[0] if grown else 1.0

    def base_shape(self, name: str) -> "Dimensions | None":
        return None if self.base_by_template is None else self.base_by_template[self.found.template(name)]


def product(shape: Dimensions, axes: Dimensions) -> int:
    total = 1
    for axis in axes:
        total *= shape[axis]
    return total


def _by_template(shapes: dict[str, Dimensions], found: Anatomy) -> dict[str, Dimensions]:
    table: dict[str, Dimensions] = {}
    for name, shape in shapes.items():
        known = table.setdefault(found.template(name), shape)
        if known != shape:
            raise UserError(
                f"the base's blocks differ: '{name}' is {shape}, its like in another block {known}",
                fix="use a base whose blocks all have the same shapes",
            )
    return table
