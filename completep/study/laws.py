"""From losses to laws: power laws in FLOPs, loss increase, FLOP savings, the range of good shapes.

Pure functions of numbers and frames. Every estimate comes with an interval from a bootstrap.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from completep.errors import UserError
from completep.measure.optimum import Interval

Floats = NDArray[np.float64]
DRAWS = 2000


@dataclass(frozen=True)
class PowerLaw:
    """Xhat(F) = (F / a)^-b."""

    a: float
    b: float
    b_interval: Interval | None = None  # None where fewer than three points leave nothing to judge by
    level: float = 0.9

    def loss(self, flops: ArrayLike) -> Floats:
        return np.asarray((np.asarray(flops, float) / self.a) ** -self.b)

    def flops(self, loss: ArrayLike) -> Floats:
        """The inverse: F = a · X^(-1/b)."""
        return np.asarray(self.a * np.asarray(loss, float) ** (-1 / self.b))


def fit_power_law(
    flops: ArrayLike, loss: ArrayLike, *, level: float = 0.9, draws: int = DRAWS, seed: int = 0
) -> PowerLaw:
    """Least squares in logarithms, with a studentised residual bootstrap for b."""
    F, X = _points(flops, loss, least=2)
    _falls(F, X)
    x, y = np.log(F), np.log(X)
    slope, intercept, error = _line(x, y)
    interval = None
    if len(x) >= 3:
        low, high = _bootstrap_slope(x, y, slope, intercept, error, level, draws, seed)
        interval = Interval(-high, -low)
    return PowerLaw(a=math.exp(-intercept / slope), b=-slope, b_interval=interval, level=level)


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


def _falls(F: Floats, X: Floats) -> None:
    """A frontier falls. Several runs at one budget count by their mean."""
    sizes = np.unique(F)
    means = np.array([X[size == F].mean() for size in sizes])
    for i in np.flatnonzero(np.diff(means) >= 0):
        raise UserError(
            f"loss does not fall with compute: {means[i]:.5g} at {sizes[i]:.3g} FLOPs, {means[i + 1]:.5g} at {sizes[i + 1]:.3g}",
            fix="fit the best run of each size only (`frontier`), and check that losses and FLOPs are in the same order",
        )


def _line(x: Floats, y: Floats) -> tuple[float, float, float]:
    """(slope, intercept, standard error of the slope) of y over x; y may hold many rows."""
    dx = x - x.mean()
    slope = float(dx @ (y - y.mean()) / (dx @ dx))
    residual = y - y.mean() - slope * dx
    freedom = max(len(x) - 2, 1)
    return slope, float(y.mean() - slope * x.mean()), float(np.sqrt(residual @ residual / freedom / (dx @ dx)))


def _bootstrap_slope(
    x: Floats, y: Floats, slope: float, intercept: float, error: float, level: float, draws: int, seed: int
) -> tuple[float, float]:
    """Resample residuals (inflated for the leverage each point has), and studentise: right in small samples too."""
    dx = x - x.mean()
    spread = dx @ dx
    fitted = intercept + slope * x
    leverage = 1 / len(x) + dx**2 / spread
    residual = (y - fitted) / np.sqrt(np.clip(1 - leverage, 1e-12, None))
    residual -= residual.mean()
    if error < 1e-12 * max(1.0, abs(slope)):
        return slope, slope
    rows = np.random.default_rng(seed).choice(residual, (draws, len(x)))
    slopes = (rows - rows.mean(1, keepdims=True)) @ dx / spread
    left = rows - rows.mean(1, keepdims=True) - slopes[:, None] * dx
    errors = np.sqrt((left**2).sum(1) / max(len(x) - 2, 1) / spread)
    t = slopes[errors > 1e-12 * error] / errors[errors > 1e-12 * error]
    low, high = np.quantile(t, [(1 - level) / 2, (1 + level) / 2])
    return slope - float(high) * error, slope - float(low) * error


def loss_increase(loss: ArrayLike, best: ArrayLike) -> Floats:
    """d = (X - Xhat) / X: how far above the frontier, as a share of the loss."""
    X, Xhat = np.asarray(loss, float), np.asarray(best, float)
    return np.asarray((X - Xhat) / X)


def flop_savings(d_reference: ArrayLike, d: ArrayLike, b: float) -> Floats:
    """The share of FLOPs that the better of two runs of one shape saves: 1 - (1 - (d_ref - d))^(1/b).

    The paper prints the exponent as -1/b, which would make every saving a loss; its numbers follow from 1/b.
    """
    return np.asarray(1 - (1 - (np.asarray(d_reference, float) - np.asarray(d, float))) ** (1 / b))


@dataclass(frozen=True)
class ShapeRange:
    """Shapes that stay within a tolerance of the best one, by N:L."""

    best: float
    low: float  # nan, like high, where even the best shape is above the tolerance
    high: float
    open_low: bool  # the curve does not cross the tolerance on this side: low is merely the last shape tried
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
    cubic = np.polynomial.Polynomial.fit(x, d, 3)
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


def frontier(frame: pl.DataFrame, by: Sequence[str] = ("size",)) -> pl.DataFrame:
    """The best run of each size: the points a law is fitted to."""
    return frame.sort("loss").group_by(list(by), maintain_order=True).first().sort("flops")
