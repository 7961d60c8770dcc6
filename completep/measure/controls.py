"""Ways to be wrong that the coordinate check must catch, each with what it must blame: its own negative controls."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from completep.measure.verdict import Axis
from completep.rules.table import COMPLETEP, MUP, ONE, SP, Column, Role, Rules, alpha, literature

BLOCK_VECTORS = (Role.HIDDEN_BIAS, Role.BLOCK_NORM, Role.QK_NORM)


@dataclass(frozen=True)
class Control:
    name: str
    rules: Rules
    axis: Axis
    blamed: tuple[Role, ...]
    eps: float = 1e-16


def unscaled(rules: Rules, column: str, roles: Collection[Role]) -> Rules:
    """The same table with one setting (lr, eps, …) of some roles left as tuned at the base."""
    adam = {
        role: replace(rule, **{column: ONE}) if role in roles else rule  # type: ignore[arg-type]
        for role, rule in rules.columns[Column.ADAM].items()
    }
    return replace(rules, name=f"{rules.name}, {column} unscaled", columns={Column.ADAM: adam})


LARGE_EPS = 0.1  # far above the gradients of a small model, so that it matters

CONTROLS = (
    Control("SP in depth", SP, "depth", (Role.HIDDEN, Role.HIDDEN_BIAS, Role.BLOCK_NORM)),
    Control("SP in width", SP, "width", (Role.HIDDEN,)),
    Control("muP in depth", MUP, "depth", (Role.HIDDEN, Role.HIDDEN_BIAS, Role.BLOCK_NORM)),
    Control("literature alpha=0.5", literature(0.5), "depth", (Role.HIDDEN_BIAS, Role.BLOCK_NORM)),
    Control("bias lr unscaled", unscaled(alpha(0.5), "lr", [Role.HIDDEN_BIAS]), "depth", (Role.HIDDEN_BIAS,)),
    Control("norm lr unscaled", unscaled(alpha(0.5), "lr", [Role.BLOCK_NORM]), "depth", (Role.BLOCK_NORM,)),
    Control("hidden lr unscaled, depth", unscaled(alpha(0.5), "lr", [Role.HIDDEN]), "depth", (Role.HIDDEN,)),
    Control("hidden lr unscaled, width", unscaled(COMPLETEP, "lr", [Role.HIDDEN]), "width", (Role.HIDDEN,)),
    Control("epsilon unscaled", unscaled(COMPLETEP, "eps", list(Role)), "depth", (Role.HIDDEN,), LARGE_EPS),
)
RIGHT = (
    Control("CompleteP in depth", COMPLETEP, "depth", ()),
    Control("CompleteP in width", COMPLETEP, "width", ()),
    Control("alpha=0.5 in depth", alpha(0.5), "depth", ()),
    Control("CompleteP in depth, large epsilon", COMPLETEP, "depth", (), LARGE_EPS),
)
