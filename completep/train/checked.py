"""What a result.json may hold, whoever wrote it: a digest only shows damage."""

from collections.abc import Callable, Mapping

STATUSES = ("done", "diverged", "hopeless")  # a search stops hopeless tasks early
LONGEST = 1e12  # seconds of a run
# Of a loss that is not 0. A run with a larger one has diverged. Of a smaller one, no share can be computed.
SMALLEST_LOSS, LARGEST_LOSS = 1e-100, 1e300


def _is_number(value: object, most: float = LARGEST_LOSS) -> bool:
    """Finite, not negative, and small enough to calculate with; or absent."""
    if isinstance(value, int):
        return not isinstance(value, bool) and 0 <= value < 2**63
    return value is None or (isinstance(value, float) and 0 <= value <= most)


def _is_loss(value: object) -> bool:
    return _is_number(value) and not (isinstance(value, float) and 0 < value < SMALLEST_LOSS)


# The fields of a result that reports use, and what they must be. All but the status may be absent, and a task of yours
# may write others.
FIELDS: dict[str, Callable[[object], bool]] = {
    "status": lambda value: value in STATUSES,
    "step": lambda value: isinstance(value, float) or _is_number(value),  # a script's own count
    "train_loss": _is_loss,
    "validation_loss": _is_loss,
    "loss": _is_loss,
    "tokens": _is_number,
    "seconds": lambda value: _is_number(value, LONGEST),
    "tokens_per_second": _is_number,
    "data_sha256": lambda value: isinstance(value, str),
}


def check_result(content: Mapping[str, object]) -> None:
    """Refuse the content of a result.json that no task writes, with a ValueError."""
    if "status" not in content:
        raise ValueError("it has no status")
    for name, fits in FIELDS.items():
        if name in content and not fits(content[name]):
            raise ValueError(f"its {name} is {_short(content[name])}")


def _short(value: object) -> str:
    if isinstance(value, int) and value >= 2**63:
        return "too large"
    return f"{value!r:.40}"
