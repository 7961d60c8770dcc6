"""A command with placeholders: `python train.py --n_head {width//16} --lr {lr}` → the words of one run.

The text is split into words as a shell would, once, before any value is filled in. No shell runs, so a value is always
one argument (or a part of one), whatever characters it has.
"""

import ast
import difflib
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from completep.errors import UserError
from completep.sweep.task import Value

PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
MOST_DIGITS = 18  # of a whole number in a command
LONGEST = 200  # characters of a placeholder


@dataclass(frozen=True)
class Template:
    """The words of a command, with placeholders."""

    text: str

    @cached_property
    def words(self) -> tuple[str, ...]:
        if "\0" in self.text:
            raise UserError(f"the command {self.text!r} has a NUL character", fix="remove it: no argument can have one")
        try:
            words = tuple(shlex.split(self.text))
        except ValueError as error:
            raise UserError(f"the command {self.text!r} cannot be read: {error}", fix="close the quotes") from error
        if not words:
            raise UserError("the command is empty", fix="write it like 'python train.py --lr {lr} --seed {seed}'")
        return words

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name that a placeholder uses."""
        return frozenset(name for word in self.words for name in placeholders(word))

    def check(self, known: Iterable[str]) -> None:
        """Refuse an unknown name."""
        for word in self.words:
            for name in placeholders(word):
                if name not in (names := sorted(known)):
                    refuse_unknown(name, names, f"the command's word {word!r}")

    def fill(self, values: Mapping[str, Value]) -> tuple[str, ...]:
        return tuple(fill(word, values) for word in self.words)


def refuse_unknown(name: str, known: Iterable[str], where: str) -> None:
    names = sorted(known)
    close = difflib.get_close_matches(name[:80], names, 1)
    hint = f"did you mean {{{close[0]}}}? " if close else ""
    raise UserError(
        f"{where} has the unknown name {{{name}}}",
        fix=f"{hint}the names are {', '.join(names)}; space and set add others; write {{{{ and }}}} for braces",
    )


def placeholders(word: str) -> list[str]:
    """The names in the placeholders of a word."""
    names = []
    for match in PLACE.finditer(word):
        if match[0] in ("{", "}"):
            raise UserError(
                f"{word!r} has a single {match[0]}", fix="write {name} without spaces inside, or {{ and }} for braces"
            )
        if match[1] is not None:
            tree = _tree(match[1], word)
            names += [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return names


def fill(word: str, values: Mapping[str, Value]) -> str:
    def one(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        return written(_evaluate(_tree(match[1], word).body, values, match[1]))

    return PLACE.sub(one, word)


def written(value: Value) -> str:
    """A value as text that reads back exactly. A whole number has no decimal point."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value)


def _tree(text: str, word: str) -> ast.Expression:
    if len(text) > LONGEST:
        raise UserError(
            f"{{{text[:80]}…}} in the command has {len(text)} characters",
            fix=f"compute it in your script; a placeholder has at most {LONGEST}",
        )
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    allowed = (ast.Expression, ast.Name, ast.Load, ast.Constant, ast.BinOp, *OPERATIONS)
    good = tree is not None and all(isinstance(node, allowed) for node in ast.walk(tree))
    good = good and all(type(n.value) is int for n in ast.walk(tree or ast.Pass()) if isinstance(n, ast.Constant))
    if tree is None or not good or not any(isinstance(n, ast.Name) for n in ast.walk(tree)):
        raise UserError(
            f"{{{text}}} in {word!r} is not a name or whole-number arithmetic",
            fix="write {width}, {width//16} or {4*width}; write {{ and }} for braces",
        )
    return tree


def _evaluate(node: ast.expr, values: Mapping[str, Value], text: str) -> Value:
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Constant):
        return int(node.value)  # type: ignore[arg-type]
    assert isinstance(node, ast.BinOp)
    left, right = _evaluate(node.left, values, text), _evaluate(node.right, values, text)
    sides = [int(v) if isinstance(v, float) and v.is_integer() else v for v in (left, right)]
    if not all(type(v) is int for v in sides):
        raise UserError(
            f"{{{text}}}: {left!r} and {right!r} are not both whole numbers", fix="only whole numbers can be computed"
        )
    try:
        result = OPERATIONS[type(node.op)](*sides)  # type: ignore[arg-type]
    except ZeroDivisionError:
        raise UserError(f"{{{text}}} divides by 0", fix="check the expression and the shapes") from None
    if abs(result) >= 10**MOST_DIGITS:
        raise UserError(f"{{{text}}} is too large: it has more than {MOST_DIGITS} digits", fix="check the expression")
    return result
