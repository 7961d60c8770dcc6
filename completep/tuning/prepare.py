"""A tuning that has been checked: what it runs, which scripts count, and the frame of its results."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from completep.config import Shape
from completep.errors import UserError
from completep.load import load_factory
from completep.measure.sweeps import usable
from completep.sweep.store import Store, distinct
from completep.sweep.task import Point, Task, Trial, Value
from completep.tuning.explore import CONFIRMED, Explore, choose_method, default_budget
from completep.tuning.precision import Advice, Design, advise
from completep.tuning.record import Known, changed, read_record, record_path
from completep.tuning.result import judged_frame
from completep.tuning.scripts import Hashes
from completep.tuning.settings import Tuning
from completep.tuning.space import Dimension
from completep.tuning.subject import Subject
from completep.tuning.tasks import Call, Command
from completep.tuning.template import Template


@dataclass(frozen=True)
class Prepared:
    """A tuning that has been checked, with its store."""

    tuning: Tuning
    subject: Subject
    dimensions: tuple[Dimension, ...]
    store: Store
    record: Path
    notes: tuple[str, ...]
    accepted: tuple[Hashes, ...] = ()  # scripts of earlier runs that still count

    def trials(self, point: Mapping[str, Value]) -> list[Trial]:
        """The runs that may be made along the first dimension, with the others at the point."""
        d, shapes, seeds = self.dimensions[0], self.tuning.shapes, range(self.tuning.seeds)
        return [self.trial(shape, {**point, d.name: v}, seed) for shape in shapes for v in d.values for seed in seeds]

    def trial(self, shape: Shape, values: Mapping[str, Value], seed: int) -> Trial:
        """The run of a shape, values and a seed. Its point holds the places of the values."""
        searched = {d.name: values[d.name] for d in self.dimensions}
        axes = {d.name: d.on_axis(searched[d.name]) for d in self.dimensions}
        point = Point(width=shape.width, depth=shape.depth, **axes, seed=seed)
        return Trial(point, self.task(shape, searched, seed))

    def task(self, shape: Shape, values: Mapping[str, Value], seed: int) -> Task:
        """A run of the scripts as they are now; or of an earlier version that is accepted and was run already."""
        task = self.subject.task(shape, values, seed)
        if not self.accepted or not isinstance(task, (Command, Call)):
            return task
        versions = (task, *(replace(task, scripts=scripts) for scripts in self.accepted))
        return next((t for t in versions if self.store.state(t) in ("done", "diverged")), task)

    @property
    def budget(self) -> int:
        """Runs of the search over several dimensions with one seed; 0 for one dimension."""
        if len(self.dimensions) == 1:
            return 0
        return self.tuning.trials or default_budget(self.dimensions)

    @property
    def search_runs(self) -> int:
        """All runs of the search over several dimensions."""
        return self.budget + CONFIRMED * (self.tuning.seeds - 1) if self.budget else 0

    def explore(self) -> Explore:
        return Explore(
            self.dimensions, choose_method(self.tuning.search, len(self.dimensions)), self.budget,
            lambda values, seed: self.trial(self.tuning.base_shape, values, seed), self.tuning.stop_early,
            self.tuning.seeds,
        )  # fmt: skip

    def advise(self, name: str, trials: Sequence[Trial], first: Design) -> Advice | None:
        """What the noise of these runs requires; None with one seed."""
        if self.tuning.seeds < 2:
            return None
        d = next(d for d in self.dimensions if d.name == name)
        frame = usable(judged_frame(frame_of(self, trials), d), name)
        return advise(frame, name, self.tuning.base_shape, list(map(d.place, d.values)), first, self.tuning.most_seeds)


def prepare(tuning: Tuning, out: Path, *, accept_changes: bool = False, writes: bool = True) -> Prepared:
    """Check the settings as far as that is possible before a run."""
    dimensions, shapes = tuning.dimensions, tuning.shapes
    if not dimensions[0].ordered:
        raise UserError(
            f"{dimensions[0].name} is searched first, but its values have no order",
            fix="put a numeric dimension first, such as lr=2^-10..2^-5; words can be searched beside it",
        )
    if len(dimensions) > 1 and tuning.search == "bracket":
        raise UserError(
            f"{len(dimensions)} dimensions cannot be bracketed",
            fix="search by auto, tpe, gp or random, or give one dimension",
        )
    if len(dimensions) == 1 and tuning.search not in ("auto", "bracket"):
        raise UserError(
            f"search={tuning.search!r} is for several dimensions",
            fix="leave search out: a single dimension is bracketed",
        )
    if tuning.factory:
        load_factory(tuning.factory)
    subject = tuning.subject()
    subject.check(dimensions, shapes, tuning.seeds)
    store = Store(existing_folder(out) / "store")
    store.open() if writes else store.look()
    record = record_path(tuning, out)
    accepted, notes = earlier_runs(record, subject.scripts, store, accept_changes=accept_changes)
    if tuning.command and not subject.scripts:
        notes.append("The command names no script in this folder, so a change of your script will not be noticed.")
    if tuning.command and tuning.rules != Tuning.rules and "rules" not in Template(tuning.command).names:
        notes.append(f"The command never uses {{rules}}: your script must apply {tuning.rules} by itself.")
    return Prepared(tuning, subject, dimensions, store, record, tuple(notes), accepted)


def existing_folder(out: Path) -> Path:
    """Refuse a file in the place of the folder. The folder need not exist yet."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file, not a folder", fix="choose another folder for out")
    return out


def earlier_runs(
    record: Path, scripts: Hashes, store: Store, *, accept_changes: bool
) -> tuple[tuple[Hashes, ...], list[str]]:
    """The earlier versions of the scripts whose runs still count, and notes about them for the user."""
    old = read_record(record)
    versions = old.before(scripts) if old is not None else ()
    runs = {name for v in versions for name in v.runs}
    if not runs or not (made := len(store.results(map(Known, runs)))):
        return (), []
    names = sorted({name for v in versions for name in changed(v.scripts, scripts)})
    what = f"{', '.join(names)} changed since {made} runs were done"
    if not accept_changes:
        return (), [f"{what}, so they will be run again. With accept_changes the old runs count."]
    return tuple(v.scripts for v in versions), [f"{what}. Those runs still count, as you asked."]


def frame_of(prepared: Prepared, trials: Sequence[Trial]) -> pl.DataFrame:
    """A row per run: its shape, values and seed, and its result."""
    results = prepared.store.results(distinct(trials))
    rows = []
    for t in {(t.task.id, *t.point.items()): t for t in trials}.values():
        result = results.get(t.task.id, {})
        status = str(result.get("status", "missing"))
        loss = math.nan if status == "diverged" else None if status == "hopeless" else t.task.loss(result)
        values = {d.name: d.at_point(t.point) for d in prepared.dimensions}
        labels = {"rules": prepared.tuning.rules, **t.point, **values}
        rows.append({**labels, "status": status, "loss": loss, "seconds": result.get("seconds"), "run": t.task.id})
    schema = {"loss": pl.Float64, "seconds": pl.Float64}
    return pl.DataFrame(rows, infer_schema_length=None, schema_overrides=schema)
