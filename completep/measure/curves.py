"""Loss curves over a hyperparameter: does the value tuned at the base stay optimal? From a sweep's losses to a verdict.

At every shape: where the optimum lies, how far it has drifted from the base's (in octaves, or in steps of a line), and
what it costs to use the base's value there (regret, in % of the loss), each with an interval over seeds.

The regret is judged first: FAIL where it is above half a percent, PASS where the whole interval is below. The drift is
judged second, where the regret leaves it open: FAIL where it is above half an octave or step. So a drift in a flat
bowl, which costs nothing, is no FAIL. The tests for FAIL are corrected for their number, over shapes and rules, by
Holm's method. PASS needs no correction, since every shape must pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import polars as pl

from completep.config import Shape
from completep.errors import UserError
from completep.measure.sweeps import usable
from completep.measure.words import Word
from completep.stats import (
    LEVEL,
    Bowl,
    Floats,
    Interval,
    Regret,
    drift_beyond,
    drift_interval,
    fit_bowl,
    height_at,
    holm,
    mean_interval,
    mean_over_seeds,
    regret_at,
)

MOST_DRIFT = 0.5  # octaves or steps
MOST_REGRET = 0.5  # % of the loss
DIVERGED = 1e100  # a loss that large is as good as infinite, and its mean might be
LEAST_SEEDS = 2  # one says nothing about the noise
ERROR = (1 - LEVEL) / 2  # of a FAIL, over all shapes and rules together
Deeper = Literal["better", "not better", "unclear"]


@dataclass(frozen=True)
class Places:
    """How to speak of a place on a curve: the log2 of a value, or the step of a value on a line."""

    unit: Literal["octaves", "steps"] = "octaves"  # of a drift
    value: Callable[[float], float] = lambda place: float(2**place)  # the value at a place


OCTAVES = Places()


@dataclass(frozen=True)
class ShapeTransfer:
    """One shape's curve against the base's."""

    shape: Shape
    optimum: float
    optimum_interval: Interval | None
    interior: bool
    drift: float  # from the base's optimum, in octaves, or in steps of a line
    drift_interval: Interval | None  # None with one seed
    regret: float  # % of the loss, for using the base's optimum here
    regret_interval: Interval | None
    loss: float  # at the base's optimum
    word: Word
    why: str


@dataclass(frozen=True)
class Transfer:
    """The verdict on one parameterization."""

    rules: str
    hyperparameter: str
    base: Shape
    best: float  # the base's optimum
    best_interval: Interval | None
    best_loss: float
    shapes: tuple[ShapeTransfer, ...]
    deeper: Deeper | None  # at the transferred value, from seed to seed; None where depth was not varied
    word: Word
    why: str
    unit: str = OCTAVES.unit  # of the drifts


@dataclass(frozen=True)
class Curve:
    """The losses of one shape, by value and seed, and the bowl through them."""

    shape: Shape
    x: Floats  # the places of the values: their log2, or their steps
    losses: Floats
    bowl: Bowl | None  # None with fewer than three finite values in a row
    axis: Places = OCTAVES

    @property
    def place(self) -> float:
        """Of the optimum."""
        return float(self.x[mean_over_seeds(self.losses).argmin()]) if self.bowl is None else self.bowl.place

    @property
    def judged(self) -> bool:
        """Are there seeds enough for intervals?"""
        return self.bowl is not None and self.bowl.seeds >= LEAST_SEEDS and self.bowl.freedom >= 1


@dataclass(frozen=True)
class Comparison:
    """One shape against the base, before the verdict."""

    base: Curve
    here: Curve
    regret: Regret | None  # None where it is not known
    diverged: bool  # the tried value that is nearest to the base's optimum diverged here

    @property
    def p_values(self) -> tuple[float, float]:
        """Of a regret, and of a drift, that is at most as large as allowed."""
        base, bowl = self.base.bowl, self.here.bowl
        if base is None or bowl is None or not (self.base.judged and self.here.judged):
            return 1.0, 1.0
        if self.diverged:
            return 0.0, 1.0
        drift = drift_beyond(base, bowl, MOST_DRIFT)
        return (1.0 if self.regret is None else self.regret.beyond(np.log1p(MOST_REGRET / 100))), drift


def judge_transfer(
    frame: pl.DataFrame, hyperparameter: str = "lr", base: Shape | None = None, axes: Mapping[str, Places] | None = None
) -> list[Transfer]:
    """A verdict for every parameterization in the frame. `axes` has those whose column is not the values themselves."""
    frame = usable(frame, hyperparameter)
    rules = frame["rules"].unique(maintain_order=True).to_list()
    families = {
        r: _curves(frame.filter(pl.col("rules") == r), hyperparameter, (axes or {}).get(r, OCTAVES)) for r in rules
    }
    starts = {r: _start(curves, base) for r, curves in families.items()}
    comparisons = {
        r: [compare(starts[r], c) for c in curves.values() if c is not starts[r]] for r, curves in families.items()
    }
    everything = [p for several in comparisons.values() for c in several for p in c.p_values]
    adjusted = iter(holm(everything))
    return [
        _transfer(
            r,
            hyperparameter,
            starts[r],
            [_shape_transfer(c, next(adjusted), next(adjusted)) for c in several],
            families[r],
        )
        for r, several in comparisons.items()
    ]


def _curves(frame: pl.DataFrame, hyperparameter: str, axis: Places) -> dict[Shape, Curve]:
    seeds = frame["seed"].unique().sort().to_list() if "seed" in frame.columns else None
    curves = {}
    for key, part in sorted(frame.partition_by(["width", "depth"], as_dict=True).items()):
        x, losses = curve(part, hyperparameter, seeds)
        curves[Shape(*key)] = Curve(Shape(*key), x, losses, fit_bowl(x, losses), axis)
    return curves


def _start(curves: dict[Shape, Curve], base: Shape | None) -> Curve:
    start = base or min(curves, key=lambda s: (s.depth * s.width**2, s.depth))
    if start not in curves:
        raise UserError(
            f"the sweep has no runs at the base {start.width} × {start.depth}", fix="name another base, or run it"
        )
    return curves[start]


def curve(frame: pl.DataFrame, hyperparameter: str, seeds: Sequence[object] | None = None) -> tuple[Floats, Floats]:
    """(log2 of the values tried, losses by value and seed): infinite where a run diverged, NaN where it was not done.

    A column per seed in `seeds`, by default in the order of the frame's own.
    """
    for column in (hyperparameter, "loss"):
        if column not in frame.columns:
            raise UserError(f"the frame has no column {column!r}", fix=f"it has {', '.join(frame.columns)}")
    if "seed" not in frame.columns:
        frame = frame.with_columns(seed=pl.lit(0))
    values = frame[hyperparameter].to_numpy().astype(float)
    good = np.isfinite(values) & (values > 0)
    if not good.all():
        raise UserError(
            f"{hyperparameter} = {values[~good][0]:g} has no place on a logarithmic axis", fix="leave those runs out"
        )
    tried, rows = np.unique(values, return_inverse=True)
    known = frame["seed"].unique().sort() if seeds is None else pl.Series(seeds, dtype=frame["seed"].dtype)
    columns = frame["seed"].replace_strict(known, range(len(known)), return_dtype=pl.Int64).to_numpy()
    losses = np.full((len(tried), len(known)), np.nan)
    ended = frame["loss"].is_not_null().to_numpy()  # NaN means diverged; null means not done
    losses[rows[ended], columns[ended]] = frame["loss"].cast(pl.Float64).fill_nan(np.inf).to_numpy()[ended]
    losses[losses > DIVERGED] = np.inf
    return np.log2(tried), losses


def compare(base: Curve, here: Curve) -> Comparison:
    """What the base's optimum costs here."""
    regret, diverged = None, False
    if base.bowl is not None and here.bowl is not None:
        regret = regret_at(base.bowl.estimate, here.x, here.losses, here.bowl)
    if here.x[0] <= base.place <= here.x[-1]:
        nearest = int(abs(here.x - base.place).argmin())
        diverged = bool(np.isinf(mean_over_seeds(here.losses)[nearest]))
    return Comparison(base, here, regret, diverged)


def _shape_transfer(c: Comparison, p_regret: float, p_drift: float) -> ShapeTransfer:
    base, here, regret = c.base.bowl, c.here.bowl, c.regret
    places = drifts = regrets = None
    if base is not None and here is not None and c.base.judged and c.here.judged:
        places, drifts = here.optimum(), drift_interval(base, here)
        regrets = _percent(regret.interval(drift=drifts)) if regret is not None else None
    cost = 100 * float(np.expm1(regret.value)) if regret is not None else np.inf if c.diverged else np.nan
    loss = np.inf if here is None or regret is None else float(np.exp(here.height(here.place) + regret.value))
    word, why = _word(c, drifts, regrets, cost, p_regret, p_drift)
    interior, drift = here is not None and not here.edge, c.here.place - c.base.place
    optimum, places = 2**c.here.place, _octaves(places)
    return ShapeTransfer(c.here.shape, optimum, places, interior, drift, drifts, cost, regrets, loss, word, why)


def _percent(interval: Interval) -> Interval:
    return Interval(100 * float(np.expm1(interval.low)), 100 * float(np.expm1(interval.high)))


def _octaves(spread: Interval | None) -> Interval | None:
    return None if spread is None else Interval(2**spread.low, 2**spread.high)


def _word(
    c: Comparison, drifts: Interval | None, regrets: Interval | None, cost: float, p_regret: float, p_drift: float
) -> tuple[Word, str]:
    """The regret first, the drift second."""
    bowl, x, base, axis = c.here.bowl, c.here.x, c.base.place, c.here.axis
    if not np.isfinite(mean_over_seeds(c.here.losses)).any():
        return "INCONCLUSIVE", "every run diverged: add smaller values"
    if bowl is None:
        return "INCONCLUSIVE", "fewer than three neighbouring values ended in a finite loss: add some"
    if not x[0] <= base <= x[-1]:
        return "INCONCLUSIVE", f"the base's optimum {axis.value(base):.3g} lies outside the values tried here: add it"
    if drifts is None:
        return "INCONCLUSIVE", "one seed says nothing about the noise: add seeds"
    moved = f"the optimum drifts by {c.here.place - base:+.2f} {axis.unit}" + (" at least" if bowl.edge else "")
    if p_regret <= ERROR:
        return (
            "FAIL",
            "the base's optimum diverges here" if c.diverged else f"{moved} and the base's costs {cost:.2g} %",
        )
    if not bowl.edge and regrets is not None and regrets.high <= MOST_REGRET:
        flat = drifts.low > MOST_DRIFT or drifts.high < -MOST_DRIFT
        return "PASS", f"{moved}, in a bowl so flat that it costs {regrets.high:.2g} % at most" if flat else ""
    if p_drift <= ERROR:
        return "FAIL", moved
    if bowl.edge:
        side = "smaller" if bowl.origin == x[0] else "larger"
        return "INCONCLUSIVE", f"the best value {axis.value(bowl.origin):.3g} is the last one tried: add {side} values"
    return "INCONCLUSIVE", "the interval exceeds the allowed range: add seeds"


def _transfer(
    rules: str, hyperparameter: str, base: Curve, shapes: list[ShapeTransfer], curves: dict[Shape, Curve]
) -> Transfer:
    interval = _octaves(base.bowl.optimum()) if base.bowl is not None and base.judged else None
    height = float(np.exp(base.bowl.height(base.place))) if base.bowl is not None else float(np.nanmin(base.losses))
    word, why = _whole(shapes, base)
    ladder = [curves[s] for s in sorted(curves, key=lambda s: s.depth) if s.width == base.shape.width]
    deeper = deeper_is(ladder, base.place)
    return Transfer(
        rules, hyperparameter, base.shape, 2**base.place, interval, height, tuple(shapes), deeper, word, why,
        base.axis.unit,
    )  # fmt: skip


def _whole(shapes: Sequence[ShapeTransfer], base: Curve) -> tuple[Word, str]:
    if not shapes:
        return "INCONCLUSIVE", "there is one shape only: add a larger one"
    if base.bowl is None:
        return "INCONCLUSIVE", "fewer than three neighbouring values ended in a finite loss at the base: add some"
    if base.bowl.edge:
        best = base.axis.value(base.place)
        return "INCONCLUSIVE", f"the base's best value {best:.3g} is the last one tried: extend the range"
    words: tuple[Word, ...] = ("FAIL", "INCONCLUSIVE")
    for word in words:
        if (worst := next((s for s in shapes if s.word == word), None)) is not None:
            return word, f"{worst.shape.width} × {worst.shape.depth}: {worst.why}"
    return "PASS", "; ".join(f"{s.shape.width} × {s.shape.depth}: {s.why}" for s in shapes if s.why)


def deeper_is(ladder: Sequence[Curve], place: float) -> Deeper | None:
    """At one value: is every deeper model better than the one before it, by more than the seeds' noise?

    From the differences of the seeds that both were run with. The intervals are corrected for the number of steps
    (Bonferroni).
    """
    steps = list(pairwise(ladder))
    if not steps:
        return None
    level = 1 - (1 - LEVEL) / len(steps)
    changes = [mean_interval(_change(a, b, place), level) for a, b in steps]
    if any(change is not None and change.low > 0 for change in changes):
        return "not better"
    return "better" if all(change is not None and change.high < 0 for change in changes) else "unclear"


def _change(shallow: Curve, deep: Curve, place: float) -> Floats:
    """log of the loss ratio, seed by seed."""
    before, after = _heights(shallow, place), _heights(deep, place)
    with np.errstate(invalid="ignore"):
        change: Floats = np.log(after) - np.log(before)
    return np.asarray(change[np.isfinite(change)])


def _heights(curve: Curve, place: float) -> Floats:
    """The curve's height at a place, seed by seed; NaN where this seed was not run."""
    x, losses = curve.x, curve.losses
    heights = np.full(losses.shape[1], np.nan)
    whole = np.isfinite(losses).all(0) & (len(x) > 1 and x[0] <= place <= x[-1])
    if whole.any():
        weights = [height_at(x, unit, place) for unit in np.eye(len(x))]  # of finite losses it is a linear function
        heights[whole] = weights @ losses[:, whole]
    for i in np.flatnonzero(~whole):
        run = ~np.isnan(losses[:, i])
        heights[i] = height_at(x[run], losses[run, i], place) if run.sum() > 1 else np.nan
    return heights
