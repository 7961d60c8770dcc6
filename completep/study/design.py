"""A study: axes, the run at every point of their product, and what is to be found out from the losses."""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, Self

import polars as pl

from completep.compute import flops
from completep.config import Run
from completep.errors import UserError
from completep.measure.grid import Coordinates
from completep.study.store import Store

Value = str | int | float
Point = Mapping[str, Value]
Agreement = Literal["agrees", "agrees in part", "does not agree", "cannot be seen at this scale"]


@dataclass(frozen=True)
class Outcome:
    """What a study found, beside what the paper found."""

    agreement: Agreement
    sentence: str  # the finding in one sentence
    table: pl.DataFrame  # the numbers it rests on
    detail: Any = None  # what the picture needs besides the frame

    def with_missing(self, counts: Mapping[str, int]) -> "Outcome":
        """From runs that are not all done nothing is concluded."""
        left = counts["runs"] - counts["done"] - counts["diverged"]
        if not left:
            return self
        told = f"{left} of {counts['runs']} runs are not done. So far: {self.sentence}"
        return replace(self, agreement="cannot be seen at this scale", sentence=told)


@dataclass(frozen=True)
class Study:
    """What is asked, what the paper answers, and the axes along which to look."""

    name: str
    question: str
    claim: str  # the paper's answer
    axes: Mapping[str, tuple[Value, ...]]

    def points(self) -> Iterator[dict[str, Value]]:
        for values in product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))

    def narrowed(self, words: Iterable[str]) -> Self:
        """With some axes cut down (or moved): `depth=2,8`, `lr=2^-8,2^-7`."""
        axes = dict(self.axes)
        for word in words:
            name, equals, values = word.partition("=")
            if name not in axes or not equals:
                close = difflib.get_close_matches(name, axes, 1)
                hint = f"did you mean {close[0]}? " if close and name not in axes else ""
                raise UserError(
                    f"--set {word}: " + (f"{self.name} has no axis {name!r}" if name not in axes else "no value"),
                    fix=hint + f"the axes are {', '.join(axes)}; write {next(iter(axes))}=VALUE,VALUE",
                )
            axes[name] = tuple(dict.fromkeys(read_value(v, axes[name][0], word) for v in values.split(",")))
        return replace(self, axes=axes)


@dataclass(frozen=True)
class Sweep(Study):
    """A training at every point."""

    run: Callable[..., Run]  # of one value of each axis
    find: Callable[[pl.DataFrame], Outcome]
    swept: str | None = None  # the axis along which every curve has its minimum, if that is the question
    history: bool = False  # whether the whole loss curves are wanted, and not only their ends
    prepare: Callable[[], None] = lambda: None  # whatever must be there, before any run is begun
    examine: Callable[[Store, Sequence[tuple[Point, Run]]], pl.DataFrame] | None = (
        None  # what else is asked of the trained models
    )

    def runs(self) -> list[tuple[Point, Run]]:
        """Every point with its run. A point whose setting is impossible says so here, before anything runs."""
        return [(point, self.run(**point)) for point in self.points()]

    def frame(self, store: Store, runs: Sequence[tuple[Point, Run]]) -> pl.DataFrame:
        """A row per run (or per step of one): where it lies on the axes, what it was, and what came of it."""
        if self.examine is not None:
            return self.examine(store, runs)
        labelled = [({**described(run), **point}, run) for point, run in runs]
        if self.history:
            return store.history(labelled)
        frame = store.frame(labelled)
        lost = pl.col("status") == "diverged"
        known = pl.col("validation_loss") if "validation_loss" in frame.columns else pl.lit(None, pl.Float64)
        return frame.with_columns(loss=pl.when(lost).then(math.nan).otherwise(known.cast(pl.Float64)))


@dataclass(frozen=True)
class Measurement(Study):
    """Something measured on models as they start to train: no runs to keep."""

    measure: Callable[..., pl.DataFrame | Coordinates]  # of all axes, and how to show progress
    find: Callable[[Any], Outcome]


def read_value(text: str, like: Value, word: str) -> Value:
    """A value of an axis in the type that the axis has; powers are written 2^-8."""
    text = text.strip()
    if isinstance(like, str):
        if text:
            return text
        raise UserError(f"--set {word}: an empty value", fix="write values like " + str(like))
    base, power, exponent = text.partition("^")
    try:
        number = float(base) ** float(exponent) if power else float(text)
        if not math.isfinite(number) or (isinstance(like, int) and number != int(number)):
            raise ValueError
    except (ValueError, OverflowError, ZeroDivisionError):
        kind = "a whole number" if isinstance(like, int) else "a number"
        raise UserError(f"--set {word}: {text!r} is not {kind}", fix=f"write values like {like}") from None
    return int(number) if isinstance(like, int) else number


def described(run: Run) -> dict[str, Value]:
    """What a reader of the frame wants to know of a run."""
    h = run.hyperparameters
    return {
        "rules": run.rules,
        "width": run.model.width,
        "depth": run.model.depth,
        "lr": h.lr,
        "std": h.std,
        "eps": h.eps,
        "weight_decay": h.weight_decay,
        "seed": run.seed,
        "batch": run.batch,
        "steps": run.schedule.steps,
        "parameters": flops.non_embedding(run.model),
        "flops": flops.training_flops(run.model, run.sequence, run.tokens),
    }


def octaves(first: int, last: int, by: int = 1) -> tuple[float, ...]:
    return tuple(2.0**e for e in range(first, last + 1, by))
