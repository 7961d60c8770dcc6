"""From what was measured to PASS, FAIL or INCONCLUSIVE: log–log slopes with intervals, against what the theory allows.

Desideratum 1: the stream and its change stay of order one. Desideratum 2: every role inside the blocks goes on moving the
last stream by an amount of order one, all blocks together. So a slope of 0 is wanted; what is allowed is wider, because the
sizes one can run are finite:

- at init CompleteP's stream falls towards the embedding's own size (slope -1/2 in the range one can run), and with it
  what any update does to it: a role's effect counts as vanishing only below FALL;
- the embedding's effect falls by design, logits at init decay with width, the final norm's effect with them: bounded is enough.

Calibrated on the reference decoder (docs/check.md): right rules come to slopes from -0.32 to +0.06 over L = 2…32, the weakest
of the wrong ones to +0.35.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from completep.measure.grid import Axis, Coordinates
from completep.rules.table import Role

AXES: tuple[Axis, ...] = ("depth", "width")
Word = Literal["PASS", "FAIL", "INCONCLUSIVE"]
LEVEL = 0.9
RISE, FALL = 0.2, -0.5
OUTER_RISE, OUTER_FALL = 0.4, -0.7  # outside the blocks: few tensors, so few numbers to average over, and noisier
LEAST_SHAPES = 3

MOVERS = (Role.HIDDEN, Role.HIDDEN_BIAS, Role.BLOCK_NORM, Role.QK_NORM)  # desideratum 2 is about these


@dataclass(frozen=True)
class Slope:
    """value ∝ size^slope, with an interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Finding:
    """One line of a check."""

    rules: str
    axis: Axis
    desideratum: int
    quantity: str
    slope: Slope | None  # None where nothing could be fitted
    least: float | None  # the smallest slope allowed; None where falling is allowed
    most: float
    word: Word
    why: str


def judge(found: Coordinates) -> list[Finding]:
    """Every quantity of every parameterization, along each axis that was varied."""
    findings = []
    for rules in found.stream["rules"].unique(maintain_order=True):
        for axis in AXES:
            line = found.along(axis, rules)
            if line.stream[axis].n_unique() > 1:
                findings += [_finding(rules, axis, q) for q in quantities(line.stream, line.roles, axis)]
    return findings


@dataclass(frozen=True)
class Quantity:
    """A number measured at several sizes, and how its slope is allowed to be."""

    name: str
    desideratum: int
    points: pl.DataFrame  # size, seed, value
    least: float | None
    most: float
    hint: str = ""


def quantities(stream: pl.DataFrame, roles: pl.DataFrame, axis: str) -> Iterator[Quantity]:
    last = pl.col("step") == pl.col("step").max()
    top = stream.filter(
        (pl.col("quantity") == "stream") & (pl.col("layer") == pl.col("layer").max().over("width", "depth"))
    )
    logits = stream.filter(pl.col("quantity") == "logits")

    def points(frame: pl.DataFrame, column: str) -> pl.DataFrame:
        return frame.select(size=pl.col(axis), seed="seed", value=column)

    yield Quantity("stream at init", 1, points(top.filter(pl.col("step") == 0), "rms"), None, RISE)
    yield Quantity("stream after training", 1, points(top.filter(last), "rms"), None, RISE)
    yield Quantity("change of the stream", 1, points(top.filter(last), "change"), FALL, RISE)
    yield Quantity("logits at init", 1, points(logits.filter(pl.col("step") == 0), "rms"), None, RISE)
    yield Quantity("change of the logits", 1, points(logits.filter(last), "change"), FALL, RISE)
    for branch in stream["quantity"].unique(maintain_order=True):
        if branch.startswith("branch "):
            each = stream.filter((pl.col("quantity") == branch) & last)
            spread = each.group_by(axis, "seed", maintain_order=True).agg(
                value=pl.col("rms").max() / pl.col("rms").median()
            )
            largest = each.filter(pl.col(axis) == pl.col(axis).max()).sort("rms")["layer"][-1]
            name, hint = f"largest over median block, {branch}", f"; the largest is block {largest}"
            yield Quantity(name, 1, points(spread, "value"), None, OUTER_RISE, hint)
    for role in roles["role"].unique(maintain_order=True):
        mine = roles.filter(pl.col("role") == role)
        if role in MOVERS:
            yield Quantity(f"{role} → stream", 2, points(mine, "stream"), FALL, RISE)
        elif role in (Role.EMBEDDING, Role.EMBEDDING_BIAS):
            yield Quantity(f"{role} → stream", 1, points(mine, "stream"), None, OUTER_RISE)
        else:
            least = OUTER_FALL if role == Role.UNEMBEDDING else None
            yield Quantity(f"{role} → logits", 1, points(mine, "logits"), least, OUTER_RISE)


def _finding(rules: str, axis: Axis, q: Quantity) -> Finding:
    def told(word: Word, why: str, slope: Slope | None = None) -> Finding:
        return Finding(rules, axis, q.desideratum, q.name, slope, q.least, q.most, word, why)

    points = q.points
    sizes = points["size"].unique().sort().to_list()
    still = points.filter(pl.col("value") == 0)["size"].unique().sort().to_list()
    if still:
        return told("INCONCLUSIVE", f"nothing moved at {axis} {still[0]}: is it trained?")
    broken = points.filter(~pl.col("value").is_finite())["size"].unique().sort().to_list()
    if broken and broken[0] == sizes[0]:
        return told("INCONCLUSIVE", f"not finite at {axis} {broken[0]} already: lower --lr or --std")
    if broken and "→" not in q.name:
        return told("FAIL", f"not finite from {axis} {broken[0]} on")
    if broken:  # when the run diverged, so did every role's weights; what was finite before tells whose fault it is
        points = points.filter(pl.col("size") < broken[0])
        sizes = [size for size in sizes if size < broken[0]]
    if len(sizes) < LEAST_SHAPES:
        return told("INCONCLUSIVE", f"{len(sizes)} {axis}s are too few for a slope: give at least {LEAST_SHAPES}")
    slope = fit(points["size"].to_numpy(), points["value"].to_numpy(), points["seed"].to_numpy())
    if slope.low > q.most:
        return told("FAIL", f"grows with {axis}{q.hint}", slope)
    if q.least is not None and slope.high < q.least:
        return told("FAIL", f"vanishes with {axis}{q.hint}", slope)
    if slope.high <= q.most and (q.least is None or slope.low >= q.least):
        return told("PASS", "", slope)
    return told("INCONCLUSIVE", f"the interval reaches past what is allowed: give more seeds, or more {axis}s", slope)


def fit(size: NDArray[np.float64], value: NDArray[np.float64], seed: NDArray[np.int64]) -> Slope:
    """Least squares in logarithms with a level of its own for every seed, and Student's interval."""
    x, y = np.log(size.astype(float)), np.log(np.maximum(value.astype(float), 1e-300))
    for s in np.unique(seed):
        x[seed == s] -= x[seed == s].mean()
        y[seed == s] -= y[seed == s].mean()
    slope = float(x @ y / (x @ x))
    freedom = len(x) - len(np.unique(seed)) - 1
    residual = y - slope * x
    error = float(np.sqrt(residual @ residual / max(freedom, 1) / (x @ x)))
    reach = error * student(freedom, LEVEL)
    return Slope(slope, slope - reach, slope + reach)


def student(freedom: int, level: float) -> float:
    """The two-sided quantile of Student's t, by the expansion of Abramowitz & Stegun 26.7.5 (1 % off at one degree)."""
    from statistics import NormalDist

    if freedom == 1:
        return float(np.tan(np.pi * level / 2))
    z, n = NormalDist().inv_cdf((1 + level) / 2), max(freedom, 1)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / n**power for power, term in enumerate(terms)))


def worst(words: Iterable[Word]) -> Word:
    """FAIL if anything fails; PASS only if everything passes."""
    found = set(words)
    if "FAIL" in found:
        return "FAIL"
    return "PASS" if found == {"PASS"} else "INCONCLUSIVE"


def overall(findings: list[Finding]) -> Word:
    return worst(f.word for f in findings)


def culprits(findings: list[Finding]) -> list[str]:
    """What failed, roles first: they name the rule that is wrong."""
    failed = [f for f in findings if f.word == "FAIL"]
    return list(dict.fromkeys(f.quantity for f in sorted(failed, key=lambda f: "→" not in f.quantity)))
