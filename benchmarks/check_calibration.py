"""How often the coordinate check is wrong: false alarms on right rules, and misses on each of its negative controls.

Every case is run with 100 seeds on a small shape. A trial is a check of three of these seeds, drawn at random.

    python benchmarks/check_calibration.py
"""

import json
from pathlib import Path

import numpy as np
import polars as pl

from completep.config import Shape
from completep.measure.grid import Coordinates, coordinate_check
from completep.measure.subject import Setting, Source
from completep.measure.verdict import judge_coordinates, overall
from tests.measure.controls import CONTROLS, RIGHT

RESULTS = Path(__file__).parent / "results" / "check_calibration.json"
SEEDS, TRIALS, PER_CHECK = 100, 200, 3
SHAPES = {"depth": [Shape(32, d) for d in (2, 4, 8, 16)], "width": [Shape(w, 2) for w in (32, 64, 128, 256)]}
SOURCE = Source("completep.model.gpt:gpt", Shape(32, 2), {"vocabulary": 256, "head_size": 16})


def trials(control):
    """(verdict, roles that failed) of many checks."""
    setting = Setting(time=32, eps=control.eps)
    source = SOURCE if control.factory is None else Source(control.factory, SOURCE.base)
    measured = coordinate_check(source, [control.rules], SHAPES[control.axis], setting, seeds=range(SEEDS))
    rng = np.random.default_rng(0)
    for _ in range(TRIALS):
        drawn = pl.col("seed").is_in(rng.choice(SEEDS, PER_CHECK, replace=False).tolist())
        findings = judge_coordinates(
            Coordinates(measured.base, measured.stream.filter(drawn), measured.roles.filter(drawn))
        )
        yield overall(findings), {f.role for f in findings if f.word == "FAIL"}


def calibrate(control):
    """The shares of each verdict, as a row of the results."""
    results = list(trials(control))
    words = [word for word, _ in results]
    row = {"case": control.name, "right": control in RIGHT}
    row |= {word: words.count(word) / TRIALS for word in ("PASS", "FAIL", "INCONCLUSIVE")}
    if control.blamed:
        row["every role to blame is named"] = sum(failed >= set(control.blamed) for _, failed in results) / TRIALS
    row["met"] = row["FAIL"] <= 0.02 if control in RIGHT else 1 - row["FAIL"] <= 0.02
    return row


def main():
    rows = []
    for control in (*RIGHT, *CONTROLS):
        rows.append(calibrate(control))
        print(json.dumps(rows[-1]), flush=True)
    RESULTS.write_text(
        json.dumps({"seeds": SEEDS, "trials": TRIALS, "seeds per check": PER_CHECK, "cases": rows}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
