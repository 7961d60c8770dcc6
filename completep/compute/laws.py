"""From losses to laws: power laws in FLOPs, loss increase, FLOP savings, the range of good shapes.

Pure functions of numbers and frames.
"""

import math
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import ArrayLike

from completep.errors import UserError
from completep.stats import LEVEL, Floats, Interval, line, polynomial, slope


@dataclass(frozen=True)
class PowerLaw:
    """Xhat(F) = (F / a)^-b."""

    a: float
    b: float
    b_interval: Interval | None = None  # None with fewer than three points

    def loss(self, flops: ArrayLike) -> Floats:
        return np.asarray((np.asarray(flops, float) / self.a) ** -self.b)


def fit_power_law(flops: ArrayLike, loss: ArrayLike, *, level: float = LEVEL) -> PowerLaw:
    """Least squares in logarithms, with Student's interval for b."""
    F, X = _points(flops, loss, least=2)
    _require_falling(F, X)
    x, y = np.log(F), np.log(X)
    fit, (_, intercept) = slope(x, y, level=level), line(x, y)
    interval = Interval(-fit.high, -fit.low) if len(x) >= 3 else None
    return PowerLaw(a=math.exp(-intercept / fit.value), b=-fit.value, b_interval=interval)


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
    """A frontier falls. Several runs at one budget are averaged."""
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
