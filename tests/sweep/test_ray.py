"""The engine on a real Ray cluster of two nodes on loopback, one of which dies in the middle."""

import os
import threading
import time
import warnings

import pytest

from completep.errors import UserError
from completep.sweep.engine import Engine
from completep.sweep.local import Local
from completep.sweep.on_ray import OnRay
from completep.sweep.store import Store
from completep.sweep.training import Training
from completep.train.loop import How
from tests.train.runs import small_data, small_run

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
HOW = How(checkpoint_every=20, keep=1, peak=None, log_every=20)
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
    runs = [Training.of(small_run(data, seed=seed, steps=400), HOW) for seed in range(6)]
    events = []

    def kill_the_second() -> None:
        """Once it has taken a checkpoint in a run of its own."""
        while not any(p.parent.parent in on_second() for p in (tmp_path / "ray").glob("*/checkpoints/step-*")):
            time.sleep(0.05)
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
    tasks = [Training.of(bad, HOW), Training.of(good, HOW)]
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
