"""`tune`, its plan and its status: from settings to a result. The command line calls these functions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args

import polars as pl

from completep.config import Run, Shape
from completep.errors import UserError, choice
from completep.load import load_factory
from completep.measure.curves import judge_transfer
from completep.rules.table import rules_named
from completep.sweep.backends import WORKERS, EngineName, make_backend
from completep.sweep.conduct import Conducted, Watcher, conduct, nobody
from completep.sweep.devices import device_count
from completep.sweep.engine import Backend
from completep.sweep.slurm import Slurm
from completep.sweep.store import Store, distinct
from completep.sweep.task import Point, Trial, Value
from completep.sweep.training import with_data
from completep.tuning.explore import CONFIRMED, Explore, choose_method, default_budget
from completep.tuning.record import Known, all_counts, changed, read_record, record_path, write_record
from completep.tuning.result import Best, Tuned, TunePlan, TuneStatus, best_of, judged_frame, shape_text
from completep.tuning.runs import Command
from completep.tuning.search import Staged, expected_runs
from completep.tuning.settings import Tuning, described, make_tuning, read_tuning
from completep.tuning.space import Dimension
from completep.tuning.subject import DecoderSubject, Subject

Place = Path | str


@dataclass(frozen=True)
class Prepared:
    """A tuning that has been checked, with its store."""

    tuning: Tuning
    subject: Subject
    dimensions: tuple[Dimension, ...]
    store: Store
    record: Path
    notes: tuple[str, ...]

    @property
    def verified(self) -> Dimension:
        """The dimension whose transfer is verified: the first one."""
        return self.dimensions[0]

    def trials(self, fixed: Mapping[str, Value]) -> list[Trial]:
        """Every run that the three stages may ask for."""
        d, shapes, seeds = self.verified, self.tuning.shapes, range(self.tuning.seeds)
        return [self.trial(shape, {**fixed, d.name: v}, seed) for shape in shapes for v in d.values for seed in seeds]

    def trial(self, shape: Shape, values: Mapping[str, Value], seed: int) -> Trial:
        """A run and its point: the place of the verified dimension, the values of the others."""
        own, first = {d.name: values[d.name] for d in self.dimensions}, self.verified
        places = {**own, first.name: first.place(own[first.name])}
        point = Point(width=shape.width, depth=shape.depth, **places, seed=seed)
        return Trial(point, self.subject.task(shape, own, seed))

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


def prepare(tuning: Tuning, out: Path, *, accept_changes: bool = False, writes: bool = True) -> Prepared:
    """Refuse everything that can be refused before a run."""
    dimensions, shapes = tuning.dimensions, tuning.shapes
    if not dimensions[0].ordered:
        raise UserError(
            f"{dimensions[0].name} has no order, so that its optimum cannot be bracketed",
            fix="put a number first, such as lr; words can be searched beside it",
        )
    if len(dimensions) > 1 and tuning.search == "bracket":
        raise UserError(
            f"{len(dimensions)} dimensions cannot be bracketed",
            fix="use --search auto, tpe, gp or random, or one dimension",
        )
    if len(dimensions) == 1 and tuning.search not in ("auto", "bracket"):
        raise UserError(f"search={tuning.search!r} is for several dimensions", fix="leave it out: one is bracketed")
    if tuning.factory:
        load_factory(tuning.factory)
    subject = tuning.subject()
    subject.check(dimensions, shapes, tuning.seeds)
    store = Store(out / "store")
    store.open() if writes else store.look()
    record, notes = record_path(tuning, out), []
    old = read_record(record)
    if old is not None and (names := changed(old.hashes, subject.scripts)):
        what = f"{', '.join(names)} changed since {len(old.runs)} runs were made"
        if accept_changes:
            subject = tuning.subject(accepted=old.hashes)
            notes.append(f"{what}. Those runs still count, as you asked.")
        else:
            notes.append(f"{what}: they are made again. --accept-changes lets the old ones count.")
    if tuning.command and not subject.scripts:
        notes.append("No word of the command is a file here: a change of your script is not noticed.")
    return Prepared(tuning, subject, dimensions, store, record, tuple(notes))


def tune(
    train: "str | Path | Callable[..., object]" = "",
    *,
    space: "Mapping[str, object] | Sequence[str] | None" = None,
    loss: str | None = None,
    base: "Shape | tuple[int, int] | None" = None,
    proxies: "Sequence[Shape | tuple[int, int]] | None" = None,
    seeds: int | None = None,
    rules: str | None = None,
    model: str | None = None,
    constants: Mapping[str, Value] | None = None,
    settings: Mapping[str, object] | None = None,
    engine: EngineName = "local",
    workers: int | None = None,
    per_gpu: int = 1,
    address: str | None = None,
    slurm: Mapping[str, str] | None = None,
    accept_changes: bool = False,
    out: Place = "runs",
    watch: Watcher = nobody,
    on_plan: "Callable[[TunePlan], None]" = lambda plan: None,
) -> Tuned:
    """Find the best values at a small base, and verify at larger proxies that they stay the best.

    Every run is made once: the same call continues after an interruption and reuses what is done.

    Args:
        train: a command template such as "python train.py --lr {lr} --seed {seed} --out {folder}", a function
            train(trial) -> loss (or "file.py:function"), or a TOML file with all of it.
        space: what to search, such as {"lr": "2^-10..2^-5"}. The transfer of the first dimension is verified.
        loss: for a command: where the loss is, such as "{folder}/metrics.jsonl:val_loss".
        base: width and depth to tune at, by default 64 and 2.
        proxies: larger shapes at which the optimum is verified; by default four times the base's depth.
        seeds: number of seeds near the optimum, by default 3. One never gives a PASS.
        rules: the parameterization that your script applies, by default "completep"; {rules} passes it on.
        model: "gpt" tunes the reference decoder.
        constants: further names for the template, the function or the decoder, such as {"steps": 1000}.
        settings: any other key of the TOML file, such as {"take": "min"}.
        engine: this machine, a Ray cluster or a SLURM cluster, whose nodes share the folder.
        workers: runs at a time; by default one per core, or one per GPU; with SLURM 4.
        per_gpu: runs that share a GPU, for small ones.
        address: of a Ray cluster; by default one is started here.
        slurm: options of the array job, such as {"partition": "gpu", "time": "2:00:00", "setup": "module load cuda"}.
        accept_changes: runs that were made before a script changed still count.
        out: runs are kept in the folder `store` here.
        watch: sees the runs as they start and end.
        on_plan: sees what would run, before anything runs.
    """
    given = {
        "space": None if space is None else as_space(space), "loss": loss, "seeds": seeds, "rules": rules,
        "base": None if base is None else as_pair(base), "set": None if constants is None else dict(constants),
        "proxies": None if proxies is None else [as_pair(p) for p in proxies],
    }  # fmt: skip
    tuning = tuning_of(train, {**given, **(settings or {})}, model or "")
    choice("engine", engine, get_args(EngineName))
    prepared = prepare(tuning, Path(out), accept_changes=accept_changes)
    if len(prepared.dimensions) > 1:
        prepared.explore().proposer()  # refuses a missing package before anything runs
    on_plan(plan_of(prepared, workers))
    backend = make_backend(engine, workers, address, per_gpu, slurm)
    return run_prepared(prepared, backend_words(train, tuning, out), watch, backend)


def run_prepared(prepared: Prepared, command: tuple[str, ...], watch: Watcher, backend: Backend) -> Tuned:
    """The search over several dimensions, if there are; then the three stages along the first one."""
    title, scripts, store = prepared.subject.describe(), prepared.subject.scripts, prepared.store

    def remember(*groups: Sequence[Trial]) -> None:
        write_record(prepared.record, title, scripts, (t.task.id for group in groups for t in group))

    fixed: dict[str, Value] = {}
    searched = Conducted((), (), 0, 0)
    if len(prepared.dimensions) > 1:
        explore = prepared.explore()
        remember()
        searched = conduct([], store, backend, search=explore, watch=watch, fail_fast=True)
        fixed = {name: value for name, value in explore.best.items() if name != prepared.verified.name}
    trials = prepared.trials(fixed)
    remember(searched.trials, trials)
    base, d = prepared.tuning.base_shape, prepared.verified

    def is_open(done: Sequence[Trial]) -> bool:
        runs = judged_frame(frame_of(prepared, done), d)
        return prepared.tuning.seeds > 1 and judge_transfer(runs, d.name, base)[0].word == "INCONCLUSIVE"

    strategy = Staged(d, base, prepared.tuning.stop_early, is_open)
    conducted = conduct(trials, store, backend, search=strategy, watch=watch, fail_fast=True)
    remember(searched.trials, conducted.trials)
    return conclude(prepared, joined(searched, conducted), fixed, command)


def joined(one: Conducted, two: Conducted) -> Conducted:
    """Both searches as one."""
    trials = {(t.task.id, *t.point.items()): t for t in (*one.trials, *two.trials)}
    planned = len(distinct(one.trials)) + two.planned
    return Conducted(tuple(trials.values()), (*one.failed, *two.failed), planned, one.present + two.present)


def conclude(prepared: Prepared, conducted: Conducted, fixed: Mapping[str, Value], command: tuple[str, ...]) -> Tuned:
    tuning, d = prepared.tuning, prepared.verified
    runs = frame_of(prepared, conducted.trials)
    judged = judged_frame(verified_runs(runs, fixed), d)
    transfer = judge_transfer(judged, d.name, tuning.base_shape)[0]
    best = {d.name: best_of(d, transfer), **{name: Best(value) for name, value in fixed.items()}}
    values = {name: b.value for name, b in best.items()}
    decoder = prepared.subject if isinstance(prepared.subject, DecoderSubject) else None
    run = None if decoder is None else with_data(decoder.at(tuning.base_shape, values, 0))
    notes = list(prepared.notes)
    if conducted.failed:
        notes.append(f"{len(conducted.failed)} runs failed and are left out; the same command tries them again.")
    subject = prepared.subject
    return Tuned(
        tuning, subject.describe(), subject.name(), d, best, transfer, runs, dict(subject.scripts), conducted,
        fitness(tuning, values, run), command, run, tuple(notes),
    )  # fmt: skip


def frame_of(prepared: Prepared, trials: Sequence[Trial]) -> pl.DataFrame:
    """A row per run: its shape, values and seed, and its result."""
    d, rules = prepared.verified, prepared.tuning.rules
    by_place = {d.place(v): v for v in d.values}
    results = prepared.store.results(distinct(trials))
    rows = []
    for t in {(t.task.id, *t.point.items()): t for t in trials}.values():
        result = results.get(t.task.id, {})
        status = str(result.get("status", "missing"))
        loss = math.nan if status == "diverged" else None if status == "hopeless" else t.task.loss(result)
        labels = {"rules": rules, **t.point, d.name: by_place[t.point.number(d.name)]}
        rows.append({**labels, "status": status, "loss": loss, "seconds": result.get("seconds"), "run": t.task.id})
    schema = {"loss": pl.Float64, "seconds": pl.Float64}
    return pl.DataFrame(rows, infer_schema_length=None, schema_overrides=schema)


def verified_runs(runs: pl.DataFrame, fixed: Mapping[str, Value]) -> pl.DataFrame:
    """The runs of the verified curves: those at the best values of the other dimensions."""
    for name, value in fixed.items():
        runs = runs.filter(pl.col(name) == value)
    return runs


def fitness(tuning: Tuning, values: Mapping[str, Value], run: Run | None) -> str:
    """ρ and L* of the base, where there is a model to measure them on."""
    if run is None and not tuning.factory:
        return ""
    from completep.measure.check import GPT  # these import torch, which takes seconds
    from completep.measure.subject import Setting, Source
    from completep.measure.survey import find_limit

    if run is not None:
        models = Source(GPT, tuning.base_shape, {"vocabulary": run.model.vocabulary, "head_size": run.model.head_size})
        setting = Setting(std=run.hyperparameters.std)
    else:
        std = values.get("std", tuning.constants.get("std"))
        models = Source(tuning.factory, tuning.base_shape)
        setting = Setting() if std is None else Setting(std=float(std))
    limit = find_limit(models, rules_named(tuning.rules), setting, near_limit=False)
    return f"Is the base fit to tune at? {limit}"


def tune_plan(
    train: "str | Path | Callable[..., object]" = "",
    *,
    settings: Mapping[str, object] | None = None,
    model: str = "",
    workers: int | None = None,
    accept_changes: bool = False,
    out: Place = "runs",
    engine: EngineName = "local",
    slurm: Mapping[str, str] | None = None,
) -> TunePlan:
    """What `tune` would run, without running or writing anything."""
    tuning = tuning_of(train, settings or {}, model)
    prepared = prepare(tuning, Path(out), accept_changes=accept_changes, writes=False)
    plan = plan_of(prepared, workers)
    if engine != "slurm":
        return plan
    backend = Slurm(workers or WORKERS, dict(slurm or {}))
    return replace(plan, engine=backend.script(prepared.store, tuning.ranks))


def plan_of(prepared: Prepared, workers: int | None) -> TunePlan:
    tuning, d = prepared.tuning, prepared.verified
    trials = prepared.trials({other.name: other.values[0] for other in prepared.dimensions[1:]})
    expected = expected_runs(len(d.values), tuning.seeds, len(tuning.shapes) - 1)
    at_once = max(1, device_count() // tuning.ranks) if workers is None else max(1, workers)
    task = trials[0].task
    words = tuple(task.words("FOLDER")) if isinstance(task, Command) else ()
    old = read_record(prepared.record)
    known = [Known(name) for name in old.runs] if old is not None and prepared.budget else distinct(trials)
    left = None if prepared.budget else seconds_left(prepared, trials, expected.runs, at_once)
    title, scripts = prepared.subject.name(), dict(prepared.subject.scripts)
    counts, search = prepared.store.counts(known), prepared.search_runs
    return TunePlan(tuning, title, expected, search, counts, left, at_once, scripts, prepared.notes, words)


def seconds_left(prepared: Prepared, trials: Sequence[Trial], runs: int, workers: int) -> float | None:
    """From the pace of the runs that are done; None if there is none."""
    results = prepared.store.results(distinct(trials))
    timed = [(t, float(r.get("seconds") or 0)) for t in trials if (r := results.get(t.task.id))]
    cost, seconds = sum(t.task.cost for t, _ in timed), sum(s for _, s in timed)
    if not cost or not seconds:
        return None
    everything = sum(t.task.cost for t in trials) * runs / len(trials)
    return max(0.0, everything - cost) * seconds / cost / workers


def tune_status(*, out: Place = "runs") -> TuneStatus:
    """How many runs of every tuning under `out` are done, diverged, running and missing."""
    root = Path(out)
    store = Store(root / "store")
    store.look()
    return TuneStatus(root, tuple(all_counts(root, store)))


def tuning_of(train: "str | Path | Callable[..., object]", given: Mapping[str, object], model: str) -> Tuning:
    """The settings from a TOML file or from arguments. What is None was not given."""
    known = {f.name for f in fields(Tuning)}
    changes = {name: value for name, value in given.items() if value is not None}
    for name in changes:
        if name not in known:
            raise UserError(f"there is no setting {name!r}", fix=f"the settings are {', '.join(sorted(known))}")
    if not callable(train) and str(train).endswith(".toml"):
        return read_tuning(Path(train), changes)
    return make_tuning({**described(train, model), **changes})


def as_space(space: "Mapping[str, object] | Sequence[str]") -> dict[str, object]:
    if isinstance(space, Mapping):
        return dict(space)
    split = (word.partition("=") for word in space)
    found: dict[str, object] = {}
    for name, equals, text in split:
        if not equals or name.strip() in found:
            raise UserError(f"{name!r} is not a range, or is given twice", fix="write NAME=2^-10..2^-5, each name once")
        found[name.strip()] = text
    return found


def as_pair(shape: "Shape | tuple[int, int]") -> list[int]:
    return [shape.width, shape.depth] if isinstance(shape, Shape) else list(shape)


def backend_words(train: "str | Path | Callable[..., object]", tuning: Tuning, out: Place) -> tuple[str, ...]:
    """The command that continues or repeats this tuning."""
    words = ["completep", "tune"]
    if not callable(train) and str(train).endswith(".toml"):
        words.append(str(train))
    else:
        words += [tuning.command or tuning.function] if not tuning.model else ["--model", tuning.model]
        words += ["--loss", tuning.loss] if tuning.loss else []
        words += ["--space", *(f"{name}={text}" for name, text in tuning.space.items())]
        words += ["--base-shape", *map(str, tuning.base), "--seeds", str(tuning.seeds), "--rules", tuning.rules]
        words += ["--proxies", *(shape_text(s) for s in tuning.shapes[1:])]
        words += ["--set", *(f"{k}={v}" for k, v in tuning.set.items())] if tuning.set else []
    return (*words, *([] if Path(out) == Path("runs") else ["--out", str(out)]))
