"""Loss curves over a hyperparameter: does the value tuned at the base stay optimal? From a sweep's losses to a verdict.

At every shape: where the optimum lies, how far it has drifted from the base's (in octaves), and what it costs to use
the base's value there (regret, in % of the loss). PASS is a drift of at most half an octave and a regret of at most
half a percent, with minima inside the range that was tried.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

from completep.config import Shape
from completep.errors import UserError, some
from completep.measure.words import Word
from completep.stats import Floats, Interval, bootstrap, height_at, mean_over_seeds, minimum, paired_bootstrap

MOST_DRIFT = 0.5  # octaves
MOST_REGRET = 0.5  # % of the loss
DRAWS = 1000
LEAST_SEEDS = 3  # fewer say nothing about the noise
HYPERPARAMETERS = ("lr", "std", "eps", "weight_decay")
RESERVED = ("rules", "width", "depth", "seed", "loss")


@dataclass(frozen=True)
class AtShape:
    """One shape's curve against the base's."""

    shape: Shape
    optimum: float
    optimum_interval: Interval | None
    interior: bool
    drift: float  # octaves from the base's optimum
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
    shapes: tuple[AtShape, ...]
    deeper_is_better: bool | None  # at the transferred value; None where depth was not varied
    word: Word
    why: str


def read_sweep(path: Path) -> pl.DataFrame:
    """A CSV of any sweep: width, depth (or one of them), a hyperparameter, loss; seed and rules where there are
    several.

    A loss that is no number (`nan`, `diverged`) is a run that diverged; a blank is a run that was not done.
    """
    try:
        frame = pl.read_csv(path, infer_schema=False, null_values=[""])
    except (OSError, pl.exceptions.PolarsError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read as CSV: {first}", fix="give a file with a header line") from error
    names = [c.strip().lower() for c in frame.columns]
    repeated = sorted({n for n in names if names.count(n) > 1})
    if repeated or frame.is_empty():
        what = f"several columns called {repeated[0]!r}" if repeated else "no rows"
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
            fix="correct the line or leave it out",
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
    which = f"several vary: {', '.join(varied)}" if varied else f"none of {', '.join(HYPERPARAMETERS)} varies"
    raise UserError(
        f"which hyperparameter was swept? {which}; the columns are {some(frame.columns, 12)}",
        fix="name it: hyperparameter lr, for instance",
    )


def judge_transfer(frame: pl.DataFrame, hyperparameter: str = "lr", base: Shape | None = None) -> list[Transfer]:
    """A verdict for every parameterization in the frame."""
    missing = [c for c in (hyperparameter, "loss") if c not in frame.columns]
    if missing or not {"width", "depth"} & set(frame.columns):
        raise UserError(
            f"the sweep lacks {', '.join(missing) or 'width and depth'}",
            fix=f"it needs width or depth, {hyperparameter} and loss; its columns are {some(frame.columns, 12)}",
        )
    if hyperparameter in RESERVED:
        raise UserError(f"{hyperparameter!r} is not a hyperparameter", fix="name the column that was swept, such as lr")
    for column in (hyperparameter, "loss"):
        if not frame[column].dtype.is_numeric():
            raise UserError(
                f"the column {column!r} does not hold numbers", fix="cast it to floats, with NaN for diverged"
            )
    frame = complete(frame).filter(pl.col("loss").is_not_null())
    if frame.is_empty():
        raise UserError("no run of the sweep has a loss", fix="add the losses, with NaN for runs that diverged")
    frame = frame.with_columns(pl.col("rules").cast(pl.String).fill_null("none"))
    if frame[hyperparameter].null_count():
        raise UserError(f"some values of {hyperparameter} are not numbers", fix="write them as 0.0039 or 3.9e-3")
    if (frame["loss"].fill_nan(1.0) <= 0).any():
        raise UserError("some losses are not above 0: regret is a share of the loss", fix="give cross-entropies")
    _refuse_mixtures(frame, hyperparameter)
    rules = frame["rules"].unique(maintain_order=True).to_list()
    return [_one(frame.filter(pl.col("rules") == r), r, hyperparameter, base) for r in rules]


def _refuse_mixtures(frame: pl.DataFrame, hyperparameter: str) -> None:
    """Two runs of one setting and seed differ in something that is not looked at. Their mean would be meaningless."""
    key = [c for c in ("rules", "width", "depth", hyperparameter, "seed") if c in frame.columns]
    if frame.select(key).is_duplicated().any():
        others = [c for c in frame.columns if c not in (*key, "loss") and frame[c].n_unique() > 1]
        raise UserError(
            "several runs have the same " + ", ".join(key) + (f"; {others[0]} varies too" if others else ""),
            fix="give one run of each: filter the file first" + ("" if "seed" in key else ", or add a column seed"),
        )


def complete(frame: pl.DataFrame) -> pl.DataFrame:
    """With the columns that a small sweep leaves out."""
    absent = {"rules": "sweep", "width": 1, "depth": 1}
    return frame.with_columns(pl.lit(value).alias(name) for name, value in absent.items() if name not in frame.columns)


def curve(frame: pl.DataFrame, hyperparameter: str) -> tuple[Floats, Floats]:
    """(log2 of the values tried, losses by value and seed): infinite where a run diverged, NaN where it was not
    done.
    """
    for column in (hyperparameter, "loss"):
        if column not in frame.columns:
            raise UserError(f"the frame has no column {column!r}", fix=f"it has {', '.join(frame.columns)}")
    if "seed" not in frame.columns:
        frame = frame.with_columns(seed=pl.lit(0))
    values = frame[hyperparameter].to_numpy()
    if not (np.isfinite(values.astype(float)) & (values > 0)).all():
        odd = next(v for v in values if not (np.isfinite(float(v)) and v > 0))
        raise UserError(f"{hyperparameter} = {odd} has no place on a logarithmic axis", fix="leave those runs out")
    # NaN means diverged; null means not done.
    finite = pl.when(pl.col("loss").is_finite()).then("loss").when(pl.col("loss").is_not_null()).then(np.inf)
    frame = frame.with_columns(loss=finite, seed=pl.col("seed").rank("dense"))  # columns 1, 2, … after the pivot
    table = frame.pivot(on="seed", index=hyperparameter, values="loss", aggregate_function="mean").sort(hyperparameter)
    losses = table.drop(hyperparameter).to_numpy().astype(float)
    return np.log2(table[hyperparameter].to_numpy().astype(float)), losses


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
    best = minimum(x, mean_over_seeds(losses))
    shapes = tuple(_at(shape, *curves[shape], x, losses) for shape in curves if shape != start)
    loss_at_best = {start: best.height} | {s.shape: s.loss for s in shapes}
    word, why = _whole(shapes, x, losses)
    spread = bootstrap(lambda y: minimum(x, y).place, losses, DRAWS, LEAST_SEEDS)
    deeper = _deeper(loss_at_best, start)
    interval = _octaves(spread)
    return Transfer(rules, hyperparameter, start, 2**best.place, interval, best.height, shapes, deeper, word, why)


def _octaves(spread: Interval | None) -> Interval | None:
    return None if spread is None else Interval(2**spread.low, 2**spread.high)


def _whole(shapes: tuple[AtShape, ...], x: Floats, losses: Floats) -> tuple[Word, str]:
    mean = mean_over_seeds(losses)
    if not shapes:
        return "INCONCLUSIVE", "there is one shape only: add a larger one"
    if np.isfinite(mean).sum() < 3:
        return "INCONCLUSIVE", "fewer than three values ended in a finite loss at the base: add some"
    best = minimum(x, mean)
    if not best.interior:
        return "INCONCLUSIVE", f"the base's best value {2**best.place:.3g} is the last one tried: extend the range"
    words: tuple[Word, ...] = ("FAIL", "INCONCLUSIVE")
    for word in words:
        if (worst := next((s for s in shapes if s.word == word), None)) is not None:
            return word, f"{worst.shape.width} × {worst.shape.depth}: {worst.why}"
    return "PASS", ""


def _at(shape: Shape, x: Floats, losses: Floats, base_x: Floats, base_losses: Floats) -> AtShape:
    mean = mean_over_seeds(losses)
    place, drift, regret, loss = _against(x, mean, base_x, mean_over_seeds(base_losses))
    places, drifts, regrets = _intervals(x, losses, base_x, base_losses)
    interior = minimum(x, mean).interior
    word, why = _word(x, mean, interior, place - drift, drift, drifts, regret, regrets)
    return AtShape(shape, 2**place, _octaves(places), interior, drift, drifts, regret, regrets, loss, word, why)


def _against(x: Floats, y: Floats, base_x: Floats, base_y: Floats) -> tuple[float, float, float, float]:
    """(place of the optimum, its drift in octaves, regret in %, loss at the base's optimum)."""
    base, best = minimum(base_x, base_y).place, minimum(x, y)
    loss = max(height_at(x, y, base), best.height)
    regret = 100 * (loss / best.height - 1) if np.isfinite(best.height) else float("nan")
    return best.place, best.place - base, regret, loss


def _intervals(
    x: Floats, losses: Floats, base_x: Floats, base_losses: Floats
) -> tuple[Interval | None, Interval | None, Interval | None]:
    """Of the optimum's place, its drift and the regret. The base's seeds and this shape's are drawn independently."""
    if not np.isfinite(mean_over_seeds(losses)).any():
        return None, None, None

    def statistics(y: Floats, base_y: Floats) -> tuple[float, ...]:
        return _against(x, y, base_x, base_y)[:3]

    intervals = paired_bootstrap(statistics, losses, base_losses, DRAWS, LEAST_SEEDS)
    places, drifts, regrets = intervals or (None, None, None)
    return places, drifts, regrets


def _word(
    x: Floats, y: Floats, interior: bool, base: float, drift: float, drifts: Interval | None, regret: float,
    regrets: Interval | None,
) -> tuple[Word, str]:  # fmt: skip
    if not np.isfinite(y).any():
        return "INCONCLUSIVE", "every run diverged: add smaller values"
    if np.isfinite(y).sum() < 3:
        return "INCONCLUSIVE", "fewer than three values ended in a finite loss: add some"
    if not x[0] <= base <= x[-1]:
        return "INCONCLUSIVE", f"the base's optimum {2**base:.3g} lies outside the values tried here: add it"
    if drifts is None or regrets is None:
        return "INCONCLUSIVE", f"fewer than {LEAST_SEEDS} seeds were run at every value: add seeds"
    if drifts.low > MOST_DRIFT or drifts.high < -MOST_DRIFT:
        return "FAIL", f"the optimum drifts by {drift:+.2f} octaves" + ("" if interior else " at least")
    if regrets.low > MOST_REGRET:
        return "FAIL", f"the base's optimum costs {regret:.2g} % here"
    if not interior:
        i = int(np.argmin(y))
        side = "smaller" if i == 0 else "larger"
        return "INCONCLUSIVE", f"the best value {2 ** float(x[i]):.3g} is the last one tried: add {side} values"
    if max(abs(drifts.low), abs(drifts.high)) > MOST_DRIFT or regrets.high > MOST_REGRET:
        return "INCONCLUSIVE", "the interval exceeds the allowed range: add seeds"
    return "PASS", ""


def _deeper(loss: dict[Shape, float], base: Shape) -> bool | None:
    """At the base's width and the transferred value: does every step deeper lower the loss?"""
    ladder = [loss[s] for s in sorted(loss, key=lambda s: s.depth) if s.width == base.width]
    return None if len(ladder) < 2 else all(b < a for a, b in pairwise(ladder))
