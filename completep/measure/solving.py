"""From surveys to exponents of the settings: what learning rate, epsilon and init must do as the model grows.

A sign-like step lowers the loss by η·Σ|g|, so the learning rate goes as 1 / Σ|g|. Epsilon goes as RMS(g). The starting
size of a matrix makes its gain follow the forward rules. Weight decay keeps η·λ.

An exponent is taken only if its whole interval lies within REACH of one multiple of 1/2 and is narrower than NARROW.
REACH was set on the reference decoder (docs/derive.md). Gradients that cancel in part at init, such as a router's,
align in training and change their exponent. So the exponent after some steps must not contradict the one at init. Where
it does, it is taken itself if it is precise enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import polars as pl

from completep.measure.survey import Survey
from completep.measure.words import Word
from completep.stats import Slope, log_slope

STEP = 0.5  # exponents are multiples of it
REACH = 0.16
NARROW = 0.25
SAME = 0.2  # an exponent that moves by more than this in training has not settled
OTHER = 0.4  # a later interval that reaches so far from the exponent at init could be the next multiple

SettingName = Literal["init", "learning rate", "epsilon"]
SETTINGS: tuple[SettingName, ...] = ("init", "learning rate", "epsilon")
Reason = Literal["too wide", "not settled"]  # more seeds, or more steps, could give a value
TOO_WIDE = "the interval is too wide"
RANDOM = "its gradient is a random sum, which training aligns; give more steps"


@dataclass(frozen=True)
class Exponent:
    """setting ∝ size^exponent, for one parameter and one axis."""

    parameter: str  # template
    setting: SettingName
    axis: str
    measured: Slope | None  # at init; None where it cannot be measured
    later: Slope | None = None  # after some training steps
    value: float | None = None  # the multiple of 1/2 that it is
    why: str = ""  # the reason, if there is none
    reason: Reason | None = None  # the same, where something depends on it

    @property
    def word(self) -> Word:
        return "INCONCLUSIVE" if self.value is None else "PASS"

    @property
    def used(self) -> Slope | None:
        """The slope that the value was read from."""
        if self.value is None or self.measured is None or self.later is None:
            return self.measured
        return self.measured if abs(self.measured.value - self.value) <= REACH else self.later

    @property
    def estimate(self) -> float:
        """The best number for a provisional rule."""
        return self.value if self.value is not None else 0.0 if self.measured is None else self.measured.value


def solve(first: Survey, again: Survey, parameters: Sequence[str], rules: str, axes: Sequence[str]) -> list[Exponent]:
    """All exponents at init. `first` has constant starting sizes, `again` those that `first` asks for."""
    return [
        _solve(first if setting == "init" else again, parameter, setting, axis, rules)
        for parameter in parameters
        for setting in SETTINGS
        for axis in axes
    ]


def _solve(survey: Survey, parameter: str, setting: SettingName, axis: str, rules: str) -> Exponent:
    rows = survey.along(survey.tensors, axis, rules).filter(pl.col("template") == parameter)
    if setting == "init":
        return _init(rows, parameter, axis)
    slope, why = fit(rows, axis, setting)
    return snapped(Exponent(parameter, setting, axis, slope, why=why))


def _init(rows: pl.DataFrame, parameter: str, axis: str) -> Exponent:
    """A matrix is drawn with the size that its gain needs. Any other parameter keeps its constructor's values."""
    if rows["gain"].null_count():  # it starts at zero
        return Exponent(parameter, "init", axis, Slope(0.0, 0.0, 0.0), value=0.0)
    slope, why = fit(rows, axis, "init")
    exponent = snapped(Exponent(parameter, "init", axis, slope, why=why))
    if rows["drawn"][0] or exponent.value == 0.0 or slope is None:
        return exponent
    grows = f"as {axis}^{-slope.value:+.2f}"
    why = f"the values that its constructor gives it change with the size, {grows}"
    return replace(exponent, value=None, why=why, reason=None)


VALUES = {  # what is proportional to the setting that a parameter needs
    "init": pl.col("expected_gain") / pl.col("gain"),
    "learning rate": pl.col("lr") / pl.col("pull"),
    "epsilon": pl.col("eps") / pl.col("eps_ratio"),
}


def fit(rows: pl.DataFrame, axis: str, setting: SettingName) -> tuple[Slope | None, str]:
    """(the exponent that a setting needs, or None and the reason)."""
    if setting != "init" and (idle := rows.filter(pl.col("idle") > 0)[axis].sort().to_list()):
        return None, f"routing sends nothing to some experts at {axis} {idle[0]}: give a larger batch"
    points = rows.select("seed", size=axis, value=VALUES[setting])
    if points["value"].null_count() == len(points):
        return None, "no gradient reaches it"
    if points["value"].null_count():
        sizes = points.filter(pl.col("value").is_null())["size"].sort().to_list()
        return None, f"no gradient reaches it at {axis} {sizes[0]}"
    broken = points.filter(~pl.col("value").is_finite())["size"].sort().to_list()
    if broken:
        return None, f"its gradient is not finite at {axis} {broken[0]}"
    slope = log_slope(points["size"].to_numpy(), points["value"].to_numpy(), points["seed"].to_numpy())
    return (slope, "") if np.isfinite([slope.low, slope.high]).all() else (None, "its gradient is 0 at some sizes")


def snapped(exponent: Exponent) -> Exponent:
    """With its value, or with the reason why there is none."""
    slope = exponent.measured
    if slope is None:
        return exponent
    value = nearest(slope)
    if value is not None and not _is_random_sum(exponent, value):
        return replace(exponent, value=value)
    if value is not None:
        return replace(exponent, why=f"{slope.value:+.2f} is half-way: {RANDOM}")
    reason, why = _why_not(slope, exponent.axis)
    return replace(exponent, why=why, reason=reason)


def _is_random_sum(exponent: Exponent, value: float) -> bool:
    """True if a gradient sums over the size with random signs: then Σ|g| and RMS(g) go as its root.

    In training the terms align, and the exponent becomes a whole number. In depth, alpha < 1 makes half numbers too.
    """
    return exponent.setting != "init" and exponent.axis != "depth" and value != round(value)


def nearest(slope: Slope) -> float | None:
    """The one multiple of 1/2 that an interval is about."""
    value = STEP * round(slope.value / STEP) + 0.0
    near = slope.low >= value - REACH and slope.high <= value + REACH
    return value if near and slope.high - slope.low < NARROW else None


def _why_not(slope: Slope, axis: str) -> tuple[Reason | None, str]:
    if slope.high - slope.low >= NARROW:
        return "too wide", f"{TOO_WIDE}: give more seeds, a larger batch, or a wider range of {axis}"
    if abs(slope.value / STEP - round(slope.value / STEP)) * STEP < REACH:
        why = f"{TOO_WIDE} for the distance to a multiple of 1/2: give more seeds, or a wider range of {axis}"
        return "too wide", why
    causes = f"the forward pass may hold a factor of the size, or {axis} is small"
    return None, f"{slope.value:+.2f} is no multiple of 1/2: {causes}"


def confirmed(exponents: Sequence[Exponent], late: Survey, rules: str, steps: int) -> list[Exponent]:
    """The exponents with what they are after some training steps."""
    by_key: dict[tuple[str, str, str], Exponent] = {}
    for exponent in exponents:
        key = exponent.parameter, exponent.axis, exponent.setting
        by_key[key] = exponent
        if exponent.setting == "init" or exponent.measured is None:
            continue
        late_rows = late.along(late.tensors, exponent.axis, rules).filter(pl.col("template") == exponent.parameter)
        later, why = fit(late_rows, exponent.axis, exponent.setting)
        if later is None:
            by_key[key] = replace(exponent, value=None, why=f"after {steps} steps, {why}", reason=None)
        else:
            by_key[key] = _confirmed(replace(exponent, later=later), later, steps)
    for parameter, axis, setting in list(by_key):
        if setting == "learning rate":
            pair = (parameter, axis, "learning rate"), (parameter, axis, "epsilon")
            by_key |= dict(zip(pair, _agreed(by_key[pair[0]], by_key[pair[1]], steps), strict=True))
    return list(by_key.values())


def _confirmed(exponent: Exponent, later: Slope, steps: int) -> Exponent:
    """The exponent at init is precise and the one after training is aligned. A value counts only if both agree."""
    value, aligned = exponent.value, nearest(later)
    aligned = None if aligned is None or _is_random_sum(exponent, aligned) else aligned
    if (
        value is not None
        and abs(later.value - value) < SAME
        and value - OTHER < later.low <= later.high < value + OTHER
    ):
        return exponent
    if aligned is not None:
        return replace(exponent, value=aligned, why="", reason=None)
    return _unsettled(exponent, later, steps)


def _unsettled(exponent: Exponent, later: Slope, steps: int) -> Exponent:
    """Without a value, because it changes in training."""
    start = "not measured" if exponent.measured is None else f"{exponent.measured.value:+.2f}"
    trend = f"{start} at init, {later.value:+.2f} after {steps} steps"
    if later.high - later.low >= NARROW:
        why = f"{trend}, where {TOO_WIDE}: give more seeds or a larger batch"
        return replace(exponent, value=None, why=why, reason="too wide")
    why = f"{trend}: it has not settled; give more steps"
    return replace(exponent, value=None, why=why, reason="not settled")


def _agreed(lr: Exponent, eps: Exponent, steps: int) -> tuple[Exponent, Exponent]:
    """Both come from one gradient, so if the exponent of one moves in training, that of the other does too."""
    pair = [lr, eps]
    moved = [e.later is not None and e.used != e.measured for e in pair]
    for i, (exponent, other) in enumerate(((lr, eps), (eps, lr))):
        if exponent.value is None or exponent.later is None or moved[i]:
            continue
        if moved[1 - i] and (aligned := nearest(exponent.later)) is not None:
            pair[i] = replace(exponent, value=aligned)
        elif moved[1 - i] or (other.value is None and other.reason == "not settled"):
            pair[i] = _unsettled(exponent, exponent.later, steps)
    return pair[0], pair[1]


def undecided(exponents: Sequence[Exponent]) -> bool:
    """True if more seeds could decide something that is open."""
    return any(e.reason == "too wide" for e in exponents)
