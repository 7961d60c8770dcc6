"""The store: one folder per task, however many points share it, and a lock that ends with its owner."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from completep.config import Shape
from completep.errors import UserError
from completep.sweep.store import Counts, Store
from completep.sweep.training import canonical
from completep.train.records import Result
from tests.sweep.tasks import run, task


def same(*runs):
    return len({task(r).id for r in runs}) == 1


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
    assert len({task(r).id for r in runs}) == len(runs)


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


@pytest.mark.slow
def test_the_lock_is_exclusive_and_dies_with_its_owner(tmp_path):
    store = Store(tmp_path)
    with store.holding(task(run())) as mine:
        assert mine
        with store.holding(task(run("mup"))) as also:  # the same run under another name
            assert not also
        with store.holding(task(run(seed=1))) as other:
            assert other
    code = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, '.');"
        "from tests.sweep.tasks import run, task; from completep.sweep.store import Store\n"
        f"with Store(Path({str(tmp_path)!r})).holding(task(run())) as mine: print(mine, flush=True); sys.stdin.read()"
    )
    root = Path(__file__).parents[2]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, cwd=root, **pipes) as holder:
        assert holder.stdout.readline().strip().isdigit()
        with store.holding(task(run())) as mine:
            assert not mine
        os.kill(holder.pid, signal.SIGKILL)
    with store.holding(task(run())) as mine:
        assert mine


def write(store, r, loss=2.0):
    folder = store.folder(r)
    folder.mkdir(parents=True)
    result = Result("done", 10, loss, loss, 640, 1.0, 640.0, "0" * 64)
    (folder / "result.json").write_text(json.dumps(asdict(result)))


@pytest.mark.slow
def test_frame_over_many_runs(tmp_path):
    store = Store(tmp_path)
    runs = [({"lr": lr, "seed": seed}, task(run(seed=seed, batch=lr + 1))) for lr in range(40) for seed in range(50)]
    for labels, r in runs[:-1]:
        write(store, r, loss=float(labels["lr"]))
    frame = store.frame(runs)
    assert frame.height == 2000
    assert frame["status"].to_list()[-2:] == ["done", "missing"]
    assert frame.filter(frame["lr"] == 7)["validation_loss"].unique().to_list() == [7.0]


def test_a_damaged_result_is_an_error(tmp_path):
    store = Store(tmp_path)
    write(store, task(run()))
    path = store.folder(task(run())) / "result.json"
    path.write_text(path.read_text()[:20])
    with pytest.raises(UserError, match="is damaged"):
        store.result(task(run()))


def test_a_manifest_that_a_kill_left_unfinished_is_replaced(tmp_path):
    (tmp_path / ".store.json.123.part").write_text("{")
    Store(tmp_path).open()
    assert json.loads((tmp_path / "store.json").read_text())["format"] == 1
    Store(tmp_path).open()


def test_counts(tmp_path):
    store = Store(tmp_path)
    done, begun, absent, held = (task(run(seed=s)) for s in range(4))
    for r in (done, begun, held):
        store.folder(r).mkdir(parents=True)
        (store.folder(r) / "run.json").write_text("{}")
    result = Result("diverged", 1, None, None, 1, 1.0, 1.0, "x")
    (store.folder(done) / "result.json").write_text(json.dumps(asdict(result)))
    with store.holding(held) as lock:
        assert lock is not None
        counts = store.counts([done, begun, absent, held, done])
    assert counts == Counts(runs=4, done=0, diverged=1, running=1, interrupted=1, missing=1)
    assert counts.unfinished == 3
