"""The one exception that users need to read."""

from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the input. `what` names the input as the user gave it, `fix` says what to do about it."""

    def __init__(self, what: str, *, fix: str) -> None:
        super().__init__(f"{what}\n  fix: {fix}")
        self.what = what
        self.fix = fix

    def __reduce__(self) -> "tuple[object, ...]":
        # Pickle cannot pass the keyword `fix`, and worker processes send errors back by pickle.
        return _rebuild, (self.what, self.fix)


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
