"""The engine on a real Ray cluster of two nodes on loopback, one of which dies in the middle."""

import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from completep.errors import UserError
from completep.sweep.engine import Engine
from completep.sweep.local import Local
from completep.sweep.on_ray import OnRay
from completep.sweep.store import Store
from completep.sweep.training import Training
from tests.sweep.tasks import SELDOM
from tests.train.runs import small_data, small_run
from tests.waiting import wait_until

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def cluster():
    os.environ.setdefault("RAY_worker_niceness", "0")  # the other test worker would starve its nodes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_two_nodes_one_killed(data, cluster, tmp_path):
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    runs = [Training.of(small_run(data, seed=seed, steps=400), SELDOM) for seed in range(6)]
    events = []

    def kill_the_second() -> None:
        """Once it has taken a checkpoint in a run of its own."""
        wait_until(lambda: any(list(folder.glob("checkpoints/step-*")) for folder in on_second()))
        cluster.remove_node(second, allow_graceful=False)

    def on_second():
        mine = f"on node {second.node_id}"
        return [path.parent for path in (tmp_path / "ray").glob("*/log.txt") if mine in path.read_text()]

    def logs():
        return [path.read_text() for path in (tmp_path / "ray").glob("*/log.txt")]

    killer = threading.Thread(target=kill_the_second)
    store = Store(tmp_path / "ray")
    engine = Engine(store, OnRay(cluster.address), events.append)
    store.root.mkdir()
    killer.start()
    assert engine.run(runs) == []
    killer.join()
    assert len({line for text in logs() for line in text.splitlines() if line.startswith("on node")}) == 2
    assert any(text.count("on node") == 2 for text in logs())  # what was lost there continued here
    assert sum(n["Alive"] for n in ray.nodes()) == 1
    kinds = [e.kind for e in events]
    assert kinds.count("done") == 6
    assert "failed" not in kinds
    assert Engine(Store(tmp_path / "local"), Local()).run(runs) == []
    columns = ["run", "status", "step", "train_loss", "validation_loss"]
    far, near = (Store(tmp_path / n).frame([({}, r) for r in runs]).select(columns) for n in ("ray", "local"))
    assert far.equals(near)
    events.clear()
    assert engine.run(runs) == []  # nothing is left to do
    assert events == []


@pytest.mark.filterwarnings("ignore")
def test_what_fails_on_a_node_is_told(data, cluster, tmp_path):
    from dataclasses import replace

    good = small_run(data, seed=1)
    bad = replace(good, model=replace(good.model, vocabulary=100))
    events = []
    store = Store(tmp_path)
    tasks = [Training.of(bad, SELDOM), Training.of(good, SELDOM)]
    failed = Engine(store, OnRay(cluster.address), events.append).run(tasks)
    assert [t.run.model.vocabulary for t in failed] == [100]
    assert "vocabulary of 100" in next(e for e in events if e.kind == "failed").detail
    assert [e.kind for e in events].count("done") == 1


@pytest.mark.filterwarnings("ignore")
def test_no_cluster_at_the_address(data, tmp_path):
    if ray.is_initialized():
        ray.shutdown()
    for address in ("127.0.0.1:1", "nowhere", "127.0.0.1:port"):
        with pytest.raises(UserError, match="no Ray cluster at"):
            Engine(Store(tmp_path), OnRay(address)).run([Training.of(small_run(data))])


DRIVER = """
import glob, os, sys
from pathlib import Path
from completep.sweep.conduct import conduct
from completep.sweep.on_ray import OnRay
from completep.sweep.store import Store
from completep.sweep.task import Point, Trial
from completep.sweep.training import Training
from contextlib import contextmanager
from tests.sweep.tasks import SELDOM
from tests.train.runs import small_run

def parents(pid):
    while pid > 1:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return

def listening():
    for name in ("tcp", "tcp6"):
        for words in (line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]):
            if words[3] == "0A":
                yield f"socket:[{words[9]}]", words[1].rpartition(":")[0]

def addresses():
    known = dict(listening())
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            place = known.get(os.readlink(path))
        except OSError:
            continue
        if place is not None and os.getpid() in parents(int(path.split("/")[2])):
            yield place

@contextmanager
def watch(trials, store, at_most):
    def on_event(event):
        print("ADDRESSES", *sorted(set(addresses())), flush=True)
    yield on_event

run = small_run(Path(sys.argv[1]), steps=100_000)
task, store = Training.of(run, SELDOM), Store(Path(sys.argv[2]))
store.open()
try:
    conduct([Trial(Point(), task)], store, OnRay(workers=1), watch=watch)
except KeyboardInterrupt:
    print("ENDED", store.state(task), flush=True)
    sys.exit(130)
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_a_cluster_of_ours_listens_on_loopback_and_sigterm_lets_runs_save(data, tmp_path):
    root = tmp_path / "store"
    outer = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(data), str(root)], stdout=subprocess.PIPE, text=True, env=outer,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    places = next(line for line in driver.stdout if line.startswith("ADDRESSES")).split()[1:]
    assert places
    assert set(places) <= LOOPBACK
    wait_until(lambda: list(root.glob("*/checkpoints/step-*")), process=driver)
    driver.send_signal(signal.SIGTERM)
    rest, _ = driver.communicate(timeout=120)
    assert driver.returncode == 130
    assert "ENDED interrupted" in rest
