"""A real SLURM of one node on loopback, for tests: munge, slurmctld and slurmd, started and stopped by their ids."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={one}
SlurmdPort={two}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
JobRequeue=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=30
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=500 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes={host} MaxTime=INFINITE State=UP PriorityTier=2
"""


def missing():
    """Why there can be no SLURM here; None if there can."""
    if getpass.getuser() != "root":
        return "a SLURM of one's own needs root"
    absent = [p for p in PROGRAMS if shutil.which(p, path=PLACES) is None]
    return f"needs Debian's slurm-wlm and munge: no {', '.join(absent)}" if absent else None


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition, what, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} never happened"
        time.sleep(0.1)


@contextmanager
def cluster(folder: Path):
    """Yields the environment in which SLURM's commands talk to this cluster."""
    folder.mkdir(parents=True)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    folder.chmod(0o755)
    host = socket.gethostname().split(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, one=free_port(), two=free_port(), folder=folder, user=getpass.getuser()))
    environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": PLACES}
    started = []

    def start(*words):
        program = shutil.which(words[0], path=PLACES)
        with (folder / f"{words[0]}.out").open("wb") as log:
            started.append(subprocess.Popen([program, *words[1:]], env=environment, stdout=log, stderr=log))

    try:
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        wait_until((folder / "munge.socket").exists, "munge")
        start("slurmctld", "-D", "-i")
        start("slurmd", "-D", "-N", host)
        wait_until(lambda: "idle" in said(environment, "sinfo", "-h", "-o", "%T"), "an idle node")
        yield environment
    finally:
        said(environment, "scancel", "--user", getpass.getuser())
        for process in reversed(started):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def said(environment, *words):
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    return ended.stdout.strip()
