"""Backend: this machine. A process per task, one thread each, as many as there are cores or GPUs."""

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from completep.errors import UserError
from completep.sweep.devices import available_memory, device_count, device_groups
from completep.sweep.engine import Ended, attempt
from completep.sweep.store import Store
from completep.sweep.task import Task

ELSEWHERE, STOPPED = 3, 4  # exit codes of a task's process
# Every training run imports these; a server that has them saves a second per run.
PRELOADED = ("completep.sweep.training", "cattrs", "safetensors.torch", "torch._dynamo")
SHARE = 0.8  # of the free memory may be planned for


@dataclass
class Local:
    """Tasks on this machine; `workers` at a time, by default one per core or GPU (or group of GPUs)."""

    workers: int | None = None
    running: dict[BaseProcess, Task] = field(default_factory=dict)
    seats: dict[BaseProcess, str | None] = field(default_factory=dict)

    def open(self, store: Store, tasks: Sequence[Task]) -> None:
        ranks = max(task.ranks for task in tasks)
        workers = self.workers if self.workers is not None else max(1, device_count() // ranks)
        if workers < 1:
            raise UserError(f"workers={workers}: must be at least 1", fix="leave workers out for one per core or GPU")
        groups: list[str | None] = [",".join(group) for group in device_groups(ranks)]
        self.store, self.free_seats = store, groups[:workers] or [None] * workers
        self.memory = available_memory()
        self.context = multiprocessing.get_context("forkserver")  # its forks have torch imported and start at once
        self.context.set_forkserver_preload(list(PRELOADED))

    def has_room(self, task: Task) -> bool:
        if not self.free_seats:
            return False
        planned = sum(t.memory() for t in self.running.values())
        return not self.running or planned + task.memory() <= SHARE * self.memory

    def start(self, task: Task) -> None:
        seat = self.free_seats.pop()
        process = self.context.Process(target=work, args=(self.store, task, seat))
        with main_not_imported(task):
            process.start()
        self.running[process], self.seats[process] = task, seat

    def wait(self, seconds: float) -> list[Ended]:
        sentinels = wait([process.sentinel for process in self.running], seconds)
        ended = []
        for process in [p for p in self.running if p.sentinel in sentinels]:
            process.join()
            task = self.running.pop(process)
            self.free_seats.append(self.seats.pop(process))
            ended.append(Ended(task, process.exitcode == ELSEWHERE, last_lines(self.store.folder(task) / "log.txt")))
        return ended

    def stop(self) -> None:
        for process in self.running:
            process.terminate()  # a training run saves its checkpoint on SIGTERM
        for process in self.running:
            process.join()
        self.running.clear()
        self.seats.clear()


@contextmanager
def main_not_imported(task: Task) -> Iterator[None]:
    """Keep a new process from importing your script, which would start the same sweep again.

    multiprocessing imports the script to unpickle its classes. Only tasks that are defined there need that.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or type(task).__module__ == "__main__":
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


def work(store: Store, task: Task, devices: str | None) -> None:
    """The process of one task. Its output goes to log.txt."""
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    folder = store.folder(task)
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit({"done": 0, "elsewhere": ELSEWHERE, "stopped": STOPPED}[attempt(store, task)])


def last_lines(path: Path, count: int = 8) -> str:
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])
