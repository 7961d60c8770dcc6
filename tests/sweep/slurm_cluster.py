"""A real SLURM on loopback, for tests: munge, slurmctld and a slurmd per node, started and stopped by their ids."""

import getpass
import os
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
PLACES = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={one}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
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
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=500 State=UNKNOWN\n"


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


@contextmanager
def cluster(folder: Path, nodes: int = 1):
    """Yields the environment in which SLURM's commands talk to this cluster. All nodes are this machine."""
    folder.mkdir(parents=True)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    folder.chmod(0o755)
    host = socket.gethostname().split(".")[0]
    conf = folder / "slurm.conf"
    names = [f"node{i}" for i in range(nodes)]
    lines = [NODE.format(name=name, host=host, port=free_port()) for name in names]
    conf.write_text(CONF.format(host=host, one=free_port(), folder=folder, user=getpass.getuser()) + "".join(lines))
    environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": PLACES}
    started = []

    def start(*words):
        program = shutil.which(words[0], path=PLACES)
        with (folder / f"{words[0]}.out").open("ab") as log:
            started.append(subprocess.Popen([program, *words[1:]], env=environment, stdout=log, stderr=log))

    try:
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        wait_until((folder / "munge.socket").exists, "munge")
        start("slurmctld", "-D", "-i")
        for name in names:
            (folder / "spool" / name).mkdir()
            start("slurmd", "-D", "-N", name)
        idle = " ".join(["idle"] * nodes)
        wait_until(
            lambda: said(environment, "sinfo", "-h", "-N", "-p", "low", "-o", "%T").split() == idle.split(), "idle"
        )
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
