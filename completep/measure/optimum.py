"""Where a hyperparameter's curve has its minimum, with an interval from a bootstrap over seeds."""

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from completep.errors import UserError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Optimum:
    """Where a hyperparameter's curve has its minimum."""

    value: float
    loss: float
    interval: Interval | None
    interior: bool  # False where the best point is the first or last that was tried


def optimum(
    frame: pl.DataFrame, hyperparameter: str = "lr", *, level: float = 0.9, draws: int = 500, seed: int = 0
) -> Optimum:
    """Minimum of loss over log2 of a hyperparameter: a parabola through the best point and its neighbours.

    `frame` has columns of that name, `loss` and, where there are several, `seed`. The bootstrap draws seeds.
    """
    x, losses = curve(frame, hyperparameter)
    if len(x) < 3 or np.isfinite(average(losses)).sum() < 3:
        raise UserError(
            f"{int(np.isfinite(average(losses)).sum())} finite points are too few for a minimum",
            fix="try at least three values",
        )
    value, loss, interior = vertex(x, average(losses))
    interval = None
    if losses.shape[1] > 1:
        rng = np.random.default_rng(seed)
        picks = rng.integers(losses.shape[1], size=(draws, losses.shape[1]))
        found = [vertex(x, average(losses[:, pick]))[0] for pick in picks]
        low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
        interval = Interval(2 ** float(low), 2 ** float(high))
    return Optimum(2**value, loss, interval, interior)


def curve(frame: pl.DataFrame, hyperparameter: str) -> tuple[Floats, Floats]:
    """(log2 of the values tried, losses by value and seed): infinite where it diverged, NaN where it was not run."""
    for column in (hyperparameter, "loss"):
        if column not in frame.columns:
            raise UserError(f"the frame has no column {column!r}", fix=f"it has {', '.join(frame.columns)}")
    if "seed" not in frame.columns:
        frame = frame.with_columns(seed=pl.lit(0))
    values = frame[hyperparameter].to_numpy()
    if not (np.isfinite(values.astype(float)) & (values > 0)).all():
        odd = next(v for v in values if not (np.isfinite(float(v)) and v > 0))
        raise UserError(f"{hyperparameter} = {odd} has no place on a logarithmic axis", fix="leave those runs out")
    # NaN is what diverged; what was never run is null, and counts for nothing.
    finite = pl.when(pl.col("loss").is_finite()).then("loss").when(pl.col("loss").is_not_null()).then(np.inf)
    frame = frame.with_columns(loss=finite)
    table = frame.pivot(on="seed", index=hyperparameter, values="loss", aggregate_function="mean").sort(hyperparameter)
    losses = table.drop(hyperparameter).to_numpy().astype(float)
    return np.log2(table[hyperparameter].to_numpy().astype(float)), losses


def average(losses: Floats) -> Floats:
    """Mean over the seeds that were run; infinite where one of them diverged, or none was run."""
    run = ~np.isnan(losses)
    total, count = np.where(run, losses, 0.0).sum(1), run.sum(1)
    return np.where(count > 0, total / np.maximum(count, 1), np.inf)


def vertex(x: Floats, y: Floats) -> tuple[float, float, bool]:
    """(place, height, interior?) of the minimum of a sampled curve, by a local parabola."""
    at = int(np.argmin(y))
    if at in (0, len(x) - 1) or not (np.isfinite(y[at - 1]) and np.isfinite(y[at + 1])):
        return float(x[at]), float(y[at]), at not in (0, len(x) - 1)
    around = slice(at - 1, at + 2)
    a, b, c = (float(v) for v in np.polyfit(x[around] - x[at], y[around], 2))
    if a <= 0:
        return float(x[at]), float(y[at]), True
    return float(x[at]) - b / (2 * a), c - b * b / (4 * a), True


def height_at(x: Floats, y: Floats, place: float) -> float:
    """The curve between the values tried: a parabola through the nearest three; infinite outside, and beside what diverged."""
    if not x[0] <= place <= x[-1]:
        return float("inf")
    exact = np.flatnonzero(abs(x - place) < 1e-9)
    if len(exact):
        return float(y[exact[0]])
    at = min(max(int(np.argmin(abs(x - place))), 1), len(x) - 2)
    around = slice(at - 1, at + 2)
    if np.isfinite(y[around]).all():
        return float(np.polyval(np.polyfit(x[around] - place, y[around], 2), 0.0))
    left = int(np.searchsorted(x, place)) - 1
    return float(np.interp(place, x[left : left + 2], y[left : left + 2]))
