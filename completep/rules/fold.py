"""The folded form: y = c·W x is the same training run as y = W'x with W' = cW, given the matching lr, λ and ε.

Weights, gradients, optimizer settings, optimizer state and schedulers change together, so a run can change its style at
any step.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from completep.errors import UserError, some
from completep.rules.table import Folded, OptimizerKind, optimizer_kind

RATES = (
    "lr",
    "initial_lr",
    "lr_scale",
    "max_lr",
    "min_lr",
)  # what torch's schedulers and `param_groups` keep in a group


Tensors = Mapping[str, nn.Parameter]
ByName = Mapping[str, float]
Optimizers = Collection[torch.optim.Optimizer]
Schedulers = Collection[object]


def move(
    tensors: Tensors, factors: ByName, offsets: ByName, optimizers: Optimizers = (), schedulers: Schedulers = ()
) -> None:
    """Change w to c·(w + offset) - offset, with c and offset by name, and everything else to match.

    All checks come first: if one fails, nothing has changed.
    """
    changes = _plan(tensors, factors, optimizers, schedulers)
    for change in changes:
        change()
    with torch.no_grad():
        for name, parameter in tensors.items():
            c = factors[name]
            if c != 1.0 and not parameter.is_meta:
                parameter.mul_(c).add_((c - 1) * offsets[name])
                if parameter.grad is not None:
                    parameter.grad.div_(c)


def _plan(
    tensors: Tensors, factors: ByName, optimizers: Optimizers, schedulers: Schedulers
) -> list[Callable[[], None]]:
    """The changes to optimizers and schedulers, after checking that all of them are possible."""
    names = {id(p): name for name, p in tensors.items()}
    changes: list[Callable[[], None]] = []
    held: set[str] = set()
    for optimizer in optimizers:
        kind = optimizer_kind(optimizer)
        by_group = [_group_factor(group, names, factors) for group in optimizer.param_groups]
        held |= {names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names}
        for parameter, state in optimizer.state.items():
            _check_state(names.get(id(parameter), "?"), parameter, state, kind)
        changes.append(partial(_move_optimizer, optimizer, kind, by_group))
        rates = [Folded.by(c, kind.column).lr for c in by_group]
        for scheduler in schedulers:
            if getattr(scheduler, "optimizer", optimizer) is optimizer:
                _check_scheduler(scheduler, rates)
                changes.append(partial(_move_scheduler, scheduler, rates))
    moved = [n for n, p in tensors.items() if p.requires_grad and factors[n] != 1.0]
    missing = [n for n in moved if n not in held]
    if optimizers and missing:
        what = f"no optimizer that was given holds {some(missing)}"
        raise UserError(what, fix="pass every optimizer of this model, for example fold(muon, adamw)")
    return changes


@torch.no_grad()
def _move_optimizer(optimizer: torch.optim.Optimizer, kind: OptimizerKind, by_group: list[float]) -> None:
    for group, c in zip(optimizer.param_groups, by_group, strict=True):
        folded = Folded.by(c, kind.column)
        changes = {**dict.fromkeys(RATES, folded.lr), "weight_decay": folded.weight_decay, "eps": folded.eps}
        for key, factor in changes.items():
            if key in group and not (key == "eps" and kind.eps is None):
                group[key] *= factor
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                power = (kind.state or {}).get(key, 0)
                if power and isinstance(value, Tensor):
                    value.div_(c**power)  # the gradient of W' is 1/c times that of W


def _group_factor(group: Mapping[str, Any], names: Mapping[int, str], factors: ByName) -> float:
    in_group = {factors[names[id(p)]] for p in group["params"] if id(p) in names}
    if len(in_group) > 1:
        listed = ", ".join(f"{c:g}" for c in sorted(in_group))
        what = f"one optimizer group holds parameters that fold by different factors: {listed}"
        raise UserError(what, fix="build the optimizer from scaling.param_groups(...)")
    return in_group.pop() if in_group else 1.0


def _check_state(name: str, parameter: Tensor, state: Mapping[str, object], kind: OptimizerKind) -> None:
    for key, value in state.items():
        per_entry = isinstance(value, Tensor) and value.shape == parameter.shape and value.dim()
        if per_entry and key not in (kind.state or {}):
            what = f"the optimizer keeps '{key}' for '{name}', which the table does not know"
            fix = "fold before the first step, or after the last one without passing the optimizer"
            raise UserError(what, fix=fix)


def _check_scheduler(scheduler: object, rates: list[float]) -> None:
    for inner in getattr(scheduler, "_schedulers", []):
        _check_scheduler(inner, rates)
    floor = getattr(scheduler, "eta_min", 0)
    if floor and set(rates) != {1.0}:
        what = f"{type(scheduler).__name__}(eta_min={floor}) has one floor for all groups, but their rates differ"
        raise UserError(what, fix="use eta_min=0, or a LambdaLR whose factor does not fall below your floor")


def _move_scheduler(scheduler: object, rates: list[float]) -> None:
    """Schedulers remember the first learning rate of every group; these change as well."""
    for inner in getattr(scheduler, "_schedulers", []):
        _move_scheduler(inner, rates)
    for attribute in ("base_lrs", "min_lrs", "max_lrs", "_last_lr"):
        values = getattr(scheduler, attribute, None)
        if isinstance(values, list) and len(values) == len(rates):
            setattr(scheduler, attribute, [v * rate for v, rate in zip(values, rates, strict=True)])
