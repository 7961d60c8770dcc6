"""From words to the call of a command, and from its signature and docstring to its help. tyro does both."""

import re
import shutil
import textwrap
from collections.abc import Callable
from functools import wraps
from inspect import cleandoc, signature
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import arg

from completep.errors import UserError

Command = Callable[..., int]
CONTINUED = re.compile(r"\n {8,}")  # before the second line of an argument's help; tyro would keep the break
EMPTY = re.compile(r"--[\w-]+=")
PLACEHOLDERS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


def run_command(command: Command, name: str, words: list[str]) -> int:
    """Call a command with arguments from these words. `--help` and words that it does not take raise SystemExit."""
    refuse_empty(words)
    return tyro.cli(
        with_short_help(command), prog=f"completep {name}", description=Wrapped(description(command)), args=words
    )


def refuse_empty(words: list[str]) -> None:
    """An empty word would count as not given, or as the current folder: `--out "$FOLDER"` without such a variable."""
    for before, word in pairwise(["", *words]):
        if word == "" or EMPTY.fullmatch(word):
            name = word.rstrip("=") or (before if before.startswith("--") else "argument")
            raise UserError(f"{name}='' is empty", fix="give a value, or leave it out")


def paragraphs(command: Command) -> list[str]:
    """The paragraphs of a command's docstring above `Args:`, each in one line."""
    above, _, _ = cleandoc(command.__doc__ or "").partition("\n\nArgs:")
    return [" ".join(paragraph.split()) for paragraph in above.split("\n\n")]


def description(command: Command) -> str:
    """The text at the top of a command's help, in lines that fit the terminal."""
    width = max(20, shutil.get_terminal_size().columns)
    fill = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False).fill
    return "\n\n".join(map(fill, paragraphs(command)))


class Wrapped(str):
    """Text that keeps its line breaks: tyro splits a description, and joins lines that start with a letter."""

    def split(self, *separators: object) -> list[str]:
        return [str(self)]


def with_short_help(command: Command) -> Command:
    """The same command, with `--seeds INT` in its help instead of `--seeds {None}|INT … (default: None)`."""
    hints = get_type_hints(command, include_extras=True)

    @wraps(command)
    def call(*positional: object, **named: object) -> int:
        return command(*positional, **named)

    del call.__wrapped__  # tyro would read the annotations there
    call.__annotations__ = {name: hint if name == "return" else annotated(hint) for name, hint in hints.items()}
    call.__signature__ = signature(command)  # type: ignore[attr-defined]
    call.__doc__ = CONTINUED.sub(" ", cleandoc(command.__doc__ or ""))
    return call


def annotated(hint: object) -> object:
    """The hint with our placeholder and default. The command's own `arg` comes later, so it wins."""
    kind, *own = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return Annotated[(kind, arg(metavar=placeholder(kind), help_behavior_hint=default_hint), *own)]


def default_hint(text: str) -> str:
    """Nothing for options that are off or not given by default: their help says what happens then."""
    return "" if text in ("None", "False", "", "''") else f"(default: {text})"


def placeholder(kind: object) -> str | None:
    """`INT`, `INT INT`, `INT …` or `{a,b}`; None where tyro's own is as short."""
    options = get_args(kind)
    if get_origin(kind) is Annotated:
        return next((m for o in options[1:] if (m := getattr(o, "metavar", None))), placeholder(options[0]))
    if get_origin(kind) in (Union, UnionType):
        kinds = [option for option in options if option is not NoneType]
        return placeholder(kinds[0]) if len(kinds) == 1 else None
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, options)) + "}"
    if get_origin(kind) is tuple:
        parts = [placeholder(option) or "" for option in options if option is not Ellipsis]
        return " ".join(parts) + (" …" if Ellipsis in options else "")
    return PLACEHOLDERS.get(kind) if isinstance(kind, type) else None
