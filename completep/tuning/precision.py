"""How many values and seeds a PASS needs, from the noise of the runs so far.

The number of seeds must not depend on the verdict: adding seeds until the verdict is PASS would make it worthless. So
the number of values and seeds follows from two quantities that do not depend on where the minima are:

- the noise, which is the residual of the log losses after a level per value and a level per seed. It is independent of
  the means of the values. A few runs give a poor estimate, so the upper end of its interval is used;
- the steepness of the bowl.

They give the end of the regret's interval if there were no drift. If that end is at most a third of the allowed regret,
a PASS is likely: the estimate lies within 1.2 standard errors in three of four cases, the interval reaches about 1.7
further, and (1.7 / 2.9)² is a third. If this needs more seeds than are allowed, all allowed seeds are run, provided
that a PASS is then as likely as not (the end is at half of the allowed regret). Otherwise no seed is added, and the
advice says how many a PASS would need. tests/tuning/test_precision.py measures both kinds of error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from completep.config import Shape
from completep.measure.curves import MOST_REGRET, curve, judge_transfer
from completep.stats import Floats, fit_bowl, noise_beside_levels

LIKELY, EVEN = 1 / 3, 1 / 2  # shares of the allowed regret at which the interval ends
SURE = 0.8  # chance that the noise is not larger than the value that is used
WIDEST = 2  # values on either side of the best; a fit does not use more
FURTHEST = 200  # largest number of seeds that is named


@dataclass(frozen=True)
class Design:
    """What to run on one curve: the best value and `reach` values on either side, with `seeds` seeds each."""

    reach: int = 1
    seeds: int = 3

    def __or__(self, other: "Design") -> "Design":
        """The design that contains both."""
        return Design(max(self.reach, other.reach), max(self.seeds, other.seeds))


@dataclass(frozen=True)
class Advice:
    """What the noise requires."""

    noise: float  # of one run, in % of its loss
    design: Design  # what to run
    seeds: int | None  # number that makes a PASS likely, if there is no drift; None if it is above `FURTHEST`

    @property
    def likely(self) -> bool:
        return self.seeds is not None and self.seeds <= self.design.seeds

    def __str__(self) -> str:
        needs = f"about {self.seeds} seeds" if self.seeds else f"more than {FURTHEST} seeds"
        if self.likely:
            needs = f"{self.design.seeds} seeds of {2 * self.design.reach + 1} values"
        return f"the noise of a run is {self.noise:.2g} % of its loss: a PASS needs {needs} at every shape"


def advise(
    frame: pl.DataFrame, name: str, base: Shape, axis: Sequence[float], first: Design, most: int
) -> Advice | None:
    """Advice from one curve per shape, whose column `name` holds places on `axis`.

    None without a bowl at the base or an estimate of the noise. A shape without runs is taken to be like the base.
    """
    curves = {
        Shape(*key): curve(part, name) for key, part in frame.partition_by(["width", "depth"], as_dict=True).items()
    }
    if base not in curves:
        return None
    bowls = {shape: fit_bowl(*points) for shape, points in curves.items()}
    noise, start = noise_beside_levels([losses for _, losses in curves.values()]), bowls[base]
    if noise is None or start is None or not start.interior:
        return None
    steep = {s: b.curvature / 2 if b is not None and b.interior else start.curvature / 2 for s, b in bowls.items()}
    diverged = {s: {float(v) for v, row in zip(x, losses, strict=True) if np.isinf(row).any()}
                for s, (x, losses) in curves.items()}  # fmt: skip
    guess = Guess(start.place, steep, diverged, base, np.log2(np.sort(np.asarray(axis, float))), noise.at_most(SURE))
    last = Design(WIDEST, max(most, first.seeds))
    designs = [first, *(Design(WIDEST, n) for n in range(first.seeds, last.seeds + 1))]
    chosen = next((d for d in designs if guess.ends(d) <= LIKELY * MOST_REGRET), None)
    if chosen is not None:
        return Advice(100 * noise.value, chosen, chosen.seeds)
    needed = next((n for n in _growing(last.seeds) if guess.ends(Design(WIDEST, n)) <= LIKELY * MOST_REGRET), None)
    return Advice(100 * noise.value, last if guess.ends(last) <= EVEN * MOST_REGRET else first, needed)


def _growing(start: int) -> list[int]:
    """Numbers of seeds to try, a fifth apart. They are only named, never run."""
    counts = [start + 1]
    while counts[-1] < FURTHEST:
        counts.append(max(counts[-1] + 1, round(1.2 * counts[-1])))
    return counts


@dataclass(frozen=True)
class Guess:
    """Bowls without a drift, with the steepness and the noise that were measured."""

    place: float  # log2 of the optimum, at every shape
    steep: dict[Shape, float]
    diverged: dict[Shape, set[float]]
    base: Shape
    axis: Floats
    noise: float

    def ends(self, design: Design) -> float:
        """The upper end of the regret's interval, in %, with this design."""
        best = int(abs(self.axis - self.place).argmin())
        x = self.axis[max(0, best - design.reach) : best + design.reach + 1]
        if len(x) < 3 or design.seeds < 2:
            return np.inf
        shapes = (
            self.steep
            if len(self.steep) > 1
            else {**self.steep, Shape(self.base.width, 4 * self.base.depth): self.steep[self.base]}
        )
        rows = [row for shape, steep in shapes.items() for row in self._rows(shape, steep, x, design.seeds)]
        judged = judge_transfer(pl.DataFrame(rows), "place", self.base)[0]
        return max(s.regret_interval.high if s.regret_interval else np.inf for s in judged.shapes)

    def _rows(self, shape: Shape, steep: float, x: Floats, seeds: int) -> list[dict[str, float]]:
        """Losses whose means lie on the bowl, and whose residual has exactly the variance of the noise."""
        along, over = np.arange(len(x)) - (len(x) - 1) / 2, np.arange(seeds) - (seeds - 1) / 2
        pattern = np.outer(along / np.linalg.norm(along), over / np.linalg.norm(over))
        size = self.noise * ((len(x) - 1) * (seeds - 1)) ** 0.5
        logs = steep * (x - self.place)[:, None] ** 2 + size * pattern
        lost = self.diverged.get(shape, set())
        return [
            {"width": shape.width, "depth": shape.depth, "place": 2.0 ** x[i], "seed": s,
             "loss": np.nan if any(abs(x[i] - v) < 1e-9 for v in lost) else float(np.exp(logs[i, s]))}
            for i in range(len(x)) for s in range(seeds)
        ]  # fmt: skip
