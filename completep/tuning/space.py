"""The search space: one dimension per hyperparameter, each a finite list of values, parsed from text.

    lr=2^-10..2^-5              every octave from 2^-10 to 2^-5
    lr=2^-10..2^-5:0.5          every half octave
    dropout=0..0.3:linear:0.1   a line, in steps of 0.1
    activation=gelu,relu        choices

The lists are finite, so two searches over the same values share their runs.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from completep.errors import UserError
from completep.sweep.task import Value
from completep.units import parse_number, power

Kind = Literal["octaves", "linear", "choice"]
EXAMPLE = "write NAME=2^-10..2^-5, NAME=0..0.3:linear:0.1 or NAME=VALUE,VALUE"
MOST = 1000  # values of one dimension; more is a typing mistake
SMALLEST_SIZE, LARGEST_SIZE = 1e-100, 1e100  # as in tuned.json, so that products and ratios of values stay finite
LARGEST = 2**53  # up to here, a float holds every whole number
STEPS = 5  # values of a linear range without a step
# Names that a template or a trial has already; no dimension can be called like this.
SHAPE_NAMES = ("width", "depth", "base_width", "base_depth", "m_N", "m_L")
OF_TRIALS = ("names", "shape", "base", "report", "readings", "hopeless")
TAKEN = (*SHAPE_NAMES, *OF_TRIALS, "seed", "folder", "rules", "loss", "status", "run", "seconds")


@dataclass(frozen=True)
class Dimension:
    """One hyperparameter and the values it may have, in order."""

    name: str
    kind: Kind
    values: tuple[Value, ...]

    @property
    def ordered(self) -> bool:
        """Are the values numbers, so that there is a smaller and a larger one?"""
        return all(isinstance(v, (int, float)) for v in self.values)

    @property
    def whole(self) -> bool:
        """Are all values whole numbers, such as batch sizes? Then the best is one of them."""
        return self.ordered and all(float(v).is_integer() for v in self.values)

    @property
    def bracketed(self) -> bool:
        """Can a minimum be bracketed? Words have no order, and two values have none between them."""
        return self.ordered and len(self.values) > 2

    @property
    def on_octaves(self) -> bool:
        return self.ordered and self.kind != "linear" and all(float(v) > 0 for v in self.values)

    def place(self, value: Value) -> float:
        """A positive number whose log2 is the position of the value: in octaves, or in steps of a linear range."""
        if self.on_octaves:
            return float(value)
        if self.kind == "linear" and isinstance(value, (int, float)):
            first, second = float(self.values[0]), float(self.values[1])
            return float(2 ** ((float(value) - first) / (second - first)))
        return float(2 ** self.values.index(value))

    def at(self, place: float) -> float:
        """The inverse of `place`, also for places between two values."""
        if not math.isfinite(place) or place <= 0:
            return place
        if self.kind == "choice" or self.whole:  # there is nothing between choices
            return float(self.near(place))
        if self.on_octaves:
            return place
        first, second = float(self.values[0]), float(self.values[1])
        return first + math.log2(place) * (second - first)

    def near(self, place: float) -> Value:
        """The value that is nearest to a place."""
        return min(self.values, key=lambda v: abs(math.log2(self.place(v) / place)))

    def on_axis(self, value: Value) -> Value:
        """The value as a coordinate of a trial's point: a number's place, or the word."""
        return self.place(value) if self.ordered else value

    def at_point(self, point: Mapping[str, Value]) -> Value:
        """The inverse of `on_axis`."""
        return self.near(float(point[self.name])) if self.ordered else point[self.name]

    def show(self, value: Value) -> str:
        return power(float(value)) if self.on_octaves else f"{value:g}" if isinstance(value, float) else str(value)

    def describe(self) -> str:
        """`lr = 2^-10 … 2^-5 (6 values)`."""
        shown = [self.show(v) for v in self.values]
        ends = f"{shown[0]} … {shown[-1]}" if self.ordered and len(shown) > 3 else ", ".join(shown)
        return f"{self.name} = {ends} ({len(shown)} values)"


def parse_space(space: "Mapping[str, str | Sequence[Value]] | Sequence[str]") -> tuple[Dimension, ...]:
    """From {"lr": "2^-10..2^-5"}, {"act": ["gelu", "relu"]} or ["lr=2^-10..2^-5"]."""
    if not isinstance(space, Mapping):
        space = dict(_split(word) for word in space)
    if not space:
        raise UserError("nothing to search: the space is empty", fix="give a range such as lr=2^-10..2^-5")
    return tuple(parse_dimension(name, values) for name, values in space.items())


def _split(word: str) -> tuple[str, str]:
    name, equals, text = word.partition("=")
    if not equals:
        raise UserError(f"{word!r} is not a range", fix=EXAMPLE)
    return name.strip(), text


def parse_dimension(name: str, values: "str | Sequence[Value]") -> Dimension:
    check_name(name)
    if not isinstance(values, str):
        return _several(name, Dimension(name, "choice", tuple(values)))
    low, dots, rest = values.partition("..")
    if dots:
        if rest.startswith("."):
            raise UserError(f"{name}={values!r} has three dots", fix=f"write {name}={low}..{rest.lstrip('.')}")
        return _several(name, _range(name, values, low, rest))
    words = [w.strip() for w in values.split(",")]
    if not all(words):
        raise UserError(f"{name}={values!r} has an empty value", fix=EXAMPLE)
    return _several(name, Dimension(name, "choice", tuple(_value(w) for w in words)))


def is_value(value: object) -> bool:
    """A word or a finite number. No argument of a command can have a NUL character."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= LARGEST
    if isinstance(value, str):
        return "\0" not in value
    return isinstance(value, float) and math.isfinite(value)


def check_name(name: str) -> None:
    if not name.isidentifier():
        raise UserError(f"{name!r} cannot be the name of a hyperparameter", fix="use letters, digits and underscores")
    if name in TAKEN:
        raise UserError(f"{name!r} is a reserved name, so it cannot be searched or set", fix="give it another name")


def _several(name: str, dimension: Dimension) -> Dimension:
    values = tuple(dict.fromkeys(dimension.values))
    if len(values) > MOST:
        raise UserError(f"{name} has {len(values)} values", fix=f"give at most {MOST}")
    for value in values:
        if not is_value(value):
            raise UserError(f"{name}={value!r} is not a finite number or a word", fix=EXAMPLE)
        if not isinstance(value, str) and value and not SMALLEST_SIZE <= abs(value) <= LARGEST_SIZE:
            raise UserError(
                f"{name}={value!r} is not a value that a run can have",
                fix=f"give 0, or numbers from {SMALLEST_SIZE:g} to {LARGEST_SIZE:g}",
            )
    if dimension.ordered:
        values = tuple(sorted(values))
    if len(values) < 2:
        shown = ", ".join(map(str, values)) or "no value"
        raise UserError(
            f"{name} has only one value ({shown}), so there is nothing to search",
            fix=f"give a range such as {name}=2^-10..2^-5, or make it a constant (set: {name}={shown})",
        )
    return Dimension(name, dimension.kind, values)


def _value(text: str) -> Value:
    """A number, if the text is one (2^-8, 3, 0.1); otherwise the text."""
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    try:
        return parse_number(text)
    except UserError:
        return text


def _range(name: str, text: str, low: str, rest: str) -> Dimension:
    high, *options = rest.split(":")
    first, last = parse_number(low, name), parse_number(high, name)
    if max(abs(first), abs(last)) > LARGEST_SIZE:
        raise UserError(f"{name}={text!r} has no values that a run can have", fix=f"stay below {LARGEST_SIZE:g}")
    kind: Kind = "octaves"
    if options and options[0].strip() in ("linear", "octaves"):
        kind = "linear" if options.pop(0).strip() == "linear" else "octaves"
    if len(options) > 1:
        raise UserError(f"{name}={text!r} has too many parts", fix=EXAMPLE)
    if first > last:
        raise UserError(f"{name}={text!r} ends below its start", fix=f"write {name}={high}..{low}")
    if kind == "octaves" and first <= 0:
        raise UserError(
            f"{name}={text!r} starts at {first:g}, but a range in octaves must be above 0",
            fix=f"start above 0, or write {name}={low}..{high}:linear",
        )
    step = parse_number(options[0], f"the step of {name}") if options else None
    return Dimension(name, kind, _grid(name, text, kind, first, last, step))


def _grid(name: str, text: str, kind: Kind, first: float, last: float, step: float | None) -> tuple[Value, ...]:
    if kind == "octaves":
        first, last, step = math.log2(first), math.log2(last), 1.0 if step is None else step
    elif step is None:
        step = (last - first) / (STEPS - 1) or 1.0
    if not step > 0 or (last - first) / step > MOST:
        raise UserError(
            f"{name}={text!r}: a step of {step:g} does not make 2 to {MOST} values",
            fix=f"leave the step out, or give one above 0 such as {name}={text.rpartition(':')[0]}:0.5",
        )
    count = int((last - first) / step + 1e-9) + 1
    places = [first + i * step for i in range(count)]
    return tuple(_clean(2.0**p) if kind == "octaves" else round(p, 12) for p in places)


def _clean(value: float) -> float:
    """An exact power of two, or the value rounded to 12 digits: a logarithm and its inverse add rounding errors."""
    octave = math.log2(value)
    return 2.0 ** round(octave) if abs(octave - round(octave)) < 1e-9 else float(f"{value:.12g}")
