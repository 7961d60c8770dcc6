"""All statistics in one place, on scipy: slopes with intervals, minima of sampled curves, resampling over seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
LEVEL = 0.9  # of every interval, unless said otherwise


@dataclass(frozen=True)
class Interval:
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Slope:
    """y = value · x + level, with an interval for the slope."""

    value: float
    low: float
    high: float


def slope(x: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None, level: float = LEVEL) -> Slope:
    """Least squares with a level of its own for every group (a seed, a model), and Student's interval.

    With no degrees of freedom left the interval is as if there were one.
    """
    from scipy.special import stdtrit  # Student's quantile; scipy.stats would take half a second to import

    dx, dy = np.array(x, float), np.array(y, float)
    labels = np.zeros(len(dx)) if groups is None else np.asarray(groups)
    kinds = np.unique(labels)
    for kind in kinds:
        dx[labels == kind] -= dx[labels == kind].mean()
        dy[labels == kind] -= dy[labels == kind].mean()
    spread = float(dx @ dx)
    value = float(dx @ dy) / spread
    freedom = max(1, len(dx) - len(kinds) - 1)
    residual = dy - value * dx
    reach = float(np.sqrt(residual @ residual / freedom / spread) * stdtrit(freedom, (1 + level) / 2))
    return Slope(value, value - reach, value + reach)


def log_slope(size: ArrayLike, value: ArrayLike, seed: ArrayLike) -> Slope:
    """value ∝ size^slope, with a level per seed."""
    return slope(np.log(np.asarray(size, float)), np.log(np.maximum(np.asarray(value, float), 1e-300)), seed)


def mean_over_seeds(losses: Floats) -> Floats:
    """By value, over the seeds that were run (NaN: not run); infinite where one diverged, or none was run."""
    run = ~np.isnan(losses)
    total, count = np.where(run, losses, 0.0).sum(1), run.sum(1)
    return np.where(count > 0, total / np.maximum(count, 1), np.inf)


def line(x: ArrayLike, y: ArrayLike) -> tuple[float, float]:
    """(slope, intercept) of least squares, where no interval is needed."""
    fitted = polynomial(x, y, 1).convert()
    return float(fitted.coef[1]), float(fitted.coef[0])


def polynomial(x: ArrayLike, y: ArrayLike, degree: int) -> np.polynomial.Polynomial:
    """The polynomial of least squares."""
    return np.polynomial.Polynomial.fit(np.asarray(x, float), np.asarray(y, float), degree)


@dataclass(frozen=True)
class Minimum:
    """The minimum of a sampled curve."""

    place: float
    height: float
    interior: bool  # False where it is the first or the last value tried


def minimum(x: Floats, y: Floats) -> Minimum:
    """By a parabola through the lowest point and its neighbours."""
    i = int(np.argmin(y))
    interior = 0 < i < len(x) - 1
    if not interior or not (np.isfinite(y[i - 1]) and np.isfinite(y[i + 1])):
        return Minimum(float(x[i]), float(y[i]), interior)
    slope, curvature = _parabola(x, y, i)
    if curvature <= 0:
        return Minimum(float(x[i]), float(y[i]), True)
    return Minimum(float(x[i]) - slope / (2 * curvature), float(y[i]) - slope**2 / (4 * curvature), True)


def _parabola(x: Floats, y: Floats, i: int) -> tuple[float, float]:
    """(slope at x[i], curvature) of the parabola through x[i] and its neighbours, by divided differences."""
    (x0, x1, x2), (y0, y1, y2) = x[i - 1 : i + 2].tolist(), y[i - 1 : i + 2].tolist()
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    curvature = (right - left) / (x2 - x0)
    return left + curvature * (x1 - x0), curvature


def height_at(x: Floats, y: Floats, place: float) -> float:
    """The curve between the values tried: a parabola through the nearest three; infinite outside them."""
    if not x[0] <= place <= x[-1]:
        return float("inf")
    exact = np.flatnonzero(abs(x - place) < 1e-9)
    if len(exact):
        return float(y[exact[0]])
    i = min(max(int(np.argmin(abs(x - place))), 1), len(x) - 2)
    if len(x) > 2 and np.isfinite(y[i - 1 : i + 2]).all():
        slope, curvature = _parabola(x, y, i)
        step = place - float(x[i])
        return float(y[i]) + slope * step + curvature * step**2
    left = int(np.searchsorted(x, place)) - 1
    return float(np.interp(place, x[left : left + 2], y[left : left + 2]))


def resampled_seeds(losses: Floats, draws: int, least: int) -> "NDArray[np.int64] | None":
    """Columns drawn with replacement among the seeds that were run at every value; None where those are fewer than
    `least`.
    """
    whole = np.flatnonzero(~np.isnan(losses).any(0))
    return np.random.default_rng(0).choice(whole, (draws, len(whole))) if len(whole) >= least else None


def quantile_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2], method="nearest")
    return Interval(float(low), float(high))


def paired_bootstrap(
    statistic: Callable[[Floats, Floats], tuple[float, ...]], one: Floats, two: Floats, draws: int, least: int
) -> list[Interval] | None:
    """Intervals of several statistics of two mean curves, whose seeds are drawn independently of each other."""
    picks, others = (resampled_seeds(losses, draws, least) for losses in (one, two))
    if picks is None or others is None:
        return None
    others = np.random.default_rng(1).permuted(others, axis=0)
    rows = [
        statistic(mean_over_seeds(one[:, p]), mean_over_seeds(two[:, q])) for p, q in zip(picks, others, strict=True)
    ]
    return [quantile_interval(column) for column in zip(*rows, strict=True)]


def bootstrap(statistic: Callable[[Floats], float], losses: Floats, draws: int, least: int) -> Interval | None:
    """The interval of a statistic of the seeds' mean curve."""
    picks = resampled_seeds(losses, draws, least)
    return None if picks is None else quantile_interval([statistic(mean_over_seeds(losses[:, p])) for p in picks])
