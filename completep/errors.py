"""The one exception that users need to read."""

import re
from collections.abc import Iterable

MOST_IN_WORD, MOST_SHOWN, MOST_IN_TEXT = 300, 80, 10_000  # characters of a message
LONG_WORD = re.compile(rf"\S{{{MOST_IN_WORD + 1},}}")


class UserError(ValueError):
    """A mistake in the input. `what` names the input as the user gave it, `fix` says what to do about it."""

    def __init__(self, what: str, *, fix: str) -> None:
        self.what, self.fix = shortened(what), shortened(fix)
        super().__init__(f"{self.what}\n  fix: {self.fix}")

    def __reduce__(self) -> "tuple[object, ...]":
        # Pickle cannot pass the keyword `fix`, and worker processes send errors back by pickle.
        return _rebuild, (self.what, self.fix)


def shortened(text: str) -> str:
    """A message without the middle of what is too long to read. Files from outside may hold words of megabytes."""
    if len(text) <= MOST_IN_WORD:
        return text
    text = LONG_WORD.sub(lambda word: f"{word[0][:MOST_SHOWN]}… ({len(word[0])} characters)", text)
    return text if len(text) <= MOST_IN_TEXT else f"{text[: MOST_IN_TEXT // 2]} … ({len(text)} characters)"


def _rebuild(what: str, fix: str) -> UserError:
    return UserError(what, fix=fix)


def choice(name: str, value: object, allowed: Iterable[str]) -> None:
    """Refuse a value that is not one of the allowed words."""
    words = list(allowed)
    if value not in words:
        raise UserError(f"{name}={value!r} is not known", fix=f"use one of {', '.join(words)}")


def some(names: "list[str] | tuple[str, ...]", most: int = 6) -> str:
    """`a, b, c, … (12 in all)`: a list that is short enough for an error message."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names)} in all)"
