"""`transfer`: from any sweep's losses to a verdict on whether the base's best value stays the best."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import polars as pl

from completep.config import Shape, as_shape
from completep.measure.curves import Transfer, complete, find_hyperparameter, judge_transfer, read_sweep
from completep.measure.figures import transfer_figure
from completep.measure.words import Word, worst
from completep.report.document import Cell, Document, Json, Table, Verdict
from completep.report.result import Result
from completep.rules.table import display_name
from completep.stats import Interval

DEEPER = {
    True: "; deeper is better at the transferred value",
    False: "; deeper is not better at the transferred value",
    None: "",
}


@dataclass(frozen=True, eq=False, repr=False)
class TransferCheck(Result):
    """One verdict per parameterization in a sweep."""

    frame: pl.DataFrame
    transfers: tuple[Transfer, ...]

    slug = "transfer"

    @property
    def verdict(self) -> Word:
        return worst(t.word for t in self.transfers)

    def document(self) -> Document:
        words = tuple(
            Verdict(t.word, display_name(t.rules) + (f" ({t.why})" if t.why else "") + DEEPER[t.deeper_is_better])
            for t in self.transfers
        )
        title = f"Does the best {self.transfers[0].hyperparameter} at the base stay the best?"
        figure = transfer_figure(complete(self.frame), self.transfers, "transfer", title)
        return Document(title, (*words, transfer_table(self.transfers), figure), "completep check transfer")

    def frames(self) -> Mapping[str, pl.DataFrame]:
        return {"transfer": self.frame}

    def to_json(self) -> Json:
        return {"verdict": self.verdict, "verdicts": [asdict(t) for t in self.transfers]}


def transfer_table(transfers: Sequence[Transfer]) -> Table:
    name = transfers[0].hyperparameter
    rows: list[dict[str, Cell]] = []
    for t in transfers:
        rules = display_name(t.rules)
        rows.append({"rules": rules, "shape": f"{t.base.width} × {t.base.depth} (base)", f"best {name}": t.best})
        for s in t.shapes:
            rows.append(
                {
                    "rules": rules, "shape": f"{s.shape.width} × {s.shape.depth}", f"best {name}": s.optimum,
                    "drift, octaves": _with_interval(s.drift, s.drift_interval),
                    "regret, %": _with_interval(s.regret, s.regret_interval), "loss there": s.loss,
                    "verdict": f"{s.word}: {s.why}" if s.why else s.word,
                }
            )  # fmt: skip
    return Table.of(f"Using the base's best {name} at every shape", rows)


def _with_interval(value: float, interval: Interval | None) -> str:
    return f"{value:+.2f}" + (f" ({interval.low:+.2f} … {interval.high:+.2f})" if interval else "")


def transfer(
    sweep: "pl.DataFrame | Path | str",
    *,
    hyperparameter: str | None = None,
    base: "Shape | tuple[int, int] | None" = None,
) -> TransferCheck:
    """Is the value that was best at the base still best at the other shapes?

    PASS is a drift of at most half an octave and a regret of at most half a percent, with minima inside the range
    tried.

    Args:
        sweep: a frame, or a CSV file, with width and depth (or one of them), the hyperparameter, loss, and seed and
            rules where there are several.
        hyperparameter: the column that was swept; by default whichever of lr, std, eps, weight_decay varies.
        base: width and depth of the base; by default the smallest shape.
    """
    frame = sweep if isinstance(sweep, pl.DataFrame) else read_sweep(Path(sweep))
    swept = find_hyperparameter(frame, hyperparameter)
    start = None if base is None else as_shape(base)
    return TransferCheck(frame, tuple(judge_transfer(frame, swept, start)))
