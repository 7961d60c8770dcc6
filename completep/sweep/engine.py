"""The loop of every engine: start tasks while there is room, find out how each ended, retry once, report.

Every task is done exactly once. A task that dies is tried once more; if it dies again, it is reported with its last
lines, and the others continue. The engine waits for tasks that another process is working on. On an interrupt every
task saves and stops, and the same call continues later.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

from completep.errors import UserError
from completep.files import make_folder
from completep.sweep.store import Store
from completep.sweep.task import Task, is_enough

TRIES = 2
POLL = 0.5  # seconds
Ending = Literal["done", "diverged", "hopeless"]  # the statuses of a result
Kind = Ending | Literal["started", "failed", "retry", "elsewhere"]


@dataclass(frozen=True)
class Event:
    """Something happened to a task."""

    kind: Kind
    task: Task
    detail: str = ""  # the last lines of a task that failed


@dataclass(frozen=True)
class Ended:
    """A task has stopped running on its backend. The engine decides what that means."""

    task: Task
    elsewhere: bool = False  # another process holds it
    detail: str = ""


class Backend(Protocol):
    """A place where tasks run: this machine, or a cluster."""

    def open(self, store: Store, tasks: Sequence[Task]) -> None:
        """Prepare for these tasks and others like them, and refuse those that can never run here."""

    def has_room(self, task: Task) -> bool: ...

    def start(self, task: Task) -> None: ...

    def wait(self, seconds: float) -> list[Ended]:
        """The tasks that have ended, waiting at most this long."""

    def stop(self) -> None:
        """Ask every running task to save and stop, and wait until it has."""

    def close(self) -> None:
        """Release all resources: there will be no more tasks."""


def unwatched(event: Event) -> None:
    """Ignore the event."""


# What to do next, given a task that has just ended (or was done before): a search that needs the result to choose.
More = Callable[[Task], Sequence[Task]]


def nothing_more(task: Task) -> Sequence[Task]:
    """All tasks are known from the start."""
    return ()


@dataclass
class Engine:
    """Runs tasks on a backend."""

    store: Store
    backend: Backend
    on_event: Callable[[Event], None] = unwatched
    fail_fast: bool = False  # stop if a task fails before any is done, since the others would fail too
    worked: bool = False  # whether a task has been done
    tries: dict[str, int] = field(default_factory=dict)
    admitted: set[str] = field(default_factory=set)  # tasks of this run that were not done when they were asked for

    def run(self, tasks: Sequence[Task], more: More = nothing_more) -> list[Task]:
        """Do the tasks that are not done yet, the largest first, and what `more` asks for as each of them ends.

        Returns those that failed.
        """
        self.admitted.clear()
        self.tries.clear()
        todo = self.admit(tasks, more)
        if not todo:
            return []
        self.backend.open(self.store, todo)
        failed: list[Task] = []
        running = 0
        try:
            while todo or running:
                while todo and self.backend.has_room(todo[0]):
                    task = todo.pop(0)
                    self.backend.start(task)
                    running += 1
                    self.on_event(Event("started", task))
                for ended in self.backend.wait(POLL):
                    running -= 1
                    event = self.judge(ended)
                    if event.kind == "retry":
                        todo.insert(0, ended.task)  # first, so a task that fails twice is known early
                    elif event.kind == "elsewhere":
                        todo.append(ended.task)
                        time.sleep(POLL)
                    elif event.kind == "failed":
                        failed.append(ended.task)
                        self.stop_at_a_first_failure(event)
                    else:
                        self.worked = True
                    self.on_event(event)
                    if event.kind not in ("retry", "elsewhere"):
                        todo[:0] = self.admit(more(ended.task), more)  # first: others may depend on them in turn
        except BaseException:
            self.backend.stop()
            raise
        return failed

    def admit(self, tasks: Sequence[Task], more: More) -> list[Task]:
        """The tasks that are left of these and of what follows those that are done, the largest first."""
        left: list[Task] = []
        asked = list(tasks)
        while asked:
            undone = self.undone(asked)
            missing = {task.id for task in undone}
            done = {task.id: task for task in asked if task.id not in missing}
            self.worked = self.worked or bool(done)
            new = [task for task in undone if task.id not in self.admitted]
            self.admitted |= {task.id for task in new}
            for task in new:
                self.store.reopen(task)
            left += new
            asked = [following for task in done.values() for following in more(task)]
        # If a long task started last, the other cores would be idle.
        return sorted(left, key=lambda task: task.cost, reverse=True)

    def stop_at_a_first_failure(self, event: Event) -> None:
        """With `fail_fast`, a failure before any run has worked is an error: the others would fail too."""
        if self.fail_fast and not self.worked:
            raise UserError(
                f"the first run failed: {event.task.describe()}\n{event.detail}",
                fix=f"correct the script or the command and run the same again; the whole output is in "
                f"{self.store.folder(event.task)}",
            )

    def undone(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks that are left."""
        distinct = {task.id: task for task in tasks}
        done = self.store.results(distinct.values())
        return [task for name, task in distinct.items() if name not in done or not is_enough(task, done[name])]

    def judge(self, ended: Ended) -> Event:
        task = ended.task
        result = self.store.result(task)
        if result is not None:
            return Event(cast(Ending, result["status"]), task)
        if ended.elsewhere:
            return Event("elsewhere", task)
        self.tries[task.id] = self.tries.get(task.id, 0) + 1
        return Event("retry" if self.tries[task.id] < TRIES else "failed", task, ended.detail)


def attempt(store: Store, task: Task) -> Literal["done", "elsewhere", "stopped"]:
    """Do one task in this process, holding its lock. Every backend's worker calls this."""
    with store.holding(task) as lock:
        if lock is None:
            return "elsewhere"
        if store.result(task) is not None:  # another process has done it in the meantime
            return "done"
        folder = store.folder(task)
        make_folder(folder)
        task.carry_out(folder, lock)
    return "stopped" if store.result(task) is None else "done"
