"""The local engine: every run once, through crashes, kills and rivals; what fails is told and does not stop the rest."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from completep.study.engine import Event, Local, available_memory, needed, with_data
from completep.study.store import Store
from completep.train.loop import How
from tests.train.runs import small_data, small_run

ROOT = Path(__file__).parents[2]
HOW = How(checkpoint_every=3, keep=1, peak=1e11, log_every=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("data"))


def engine(folder, events=None, **options):
    return Local(Store(folder), how=HOW, on_event=(events.append if events is not None else lambda e: None), **options)


def test_every_run_once_and_shared_runs_once(data, tmp_path):
    events = []
    runs = [
        small_run(data, seed=seed, rules=rules)
        for seed in range(2)
        for rules in ("completep", "alpha=0.5", "completep")
    ]
    assert engine(tmp_path, events).run(runs) == []
    assert [e.kind for e in events].count("done") == 4
    frame = Store(tmp_path).frame([({"i": i}, with_data(r)) for i, r in enumerate(runs)])
    assert frame["status"].to_list() == ["done"] * 6
    again = []
    assert engine(tmp_path, again).run(runs) == []
    assert again == []


def test_diverged_is_a_result(data, tmp_path):
    events = []
    wild = small_run(data, steps=12)
    wild = replace(wild, hyperparameters=replace(wild.hyperparameters, lr=1e30))
    assert engine(tmp_path, events).run([wild]) == []
    assert [e.kind for e in events] == ["started", "diverged"]


def test_a_failure_is_tried_twice_told_and_does_not_stop_the_rest(data, tmp_path):
    events = []
    good = small_run(data, seed=1)
    bad = replace(good, model=replace(good.model, vocabulary=100))
    failed = engine(tmp_path, events).run([bad, good])
    assert [r.model.vocabulary for r in failed] == [100]
    kinds = [e.kind for e in events]
    assert kinds.count("retry") == kinds.count("failed") == kinds.count("done") == 1
    told = next(e for e in events if e.kind == "failed").detail
    assert "past the model's vocabulary of 100" in told


def test_what_another_process_holds_is_waited_for(data, tmp_path):
    store, run = Store(tmp_path), with_data(small_run(data))
    events: list[Event] = []
    with store.holding(run) as mine:
        assert mine
        code = (
            "from tests.study.test_engine import *\n"
            f"if __name__ == '__main__': engine(Path({str(tmp_path)!r})).run([small_run(Path({str(data)!r}))])"
        )
        script = tmp_path / "rival.py"
        script.write_text(code)
        rival = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)})
        time.sleep(6)
        assert store.result(run) is None
    assert rival.wait(60) == 0
    assert store.result(run)["status"] == "done"
    assert engine(tmp_path, events).run([run]) == []
    assert events == []


def at_work(store: Path, since: float) -> bool:
    return any(p.stat().st_mtime > since for p in store.glob("*/metrics.jsonl"))


def test_sixty_runs_killed_at_twenty_random_moments(data, tmp_path):
    """Kill everything with -9 again and again; in the end the frame equals an undisturbed one, and nothing was lost or redone."""
    runs = [with_data(small_run(data, seed=seed)) for seed in range(60)]
    script = tmp_path / "study.py"
    script.write_text(
        "from tests.study.test_engine import *\n"
        f"if __name__ == '__main__': engine(Path({str(tmp_path / 'store')!r})).run("
        f"[small_run(Path({str(data)!r}), seed=s) for s in range(60)])"
    )
    moments, written = random.Random(0), {}
    for _ in range(20):
        with subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        ) as study:
            begun = time.time()
            while study.poll() is None and not at_work(tmp_path / "store", begun):
                time.sleep(0.02)
            time.sleep(moments.uniform(0, 0.6))
            os.killpg(study.pid, signal.SIGKILL)
        now = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "store").glob("*/result.json")}
        assert written.items() <= now.items()  # what was done stays, and is not done again
        written = now
    assert 0 < len(written) < 60  # all kills struck in the middle of the work
    assert engine(tmp_path / "store").run(runs) == []
    assert engine(tmp_path / "calm").run(runs) == []
    columns = ["run", "status", "step", "train_loss", "validation_loss"]
    stormy, calm = (Store(tmp_path / name).frame([({}, r) for r in runs]).select(columns) for name in ("store", "calm"))
    assert stormy["status"].to_list() == ["done"] * 60
    assert stormy.equals(calm)
    assert len(list((tmp_path / "store").glob("*/result.json"))) == 60


def test_several_ranks_are_started_by_torchrun(data, tmp_path):
    """Two processes for one run give the loss of one."""
    run = with_data(small_run(data))
    assert engine(tmp_path / "two", workers=1, ranks=2).run([run]) == []
    assert engine(tmp_path / "one").run([run]) == []
    two, one = (Store(tmp_path / name).result(run) for name in ("two", "one"))
    assert two["validation_loss"] == pytest.approx(one["validation_loss"], abs=1e-5)
    assert not (Store(tmp_path / "two").folder(run) / "checkpoints").exists()
    assert (Store(tmp_path / "two").folder(run) / "model.safetensors").exists()


def test_memory_is_planned_for(data, tmp_path):
    run = small_run(data)
    local = engine(tmp_path)
    assert local._fits(run, [], free=0.0)  # one run always starts
    assert not local._fits(run, [run], free=2 * needed(run, HOW))
    assert local._fits(run, [run], free=3 * needed(run, HOW))
    assert needed(run, replace(HOW, micro_batch=1)) < needed(run, HOW)
    assert needed(run, HOW, ranks=2) > 1.5 * needed(run, HOW)
    assert 1e8 < available_memory() < 1e15
