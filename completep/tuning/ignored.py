"""Refuse a script that ignores what it is given: its losses are the same whatever the value, the seed or the shape."""

import math
from collections.abc import Sequence

from completep.errors import UserError
from completep.sweep.search import Losses, Runner
from completep.sweep.task import Trial, Value
from completep.tuning.space import Dimension

Place = tuple[Value, ...]  # values on some axes


def refuse_ignored(d: Dimension, losses: Losses) -> None:
    """Every value of a dimension gives the same loss: the script ignores this argument."""
    finite = {place: loss for place, loss in losses.items() if math.isfinite(loss)}
    if len(finite) > 1 and len(set(finite.values())) == 1:
        refuse_argument(d, [d.near(place) for place in sorted(finite)], next(iter(finite.values())))


def refuse_argument(d: Dimension, values: Sequence[Value], loss: float) -> None:
    shown = " and ".join(d.show(v) for v in values[:2])
    raise UserError(
        f"the script seems to ignore {d.name}: with {d.name} = {shown} the loss is {loss!r}",
        fix=f"check that the command passes {{{d.name}}} on, and that the script uses it",
    )


def refuse_ignored_seeds(engine: Runner, trials: Sequence[Trial]) -> None:
    """All seeds give the same loss at every point: the script does not use its seed."""
    groups = losses_over(engine, trials, ("seed",))
    if groups and all(len(set(losses.values())) == 1 for losses in groups):
        seeds, loss = ", ".join(str(seed) for (seed,) in groups[0]), next(iter(groups[0].values()))
        raise UserError(
            f"the script seems to ignore the seed: seeds {seeds} give the same loss {loss!r}",
            fix="let the seed set the initial weights and the order of the data; or use one seed",
        )


def refuse_ignored_shapes(engine: Runner, trials: Sequence[Trial]) -> None:
    """All shapes give the same loss for every value and seed: the script does not use width and depth."""
    groups = losses_over(engine, trials, ("width", "depth"))
    if len(groups) > 1 and all(len(set(losses.values())) == 1 for losses in groups):
        shapes, loss = " and ".join(f"{width} × {depth}" for width, depth in groups[0]), next(iter(groups[0].values()))
        raise UserError(
            f"the script seems to ignore its shape: {shapes} give the same loss {loss!r}",
            fix="check that the command passes {width} and {depth} on, and that the script builds such a model",
        )


def losses_over(engine: Runner, trials: Sequence[Trial], axes: tuple[str, ...]) -> list[dict[Place, float]]:
    """Groups of runs that differ only on these axes: each maps the places there to their losses. Single runs are left
    out.
    """
    results = engine.store.results(trial.task for trial in trials)
    groups: dict[tuple[tuple[str, Value], ...], dict[Place, float]] = {}
    for trial in trials:
        loss = trial.task.loss(results.get(trial.task.id, {}))
        if loss is not None and math.isfinite(loss):
            others = tuple((name, value) for name, value in trial.point.items() if name not in axes)
            groups.setdefault(others, {})[tuple(trial.point[axis] for axis in axes)] = loss
    return [losses for losses in groups.values() if len(losses) > 1]
