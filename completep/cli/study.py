"""`completep study`, `completep report`, `completep demo`: the paper's studies, run and reported."""

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from completep.cli.shared import Words, console, print_json
from completep.config import Data, Run, Shape
from completep.errors import UserError

if TYPE_CHECKING:
    from completep.study.design import Point, Study, Sweep
    from completep.study.engine import Engine
    from completep.study.store import Store

ScaleName = Literal["laptop", "paper"]
Name = Annotated[Positional[str | None], arg(metavar="NAME")]


def study(
    name: Name = None,
    /,
    scale: ScaleName = "laptop",
    set: Words = (),
    dry_run: bool = False,
    search: Literal["grid", "bracket"] = "grid",
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    ranks: int = 1,
    micro_batch: int | None = None,
    address: str | None = None,
    data: str | None = None,
    items: Path | None = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """One of the paper's results, run here: trains what is not trained yet, and writes a report. Without a name: lists them.

    Every run is done once, whatever interrupts it: the same command goes on. See also: completep study status, completep report.

    Example: completep study lr-transfer --set depth=2,8 seed=0 --search bracket

    Args:
        name: which study.
        scale: small shapes on the built-in corpus (meant for half an hour on two cores), or the paper's own settings.
        set: other values of an axis, as depth=2,8 lr=2^-9,2^-8; --dry-run shows the axes.
        dry_run: only say what would run, with its FLOPs and about how long it takes.
        search: the whole grid, or walk to each curve's minimum and stop once it is bracketed.
        engine: this machine, or a Ray cluster whose nodes share the folder.
        workers: runs at a time; by default one a core, or one a GPU.
        ranks: processes (GPUs) of each run, started by torchrun.
        micro_batch: sequences per device and pass; the rest of a batch is accumulated.
        address: of a Ray cluster; by default one is started here.
        data: a folder that `completep prepare` wrote, instead of the built-in corpus.
        items: for downstream: a folder of local items, as for completep evaluate, instead of the hub's data sets.
        out: runs are kept in the folder `store` here, and the report in a new folder beside it.
        json: print JSON.
    """
    from completep.study.design import Sweep
    from completep.study.store import Store

    if name is None:
        return list_studies(scale, json)
    chosen = which(name, scale, data, items).narrowed(set)
    store = Store(out / "store")
    store.open()
    if dry_run:
        return show_plan(chosen, store, workers, json)
    command = rerun_command("study", name, scale, set, data, items, out)
    if not isinstance(chosen, Sweep):
        return measure_and_report(chosen, workers, out, command, json)
    if search == "bracket" and chosen.swept is None:
        raise UserError(f"{name} has no curve with a minimum to search for", fix="leave out --search bracket")
    if data is None and scale == "paper":
        raise UserError(
            "the paper's scale needs the paper's amount of text",
            fix="prepare a corpus (completep prepare … --tokenizer gpt2) and give its folder: --data FOLDER",
        )
    chosen.prepare()
    runs, failed = conduct(chosen, store, search, engine, workers, ranks, micro_batch, address)
    code = write_report(chosen, store, runs, out, command, json)
    return 1 if failed else code


def report(
    name: Annotated[Positional[str], arg(metavar="NAME")],
    /,
    scale: ScaleName = "laptop",
    set: Words = (),
    data: str | None = None,
    items: Path | None = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """The report of a study from the runs that are done, without running anything.

    Example: completep report lr-transfer --set seed=0

    Args:
        name: which study.
        scale: laptop or paper.
        set: other values of an axis, as for completep study.
        data: as for completep study.
        items: as for completep study.
        out: where the runs are; the report goes into a new folder beside them.
        json: print JSON.
    """
    from completep.study.design import Sweep
    from completep.study.store import Store

    chosen = which(name, scale, data, items).narrowed(set)
    if not isinstance(chosen, Sweep):
        raise UserError(
            f"{name} keeps no runs to report on", fix=f"completep study {name} measures and reports at once"
        )
    store = Store(out / "store")
    store.open()
    command = rerun_command("study", name, scale, set, data, items, out)
    return write_report(chosen, store, ready(chosen.runs()), out, command, json)


def study_status(
    scale: ScaleName = "laptop", data: str | None = None, out: Path = Path("runs"), json: bool = False
) -> int:
    """How far every study is: runs done, diverged, running and missing.

    Example: completep study status

    Args:
        scale: laptop or paper.
        data: as for completep study.
        out: where the runs are.
        json: print JSON.
    """
    from rich.table import Table

    from completep.study.design import Sweep
    from completep.study.named import STUDIES
    from completep.study.store import Store

    store = Store(out / "store")
    store.open()
    rows = []
    for name in STUDIES:
        chosen = which(name, scale, data)
        if isinstance(chosen, Sweep):
            rows.append({"study": name} | store.counts([run for _, run in ready(chosen.runs())]))
    if json:
        print_json(rows)
        return 0
    table = Table(title=f"{store.root}, {scale} scale", title_justify="left")
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == "study" else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console().print(table)
    return 0


def demo(
    full: bool = False,
    depths: tuple[int, ...] = (2, 8, 32),
    seed: int = 0,
    workers: int | None = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """Tune the learning rate at depth 2, then use it at depths 8 and 32: where does it stay the best? A few minutes on two cores.

    Trains the paper's decoder on Python's own source under SP/muP, alpha=0.5 and CompleteP, and writes a report.

    Example: completep demo --seed 1

    Args:
        full: the whole grid with three seeds, which gives intervals and a verdict: half an hour.
        depths: numbers of layers; the first is the base.
        seed: of the initial weights and the order of the data.
        workers: runs at a time; by default one a core.
        out: runs are kept in the folder `store` here, and the report in a new folder beside it.
        json: print JSON.
    """
    from completep.study.named import lr_transfer, small_transfer
    from completep.study.scale import LAPTOP
    from completep.study.store import Store

    if len(set(depths)) < 2:
        raise UserError("one depth has nothing to transfer to", fix="--depths 2 8 32")
    scale = replace(LAPTOP, base=Shape(LAPTOP.base.width, depths[0]), depths=tuple(dict.fromkeys(depths)))
    chosen = lr_transfer(scale) if full else small_transfer(scale, seed)
    store = Store(out / "store")
    store.open()
    runs, failed = conduct(chosen, store, "grid" if full else "beside", "local", workers)
    command = "completep demo" + (" --full" if full else f" --seed {seed}") + f" --depths {' '.join(map(str, depths))}"
    command += f" --out {shlex.quote(str(out))}" if out != Path("runs") else ""
    code = write_report(chosen, store, runs, out, command, json)
    return 1 if failed else code


def which(name: str, scale: ScaleName, data: str | None = None, items: Path | None = None) -> "Study":
    from completep.study.named import study_named
    from completep.study.scale import SCALES

    chosen = replace(SCALES[scale], items=items)
    if data is not None:
        from completep.train.loop import open_corpus

        where = Data(str(Path(data).absolute()))  # engines may look for it from elsewhere
        chosen = replace(chosen, data=where, vocabulary=open_corpus(where).vocabulary)
    return study_named(name, chosen)


def ready(runs: "Sequence[tuple[Point, Run]]") -> "list[tuple[Point, Run]]":
    """The runs as the store knows them: with their data's hash, where the data is there."""
    from completep.study.engine import with_data

    return [(point, with_data(run) if run.data.source else run) for point, run in runs]


def conduct(
    chosen: "Sweep",
    store: "Store",
    search: "Literal['grid', 'bracket', 'beside']",
    engine: str,
    workers: int | None = None,
    ranks: int = 1,
    micro_batch: int | None = None,
    address: str | None = None,
) -> "tuple[list[tuple[Point, Run]], list[Run]]":
    """Run what is missing, in sight of the user."""
    from completep.cli.board import make_board, watching
    from completep.study.bracket import Search
    from completep.study.engine import with_data

    runs = ready(chosen.runs())
    board = make_board(chosen, store, runs, search != "grid")
    where = make_engine(engine, store, workers, ranks, micro_batch, address, board.on_event)
    try:
        with watching(board), stopping_at_sigterm():
            if search == "grid":
                failed = where.run([run for _, run in runs])
            else:
                runs, failed = Search(chosen, where, with_data, walk=search == "bracket").run()
    except KeyboardInterrupt:
        board.talk.print(f"stopped: {board.counts()}; the same command goes on")
        raise
    talk = console(stderr=True)
    if failed:
        talk.print(
            f"[red]{len(failed)} of {len(board.folders)} runs failed[/]; their folders hold log.txt; the same command tries again"
        )
    if failed and not any(store.result(run) for _, run in runs):
        raise UserError(
            f"all {len(failed)} runs failed", fix="see above what went wrong; then the same command goes on"
        )
    if board.before:
        talk.print(f"{board.before} of {len(board.folders)} runs were there already")
    if search != "grid":
        talk.print(f"the search took {len({store.folder(r) for _, r in runs})} runs of the grid's {len(board.folders)}")
    return runs, failed


def make_engine(
    name: str,
    store: "Store",
    workers: int | None,
    ranks: int,
    micro_batch: int | None,
    address: str | None,
    on_event: Any,
) -> "Engine":
    from completep.study.engine import HOW

    for flag, value in (("--workers", workers), ("--ranks", ranks), ("--micro-batch", micro_batch)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value}: must be at least 1", fix=f"leave out {flag} for the default")
    how = replace(HOW, micro_batch=micro_batch)
    if name == "ray":
        from completep.study.on_ray import OnRay

        return OnRay(store, address, ranks, workers, how, on_event)
    from completep.study.engine import Local, device_count

    if address is not None:
        raise UserError(f"--address {address} is for Ray", fix="add --engine ray")
    return Local(store, workers or max(1, device_count() // ranks), how, ranks, on_event)


@contextmanager
def stopping_at_sigterm() -> "Iterator[None]":
    """`kill` is as Ctrl-C: every run saves first."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def show_plan(chosen: "Study", store: "Store", workers: int | None, json: bool) -> int:
    from completep.report import study_view
    from completep.study.design import Sweep
    from completep.study.engine import device_count

    if isinstance(chosen, Sweep):
        plan = study_view.plan(chosen, store, ready(chosen.runs()), workers or device_count())
    else:
        plan = study_view.measured_plan(chosen)
    if json:
        print_json(plan)
    else:
        for part in study_view.plan_parts(plan):
            console().print(part)
    return 0


def list_studies(scale: ScaleName, json: bool) -> int:
    from rich.table import Table

    from completep.study.named import STUDIES

    found = [which(name, scale, None) for name in STUDIES]
    if json:
        print_json([{"name": s.name, "question": s.question, "claim": s.claim, "axes": dict(s.axes)} for s in found])
        return 0
    table = Table(title=f"completep study NAME --scale {scale}", title_justify="left")
    for heading in ("name", "question", "the paper's answer"):
        table.add_column(heading, no_wrap=heading == "name")
    for s in found:
        table.add_row(s.name, s.question, s.claim)
    console().print(table)
    return 0


def measure_and_report(chosen: Any, workers: int | None, out: Path, command: str, json: bool) -> int:
    from completep.cli.check import progress_bar
    from completep.report.study_files import write_study

    with progress_bar() as progress:
        measured = chosen.measure(**chosen.axes, workers=workers, progress=progress)
    return tell(
        chosen, chosen.find(measured), write_study(chosen, measured, chosen.find(measured), {}, command, out), json
    )


def write_report(
    chosen: "Sweep", store: "Store", runs: "Sequence[tuple[Point, Run]]", out: Path, command: str, json: bool
) -> int:
    from completep.report.study_files import settings, write_study

    frame = chosen.frame(store, runs)
    outcome = chosen.find(frame).with_missing(store.counts([run for _, run in runs]))
    return tell(
        chosen, outcome, write_study(chosen, frame, outcome, settings([run for _, run in runs]), command, out), json
    )


def tell(chosen: "Study", outcome: Any, files: list[Path], json: bool) -> int:
    from completep.report import study_view

    if json:
        print_json(study_view.to_json(chosen, outcome) | {"files": [str(f) for f in files]})
        return 0
    for part in study_view.outcome_parts(chosen, outcome):
        console().print(part)
    console().print(f"report: {files[0]}")
    return 0


def rerun_command(
    command: str, name: str, scale: str, words: Sequence[str], data: str | None, items: Path | None, out: Path
) -> str:
    parts = ["completep", command, name, "--scale", scale]
    parts += ["--set", *words] if words else []
    parts += ["--data", data] if data else []
    parts += ["--items", str(items)] if items else []
    return shlex.join([*parts, *(["--out", str(out)] if out != Path("runs") else [])])
