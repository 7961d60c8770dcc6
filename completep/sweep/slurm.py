"""Backend: SLURM. One array job of workers that take tasks from the store, which all nodes must share.

A task is not a job of its own: the cluster sees a few long jobs instead of hundreds of short ones, and a worker starts
its next task at once. If a job is preempted or reaches its time limit, its task saves, and the job is requeued.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from completep.errors import UserError
from completep.files import last_lines, make_folder, write_over
from completep.sweep.engine import Ended
from completep.sweep.queue import ask, failure, withdraw
from completep.sweep.store import Store
from completep.sweep.task import Task

ANSWER = 30  # seconds that SLURM has to answer
GRACE = 90  # seconds that workers have to save and end
LOOK = 5.0  # seconds between two looks at the job
LOSSES = 3  # how often all workers may end early without any task done
BEFORE_END = 120  # seconds before the time limit at which a worker is told to save
OPTIONS = ("partition", "account", "qos", "gres", "time", "constraint", "nodes", "mem", "cpus", "setup", "idle")


@dataclass
class Slurm:
    """Tasks on a SLURM cluster, by `workers` workers."""

    workers: int = 4
    options: Mapping[str, str] = field(default_factory=dict)
    running: dict[str, Task] = field(default_factory=dict)
    job: str | None = None
    losses: int = 0
    next_look: float = 0.0

    def __post_init__(self) -> None:
        for name in self.options:
            if name not in OPTIONS:
                raise UserError(f"slurm: unknown option {name!r}", fix=f"the options are {', '.join(OPTIONS)}")
            if "\n" in self.options[name] and name != "setup":
                raise UserError(f"slurm: {name} has several lines", fix="write it in one line")

    def open(self, store: Store, tasks: Sequence[Task]) -> None:
        self.store, self.ranks = Store(store.root.absolute()), max(task.ranks for task in tasks)
        require_slurm()

    def has_room(self, task: Task) -> bool:
        return True  # the workers decide

    def start(self, task: Task) -> None:
        ask(self.store, task)
        self.running[task.id] = task

    def wait(self, seconds: float) -> list[Ended]:
        self._look()
        done = self.store.results(self.running.values())
        lines = {name: failure(self.store, task) for name, task in self.running.items() if name not in done}
        ended = [n for n in self.running if n in done or lines.get(n) is not None]
        reports = [Ended(self.running[name], detail=lines.get(name) or "") for name in ended]
        for name in ended:
            withdraw(self.store, self.running.pop(name))
        if ended:
            self.losses = 0
        else:
            time.sleep(seconds)
        return reports

    def _look(self) -> None:
        """Submit the workers, and again if all of them are gone."""
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + LOOK
        if self.job is not None and job_states(self.job):
            return
        if self.job is not None:
            self.losses += 1
        if self.losses > LOSSES:
            raise UserError(
                f"the SLURM workers end before their work is done (job {self.job})\n{self._last_log()}",
                fix=f"see the logs in {self.logs}; check the options of the job, such as setup and time",
            )
        script = write_over(self.store.root / ".slurm" / "job.sh", self.script(self.store, self.ranks))
        make_folder(self.logs)
        self.job = submit(script)

    @property
    def logs(self) -> Path:
        return self.store.root / ".slurm" / "logs"

    def _last_log(self) -> str:
        logs = sorted(self.logs.glob("*.out"), key=lambda p: p.stat().st_mtime)
        return last_lines(logs[-1]) if logs else ""

    def script(self, store: Store, ranks: int = 1) -> str:
        """The script for sbatch."""
        o, root = self.options, store.root.absolute()
        flags = {
            name: o[name] for name in ("partition", "account", "qos", "gres", "time", "constraint", "mem") if name in o
        }
        flags |= {"nodes": o.get("nodes", "1"), "cpus-per-task": o.get("cpus", str(ranks)), "ntasks-per-node": "1"}
        flags |= {"array": f"0-{self.workers - 1}", "job-name": "completep", "open-mode": "append"}
        flags |= {"output": f"{root}/.slurm/logs/%A_%a.out", "signal": f"B:USR1@{BEFORE_END}"}
        head = "".join(f"#SBATCH --{name}={value}\n" for name, value in flags.items())
        worker = [sys.executable, "-m", "completep", "worker", str(root), "--idle", o.get("idle", "120")]
        setup = f"{o['setup']}\n" if o.get("setup") else ""
        # exec: signals for the batch script reach the worker itself.
        return (
            f"#!/bin/bash\n{head}#SBATCH --requeue\ncd {shlex.quote(os.getcwd())}\n{setup}exec {shlex.join(worker)}\n"
        )

    def stop(self) -> None:
        """Withdraw the tasks that are left, and let the workers save and end."""
        for task in self.running.values():
            withdraw(self.store, task)
        self.running.clear()
        self.close()

    def close(self) -> None:
        """Cancel the workers: there will be no more tasks. SLURM sends SIGTERM, and SIGKILL after its KillWait."""
        if self.job is None:
            return
        slurm(["scancel", self.job], check=False)
        deadline = time.monotonic() + GRACE
        while job_states(self.job) and time.monotonic() < deadline:
            time.sleep(0.3)
        self.job = None


def require_slurm() -> None:
    if shutil.which("sbatch") is None:
        raise UserError("there is no sbatch here", fix="run this on a login node of a SLURM cluster")
    slurm(["sinfo", "--noheader", "--format=%P"])


def slurm(words: Sequence[str], *, check: bool = True) -> str:
    """Run a command of SLURM and return its output. If SLURM cannot be reached, this is a UserError."""
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER, check=False)
    except subprocess.TimeoutExpired:
        problem = f"no answer within {ANSWER} s"
    except OSError as error:
        problem = str(error)
    else:
        if ended.returncode == 0 or not check:
            return ended.stdout.strip()
        problem = ended.stderr.strip() or f"exit code {ended.returncode}"
    raise UserError(
        f"SLURM cannot be reached or refuses ({shlex.join(words)}): {problem}",
        fix="check that `sinfo` works here, and the options of the job; nothing is lost, the same command continues",
    )


def submit(script: Path) -> str:
    return slurm(["sbatch", "--parsable", str(script)]).split(";")[0]


def job_states(job: str) -> list[str]:
    """The states of the array's workers that have not ended."""
    return slurm(["squeue", "--noheader", "--format=%T", f"--jobs={job}"], check=False).split()
