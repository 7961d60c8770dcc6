"""The engine on this machine: every task once, through crashes, kills and rivals; a failure stops no other."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from completep.cli import main
from completep.errors import UserError
from completep.sweep.conduct import conduct
from completep.sweep.devices import available_memory
from completep.sweep.engine import Engine, Event, attempt
from completep.sweep.local import Local
from completep.sweep.store import Store
from completep.sweep.task import Point, Trial
from completep.sweep.training import Training
from completep.train.folder import claim
from completep.train.records import Result, read_metrics
from completep.train.settings import How
from tests.sweep.tasks import HOW, Script, engine, training
from tests.train.runs import small_data, small_run
from tests.waiting import wait_until

KILLS = int(os.environ.get("COMPLETEP_KILLS", "6"))

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.mark.slow
def test_every_run_once_and_shared_runs_once(data, tmp_path):
    events = []
    rules = ("completep", "alpha=0.5", "completep")
    runs = [training(data, seed=seed, rules=r) for seed in range(2) for r in rules]
    assert engine(tmp_path, events).run(runs) == []
    assert [e.kind for e in events].count("done") == 4
    frame = Store(tmp_path).frame([({"i": i}, r) for i, r in enumerate(runs)])
    assert frame["status"].to_list() == ["done"] * 6
    again = []
    assert engine(tmp_path, again).run(runs) == []
    assert again == []


@pytest.mark.slow
def test_a_finished_run_loses_its_checkpoints_and_nothing_else(data, tmp_path):
    task = training(data)
    checkpoints = tmp_path / "run" / "checkpoints"
    claim(tmp_path / "run", task.run)
    for name in ("step-00000003", ".step-00000004.part", "damaged-step-00000002", "my-notes"):
        (checkpoints / name).mkdir(parents=True)
    task.carry_out(tmp_path / "run", 0)
    assert [path.name for path in checkpoints.iterdir()] == ["my-notes"]
    (checkpoints / "my-notes").rmdir()
    task.carry_out(tmp_path / "run", 0)
    assert not checkpoints.exists()


@pytest.mark.slow
def test_diverged_is_a_result(data, tmp_path):
    events = []
    wild = small_run(data, steps=12)
    wild = replace(wild, hyperparameters=replace(wild.hyperparameters, lr=1e30))
    assert engine(tmp_path, events).run([Training.of(wild, HOW)]) == []
    assert [e.kind for e in events] == ["started", "diverged"]


@pytest.mark.slow
def test_a_failure_is_tried_twice_reported_and_does_not_stop_the_others(data, tmp_path):
    events = []
    good = small_run(data, seed=1)
    bad = replace(good, model=replace(good.model, vocabulary=100))
    failed = engine(tmp_path, events).run([Training.of(bad, HOW), Training.of(good, HOW)])
    assert [t.run.model.vocabulary for t in failed] == [100]
    kinds = [e.kind for e in events]
    assert kinds.count("retry") == kinds.count("failed") == kinds.count("done") == 1
    assert "vocabulary of 100" in next(e for e in events if e.kind == "failed").detail


@pytest.mark.slow
def test_any_task_runs_not_only_training(tmp_path):
    """The machinery knows tasks: a script's result is found by a search, its failure reported, its output kept."""
    events = []
    scripts = [Script("a", 3.0), Script("b", 2.0), Script("bad", fails=True)]
    failed = engine(tmp_path, events).run(scripts)
    assert [t.name for t in failed] == ["bad"]
    assert "bad cannot do this" in next(e for e in events if e.kind == "failed").detail
    assert Store(tmp_path).result(scripts[1]) == {"status": "done", "loss": 2.0}
    assert "a in process" in (Store(tmp_path).folder(scripts[0]) / "log.txt").read_text()


@pytest.mark.slow
def test_what_another_process_holds_is_waited_for(tmp_path):
    """The rival reports that the task is elsewhere, waits, and does it once the lock is free."""
    store, held = Store(tmp_path / "store"), Script("held", 1.0)
    script, log = tmp_path / "rival.py", tmp_path / "events"
    script.write_text(
        "from pathlib import Path\nfrom completep.sweep.engine import Engine\nfrom completep.sweep.local import Local\n"
        "from completep.sweep.store import Store\nfrom tests.sweep.tasks import Script\n"
        f"def note(event): Path({str(log)!r}).open('a').write(event.kind + '\\n')\n"
        f"store = Store(Path({str(store.root)!r}))\n"
        "if __name__ == '__main__': Engine(store, Local(1), note).run([Script('held', 1.0)])\n"
    )
    with store.holding(held) as mine:
        assert mine
        rival = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)})
        wait_until(lambda: log.exists() and "elsewhere" in log.read_text(), process=rival)
        assert store.result(held) is None
    assert rival.wait(120) == 0
    assert store.result(held) == {"status": "done", "loss": 1.0}
    assert log.read_text().split()[-1] == "done"
    events: list[Event] = []
    assert Engine(store, Local(), events.append).run([held]) == []
    assert events == []


def at_work(store, since):
    return any(p.stat().st_mtime > since for p in store.glob("*/metrics.jsonl"))


def has_results(store, least):
    return len(list(store.glob("*/result.json"))) >= least


@pytest.mark.slow
def test_runs_killed_at_random_moments(data, tmp_path):
    """Kill everything with -9 again and again. In the end the frame equals an undisturbed one."""
    runs = [training(data, seed=seed) for seed in range(3 * KILLS)]
    script = tmp_path / "study.py"
    script.write_text(
        "from pathlib import Path\nfrom tests.sweep.tasks import engine, training\n"
        f"if __name__ == '__main__': engine(Path({str(tmp_path / 'store')!r})).run("
        f"[training(Path({str(data)!r}), seed=s) for s in range({3 * KILLS})])"
    )
    moments, written, store = random.Random(0), {}, tmp_path / "store"
    for _ in range(KILLS):
        with subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        ) as study:
            started, more = time.time(), moments.randrange(3)
            # In the middle of the work: once a run has written a record, and then after so many more results.
            wait_until(partial(at_work, store, started), process=study)
            wait_until(partial(has_results, store, len(written) + more), process=study)
            os.killpg(study.pid, signal.SIGKILL)
        now = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in store.glob("*/result.json")}
        assert written.items() <= now.items()  # what was done stays, and is not done again
        written = now
    assert 0 < len(written) < len(runs)  # all kills struck in the middle of the work
    assert engine(tmp_path / "store").run(runs) == []
    assert engine(tmp_path / "calm").run(runs) == []
    columns = ["run", "status", "step", "train_loss", "validation_loss"]
    stormy, calm = (Store(tmp_path / name).frame([({}, r) for r in runs]).select(columns) for name in ("store", "calm"))
    assert stormy["status"].to_list() == ["done"] * len(runs)
    assert stormy.equals(calm)
    assert len(list((tmp_path / "store").glob("*/result.json"))) == len(runs)


@pytest.mark.slow
def test_several_ranks_are_started_by_torchrun(data, tmp_path):
    """Two processes for one run give the loss of one."""
    run = training(data)
    assert engine(tmp_path / "two", workers=1).run([training(data, ranks=2)]) == []
    assert engine(tmp_path / "one").run([run]) == []
    two, one = (Store(tmp_path / name).result(run) for name in ("two", "one"))
    assert two["validation_loss"] == pytest.approx(one["validation_loss"], abs=1e-5)
    records = [list(read_metrics(Store(tmp_path / name).folder(run) / "metrics.jsonl")) for name in ("two", "one")]
    assert [(r.kind, r.step) for r in records[0]] == [(r.kind, r.step) for r in records[1]]
    assert {r.mfu for of_ranks in records for r in of_ranks if r.kind == "step"} == {None}  # no peak is measured
    assert not (Store(tmp_path / "two").folder(run) / "checkpoints").exists()
    assert (Store(tmp_path / "two").folder(run) / "model.safetensors").exists()


@pytest.mark.parametrize(
    "how",
    [
        HOW,
        How(peak=None),
        How(4, "fsdp", 2, "float32", True, 123456789.5, 7, 3, 1),
    ],
)
def test_the_ranks_of_a_run_are_executed_as_it_says(how, data, tmp_path, monkeypatch):
    """torchrun gets words, and these must say everything that a run in one process is told."""
    task = replace(training(data), how=how, ranks=2)
    claim(tmp_path, task.run)
    told = []

    def stand_in(run, folder, how, **others):
        told.append((run, folder, how))
        return Result("done", 1, 1.0, 1.0, 1, 1.0, 1.0, "")

    monkeypatch.setattr("completep.train.loop.train", stand_in)
    assert main(task._command(tmp_path)[1:]) == 0
    parallel = how.parallel if how.parallel != "none" else "ddp"
    assert told == [(task.run, tmp_path, replace(how, parallel=parallel))]


def test_memory_is_planned_for(data, tmp_path):
    run = training(data)
    local = Local(workers=3)
    local.open(Store(tmp_path), [run])
    local.memory = 0.0
    assert local.has_room(run)  # one run always starts
    local.running = {object(): run}
    local.memory = 2 * run.memory()
    assert not local.has_room(run)
    local.memory = 3 * run.memory()
    assert local.has_room(run)
    local.free_seats = []
    assert not local.has_room(run)
    assert Training.of(small_run(data), replace(HOW, micro_batch=1)).memory() < run.memory()
    assert training(data, ranks=2).memory() > 1.5 * run.memory()
    assert 1e8 < available_memory() < 1e15


def test_small_runs_share_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["completep.sweep.devices"], "devices", lambda: ["0", "1"])
    seats = {}
    for workers, per_gpu in ((None, 1), (None, 3), (2, 3), (3, 2)):
        local = Local(workers, per_gpu)
        local.open(Store(tmp_path), [Script("a")])
        seats[workers, per_gpu] = sorted(local.free_seats)
    assert seats == {
        (None, 1): ["0", "1"], (None, 3): ["0", "0", "0", "1", "1", "1"], (2, 3): ["0", "1"], (3, 2): ["0", "0", "1"],
    }  # fmt: skip
    with pytest.raises(UserError, match="per_gpu=0"):
        Local(per_gpu=0).open(Store(tmp_path), [Script("a")])


def test_what_was_done_since_one_looked_is_not_done_again(tmp_path):
    store = Store(tmp_path)
    assert attempt(store, Script("x", 1.0)) == "done"
    assert attempt(store, Script("x", fails=True)) == "done"  # it would have failed
    with pytest.raises(RuntimeError, match="cannot do this"):
        attempt(store, Script("y", fails=True))


@pytest.mark.slow
def test_a_sweep_stops_when_its_first_task_fails_twice(tmp_path):
    events = []
    scripts = [Script("bad", fails=True, cost=9.0), *(Script(str(i)) for i in range(5))]
    stopping = Engine(Store(tmp_path), Local(1), events.append, fail_fast=True)
    with pytest.raises(UserError, match="the first run failed: script bad"):
        stopping.run(scripts)
    assert [e.kind for e in events] == ["started", "retry", "started"]
    good = Engine(Store(tmp_path), Local(1), events.append, fail_fast=True)
    assert good.run(scripts[1:2]) == []
    assert [t.name for t in good.run(scripts)] == ["bad"]  # something has worked, so that the others go on


def test_impossible_settings_are_refused_at_once(data, tmp_path):
    with pytest.raises(UserError, match="workers=0"):
        engine(tmp_path, workers=0).run([training(data)])
    with pytest.raises(UserError, match="ranks=0"):
        training(data, ranks=0)
    with pytest.raises(UserError, match="micro_batch=0"):
        Training.of(small_run(data), replace(HOW, micro_batch=0))


def test_an_interruption_that_python_drops_still_stops(tmp_path):
    """Python ignores KeyboardInterrupt in a finaliser. Here the watcher drops it; the next event stops all the same."""
    seen = []

    @contextmanager
    def deaf(trials, store, at_most):
        def on_event(event):
            seen.append(event.kind)
            if len(seen) == 1:
                with suppress(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(30)

        yield on_event

    store = Store(tmp_path)
    store.open()
    trials = [Trial(Point(number=i), Script(str(i))) for i in range(4)]
    with pytest.raises(KeyboardInterrupt):
        conduct(trials, store, Local(1), watch=deaf)
    assert seen == ["started"]
