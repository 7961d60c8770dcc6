"""`transfer`: from any sweep's losses to a verdict on whether the base's best value stays the best."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import polars as pl

from completep.config import Shape, as_shape
from completep.errors import UserError
from completep.measure.curves import Deeper, Transfer, judge_transfer
from completep.measure.figures import transfer_figure
from completep.measure.sweeps import HYPERPARAMETERS, complete, find_hyperparameter, named, read_sweep
from completep.measure.words import Word, with_reason, worst
from completep.report.document import Cell, Document, Json, Table, Verdict, number
from completep.report.result import Result
from completep.rules.table import display_name
from completep.stats import Interval

DEEPER: Mapping[Deeper | None, str] = {
    "better": "; deeper is better at the transferred value",
    "not better": "; deeper is not better at the transferred value",
    "unclear": "; whether deeper is better at the transferred value cannot be told from the noise",
    None: "",
}

MOST_RULES, MOST_CURVES, MOST_POINTS = 50, 1000, 50_000  # of one sweep


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
            Verdict(t.word, display_name(t.rules) + (f" ({t.why})" if t.why else "") + DEEPER[t.deeper])
            for t in self.transfers
        )
        title = f"Does the best {self.transfers[0].hyperparameter} at the base stay the best?"
        figure = transfer_figure(complete(self.frame), self.transfers, "transfer", title)
        return Document(title, (*words, transfer_table(self.transfers), figure), "completep check transfer")

    def frames(self) -> Mapping[str, pl.DataFrame]:
        return {"transfer": self.frame}

    def _fields(self) -> Json:
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
                    f"drift, {t.unit}": _with_interval(s.drift, s.drift_interval),
                    "regret, %": _with_interval(s.regret, s.regret_interval), "loss there": s.loss,
                    "verdict": with_reason(s.word, s.why),
                }
            )  # fmt: skip
    return Table.of(f"Using the base's best {name} at every shape", rows)


def _with_interval(value: float, interval: Interval | None) -> str:
    return _signed(value) + (f" ({_signed(interval.low)} … {_signed(interval.high)})" if interval else "")


def _signed(value: float) -> str:
    return f"{value:+.2f}" if math.isfinite(value) else number(value)


def transfer(
    sweep: "pl.DataFrame | Path | str",
    *,
    hyperparameter: str | None = None,
    base: "Shape | tuple[int, int] | None" = None,
    loss: str | None = None,
    width: str | None = None,
    depth: str | None = None,
    seed: str | None = None,
    rules: str | None = None,
    lr: str | None = None,
    std: str | None = None,
    eps: str | None = None,
    weight_decay: str | None = None,
) -> TransferCheck:
    """Is the value that was best at the base still best at the other shapes?

    FAIL is a regret above half a percent of the loss, or, where the regret leaves it open, a drift of more than half an
    octave. PASS is a regret below half a percent at every shape, with minima inside the range tried.

    Args:
        sweep: a frame, or a CSV file, with width and depth (or one of them), the hyperparameter, loss, and seed and
            rules where there are several.
        hyperparameter: the column that was swept; by default whichever of lr, std, eps, weight_decay varies.
        base: width and depth of the base; by default the smallest shape.
        loss: what the sweep calls the loss, such as "val_loss".
        width: what it calls the width, such as "n_embd".
        depth: what it calls the depth, such as "n_layer".
        seed: what it calls the seed.
        rules: what it calls the parameterization.
        lr: what it calls the learning rate, such as "learning_rate".
        std: what it calls the init standard deviation.
        eps: what it calls epsilon.
        weight_decay: what it calls weight decay.
    """
    names = {"loss": loss, "width": width, "depth": depth, "seed": seed, "rules": rules}
    names |= {"lr": lr, "std": std, "eps": eps, "weight_decay": weight_decay}
    given = {role: name for role, name in names.items() if name is not None}
    frame = named(sweep, given) if isinstance(sweep, pl.DataFrame) else read_sweep(Path(sweep), given)
    swept = [role for role in HYPERPARAMETERS if role in given]
    wanted = hyperparameter or (swept[0] if len(swept) == 1 else None)
    start = None if base is None else as_shape(base)
    name = find_hyperparameter(frame, wanted)
    _refuse_too_many(frame, name)
    return TransferCheck(frame, tuple(judge_transfer(frame, name, start)))


def _refuse_too_many(frame: pl.DataFrame, hyperparameter: str) -> None:
    """Every parameterization is a panel, every shape a line in it, and every value a point."""
    curves: list[str] = [c for c in ("rules", "width", "depth") if c in frame.columns]
    limits: dict[str, tuple[list[str], int]] = {"rules": (["rules"], MOST_RULES)}
    limits["shapes and rules"] = curves, MOST_CURVES
    limits["points"] = list(dict.fromkeys([*curves, hyperparameter])), MOST_POINTS
    for what, (columns, most) in limits.items():
        if set(columns) <= set(frame.columns) and (count := frame.select(columns).n_unique()) > most:
            raise UserError(
                f"the sweep has {count} different {what} ({', '.join(columns)}), more than {most}",
                fix=f"leave out runs; or name another column of the file: {columns[0]}='COLUMN'",
            )
