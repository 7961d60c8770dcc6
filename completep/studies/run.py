"""`study`, its plan, status and report: from a name to a result. The command line calls these functions."""

import difflib
import pkgutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import get_args

import polars as pl

from completep import studies as package
from completep.config import Data
from completep.errors import UserError, choice
from completep.load import load_object
from completep.measure.words import Progress, quiet
from completep.studies.design import LISTED, Conclusion, Detail, Experiment, Measurement, Study, Sweep
from completep.studies.result import (
    StudyList,
    StudyPlan,
    StudyResult,
    StudyStatus,
    axis_settings,
    run_settings,
)
from completep.studies.scale import SCALES, Scale, ScaleName
from completep.sweep.backends import EngineName, make_backend
from completep.sweep.conduct import Conducted, Watcher, conduct, nobody
from completep.sweep.devices import device_count
from completep.sweep.search import Search, needed
from completep.sweep.store import Store, distinct
from completep.sweep.task import Trial, Value
from completep.sweep.training import HOW, Training, with_data
from completep.train.settings import open_corpus

Values = Mapping[str, Value | Sequence[Value]]
Place = Path | str
TYPICAL_PACE = 40e9  # FLOP/s of one core on small models, until finished runs give a better estimate


def known_studies() -> dict[str, Study]:
    """Every study that a module of this package, or an imported one, has listed."""
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(LISTED.items()))


def study_named(name: str | Study) -> Study:
    """A study by its name, or by its place in a file of yours: path/to/file.py:STUDY."""
    if isinstance(name, Study):
        return name
    if ":" in name:
        loaded = load_object(name)
        if not isinstance(loaded, Study):
            raise UserError(f"{name} is a {type(loaded).__name__}, not a study", fix="name a Sweep or a Measurement")
        return loaded
    known = known_studies()
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError(f"no study named {name!r}", fix=f"{hint}the studies are {', '.join(known)}")
    return known[name]


def study_at(
    name: str | Study, scale: ScaleName, values: Values, data: Place | None, items: Place | None
) -> Experiment:
    """The study at a scale, on the data and with the axes that were asked for."""
    choice("scale", scale, SCALES)
    return study_named(name).at(on_data(SCALES[scale], data), None if items is None else Path(items)).narrowed(values)


def on_data(scale: Scale, data: Place | None) -> Scale:
    if data is None:
        return scale
    source = Data(str(Path(data).absolute()))  # workers may look for it from another folder
    return replace(scale, data=source, vocabulary=open_corpus(source).vocabulary)


def list_studies() -> StudyList:
    """All studies, with what they ask and what the paper answers."""
    return StudyList(tuple(known_studies().values()))


def study(
    name: str | Study,
    *,
    scale: ScaleName = "laptop",
    values: Values | None = None,
    search: Search = "grid",
    engine: EngineName = "local",
    workers: int | None = None,
    ranks: int = 1,
    micro_batch: int | None = None,
    address: str | None = None,
    data: Place | None = None,
    items: Place | None = None,
    out: Place = "runs",
    watch: Watcher = nobody,
    progress: Progress = quiet,
) -> StudyResult:
    """One of the paper's results, run here. Runs that are done already are not done again.

    Args:
        name: which study (`list_studies()` lists them); for one of yours, the object or "file.py:STUDY".
        scale: small shapes on the built-in corpus (meant for half an hour on two cores), or the paper's own settings.
        values: other values on some axes, such as {"depth": [2, 8], "seed": [0]}.
        search: the whole grid, or walk to each curve's minimum and stop once it is bracketed.
        engine: this machine, or a Ray cluster whose nodes share the folder.
        workers: runs at a time; by default one per core, or one per GPU.
        ranks: processes (GPUs) of each run, started by torchrun.
        micro_batch: sequences per device and pass; the rest of a batch is accumulated.
        address: of a Ray cluster; by default one is started here.
        data: a folder that `completep prepare` wrote, instead of the built-in corpus.
        items: for downstream: a folder of local items, instead of the hub's data sets.
        out: runs are kept in the folder `store` here.
        watch: sees training runs as they start and end.
        progress: sees measurements as they end: (done, all, the one that just ended).
    """
    choice("search", search, get_args(Search))
    choice("engine", engine, get_args(EngineName))
    experiment = study_at(name, scale, values or {}, data, items)
    chosen = experiment.study
    command = rerun_words(place_of(name, chosen), scale, values or {}, search, data, items, out)
    if isinstance(chosen, Measurement):
        conclusion, frames = chosen.conclude(experiment, workers, progress)
        return StudyResult(experiment, conclusion, frames, axis_settings(experiment), command)
    assert isinstance(chosen, Sweep)
    refuse_no_curve(chosen, search)
    if not experiment.scale.data.source:
        raise UserError(
            "the paper's scale needs the paper's amount of text",
            fix="prepare a corpus of GPT-2 tokens (completep prepare), and give its folder as data",
        )
    store = Store(Path(out) / "store")
    store.open()
    chosen.prepare(experiment)
    how = replace(HOW, micro_batch=micro_batch)
    tuning = chosen.tuning_trials(experiment, how, ranks)
    if tuning:
        chosen.trials(experiment, how, ranks)  # an impossible setting is an error before anything runs
        conduct(tuning, store, make_backend(engine, workers, address), watch=watch)
    experiment, tuned = settled(chosen, experiment, store)
    trials = chosen.trials(experiment, how, ranks)
    backend = make_backend(engine, workers, address)
    conducted = conduct(trials, store, backend, search=search, swept=chosen.swept, watch=watch)
    if chosen.after is not None:
        for trial in conducted.trials:
            if (store.result(trial.task) or {}).get("status") == "done":  # a diverged run has no weights
                chosen.after(experiment, store.folder(trial.task))
    return conclude_sweep(chosen, experiment, store, conducted.trials, command, conducted, tuned)


def refuse_no_curve(chosen: Sweep[Detail], search: Search) -> None:
    if search != "grid" and chosen.swept is None:
        raise UserError(
            f"{chosen.name} has no curve with a minimum to search for", fix="use search='grid', the default"
        )


def settled(chosen: Sweep[Detail], experiment: Experiment, store: Store) -> tuple[Experiment, pl.DataFrame]:
    """The experiment with what was tuned at the base, and the losses there."""
    trials = chosen.tuning_trials(experiment)
    tuned, losses = chosen.tuned(experiment, store, trials)
    if tuned.tuning:
        done = store.results(trial.task for trial in trials)
        what = f"the runs that tune {' and '.join(tuned.tuning)} are not all done"
        raise UserError(what if done else "no run of this study is done yet", fix="run the study first")
    return tuned, losses


def study_report(
    name: str,
    *,
    scale: ScaleName = "laptop",
    values: Values | None = None,
    search: Search = "grid",
    data: Place | None = None,
    items: Place | None = None,
    out: Place = "runs",
) -> StudyResult:
    """The result of a study from the runs that are done, without running or evaluating anything."""
    choice("search", search, get_args(Search))
    experiment = study_at(name, scale, values or {}, data, items)
    chosen = experiment.study
    if not isinstance(chosen, Sweep):
        raise UserError(
            f"{name} keeps no runs to report on", fix=f"`completep study {name}` measures and reports at once"
        )
    refuse_no_curve(chosen, search)
    store = Store(Path(out) / "store")
    store.look()
    command = rerun_words(place_of(name, chosen), scale, values or {}, search, data, items, out)
    experiment, tuned = settled(chosen, experiment, store)
    trials = needed(chosen.trials(experiment), store, search, chosen.swept)
    return conclude_sweep(chosen, experiment, store, trials, command, tuned=tuned)


def conclude_sweep(
    chosen: Sweep[Detail],
    experiment: Experiment,
    store: Store,
    trials: Sequence[Trial],
    command: Sequence[str],
    conducted: Conducted | None = None,
    tuned: pl.DataFrame | None = None,
) -> StudyResult:
    frame = chosen.frame(experiment, store, trials)
    missing = missing_runs(chosen, store, trials, frame)
    try:
        conclusion = chosen.conclude(experiment, frame)
    except UserError:
        if not missing or frame.is_empty() or ("loss" in frame.columns and frame["loss"].null_count() == frame.height):
            raise  # nothing is done yet, or the error has another cause than missing runs
        conclusion = Conclusion("not finished", missing, pl.DataFrame(), ())
    else:
        if missing:
            so_far = f"{missing}. So far: {conclusion.sentence}"
            conclusion = replace(conclusion, agreement="not finished", sentence=so_far)
    # As the study describes them: the tasks hold each run under the simplest base that gives the same numbers.
    runs = [with_data(chosen.run(experiment.scale, trial.point)) for trial in trials]
    frames = {"runs": frame} if tuned is None or tuned.is_empty() else {"runs": frame, "tuning": tuned}
    return StudyResult(experiment, conclusion, frames, run_settings(runs), tuple(command), conducted)


def missing_runs(chosen: Sweep[Detail], store: Store, trials: Sequence[Trial], frame: pl.DataFrame) -> str:
    """What is still to be done, in words; empty if nothing is."""
    counts = store.counts([trial.task for trial in trials])
    if counts.unfinished:
        return f"{counts.unfinished} of {counts.runs} runs are not done"
    if chosen.after is not None:
        results = store.results(distinct(trials))
        done = [name for name, result in results.items() if result["status"] == "done"]
        left = set(done) - set(frame["run"] if "run" in frame.columns else ())
        return f"{len(left)} of {len(done)} trained runs are not evaluated" if left else ""
    return ""


def study_plan(
    name: str,
    *,
    scale: ScaleName = "laptop",
    values: Values | None = None,
    workers: int | None = None,
    data: Place | None = None,
    items: Place | None = None,
    out: Place = "runs",
) -> StudyPlan:
    """What a study would run, with its FLOPs and about how long it takes."""
    experiment = study_at(name, scale, values or {}, data, items)
    points, at_once = len(list(experiment.points())), device_count() if workers is None else workers
    if at_once < 1:
        raise UserError(f"workers={workers}: must be at least 1", fix="leave workers out for the default")
    if not isinstance(experiment.study, Sweep):
        return StudyPlan(experiment, points, (), 0.0, TYPICAL_PACE, False, at_once)
    store = Store(Path(out) / "store")
    store.look()
    trials = {trial.task.id: trial for trial in all_trials(experiment.study, experiment, store)}
    results = store.results(trial.task for trial in trials.values())
    lines: list[Mapping[str, Value]] = []
    paces, left = [], 0.0
    for trial in trials.values():
        assert isinstance(trial.task, Training)
        result = results.get(trial.task.id)
        seconds = float((result or {}).get("seconds") or 0)
        if result and seconds and result["status"] == "done":
            paces.append(trial.task.cost / seconds)
        left += trial.task.cost if result is None else 0.0
        status = str(result["status"]) if result else "missing"
        facts: dict[str, Value] = {"tokens": trial.task.run.tokens, "flops": trial.task.cost, "status": status}
        lines.append({"run": trial.task.id, **trial.point, **facts})
    pace = statistics.median(paces) if paces else TYPICAL_PACE
    return StudyPlan(experiment, points, tuple(lines), left, pace, bool(paces), at_once)


def all_trials(chosen: Sweep[Detail], experiment: Experiment, store: Store) -> list[Trial]:
    """Those that tune at the base, and the study's own. Until the base is tuned, these stand for as many others."""
    tuning = chosen.tuning_trials(experiment)
    tuned, _ = chosen.tuned(experiment, store, tuning)
    return [*tuning, *chosen.trials(tuned)]


def study_status(*, scale: ScaleName = "laptop", data: Place | None = None, out: Place = "runs") -> StudyStatus:
    """How many runs of every study are done, diverged, running and missing."""
    store = Store(Path(out) / "store")
    store.look()
    counts = {}
    for name, chosen in known_studies().items():
        if isinstance(chosen, Sweep):
            experiment = chosen.at(on_data(SCALES[scale], data))
            counts[name] = store.counts([trial.task for trial in all_trials(chosen, experiment, store)])
    return StudyStatus(f"{store.root}, {scale} scale", counts)


def place_of(name: str | Study, chosen: Study) -> str | None:
    """What another process has to be given for this study: its name, or file.py:STUDY. None if that is not known."""
    if isinstance(name, str) and ":" in name:
        return name
    home = Path(chosen.home).resolve()
    if home.parent == Path(package.__path__[0]).resolve() and LISTED.get(chosen.name) is chosen:
        return chosen.name
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).resolve() == home:
            return next((f"{file}:{key}" for key, value in vars(module).items() if value is chosen), None)
    return None


def rerun_words(
    name: str | None, scale: str, values: Values, search: Search, data: Place | None, items: Place | None, out: Place
) -> tuple[str, ...]:
    """The command that makes the same result; empty for a study that no other process can find."""
    if name is None:
        return ()
    words = ["study", name, "--scale", scale]
    words += [] if search == "grid" else ["--search", search]
    if values:
        several = {axis: [v] if isinstance(v, (str, int, float)) else v for axis, v in values.items()}
        words += ["--set", *(f"{axis}={','.join(map(str, chosen))}" for axis, chosen in several.items())]
    words += ["--data", str(data)] if data else []
    words += ["--items", str(items)] if items else []
    return (*words, *(["--out", str(out)] if Path(out) != Path("runs") else []))
