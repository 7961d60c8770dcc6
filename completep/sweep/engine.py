"""The one loop of every engine: start tasks while there is room, judge how each ended, retry once, report.

Every task is done exactly once. A task that dies is tried once more and then reported with its last lines; the others
continue. Tasks that another process is working on are waited for. An interrupt lets every task save and stop; the same
call continues.
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
        """Get ready, and refuse at once what can never run here."""

    def has_room(self, task: Task) -> bool: ...

    def start(self, task: Task) -> None: ...

    def wait(self, seconds: float) -> list[Ended]:
        """The tasks that have ended, waiting at most this long."""

    def stop(self) -> None:
        """Ask every running task to save and stop, and wait until it has."""

    def close(self) -> None:
        """No more tasks come: give back what was taken for them."""


def unwatched(event: Event) -> None:
    """Ignore the event."""


@dataclass
class Engine:
    """Runs tasks on a backend."""

    store: Store
    backend: Backend
    on_event: Callable[[Event], None] = unwatched
    fail_fast: bool = False  # stop when a task fails before any has been done: the next would fail too
    worked: bool = False  # a task has been done
    tries: dict[str, int] = field(default_factory=dict)

    def run(self, tasks: Sequence[Task]) -> list[Task]:
        """Do what is not done yet, the largest first; the tasks that failed."""
        todo = self.undone(tasks)
        self.worked = self.worked or len(todo) < len({task.id for task in tasks})
        if not todo:
            return []
        for task in todo:
            self.store.reopen(task)
        self.tries.clear()
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
                        todo.insert(0, ended.task)  # at once: what fails twice is known before the others start
                    elif event.kind == "elsewhere":
                        todo.append(ended.task)
                        time.sleep(POLL)
                    elif event.kind == "failed":
                        failed.append(ended.task)
                        self.refuse_hopeless(event)
                    else:
                        self.worked = True
                    self.on_event(event)
        except BaseException:
            self.backend.stop()
            raise
        return failed

    def refuse_hopeless(self, event: Event) -> None:
        if self.fail_fast and not self.worked:
            raise UserError(
                f"the first run failed: {event.task.describe()}\n{event.detail}",
                fix=f"correct the script or the command and run the same again; all of the output is in "
                f"{self.store.folder(event.task)}",
            )

    def undone(self, tasks: Sequence[Task]) -> list[Task]:
        """What is left, each once, the largest first: a long task that starts last would leave the other cores idle."""
        distinct = {task.id: task for task in tasks}
        done = self.store.results(distinct.values())
        left = [task for name, task in distinct.items() if name not in done or not is_enough(task, done[name])]
        return sorted(left, key=lambda task: task.cost, reverse=True)

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
        if store.result(task) is not None:  # another process has done it since this one looked
            return "done"
        folder = store.folder(task)
        make_folder(folder)
        task.carry_out(folder, lock)
    return "stopped" if store.result(task) is None else "done"
