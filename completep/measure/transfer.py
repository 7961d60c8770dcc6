"""Does a hyperparameter tuned at the base stay optimal? From any sweep's losses to a verdict.

At every shape: where its optimum lies, how far that has drifted from the base's (in octaves), and what it costs to use the
base's best value all the same (regret, in % of the loss). PASS is a drift of at most half an octave and a regret of at most
half a percent, with minima inside the range that was tried.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

from completep.config import Shape
from completep.errors import UserError, some
from completep.measure.optimum import Floats, Interval, average, curve, vertex
from completep.measure.verdict import Word

MOST_DRIFT = 0.5  # octaves
MOST_REGRET = 0.5  # % of the loss
LEVEL, DRAWS = 0.9, 1000
HYPERPARAMETERS = ("lr", "std", "eps", "weight_decay")


@dataclass(frozen=True)
class AtShape:
    """One shape's curve against the base's."""

    shape: Shape
    optimum: float
    interior: bool
    drift: float  # octaves from the base's optimum
    drift_interval: Interval | None  # None with one seed
    regret: float  # % lost by using the base's best value here
    regret_interval: Interval | None
    loss: float  # at the base's best value
    word: Word
    why: str


@dataclass(frozen=True)
class Transfer:
    """The verdict on one parameterization."""

    rules: str
    hyperparameter: str
    base: Shape
    best: float  # the base's best value among those tried
    shapes: tuple[AtShape, ...]
    deeper_is_better: bool | None  # at the transferred value; None where depth was not varied
    word: Word
    why: str


def read_sweep(path: Path) -> pl.DataFrame:
    """A CSV of anybody's sweep: width, depth (or either), a hyperparameter, loss, and seed and rules where there are several."""
    try:
        frame = pl.read_csv(path, infer_schema_length=None, null_values=[""])
    except (OSError, pl.exceptions.PolarsError) as error:
        raise UserError(
            f"{path} cannot be read as CSV: {str(error).splitlines()[0]}", fix="give a file with a header line"
        ) from error
    frame = frame.rename({c: c.strip().lower() for c in frame.columns})
    if frame.schema.get("loss") == pl.String:
        frame = frame.with_columns(
            loss=pl.col("loss").str.strip_chars().cast(pl.Float64, strict=False).fill_null(np.nan)
        )
    return frame


def find_hyperparameter(frame: pl.DataFrame, wanted: str | None) -> str:
    """The column that was swept."""
    if wanted is not None:
        if wanted not in frame.columns:
            raise UserError(f"no column {wanted!r}", fix=f"the columns are {some(frame.columns, 12)}")
        return wanted
    varied = [h for h in HYPERPARAMETERS if h in frame.columns and frame[h].n_unique() > 1]
    if len(varied) == 1:
        return varied[0]
    told = f"several vary: {', '.join(varied)}" if varied else f"none of {', '.join(HYPERPARAMETERS)} varies"
    raise UserError(f"which hyperparameter was swept? {told}", fix="say it: --hyperparameter lr")


def judge(frame: pl.DataFrame, hyperparameter: str = "lr", base: Shape | None = None) -> list[Transfer]:
    """A verdict for every parameterization in the frame."""
    missing = [c for c in (hyperparameter, "loss") if c not in frame.columns]
    if missing or not {"width", "depth"} & set(frame.columns):
        raise UserError(
            f"the sweep lacks {', '.join(missing) or 'width and depth'}",
            fix=f"it needs width or depth, {hyperparameter} and loss; its columns are {some(frame.columns, 12)}",
        )
    frame = complete(frame)
    rules = frame["rules"].unique(maintain_order=True).to_list()
    return [_one(frame.filter(pl.col("rules") == r), r, hyperparameter, base) for r in rules]


def complete(frame: pl.DataFrame) -> pl.DataFrame:
    """With columns for what a small sweep leaves out."""
    absent = {"rules": "sweep", "width": 1, "depth": 1}
    return frame.with_columns(pl.lit(value).alias(name) for name, value in absent.items() if name not in frame.columns)


def _one(frame: pl.DataFrame, rules: str, hyperparameter: str, base: Shape | None) -> Transfer:
    curves = {
        Shape(*key): curve(part, hyperparameter)
        for key, part in sorted(frame.partition_by(["width", "depth"], as_dict=True).items())
    }
    start = base or min(curves, key=lambda s: (s.depth * s.width**2, s.depth))
    if start not in curves:
        raise UserError(
            f"the sweep has no runs at the base {start.width} × {start.depth}", fix="name another base, or run it"
        )
    x, losses = curves[start]
    best = float(x[np.argmin(average(losses))])
    shapes = tuple(_at(shape, *curves[shape], x, losses) for shape in curves if shape != start)
    at_best = {start: float(average(losses).min())} | {s.shape: s.loss for s in shapes}
    word, why = _whole(shapes, x, losses)
    return Transfer(rules, hyperparameter, start, 2**best, shapes, _deeper(at_best, start), word, why)


def _whole(shapes: tuple[AtShape, ...], x: Floats, losses: Floats) -> tuple[Word, str]:
    if not shapes:
        return "INCONCLUSIVE", "one shape has nothing to transfer to: add a larger one"
    if np.isfinite(average(losses)).sum() < 3:
        return "INCONCLUSIVE", "fewer than three values ended in a finite loss at the base: add some"
    place, _, interior = vertex(x, average(losses))
    if not interior:
        return "INCONCLUSIVE", f"the base's best value {2**place:.3g} is the last one tried: go on beyond it"
    words = [s.word for s in shapes]
    for word in ("FAIL", "INCONCLUSIVE"):
        if word in words:
            worst = next(s for s in shapes if s.word == word)
            return word, f"{worst.shape.width} × {worst.shape.depth}: {worst.why}"
    return "PASS", ""


def _at(shape: Shape, x: Floats, losses: Floats, base_x: Floats, base_losses: Floats) -> AtShape:
    drift, regret, loss = _against(x, average(losses), base_x, average(base_losses))
    drifts, regrets = _bootstrap(x, losses, base_x, base_losses)
    place, _, interior = vertex(x, average(losses))
    word, why = _word(x, average(losses), interior, drift, drifts, regret, regrets)
    return AtShape(shape, 2**place, interior, drift, drifts, regret, regrets, loss, word, why)


def _against(x: Floats, y: Floats, base_x: Floats, base_y: Floats) -> tuple[float, float, float]:
    """(drift in octaves, regret in %, loss at the base's best value)."""
    best = base_x[np.argmin(base_y)]
    drift = vertex(x, y)[0] - vertex(base_x, base_y)[0]
    at = int(np.argmin(abs(x - best)))
    close = abs(x[at] - best) < 1e-6
    here = float(y[at]) if close else float(np.interp(best, x, y)) if x[0] <= best <= x[-1] else float("inf")
    lowest = float(np.min(y))
    return drift, 100 * (here / lowest - 1) if np.isfinite(lowest) else float("nan"), here


def _bootstrap(
    x: Floats, losses: Floats, base_x: Floats, base_losses: Floats
) -> tuple[Interval | None, Interval | None]:
    """Seeds drawn with replacement, the base's and this shape's each; only those that were run at every value."""
    losses, base_losses = (y[:, ~np.isnan(y).any(0)] for y in (losses, base_losses))
    if losses.shape[1] < 2 or base_losses.shape[1] < 2 or not np.isfinite(losses).any():
        return None, None
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(DRAWS):
        pick, base_pick = (rng.integers(n, size=n) for n in (losses.shape[1], base_losses.shape[1]))
        rows.append(_against(x, average(losses[:, pick]), base_x, average(base_losses[:, base_pick]))[:2])
    low, high = np.nanquantile(np.array(rows), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0, method="nearest")
    return Interval(float(low[0]), float(high[0])), Interval(float(low[1]), float(high[1]))


def _word(
    x: Floats, y: Floats, interior: bool, drift: float, drifts: Interval | None, regret: float, regrets: Interval | None
) -> tuple[Word, str]:
    if not np.isfinite(y).any():
        return "INCONCLUSIVE", "every run diverged: add smaller values"
    if np.isfinite(y).sum() < 3:
        return "INCONCLUSIVE", "fewer than three values ended in a finite loss: add some"
    spread = drifts or Interval(drift, drift)
    lost = regrets or Interval(regret, regret)
    if abs(drift) > MOST_DRIFT and (spread.low > MOST_DRIFT or spread.high < -MOST_DRIFT):
        return "FAIL", f"the optimum drifts by {drift:+.2f} octaves" + ("" if interior else " at least")
    if lost.low > MOST_REGRET:
        return "FAIL", f"the base's best value costs {regret:.2g} % here"
    if not interior:
        edge = "below" if int(np.argmin(y)) == 0 else "above"
        return (
            "INCONCLUSIVE",
            f"the best value {2 ** float(x[np.argmin(y)]):.3g} is the last one tried: go on {edge} it",
        )
    if max(abs(spread.low), abs(spread.high)) > MOST_DRIFT or lost.high > MOST_REGRET:
        return "INCONCLUSIVE", "the interval reaches past what is allowed: add seeds"
    return "PASS", ""


def _deeper(loss: dict[Shape, float], base: Shape) -> bool | None:
    """At the base's width and the transferred value, does every step deeper lower the loss?"""
    ladder = [loss[s] for s in sorted(loss, key=lambda s: s.depth) if s.width == base.width]
    return None if len(ladder) < 2 else all(b < a for a, b in pairwise(ladder))
