"""`completep derive`: the rule of parameters that the table does not know, measured."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from completep import paper
from completep.cli.shared import EXIT, Target, Words, progress_bar, show
from completep.errors import UserError


def derive(
    target: Target,
    /,
    depths: tuple[int, ...] = (),
    widths: tuple[int, ...] = (),
    axis: Annotated[tuple[str, ...], arg(metavar="NAME SIZE SIZE SIZE …")] = (),
    parameters: Annotated[tuple[str, ...], arg(metavar="PATTERN …")] = (),
    base: tuple[int, int] | None = None,
    rules: str = "completep",
    args: Words = (),
    names: tuple[str, str] = ("width", "depth"),
    batches: Annotated[str | None, arg(metavar="MODULE:FACTORY")] = None,
    seeds: int = 3,
    steps: int = 20,
    lr: float = paper.CHECK_LR,
    std: float = paper.CHECK_STD,
    batch: int = 16,
    time: int = 16,
    workers: int | None = None,
    confirm: tuple[int, int] | None = None,
    save: Path | None = None,
    out: Path = Path("runs"),
    json: bool = False,
) -> int:
    """Measure how learning rate, epsilon, init and weight decay of a parameter must change with the size of the model.

    By default these are the parameters whose role cannot be found; name others with --parameters. --save writes the
    rules to a file, for cp.load_rules and for --rules of explain and check. Exit code: 0 if every exponent is decided,
    3 if one is open, with the reason.

    Example: completep derive examples/own_model.py:model --depths 2 4 8 --widths 64 128 256 --parameters '*.up.weight'

    Args:
        target: your factory, as package.module:factory or file.py:factory.
        depths: at least three numbers of layers, at the base's width.
        widths: at least three widths, at the base's depth.
        axis: further arguments of the factory, each with at least three sizes, the base's first: experts 4 8 16.
        parameters: names or patterns of the parameters to measure.
        base: width and depth of the base; by default the smallest width and the smallest depth.
        rules: what all other parameters follow.
        args: further arguments of the factory.
        names: what the factory calls width and depth, such as n_embd n_layer.
        batches: a factory of batches, if forward needs special inputs: number → (inputs, targets).
        seeds: number of seeds, at first; an interval that is too wide to decide gets more.
        steps: training steps before the second measurement; 0 leaves it out.
        lr: base learning rate of these steps.
        std: base init standard deviation.
        batch: sequences per batch.
        time: tokens per sequence.
        workers: processes; by default one per core, or none where that is faster.
        confirm: width and depth of a larger model: train it and the base with several multiples of the derived learning
            rates, whose best must stay the same.
        save: write the rules to this new file.
        out: the report goes into a new folder here. Measurements are kept here too: if this command is interrupted, the
            same command continues.
        json: print JSON.
    """
    from completep import derive as run
    from completep.load import parse_arguments

    with progress_bar() as progress:
        result = run(
            target, depths=depths, widths=widths, axes=_axes(axis), parameters=parameters, base=base, rules=rules,
            arguments=parse_arguments(args), names=names, batches=batches, seeds=seeds, steps=steps, lr=lr, std=std,
            batch=batch, time=time, workers=workers, progress=progress, keep=out,
            confirm=confirm,
        )  # fmt: skip
    show(result, json, out)
    if save is not None and result.verdict == "PASS":
        result.save(save)
    return EXIT[result.verdict]


def _axes(words: tuple[str, ...]) -> dict[str, list[int]]:
    """`experts 4 8 16 rank 2 4 8` → the sizes of each axis."""
    axes: dict[str, list[int]] = {}
    name = None
    for word in words:
        if word.isdecimal() and name is not None:
            axes[name].append(int(word))
        elif word.isidentifier():
            name = word
            axes[name] = []
        else:
            raise UserError(f"--axis {' '.join(words)}: {word!r} is no size", fix="--axis experts 4 8 16")
    return axes
