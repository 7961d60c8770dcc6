"""`tune`, its plan and its status: from settings to a result. The command line calls these functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TypedDict, Unpack, get_args

import polars as pl

from completep.config import Run, Shape
from completep.errors import UserError, choice
from completep.measure.curves import Places, Transfer, judge_transfer
from completep.rules.table import rules_named
from completep.sweep.backends import EngineName, make_backend
from completep.sweep.conduct import Conducted, Watcher, conduct, nobody
from completep.sweep.devices import device_count
from completep.sweep.engine import Backend
from completep.sweep.slurm import Slurm
from completep.sweep.store import Store, distinct
from completep.sweep.task import Trial, Value
from completep.sweep.training import with_data
from completep.tuning.again import command_of, engine_words
from completep.tuning.choices import ChoiceTransfer, judge_choice
from completep.tuning.precision import Design
from completep.tuning.prepare import Prepared, existing_folder, frame_of, prepare
from completep.tuning.reading import Take
from completep.tuning.record import Known, all_counts, read_record, write_record
from completep.tuning.result import Tuned, TunePlan, TuneStatus, best_of, judged_frame, line_of
from completep.tuning.search import Staged, expected_runs
from completep.tuning.settings import ModelName, SearchName, Tuning, described, make_tuning, names_toml, read_tuning
from completep.tuning.space import Dimension
from completep.tuning.subject import DecoderSubject
from completep.tuning.tasks import Command

Place = Path | str


class Given(TypedDict, total=False):
    """The settings of a tuning as arguments of a call. None, as if left out: the TOML file or the default decides."""

    space: "Mapping[str, object] | Sequence[str] | None"
    loss: str | None
    base: Shape | tuple[int, int] | None
    proxies: Sequence[Shape | tuple[int, int]] | None
    seeds: int | None
    most_seeds: int | None
    rules: str | None
    run: Place | None
    constants: Mapping[str, Value] | None
    take: Take | None
    search: SearchName | None
    trials: int | None
    stop_early: bool | None
    sources: Sequence[str] | None
    resumes: bool | None
    ranks: int | None
    factory: str | None


def changes_of(**given: Unpack[Given]) -> dict[str, object]:
    """The arguments of a call as keys of the TOML file."""
    space, base, proxies, run = given.get("space"), given.get("base"), given.get("proxies"), given.get("run")
    constants, sources = given.get("constants"), given.get("sources")
    return {
        "space": None if space is None else as_space(space), "loss": given.get("loss"),
        "base": None if base is None else as_pair(base),
        "proxies": None if proxies is None else [as_pair(p) for p in proxies],
        "seeds": given.get("seeds"), "most_seeds": given.get("most_seeds"), "rules": given.get("rules"),
        "run": None if run is None else str(run), "set": None if constants is None else dict(constants),
        "take": given.get("take"), "search": given.get("search"), "trials": given.get("trials"),
        "stop_early": given.get("stop_early"), "sources": None if sources is None else list(sources),
        "resumes": given.get("resumes"), "ranks": given.get("ranks"), "factory": given.get("factory"),
    }  # fmt: skip


def tune(
    train: "str | Path | Callable[..., object]" = "",
    *,
    space: "Mapping[str, object] | Sequence[str] | None" = None,
    loss: str | None = None,
    base: "Shape | tuple[int, int] | None" = None,
    proxies: "Sequence[Shape | tuple[int, int]] | None" = None,
    seeds: int | None = None,
    most_seeds: int | None = None,
    rules: str | None = None,
    model: ModelName | None = None,
    run: Place | None = None,
    constants: Mapping[str, Value] | None = None,
    take: Take | None = None,
    search: SearchName | None = None,
    trials: int | None = None,
    stop_early: bool | None = None,
    sources: Sequence[str] | None = None,
    resumes: bool | None = None,
    ranks: int | None = None,
    factory: str | None = None,
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
    tell: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Find the best values at a small base, and verify at larger proxies that they stay the best.

    Every run is done once: after an interruption, the same call continues and reuses what is done.

    Args:
        train: a command template such as "python train.py --lr {lr} --seed {seed} --out {folder}", a function
            train(trial) -> loss (or "file.py:function"), or a TOML file with all of it.
        space: what to search, such as {"lr": "2^-10..2^-5"}. The transfer of every dimension is verified.
        loss: for a command: where the loss is, such as "{folder}/metrics.jsonl:val_loss".
        base: width and depth to tune at, by default 64 and 2.
        proxies: larger shapes at which the optimum is verified; by default four times the base's depth.
        seeds: number of seeds near the optimum; by default 3. One seed never gives a PASS.
        most_seeds: largest number of seeds, if the noise requires more; by default 8.
        rules: the parameterization that your script applies, by default "completep"; {rules} passes it on.
        model: "gpt" tunes the reference decoder.
        run: with model: a run.json to vary, instead of a small built-in one.
        constants: values that all runs share, for the template, the function or the decoder: {"steps": 1000}.
        take: which of several losses counts, the last or the smallest ("min"); by default the last.
        search: how to search several dimensions; by default "tpe", or "random" for more than 12. One is bracketed.
        trials: number of runs in a search over several dimensions; by default ten per dimension.
        stop_early: stop hopeless runs of the first search, if the loss is reported during training; by default True.
        sources: further files that a run depends on. Your script and what it imports count already.
        resumes: your script continues from {folder} after an interruption. Otherwise each attempt gets an empty folder.
        ranks: number of GPUs per run; by default 1.
        factory: "file.py:model", which takes width and depth, to measure whether the base is fit to tune at.
        settings: any of these as keys of the TOML file. They override the arguments.
        engine: this machine, a Ray cluster or a SLURM cluster, whose nodes share the folder.
        workers: runs at a time; by default one per core or GPU, and 4 with SLURM.
        per_gpu: number of runs that share a GPU, if they are small.
        address: address of a Ray cluster; by default a cluster is started on this machine.
        slurm: options of the array job, such as {"partition": "gpu", "time": "2:00:00", "setup": "module load cuda"}.
        accept_changes: let runs count that were done before a script changed.
        out: folder for the runs, which are kept in `store` here.
        watch: is told of runs as they start and end.
        on_plan: is called with the plan, before anything runs.
        tell: is called with a line about the noise and the seeds that it requires, once that is known.
    """
    given = changes_of(
        space=space, loss=loss, base=base, proxies=proxies, seeds=seeds, most_seeds=most_seeds, rules=rules, run=run,
        constants=constants, take=take, search=search, trials=trials, stop_early=stop_early, sources=sources,
        resumes=resumes, ranks=ranks, factory=factory,
    )  # fmt: skip
    changes = {**given, **(settings or {})}
    tuning = tuning_of(train, changes, model or "")
    choice("engine", engine, get_args(EngineName))
    prepared = prepare(tuning, Path(out), accept_changes=accept_changes)
    if len(prepared.dimensions) > 1:
        prepared.explore().proposer()  # refuses a missing package before anything runs
    on_plan(plan_of(prepared, workers))
    backend = make_backend(engine, workers, address, per_gpu, slurm)
    words = command_of(train, tuning, changes)
    words += engine_words(engine, workers, per_gpu, address, slurm or {}, accept_changes=accept_changes, out=out)
    return run_prepared(prepared, tuple(words), watch, backend, tell)


def run_prepared(
    prepared: Prepared, command: tuple[str, ...], watch: Watcher, backend: Backend, tell: Callable[[str], None]
) -> Tuned:
    """Search the space if it has several dimensions, then run the stages along each dimension."""
    tuning, store = prepared.tuning, prepared.store

    def remember(*groups: Sequence[Trial]) -> None:
        names = (t.task.id for group in groups for t in group)
        write_record(prepared.record, prepared.subject.describe(), prepared.subject.scripts, names)

    point: dict[str, Value] = {}
    searched = Conducted((), (), 0, 0)
    if len(prepared.dimensions) > 1:
        explore = prepared.explore()
        remember()
        searched = conduct([], store, backend, search=explore, watch=watch, fail_fast=True)
        point = explore.best
    trials = prepared.trials(point)
    remember(searched.trials, trials)
    strategy = Staged(
        prepared.dimensions, tuning.shapes, tuning.seeds, prepared.trial, point, tuning.stop_early, prepared.advise,
        tell,
    )  # fmt: skip
    conducted = conduct(trials, store, backend, search=strategy, watch=watch, fail_fast=True)
    remember(searched.trials, conducted.trials)
    return conclude(prepared, joined(searched, conducted), strategy, command)


def joined(one: Conducted, two: Conducted) -> Conducted:
    """The trials and counts of both searches together."""
    trials = {(t.task.id, *t.point.items()): t for t in (*one.trials, *two.trials)}
    planned = len(distinct(one.trials)) + two.planned
    return Conducted(tuple(trials.values()), (*one.failed, *two.failed), planned, one.present + two.present)


def conclude(prepared: Prepared, conducted: Conducted, strategy: Staged, command: tuple[str, ...]) -> Tuned:
    tuning, subject, point = prepared.tuning, prepared.subject, strategy.point
    runs = frame_of(prepared, conducted.trials)
    transfers = judge(runs, prepared.dimensions, point, tuning)
    best = {d.name: best_of(d, t) for d, t in zip(prepared.dimensions, transfers, strict=True)}
    values = {name: b.value for name, b in best.items()}
    run = with_data(subject.at(tuning.base_shape, values, 0)) if isinstance(subject, DecoderSubject) else None
    notes = [*prepared.notes, *(f"{name}: {advice}." for name, advice in strategy.advice.items())]
    if conducted.failed:
        notes.append(f"{len(conducted.failed)} runs failed and are left out; the same command tries them again.")
    return Tuned(
        tuning, subject.describe(), subject.name(), point, best, transfers, runs, dict(subject.scripts), conducted,
        fitness(tuning, values, run), command, run, tuple(notes),
    )  # fmt: skip


def judge(
    runs: pl.DataFrame, dimensions: Sequence[Dimension], point: Mapping[str, Value], tuning: Tuning
) -> tuple[Transfer | ChoiceTransfer, ...]:
    """A verdict per dimension. All dimensions with a bowl are judged in one call, which corrects for their number."""
    base = tuning.base_shape
    bowls = [d for d in dimensions if d.bracketed]
    lines = [
        judged_frame(line_of(runs, d, point), d).rename({d.name: "place"}).with_columns(rules=pl.lit(d.name))
        for d in bowls
    ]
    columns = ("rules", "width", "depth", "place", "seed", "loss")
    frame = pl.concat([line.select(columns) for line in lines]) if lines else None
    axes = {d.name: axis_of(d) for d in bowls}
    judged = judge_transfer(frame, "place", base, axes) if frame is not None else []
    named = {t.rules: replace(t, rules=tuning.rules, hyperparameter=t.rules) for t in judged}
    return tuple(named[d.name] if d in bowls else judge_choice(line_of(runs, d, point), d, base) for d in dimensions)


def axis_of(d: Dimension) -> Places:
    return Places("octaves" if d.on_octaves else "steps", lambda place: d.at(2**place))


def fitness(tuning: Tuning, values: Mapping[str, Value], run: Run | None) -> str:
    """A sentence on ρ and L* of the base; empty if there is no model to measure them on."""
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
    model: ModelName | None = None,
    workers: int | None = None,
    accept_changes: bool = False,
    out: Place = "runs",
    engine: EngineName = "local",
    per_gpu: int = 1,
    address: str | None = None,
    slurm: Mapping[str, str] | None = None,
    **given: Unpack[Given],
) -> TunePlan:
    """What `tune` would run with these arguments, without running or writing anything."""
    tuning = tuning_of(train, {**changes_of(**given), **(settings or {})}, model or "")
    choice("engine", engine, get_args(EngineName))
    backend = make_backend(engine, workers, address, per_gpu, slurm)
    prepared = prepare(tuning, Path(out), accept_changes=accept_changes, writes=False)
    plan = plan_of(prepared, workers)
    script = backend.script(prepared.store, tuning.ranks) if isinstance(backend, Slurm) else ""
    return replace(plan, engine=script)


def plan_of(prepared: Prepared, workers: int | None) -> TunePlan:
    tuning = prepared.tuning
    trials = prepared.trials({d.name: d.values[0] for d in prepared.dimensions})
    expected = expected_runs(prepared.dimensions, tuning.seeds, tuning.most_seeds, len(tuning.shapes) - 1)
    at_once = max(1, device_count() // tuning.ranks) if workers is None else max(1, workers)
    task = trials[0].task
    words = tuple(task.words("FOLDER")) if isinstance(task, Command) else ()
    old = read_record(prepared.record)
    known = list(map(Known, old.versions[-1].runs)) if old is not None and prepared.budget else distinct(trials)
    left = None if prepared.budget else seconds_left(prepared, trials, expected.runs, at_once)
    title, scripts = prepared.subject.name(), dict(prepared.subject.scripts)
    counts, search, advice = prepared.store.counts(known), prepared.search_runs, foreseen(prepared, trials)
    return TunePlan(tuning, title, expected, search, counts, left, at_once, scripts, prepared.notes, words, advice)


def foreseen(prepared: Prepared, trials: Sequence[Trial]) -> str:
    """What the noise of the runs so far requires, with one dimension; empty if it is not known yet."""
    d = prepared.dimensions[0]
    if len(prepared.dimensions) > 1 or not d.bracketed:
        return ""
    done = prepared.store.results(distinct(trials))
    known = [t for t in trials if t.task.id in done]
    advice = prepared.advise(d.name, known, Design(1, prepared.tuning.seeds)) if known else None
    return f"By the runs so far, {advice}." if advice is not None else ""


def seconds_left(prepared: Prepared, trials: Sequence[Trial], runs: int, workers: int) -> float | None:
    """An estimate from the pace of the runs that are done; None if none is done."""
    results = prepared.store.results(distinct(trials))
    timed = [(t, float(r.get("seconds") or 0)) for t in trials if (r := results.get(t.task.id))]
    cost, seconds = sum(t.task.cost for t, _ in timed), sum(s for _, s in timed)
    if not cost or not seconds:
        return None
    everything = sum(t.task.cost for t in trials) * runs / len(trials)
    return max(0.0, everything - cost) * seconds / cost / workers


def tune_status(*, out: Place = "runs") -> TuneStatus:
    """How many runs of every tuning under `out` are done, diverged, running and missing."""
    root = existing_folder(Path(out))
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
    if not callable(train) and names_toml(train):
        return read_tuning(Path(train), changes)
    return make_tuning({**described(train, model), **changes})


def as_space(space: "Mapping[str, object] | Sequence[str]") -> dict[str, object]:
    if isinstance(space, Mapping):
        return dict(space)
    split = (word.partition("=") for word in space)
    ranges: dict[str, object] = {}
    for name, equals, text in split:
        if not equals:
            raise UserError(f"space: {name!r} is not a range", fix=f"write {name}=2^-10..2^-5, for instance")
        if name.strip() in ranges:
            raise UserError(f"space: {name.strip()} is given twice", fix="give each name once")
        ranges[name.strip()] = text
    return ranges


def as_pair(shape: "Shape | tuple[int, int]") -> list[int]:
    return [shape.width, shape.depth] if isinstance(shape, Shape) else list(shape)
