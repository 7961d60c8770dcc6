"""The one exception a user ever needs to read."""


class UserError(ValueError):
    """Something in the user's input is wrong: `what` says it with her own words in it, `fix` says what to do."""

    def __init__(self, what: str, *, fix: str) -> None:
        super().__init__(f"{what}\n  fix: {fix}")
        self.what = what
        self.fix = fix

    def __reduce__(self) -> "tuple[object, ...]":
        return _again, (self.what, self.fix)  # so that it survives the way back from another process


def some(names: "list[str] | tuple[str, ...]", most: int = 6) -> str:
    """`a, b, c, … (12 in all)`: a list short enough for an error message."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names)} in all)"


def _again(what: str, fix: str) -> UserError:
    return UserError(what, fix=fix)
