"""From losses to laws: power laws in FLOPs, loss increase, FLOP savings, the range of good shapes.

Pure functions of numbers and frames.
"""

import math
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from completep.errors import UserError
from completep.stats import (
    LEVEL,
    Estimate,
    Floats,
    Interval,
    levels,
    line,
    mean_estimate,
    polynomial,
    ratio_interval,
    slope_estimate,
    slope_weights,
)


@dataclass(frozen=True)
class PowerLaw:
    """Xhat(F) = (F / a)^-b."""

    a: float
    b: float
    b_interval: Interval | None = None  # None with fewer than three sizes
    b_error: float = math.inf
    freedom: int = 0
    fitted: tuple[float, ...] = ()  # the FLOPs it was fitted to

    def loss(self, flops: ArrayLike) -> Floats:
        return np.asarray((np.asarray(flops, float) / self.a) ** -self.b)

    def weight(self, flops: float) -> float:
        """How much b rises when the log loss at this budget falls by one; 0 where nothing was fitted."""
        x = np.log(self.fitted)
        near = abs(x - math.log(flops)) < 1e-9
        return float(slope_weights(x)[near].sum()) if near.any() else 0.0


def fit_power_law(
    flops: ArrayLike, loss: ArrayLike, seed: ArrayLike | None = None, *, level: float = LEVEL
) -> PowerLaw:
    """Least squares in logarithms, with Student's interval for b.

    All runs at one budget are one point: their mean, after removing a level per seed. So the interval has n - 2 degrees
    of freedom for n budgets. More seeds do not add degrees of freedom, because the misfit of the law at a budget is the
    same for every seed.
    """
    F, X = _points(flops, loss, least=2)
    _require_falling(F, X)
    budgets, y = _by_budget(F, np.log(X), None if seed is None else np.asarray(seed).ravel())
    x = np.log(budgets)
    fit, (_, intercept) = slope_estimate(x, y), line(x, y)
    a, b, freedom = math.exp(-intercept / fit.value), -fit.value, len(x) - 2
    if freedom < 1:
        return PowerLaw(a, b, fitted=tuple(budgets))
    reach = fit.reach(level)
    return PowerLaw(a, b, Interval(b - reach, b + reach), fit.error, freedom, tuple(budgets))


def _by_budget(F: Floats, y: Floats, seed: NDArray[np.generic] | None) -> tuple[Floats, Floats]:
    """(budgets, log losses with the seeds' levels taken out)."""
    budgets, place = np.unique(F, return_inverse=True)
    if seed is None:
        return budgets, np.array([y[place == i].mean() for i in range(len(budgets))])
    seeds, column = np.unique(seed, return_inverse=True)
    table = np.full((len(budgets), len(seeds)), np.nan)
    table[place, column] = y
    return budgets, levels(table)


def _points(x: ArrayLike, y: ArrayLike, least: int) -> tuple[Floats, Floats]:
    a, b = np.asarray(x, float).ravel(), np.asarray(y, float).ravel()
    if len(a) != len(b):
        raise UserError(f"{len(a)} x values but {len(b)} y values", fix="give one of each per run")
    good = np.isfinite(a) & np.isfinite(b) & (a > 0) & (b > 0)
    if not good.all():
        raise UserError(
            f"{(~good).sum()} of {len(a)} points are not positive numbers", fix="leave diverged runs out of a fit"
        )
    if len(np.unique(a)) < least:
        raise UserError(f"{len(np.unique(a))} different sizes are too few for this fit", fix=f"give at least {least}")
    return a, b


def _require_falling(F: Floats, X: Floats) -> None:
    """Refuse losses that do not fall with compute. Several runs at one budget are averaged."""
    sizes = np.unique(F)
    means = np.array([X[size == F].mean() for size in sizes])
    for i in np.flatnonzero(np.diff(means) >= 0):
        raise UserError(
            f"loss does not fall with compute: {means[i]:.5g} at {sizes[i]:.3g} FLOPs, "
            f"{means[i + 1]:.5g} at {sizes[i + 1]:.3g}",
            fix="fit only the best run of each size (`frontier`), with losses and FLOPs in the same order",
        )


def loss_increase(loss: ArrayLike, best: ArrayLike) -> Floats:
    """d = (X - Xhat) / X: how far the loss lies above the frontier, as a share of itself."""
    X, Xhat = np.asarray(loss, float), np.asarray(best, float)
    return np.asarray((X - Xhat) / X)


def flop_savings(d_reference: ArrayLike, d: ArrayLike, b: float) -> Floats:
    """The share of FLOPs saved over a reference run of the same shape: 1 - (1 - (d_ref - d))^(1/b).

    The paper prints the exponent as -1/b, which would turn every saving into a loss. Its numbers follow from 1/b.
    """
    return np.asarray(1 - (1 - (np.asarray(d_reference, float) - np.asarray(d, float))) ** (1 / b))


def savings_interval(
    reference: ArrayLike, loss: ArrayLike, flops: float, law: PowerLaw, *, level: float = LEVEL
) -> Interval | None:
    """An interval for the FLOPs saved over a reference run of the same shape, from the losses of both, seed by seed.

    Savings are 1 - exp(-q/b), with q = -log(1 - (d_ref - d)). Both q, from seeds, and b, from sizes, are uncertain, so
    the interval is that of their ratio, by Fieller's theorem. If the law was fitted to the run, the two are correlated.
    None with one seed, or with fewer than three sizes. The distance of the run from the law changes q by about a
    percent and is taken as known.
    """
    X_ref, X = np.asarray(reference, float), np.asarray(loss, float)
    if len(X) < 2 or law.freedom < 1:
        return None
    d_ref, d = loss_increase(X_ref, law.loss(flops)), loss_increase(X, law.loss(flops))
    gaps = mean_estimate(-np.log1p(-(d_ref - d)))
    # Half of the gap's variance is the run's own; the other half is the reference's.
    shared = law.weight(flops) * gaps.error**2 / 2
    ratio = ratio_interval(gaps, Estimate(law.b, law.b_error, law.freedom), shared, level)
    return Interval(1 - math.exp(-ratio.low), 1 - math.exp(-ratio.high))


@dataclass(frozen=True)
class ShapeRange:
    """Shapes that stay within a tolerance of the best one, by N:L."""

    best: float
    low: float  # nan, like high, where even the best shape is above the tolerance
    high: float
    open_low: bool  # the curve does not cross the tolerance on this side: low is the last shape tried
    open_high: bool


def shape_range(
    ratio: ArrayLike, increase: ArrayLike, *, tolerance: float = 0.01, best: float | None = None
) -> ShapeRange:
    """Cubic through (log N:L, loss increase), and where it crosses best + tolerance on either side.

    `best` is the smallest increase to compare with; the paper uses CompleteP's for all parameterizations.
    """
    r, _ = _points(ratio, np.ones(np.size(ratio)), least=4)
    d = np.asarray(increase, float).ravel()
    if len(d) != len(r) or not np.isfinite(d).all():
        raise UserError("every shape needs a finite loss increase", fix="leave diverged runs out")
    x = np.log(r)
    cubic = polynomial(x, d, 3)
    grid = np.linspace(x.min(), x.max(), 2001)
    lowest = float(grid[cubic(grid).argmin()])
    limit = (float(cubic(lowest)) if best is None else best) + tolerance
    if float(cubic(lowest)) > limit:
        return ShapeRange(math.exp(lowest), math.nan, math.nan, False, False)
    roots = (cubic - limit).roots()
    crossings = [float(z.real) for z in roots if abs(z.imag) < 1e-9 and x.min() <= z.real <= x.max()]
    below, above = [c for c in crossings if c < lowest], [c for c in crossings if c > lowest]
    low, high = max(below, default=float(x.min())), min(above, default=float(x.max()))
    return ShapeRange(math.exp(lowest), math.exp(low), math.exp(high), not below, not above)


def frontier(frame: pl.DataFrame) -> pl.DataFrame:
    """The best run of each size: the points a law is fitted to."""
    return frame.sort("loss").group_by("size", maintain_order=True).first().sort("flops")
