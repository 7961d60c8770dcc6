"""Claims by heartbeat, as on a network file system: one owner at a time, whatever the clocks say and whoever dies."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from completep.errors import UserError
from completep.sweep import claims
from completep.sweep.claims import Claim, beating, claims_for, file_system
from completep.sweep.engine import Engine
from completep.sweep.local import Local
from completep.sweep.queue import ask, asked, failure, queue_folder, read_task
from completep.sweep.store import Store
from completep.sweep.worker import Worker
from completep.tuning.reading import Source
from completep.tuning.tasks import Call, Command
from tests.hostile import PLANTED, plant, within
from tests.sweep.tasks import Script, commands, run, task
from tests.tuning.commands import SETTING
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(claims, "BEAT", 0.1)
    monkeypatch.setattr(claims, "STALE", 60)  # a live claim may be slow to beat on a loaded machine
    monkeypatch.setattr(claims, "LOOK", 0.02)


@pytest.fixture
def dead_soon(monkeypatch):
    monkeypatch.setattr(claims, "STALE", 1.5)


def heartbeat_store(folder):
    """A store as it is made on NFS."""
    store = Store(folder)
    store.open()
    manifest = json.loads((folder / "store.json").read_text())
    assert manifest["claims"] == claims_for(folder)
    (folder / "store.json").write_text(json.dumps({**manifest, "claims": "heartbeat"}))
    assert store.claims == "heartbeat"
    return store


def test_the_file_system_decides(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\nfs {tmp_path}/a\\040b lustre rw 0 0\n"
    )
    assert file_system(tmp_path / "deep" / "er", mounts) == "nfs4"
    assert file_system(tmp_path / "a b" / "c", mounts) == "lustre"
    assert file_system(Path("/usr"), mounts) == "ext4"
    assert file_system(Path("/usr"), tmp_path / "absent") == ""
    assert all(
        kind.startswith(claims.NETWORK) for kind in ("nfs", "nfs4", "lustre", "gpfs", "fuse.sshfs", "cifs", "9p")
    )
    assert not any(kind.startswith(claims.NETWORK) for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", ""))


def test_one_owner_at_a_time(tmp_path):
    path = tmp_path / "x.claim"
    with beating(path) as mine:
        assert mine is not None
        with beating(path) as theirs:
            assert theirs is None
    assert not path.exists()
    with beating(path) as again:
        assert again is not None


@pytest.mark.parametrize("skew", [-1e6, 1e6])
def test_a_live_claim_is_not_taken_whatever_its_time_says(tmp_path, skew):
    """The clock of the file server, or of the other machine, is days off."""
    path, over = tmp_path / "x.claim", threading.Event()

    def shift():
        while not over.wait(0.02):
            if path.exists():
                os.utime(path, (time.time() + skew,) * 2)

    with beating(path) as mine:
        assert mine is not None
        thread = threading.Thread(target=shift)
        thread.start()
        try:
            with beating(path) as theirs:
                assert theirs is None
        finally:
            over.set()
            thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("skew", [-1e6, 0, 1e6])
def test_a_dead_claim_is_taken_whatever_its_time_says(tmp_path, skew, dead_soon):
    path = tmp_path / "x.claim"
    dead = Claim(path)
    assert dead.take()  # and it never beats
    os.utime(path, (time.time() + skew,) * 2)
    began = time.monotonic()
    with beating(path) as mine:
        assert mine is not None
        assert time.monotonic() - began >= claims.STALE
        assert not dead.mine()
        dead.release()  # the dead one comes back: it does not remove the new claim
        assert path.exists()


@pytest.mark.slow
def test_many_want_a_dead_claim_and_one_gets_it(tmp_path, monkeypatch, dead_soon):
    path, got, hold = tmp_path / "x.claim", [], threading.Event()
    assert Claim(path).take()

    def want():
        with beating(path) as mine:
            if mine is not None:
                monkeypatch.setattr(claims, "STALE", 60)
                got.append(mine)
                hold.wait(300)

    threads = [threading.Thread(target=want) for _ in range(6)]
    for t in threads:
        t.start()
    wait_until(lambda: sum(t.is_alive() for t in threads) <= 1)
    hold.set()
    for t in threads:
        t.join()
    assert len(got) == 1


def test_a_release_in_the_middle_of_a_heartbeat_is_no_loss(tmp_path, monkeypatch):
    """A heartbeat that is being written while its owner finishes must not take the removed file for a lost claim."""
    path, writing, signals = tmp_path / "x.claim", threading.Event(), []

    def slow_disk(descriptor):
        writing.set()
        deadline = time.monotonic() + 0.5
        while path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    monkeypatch.setattr(claims.os, "fsync", slow_disk)
    monkeypatch.setattr(claims.os, "kill", lambda *words: signals.append(words))
    before = threading.active_count()
    with beating(path) as mine:
        assert mine is not None
        assert writing.wait(30)
    assert not path.exists()
    assert threading.active_count() == before
    assert signals == []


def test_an_owner_that_lost_its_claim_stops(tmp_path):
    """A machine that slept: its claim was taken over, so that its process gets SIGTERM."""
    code = (
        "import sys, time, pathlib\nfrom completep.sweep import claims\nclaims.BEAT = 0.1\n"
        "with claims.beating(pathlib.Path(sys.argv[1])) as mine:\n    print('owned', flush=True)\n    time.sleep(60)"
    )
    path = tmp_path / "x.claim"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout.readline() == "owned\n"
        path.unlink()
        assert owner.wait(30) == -signal.SIGTERM


@pytest.mark.slow
def test_an_engine_works_on_such_a_store(tmp_path):
    store, events = heartbeat_store(tmp_path / "store"), []
    scripts = [Script(str(i), float(i)) for i in range(3)]
    assert Engine(store, Local(2), events.append).run(scripts) == []
    assert [e.kind for e in events].count("done") == 3
    assert not list(store.root.glob("*.claim"))
    assert not list(store.root.glob("*.lock"))


def test_tasks_are_written_down_and_read_again(tmp_path):
    (command, *_), _ = commands(tmp_path, 1)
    call = Call("mine.py:train", command.setting, (("mine.py", "abc"),))
    store = Store(tmp_path / "store")
    store.open()
    for one in (command, call, task(run())):
        ask(store, one)
        assert read_task(queue_folder(store) / f"{one.id}.json") == one
    assert {t.id for t in asked(store)} == {command.id, call.id, task(run()).id}
    with pytest.raises(UserError, match="cannot be sent to another machine"):
        ask(store, Script("x"))


def changed(kind, **changes):
    """A file of the queue with other fields than a task can have."""
    command = Command("run {lr}", Source.parse("output:(x)"), SETTING, (), "/")
    task = command if kind == "command" else Call("mine.py:train", SETTING, ())
    return json.dumps({"kind": kind, "task": task.to_json() | changes})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not a task"),
        ('{"kind": "os:system", "task": {}}', "is not a task: 'os:system'"),
        ('{"kind": "command", "task": {}}', "is not a task"),
        ("[]", "is not a task"),
        (changed("function", target=5), "is not a task"),
        (changed("command", template=5), "is not a task"),
        (changed("command", template="{zzz}"), "is not a task: 'zzz'"),
        (changed("command", ranks="many"), "is not a task"),
        (changed("command", ranks=0), "is not a task: ranks=0"),
        (changed("command", folder=5), "is not a task: its folder"),
        (changed("command", bar=[{"step": 1, "loss": "x"}]), "is not a task"),
        (changed("command", setting=asdict(SETTING) | {"values": [["lr", math.inf]]}), "is not a task"),
    ],
)
def test_what_is_no_task_is_refused(tmp_path, text, said):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=said):
        read_task(tmp_path / "x.json")


def test_a_task_of_another_user_is_refused(tmp_path, monkeypatch):
    (command, *_), _ = commands(tmp_path, 1)
    store = Store(tmp_path / "store")
    store.open()
    ask(store, command)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UserError, match="belongs to another user"):
        list(asked(store))


def test_a_task_under_another_name_is_refused(tmp_path):
    (command, *_), _ = commands(tmp_path, 1)
    store = Store(tmp_path / "store")
    store.open()
    ask(store, command)
    os.rename(queue_folder(store) / f"{command.id}.json", queue_folder(store) / "000000000000.json")
    with pytest.raises(UserError, match="holds another task"):
        list(asked(store))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kernel", "heartbeat"])
def test_a_worker_does_what_is_asked_and_ends(tmp_path, kind):
    tasks, log = commands(tmp_path, 3)
    store = Store(tmp_path / "store")
    store.open()
    if kind == "heartbeat":
        store = heartbeat_store(tmp_path / "store")
    for one in tasks:
        ask(store, one)
    assert Worker(store, idle=0).run() == 3
    assert sorted(log.read_text().split()) == ["0", "1", "2"]
    assert Worker(store, idle=0.01).run() == 0
    (tmp_path / "script.py").write_text("raise SystemExit('broken')")
    (bad, *_), _ = commands(tmp_path / ".", 1)
    (tmp_path / "script.py").write_text("raise SystemExit('broken')")
    from dataclasses import replace

    bad = replace(bad, setting=replace(bad.setting, seed=99))
    ask(store, bad)
    assert Worker(store, idle=0.01).run() == 0
    assert "broken" in failure(store, bad)
    assert list(asked(store)) == []


@pytest.mark.slow
def test_three_workers_share_a_store_and_a_killed_one_frees_its_run(tmp_path):
    tasks, log = commands(tmp_path, 12)
    store = heartbeat_store(tmp_path / "store")
    for one in tasks:
        ask(store, one)
    code = "import sys\nfrom completep.cli import main\nsys.exit(main(['worker', sys.argv[1], '--idle', '1']))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COMPLETEP_HEARTBEAT": "0.4"}
    workers = [
        subprocess.Popen([sys.executable, "-c", code, str(store.root)], env=environment,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        for _ in range(3)
    ]  # fmt: skip
    wait_until(lambda: log.exists() and len(log.read_text().split()) >= 2)
    os.killpg(workers[0].pid, signal.SIGKILL)
    assert [w.wait(90) for w in workers] == [-signal.SIGKILL, 0, 0]
    ended = log.read_text().split()
    assert set(map(int, ended)) == set(range(12))
    assert len(ended) <= 12 + 1  # the run of the killed worker may have been between its last line and its result
    assert store.counts(tasks).done == 12


@pytest.mark.parametrize("kind", PLANTED)
def test_a_claim_that_is_no_file_is_refused_at_once(tmp_path, kind):
    plant(tmp_path / "x.claim", kind)
    with within(), pytest.raises(UserError, match="is not a claim"), beating(tmp_path / "x.claim"):
        pass


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "1e9"])
def test_a_heartbeat_that_is_no_time_is_an_error(text, monkeypatch):
    monkeypatch.setenv("COMPLETEP_HEARTBEAT", text)
    with pytest.raises(UserError, match=f"COMPLETEP_HEARTBEAT is '{text}'"):
        claims.heartbeat()
    monkeypatch.setenv("COMPLETEP_HEARTBEAT", "0.4")
    assert claims.heartbeat() == 0.4
