"""What a study, its plan and its status say: the results that `study`, `study_plan` and `study_status` return."""

import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import polars as pl

from completep import __version__
from completep.config import BUILTIN, Run
from completep.report.document import Cell, Code, Document, Facts, Json, Part, Table, Text, Tone, Verdict
from completep.report.result import Result
from completep.rules.table import display_name
from completep.studies.design import Agreement, Conclusion, Experiment, Study
from completep.sweep.conduct import Conducted
from completep.sweep.store import Counts
from completep.sweep.task import Value
from completep.units import duration, human

MOST_LISTED = 2000  # rows of raw data on a page
# The tone and the headline of a report, with the source of the claim.
SHOWN: Mapping[Agreement, tuple[Tone, str]] = {
    "agrees": ("good", "Agrees with the {}"),
    "agrees in part": ("good", "Agrees with the {} in part"),
    "does not agree": ("bad", "Does not agree with the {}"),
    "cannot be seen at this scale": ("open", "Cannot be seen at this scale"),
    "one seed cannot tell": ("open", "One seed cannot tell"),
    "not finished": ("open", "Not finished"),
}


@dataclass(frozen=True, eq=False, repr=False)
class StudyResult(Result):
    """What a study found, beside what the paper found."""

    experiment: Experiment
    conclusion: Conclusion
    data: Mapping[str, pl.DataFrame]  # a row per run, or what was measured
    settings: Mapping[str, str]
    command: tuple[str, ...]  # reproduces this result; empty if no command can
    conducted: Conducted | None = None  # what was run for it just now

    @property
    def slug(self) -> str:  # type: ignore[override]
        return self.experiment.name

    @property
    def verdict(self) -> Agreement:
        return self.conclusion.agreement

    @property
    def table(self) -> pl.DataFrame:
        return self.conclusion.table

    @property
    def failed(self) -> int:
        """Runs that failed just now."""
        return len(self.conducted.failed) if self.conducted else 0

    def document(self) -> Document:
        study, conclusion = self.experiment.study, self.conclusion
        tone, headline = SHOWN[conclusion.agreement]
        source = "claim" if study.beyond_paper else "paper"
        parts: list[Part] = [
            Verdict(conclusion.agreement, f"Here: {conclusion.sentence}.", tone, headline.format(source)),
            Text(f"The {source}: {study.claim}"),
            Text(f"What counts as agreement: {study.decision}"),
            *conclusion.figures,
            Table.of_frame("Numbers", named(conclusion.table)),
            Facts("Settings", self.settings, page_only=True),
        ]
        if self.command:
            parts.append(Code(shlex.join(["completep", *self.command]), "Run it again", page_only=True))
        for name, frame in self.data.items():
            if frame.height <= MOST_LISTED:
                parts.append(Table.of_frame(name[0].upper() + name[1:], frame, collapsed=True))
        made_by = "demo" if self.command[:1] == ("demo",) else f"study {study.name}"
        return Document(study.question, tuple(parts), f"completep {made_by}")

    def frames(self) -> Mapping[str, pl.DataFrame]:
        return {"outcome": self.conclusion.table, **self.data}

    def _fields(self) -> Json:
        study = self.experiment.study
        return {
            "study": study.name,
            "question": study.question,
            "claim": study.claim,
            "decision": study.decision,
            "agreement": self.verdict,
            "sentence": self.conclusion.sentence,
            "table": self.table.to_dicts(),
        }


def named(frame: pl.DataFrame) -> pl.DataFrame:
    """With the display names of parameterizations instead of their keys."""
    if "rules" not in frame.columns:
        return frame
    return frame.with_columns(pl.col("rules").map_elements(display_name, return_dtype=pl.String))


def run_settings(runs: Sequence[Run]) -> dict[str, str]:
    """What all runs share, and what varies, for people."""
    models = [r.model for r in runs]
    return {
        "base (width × depth)": _values(f"{r.base.width} × {r.base.depth}" for r in runs),
        "widths": _values(m.width for m in models),
        "depths": _values(m.depth for m in models),
        "head size, vocabulary": _values(f"{m.head_size}, {m.vocabulary}" for m in models),
        "sequence × batch": _values(f"{r.sequence} × {r.batch}" for r in runs),
        "steps": _values(r.schedule.steps for r in runs),
        "tokens": _values(r.tokens for r in runs),
        "base η": _values(r.hyperparameters.lr for r in runs),
        "base σ": _values(r.hyperparameters.std for r in runs),
        "base λ": _values(r.hyperparameters.weight_decay for r in runs),
        "base ε": _values(r.hyperparameters.eps for r in runs),
        "seeds": _values(r.seed for r in runs),
        "data": _values(_data(r) for r in runs),
    } | versions()


def axis_settings(experiment: Experiment) -> dict[str, str]:
    return {f"axis {name}": ", ".join(map(_text, values)) for name, values in experiment.axes.items()} | versions()


def versions() -> dict[str, str]:
    torch = metadata.version("torch")  # without importing it, which takes seconds
    return {"versions": f"completep {__version__}, torch {torch}, Python {platform.python_version()}"}


def _values(values: Iterable[Value]) -> str:
    ordered = sorted(set(values), key=lambda v: (isinstance(v, str), v))
    texts = [_text(v) for v in ordered]
    return ", ".join(texts) if len(texts) <= 8 else f"{texts[0]} … {texts[-1]} ({len(texts)} values)"


def _text(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _data(run: Run) -> str:
    name = Path(run.data.source).name or "not given"  # readers of the report do not need the path
    if name in BUILTIN:
        name = f"the sources of {'Python' if name == 'python' else name}, as {run.data.tokenizer}"
    return f"{name}, sha256 {(run.data.sha256 or '?')[:16]}"


PLAN_FACTS = ("run", "tokens", "flops", "status")  # of a line of a plan; the rest is the run's place on the axes


def _varied(points: Sequence[Mapping[str, Value]]) -> str:
    """Which values the points have on each axis: "depth 32; lr 5 values; seed 0, 1"."""
    words = []
    for axis in points[0]:
        values = list(dict.fromkeys(point[axis] for point in points))
        shown = ", ".join(map(_text, values)) if len(values) <= 3 else f"{len(values)} values"
        words.append(f"{axis} {shown}")
    return "; ".join(words)


@dataclass(frozen=True, eq=False, repr=False)
class StudyPlan(Result):
    """What a study would run: every run with its FLOPs, what is done, and how long the rest takes."""

    experiment: Experiment
    points: int
    runs: tuple[Mapping[str, Value], ...]  # one per distinct run; none for measurements
    flops_left: float
    flops_per_second: float
    measured_pace: bool  # from runs that are done, instead of a typical value
    workers: int

    slug = "plan"

    @property
    def seconds_left(self) -> float:
        return self.flops_left / self.flops_per_second / self.workers

    @property
    def flops(self) -> float:
        return sum(float(line["flops"]) for line in self.runs)

    def document(self) -> Document:
        axes = {name: ", ".join(map(_text, values)) for name, values in self.experiment.axes.items()}
        facts = Facts(f"{self.experiment.name}: axes", axes)
        title = f"What {self.experiment.name} would run"
        if not self.runs:
            return Document(title, (facts, Text(f"{self.points} {self.experiment.study.describe()}")))
        missing = sum(line["status"] == "missing" for line in self.runs)
        pace = "measured on the runs that are done" if self.measured_pace else "a guess until the first runs are done"
        summary = (
            f"{self.points} points, {len(self.runs)} different runs, {missing} of them to do: "
            f"{self.flops_left:.3g} FLOPs of {self.flops:.3g}, about {duration(self.seconds_left)} "
            f"with {self.workers} at a time ({self.flops_per_second:.2g} FLOP/s each, {pace})"
        )
        every = [
            {**line, "tokens": human(float(line["tokens"])), "flops": f"{line['flops']:.3g}"} for line in self.runs
        ]
        return Document(
            title,
            (
                Text(summary),
                facts,
                Table.of("Runs by size, each done once", self._sizes()),
                replace(Table.of("Every run", every), collapsed=True),
            ),
        )

    def _sizes(self) -> list[dict[str, Cell]]:
        """Runs that vary the same axes and cost the same, as one row."""
        groups: dict[tuple[object, ...], list[Mapping[str, Value]]] = {}
        for line in self.runs:
            axes = [name for name in line if name not in PLAN_FACTS]
            groups.setdefault((*axes, line["tokens"], line["flops"]), []).append(line)
        return [
            {
                "which": _varied([{n: v for n, v in line.items() if n not in PLAN_FACTS} for line in lines]),
                "runs": len(lines),
                "to do": sum(line["status"] == "missing" for line in lines),
                "tokens each": human(float(lines[0]["tokens"])),
                "FLOPs each": f"{lines[0]['flops']:.3g}",
            }
            for lines in groups.values()
        ]

    def _fields(self) -> Json:
        plan: Json = {
            "study": self.experiment.name,
            "axes": {name: list(values) for name, values in self.experiment.axes.items()},
            "points": self.points,
            "runs": list(self.runs),
        }
        if not self.runs:
            return plan
        return plan | {
            "flops": self.flops,
            "flops_left": self.flops_left,
            "flops_per_second": self.flops_per_second,
            "measured_pace": self.measured_pace,
            "workers": self.workers,
            "seconds_left": self.seconds_left,
        }


@dataclass(frozen=True, eq=False, repr=False)
class StudyStatus(Result):
    """The progress of every study."""

    title: str
    counts: Mapping[str, Counts]

    slug = "status"

    def document(self) -> Document:
        return Document(self.title, (Table.of(self.title, self._rows()),))

    def _rows(self) -> list[dict[str, Cell]]:
        return [{"study": name, **vars(counts)} for name, counts in self.counts.items()]

    def _fields(self) -> Json:
        return {"studies": self._rows()}


@dataclass(frozen=True, eq=False, repr=False)
class StudyList(Result):
    """All studies, with what they ask."""

    studies: tuple[Study, ...]

    slug = "studies"

    def document(self) -> Document:
        rows: list[dict[str, Cell]] = [{"name": s.name, "question": s.question, "claim": s.claim} for s in self.studies]
        return Document("Studies", (Table.of("completep study NAME", rows),))

    def _fields(self) -> Json:
        return {
            "studies": [
                {
                    "name": s.name,
                    "question": s.question,
                    "claim": s.claim,
                    "axes": {k: dict(v) for k, v in s.axes.items()},
                }
                for s in self.studies
            ]
        }
