"""Bracketing finds the grid's minimum with fewer runs, on curves whose minimum is known."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import polars as pl
import pytest

from completep.measure.curves import curve
from completep.stats import mean_over_seeds, minimum
from completep.studies.lr_transfer import STUDY
from completep.studies.scale import LAPTOP
from completep.sweep.engine import nothing_more
from completep.sweep.search import Bracketing, needed, next_values
from completep.sweep.store import Store, distinct
from completep.sweep.task import Point, Trial
from completep.train.records import Result
from tests.sweep.tasks import Script, engine

ROOT = Path(__file__).parents[2]
GRID = [2.0**e for e in range(-12, -2)]


@dataclass
class Pretend:
    """An engine whose losses are a formula."""

    store: Store
    loss: Callable
    done: list = field(default_factory=list)

    def run(self, tasks, more=nothing_more):
        todo = list(tasks)
        while todo:
            task = todo.pop(0)
            path = self.store.folder(task) / "result.json"
            if not path.exists():
                loss = self.loss(task.run)
                ended = math.isfinite(loss)
                path.parent.mkdir(parents=True)
                result = Result("done" if ended else "diverged", 1, None, loss if ended else None, 1, 1.0, 1.0, "x")
                path.write_text(json.dumps(asdict(result)))
                self.done.append(task.run)
            todo += more(task)
        return []


def bowl(drift, diverges=math.inf):
    def loss(run):
        e = math.log2(run.hyperparameters.lr)
        if e > diverges:
            return math.inf
        place = -6.3 + drift.get({"sp": "mup"}.get(run.rules, run.rules), 0.0) * math.log2(run.model.depth / 2)
        return 2 + 0.03 * (e - place) ** 2 + 0.004 * (e - place) ** 3 + 0.001 * run.seed

    return loss


def measured(name):
    """The losses of a sweep that was really run, from the page of its results."""
    frame = pl.read_csv(ROOT / "docs" / "results" / name / "runs.csv")
    losses = {(r["rules"], r["depth"], r["lr"], r["seed"]): r["loss"] for r in frame.iter_rows(named=True)}
    # A run of one effect stands under its simplest rules; the sweep wrote it under each that it was asked for.
    also = {"sp": ("mup", "completep"), "mup": ("mup",)}

    def loss(run):
        keys = (run.rules, *also.get(run.rules, ()))
        return next(
            losses[r, run.model.depth, run.hyperparameters.lr, run.seed]
            for r in keys
            if (r, run.model.depth, run.hyperparameters.lr, run.seed) in losses
        )

    return loss


def both(tmp_path, loss, **values):
    return searched(STUDY.at(LAPTOP).narrowed({"lr": [f"2^{e}" for e in range(-12, -2)], **values}), tmp_path, loss)


def searched(experiment, tmp_path, loss):
    full, few = (Pretend(Store(tmp_path / name), loss) for name in ("full", "few"))
    trials = STUDY.trials(experiment)
    full.run([trial.task for trial in trials])
    ran, failed = Bracketing(few, "lr", experiment.axes["lr"]).run(trials)
    assert failed == []
    grid, found = (STUDY.frame(experiment, p.store, t) for p, t in ((full, trials), (few, ran)))
    return experiment, full, few, grid, found


@pytest.mark.parametrize("diverges", [math.inf, -5.0])
def test_the_same_answer_with_fewer_runs(tmp_path, diverges):
    alike(*both(tmp_path, bowl({"mup": -0.5, "alpha=0.5": 0.4}, diverges)))


def test_the_same_answer_on_a_sweep_that_was_run(tmp_path):
    alike(*searched(STUDY.at(LAPTOP), tmp_path, measured("lr-transfer")))


def alike(experiment, full, few, grid, found):
    assert len(few.done) < 0.6 * len(full.done)
    for rules in experiment.axes["rules"]:
        for depth in experiment.axes["depth"]:
            here = [f.filter((f["rules"] == rules) & (f["depth"] == depth)) for f in (grid, found)]
            curves = [curve(f.select("lr", "loss", "seed"), "lr") for f in here]
            a, b = (minimum(x, mean_over_seeds(losses)) for x, losses in curves)
            assert abs(a.place - b.place) <= 0.25
            assert a.interior == b.interior


def test_a_report_asks_for_what_the_search_ran(tmp_path):
    """From the results alone; where one is missing, it and nothing beyond it is missing from the report."""
    experiment, full, few, _, _ = both(tmp_path, bowl({"mup": -0.5, "alpha=0.5": 0.4}))
    trials = STUDY.trials(experiment)
    ran = {task.id for task in distinct(needed(trials, few.store, "bracket", "lr"))}
    assert ran == {task.id for task in distinct(trials) if few.store.result(task)}
    assert ran == {task.id for task in distinct(needed(trials, full.store, "bracket", "lr"))}
    assert len(distinct(needed(trials, few.store, "grid", "lr"))) == len(full.done)
    lost = few.store.folder(max(distinct(trials), key=lambda task: (task.id in ran, task.cost)))
    (lost / "result.json").unlink()
    asked = distinct(needed(trials, few.store, "bracket", "lr"))
    assert [few.store.folder(task) for task in asked if not few.store.result(task)] == [lost]


def test_a_minimum_at_the_edge_is_walked_to(tmp_path):
    _, _, _, grid, found = both(
        tmp_path, lambda run: 2 - 0.01 * math.log2(run.hyperparameters.lr), depth=[2], rules=["mup"], seed=[0]
    )
    assert found.sort("loss")["lr"][0] == grid.sort("loss")["lr"][0] == 2**-3


def test_what_diverges_everywhere_is_walked_down_from(tmp_path):
    _, _, few, _, found = both(tmp_path, lambda run: math.inf, depth=[2], rules=["mup"], seed=[0])
    assert min(r.hyperparameters.lr for r in few.done) == 2**-12
    assert found["status"].to_list() == ["diverged"] * found.height


def test_the_next_values():
    assert next_values(GRID, {}, 2.0**-7) == [2.0**-8, 2.0**-7, 2.0**-6]
    assert next_values(GRID, {}, 2.0**-12) == [2.0**-12, 2.0**-11, 2.0**-10]
    known = {2.0**-8: 2.1, 2.0**-7: 2.0, 2.0**-6: 2.2}
    assert next_values(GRID, known, 2.0**-7) == []
    assert next_values(GRID, known | {2.0**-6: 1.9}, 2.0**-7) == [2.0**-5]


def test_a_curve_goes_on_while_another_still_runs(tmp_path):
    """The slow curve's only run waits for the last run of the fast one: with rounds in step this would never end."""
    last = tmp_path / "store" / "script-fast-3.0" / "result.json"
    values = [1.0, 2.0, 3.0]
    fast = [Trial(Point(curve="fast", lr=v, seed=0), Script(f"fast-{v}", value=9 - v)) for v in values]
    slow = [Trial(Point(curve="slow", lr=1.0, seed=0), Script("slow", waits_for=str(last)))]
    walker = Bracketing(engine(tmp_path / "store", workers=2), "lr", values)
    walker.walk([*slow, *fast], start=1.0)
    assert walker.failed == []
    assert {trial.task.id for trial in walker.done} == {trial.task.id for trial in (*slow, *fast)}


def test_a_walk_passes_what_is_done_and_what_fails(tmp_path):
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    trials = [Trial(Point(lr=v, seed=0), Script(f"{v}", value=abs(v - 4.0), fails=v == 3.0)) for v in values]
    runs = engine(tmp_path / "store", workers=2)
    assert runs.run([trials[0].task, trials[1].task]) == []
    events = []
    walker = Bracketing(engine(tmp_path / "store", events, workers=2), "lr", values)
    assert walker.walk(trials, start=2.0) == 2.0  # 3 failed, so that the walk ends beside it
    assert [task.id for task in walker.failed] == ["script-3.0"]
    assert {e.task.id for e in events} == {"script-3.0"}


def test_more_is_asked_of_every_task_that_ended_once_it_has(tmp_path):
    """Of tasks that were done before, too; and what is asked for twice is done once."""
    events, ended = [], []
    tasks = {name: Script(name) for name in "abcde"}
    assert engine(tmp_path).run([tasks["a"]]) == []
    follows = {"a": [tasks["b"], tasks["c"]], "b": [tasks["c"], tasks["d"]], "c": [tasks["d"]], "d": [tasks["a"]]}

    def more(task):
        ended.append(task.name)
        return follows[task.name] if ended.count(task.name) == 1 else []

    assert engine(tmp_path, events).run([tasks["a"]], more) == []
    assert sorted(e.task.name for e in events if e.kind == "done") == ["b", "c", "d"]
    assert set(ended) == set("abcd")
