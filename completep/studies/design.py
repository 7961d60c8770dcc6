"""What a study is: a question, the paper's answer, axes at each scale, and functions that run, judge and draw it.

A study lives in one file of this package and calls `listed(...)` there. Nothing else has to be edited.
"""

import difflib
import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Generic, Literal, TypeVar

import polars as pl

from completep.config import Run
from completep.errors import UserError
from completep.measure.words import Progress
from completep.report.document import Figure
from completep.rules.table import rules_named
from completep.stats import mean_loss
from completep.studies.scale import Scale, ScaleName
from completep.sweep.store import Store
from completep.sweep.task import Point, Trial, Value
from completep.sweep.training import HOW, Training, describe, history
from completep.train.settings import How

Agreement = Literal[
    "agrees", "agrees in part", "does not agree", "cannot be seen at this scale", "one seed cannot tell", "not finished"
]  # fmt: skip
UNSEEN: Agreement = "cannot be seen at this scale"
ONE_SEED: Agreement = "one seed cannot tell"
Axes = Mapping[str, tuple[Value, ...]]
BASE_PREFIX = "base_"  # of what is tuned at the base, among the axes that can be set
Detail = TypeVar("Detail")
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Outcome(Generic[Detail]):
    """What a study's `find` concludes, and what its `draw` needs besides the data."""

    agreement: Agreement
    sentence: str
    table: pl.DataFrame  # the numbers it rests on
    detail: Detail


def with_seeds(outcome: Outcome[Detail], seeds: int) -> Outcome[Detail]:
    """With one seed, noise is unknown, so the result is never "agrees"."""
    if seeds > 1 or outcome.agreement not in ("agrees", "agrees in part"):
        return outcome
    part = " in part" if outcome.agreement == "agrees in part" else ""
    sentence = f"{outcome.sentence}. On this one seed the paper's claim holds{part}; whether by more than noise is open"
    return replace(outcome, agreement=ONE_SEED, sentence=sentence)


@dataclass(frozen=True)
class Conclusion:
    """An outcome, drawn."""

    agreement: Agreement
    sentence: str
    table: pl.DataFrame
    figures: tuple[Figure, ...]


@dataclass(frozen=True, kw_only=True)
class Study(ABC):
    """What is asked, what the paper answers, and where to look."""

    name: str
    question: str
    claim: str  # the answer of the paper, or of the report that the question comes from
    decision: str  # what counts as agreement, written down before anything was run
    axes: Mapping[ScaleName, Axes]
    beyond_paper: bool = False  # a question that the paper does not ask

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", self.name):
            raise UserError(f"a study named {self.name!r}", fix="use lower-case letters, digits and hyphens")

    def at(self, scale: Scale, items: Path | None = None) -> "Experiment":
        if scale.name not in self.axes:
            raise UserError(f"{self.name} has no {scale.name} scale", fix=f"use {' or '.join(self.axes)}")
        return Experiment(self, scale, self.axes[scale.name], items, self.tuned_values(scale))

    def tuned_values(self, scale: Scale) -> Axes:
        """What is tuned at the base first, with the values to try."""
        return {}

    @property
    @abstractmethod
    def home(self) -> str:
        """The file that defines it."""

    @abstractmethod
    def describe(self) -> str:
        """How it is done, for people who plan it."""


@dataclass(frozen=True)
class Experiment:
    """A study at a scale, with its axes as they are or narrowed."""

    study: Study
    scale: Scale
    axes: Axes
    items: Path | None = None  # local items of downstream tasks, instead of the hub's
    tuning: Axes = field(default_factory=dict)  # what is still to be tuned at the base: base_lr, base_std

    @property
    def name(self) -> str:
        return self.study.name

    def points(self) -> Iterator[Point]:
        for values in product(*self.axes.values()):
            yield Point(zip(self.axes, values, strict=True))

    def narrowed(self, values: Mapping[str, Value | Sequence[Value]]) -> "Experiment":
        """With other values on some axes."""
        axes, tuning = dict(self.axes), dict(self.tuning)
        for name, chosen in values.items():
            known = tuning if name in tuning else axes
            if name not in known:
                close = difflib.get_close_matches(name, (*axes, *tuning), 1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise UserError(
                    f"{self.name} has no axis {name!r}",
                    fix=f"{hint}the axes are {', '.join((*axes, *tuning))}; for instance {_say(axes)}",
                )
            several = [chosen] if isinstance(chosen, (str, int, float)) else list(chosen)
            if not several:
                raise UserError(f"{name} has no values", fix=f"for instance {_say(axes)}")
            known[name] = tuple(dict.fromkeys(read_value(v, known[name][0], name) for v in several))
        fixed = {name: values[0] for name, values in tuning.items() if len(values) == 1}
        return replace(self, axes=axes, tuning=tuning).tuned_to(fixed)

    def tuned_to(self, tuned_values: Mapping[str, Value]) -> "Experiment":
        """With what was found at the base, or given."""
        left = {name: values for name, values in self.tuning.items() if name not in tuned_values}
        numbers = {name.removeprefix(BASE_PREFIX): float(value) for name, value in tuned_values.items()}
        return replace(self, scale=replace(self.scale, **numbers), tuning=left)  # type: ignore[arg-type]


def _say(axes: Axes) -> str:
    name, values = next(iter(axes.items()))
    return f"{name}={','.join(map(str, values[:2]))}"


def read_words(words: Iterable[str]) -> dict[str, list[Value]]:
    """`depth=2,8 lr=2^-8,2^-7` → values by axis."""
    values: dict[str, list[Value]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"{word!r} has no value", fix="write AXIS=VALUE,VALUE")
        values[name] = list(text.split(","))
    return values


def read_value(value: Value, like: Value, axis: str) -> Value:
    """A value of an axis in the type that the axis has. In text, powers are written 2^-8."""
    text = str(value).strip()
    if isinstance(like, str):
        if text:
            return rules_named(text).key if axis == "rules" else text
        raise UserError(f"{axis} has an empty value", fix=f"write values like {like}")
    base, power, exponent = text.partition("^")
    try:
        number = float(base) ** float(exponent) if power else float(text)
        if not math.isfinite(number) or (isinstance(like, int) and number != int(number)):
            raise ValueError
    except (ValueError, OverflowError, ZeroDivisionError, TypeError):  # a root of a negative number is complex
        kind = "a whole number" if isinstance(like, int) else "a number"
        raise UserError(f"{axis}={text}: {text!r} is not {kind}", fix=f"write values like {like}") from None
    return int(number) if isinstance(like, int) else number


def nothing_to_prepare(experiment: Experiment) -> None:
    """Most studies need nothing before their first run."""


def defined_in(function: Callable[..., object]) -> str:
    """The file of a function, also of one that is wrapped, or of a class whose objects are called."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code.co_filename if code is not None else ""


Trained = Sequence[tuple[Mapping[str, Value], Training]]  # labels and task of every run


@dataclass(frozen=True)
class Tuning:
    """What is tuned at the base before a study's own runs: by its own recipe, at its own horizon, with its seeds."""

    point: Callable[[Scale], Point]  # the base on the axes of the study, with the scale's own η and σ; without a seed
    values: Mapping[ScaleName, Axes]  # base_lr and base_std, each with the values to try


@dataclass(frozen=True, kw_only=True)
class Sweep(Study, Generic[Detail]):
    """A training run at every point."""

    run: Callable[[Scale, Point], Run]
    find: Callable[[Experiment, pl.DataFrame], Outcome[Detail]]
    draw: Callable[[Experiment, pl.DataFrame, Outcome[Detail]], Sequence[Figure]]
    swept: str | None = None  # the axis along which every curve has its minimum, if the study asks for it
    history: bool = False  # whole loss curves instead of final losses
    prepare: Callable[[Experiment], None] = nothing_to_prepare  # check what is needed before the first run
    after: Callable[[Experiment, Path], None] | None = (
        None  # more to measure on a trained run; leaves files in its folder
    )
    read: Callable[[Experiment, Store, Trained], pl.DataFrame] | None = None  # the frame, where it is not one of losses
    tuning: Tuning | None = None
    one_seed: bool = False  # its decision is made for one seed

    def tuned_values(self, scale: Scale) -> Axes:
        return {} if self.tuning is None else self.tuning.values.get(scale.name, {})

    def tuning_trials(self, experiment: Experiment, how: How = HOW, ranks: int = 1) -> list[Trial]:
        """The base under every combination of what is to be tuned there; none if nothing is left to tune."""
        if self.tuning is None or not experiment.tuning:
            return []
        trials = []
        for values in product(*experiment.tuning.values()):
            chosen = dict(zip(experiment.tuning, values, strict=True))
            scale = experiment.tuned_to(chosen).scale
            for seed in experiment.axes["seed"]:
                point = Point({**self.tuning.point(scale), "seed": seed})
                trials.append(Trial(Point({**chosen, "seed": seed}), Training.of(self.run(scale, point), how, ranks)))
        return trials

    def tuned(self, experiment: Experiment, store: Store, trials: Sequence[Trial]) -> "tuple[Experiment, pl.DataFrame]":
        """With the values of the lowest mean loss over seeds, and the losses. Still untuned if runs are missing.

        `trials` are those of `tuning_trials`.
        """
        results = store.results(trial.task for trial in trials)
        if not trials or any(trial.task.id not in results for trial in trials):
            return experiment, pl.DataFrame()
        trial_losses = (trial.task.loss(results[trial.task.id]) for trial in trials)
        losses = [{**t.point, "loss": math.inf if x is None else x} for t, x in zip(trials, trial_losses, strict=True)]
        frame = pl.DataFrame(losses, infer_schema_length=None)
        means = mean_loss(frame, *experiment.tuning)
        best = means.row(int(means["loss"].arg_min() or 0), named=True)
        return experiment.tuned_to({name: best[name] for name in experiment.tuning}), means

    def describe(self) -> str:
        return "training runs"

    @property
    def home(self) -> str:
        return defined_in(self.run)

    def trials(self, experiment: Experiment, how: How = HOW, ranks: int = 1) -> list[Trial]:
        """Every point with its run. An impossible setting is an error here, before anything runs."""
        return [Trial(p, Training.of(self.run(experiment.scale, p), how, ranks)) for p in experiment.points()]

    def frame(self, experiment: Experiment, store: Store, trials: Sequence[Trial]) -> pl.DataFrame:
        """A row per run (or per step of one): its place on the axes, its settings, its result."""
        labelled = []
        for trial in trials:
            assert isinstance(trial.task, Training)
            labelled.append(({**describe(self.run(experiment.scale, trial.point)), **trial.point}, trial.task))
        if self.read is not None:
            return self.read(experiment, store, labelled)
        if self.history:
            return history(store, labelled)
        frame = store.frame(labelled)
        diverged = pl.col("status") == "diverged"
        known = pl.col("validation_loss") if "validation_loss" in frame.columns else pl.lit(None, pl.Float64)
        return frame.with_columns(loss=pl.when(diverged).then(math.nan).otherwise(known.cast(pl.Float64)))

    def outcome(self, experiment: Experiment, frame: pl.DataFrame) -> Outcome[Detail]:
        """What was found, as far as the number of seeds allows."""
        seeds = frame["seed"].n_unique() if "seed" in frame.columns else 1
        outcome = self.find(experiment, frame)
        return outcome if self.one_seed else with_seeds(outcome, seeds)

    def conclude(self, experiment: Experiment, frame: pl.DataFrame) -> Conclusion:
        outcome = self.outcome(experiment, frame)
        figures = tuple(self.draw(experiment, frame, outcome))
        return Conclusion(outcome.agreement, outcome.sentence, outcome.table, figures)


@dataclass(frozen=True, kw_only=True)
class Measurement(Study, Generic[Measured, Detail]):
    """Something measured on models at the start of training: minutes, and no runs to keep."""

    measure: Callable[[Experiment, int | None, Progress], Measured]
    find: Callable[[Experiment, Measured], Outcome[Detail]]
    draw: Callable[[Experiment, Measured, Outcome[Detail]], Sequence[Figure]]
    frames: Callable[[Measured], Mapping[str, pl.DataFrame]]

    def describe(self) -> str:
        return "measurements, no training runs: minutes"

    @property
    def home(self) -> str:
        return defined_in(self.measure)

    def outcome(self, experiment: Experiment, measured: Measured) -> Outcome[Detail]:
        """What was found, as far as the number of seeds allows."""
        return with_seeds(self.find(experiment, measured), len(experiment.axes.get("seed", (0,))))

    def conclude(
        self, experiment: Experiment, workers: int | None, progress: Progress
    ) -> tuple[Conclusion, Mapping[str, pl.DataFrame]]:
        measured = self.measure(experiment, workers, progress)
        outcome = self.outcome(experiment, measured)
        figures = tuple(self.draw(experiment, measured, outcome))
        return Conclusion(outcome.agreement, outcome.sentence, outcome.table, figures), self.frames(measured)


StudyType = TypeVar("StudyType", bound=Study)
LISTED: dict[str, Study] = {}


def listed(study: StudyType) -> StudyType:
    """Make a study known to `completep study`. A file that is loaded again replaces its own study."""
    known = LISTED.get(study.name)
    if known is not None and Path(known.home).resolve() != Path(study.home).resolve():
        raise UserError(f"there are two studies named {study.name!r}", fix="give yours another name")
    LISTED[study.name] = study
    return study
