"""The results of `tune`, `tune_plan` and `tune_status`."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import polars as pl

from completep.config import Run, Shape
from completep.measure.curves import Transfer
from completep.measure.figures import transfer_figure
from completep.measure.transfer import DEEPER, transfer_table
from completep.measure.words import Word, worst
from completep.report.document import Cell, Code, Document, Facts, Json, Part, Table, Text, Verdict, number
from completep.report.result import Result
from completep.studies.result import versions
from completep.sweep.conduct import Conducted
from completep.sweep.store import Counts
from completep.sweep.task import Value
from completep.tuned import TunedValue, TunedValues, write_tuned
from completep.tuning.choices import ChoiceTransfer, choice_table
from completep.tuning.search import Expected
from completep.tuning.settings import Tuning
from completep.tuning.space import Dimension
from completep.units import duration, power

MOST_LISTED = 2000  # runs on a page


@dataclass(frozen=True)
class Best:
    """The best value of one hyperparameter at the base."""

    value: Value
    low: float | None = None  # 90 % interval; None if there is none, or if this side is open
    high: float | None = None

    def __str__(self) -> str:
        shown = power(self.value) if isinstance(self.value, float) else str(self.value)
        if self.low is None and self.high is None:
            return shown
        ends = (number(end) if end is not None else "?" for end in (self.low, self.high))
        return f"{shown} ({' … '.join(ends)})"


@dataclass(frozen=True, eq=False, repr=False)
class Tuned(Result):
    """The best values at the base, and whether they hold at the larger proxies."""

    tuning: Tuning
    title: str  # what was tuned: the command, the function
    name: str  # the same in a few words
    point: Mapping[str, Value]  # the best of the values that were tried
    best: Mapping[str, Best]
    transfers: tuple[Transfer | ChoiceTransfer, ...]  # one per dimension
    runs: pl.DataFrame  # a row per run
    scripts: Mapping[str, str]  # name → sha256
    conducted: Conducted
    fitness: str  # a sentence: is the base fit to tune at?
    command: tuple[str, ...]  # continues or repeats this tuning
    run: Run | None = None  # the reference decoder's tuned run
    notes: tuple[str, ...] = ()

    slug = "tune"

    @property
    def verdict(self) -> Word:
        return worst(t.word for t in self.transfers)

    @property
    def why(self) -> str:
        """What decided the verdict."""
        decisive = next((t for t in self.transfers if t.word == self.verdict and t.why), None)
        several = f"{decisive.hyperparameter}: " if decisive is not None and len(self.transfers) > 1 else ""
        return f"{several}{decisive.why}" if decisive is not None else ""

    @property
    def failed(self) -> int:
        """Runs that failed just now."""
        return len(self.conducted.failed)

    @property
    def values(self) -> dict[str, Value]:
        """The best values by name."""
        return {name: best.value for name, best in self.best.items()}

    def tuned(self) -> TunedValues:
        """What tuned.json holds."""
        return TunedValues(
            {name: TunedValue(b.value, b.low, b.high) for name, b in self.best.items()},
            self.tuning.base_shape, self.tuning.rules, self.verdict, self.why, list(self.tuning.shapes[1:]),
            self.title, dict(self.scripts), dict(self.tuning.constants),
            self.run.data.sha256 if self.run else None, self.run,
        )  # fmt: skip

    def write(self, out: Path | str) -> list[Path]:
        """The report in a new folder under `out`, tuned.json in it, and the newest tuned.json in `out` itself."""
        files = super().write(out)
        copy = write_tuned(files[0].parent / "tuned.json", self.tuned())
        return [*files, copy, write_tuned(Path(out) / "tuned.json", self.tuned())]

    def sentence(self) -> str:
        base = self.tuning.base_shape
        best_values = ", ".join(f"{name} = {best}" for name, best in self.best.items())
        sentence = f"best at {base.width} × {base.depth}: {best_values}"
        bowl = next((t for t in self.transfers if isinstance(t, Transfer)), None)
        return sentence + (f"; {self.why}" if self.why else "") + DEEPER[bowl.deeper if bowl is not None else None]

    def document(self) -> Document:
        blamed = [t.hyperparameter for t in self.transfers if t.word == self.verdict]
        parts: list[Part] = [
            Verdict(self.verdict, self.sentence()),
            Text(advice(self.verdict, " and ".join(blamed))),
            *([Text(self.fitness)] if self.fitness else []),
            *map(Text, self.notes),
            *(part for d, t in zip(self.tuning.dimensions, self.transfers, strict=True) for part in self._parts(d, t)),
            Facts("Settings", self.settings(), page_only=True),
            Code(shlex.join(self.command), "Run it again", page_only=True),
        ]
        if self.runs.height <= MOST_LISTED:
            parts.append(Table.of_frame("Runs", self.runs, collapsed=True))
        return Document(f"Tuned: {self.name}", tuple(parts), "completep tune")

    def _parts(self, d: Dimension, t: Transfer | ChoiceTransfer) -> list[Part]:
        """What is shown of one dimension."""
        if isinstance(t, ChoiceTransfer):
            return [choice_table(t)]
        name = "tune" if d == self.tuning.dimensions[0] else f"tune-{d.name}"
        frame = judged_frame(line_of(self.runs, d, self.point), d)
        return [
            transfer_table([on_values(t, d)]),
            transfer_figure(frame, [t], name, f"Does the best {d.name} stay best?"),
        ]

    def settings(self) -> dict[str, str]:
        t = self.tuning
        shown = {
            "tuned": self.title,
            "base (width × depth)": f"{t.base_shape.width} × {t.base_shape.depth}",
            "proxies": ", ".join(f"{s.width} × {s.depth}" for s in t.shapes[1:]),
            "space": "; ".join(d.describe() for d in t.dimensions),
            "constants": ", ".join(f"{k} = {v}" for k, v in t.constants.items()),
            "seeds": str(t.seeds),
            "rules": t.rules,
            "loss": t.loss,
            "scripts (sha256)": ", ".join(f"{name} {digest[:16]}" for name, digest in self.scripts.items()),
            "data (sha256)": (self.run.data.sha256 or "?")[:16] if self.run else "",
            "runs": f"{self.conducted.needed} of at most {self.conducted.planned}",
        }
        return {name: text for name, text in shown.items() if text} | versions()

    def frames(self) -> Mapping[str, pl.DataFrame]:
        return {"runs": self.runs}

    def _fields(self) -> Json:
        return {
            "verdict": self.verdict,
            "why": self.why,
            "values": {name: asdict(best) for name, best in self.best.items()},
            "base": asdict(self.tuning.base_shape),
            "rules": self.tuning.rules,
            "transfers": {t.hyperparameter: {**asdict(t), "word": t.word, "why": t.why} for t in self.transfers},
            "runs": self.conducted.needed,
            "runs_of_the_grid": self.conducted.planned,
            "failed": self.failed,
            "scripts": dict(self.scripts),
            "fitness": self.fitness,
            "notes": list(self.notes),
        }


def line_of(runs: pl.DataFrame, d: Dimension, point: Mapping[str, Value]) -> pl.DataFrame:
    """The runs along one dimension: those with the others at the point."""
    others = [pl.col(name) == value for name, value in point.items() if name != d.name]
    return runs.filter(*others) if others else runs


def judged_frame(runs: pl.DataFrame, dimension: Dimension) -> pl.DataFrame:
    """The runs with places instead of a dimension's values: positive numbers, in octaves or steps."""
    places = [dimension.place(v) for v in runs[dimension.name]]
    return runs.with_columns(pl.Series(dimension.name, places, dtype=pl.Float64))


def advice(word: Word, name: str) -> str:
    if word == "PASS":
        return (
            "Use these values at any size. They are in `tuned.json`, in the folder of this tuning: give it to `plan`, "
            "or to `parametrize`, as parametrize(…, tuned='OUT/tuned.json')."
        )
    if word == "FAIL":
        return (
            f"The best {name} does not transfer. First check that your script applies the rules at every size "
            "(`completep check`, `completep audit`). If it does, tune at a base nearer to the proxies (deeper or "
            "wider), or search the init std too: it decides how far the base is from the limit of large depth. "
            "With a factory, this is measured."
        )
    return "The verdict is open. The text above says what to add; the same command then reuses every run that is done."


@dataclass(frozen=True, eq=False, repr=False)
class TunePlan(Result):
    """What a tuning would run."""

    tuning: Tuning
    title: str
    expected: Expected
    search: int  # runs of a search over several dimensions, before the others
    counts: Counts  # of the runs that it may make
    seconds: float | None  # of the rest, from the runs that are done; None if none is
    workers: int
    scripts: Mapping[str, str]
    notes: tuple[str, ...]
    words: tuple[str, ...]  # of one run, as an example
    foreseen: str = ""  # what the noise of the runs so far requires
    engine: str = ""  # what the engine would submit

    slug = "plan"

    @property
    def runs(self) -> int:
        return self.expected.runs + self.search

    def sentence(self) -> str:
        e, base, proxies = self.expected, self.tuning.base_shape, self.tuning.shapes[1:]
        larger = " and ".join(f"{s.width} × {s.depth}" for s in proxies)
        at_base = f"at {base.width} × {base.depth}"
        walk = f"about {e.base:.0f} {at_base} to find the optimum"
        if self.search:
            walk = f"about {self.search} {at_base} to search {len(self.tuning.dimensions)} dimensions"
        seeds = f"about {e.seeds:.0f} more near it, " if self.search else f"about {e.seeds:.0f} more seeds near it, "
        seeds = seeds if e.seeds else ""
        time = f", about {duration(self.seconds)} here" if self.seconds is not None else ""
        return (
            f"This needs about {self.runs} runs{time} (at most {e.most + self.search}): {walk}, {seeds}"
            f"and about {e.proxies:.0f} at {larger}."
        )

    def needed_for_pass(self) -> str:
        shapes = " and at ".join(f"{s.width} × {s.depth}" for s in self.tuning.shapes)
        if self.tuning.seeds < 2:
            return f"One seed never gives a PASS: use 3 seeds, which run the best value and its neighbours at {shapes}."
        more = "" if self.tuning.seeds > 2 else " Two seeds give wide intervals: 3 decide more often."
        most = max(self.tuning.seeds, self.tuning.most_seeds)
        noisy = " If the noise requires more, one more value on either side is run"
        noisy += f", with up to {most} seeds." if most > self.tuning.seeds else "."
        each = " in every dimension" if len(self.tuning.dimensions) > 1 else ""
        begin = f"For a PASS: {self.tuning.seeds} seeds of the best value and its neighbours{each} at {shapes}."
        return f"{begin}{noisy}{more}" + (f" {self.foreseen}" if self.foreseen else "")

    def document(self) -> Document:
        done = self.counts.done + self.counts.diverged
        already = f" {done} runs are done already." if done else ""
        wait = "" if self.seconds is not None else " The time is known after the first run."
        parts: list[Part] = [
            Text(self.sentence() + already + wait),
            Text(self.needed_for_pass()),
            *map(Text, self.notes),
        ]
        if self.words:
            parts.append(Code(shlex.join(self.words), "One of the runs"))
        if self.engine:
            parts.append(Code(self.engine, "What the engine submits"))
        return Document(f"What tuning {self.title} would run", tuple(parts))

    def _fields(self) -> Json:
        return {
            "runs": self.runs, "at_most": self.expected.most + self.search, "expected": asdict(self.expected),
            "search": self.search, "counts": asdict(self.counts), "seconds": self.seconds, "workers": self.workers,
            "scripts": dict(self.scripts), "notes": list(self.notes), "words": list(self.words), "engine": self.engine,
            "foreseen": self.foreseen,
        }  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class TuneStatus(Result):
    """The tunings under a folder: runs done, diverged, running and missing."""

    root: Path
    tunings: tuple[tuple[str, Counts], ...]

    slug = "status"

    def document(self) -> Document:
        if not self.tunings:
            return Document("Tunings", (Text(f"There is no tuning in {self.root} yet."),))
        return Document("Tunings", (Table.of(f"Tunings in {self.root}", self._rows()),))

    def _rows(self) -> list[dict[str, Cell]]:
        """`runs` are those that an unfinished tuning may ask for, and those that a finished one asked for."""
        return [{"tuning": title, **asdict(counts)} for title, counts in self.tunings]

    def _fields(self) -> Json:
        return {"tunings": self._rows()}


def on_values(t: Transfer, d: Dimension) -> Transfer:
    """The same transfer, with values instead of places."""
    return replace(t, best=d.at(t.best), shapes=tuple(replace(s, optimum=d.at(s.optimum)) for s in t.shapes))


def best_of(dimension: Dimension, transfer: Transfer | ChoiceTransfer) -> Best:
    """The optimum of a dimension at the base, as a value."""
    if isinstance(transfer, ChoiceTransfer):
        return Best(transfer.best)
    interval = transfer.best_interval
    places = (0.0, math.inf) if interval is None else (interval.low, interval.high)
    low, high = (dimension.at(place) if 0 < place < math.inf else None for place in places)
    return Best(dimension.at(transfer.best), low, high)


def shape_text(shape: Shape) -> str:
    return f"{shape.width}x{shape.depth}"
