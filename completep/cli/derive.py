"""`completep derive`: the rule of parameters that the table does not know, measured."""

from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from completep import paper
from completep.cli.shared import EXIT, RulesKey, Target, Words, console, progress_bar, show
from completep.errors import UserError


def derive(
    target: Target,
    /,
    depths: tuple[int, ...] = (),
    widths: tuple[int, ...] = (),
    axis: Annotated[tuple[str, ...], arg(metavar="NAME SIZE SIZE SIZE …")] = (),
    parameters: Annotated[tuple[str, ...], arg(metavar="PATTERN …")] = (),
    base: tuple[int, int] | None = None,
    rules: RulesKey = "completep",
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
    """Measure how the learning rate, epsilon, init and weight decay of a parameter must change with model size.

    By default this measures the parameters whose role cannot be found. Name others with --parameters. --save writes the
    rules to a file, for cp.load_rules and for --rules of explain and check. Exit code: 0 if every exponent is decided,
    3 if one is not; the report says why.

    Example: completep derive examples/own_model.py:model --depths 2 4 8 --widths 64 128 256 --parameters '*.up.weight'

    Args:
        target: your factory, as package.module:factory or file.py:factory.
        depths: at least three depths, at the base's width.
        widths: at least three widths, at the base's depth.
        axis: another argument of the factory and at least three sizes of it, the base's first, as experts 4 8 16.
        parameters: names or patterns of the parameters to measure.
        base: width and depth of the base; by default the smallest width and the smallest depth.
        rules: the parameterization of all other parameters.
        args: further arguments of the factory.
        names: what the factory calls width and depth, such as n_embd n_layer.
        batches: a factory of batches, if forward needs special inputs: number → (inputs, targets).
        seeds: number of seeds to start with. Where an interval is too wide to decide, more are run.
        steps: training steps before the second measurement; 0 leaves it out.
        lr: base learning rate of these steps.
        std: base init standard deviation.
        batch: sequences per batch.
        time: tokens per sequence.
        workers: processes; by default one per core, or none where that is faster.
        confirm: width and depth of a larger model. It and the base are trained with several multiples of the derived
            learning rates, and the best multiple must be the same.
        save: write the rules to this new file, if every exponent is decided.
        out: folder for reports, each in a new folder. Measurements are kept here too, so after an interruption the same
            command continues.
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
    elif save is not None:
        console(stderr=True).print(f"{save} was not written: the exponents above are not all decided")
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
            kind = "the name of an argument" if name is None else "a size"
            raise UserError(f"--axis {' '.join(words)}: {word!r} is not {kind}", fix="write --axis experts 4 8 16")
    return axes
