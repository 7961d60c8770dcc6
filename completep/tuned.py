"""tuned.json: the result of a tuning, as a file that `plan` and `parametrize` take. It carries a digest of itself."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from completep.config import Run, Shape, parse_json, plain, sealed, structure, unsealed
from completep.errors import UserError
from completep.files import read_text, write_over

FORMAT = 1
SMALLEST, LARGEST = 1e-100, 1e100  # of a value that is not 0, so that products of a few values stay finite
# Settings that `plan` and `parametrize` take; others may also be words.
NUMBERS = ("lr", "std", "eps", "beta1", "beta2", "tau", "weight_decay", "steps")
MADE = "give a file that `completep tune` wrote"


@dataclass(frozen=True)
class TunedValue:
    """A value at the base, with its 90 % interval if there is one."""

    value: object  # a number, or a word
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class TunedValues:
    """The content of tuned.json."""

    values: dict[str, TunedValue]
    base: Shape
    rules: str
    verdict: str  # of the transfer to larger proxies
    why: str
    proxies: list[Shape]
    tuned: str  # the command, function or model
    scripts: dict[str, str] = field(default_factory=dict)  # name → sha256
    constants: dict[str, object] = field(default_factory=dict)  # values that all runs shared
    data_sha256: str | None = None
    run: Run | None = None  # the tuned run at the base, if the reference decoder was tuned
    format: int = FORMAT

    def number(self, name: str) -> float | None:
        """The tuned value or the constant of this name, if it is a number; otherwise None."""
        value = self.values[name].value if name in self.values else self.constants.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    @property
    def tau(self) -> float | None:
        """The timescale of weight decay, 1 / (η λ steps), if it is known."""
        lr, decay, steps = (self.number(name) for name in ("lr", "weight_decay", "steps"))
        if (tau := self.number("tau")) is not None:
            return tau
        return 1 / (lr * decay * steps) if lr and decay and steps else None

    def lr_of(self, names: Mapping[str, str]) -> dict[str, float]:
        """Role → multiplier of its learning rate. `names` maps each role to the name of its multiplier in a search."""
        searched = {role: number for role, name in names.items() if (number := self.number(name)) is not None}
        return {**({} if self.run is None else self.run.hyperparameters.lr_of), **searched}

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value.value}" for name, value in self.values.items())
        return f"{values}, tuned at {self.base.width} × {self.base.depth}, transfer {self.verdict}"


def is_tuned(text: str) -> bool:
    """Is this the content of a tuned.json, and not of another JSON file?"""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"values", "proxies", "tuned"} <= content.keys()


def write_tuned(path: Path, tuned: TunedValues) -> Path:
    return write_over(path, sealed(plain(tuned)))


def read_tuned(source: "TunedValues | Path | str") -> TunedValues:
    """Read a tuned.json. What was read already is returned as it is."""
    if isinstance(source, TunedValues):
        return source
    name = str(source)
    text = read_text(Path(source))
    if isinstance(parse_json(text, name, MADE), dict):
        try:
            text = json.dumps(unsealed(text))
        except ValueError as error:
            raise UserError(f"{name} is damaged, was edited, or is not a tuned.json: {error}", fix=MADE) from error
    tuned = structure(json.loads(text), TunedValues, name, MADE)
    if tuned.format != FORMAT:
        raise UserError(f"{name} has format {tuned.format}; this version reads {FORMAT}", fix=MADE)
    numbers = {**{key: value.value for key, value in tuned.values.items()}, **tuned.constants}
    for key, number in numbers.items():
        if isinstance(number, (int, float)) and number and not SMALLEST <= abs(number) <= LARGEST:
            raise UserError(f"{name}: {key} is {str(number)[:20]}, not a number that a run can have", fix=MADE)
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number and (key in NUMBERS or key.startswith("lr_of_") or not isinstance(number, str)):
            raise UserError(f"{name}: {key} is {str(number)[:20]!r}, not a number", fix=MADE)
    return tuned
