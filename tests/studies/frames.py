"""Made-up losses whose answer is known, one function per study."""

import math
from itertools import product
from pathlib import Path
from types import MappingProxyType

import numpy as np
import polars as pl

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def optimal_frame(drift, seeds=1, flatter=None):
    """As `transfer_frame`, at 20 tokens per parameter; and, if asked for, after 4, where bowls are steeper."""
    long = transfer_frame(drift, seeds=seeds).with_columns(tpp=pl.lit(20.0))
    if flatter is None:
        return long
    return pl.concat([long, transfer_frame(drift, regret=0.05 * flatter, seeds=seeds).with_columns(tpp=pl.lit(4.0))])


def transfer_frame(drift, regret=0.05, seeds=3, noise=1e-4, deepening=0.1):
    """Parabolas in log2 η whose minimum moves by `drift[rules]` octaves a doubling of depth."""
    rng = np.random.default_rng(0)
    rows = []
    for (rules, move), depth, e, seed in product(drift.items(), (2, 8, 32), range(-10, -2), range(seeds)):
        place = -6.3 + move * math.log2(depth / 2)
        loss = 2 - deepening * math.log2(depth / 2) / 4 + regret * (e - place) ** 2 + noise * rng.normal()
        rows.append({"rules": rules, "width": 64, "depth": depth, "lr": 2.0**e, "seed": seed, "loss": loss})
    return pl.DataFrame(rows)


def eps_frame(reach):
    """Loss rises past what ε each rule and depth allows; deeper models start lower."""
    rows = []
    for (rules, limits), e in product(reach.items(), range(-14, -3)):
        for depth, limit in limits.items():
            rise = 0.1 * math.log1p(math.exp(4 * (e / 2 - math.log10(limit))))
            loss = (2 - 0.05 * math.log2(depth)) * math.exp(rise)
            rows.append({"rules": rules, "depth": depth, "eps": 10.0 ** (e / 2), "loss": loss})
    return pl.DataFrame(rows)


def dynamics_frame(ends):
    rows = []
    for (rules, losses), lr, step in product(ends.items(), (2**-6, 2**-4), range(10, 160, 10)):
        for depth, end in losses.items():
            start = 4 + 0.1 * depth  # deeper starts behind
            rows.append(
                {
                    "rules": rules,
                    "lr": lr,
                    "depth": depth,
                    "seed": 0,
                    "step": step,
                    "loss": start + (end - start) * step / 150,
                }
            )
    return pl.DataFrame(rows)


def shape_frame(penalty, sizes=2):
    """Loss on a law, plus a bowl in log N:L, plus what muP loses with depth."""
    rows = []
    families = (
        (50e3, ((16, 16), (32, 4), (48, 2), (64, 1))),
        (400e3, ((32, 32), (64, 8), (96, 4), (128, 2))),
        (3.2e6, ((64, 64), (128, 16), (192, 8), (256, 4))),
    )
    for size, shapes in families[:sizes]:
        for (width, depth), (rules, lost) in product(shapes, penalty.items()):
            flops = 1e12 * (size / 50e3) ** 2
            loss = (flops / 1e18) ** -0.06 * (
                1 + 0.01 * math.log2(width / depth / 16) ** 2 / 4 + lost * math.log2(depth + 1)
            )
            rows.append(
                {
                    "rules": rules,
                    "width": width,
                    "depth": depth,
                    "parameters": int(12 * width**2 * depth),
                    "flops": flops,
                    "loss": loss,
                }
            )
    return pl.DataFrame(rows)


def tau_frame(best):
    return pl.DataFrame(
        [
            {"rules": r, "width": 32, "depth": 4, "tau": 0.1407 * 2.0**e, "loss": 2 + 0.02 * (e - place) ** 2}
            for r, place in best.items()
            for e in range(-3, 4)
        ]
    )


def grid_frame(slope):
    return pl.DataFrame(
        [
            {
                "rules": r, "width": 32, "lr": 2.0**e, "weight_decay": 2.0**w, "steps": 500,
                "loss": 2 + 0.01 * (w - (-1.0 + slope * (e + 6))) ** 2,
            }
            for r in ("sp", "mup") for e in (-7, -6, -5) for w in range(-5, 4)
        ]
    )  # fmt: skip


def downstream_frame(scores, error=0.5, losses=MappingProxyType({})):
    return pl.DataFrame(
        [
            {
                "rules": r, "shape": "64x4", "task": t, "metric": "acc", "items": 100, "score": x + j, "stderr": error,
                "run": r, "loss": losses.get(r, 2.2 - 0.1 * i),
            }
            for i, (r, x) in enumerate(scores.items())
            for j, t in enumerate(("piqa", "boolq"))
        ]
    )  # fmt: skip


def expert_frame(shift):
    """Bowls whose best lr moves by some octaves per doubling of depth or experts, with a little noise over seeds."""
    rows = []
    for rules, depth, experts, e, seed in product(("mup", "completep"), (2, 8), (4, 16), range(-9, -2), range(3)):
        here = -6 + shift.get(rules, 0.0) * (depth / 2 - 1 + experts / 4 - 1) / 3
        loss = 2.0 + 0.02 * (e - here) ** 2 + 0.001 * seed + 1e-4 * ((seed * 7 + e) % 3)
        point = {"rules": rules, "depth": depth, "experts": experts, "lr": 2.0**e, "seed": seed}
        rows.append({**point, "width": 64, "loss": loss})
    return pl.DataFrame(rows)


def width_frame(behind, drift):
    """Bowls over lr at two widths: at the larger one each parameterization's best is worse than muP's by `behind`."""
    rows = []
    for (rules, lost), width, e, seed in product(behind.items(), (32, 128), range(-9, -2), range(3)):
        here = -6 + (drift.get(rules, 0.0) if width == 128 else 0.0)
        best = 2.0 if width == 32 else 1.8 * (1 + lost)
        loss = best + 0.02 * (e - here) ** 2 + 0.001 * seed + 1e-4 * ((seed * 7 + e) % 3)
        rows.append({"rules": rules, "width": width, "depth": 2, "lr": 2.0**e, "seed": seed, "loss": loss})
    return pl.DataFrame(rows)
