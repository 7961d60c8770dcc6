"""How often 90 % intervals hold the truth: optimum, drift and regret of a sweep, exponent and savings of a law.

The shape constants in completep/stats.py (`SKEW`, `TAIL`) are 1.6 times what the bowls of the first case show, the
recorded learning-rate sweeps. Factors of 1.4 to 1.8 cover alike there; this one was taken after the next three cases
had been seen. All other cases were only reported.

    python benchmarks/coverage.py            # a quarter of an hour on one core; writes results/coverage.json
    python benchmarks/coverage.py --quick    # the first cases with fewer draws; writes nothing
"""

import json
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from tests.measure.bowls import Noise, law_coverage, lopsided, recorded, scaled, share, transfer_coverage

RESULTS = Path(__file__).parent / "results" / "coverage.json"
SEEDS, FEWEST = (3, 5, 8), 2  # two seeds for the recorded bowls only
DRAWS, QUICK = 150, 30  # of each bowl
LAW_DRAWS = 4000
LR, INIT = ("lr-transfer", "lr"), ("init-transfer", "std")
OCTAVES = {"lr-transfer": (-9.0, -3.0), "init-transfer": (-6.0, 0.0)}


def grid(study, spacing=1.0):
    low, high = OCTAVES[study]
    return np.arange(low, high + 1e-9, spacing)


def bowls(study, column, kind="quartic", factor=1.0):
    """(base, another) for every recorded curve."""
    curves = [scaled(f, factor, *OCTAVES[study]) for f in recorded(study, column, kind).values()]
    return [(curves[0], other) for other in curves]


def lopsided_bowls():
    return [(lopsided(-6.2), lopsided(-6.2 + d, bend=b)) for d in (0.0, 0.3, -0.8) for b in (0.005, 0.02)]


# name, bowls, values tried, noise
CASES = [
    ("recorded lr bowls", bowls(*LR), grid("lr-transfer"), Noise()),
    ("recorded lr bowls, splines", bowls(*LR, "spline"), grid("lr-transfer"), Noise()),
    ("recorded init bowls", bowls(*INIT), grid("init-transfer"), Noise()),
    ("recorded init bowls, splines", bowls(*INIT, "spline"), grid("init-transfer"), Noise()),
    ("exponential walls", lopsided_bowls(), grid("lr-transfer"), Noise()),
    ("a third of the curvature", bowls(*LR, factor=1 / 3), grid("lr-transfer"), Noise()),
    ("three times the curvature", bowls(*LR, factor=3), grid("lr-transfer"), Noise()),
    ("half octaves", bowls(*LR), grid("lr-transfer", 0.5), Noise()),
    ("one and a half octaves", bowls(*LR), grid("lr-transfer", 1.5), Noise()),
    ("twice the residual", bowls(*LR), grid("lr-transfer"), Noise(residual=0.01)),
    ("two fifths of the residual", bowls(*LR), grid("lr-transfer"), Noise(residual=0.002)),
    ("residual grows by half per octave", bowls(*LR), grid("lr-transfer"), Noise(growing=0.5)),
    ("heavy tails (Student, 3)", bowls(*LR), grid("lr-transfer"), Noise(tails=True)),
    ("a fifth of the runs missing", bowls(*LR), grid("lr-transfer"), Noise(missing=0.2)),
]  # fmt: skip
# name, sizes, noise, misfit of the law at a size, log loss gap
LAWS = [
    ("three sizes", 3, Noise(), 0.002, 0.02),
    ("three sizes, no misfit", 3, Noise(), 0.0, 0.02),
    ("three sizes, more misfit", 3, Noise(), 0.005, 0.02),
    ("five sizes", 5, Noise(), 0.002, 0.02),
    ("five sizes, twice the residual", 5, Noise(residual=0.01), 0.002, 0.02),
    ("five sizes, nothing saved", 5, Noise(), 0.002, 0.0),
]  # fmt: skip


def generator(name, seeds):
    return np.random.default_rng([zlib.crc32(name.encode()), seeds])


def transfer_row(case, seeds, draws):
    name, pairs, x, noise = case
    rng, counts, start = generator(name, seeds), Counter(), time.time()
    for base, other in pairs:
        counts += transfer_coverage(base, other, x, seeds, noise, draws, rng)
    covered = {q: round(share(counts, q), 3) for q in ("optimum", "drift", "regret")}
    made = counts["drift", "all"] / (draws * len(pairs))
    return {"case": name, "seeds": seeds, **covered, "sweeps with intervals": round(made, 3), "s": time.time() - start}


def law_row(case, seeds, draws):
    name, sizes, noise, misfit, gap = case
    counts = law_coverage(sizes, seeds, noise, misfit, gap, draws, generator(name, seeds))
    return {"case": name, "seeds": seeds, **{q: round(share(counts, q), 3) for q in ("exponent", "savings")}}


def run(quick):
    draws, laws = (QUICK, LAW_DRAWS // 10) if quick else (DRAWS, LAW_DRAWS)
    for cases, row, many in ((CASES[:3] if quick else CASES, transfer_row, draws), (LAWS, law_row, laws)):
        for case in cases:
            few = (FEWEST,) if case[0].startswith("recorded") else ()
            for seeds in (3,) if quick else (*few, *SEEDS):
                yield row(case, seeds, many)


def main():
    rows = []
    for row in run("--quick" in sys.argv):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if "--quick" not in sys.argv:
        facts = {"nominal": 0.9, "draws per bowl": DRAWS, "draws per law": LAW_DRAWS, "set on": CASES[0][0]}
        RESULTS.write_text(json.dumps(facts | {"cases": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
