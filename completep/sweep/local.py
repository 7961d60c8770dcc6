"""Backend: this machine. One process per task, with one thread each, as many as there are cores or GPUs."""

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from completep.errors import UserError
from completep.files import append, last_lines, make_folder
from completep.sweep.devices import available_memory, device_count, device_groups
from completep.sweep.engine import Ended, attempt
from completep.sweep.store import Store
from completep.sweep.task import Task, TaskError

ELSEWHERE, STOPPED, NO_FOLDER = 3, 4, 5  # exit codes of a task's process
SHARE = 0.8  # of the free memory is used for tasks


@dataclass
class Local:
    """Tasks on this machine, `workers` at a time; by default one per core, or one per GPU or group of GPUs.

    `per_gpu` tasks share a GPU, if they are too small to use all of it.
    """

    workers: int | None = None
    per_gpu: int = 1
    running: dict[BaseProcess, Task] = field(default_factory=dict)
    seats: dict[BaseProcess, str | None] = field(default_factory=dict)

    def open(self, store: Store, tasks: Sequence[Task]) -> None:
        ranks = max(task.ranks for task in tasks)
        if self.per_gpu < 1:
            raise UserError(f"per_gpu={self.per_gpu}: must be at least 1", fix="leave per_gpu out for one run per GPU")
        groups: list[str | None] = [",".join(group) for _ in range(self.per_gpu) for group in device_groups(ranks)]
        workers = self.workers if self.workers is not None else len(groups) or max(1, device_count() // ranks)
        if workers < 1:
            raise UserError(f"workers={workers}: must be at least 1", fix="leave workers out for one per core or GPU")
        self.store, self.free_seats = store, groups[:workers] or [None] * workers
        self.memory = available_memory()
        # A fork of this server has imported what the task needs, so it starts at once.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([__name__, *sorted({name for task in tasks for name in task.imports})])

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
            folder = self.store.folder(task)
            unusable = f"{folder} is not a folder that a run can write to: remove it, or move it away"
            detail = unusable if process.exitcode == NO_FOLDER else last_lines(folder / "log.txt")
            ended.append(Ended(task, process.exitcode == ELSEWHERE, detail))
        return ended

    def stop(self) -> None:
        for process in self.running:
            process.terminate()  # a training run saves its checkpoint on SIGTERM
        for process in self.running:
            process.join()
        self.running.clear()
        self.seats.clear()

    def close(self) -> None:
        """There is nothing to release."""


@contextmanager
def main_not_imported(task: Task) -> Iterator[None]:
    """Keep a new process from importing the user's script, which would start the same sweep again.

    multiprocessing imports that script to unpickle its classes. Only tasks that are defined there need it.
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
    try:
        make_folder(folder)
        if folder.is_symlink():  # planted: the files of the run would go elsewhere
            raise NotADirectoryError
        log = append(folder / "log.txt")
    except (OSError, UserError):
        sys.exit(NO_FOLDER)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        sys.exit({"done": 0, "elsewhere": ELSEWHERE, "stopped": STOPPED}[attempt(store, task)])
    except (TaskError, UserError) as error:
        sys.exit(str(error))
