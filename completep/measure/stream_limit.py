"""The stream of an untrained residual network over depth, against the limit that the paper derives (App. C.1).

    h ← h + L^-alpha · W ReLU(h),   W ~ N(0, σ²/N)

At large width, H^L / H^0 = [1 + σ²/2 · L^(-2 alpha)]^L, with H = |h|² / N. As L grows this tends to 1 for alpha > 1/2
and to exp(σ²/2) for alpha = 1/2; below 1/2 it grows without bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from completep.errors import UserError
from completep.measure.pool import each
from completep.measure.words import Progress, Word, quiet
from completep.rules.table import Rules, display_name, rules_named
from completep.stats import LEVEL, Interval, mean_interval

NEAR = 0.05  # of the derived growth; at width 512 the finite width moves it by less


@dataclass(frozen=True)
class Growth:
    """H^L / H^0 at one depth, over seeds."""

    rules: str  # key
    depth: int
    measured: float
    interval: Interval
    derived: float
    word: Word


def derived_growth(rules: Rules, depth: int, std: float = 1.0) -> float:
    return (1 + std**2 / 2 * rules.branch(1, depth) ** 2) ** depth


def limit(rules: Rules, std: float = 1.0) -> float:
    """At infinite depth."""
    alpha = -rules.branch.depth
    return math.inf if alpha < 0.5 else math.exp(std**2 / 2) if alpha == 0.5 else 1.0


def log_growth(
    rules: Sequence[Rules], depths: Sequence[int], width: int, std: float, seed: int
) -> dict[tuple[str, int], float]:
    """log(H^L / H^0) by parameterization and depth, in float64. All parameterizations share the weights of a depth."""
    import torch

    logs: dict[tuple[str, int], float] = {}
    for depth in depths:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randn(width, 8, generator=generator, dtype=torch.float64)
        streams = [(r, first / first.square().mean().sqrt(), 0.0) for r in rules]
        for _ in range(depth):
            weight = torch.randn(width, width, generator=generator, dtype=torch.float64) * (std / width**0.5)
            for i, (r, h, log) in enumerate(streams):
                h = torch.add(h, weight @ h.relu(), alpha=r.branch(1, depth))
                size = float(h.square().mean())
                streams[i] = r, h / size**0.5, log + math.log(size)  # normalised, so that nothing overflows
        logs |= {(r.key, depth): log for r, _, log in streams}
    return logs


def measure_growth(
    rules: Sequence[Rules],
    depths: Sequence[int],
    *,
    width: int = 512,
    std: float = 1.0,
    seeds: Sequence[int] = range(8),
    workers: int | None = None,
    progress: Progress = quiet,
) -> list[Growth]:
    """PASS at a depth: the whole 90 % interval of the log is within 5 % of the derived growth, or of its log if that is
    more.
    """
    if len(seeds) < 2:
        raise UserError(f"{len(seeds)} seed has no interval", fix="give at least two seeds")
    by_seed: dict[int, dict[tuple[str, int], float]] = {}
    for seed, logs in each(partial(log_growth, rules, depths, width, std), list(seeds), workers):
        by_seed[seed] = logs
        progress(len(by_seed), len(seeds), f"stream at init, seed {seed}")
    return [_judged(r, depth, std, [by_seed[s][r.key, depth] for s in seeds]) for r in rules for depth in depths]


def _judged(rules: Rules, depth: int, std: float, logs: Sequence[float]) -> Growth:
    inside = mean_interval(logs, LEVEL)
    assert inside is not None
    derived = math.log(derived_growth(rules, depth, std))
    near = NEAR * max(1.0, derived)
    word: Word = "INCONCLUSIVE"
    if derived - near <= inside.low and inside.high <= derived + near:
        word = "PASS"
    elif inside.high < derived - near or inside.low > derived + near:
        word = "FAIL"
    interval = Interval(_exp(inside.low), _exp(inside.high))
    return Growth(rules.key, depth, _exp(sum(logs) / len(logs)), interval, _exp(derived), word)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def limit_words(growths: Sequence[Growth], std: float = 1.0) -> str:
    """The deepest of each parameterization, beside the limit."""
    deepest: dict[str, Growth] = {}
    for g in growths:
        if g.rules not in deepest or g.depth > deepest[g.rules].depth:
            deepest[g.rules] = g
    return ", ".join(
        f"{display_name(g.rules)} {g.measured:.3g} at depth {g.depth} (limit {limit(rules_named(g.rules), std):.3g})"
        for g in deepest.values()
    )
