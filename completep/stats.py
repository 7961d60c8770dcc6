"""All statistics in one place, on scipy: slopes, minima of sampled curves, and their intervals.

Every interval is Student's. The runs of one seed tend to be better or worse together, over all values of a sweep, so
every model has a level per seed.
benchmarks/coverage.py measures how often the 90 % intervals contain the truth.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import polars as pl

Floats = NDArray[np.float64]
LEVEL = 0.9  # of every interval, unless a level is given


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


@dataclass(frozen=True)
class Estimate:
    """A number, its standard error, and the degrees of freedom of the standard error."""

    value: float
    error: float
    freedom: float

    def reach(self, level: float = LEVEL) -> float:
        """Half the width of Student's interval."""
        return quantile(self.freedom, level) * self.error


def mean_estimate(values: ArrayLike) -> Estimate:
    """The mean of independent values. From one value it has no degrees of freedom."""
    x = np.asarray(values, float)
    return Estimate(float(x.mean()), float(x.std(ddof=1)) / len(x) ** 0.5 if len(x) > 1 else np.inf, len(x) - 1)


def error_of_mean(errors: ArrayLike) -> float:
    """The standard error of the mean of independent estimates, from their own standard errors."""
    e = np.asarray(errors, float)
    return float(np.sqrt(e @ e)) / len(e)


def ratio_interval(one: Estimate, two: Estimate, covariance: float = 0.0, level: float = LEVEL) -> Interval:
    """The interval of one / two, by Fieller's theorem: every ratio ρ at which one - ρ · two does not differ from 0.

    It is unbounded if `two` does not differ from 0. The degrees of freedom are Welch's, at the estimated ratio.
    """
    if min(one.freedom, two.freedom) < 1:
        return Interval(-np.inf, np.inf)
    ratio = one.value / two.value
    t = quantile(welch(one.error**2, one.freedom, (ratio * two.error) ** 2, two.freedom), level)
    a = two.value**2 - (t * two.error) ** 2
    b, c = one.value * two.value - t**2 * covariance, one.value**2 - (t * one.error) ** 2
    if a <= 0:
        return Interval(-np.inf, np.inf)
    reach = float(np.sqrt(max(b**2 - a * c, 0.0)))
    return Interval((b - reach) / a, (b + reach) / a)


def slope(x: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None, level: float = LEVEL) -> Slope:
    """Least squares with a level of its own for every group (a seed, a model), and Student's interval.

    If no degrees of freedom are left, the interval is computed with one.
    """
    estimate = slope_estimate(x, y, groups)
    reach = estimate.reach(level)
    return Slope(estimate.value, estimate.value - reach, estimate.value + reach)


def slope_estimate(x: ArrayLike, y: ArrayLike, groups: ArrayLike | None = None) -> Estimate:
    """The slope of least squares, with a level of its own for every group."""
    labels = np.zeros(len(np.asarray(x))) if groups is None else np.asarray(groups)
    _, group, counts = np.unique(labels, return_inverse=True, return_counts=True)
    dx, dy = (v - (np.bincount(group, v) / counts)[group] for v in (np.asarray(x, float), np.asarray(y, float)))
    spread = float(dx @ dx)
    value = float(dx @ dy) / spread
    freedom = max(1, len(dx) - len(counts) - 1)
    residual = dy - value * dx
    return Estimate(value, float(np.sqrt(residual @ residual / freedom / spread)), freedom)


def slope_weights(x: ArrayLike) -> Floats:
    """How much the slope of least squares rises with each y."""
    places = np.asarray(x, float)
    dx = places - places.mean()
    return np.asarray(dx / (dx @ dx))


def log_slope(size: ArrayLike, value: ArrayLike, seed: ArrayLike) -> Slope:
    """value ∝ size^slope, with a level per seed."""
    return slope(np.log(np.asarray(size, float)), np.log(np.maximum(np.asarray(value, float), 1e-300)), seed)


def mean_over_seeds(losses: Floats) -> Floats:
    """The mean loss of each value over the seeds that were run (NaN: not run); infinite if one diverged or none ran."""
    run = ~np.isnan(losses)
    total, count = np.where(run, losses, 0.0).sum(1), run.sum(1)
    return np.where(count > 0, total / np.maximum(count, 1), np.inf)


def mean_loss(frame: "pl.DataFrame", *by: str) -> "pl.DataFrame":
    """The mean loss of finished runs over seeds, by point, in the order in which the points first appear.

    If a loss is not finite, the mean of its point is not finite either.
    """
    import polars as pl

    ended = frame.filter(pl.col("loss").is_not_null())
    return ended.group_by(*by, maintain_order=True).agg(pl.col("loss").mean())


def mean_and_range(frame: "pl.DataFrame", *by: str) -> "pl.DataFrame":
    """`mean_loss`, with the `lowest` and `highest` loss of the seeds beside it."""
    import polars as pl

    ended = frame.filter(pl.col("loss").is_not_null())
    loss = pl.col("loss")
    return ended.group_by(*by, maintain_order=True).agg(loss.mean(), lowest=loss.min(), highest=loss.max())


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
    interior: bool  # False if it is the first or the last value tried


def minimum(x: Floats, y: Floats) -> Minimum:
    """The minimum of the parabola through the lowest point and its neighbours."""
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
    """The height of the curve, by a parabola through the nearest three values; infinite outside the values tried."""
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


def quantile(freedom: float, level: float = LEVEL) -> float:
    """Half the width of Student's interval, in standard errors."""
    from scipy.special import stdtrit  # scipy.stats would take half a second to import

    return float(stdtrit(freedom, (1 + level) / 2))


def beyond(value: float, error: float, freedom: float, limit: float) -> float:
    """The one-sided p-value of value ≤ limit."""
    from scipy.special import stdtr

    if error == 0:
        return 1.0 if value <= limit else 0.0
    return float(stdtr(freedom, (limit - value) / error))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for the number of tests (Holm 1979).

    The chance that any true null hypothesis is rejected at a level is at most that level.
    """
    order = np.argsort(p_values)
    steps = np.asarray(p_values, float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return [float(p) for p in adjusted]


def sideways(x: Floats, y: Floats, other: Floats) -> float:
    """How far the curve `other` lies to the right of the curve `y`: the shift of least squares, with a free level.

    Both are given at the places x, and y is interpolated linearly. The shift is at most half the range of x.
    """
    from scipy.optimize import minimize_scalar

    reach = (x[-1] - x[0]) / 2

    def misfit(shift: float) -> float:
        inside = (x - shift >= x[0]) & (x - shift <= x[-1])
        rest = other[inside] - np.interp(x[inside] - shift, x, y)
        return float(rest.var())

    shifts = np.linspace(-reach, reach, 201)
    best = int(np.argmin([misfit(s) for s in shifts]))
    low, high = shifts[max(best - 1, 0)], shifts[min(best + 1, len(shifts) - 1)]
    return float(minimize_scalar(misfit, bounds=(low, high), method="bounded").x)


def mean_interval(values: ArrayLike, level: float = LEVEL) -> Interval | None:
    """The interval of the mean of independent values, such as one difference per seed. None from one value."""
    if np.size(values) < 2:
        return None
    mean = mean_estimate(values)
    reach = mean.reach(level)
    return Interval(mean.value - reach, mean.value + reach)


def welch(one: float, its_freedom: float, two: float, other_freedom: float) -> float:
    """Degrees of freedom of the sum of two variances (Welch & Satterthwaite)."""
    if one + two == 0:
        return min(its_freedom, other_freedom)
    return (one + two) ** 2 / (one**2 / its_freedom + two**2 / other_freedom)


@dataclass(frozen=True)
class Noise:
    """A standard deviation, and the degrees of freedom of its estimate."""

    value: float
    freedom: int

    def at_most(self, level: float) -> float:
        """The upper limit of the standard deviation, at this one-sided level."""
        from scipy.special import chdtri

        return float(self.value * (self.freedom / chdtri(self.freedom, level)) ** 0.5)


def noise_beside_levels(curves: "Sequence[Floats]") -> Noise | None:
    """The residual of log losses after a level per value and a level per seed, over all curves.

    It is independent of the means of the values. Values that diverged for some seed are left out, and so are seeds with
    fewer than two values. None with fewer than two seeds of two values.
    """
    squares, freedom = 0.0, 0
    for losses in curves:
        with np.errstate(invalid="ignore"):
            logs = np.log(losses)
        logs = logs[:, np.isfinite(logs).sum(0) >= 2]
        logs = logs[np.isfinite(logs).all(1)]
        if min(logs.shape) < 2:
            continue
        rest = logs - logs.mean(0) - logs.mean(1, keepdims=True) + logs.mean()
        squares += float((rest**2).sum())
        freedom += (logs.shape[0] - 1) * (logs.shape[1] - 1)
    return Noise((squares / freedom) ** 0.5, freedom) if freedom else None


# A bowl in log2 of the value is c2·u² + c3·u³ + c4·u⁴ near its minimum. How far real ones are from parabolas: standard
# deviations of c3/c2 and c4/c2 with u in octaves, 1.6 times those in docs/results/lr-transfer (0.092 and 0.022).
SKEW, TAIL = 0.15, 0.035
REACH = 2.0  # octaves on either side that a fit uses
POINTS = 5  # values that a fit uses, if there are so many
NOISE = 0.005  # residual of log losses if one seed leaves it unknown; used for estimates, never for intervals
DEGREE = 4


@dataclass(frozen=True)
class Place:
    """log2 of a value, known or estimated."""

    value: float
    variance: float = 0.0
    freedom: float = np.inf


@dataclass(frozen=True)
class Bowl:
    """log loss as a polynomial in log2 of the value, near its minimum, with a level per seed."""

    origin: float
    coefficients: Floats  # of 1, u, u², u³, u⁴, with u = x - origin
    covariance: Floats
    freedom: float  # of the residual; 0 if there is no interval
    seeds: int  # number of seeds with at least three values
    low: float  # the fit holds from low to high
    high: float
    ends: Interval  # the ends of an interval that leaves that range: infinite, or a value that diverged
    edge: bool  # whether the best value is the first or the last one tried

    def height(self, x: float) -> float:
        return float(_powers(x - self.origin) @ self.coefficients)

    def difference(self, x: float, other: float) -> tuple[float, float]:
        """(height at x - height at other, its variance)."""
        weights = _powers(x - self.origin) - _powers(other - self.origin)
        return float(weights @ self.coefficients), float(weights @ self.covariance @ weights)

    def steepness(self, x: float) -> tuple[float, float]:
        """(derivative, its variance)."""
        weights = _derivative(x - self.origin)
        return float(weights @ self.coefficients), float(weights @ self.covariance @ weights)

    def holds(self, x: float) -> bool:
        return self.low - 1e-9 <= x <= self.high + 1e-9

    @cached_property
    def _minimum(self) -> float | None:
        steps = np.linspace(self.low, self.high, 401)
        heights = np.polynomial.Polynomial(self.coefficients)(steps - self.origin)
        i = int(heights.argmin())
        if i in (0, len(steps) - 1):
            return None
        return _root(lambda x: self.steepness(x)[0], float(steps[i - 1]), float(steps[i + 1]))

    @property
    def interior(self) -> bool:
        """Is there a minimum inside the values tried?"""
        return not self.edge and self._minimum is not None

    @property
    def place(self) -> float:
        """The minimum, or the best value if there is no minimum inside."""
        return self.origin if self.edge or self._minimum is None else self._minimum

    @cached_property
    def curvature(self) -> float:
        """The second derivative at the minimum."""
        return float(np.polynomial.Polynomial(self.coefficients).deriv(2)(self.place - self.origin))

    @property
    def place_variance(self) -> float:
        return self.steepness(self.place)[1] / self.curvature**2 if self.interior else np.inf

    @property
    def estimate(self) -> Place:
        return Place(self.place, self.place_variance, self.freedom)

    def optimum(self, reach: float | None = None) -> Interval:
        """Every place where the derivative may be 0: Fieller's interval, for a polynomial.

        `reach` is in standard errors. Without a noise estimate, or without a minimum inside, it is unbounded.
        """
        if not self.interior or self.freedom < 1:
            return Interval(-np.inf, np.inf)
        t = quantile(self.freedom) if reach is None else reach
        return Interval(self._end(t, self.low, self.ends.low), self._end(t, self.high, self.ends.high))

    def _end(self, t: float, last: float, outside: float) -> float:
        steps = np.linspace(self.place, last, 300)
        weights = _derivative(steps - self.origin)
        g, v = weights.T @ self.coefficients, np.einsum("is,ij,js->s", weights, self.covariance, weights)
        refuted = np.flatnonzero((g**2 > t**2 * v)[1:])
        if not len(refuted):
            return outside

        def excess(x: float) -> float:
            g, v = self.steepness(x)
            return g**2 - t**2 * v

        return _root(excess, float(steps[refuted[0]]), float(steps[refuted[0] + 1]))


def _powers(u: float) -> Floats:
    return np.power(float(u), np.arange(DEGREE + 1))


def _derivative(u: "float | Floats") -> Floats:
    k = np.arange(1, DEGREE + 1)
    slopes = k * np.power.outer(u, k - 1)
    return np.concatenate([np.zeros((1, *np.shape(u))), slopes.T])


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    """The place where f becomes positive; it is not positive at `low` and positive at `high`."""
    from scipy.optimize import bisect

    if f(low) > 0 or not f(high) > 0:  # by rounding, at an end of the range
        return low if f(low) > 0 else high
    # Training sets the processor to flush smaller numbers than 2^-1022 to 0, and bisect refuses a tolerance of 0.
    return float(bisect(f, low, high, xtol=max((high - low) * 2.0**-50, 2.0**-1022)))


def levels(losses: Floats) -> Floats:
    """The level of each value after removing a level per seed. If every seed was run at every value, it is the mean."""
    means = mean_over_seeds(losses)
    finite = np.isfinite(means)
    if not np.isnan(losses[finite]).any():
        return means
    value, seed = np.nonzero(~np.isnan(losses[finite]))
    design = np.concatenate([value[:, None] == np.arange(finite.sum()), _contrasts(seed)], 1)
    effects = np.linalg.lstsq(design, losses[finite][value, seed], rcond=None)[0]
    means[finite] = effects[: finite.sum()]
    return means


def _contrasts(seed: "NDArray[np.int64]") -> Floats:
    """The columns of a design matrix for levels of seeds that add up to zero."""
    kinds = np.unique(seed)
    return np.asarray((seed[:, None] == kinds[:-1]).astype(float) - (seed == kinds[-1])[:, None])


def fit_bowl(x: Floats, losses: Floats, around: int | None = None) -> Bowl | None:
    """A bowl through the values near the best one (or near value `around`), from losses by value and seed.

    Losses are NaN where a seed was not run and infinite where it diverged. None with fewer than three finite values in
    a row. The curve is a polynomial of degree 4 with a level per seed. Its third and fourth coefficient are shrunk
    towards 0 by the known spread of bowls (`SKEW`, `TAIL`), so three values give an interval too, but a wider one.
    """
    with np.errstate(invalid="ignore"):
        logs = np.log(losses)
    rough = levels(logs)
    if not np.isfinite(rough).any():
        return None
    best = int(np.argmin(rough)) if around is None else around
    first, last = _window(x, np.isfinite(rough), best)
    if last - first < 2:
        return None
    value, seed = np.nonzero(~np.isnan(logs[first : last + 1]))
    u, y = x[first : last + 1][value] - x[best], logs[first : last + 1][value, seed]
    coefficients, covariance, freedom = _penalized(u, y, seed)
    low, high, ends = _limits(x, rough, best, first, last)
    seeds = int((np.bincount(seed) >= 3).sum())
    return Bowl(float(x[best]), coefficients, covariance, freedom, seeds, low, high, ends, edge=best in (0, len(x) - 1))


def _limits(x: Floats, rough: Floats, best: int, first: int, last: int) -> tuple[float, float, Interval]:
    """(low, high, ends) of a bowl. If the neighbour of the best value diverged, the range ends at that neighbour."""
    below = best == first > 0 and not np.isfinite(rough[first - 1])
    above = best == last < len(x) - 1 and not np.isfinite(rough[last + 1])
    low, high = float(x[first - 1 if below else first]), float(x[last + 1 if above else last])
    return low, high, Interval(low if below else -np.inf, high if above else np.inf)


def _window(x: Floats, finite: "NDArray[np.bool_]", best: int) -> tuple[int, int]:
    """First and last of the values that a fit uses: at least `POINTS` finite ones in a row, and all within `REACH`."""
    first = last = best
    while True:
        left = first > 0 and bool(finite[first - 1])
        right = last < len(x) - 1 and bool(finite[last + 1])
        before = x[best] - x[first - 1] if left else np.inf
        after = x[last + 1] - x[best] if right else np.inf
        if not (left or right) or (last - first + 1 >= POINTS and min(before, after) > REACH + 1e-9):
            return first, last
        first, last = (first - 1, last) if before <= after else (first, last + 1)


def _penalized(u: Floats, y: Floats, seed: "NDArray[np.int64]") -> tuple[Floats, Floats, float]:
    """(coefficients, their covariance, degrees of freedom), averaged over the levels of the seeds."""
    most = min(DEGREE, len(np.unique(u)) - 1)
    residual, _ = _without_levels(u, y, seed, most)
    freedom = len(y) - most - len(np.unique(seed))
    noise = max(float(residual @ residual) / freedom, 1e-20) if freedom > 0 else NOISE**2
    c2 = abs(_without_levels(u, y, seed, min(most, 3))[1])
    powers = _without_seeds(u[:, None] ** np.arange(DEGREE + 1), seed)
    # The known spread of each coefficient is one more row. QR keeps tiny noise, which the normal equations would lose.
    known = np.eye(DEGREE + 1)[3:5] / np.maximum(np.array([SKEW, TAIL]) * c2, 1e-9)[:, None]
    q, r = np.linalg.qr(np.concatenate([powers / noise**0.5, known]))
    inverse = np.linalg.inv(r)
    coefficients = inverse @ (q[: len(y)].T @ y) / noise**0.5
    return coefficients, np.asarray(inverse @ inverse.T, float), float(max(freedom, 0))


def _without_seeds(columns: Floats, seed: "NDArray[np.int64]") -> Floats:
    """The residual of these columns X after fitting levels of the seeds that add up to zero.

    It is X - C (C'C)⁻¹ C'X with the columns C of `_contrasts`. C'C is a diagonal matrix plus a constant, so its inverse
    is known (Sherman & Morrison), and thousands of seeds cost no more than their sums.
    """
    kinds, place, counts = np.unique(seed, return_inverse=True, return_counts=True)
    sums = np.zeros((len(kinds), columns.shape[1]))
    np.add.at(sums, place, columns)
    apart = sums[:-1] - sums[-1]
    scaled = apart / counts[:-1, None]
    shares = 1 / counts[:-1]
    correction = counts[-1] / (1 + counts[-1] * shares.sum())
    effects = scaled - correction * np.outer(shares, scaled.sum(0))
    effects = np.concatenate([effects, -effects.sum(0, keepdims=True)])
    return np.asarray(columns - effects[place])


def _without_levels(u: Floats, y: Floats, seed: "NDArray[np.int64]", degree: int) -> tuple[Floats, float]:
    """(residual, coefficient of u²) of a polynomial with a level per seed.

    Subtracting the mean of each seed removes the levels (Frisch, Waugh & Lovell), which is fast with many seeds. If too
    little is left to determine the coefficients, everything is fitted at once.
    """
    powers = u[:, None] ** np.arange(1, degree + 1)
    counts = np.bincount(seed)
    mean = np.stack([np.bincount(seed, column) for column in (*powers.T, y)], 1)[seed] / counts[seed][:, None]
    centred, rest = powers - mean[:, :-1], y - mean[:, -1]
    coefficients, _, rank, _ = np.linalg.lstsq(centred, rest, rcond=None)
    if rank == degree:
        return rest - centred @ coefficients, float(coefficients[1])
    plain = np.concatenate([np.ones((len(u), 1)), powers, _contrasts(seed)], 1)
    coefficients = np.linalg.lstsq(plain, y, rcond=None)[0]
    return y - plain @ coefficients, float(coefficients[2])


def drift_interval(base: Bowl, other: Bowl, level: float = LEVEL) -> Interval:
    """The interval of the distance between two minima, from the interval of each (MOVER; Zou & Donner 2008)."""
    if not (base.interior and other.interior) or min(base.freedom, other.freedom) < 1:
        return Interval(-np.inf, np.inf)
    t = quantile(welch(base.place_variance, base.freedom, other.place_variance, other.freedom), level)
    start, end, drift = base.optimum(t), other.optimum(t), other.place - base.place
    down = np.hypot(other.place - end.low, start.high - base.place)
    up = np.hypot(end.high - other.place, base.place - start.low)
    return Interval(drift - float(down), drift + float(up))


def drift_beyond(base: Bowl, other: Bowl, limit: float) -> float:
    """The one-sided p-value of a drift of at most `limit`, in either direction."""

    def inside(p: float) -> float:
        interval = drift_interval(base, other, 1 - 2 * p)
        return 1.0 if interval.low > limit or interval.high < -limit else -1.0

    if inside(0.4999) < 0:
        return 1.0
    return _root(inside, 0.0, 0.4999)


@dataclass(frozen=True)
class Regret:
    """How much higher the loss is at one place than at the minimum, in logarithms.

    The regret itself is never negative. Its root, with the sign of the side, has a symmetric error.
    """

    root: float
    error: float
    freedom: float
    at_least: bool = False  # the minimum lies outside the values tried, so the regret may be larger

    @property
    def value(self) -> float:
        return self.root**2

    def interval(self, level: float = LEVEL, drift: Interval | None = None) -> Interval:
        """Every regret that agrees with the estimate, whichever side of the minimum the place lies on.

        Without a drift there is no regret: if the interval of the drift contains 0, so does this one. This matters in
        flat bowls, whose curvature is uncertain.
        """
        if self.freedom < 1 or not np.isfinite(self.error):
            return Interval(0.0, np.inf)
        if self.error == 0:
            return Interval(self.value, np.inf if self.at_least else self.value)
        z, far = abs(self.root) / self.error, quantile(self.freedom, level) + 1

        def refuted(delta: float) -> float:
            return _folded(delta, abs(z - delta), self.freedom) - level

        low = (
            0.0
            if refuted(0.0) <= 0 or (drift is not None and 0 in drift)
            else _root(lambda d: -refuted(d), max(0.0, z - far), z)
        )
        high = np.inf if self.at_least else _root(refuted, z, z + far)
        return Interval((low * self.error) ** 2, (high * self.error) ** 2)

    def beyond(self, limit: float) -> float:
        """The one-sided p-value of a regret of at most `limit`."""
        if self.freedom < 1 or not np.isfinite(self.error):
            return 1.0
        return beyond(abs(self.root), self.error, self.freedom, limit**0.5)


def _folded(delta: float, distance: float, freedom: float) -> float:
    """The chance that |T + delta| lies within `distance` of delta, with Student's T."""
    from scipy.special import stdtr

    chance = stdtr(freedom, distance) - stdtr(freedom, -2 * delta - distance)
    if distance < delta:
        chance -= stdtr(freedom, -distance) - stdtr(freedom, -2 * delta + distance)
    return float(chance)


def regret_at(used: Place, x: Floats, losses: Floats, bowl: Bowl) -> Regret | None:
    """The regret of a place, such as the minimum of the base. `bowl` was fitted to these losses.

    None if the place lies outside the values tried, or among values that diverged.
    """
    place = used.value
    if not x[0] - 1e-9 <= place <= x[-1] + 1e-9:
        return None
    if bowl.holds(place):
        return _near(used, bowl)
    nearest = int(abs(x - place).argmin())
    if not np.isfinite(mean_over_seeds(losses)[nearest]):
        return None
    local = fit_bowl(x, losses, nearest)
    if local is None or not local.holds(place):
        return None
    # Both fits have the same seeds, so their levels cancel. If they share values, the sum overestimates the variance.
    weights, others = _powers(place - local.origin), _powers(bowl.place - bowl.origin)
    variance = float(weights @ local.covariance @ weights + others @ bowl.covariance @ others)
    rise = local.height(place) - bowl.height(bowl.place)
    return _far(used, rise, variance, min(local.freedom, bowl.freedom), local.steepness(place)[0], not bowl.interior)


def _near(used: Place, bowl: Bowl) -> Regret:
    """The regret of a place inside the range of the fit."""
    if not bowl.interior:
        rise, variance = bowl.difference(used.value, bowl.place)
        return _far(used, rise, variance, bowl.freedom, bowl.steepness(used.value)[0], True)
    # The rise is distance² · bend, so its root and the error of the root stay finite as the distance goes to 0.
    u, v = used.value - bowl.origin, bowl.place - bowl.origin
    weights = np.array([0.0, *(sum(u**i * v ** (k - 1 - i) for i in range(k)) for k in range(1, DEGREE + 1))])
    touching = abs(u - v) < 1e-6
    bend = bowl.curvature / 2 if touching else float(weights @ bowl.coefficients) / (u - v)
    slope = bowl.curvature if touching else bowl.steepness(used.value)[0] / (u - v)
    if bend <= 0:
        return Regret(0.0, np.inf, 0.0)
    variance = float(weights @ bowl.covariance @ weights) / (4 * bend)
    return _regret(bend**0.5 * (u - v), variance, bowl.freedom, slope / (4 * bend) ** 0.5, used, False)


def _far(used: Place, rise: float, variance: float, freedom: float, slope: float, at_least: bool) -> Regret:
    """The regret from a rise and its variance, by the delta method: d√R = dR / 2√R."""
    if rise <= 0:
        return Regret(0.0, np.inf, 0.0, at_least)
    return _regret(rise**0.5, variance / (4 * rise), freedom, slope / (4 * rise) ** 0.5, used, at_least)


def _regret(root: float, variance: float, freedom: float, slope: float, used: Place, at_least: bool) -> Regret:
    """The regret with the uncertainty of the place itself, which moves the root by `slope` per octave."""
    if not np.isfinite(used.variance) or min(freedom, used.freedom) < 1:
        return Regret(root, np.inf, 0.0, at_least)
    of_place = slope**2 * used.variance
    return Regret(root, (variance + of_place) ** 0.5, welch(variance, freedom, of_place, used.freedom), at_least)
