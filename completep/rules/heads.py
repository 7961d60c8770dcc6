"""Attention logits when the head size itself grows.

Models divide q·k by sqrt(d_head). That is right as long as d_head stays what it was in the base; when it grows,
q and k align in training and the logits want another sqrt. The factor goes on the queries.
"""

import re

from torch import nn

from completep.errors import UserError
from completep.rules.multipliers import Multiplier
from completep.rules.roles import Anatomy
from completep.rules.table import Rules

HEAD_SIZE = ("head_dim", "d_head", "head_size", "attention_head_size", "dim_head", "size_per_head")
SCALE = ("scaling", "scale", "softmax_scale", "norm_factor", "scale_attn", "inv_norm_factor")
QUERY_NORM = re.compile(r"(^|_)(q|query)_?(norm|layernorm|ln)$|^(norm|ln)_?(q|query)$")
QUERY = re.compile(r"^(q|query|wq|to_q|w_q)(_proj|_lin|_linear)?$")


def head_size(module: nn.Module) -> int | None:
    return next((v for a in HEAD_SIZE if isinstance(v := getattr(module, a, None), int)), None)


def divides_by_head_size(module: nn.Module, size: int) -> bool:
    """True for models that already divide by d_head instead of its root."""
    return any(isinstance(v := getattr(module, a, None), float) and abs(v * size - 1) < 1e-6 for a in SCALE)


def attention_multipliers(model: nn.Module, base: nn.Module, found: Anatomy, rules: Rules) -> list[Multiplier]:
    base_sizes = {found.template(n): s for n, m in base.named_modules() if (s := head_size(m)) and found.stack_of(n)}
    placed: dict[float, tuple[list[str], list[str]]] = {}
    for name, module in model.named_modules():
        size, base_size = head_size(module), base_sizes.get(found.template(name))
        if (
            not size
            or not base_size
            or size == base_size
            or not found.stack_of(name)
            or divides_by_head_size(module, size)
        ):
            continue
        factor = rules.attention(size / base_size)
        if factor == 1.0:
            continue
        query = _query(module)
        if query is None:
            if not any(True for _ in module.children()):
                continue  # a part of an attention module that also knows the head size
            raise UserError(
                f"'{name}' has heads of {size} where the base has {base_size}, and its queries come from a fused projection",
                fix=f"keep the head size at {base_size} and grow the number of heads",
            )
        modules, parameters = placed.setdefault(factor, ([], []))
        modules.append(f"{name}.{query}")
        parameters += [f"{name}.{query}.{p}" for p, _ in module.get_submodule(query).named_parameters()]
    return [Multiplier("attention", factor, tuple(m), tuple(p)) for factor, (m, p) in placed.items()]


def _query(module: nn.Module) -> str | None:
    """What the factor goes on: the norm on the queries if there is one (it would undo a factor before it), else their projection."""
    names = [n for n, _ in module.named_children()]
    return next((n for n in names if QUERY_NORM.search(n)), None) or next((n for n in names if QUERY.search(n)), None)
