"""`completep study`, `completep report`, `completep demo`: the paper's studies, run and reported."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from completep.cli.shared import Words, console, print_json, progress_bar, show

ScaleName = Literal["laptop", "desk", "paper"]


def study(
    name: Annotated[Positional[str | None], arg(metavar="NAME")] = None,
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
    """Run one of the paper's studies and report whether its claim holds here. Without a name: list the studies.

    Trains what is not trained yet, and writes a report. Every run is done once: after an interruption, the same command
    continues. See also: completep study status, completep report.

    Example: completep study lr-transfer --set depth=2,8 seed=0 --search bracket

    Args:
        name: name of a study, or path/to/file.py:STUDY for one of yours.
        scale: laptop takes about half an hour on two cores, desk about three hours; paper is the paper's own settings.
        set: other values for an axis, as depth=2,8 lr=2^-9,2^-8. --dry-run shows the axes.
        dry_run: only show what would run, with its FLOPs and about how long it takes.
        search: run the whole grid, or walk to the minimum of each curve and stop once it is bracketed.
        engine: this machine, or a Ray cluster whose nodes share the folder.
        workers: runs at a time; by default one per core, or one per GPU.
        ranks: processes (GPUs) per run, started by torchrun.
        micro_batch: sequences per device and pass; the rest of a batch is accumulated.
        address: address of a Ray cluster; by default a cluster is started on this machine.
        data: a folder that `completep prepare` wrote, instead of the built-in corpus.
        items: for downstream: a folder of local items, as for completep evaluate, instead of data sets from the hub.
        out: runs are kept in the folder `store` here, and the report in a new folder beside it.
        json: print JSON.
    """
    from completep import list_studies
    from completep import study as run
    from completep.cli.board import Watch
    from completep.studies.design import Sweep, read_words
    from completep.studies.run import study_named, study_plan

    if name is None:
        show(list_studies(), json)
        return 0
    values = read_words(set)
    if dry_run:
        show(study_plan(name, scale=scale, values=values, workers=workers, data=data, items=items, out=out), json)
        return 0
    chosen = study_named(name)
    swept = chosen.swept if isinstance(chosen, Sweep) else None
    with progress_bar() as progress:
        result = run(
            name, scale=scale, values=values, search=search, engine=engine, workers=workers, ranks=ranks,
            micro_batch=micro_batch, address=address, data=data, items=items, out=out,
            watch=Watch(chosen.name, swept), progress=progress,
        )  # fmt: skip
    if search != "grid" and result.conducted is not None:
        needed, planned = result.conducted.needed, result.conducted.planned
        console(stderr=True).print(f"the search needed {needed} of the grid's {planned} runs")
    show(result, json, out)
    return 1 if result.failed else 0


def report(
    name: Annotated[Positional[str], arg(metavar="NAME")],
    /,
    scale: ScaleName = "laptop",
    set: Words = (),
    search: Literal["grid", "bracket"] = "grid",
    data: str | None = None,
    items: Path | None = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """Write the report of a study from the runs that are done, without running anything.

    Example: completep report lr-transfer --set seed=0

    Args:
        name: name of a study, or path/to/file.py:STUDY for one of yours.
        scale: as for completep study.
        set: as for completep study.
        search: report on the whole grid, or on the runs that the search needs.
        data: as for completep study.
        items: as for completep study.
        out: where the runs are; the report goes into a new folder beside them.
        json: print JSON.
    """
    from completep.studies.design import read_words
    from completep.studies.run import study_report

    result = study_report(
        name, scale=scale, values=read_words(set), search=search, data=data, items=items, out=out
    )  # fmt: skip
    show(result, json, out)
    return 0


def study_status(
    scale: ScaleName = "laptop", data: str | None = None, out: Path = Path("runs"), json: bool = False
) -> int:
    """Show the progress of every study: runs done, diverged, running and missing.

    Example: completep study status

    Args:
        scale: as for completep study.
        data: as for completep study.
        out: where the runs are.
        json: print JSON.
    """
    from completep.studies.run import study_status as run

    show(run(scale=scale, data=data, out=out), json)
    return 0


def study_pack(
    file: Annotated[Positional[Path], arg(metavar="FILE")], /, out: Path = Path("runs"), json: bool = False
) -> int:
    """Write the finished runs of a store to one small file: settings, losses and curves, without weights.

    Example: completep study pack results.gz

    Args:
        file: a new file.
        out: where the runs are.
        json: print JSON.
    """
    from completep.sweep.packing import pack
    from completep.sweep.store import Store

    count = pack(Store(out / "store"), file)
    _say(
        json, {"runs": count, "bytes": file.stat().st_size}, f"{count} runs, {file.stat().st_size / 1e3:.0f} kB: {file}"
    )
    return 0


def study_unpack(
    file: Annotated[Positional[Path], arg(metavar="FILE")], /, out: Path = Path("runs"), json: bool = False
) -> int:
    """Add the runs of a packed file to a store. Runs that the store has already are left as they are.

    Example: completep study unpack results.gz --out elsewhere

    Args:
        file: a file that `completep study pack` wrote.
        out: the runs go into the folder `store` here.
        json: print JSON.
    """
    from completep.sweep.packing import unpack
    from completep.sweep.store import Store

    unpacked = unpack(file, Store(out / "store"))
    _say(json, vars(unpacked), f"{unpacked.new} new runs in {out / 'store'}; {unpacked.known} were there already")
    return 0


def _say(json: bool, content: dict[str, int], line: str) -> None:
    if json:
        print_json(content)
    else:
        console().print(line)


def demo(
    full: bool = False,
    depths: tuple[int, ...] = (2, 32),
    seed: int = 0,
    workers: int | None = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """Tune the learning rate at depth 2, use it at depth 32, and see whether the deeper model is better.

    Trains the paper's decoder on Python's own source under SP/muP, alpha=0.5 and CompleteP, and writes a report. Takes
    a few minutes on two cores.

    Example: completep demo --seed 1

    Args:
        full: run the whole grid with three seeds. It gives intervals and a transfer verdict, and takes half an hour.
        depths: numbers of layers; the first is the base.
        seed: seed of the initial weights and of the order of the data.
        workers: runs at a time; by default one per core.
        out: runs are kept in the folder `store` here, and the report in a new folder beside it.
        json: print JSON.
    """
    from completep.cli.board import Watch
    from completep.studies.demo import demo as run

    result = run(full=full, depths=depths, seed=seed, workers=workers, out=out, watch=Watch("demo", "lr"))
    show(result, json, out)
    return 1 if result.failed else 0
