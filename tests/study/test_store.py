"""The run store: one folder for what is one run, exactly once, whoever is at it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from completep.config import GPTConfig, Hyperparameters, Run, Schedule, Shape
from completep.errors import UserError
from completep.study.store import Store, canonical
from completep.train.records import Result

BASE = Shape(64, 2)


def run(rules="completep", width=64, depth=2, **changes):
    made = Run(
        GPTConfig(width, depth, 256), Hyperparameters(0.01, 0.02), Schedule(10, 1), 4, 16, rules=rules, base=BASE
    )
    return replace(made, **changes)


def same(*runs):
    return len({Store(Path("x")).folder(r) for r in runs}) == 1


def test_what_is_one_run_has_one_folder():
    assert same(*(run(r) for r in ("sp", "mup", "completep", "alpha=0.5", "alpha=1", "literature=0.5")))
    assert same(run("sp", depth=8), run("mup", depth=8))
    assert same(run("mup", width=256), run("completep", width=256), run("alpha=0.75", width=256))
    assert same(run("completep", depth=8), run("alpha=1", depth=8))
    assert same(run("sp", 256, 8), replace(run("sp", 256, 8), base=Shape(128, 4)))


def test_what_differs_has_its_own():
    runs = [run(r, depth=8) for r in ("sp", "completep", "alpha=0.5", "literature=0.5")]
    runs += [run(r, width=256) for r in ("sp", "mup")]
    runs += [run(seed=1), run(batch=8), run("completep", 256, 8), run("mup", 256, 8)]
    runs += [replace(run("completep", depth=8), base=Shape(64, 4)), replace(run("mup", width=256), base=Shape(128, 2))]
    assert len({Store(Path("x")).folder(r) for r in runs}) == len(runs)


def test_canonical_rules_resolve_to_the_same_factors():
    """The claim behind the sharing, against the table itself."""
    from completep.rules.table import Role, rules_named

    for r in (run("alpha=0.75", width=256), run("literature=0.5"), run("sp", depth=8), run("mup", 256, 8)):
        short = canonical(r)
        for role in Role:
            before, after = (
                rules_named(x.rules).rule(role).lr(x.model.width / x.base.width, x.model.depth / x.base.depth)
                for x in (r, short)
            )
            assert before == after


def test_the_lock_is_exclusive_and_dies_with_its_owner(tmp_path):
    store = Store(tmp_path)
    with store.holding(run()) as mine:
        assert mine
        with store.holding(run("mup")) as also:  # the same run under another name
            assert not also
        with store.holding(run(seed=1)) as other:
            assert other
    code = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, '.');"
        "from tests.study.test_store import run, Store\n"
        f"with Store(Path({str(tmp_path)!r})).holding(run()) as mine: print(mine, flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root) as holder:
        assert holder.stdout.readline().strip().isdigit()
        with store.holding(run()) as mine:
            assert not mine
        os.kill(holder.pid, signal.SIGKILL)
    with store.holding(run()) as mine:
        assert mine


def write(store, r, loss=2.0):
    folder = store.folder(r)
    folder.mkdir(parents=True)
    result = Result("done", 10, loss, loss, 640, 1.0, 640.0, "0" * 64)
    (folder / "result.json").write_text(json.dumps(asdict(result)))


def test_frame_over_many_runs(tmp_path):
    store = Store(tmp_path)
    runs = [({"lr": lr, "seed": seed}, run(seed=seed, batch=lr + 1)) for lr in range(40) for seed in range(50)]
    for labels, r in runs[:-1]:
        write(store, r, loss=float(labels["lr"]))
    frame = store.frame(runs)
    assert frame.height == 2000
    assert frame["status"].to_list()[-2:] == ["done", "missing"]
    assert frame.filter(frame["lr"] == 7)["validation_loss"].unique().to_list() == [7.0]


def test_a_half_written_result_is_told(tmp_path):
    store = Store(tmp_path)
    write(store, run())
    path = store.folder(run()) / "result.json"
    path.write_text(path.read_text()[:20])
    with pytest.raises(UserError, match="is not a whole result"):
        store.result(run())


def test_a_manifest_that_a_kill_left_half_or_a_rival_writes_is_no_stranger(tmp_path):
    (tmp_path / ".store.json.123.part").write_text("{")
    Store(tmp_path).open()
    assert json.loads((tmp_path / "store.json").read_text())["format"] == 1
    Store(tmp_path).open()


def test_counts(tmp_path):
    store = Store(tmp_path)
    done, begun, absent, held = (run(seed=s) for s in range(4))
    for r in (done, begun, held):
        store.folder(r).mkdir(parents=True)
        (store.folder(r) / "run.json").write_text("{}")
    result = Result("diverged", 1, None, None, 1, 1.0, 1.0, "x")
    (store.folder(done) / "result.json").write_text(json.dumps(asdict(result)))
    with store.holding(held) as lock:
        assert lock is not None
        counts = store.counts([done, begun, absent, held, done])
    wanted = {"runs": 4, "done": 0, "diverged": 1, "running": 1, "interrupted": 1, "missing": 1}
    assert counts == wanted
