"""Sweeps whose truth is known, with the bowls and the noise of the recorded ones: how often do intervals cover?"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl

from completep.compute.laws import PowerLaw, fit_power_law, flop_savings, loss_increase, savings_interval
from completep.measure.curves import curve
from completep.stats import drift_interval, fit_bowl, regret_at

RESULTS = Path(__file__).parents[2] / "docs" / "results"
Truth = Callable[[np.ndarray], np.ndarray]  # log2 of the value → log loss


@cache
def recorded(study: str, column: str, kind: str = "quartic") -> Mapping[tuple[str, int], Truth]:
    """(rules, depth) → a smooth curve through the recorded mean log losses: a quartic, or a smoothing spline."""
    from scipy.interpolate import make_smoothing_spline

    frame = pl.read_csv(RESULTS / study / "runs.csv", infer_schema_length=None)
    truths = {}
    for (rules, depth), part in sorted(frame.partition_by("rules", "depth", as_dict=True).items()):
        x, losses = curve(part, column)
        means = np.log(losses).mean(1)
        quartic = np.polynomial.Polynomial.fit(x, means, 4)
        truths[rules, depth] = quartic if kind == "quartic" else make_smoothing_spline(x, means, lam=0.3)
    base = truths.pop(("completep", 2))
    return {("completep", 2): base} | {key: f for key, f in truths.items() if key[1] > 2}  # at depth 2 all are one


def lopsided(place: float, height: float = 0.7, bend: float = 0.01, right: float = 0.8, left: float = 0.3) -> Truth:
    """Exponential walls, steeper to the right: a bowl that is no polynomial."""

    def f(x: np.ndarray) -> np.ndarray:
        u = x - place
        walls = left * np.exp(right * u) + right * np.exp(-left * u) - right - left
        return height + 2 * bend * walls / (right * left * (right + left))

    return f


def scaled(truth: Truth, factor: float, low: float, high: float) -> Truth:
    """The same bowl, flatter or sharper."""
    place = lowest(truth, low, high)
    return lambda x: truth(np.asarray(place)) + factor * (truth(x) - truth(np.asarray(place)))


def lowest(truth: Truth, low: float, high: float) -> float:
    x = np.linspace(low, high, 20001)
    return float(x[truth(x).argmin()])


@dataclass(frozen=True)
class Noise:
    """Of log losses: what a seed has in common over all values, and what it has not."""

    seed: float = 0.02
    residual: float = 0.005
    tails: bool = False  # Student's with three degrees of freedom, instead of normal
    growing: float = 0.0  # more of it per octave from the optimum
    missing: float = 0.0  # share of the runs that were not done

    def losses(self, rng: np.random.Generator, truth: Truth, x: np.ndarray, seeds: int) -> np.ndarray:
        shape = len(x), seeds
        e = rng.standard_t(3, shape) / 3**0.5 if self.tails else rng.standard_normal(shape)
        e = e * (1 + self.growing * abs(x - lowest(truth, x[0], x[-1])))[:, None]
        logs = truth(x)[:, None] + self.seed * rng.standard_normal(seeds) + self.residual * e
        lost = (rng.random(shape) < self.missing) & (np.arange(seeds) > 0)  # one seed is whole
        return np.where(lost, np.nan, np.exp(logs))


def transfer_coverage(base: Truth, here: Truth, x: np.ndarray, seeds: int, noise: Noise, draws: int, rng) -> Counter:
    """How often the intervals of the optimum, the drift and the regret hold the truth, of how many."""
    start, end = (lowest(f, x[0], x[-1]) for f in (base, here))
    rise = float(here(np.asarray(start)) - here(np.asarray(end)))
    counts: Counter = Counter()
    for _ in range(draws):
        losses, others = noise.losses(rng, base, x, seeds), noise.losses(rng, here, x, seeds)
        one, two = fit_bowl(x, losses), fit_bowl(x, others)
        if one is None or two is None or not (one.interior and two.interior):
            counts["no interval"] += 1
            continue
        regret, drift = regret_at(one.estimate, x, others, two), drift_interval(one, two)
        for name, value, interval in (
            ("optimum", end, two.optimum()),
            ("drift", end - start, drift),
            ("regret", rise, regret.interval(drift=drift) if regret is not None else None),
        ):
            if interval is not None:
                counts[name, "all"] += 1
                counts[name, "held"] += interval.low - 1e-9 <= value <= interval.high + 1e-9
    return counts


def law_coverage(sizes: int, seeds: int, noise: Noise, misfit: float, gap: float, draws: int, rng) -> Counter:
    """The same for a power law through `sizes` budgets a factor of 4 apart, and for what the last size saves."""
    truth, flops = PowerLaw(1e26, 0.0554), 1e18 * 4.0 ** np.arange(sizes)
    saved = float(flop_savings(loss_increase(np.exp(gap), 1.0), 0.0, truth.b))
    counts: Counter = Counter()
    for _ in range(draws):
        level = noise.seed * rng.standard_normal(seeds)  # a seed's luck is common to all sizes and rules
        bent = np.log(truth.loss(flops)) + misfit * rng.standard_normal(sizes)
        logs = bent[:, None] + level + noise.residual * rng.standard_normal((sizes, seeds))
        reference = bent[-1] + gap + level + noise.residual * rng.standard_normal(seeds)
        losses = np.exp(logs)
        if (np.diff(losses.mean(1)) >= 0).any():
            counts["no interval"] += 1
            continue
        law = fit_power_law(np.repeat(flops, seeds), losses.ravel(), np.tile(np.arange(seeds), sizes))
        interval = savings_interval(np.exp(reference), losses[-1], flops[-1], law)
        for name, value, found in (("exponent", truth.b, law.b_interval), ("savings", saved, interval)):
            counts[name, "all"] += 1
            counts[name, "held"] += value in found
    return counts


def share(counts: Counter, name: str) -> float:
    return counts[name, "held"] / counts[name, "all"]
