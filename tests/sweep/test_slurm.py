"""A real SLURM of one node: array workers share the runs; one is cancelled, one preempted, each run is done once."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import completep as cp
from completep.errors import UserError
from completep.sweep import slurm
from completep.sweep.conduct import conduct
from completep.sweep.engine import Engine
from completep.sweep.slurm import Slurm
from completep.sweep.store import Store
from completep.sweep.task import Point, Trial
from completep.tuning.reading import Source
from completep.tuning.tasks import Command
from tests.sweep.slurm_cluster import PLACES, cluster, missing, said
from tests.sweep.tasks import commands
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def real_slurm(tmp_path_factory, monkeypatch, request):
    """One node, or as many as the test's parameter says."""
    why = missing()
    if why:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    folder.parent.chmod(0o755)
    with cluster(folder, getattr(request, "param", 1)) as environment:
        monkeypatch.setenv("SLURM_CONF", environment["SLURM_CONF"])
        monkeypatch.setenv("PATH", environment["PATH"])
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setattr(slurm, "LOOK", 0.5)
        yield environment


@pytest.mark.slow
def test_twenty_runs_over_three_workers_one_cancelled_one_preempted(tmp_path, real_slurm):
    tasks, log = commands(tmp_path, 20)
    store = Store(tmp_path / "store")
    store.open()
    backend, events, errors = Slurm(3, {"partition": "low", "idle": "30"}), [], []

    def drive():
        try:
            assert Engine(store, backend, events.append).run(tasks) == []
        except BaseException as error:  # shown by the test's own thread
            errors.append(error)

    driver = threading.Thread(target=drive)
    driver.start()
    try:
        wait_until(lambda: states(real_slurm).count("RUNNING") == 3, "three workers")
        wait_until(lambda: log.exists() and len(log.read_text().split()) >= 3, "three runs")
        said(real_slurm, "scancel", f"{backend.job}_0")
        wait_until(lambda: states(real_slurm).count("RUNNING") <= 2, "a cancelled worker")
        high = "#!/bin/bash\n#SBATCH --partition=high --ntasks=1 --cpus-per-task=3 --output=/dev/null\nsleep 3\n"
        (tmp_path / "high.sh").write_text(high)
        urgent = said(real_slurm, "sbatch", "--parsable", str(tmp_path / "high.sh"))
        wait_until(lambda: "RUNNING" in said(real_slurm, "squeue", "-h", "-o", "%T", "-j", urgent), "the urgent job")
        restarted = said(real_slurm, "squeue", "-h", "-r", "-o", "%i %T %r", "-j", backend.job)
        assert any(state in restarted for state in ("PENDING", "REQUEUED", "COMPLETING"))  # preempted, to come back
    finally:
        driver.join(150)
        backend.close()
    assert not errors, errors
    assert not driver.is_alive()
    ended = log.read_text().split()
    assert set(map(int, ended)) == set(range(20))
    assert len(ended) <= 20 + 2  # each once, but for those two that may have been stopped just before their result
    assert all(store.result(task)["loss"] == 2.0 + i for i, task in enumerate(tasks))
    assert not list((store.root / ".queue").iterdir())
    assert states(real_slurm) == []
    again = []
    assert Engine(store, Slurm(3), again.append).run(tasks) == []
    assert again == []


def states(environment):
    return said(environment, "squeue", "-h", "-r", "-o", "%T").split()


@pytest.mark.slow
def test_a_failing_run_shows_its_lines_and_a_job_that_cannot_start_is_an_error(tmp_path, real_slurm):
    tasks, _ = commands(tmp_path, 2)
    (tmp_path / "script.py").write_text("raise SystemExit('no such data')")
    store = Store(tmp_path / "store")
    store.open()
    trials = [Trial(Point(seed=i), task) for i, task in enumerate(tasks)]
    with pytest.raises(UserError, match=r"the first run failed.*\n.*exit code 1\nno such data"):
        conduct(trials, store, Slurm(1, {"idle": "30"}), fail_fast=True)
    assert states(real_slurm) == []  # the workers were told to end
    with pytest.raises(UserError, match=r"refuses.*invalid partition"):
        conduct(trials, store, Slurm(1, {"partition": "absent"}))
    with pytest.raises(UserError, match="workers end before their work is done"):
        conduct(trials, store, Slurm(1, {"setup": "echo no module here; exit 1"}))


def test_no_slurm_is_an_error(tmp_path, monkeypatch):
    tasks, _ = commands(tmp_path, 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no sbatch here"):
        Slurm().open(Store(tmp_path / "store"), tasks)


@pytest.mark.slow
def test_a_slurm_that_does_not_answer_is_an_error(tmp_path, monkeypatch):
    if shutil.which("sinfo", path=PLACES) is None:
        pytest.skip("needs Debian's slurm-wlm")
    (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setattr(slurm, "ANSWER", 3)
    with pytest.raises(UserError, match="SLURM cannot be reached"):
        Slurm().open(Store(tmp_path / "store"), commands(tmp_path, 1)[0])


def test_the_script_has_every_option(tmp_path):
    options = {
        "partition": "gpu", "account": "lab", "qos": "long", "gres": "gpu:1", "time": "2:00:00", "constraint": "a100",
        "nodes": "2", "mem": "8G", "cpus": "4", "setup": "module load cuda", "idle": "7",
    }  # fmt: skip
    text = Slurm(5, options).script(Store(tmp_path / "a store"))
    flags = "partition=gpu account=lab qos=long gres=gpu:1 time=2:00:00 constraint=a100 nodes=2 mem=8G cpus-per-task=4"
    for flag in (*flags.split(), "array=0-4", "requeue", "signal=B:USR1@120"):
        assert f"#SBATCH --{flag}\n" in text
    assert "module load cuda\nexec " in text
    assert f"-m completep worker '{tmp_path}/a store' --idle 7\n" in text
    with pytest.raises(UserError, match="unknown option 'partitoin'"):
        Slurm(1, {"partitoin": "gpu"})
    with pytest.raises(UserError, match="several lines"):
        Slurm(1, {"partition": "gpu\n#SBATCH --uid=0"})


@pytest.mark.slow
def test_a_worker_that_is_warned_before_its_time_limit_saves_and_requeues(tmp_path, real_slurm):
    """SIGUSR1, as SLURM sends it: the run is stopped, and the job is put back."""
    tasks, _ = commands(tmp_path, 1)
    (tmp_path / "script.py").write_text("import time; time.sleep(600)")
    store = Store(tmp_path / "store")
    store.open()
    backend = Slurm(1, {"idle": "30"})
    backend.open(store, tasks)
    backend.start(tasks[0])
    backend.wait(0)
    wait_until(lambda: store.held(tasks[0]), "a run")
    said(real_slurm, "scancel", "--signal=USR1", "--batch", f"{backend.job}_0")
    wait_until(lambda: not store.held(tasks[0]), "a saved run")
    wait_until(lambda: "PENDING" in states(real_slurm), "a requeued job")
    backend.stop()
    assert store.result(tasks[0]) is None
    assert states(real_slurm) == []


@pytest.mark.slow
def test_tune_runs_on_slurm(tmp_path, real_slurm):
    bowl = ROOT / "tests" / "tuning" / "bowl.py"
    words = "--width {width} --depth {depth} --lr {lr} --seed {seed} --out {folder}"
    command = [
        sys.executable, "-m", "completep", "tune", f"python {bowl} {words}",
        "--loss", "{folder}/metrics.jsonl:val_loss", "--space", "lr=2^-9..2^-5",
        "--proxies", "64x8", "--engine", "slurm", "--workers", "3", "--out", str(tmp_path),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert ended.returncode == 0, ended.stderr
    assert "PASS" in ended.stdout
    assert states(real_slurm) == []


RANKS = """
import json, os, pathlib, sys
import torch.distributed as dist, torch
folder, lr, seed, depth = pathlib.Path(sys.argv[1]), *map(float, sys.argv[2:])
dist.init_process_group("gloo")
nodes = [None] * dist.get_world_size()
dist.all_gather_object(nodes, os.environ["SLURMD_NODENAME"])
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
if dist.get_rank() == 0:
    loss = 2 + 0.03 * (lr.as_integer_ratio()[1].bit_length() - 8) ** 2 + 0.01 * seed - 0.001 * depth * (1 + 0.1 * seed)
    result = {"loss": loss, "nodes": sorted(nodes), "total": total.item()}
    (folder / "m.json").write_text(json.dumps(result))
dist.destroy_process_group()
"""
# As docs/tune.md says it.
RENDEZVOUS = "export PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=$(hostname):$((20000 + SLURM_JOB_ID % 10000))"


@pytest.mark.slow
@pytest.mark.parametrize("real_slurm", [2], indirect=True)
def test_a_run_over_two_nodes_by_srun_and_torchrun(tmp_path, real_slurm):
    """Two workers, each with an allocation of two nodes, in which every run is one torchrun per node."""
    assert RENDEZVOUS in (ROOT / "docs" / "tune.md").read_text()
    (tmp_path / "ranks.py").write_text(RANKS)
    torchrun = f"srun {sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1"
    result = cp.tune(
        f"{torchrun} {tmp_path / 'ranks.py'} {{folder}} {{lr}} {{seed}} {{depth}}", space={"lr": "2^-9..2^-5"},
        loss="{folder}/m.json:loss", seeds=2, most_seeds=2, engine="slurm", workers=2, out=tmp_path / "runs",
        slurm={"nodes": "2", "setup": f"{RENDEZVOUS} GLOO_SOCKET_IFNAME=lo"},
    )  # fmt: skip
    assert result.failed == 0
    made = [json.loads(path.read_text()) for path in (tmp_path / "runs" / "store").glob("*/work/m.json")]
    assert len(made) == result.conducted.needed
    assert all(run["nodes"] == ["node0", "node1"] and run["total"] == 1.0 for run in made)
    assert states(real_slurm) == []


@pytest.mark.slow
@pytest.mark.parametrize("real_slurm", [2], indirect=True)
def test_a_run_over_two_nodes_that_is_stopped_ends_on_both(tmp_path, real_slurm):
    """Cancelled workers pass SIGTERM on through srun, and no process is left on a node."""
    code = (
        "import os, pathlib, signal, sys, time\n"
        "place = pathlib.Path(sys.argv[1]) / os.environ['SLURMD_NODENAME']\n"
        "signal.signal(signal.SIGTERM, lambda *_: (place.with_suffix('.saved').write_text(''), sys.exit(0)))\n"
        "place.write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    (tmp_path / "waits.py").write_text(code)
    (tmp_path / "said").mkdir()
    task = Command(
        f"srun {sys.executable} {tmp_path / 'waits.py'} {tmp_path / 'said'} {{seed}}",
        Source.parse("{folder}/m.json:loss"), commands(tmp_path, 1)[0][0].setting, (), str(tmp_path),
    )  # fmt: skip
    store = Store(tmp_path / "store")
    store.open()
    backend = Slurm(1, {"nodes": "2", "idle": "30"})
    backend.open(store, [task])
    backend.start(task)
    backend.wait(0)
    places = [tmp_path / "said" / f"node{i}" for i in range(2)]
    wait_until(lambda: all(p.exists() and p.read_text() for p in places), "two ranks")
    pids = [int(p.read_text()) for p in places]
    backend.stop()
    assert states(real_slurm) == []
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of both ranks")
    assert all(p.with_suffix(".saved").exists() for p in places)
    assert store.result(task) is None
