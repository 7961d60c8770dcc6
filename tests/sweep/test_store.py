"""The store: one folder per task, however many points share it, and a lock that ends with its owner."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from completep.config import Shape
from completep.errors import UserError
from completep.sweep.store import Counts, Store, parse_result
from completep.sweep.training import canonical
from completep.train.folder import write_result
from completep.train.records import Result
from tests.hostile import PLANTED, plant, within
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


HUGE = "1" + "0" * 400
WRONG = [
    f'{{"status": "done", {field}}}'
    for field in (
        f'"validation_loss": {HUGE}', f'"tokens": {HUGE}', f'"seconds": {HUGE}', '"seconds": 1e300', '"loss": -1.0',
        '"validation_loss": NaN', '"train_loss": Infinity', '"tokens": true', '"step": "x"', '"data_sha256": []',
        '"validation_loss": [1]',
    )
]  # fmt: skip


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"status": "fine"}', "[" * 10**5, *WRONG])
def test_a_damaged_result_is_an_error(tmp_path, text):
    store = Store(tmp_path)
    write(store, task(run()))
    path = store.folder(task(run())) / "result.json"
    path.write_text(text)
    for read in (store.result, lambda t: store.results([t]), lambda t: store.counts([t]), store.state):
        with pytest.raises(UserError, match="is damaged"):
            read(task(run()))


def test_a_flipped_bit_in_a_result_is_an_error(tmp_path):
    store = Store(tmp_path)
    folder = store.folder(task(run()))
    folder.mkdir(parents=True)
    write_result(folder, Result("done", 10, 2.0, 2.0, 640, 1.0, 640.0, "0" * 64))
    assert store.result(task(run()))["validation_loss"] == 2.0
    text = (folder / "result.json").read_text()
    (folder / "result.json").write_text(text.replace('"validation_loss": 2.0', '"validation_loss": 3.0'))
    with pytest.raises(UserError, match="does not match its digest"):
        store.result(task(run()))


# -- the index -------------------------------------------------------------------------------------------------


def three(tmp_path):
    store, tasks = Store(tmp_path), [task(run(seed=s)) for s in range(4)]
    store.open()
    for i, r in enumerate(tasks[:3]):
        write(store, r, loss=float(i))
    return store, tasks


def losses(store, tasks):
    return [result["validation_loss"] for result in store.results(tasks).values()]


def test_the_index_saves_reading_and_changes_nothing(tmp_path, monkeypatch):
    store, tasks = three(tmp_path)
    plain = store.results(tasks)
    store.write_index(tasks)
    monkeypatch.setattr("completep.sweep.store.read_text", lambda path: pytest.fail(f"{path} was read"))
    assert {name: {**result, "files": {}} for name, result in store.results(tasks).items()} == plain
    assert store.counts(tasks) == Counts(runs=4, done=3, missing=1)


def forged(body):
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


FORGED = [b"[]", b"5", b'{"ID": 5}', b'{"ID": [[1, 2, 3], 5]}', b'{"ID": [[1, 2, 3], {}]}', b'{"ID": [1, 2, 3]}']
FORGED += [b"[" * 10**5, b'{"ID": [null, {"status": "done", "loss": 1' + b"0" * 400 + b"}]}"]


@pytest.mark.parametrize("damage", [b"", b"x", b"0" * 64 + b"\n{}", *map(forged, FORGED)])
def test_a_damaged_index_is_not_used(tmp_path, damage):
    store, tasks = three(tmp_path)
    store.write_index(tasks)
    index = tmp_path / ".index"
    good = index.read_bytes()
    damage = forged(damage.partition(b"\n")[2].replace(b"ID", tasks[0].id.encode())) if b"ID" in damage else damage
    index.write_bytes(damage or good.replace(b'"validation_loss":1.0', b'"validation_loss":9.0'))
    assert losses(store, tasks) == [0.0, 1.0, 2.0]
    store.write_index(tasks)
    assert index.read_bytes() == good  # made again


def test_a_stale_index_is_not_used(tmp_path):
    store, tasks = three(tmp_path)
    store.write_index(tasks[:2])
    shutil.rmtree(store.folder(tasks[0]))
    path = store.folder(tasks[1]) / "result.json"
    path.write_text(path.read_text().replace("1.0", "5.0"))
    assert losses(store, tasks) == [5.0, 2.0]


def test_looking_writes_nothing(tmp_path):
    store = Store(tmp_path / "store")
    store.look()
    assert store.counts([task(run())]) == Counts(runs=1, missing=1)
    assert not store.root.exists()
    store, tasks = three(tmp_path / "full")
    before = sorted(store.root.rglob("*"))
    store.look()
    store.frame([({}, t) for t in tasks])
    store.counts(tasks)
    assert sorted(store.root.rglob("*")) == before


@pytest.mark.parametrize("text", ["[]", "{", "[" * 10**5, '{"format": 2}', "3"])
def test_a_store_of_another_kind_is_refused(tmp_path, text):
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(UserError, match="has format"):
        Store(tmp_path).look()


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "store").write_text("")
    for call in (Store.look, Store.open):
        with pytest.raises(UserError, match="is a file, not a folder"):
            call(Store(tmp_path / "store"))


def test_planted_links_are_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    store = Store(tmp_path / "store")
    store.open()
    (store.root / f"{task(run()).id}.lock").symlink_to(victim)
    (store.root / ".index").symlink_to(victim)
    write(store, task(run()))
    store.write_index([task(run())])
    with pytest.raises(UserError, match="cannot write"), store.holding(task(run())):
        pass
    assert victim.read_text() == "precious"


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


def test_a_loop_of_links_is_an_error_and_not_a_traceback(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for place in (loop, loop / "store"):
        with pytest.raises(UserError, match="loop"):
            Store(place).open()


def test_a_result_does_not_change_the_labels_of_a_study(tmp_path):
    store, r = Store(tmp_path), task(run())
    store.folder(r).mkdir(parents=True)
    content = {"status": "done", "validation_loss": 2.0, "depth": 999, "lr": 0.5, "run": "x", "extra": [1, {"a": 2}]}
    (store.folder(r) / "result.json").write_text(json.dumps(content))
    (row,) = store.frame([({"depth": 2, "lr": 0.1}, r)]).rows(named=True)
    assert row == {"depth": 2, "lr": 0.1, "status": "done", "validation_loss": 2.0, "run": r.id}


@pytest.mark.parametrize("name", ["store.json", ".index", "ID/result.json"])
@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_no_file_is_refused_at_once(tmp_path, name, kind):
    store, tasks = three(tmp_path)
    plant(tmp_path / name.replace("ID", tasks[0].id), kind)

    def look():
        store.look()
        return store.counts(tasks).done

    with within():
        if name == ".index":  # as good as none
            assert look() == 3
            store.write_index(tasks)
        else:
            with pytest.raises(UserError, match=name.rpartition("/")[2]):
                look()


def test_a_loss_too_small_for_a_share_of_it_is_damage(tmp_path):
    with pytest.raises(UserError, match="its loss is 1e-300"):
        parse_result('{"status": "done", "loss": 1e-300}', tmp_path / "result.json")
    assert parse_result('{"status": "done", "loss": 0.0}', tmp_path / "result.json")["loss"] == 0
