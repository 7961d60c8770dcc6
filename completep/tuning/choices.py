"""Does the best of a few choices stay the best? For dimensions of words, or of two values, which have no bowl.

At every larger shape, the base's choice is compared with each other choice, seed by seed: the regret is what it costs,
in % of the loss. PASS means that every interval ends within half a percent. FAIL means that one lies above it,
corrected for the number of comparisons (Bonferroni). The limit is that of `measure/curves.py`.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from completep.config import Shape
from completep.measure.curves import MOST_REGRET
from completep.measure.words import Word, with_reason, worst
from completep.report.document import Cell, Table
from completep.stats import LEVEL, Floats, Interval, mean_interval
from completep.sweep.task import Value
from completep.tuning.space import Dimension


@dataclass(frozen=True)
class ShapeChoice:
    """The base's choice at one shape, compared with the best other choice there."""

    shape: Shape
    best: Value
    regret: float  # % of the loss; negative where the base's choice is the best
    regret_interval: Interval | None
    word: Word
    why: str


@dataclass(frozen=True)
class ChoiceTransfer:
    """The verdict on one dimension."""

    hyperparameter: str
    base: Shape
    best: Value
    shapes: tuple[ShapeChoice, ...]

    @property
    def word(self) -> Word:
        return worst(s.word for s in self.shapes)

    @property
    def why(self) -> str:
        decisive = next((s for s in self.shapes if s.word == self.word and s.why), None)
        return f"{decisive.shape.width} × {decisive.shape.depth}: {decisive.why}" if decisive else ""


def judge_choice(frame: pl.DataFrame, d: Dimension, base: Shape) -> ChoiceTransfer:
    """From one run per shape, value and seed. NaN means that a run diverged; runs that were not done have no loss."""
    tables = {
        Shape(*key): _by_value(part, d) for key, part in frame.partition_by(["width", "depth"], as_dict=True).items()
    }
    here = tables.pop(base)
    chosen = min(here, key=lambda v: float(np.nanmean(here[v])))
    comparisons = len(tables) * (len(d.values) - 1)
    return ChoiceTransfer(
        d.name, base, chosen, tuple(_shape_choice(s, t, chosen, comparisons) for s, t in tables.items())
    )


def _by_value(frame: pl.DataFrame, d: Dimension) -> dict[Value, Floats]:
    """Log losses by seed; infinite where a run diverged, NaN where it was not done."""
    seeds = frame["seed"].unique().sort().to_list()
    by_value: dict[Value, Floats] = {}
    for value, seed, loss in frame.filter(pl.col("loss").is_not_null()).select(d.name, "seed", "loss").iter_rows():
        row = by_value.setdefault(value, np.full(len(seeds), np.nan))
        row[seeds.index(seed)] = np.inf if np.isnan(loss) else np.log(loss)
    return by_value


def _shape_choice(shape: Shape, table: dict[Value, Floats], chosen: Value, comparisons: int) -> ShapeChoice:
    if chosen not in table or len(table) < 2:
        return ShapeChoice(shape, chosen, np.nan, None, "INCONCLUSIVE", f"{chosen} and another value were not run here")
    others = {v: logs for v, logs in table.items() if v != chosen}
    best = min(others, key=lambda v: float(np.nanmean(others[v])))
    if np.isinf(table[chosen]).any():
        alive = not np.isinf(others[best]).any()
        word: Word = "FAIL" if alive else "INCONCLUSIVE"
        return ShapeChoice(
            shape, best, np.inf, None, word, f"{chosen} diverges here" + ("" if alive else ", as all do")
        )
    words = [_word(table[chosen], logs, comparisons) for logs in others.values()]
    regret, interval = _percent(table[chosen], others[best], LEVEL)
    word = worst(words)
    why = {"PASS": "", "FAIL": f"{best} is better by {regret:.2g} %", "INCONCLUSIVE": "the interval is wide: add seeds"}
    return ShapeChoice(shape, best if regret > 0 else chosen, regret, interval, word, why[word])


def _word(ours: Floats, theirs: Floats, comparisons: int) -> Word:
    if np.isinf(theirs).any():
        return "PASS"  # the other one diverges
    _, plain = _percent(ours, theirs, LEVEL)
    _, corrected = _percent(ours, theirs, 1 - (1 - LEVEL) / comparisons)
    if plain is None or corrected is None:
        return "INCONCLUSIVE"
    if corrected.low > MOST_REGRET:
        return "FAIL"
    return "PASS" if plain.high <= MOST_REGRET else "INCONCLUSIVE"


def _percent(ours: Floats, theirs: Floats, level: float) -> tuple[float, Interval | None]:
    """The regret and its interval, from the differences of the seeds that both were run with."""
    change = (ours - theirs)[np.isfinite(ours) & np.isfinite(theirs)]
    interval = mean_interval(change, level)
    percent = 100 * float(np.expm1(change.mean())) if len(change) else np.nan
    if interval is None:
        return percent, None
    return percent, Interval(100 * float(np.expm1(interval.low)), 100 * float(np.expm1(interval.high)))


def choice_table(t: ChoiceTransfer) -> Table:
    rows: list[dict[str, Cell]] = [
        {"shape": f"{t.base.width} × {t.base.depth} (base)", f"best {t.hyperparameter}": str(t.best)}
    ]
    for s in t.shapes:
        ends = f" ({s.regret_interval.low:+.2f} … {s.regret_interval.high:+.2f})" if s.regret_interval else ""
        rows.append(
            {
                "shape": f"{s.shape.width} × {s.shape.depth}", f"best {t.hyperparameter}": str(s.best),
                "regret, %": f"{s.regret:+.2f}{ends}", "verdict": with_reason(s.word, s.why),
            }
        )  # fmt: skip
    return Table.of(f"Using the base's {t.hyperparameter} at every shape", rows)
