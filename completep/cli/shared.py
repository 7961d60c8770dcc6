"""What several commands share: argument types, the console, printing, and models named on the command line."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from completep.config import Shape
from completep.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from completep.measure.words import Progress
    from completep.report.result import Result
    from completep.rules.table import Rules

Target = Annotated[Positional[str], arg(metavar="MODULE:FACTORY")]
Words = Annotated[tuple[str, ...], arg(metavar="NAME=VALUE …")]
RulesKey = Annotated[str, arg(metavar="sp|mup|completep|alpha=0.5", help="the parameterization")]
RulesName = Annotated[str, arg(metavar="sp|mup|completep|alpha=0.5|FILE.json", help="the parameterization")]
Style = Annotated[
    Literal["multiplier", "folded"], arg(help="where the factors are: in the forward pass, or in the weights")
]
# 2 is a mistake in the input, 70 an error of ours, 130 an interruption.
EXIT = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}


def console(stderr: bool = False) -> "Console":
    """A console on one of the standard streams. Where it is not a terminal, lines are 200 characters long."""
    from completep.report.terminal import Terminal

    stream = sys.stderr if stderr else sys.stdout
    return Terminal(stderr=stderr, width=None if stream.isatty() else 200)


def print_json(value: object) -> None:
    """Print indented JSON, with one line per item of a list. json's own indentation is slow for thousands of items."""
    from completep.report.document import strict

    content = strict(value)
    if not isinstance(content, dict):
        print(json.dumps(content, allow_nan=False))
        return
    entries = [f"  {json.dumps(name)}: {_indented(entry)}" for name, entry in content.items()]
    print("{\n" + ",\n".join(entries) + "\n}")


def _indented(entry: object) -> str:
    if isinstance(entry, list) and entry:
        lines = ",\n    ".join(json.dumps(item, allow_nan=False) for item in entry)
        return f"[\n    {lines}\n  ]"
    return json.dumps(entry, indent=2, allow_nan=False).replace("\n", "\n  ")


def show(result: "Result", as_json: bool, out: Path | None = None) -> None:
    """Print a result, and with `out` write its files there."""
    files = result.write(out) if out is not None else []
    if as_json:
        print_json(result.to_json() | ({"files": [str(f) for f in files]} if files else {}))
        return
    console().print(result)
    if files:
        console().print(f"report: {files[0]}")


@contextmanager
def progress_bar() -> "Iterator[Progress]":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from completep.report.escape import visible

    terminal = console(stderr=True)
    columns = (
        BarColumn(24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def update(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=visible(what))  # a column prints it as it is

        yield update


def rules_from(word: str) -> "Rules | str":
    """Rules as a key, or as a file that `completep derive --save` wrote."""
    if not word.endswith(".json"):
        return word
    from completep import load_rules

    return load_rules(word)


def multipliers(words: tuple[str, ...]) -> dict[str, float]:
    """`embedding=4 router=2` → the multiplier of each role."""
    from completep.units import parse_number

    pairs = [word.partition("=") for word in words]
    for name, equals, value in pairs:
        if not (name and equals and value):
            raise UserError(
                f"{name + equals + value!r} is not a multiplier", fix="write ROLE=NUMBER, such as embedding=4"
            )
    return {name.strip(): parse_number(value, name.strip()) for name, _, value in pairs}


Build = Callable[[], Any]


def models(
    target: str, args: tuple[str, ...], base: tuple[str, ...], base_shape: tuple[int, int] | None
) -> "tuple[Build, Build | Shape]":
    """From the words of a command: how to build the target, and the base."""
    from completep.load import call_factory, load_factory, parse_arguments

    factory = load_factory(target)
    if not base and base_shape is None:
        raise UserError(
            "no base given: the rules are relative to the model you tuned",
            fix="--base width=256 depth=2 (arguments of the factory), or --base-shape 256 2",
        )
    arguments, of_base = parse_arguments(args), parse_arguments(base)
    chosen = Shape(*base_shape) if base_shape is not None else (lambda: call_factory(factory, arguments | of_base))
    return (lambda: call_factory(factory, arguments)), chosen
