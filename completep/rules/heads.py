"""Attention logits when the head size itself grows.

Trained queries and keys align, so q·k grows as d_head and wants dividing by it; most models divide by its root, some by a
constant. As long as d_head is the base's, that makes no difference. Where it grows, what is missing goes on the queries.
"""

import re
from collections.abc import Iterator

from torch import nn

from completep.errors import UserError
from completep.rules.multipliers import Multiplier
from completep.rules.roles import Anatomy
from completep.rules.table import Rules

HEAD_SIZE = ("head_dim", "d_head", "head_size", "attention_head_size", "dim_head", "size_per_head", "d_k")
HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads", "h")
SCALE = ("scaling", "scale", "softmax_scale", "norm_factor", "scale_attn", "inv_norm_factor")
QUERY_NORM = re.compile(r"(^|_)(q|query)_?(norm|layernorm|ln)$|^(norm|ln)_?(q|query)$")
QUERY = re.compile(r"^(q|query|wq|to_q|w_q|c_q)(_proj|_lin|_linear)?$")


def _attribute(module: nn.Module, names: tuple[str, ...], kind: "type[int] | type[float]") -> "int | float | None":
    values = (getattr(module, name, None) for name in names)
    return next((v for v in values if isinstance(v, kind) and not isinstance(v, bool) and v > 0), None)


def attention_modules(model: nn.Module, found: Anatomy, width: int) -> Iterator[tuple[str, nn.Module, int, float]]:
    """(name, module, head size, scale on q·k) of what knows its heads and holds the projections for them."""
    for name, module in model.named_modules():
        if not found.stack_of(name) or not any(True for _ in module.children()):
            continue
        size, heads = _attribute(module, HEAD_SIZE, int), _attribute(module, HEADS, int)
        if size is None and heads is not None and width % int(heads) == 0:
            size = width // int(heads)
        if size is not None:
            scale = _attribute(module, SCALE, float)
            yield name, module, int(size), float(scale) if scale is not None else float(size) ** -0.5


def attention_multipliers(
    model: nn.Module, base: nn.Module, found: Anatomy, rules: Rules, width: int, base_width: int
) -> list[Multiplier]:
    at_base = {found.template(n): (size, scale) for n, _, size, scale in attention_modules(base, found, base_width)}
    placed: dict[float, tuple[list[str], list[str]]] = {}
    for name, module, size, scale in attention_modules(model, found, width):
        base_size, base_scale = at_base.get(found.template(name), (size, scale))
        if size == base_size or not rules.attention.width:
            continue
        factor = rules.attention(size / base_size) / (scale / base_scale)
        if abs(factor - 1) < 1e-9:
            continue
        query = _query(module)
        if query is None:
            raise UserError(
                f"'{name}' has heads of {size} where the base has {base_size}, and its queries come from a fused projection",
                fix=f"keep the head size at {base_size} and grow the number of heads",
            )
        modules, parameters = placed.setdefault(factor, ([], []))
        modules.append(f"{name}.{query}")
        parameters += [f"{name}.{query}.{p}" for p, _ in module.get_submodule(query).named_parameters()]
    return [Multiplier("attention", factor, tuple(m), tuple(p)) for factor, (m, p) in placed.items()]


def _query(module: nn.Module) -> str | None:
    """What the factor goes on: the queries' norm if there is one (it would undo a factor before it), else their projection."""
    names = [n for n, _ in module.named_children()]
    return next((n for n in names if QUERY_NORM.search(n)), None) or next((n for n in names if QUERY.search(n)), None)
