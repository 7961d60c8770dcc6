"""Does a hyperparameter tuned at the base stay optimal? From any sweep's losses to a verdict.

At every shape: where its optimum lies, how far that has drifted from the base's (in octaves), and what it costs to use the
base's all the same (regret, in % of the loss). PASS is a drift of at most half an octave and a regret of at most
half a percent, with minima inside the range that was tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from completep.config import Shape
from completep.errors import UserError, some
from completep.measure.optimum import Floats, Interval, average, curve, height_at, vertex
from completep.measure.verdict import Word

MOST_DRIFT = 0.5  # octaves
MOST_REGRET = 0.5  # % of the loss
LEVEL, DRAWS = 0.9, 1000
LEAST_SEEDS = 3  # fewer say nothing of the noise
HYPERPARAMETERS = ("lr", "std", "eps", "weight_decay")


@dataclass(frozen=True)
class AtShape:
    """One shape's curve against the base's."""

    shape: Shape
    optimum: float
    optimum_interval: Interval | None
    interior: bool
    drift: float  # octaves from the base's optimum
    drift_interval: Interval | None  # None with one seed
    regret: float  # % lost by using the base's optimum here
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
    shapes: tuple[AtShape, ...]
    deeper_is_better: bool | None  # at the transferred value; None where depth was not varied
    word: Word
    why: str


def read_sweep(path: Path) -> pl.DataFrame:
    """A CSV of anybody's sweep: width, depth (or either), a hyperparameter, loss, and seed and rules where there are several.

    A loss that is no number (`nan`, `diverged`) is one that diverged; a blank is a run that was not done."""
    try:
        frame = pl.read_csv(path, infer_schema=False, null_values=[""])
    except (OSError, pl.exceptions.PolarsError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read as CSV: {first}", fix="give a file with a header line") from error
    names = [c.strip().lower() for c in frame.columns]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice or frame.is_empty():
        what = f"several columns called {twice[0]!r}" if twice else "no rows"
        raise UserError(f"{path} has {what}", fix="give one column of each name, and a line for each run")
    frame = frame.rename(dict(zip(frame.columns, names, strict=True)))
    numbers = [c for c in names if c != "rules"]
    cast = frame.with_columns(pl.col(c).str.strip_chars().cast(pl.Float64, strict=False) for c in numbers)
    if "loss" in names:
        cast = cast.with_columns(loss=pl.when(frame["loss"].is_not_null()).then(pl.col("loss").fill_null(np.nan)))
    for column in [c for c in ("width", "depth", "seed") if c in names]:
        good = (cast[column] == cast[column].round()).fill_null(False)
        _refuse_rows(path, frame, column, good, "a whole number")
        cast = cast.with_columns(pl.col(column).cast(pl.Int64))
    return cast.with_columns(pl.col("rules").fill_null("none")) if "rules" in names else cast


def _refuse_rows(path: Path, frame: pl.DataFrame, column: str, good: pl.Series, wanted: str) -> None:
    if not good.all():
        row = int(good.not_().arg_true()[0])
        raise UserError(
            f"{path}, line {row + 2}: {column} is {frame[column][row]!r}, not {wanted}",
            fix="mend the line or leave it out",
        )


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
    told += f"; the columns are {some(frame.columns, 12)}"
    raise UserError(f"which hyperparameter was swept? {told}", fix="say it: --hyperparameter lr")


def judge(frame: pl.DataFrame, hyperparameter: str = "lr", base: Shape | None = None) -> list[Transfer]:
    """A verdict for every parameterization in the frame."""
    missing = [c for c in (hyperparameter, "loss") if c not in frame.columns]
    if missing or not {"width", "depth"} & set(frame.columns):
        raise UserError(
            f"the sweep lacks {', '.join(missing) or 'width and depth'}",
            fix=f"it needs width or depth, {hyperparameter} and loss; its columns are {some(frame.columns, 12)}",
        )
    frame = complete(frame).filter(pl.col("loss").is_not_null())
    if frame[hyperparameter].null_count():
        raise UserError(f"some {hyperparameter} are no numbers", fix="write them as 0.0039 or 3.9e-3")
    if (frame["loss"].fill_nan(1.0) <= 0).any():
        raise UserError("some losses are not above 0: regret is a share of the loss", fix="give cross-entropies")
    _refuse_mixtures(frame, hyperparameter)
    rules = frame["rules"].unique(maintain_order=True).to_list()
    return [_one(frame.filter(pl.col("rules") == r), r, hyperparameter, base) for r in rules]


def _refuse_mixtures(frame: pl.DataFrame, hyperparameter: str) -> None:
    """Two runs of one setting and seed differ in something that is not looked at: their mean would mean nothing."""
    key = [c for c in ("rules", "width", "depth", hyperparameter, "seed") if c in frame.columns]
    if frame.select(key).is_duplicated().any():
        others = [c for c in frame.columns if c not in (*key, "loss") and frame[c].n_unique() > 1]
        raise UserError(
            "several runs have the same " + ", ".join(key) + (f"; {others[0]} varies too" if others else ""),
            fix="give one run of each: filter the file first" + ("" if "seed" in key else ", or add a column seed"),
        )


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
    place, height, _ = vertex(x, average(losses))
    shapes = tuple(_at(shape, *curves[shape], x, losses) for shape in curves if shape != start)
    at_best = {start: height} | {s.shape: s.loss for s in shapes}
    word, why = _whole(shapes, x, losses)
    drawn = _draws(losses)
    spread = _interval([vertex(x, average(losses[:, d]))[0] for d in drawn]) if drawn is not None else None
    octaves = None if spread is None else Interval(2**spread.low, 2**spread.high)
    return Transfer(rules, hyperparameter, start, 2**place, octaves, height, shapes, _deeper(at_best, start), word, why)


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
    place, drift, regret, loss = _against(x, average(losses), base_x, average(base_losses))
    places, drifts, regrets = _bootstrap(x, losses, base_x, base_losses)
    interior = vertex(x, average(losses))[2]
    word, why = _word(x, average(losses), interior, place - drift, drift, drifts, regret, regrets)
    octaves = None if places is None else Interval(2**places.low, 2**places.high)
    return AtShape(shape, 2**place, octaves, interior, drift, drifts, regret, regrets, loss, word, why)


def _against(x: Floats, y: Floats, base_x: Floats, base_y: Floats) -> tuple[float, float, float, float]:
    """(place of the optimum, its drift in octaves, regret in %, loss at the base's optimum)."""
    base = vertex(base_x, base_y)[0]
    place, lowest, _ = vertex(x, y)
    here = max(height_at(x, y, base), lowest)
    return place, place - base, 100 * (here / lowest - 1) if np.isfinite(lowest) else float("nan"), here


def _draws(losses: Floats) -> "NDArray[np.int64] | None":
    """Seeds drawn with replacement, among those that were run at every value."""
    whole = np.flatnonzero(~np.isnan(losses).any(0))
    if len(whole) < LEAST_SEEDS:
        return None
    return np.random.default_rng(0).choice(whole, (DRAWS, len(whole)))


def _interval(values: Sequence[float]) -> Interval:
    low, high = np.nanquantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="nearest")
    return Interval(float(low), float(high))


def _bootstrap(
    x: Floats, losses: Floats, base_x: Floats, base_losses: Floats
) -> tuple[Interval | None, Interval | None, Interval | None]:
    """Of the optimum's place, its drift and the regret; the base's seeds and this shape's are drawn each on their own."""
    drawn, base_drawn = _draws(losses), _draws(base_losses)
    if drawn is None or base_drawn is None or not np.isfinite(average(losses)).any():
        return None, None, None
    base_drawn = np.random.default_rng(1).permuted(base_drawn, axis=0)
    rows = [
        _against(x, average(losses[:, d]), base_x, average(base_losses[:, b]))[:3]
        for d, b in zip(drawn, base_drawn, strict=True)
    ]
    places, drifts, regrets = (_interval(column) for column in zip(*rows, strict=True))
    return places, drifts, regrets


def _word(
    x: Floats,
    y: Floats,
    interior: bool,
    base: float,
    drift: float,
    drifts: Interval | None,
    regret: float,
    regrets: Interval | None,
) -> tuple[Word, str]:
    if not np.isfinite(y).any():
        return "INCONCLUSIVE", "every run diverged: add smaller values"
    if np.isfinite(y).sum() < 3:
        return "INCONCLUSIVE", "fewer than three values ended in a finite loss: add some"
    if not x[0] <= base <= x[-1]:
        return "INCONCLUSIVE", f"the base's optimum {2**base:.3g} lies outside what was tried here: add it"
    if drifts is None or regrets is None:
        return "INCONCLUSIVE", f"fewer than {LEAST_SEEDS} seeds were run at every value: add seeds"
    if drifts.low > MOST_DRIFT or drifts.high < -MOST_DRIFT:
        return "FAIL", f"the optimum drifts by {drift:+.2f} octaves" + ("" if interior else " at least")
    if regrets.low > MOST_REGRET:
        return "FAIL", f"the base's optimum costs {regret:.2g} % here"
    if not interior:
        edge = "below" if int(np.argmin(y)) == 0 else "above"
        return (
            "INCONCLUSIVE",
            f"the best value {2 ** float(x[np.argmin(y)]):.3g} is the last one tried: go on {edge} it",
        )
    if max(abs(drifts.low), abs(drifts.high)) > MOST_DRIFT or regrets.high > MOST_REGRET:
        return "INCONCLUSIVE", "the interval reaches past what is allowed: add seeds"
    return "PASS", ""


def _deeper(loss: dict[Shape, float], base: Shape) -> bool | None:
    """At the base's width and the transferred value, does every step deeper lower the loss?"""
    ladder = [loss[s] for s in sorted(loss, key=lambda s: s.depth) if s.width == base.width]
    return None if len(ladder) < 2 else all(b < a for a, b in pairwise(ladder))
