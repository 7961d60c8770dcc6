"""A worker: does the tasks in the queue of a store, one at a time, until there are none for a while.

Any number of workers, on any machines that share the store, share the work. The claims of the store prevent two workers
from doing the same task. If a worker dies, its task is free again. On SIGTERM and SIGINT the task saves and the worker
ends. SIGUSR1, which SLURM sends before the time limit, does the same and then requeues the job.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from completep.sweep.engine import Ended
from completep.sweep.local import Local
from completep.sweep.queue import asked, note_failure
from completep.sweep.store import Store
from completep.sweep.task import Task

IDLE = 60.0  # seconds without a task after which a worker ends
POLL = 0.3


def quiet(line: str) -> None:
    """Print nothing."""


@dataclass
class Worker:
    store: Store
    idle: float = IDLE
    tell: Callable[[str], None] = quiet
    signals: list[int] = field(default_factory=list)

    def run(self) -> int:
        """Work until the queue is empty for a while. Returns the number of tasks that this worker did."""
        done, last = 0, time.monotonic()
        with self._signals():
            while not self.signals:
                did = sum(self._do(task) for task in self._open_tasks())
                done += did
                if did or any(True for _ in asked(self.store)):  # another worker has a task, and it may die
                    last = time.monotonic()
                elif time.monotonic() - last >= self.idle:
                    break
                time.sleep(0 if did else POLL)
        if signal.SIGUSR1 in self.signals:
            requeue(self.tell)
        return done

    def _open_tasks(self) -> Iterator[Task]:
        """The tasks that nobody works on. If there are none: one that is claimed, since its owner may have died."""
        tasks = list(asked(self.store))
        free = [task for task in tasks if not self.store.held(task)]
        if not free and tasks and self.store.claims == "heartbeat":  # the kernel knows who is alive
            free = [random.choice(tasks)]
        for task in free:
            if not self.signals:
                yield task

    def _do(self, task: Task) -> bool:
        """Do a task. Returns whether it was done here."""
        if self.store.result(task) is not None:
            return False
        ended = self._attempt(task)
        result = self.store.result(task)
        if result is not None or ended.elsewhere or self.signals:
            if result is not None and not ended.elsewhere:
                self.tell(f"{result['status']}: {task.describe()}")
            return result is not None and not ended.elsewhere
        self.tell(f"failed: {task.describe()}\n{ended.detail}")
        note_failure(self.store, task, ended.detail)  # the process that asked for it decides whether to try again
        return False

    def _attempt(self, task: Task) -> Ended:
        local = Local(1)
        local.open(self.store, [task])
        local.start(task)
        while True:
            ended = local.wait(POLL)
            if ended:
                return ended[0]
            if self.signals:
                local.stop()
                return Ended(task)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self.signals.append(number)

        old = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def requeue(tell: Callable[[str], None]) -> None:
    """Put this SLURM job back into the queue: it starts again where there is room."""
    job = os.environ.get("SLURM_JOB_ID")
    scontrol = shutil.which("scontrol")
    if job is None or scontrol is None:
        return
    ended = subprocess.run([scontrol, "requeue", job], capture_output=True, text=True, check=False)
    tell(f"requeued job {job}" if ended.returncode == 0 else f"cannot requeue job {job}: {ended.stderr.strip()}")
