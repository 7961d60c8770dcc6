"""From coordinates to PASS, FAIL or INCONCLUSIVE: log–log slopes with intervals, compared with what theory allows.

Desideratum 1: the stream and its change stay of order one. Desideratum 2: every role inside the blocks keeps moving the
last stream by an amount of order one, all blocks together. So the ideal slope is 0. The allowed range is wider, because
the sizes that can be run are finite:

- At init the stream of CompleteP falls towards the embedding's own size (slope -1/2 in the range that can be run), and
  the effect of any update on it falls too. A role's effect counts as vanishing only below FALL.
- The embedding's effect falls by design, logits at init decay with width, and the final norm's effect decays with them.
  For these, bounded is enough.

Calibrated on the reference decoder (docs/check.md): right rules give slopes from -0.32 to +0.06 over L = 2…32, the
weakest of the wrong ones +0.35.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from completep.measure.words import Axis, Word, worst
from completep.rules.table import Role
from completep.stats import Slope, log_slope

if TYPE_CHECKING:
    from completep.measure.grid import Coordinates

AXES: tuple[Axis, ...] = ("depth", "width")
RISE, FALL = 0.2, -0.5
OUTER_RISE, OUTER_FALL = 0.4, -0.7  # outside the blocks: few tensors to average over, so more noise
LEAST_SHAPES = 3
OF_THE_MODEL = ("stream", "logits")  # quantities of the whole model; every other one is the output of a branch


@dataclass(frozen=True)
class Finding:
    """One line of a check."""

    rules: str  # key
    axis: Axis
    desideratum: int
    quantity: str
    slope: Slope | None  # None where nothing could be fitted
    least: float | None  # the smallest slope allowed; None where falling is allowed
    most: float
    word: Word
    why: str
    role: str | None = None  # whose update it is about, if any


def judge_coordinates(coordinates: "Coordinates") -> list[Finding]:
    """Every quantity of every parameterization, along each axis that was varied."""
    findings = []
    for rules in coordinates.stream["rules"].unique(maintain_order=True):
        for axis in AXES:
            line = coordinates.along(axis, rules)
            if line.stream[axis].n_unique() > 1:
                findings += [_finding(rules, axis, q) for q in quantities(line.stream, line.roles, axis)]
    return findings


@dataclass(frozen=True)
class Quantity:
    """A number measured at several sizes, and the range its slope may lie in."""

    name: str
    desideratum: int
    points: pl.DataFrame  # size, seed, value
    least: float | None
    most: float
    hint: str = ""
    role: str | None = None


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
    branches = stream.filter(~pl.col("quantity").is_in(OF_THE_MODEL))
    for branch in branches["quantity"].unique(maintain_order=True):
        blocks = branches.filter((pl.col("quantity") == branch) & last)
        ratio = pl.col("rms").max() / pl.col("rms").median()
        spread = blocks.group_by(axis, "seed", maintain_order=True).agg(value=ratio)
        largest = blocks.filter(pl.col(axis) == pl.col(axis).max()).sort("rms")["layer"][-1]
        name, hint = f"largest over median block, {branch}", f"; the largest is block {largest}"
        yield Quantity(name, 1, points(spread, "value"), None, OUTER_RISE, hint)
    for name in roles["role"].unique(maintain_order=True):
        trait, effect = Role(name).trait, roles.filter(pl.col("role") == name)
        target = trait.acts_on
        label = f"{name} → {target}"
        if trait.inside:  # desideratum 2 is about these
            yield Quantity(label, 2, points(effect, target), FALL, RISE, role=name)
        else:
            least = OUTER_FALL if trait.start == "random" and target == "logits" else None
            yield Quantity(label, 1, points(effect, target), least, OUTER_RISE, role=name)


def _finding(rules: str, axis: Axis, q: Quantity) -> Finding:
    def finding(word: Word, why: str, slope: Slope | None = None) -> Finding:
        return Finding(rules, axis, q.desideratum, q.name, slope, q.least, q.most, word, why, q.role)

    points = q.points
    sizes = points["size"].unique().sort().to_list()
    still = points.filter(pl.col("value") == 0)["size"].unique().sort().to_list()
    if still:
        return finding("INCONCLUSIVE", f"nothing moved at {axis} {still[0]}: is it trained?")
    broken = points.filter(~pl.col("value").is_finite())["size"].unique().sort().to_list()
    if broken and broken[0] == sizes[0]:
        return finding("INCONCLUSIVE", f"not finite at {axis} {broken[0]} already: lower lr or std")
    if broken and q.role is None:
        return finding("FAIL", f"not finite from {axis} {broken[0]} on")
    if broken:  # a diverged run moves every role; the sizes before it tell which role is to blame
        points = points.filter(pl.col("size") < broken[0])
        sizes = [size for size in sizes if size < broken[0]]
    if len(sizes) < LEAST_SHAPES:
        return finding("INCONCLUSIVE", f"{len(sizes)} {axis}s are too few for a slope: give at least {LEAST_SHAPES}")
    slope = log_slope(points["size"].to_numpy(), points["value"].to_numpy(), points["seed"].to_numpy())
    if slope.low > q.most:
        return finding("FAIL", f"grows with {axis}{q.hint}", slope)
    if q.least is not None and slope.high < q.least:
        return finding("FAIL", f"vanishes with {axis}{q.hint}", slope)
    if slope.high <= q.most and (q.least is None or slope.low >= q.least):
        return finding("PASS", "", slope)
    return finding("INCONCLUSIVE", f"the interval exceeds the allowed range: give more seeds, or more {axis}s", slope)


def overall(findings: Iterable[Finding]) -> Word:
    return worst(f.word for f in findings)


def culprits(findings: Iterable[Finding]) -> list[str]:
    """What failed, roles first: they name the rule that is wrong."""
    failed = [f for f in findings if f.word == "FAIL"]
    return list(dict.fromkeys(f.quantity for f in sorted(failed, key=lambda f: f.role is None)))
