"""Attention modules whose head size differs from the base's.

Trained queries and keys align, so q·k grows like d_head and should be divided by it. Most models divide by its root,
some by a constant. This is the same while d_head equals the base's. Where it differs, a factor goes on the queries.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from completep.anatomy.roles import Anatomy
from completep.errors import UserError

HEAD_SIZE = ("head_dim", "d_head", "head_size", "attention_head_size", "dim_head", "size_per_head", "d_k")
HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads", "h")
SCALE = ("scaling", "scale", "softmax_scale", "norm_factor", "scale_attn", "inv_norm_factor")
QUERY_NORM = re.compile(r"(^|_)(q|query)_?(norm|layernorm|ln)$|^(norm|ln)_?(q|query)$")
QUERY = re.compile(r"^(q|query|wq|to_q|w_q|c_q)(_proj|_lin|_linear)?$")


@dataclass(frozen=True)
class Attention:
    """A module that holds the projections of its heads."""

    name: str
    head_size: int
    scale: float  # on q·k
    query: str | None  # the module whose output is the queries

    def query_site(self, base: "Attention") -> str:
        """The module that takes a factor on the queries."""
        if self.query is None:
            sizes = f"heads of {self.head_size} where the base has {base.head_size}"
            what = f"'{self.name}' has {sizes}, and its queries come from a fused projection"
            raise UserError(what, fix=f"keep the head size at {base.head_size} and use more heads")
        return self.query


def grown_heads(
    model: nn.Module, base: nn.Module, anatomy: Anatomy, width: int, base_width: int
) -> list[tuple[Attention, Attention]]:
    """(attention of the model, its counterpart in the base) where the head sizes differ."""
    at_base = {anatomy.template(a.name): a for a in _attentions(base, anatomy, base_width)}
    pairs = [(a, at_base.get(anatomy.template(a.name), a)) for a in _attentions(model, anatomy, width)]
    return [(here, there) for here, there in pairs if here.head_size != there.head_size]


def _attentions(model: nn.Module, anatomy: Anatomy, width: int) -> Iterator[Attention]:
    for name, module in model.named_modules():
        if not anatomy.stack_of(name) or not any(True for _ in module.children()):
            continue
        size, heads = _attribute(module, HEAD_SIZE, int), _attribute(module, HEADS, int)
        if size is None and heads is not None and width % int(heads) == 0:
            size = width // int(heads)
        if size is not None:
            scale = _attribute(module, SCALE, float) or float(size) ** -0.5
            yield Attention(name, int(size), float(scale), _query(name, module))


def _query(name: str, module: nn.Module) -> str | None:
    """The queries' projection, or their norm if there is one: it would cancel a factor before it."""
    children = [child for child, _ in module.named_children()]
    matching = (child for pattern in (QUERY_NORM, QUERY) for child in children if pattern.search(child))
    return next((f"{name}.{child}" for child in matching), None)


def _attribute(module: nn.Module, names: tuple[str, ...], kind: type[int] | type[float]) -> int | float | None:
    values = (getattr(module, name, None) for name in names)
    return next((v for v in values if isinstance(v, kind) and not isinstance(v, bool) and v > 0), None)
