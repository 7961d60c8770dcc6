"""Bracketing finds the grid's minimum with fewer runs, on curves whose minimum is known."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import polars as pl
import pytest

from completep.config import Run
from completep.measure.optimum import optimum
from completep.study.bracket import Search, next_values
from completep.study.named import study_named
from completep.study.scale import LAPTOP
from completep.study.store import Store
from completep.train.records import Result

ROOT = Path(__file__).parents[2]
GRID = [2.0**e for e in range(-12, -2)]


@dataclass
class Pretend:
    """An engine whose losses are a formula."""

    store: Store
    loss: Callable[[Run], float]
    done: list[Run] = field(default_factory=list)

    def run(self, runs):
        for run in runs:
            path = self.store.folder(run) / "result.json"
            if path.exists():
                continue
            loss = self.loss(run)
            ended = math.isfinite(loss)
            path.parent.mkdir(parents=True)
            result = Result("done" if ended else "diverged", 1, None, loss if ended else None, 1, 1.0, 1.0, "x")
            path.write_text(json.dumps(asdict(result)))
            self.done.append(run)
        return []


def bowl(drift, diverges=math.inf):
    def loss(run):
        e = math.log2(run.hyperparameters.lr)
        if e > diverges:
            return math.inf
        place = -6.3 + drift.get(run.rules, 0.0) * math.log2(run.model.depth / 2)
        return 2 + 0.03 * (e - place) ** 2 + 0.004 * (e - place) ** 3 + 0.001 * run.seed

    return loss


def measured(name):
    """The losses of a sweep that was really run, from the page of its results."""
    frame = pl.read_csv(ROOT / "docs" / "results" / name / "runs.csv")
    losses = {(r["rules"], r["depth"], r["lr"], r["seed"]): r["loss"] for r in frame.iter_rows(named=True)}
    return lambda run: losses[run.rules, run.model.depth, run.hyperparameters.lr, run.seed]


def both(tmp_path, loss, *words):
    return searched(
        study_named("lr-transfer", LAPTOP).narrowed(["lr=" + ",".join(f"2^{e}" for e in range(-12, -2)), *words]),
        tmp_path,
        loss,
    )


def searched(study, tmp_path, loss):
    full, few = (Pretend(Store(tmp_path / name), loss) for name in ("full", "few"))
    full.run([run for _, run in study.runs()])
    points, failed = Search(study, few).run()
    assert failed == []
    return study, full, few, study.frame(full.store, study.runs()), study.frame(few.store, points)


@pytest.mark.parametrize("diverges", [math.inf, -5.0])
def test_the_same_answer_with_fewer_runs(tmp_path, diverges):
    alike(*both(tmp_path, bowl({"mup": -0.5, "alpha=0.5": 0.4}, diverges)))


def test_the_same_answer_on_a_sweep_that_was_run(tmp_path):
    alike(*searched(study_named("lr-transfer", LAPTOP), tmp_path, measured("lr-transfer")))


def alike(study, full, few, grid, found):
    assert len(few.done) < 0.6 * len(full.done)
    for rules in study.axes["rules"]:
        for depth in study.axes["depth"]:
            here = [f.filter((f["rules"] == rules) & (f["depth"] == depth)) for f in (grid, found)]
            a, b = (optimum(f.select("lr", "loss", "seed")) for f in here)
            assert abs(math.log2(a.value / b.value)) <= 0.25
            assert a.interior == b.interior


def test_a_minimum_at_the_edge_is_walked_to(tmp_path):
    _, _, _, grid, found = both(
        tmp_path, lambda run: 2 - 0.01 * math.log2(run.hyperparameters.lr), "depth=2", "rules=mup", "seed=0"
    )
    assert found.sort("loss")["lr"][0] == grid.sort("loss")["lr"][0] == 2**-3


def test_what_diverges_everywhere_is_walked_down_from(tmp_path):
    _, _, few, _, found = both(tmp_path, lambda run: math.inf, "depth=2", "rules=mup", "seed=0")
    assert min(r.hyperparameters.lr for r in few.done) == 2**-12
    assert found["status"].to_list() == ["diverged"] * found.height


def test_the_next_values():
    assert next_values(GRID, {}, 2.0**-7) == [2.0**-8, 2.0**-7, 2.0**-6]
    assert next_values(GRID, {}, 2.0**-12) == [2.0**-12, 2.0**-11, 2.0**-10]
    known = {2.0**-8: 2.1, 2.0**-7: 2.0, 2.0**-6: 2.2}
    assert next_values(GRID, known, 2.0**-7) == []
    assert next_values(GRID, known | {2.0**-6: 1.9}, 2.0**-7) == [2.0**-5]
