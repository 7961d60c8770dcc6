"""How often the coordinate check is wrong: false alarms on right rules, misses on each of its negative controls.

100 seeds of every case are run on a small shape; a trial is a check of three of them, drawn at random.

    python benchmarks/check_calibration.py
"""

import json
from pathlib import Path

import numpy as np
import polars as pl

from completep.config import Shape
from completep.measure.controls import CONTROLS, RIGHT
from completep.measure.grid import Coordinates, coordinate_check
from completep.measure.subject import Setting, Source
from completep.measure.verdict import judge, overall
from completep.rules.table import Role

RESULTS = Path(__file__).parent / "results" / "check_calibration.json"
SEEDS, TRIALS, PER_CHECK = 100, 200, 3
SHAPES = {"depth": [Shape(32, d) for d in (2, 4, 8, 16)], "width": [Shape(w, 2) for w in (32, 64, 128, 256)]}
SOURCE = Source("completep.model.gpt:gpt", Shape(32, 2), {"vocabulary": 256, "head_size": 16})


def trials(control):
    """(verdict, roles blamed) of many checks."""
    setting = Setting(time=32, eps=control.eps)
    source = SOURCE if control.factory is None else Source(control.factory, SOURCE.base)
    found = coordinate_check(source, [control.rules], SHAPES[control.axis], setting, seeds=range(SEEDS))
    rng = np.random.default_rng(0)
    for _ in range(TRIALS):
        mine = pl.col("seed").is_in(rng.choice(SEEDS, PER_CHECK, replace=False).tolist())
        findings = judge(Coordinates(found.base, found.stream.filter(mine), found.roles.filter(mine)))
        failed = [f.quantity for f in findings if f.word == "FAIL"]
        yield overall(findings), {role for role in Role if any(q.startswith(f"{role} →") for q in failed)}


def main():
    told = []
    for control in (*RIGHT, *CONTROLS):
        results = list(trials(control))
        words = [word for word, _ in results]
        row = {"case": control.name, "right": control in RIGHT} | {
            word: words.count(word) / TRIALS for word in ("PASS", "FAIL", "INCONCLUSIVE")
        }
        if control.blamed:
            row["every role to blame is named"] = sum(blamed >= set(control.blamed) for _, blamed in results) / TRIALS
        row["met"] = row["FAIL"] <= 0.02 if control in RIGHT else 1 - row["FAIL"] <= 0.02
        told.append(row)
        print(json.dumps(row), flush=True)
    RESULTS.write_text(
        json.dumps({"seeds": SEEDS, "trials": TRIALS, "seeds per check": PER_CHECK, "cases": told}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
