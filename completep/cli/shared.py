"""What several commands share: argument types, the console, JSON, reading models and runs from words."""

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from completep.config import Run, Shape, run_from_json
from completep.errors import UserError
from completep.files import read_text

if TYPE_CHECKING:
    from rich.console import Console

Target = Annotated[Positional[str], arg(metavar="MODULE:FACTORY")]
Words = Annotated[tuple[str, ...], arg(metavar="NAME=VALUE …")]
RulesName = Annotated[str, arg(metavar="sp|mup|completep|alpha=0.5", help="which parameterization")]
Style = Annotated[Literal["multiplier", "folded"], arg(help="factors in the forward pass, or in the weights")]


def console(stderr: bool = False) -> "Console":
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 200
    return Console(stderr=stderr, width=wide, highlight=False)


def print_json(value: Any) -> None:
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    """What strict JSON can say: it knows neither NaN nor infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def read_run(path: Path) -> Run:
    return run_from_json(read_text(path), str(path))


def models(
    target: str, args: tuple[str, ...], base: tuple[str, ...], base_shape: tuple[int, int] | None
) -> tuple[Any, Any]:
    """(how to build the target, the base) from the words on the command line."""
    from completep.load import call_factory, load_factory, parse_arguments

    factory = load_factory(target)
    if not base and base_shape is None:
        raise UserError(
            "no base given: the rules are relative to the model you tuned",
            fix="--base width=256 depth=2 (arguments of the factory), or --base-shape 256 2",
        )
    chosen = (
        Shape(*base_shape)
        if base_shape is not None
        else (lambda: call_factory(factory, parse_arguments(args) | parse_arguments(base)))
    )
    return (lambda: call_factory(factory, parse_arguments(args))), chosen
