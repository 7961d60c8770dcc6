"""Mistakes that the checks must catch, with what they must blame: their negative controls."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from completep.measure.check import check
from completep.measure.words import Axis
from completep.model.gpt import gpt
from completep.rules.parametrize import parametrize
from completep.rules.table import COMPLETEP, MUP, ONE, SP, Column, Role, Rules, alpha, literature

Pair = Callable[[int, int], tuple[nn.Module, torch.optim.Optimizer]]


@dataclass(frozen=True)
class Control:
    name: str
    rules: Rules
    axis: Axis
    blamed: tuple[Role, ...]
    eps: float = 1e-16
    factory: "Pair | None" = None  # where the mistake is not in the rules


def one_block_unscaled(width: int, depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """CompleteP, except that the last block's branches are added without a multiplier."""
    model = gpt(width, depth, 256, head_size=16)
    scaling = parametrize(model, base=lambda: gpt(32, 2, 256, head_size=16), rules=COMPLETEP)
    scaling.init_(0.06, seed=torch.initial_seed())
    model.blocks[-1].multiplier = 1.0  # type: ignore[assignment]
    return model, torch.optim.AdamW(scaling.param_groups(2e-3, eps=1e-16), betas=(0.9, 0.95))


def planted(
    family: Callable[[int, int], nn.Module],
    base: tuple[int, int],
    fault: tuple[str, str, Axis, float],
    width: int,
    depth: int,
    *,
    std: float = 0.06,
    example: object = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """CompleteP by hand, with one setting of one tensor × (size ratio)^exponent."""
    tensor, setting, axis, exponent = fault
    model = family(width, depth)
    scaling = parametrize(model, base=lambda: family(*base), rules=COMPLETEP, example=example)
    scaling.init_(std, seed=torch.initial_seed())
    ratio = (width / base[0] if axis == "width" else depth / base[1]) ** exponent
    groups = []
    for name, p in model.named_parameters():
        f = scaling.settings(name)
        group = {"params": [p], "lr": 2e-3 * f.lr, "weight_decay": 0.1 * f.weight_decay, "eps": 1e-12 * f.eps}
        groups.append(group)
        if scaling.anatomy.template(name) != tensor:
            continue
        if setting == "init":
            offset = scaling.anatomy.part(name).offset
            with torch.no_grad():
                p.add_(offset).mul_(ratio).sub_(offset)
        elif setting == "multiplier":
            module = model.get_submodule(name.rpartition(".")[0])
            module.register_forward_hook(lambda m, args, out: out * ratio)
        else:
            key = {"learning rate": "lr", "epsilon": "eps", "weight decay": "weight_decay"}[setting]
            group[key] *= ratio  # type: ignore[operator]
    return model, torch.optim.AdamW(groups, betas=(0.9, 0.95))


def assert_named(
    family: Callable[[int, int], nn.Module],
    base: tuple[int, int],
    fault: tuple[str, str, Axis, float],
    sizes: Mapping[str, tuple[int, ...]],
) -> None:
    """The check fails on this fault, and names it with its exponent and nothing else."""
    tensor, setting, axis, exponent = fault
    result = check(partial(planted, family, base, fault), **sizes, base=base, workers=1)
    assert result.verdict == "FAIL"
    assert {(f.tensor, f.setting, f.axis) for f in result.culprits} == {(tensor, setting, axis)}
    assert abs(result.culprits[0].deviation - exponent) < 0.12


def unscaled(rules: Rules, column: str, roles: Collection[Role]) -> Rules:
    """The same table with one setting (lr, eps, …) of some roles left as tuned at the base."""
    adam = {
        role: replace(rule, **{column: ONE}) if role in roles else rule  # type: ignore[arg-type]
        for role, rule in rules.columns[Column.ADAM].items()
    }
    name = f"{rules.name}, {column} unscaled"
    return replace(rules, key=name, name=name, columns={Column.ADAM: adam})


LARGE_EPS = 0.1  # far above the gradients of a small model, so that ε matters

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
    Control("one block's multiplier removed", COMPLETEP, "depth", (), factory=one_block_unscaled),
)
RIGHT = (
    Control("CompleteP in depth", COMPLETEP, "depth", ()),
    Control("CompleteP in width", COMPLETEP, "width", ()),
    Control("alpha=0.5 in depth", alpha(0.5), "depth", ()),
    Control("CompleteP in depth, large epsilon", COMPLETEP, "depth", (), LARGE_EPS),
)
