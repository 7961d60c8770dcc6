"""The folded form: y = c·W x is the same training run as y = W'x with W' = cW, given the right lr, λ and ε.

Weights, optimizer settings, optimizer state and schedulers move together, so a run can change its style at any step.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from completep.errors import UserError, some
from completep.rules import multipliers
from completep.rules.table import Folded, OptimizerKind, optimizer_kind

if TYPE_CHECKING:
    from completep.rules.scaling import Scaling, Style

RATES = ("lr", "initial_lr", "lr_scale", "max_lr", "min_lr")  # all that torch's schedulers and we keep in a group


def restyle(
    scaling: "Scaling", style: "Style", optimizers: "tuple[torch.optim.Optimizer, ...]", schedulers: "Collection[Any]"
) -> "Scaling":
    if style == scaling.style:
        return scaling
    unfoldable = [m.kind for m in scaling.multipliers if m.factor != 1.0 and not m.parameters]
    if style == "folded" and unfoldable:
        raise UserError(
            f"the {unfoldable[0]} multiplier cannot be folded: the embeddings are tied and there is no final norm to take it",
            fix="keep style='multiplier', untie the embeddings, or add a final norm",
        )
    if style == "multiplier":
        multipliers.needs_modules(scaling.multipliers, scaling.model)
    factors = {name: (r.fold if style == "folded" else 1 / r.fold) for name, r in scaling.parameters.items()}
    # Everything that may refuse comes first, so that a refusal has changed nothing.
    moves = _plan_moves(scaling, factors, optimizers, schedulers)
    for move in moves:
        move()
    _move_weights(scaling, factors)
    if style == "folded":
        multipliers.remove(scaling.model)
    else:
        multipliers.install(scaling.model, scaling.multipliers)
    scaling.style = style
    return scaling


@torch.no_grad()
def _move_weights(scaling: "Scaling", factors: dict[str, float]) -> None:
    for name, parameter in scaling._tensors():
        c, offset = factors[name], scaling.parameters[name].part.offset
        if c != 1.0 and not parameter.is_meta:
            parameter.mul_(c).add_((c - 1) * offset)  # c·(w + offset) - offset
            if parameter.grad is not None:
                parameter.grad.div_(c)


def _plan_moves(
    scaling: "Scaling",
    factors: dict[str, float],
    optimizers: "tuple[torch.optim.Optimizer, ...]",
    schedulers: "Collection[Any]",
) -> "list[Callable[[], None]]":
    """What is to be done to optimizers and schedulers, once all of it is known to be possible."""
    names = {id(p): name for name, p in scaling._tensors()}
    moves: list[Callable[[], None]] = []
    held: set[str] = set()
    for optimizer in optimizers:
        kind = optimizer_kind(optimizer)
        by_group = [_group_factor(group, names, factors) for group in optimizer.param_groups]
        held |= {names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names}
        for parameter, state in optimizer.state.items():
            _check_state(names.get(id(parameter), "?"), parameter, state, kind)
        moves.append(partial(_move_optimizer, optimizer, kind, by_group))
        own = [s for s in schedulers if getattr(s, "optimizer", optimizer) is optimizer]
        rates = [Folded.by(c, kind.column).lr for c in by_group]
        for scheduler in own:
            _check_scheduler(scheduler, rates)
            moves.append(partial(_move_scheduler, scheduler, rates))
    left = [n for n, p in scaling._tensors() if optimizers and p.requires_grad and factors[n] != 1.0 and n not in held]
    if left:
        raise UserError(
            f"no optimizer that was given holds {some(left)}",
            fix="give every optimizer of this model: fold(muon, adamw)",
        )
    return moves


@torch.no_grad()
def _move_optimizer(optimizer: torch.optim.Optimizer, kind: OptimizerKind, by_group: list[float]) -> None:
    for group, c in zip(optimizer.param_groups, by_group, strict=True):
        by = Folded.by(c, kind.column)
        for key, factor in {**dict.fromkeys(RATES, by.lr), "weight_decay": by.weight_decay, "eps": by.eps}.items():
            if key in group and not (key == "eps" and kind.eps is None):
                group[key] *= factor
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                power = (kind.state or {}).get(key, 0)
                if power and isinstance(value, Tensor):
                    value.div_(c**power)  # the gradient of W' is 1/c that of W


def _group_factor(group: dict[str, Any], names: dict[int, str], factors: dict[str, float]) -> float:
    found = {factors[names[id(p)]] for p in group["params"] if id(p) in names}
    if len(found) > 1:
        raise UserError(
            "one optimizer group holds parameters that fold by different factors: "
            + ", ".join(f"{c:g}" for c in sorted(found)),
            fix="build the optimizer from scaling.param_groups(...)",
        )
    return found.pop() if found else 1.0


def _check_state(name: str, parameter: Tensor, state: dict[str, Any], kind: OptimizerKind) -> None:
    for key, value in state.items():
        if (
            isinstance(value, Tensor)
            and value.shape == parameter.shape
            and value.dim()
            and key not in (kind.state or {})
        ):
            raise UserError(
                f"the optimizer keeps '{key}' for '{name}', and I do not know how it scales with the gradient",
                fix="fold before the first step or after the last",
            )


def _check_scheduler(scheduler: Any, rates: list[float]) -> None:
    for inner in getattr(scheduler, "_schedulers", []):
        _check_scheduler(inner, rates)
    if getattr(scheduler, "eta_min", 0) and set(rates) != {1.0}:
        raise UserError(
            f"{type(scheduler).__name__}(eta_min={scheduler.eta_min}) has one floor for all groups; theirs differ",
            fix="use eta_min=0, or a LambdaLR whose factor stops at your floor",
        )


def _move_scheduler(scheduler: Any, factors: list[float]) -> None:
    """Schedulers remember every group's first learning rate; those move along."""
    for inner in getattr(scheduler, "_schedulers", []):
        _move_scheduler(inner, factors)
    for attribute in ("base_lrs", "min_lrs", "max_lrs", "_last_lr"):
        values = getattr(scheduler, attribute, None)
        if isinstance(values, list) and len(values) == len(factors):
            setattr(scheduler, attribute, [v * f for v, f in zip(values, factors, strict=True)])
