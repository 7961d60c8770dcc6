"""Commands on Ray: tuned as on this machine, on two nodes of which one dies; a failing one shows its last lines."""

import threading
import warnings

import pytest

import completep as cp
from completep.errors import UserError
from tests.tuning.commands import BOWL, LOSS, SPACE, WORDS, WRITE, script, tuned
from tests.waiting import wait_until

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_a_script_is_tuned_on_ray(tmp_path):
    try:
        result = tuned(tmp_path / "ray", engine="ray", workers=2, seeds=1)
        assert result.failed == 0
        assert result.runs["loss"].is_finite().all()
        bad = script(tmp_path, "raise SystemExit('no data on this node')\n" + WRITE % "2.5")
        with pytest.raises(UserError, match=r"(?s)the first run failed.*no data on this node"):
            cp.tune(bad, space={"lr": "2^-9..2^-5"}, loss="{folder}/m.json:loss", out=tmp_path / "bad", engine="ray")
    finally:
        ray.shutdown()
    here = tuned(tmp_path / "here", seeds=1)
    assert here.to_json() == result.to_json()


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes on loopback."""
    monkeypatch.setenv("RAY_worker_niceness", "0")  # other tests would starve its nodes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        made.second = made.add_node(num_cpus=1)
        made.wait_for_nodes()
        yield made
        ray.shutdown()
        made.shutdown()


def test_two_nodes_share_the_commands_and_one_dies(tmp_path, cluster):
    """What ran on the dead node is run again on the other, and the answer is that of this machine."""
    slow, log = tmp_path / "bowl.py", tmp_path / "log"
    slow.write_text("import time\ntime.sleep(1)\n" + BOWL.read_text())
    command = f"python {slow} {WORDS} --log {log}"
    settings = {"space": SPACE, "loss": LOSS, "proxies": [(64, 8)], "seeds": 2, "most_seeds": 2}
    store = tmp_path / "ray" / "store"

    def on_second(ended):
        mine = f"on node {cluster.second.node_id}"
        logs = [path for path in store.glob("*/log.txt") if mine in path.read_text()]
        return [p.parent for p in logs if (p.parent / "result.json").exists() == ended]

    def kill():
        wait_until(lambda: on_second(True) and on_second(False))  # it has done one, and is at work on another
        cluster.remove_node(cluster.second, allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    far = cp.tune(command, **settings, engine="ray", address=cluster.address, out=tmp_path / "ray")
    killer.join(120)
    assert not killer.is_alive()
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)  # Ray notices missing heartbeats
    nodes = [
        [line for line in p.read_text().splitlines() if line.startswith("on node")] for p in store.glob("*/log.txt")
    ]
    assert len({line for lines in nodes for line in lines}) == 2
    assert any(len(set(lines)) == 2 for lines in nodes)  # begun there, ended here
    ended = log.read_text().splitlines()
    assert len(set(ended)) == far.conducted.needed
    assert len(ended) <= far.conducted.needed + 1  # the one that was killed may have logged just before
    near = cp.tune(command, **settings, out=tmp_path / "here")
    assert near.to_json() == far.to_json()
