"""The protocol of a task. A training run of the decoder is one (training.py); tuning/tasks.py has others."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Value = str | int | float


class Point(dict[str, Value]):
    """A value on every axis."""

    def text(self, axis: str) -> str:
        return str(self[axis])

    def whole(self, axis: str) -> int:
        return int(self[axis])

    def number(self, axis: str) -> float:
        return float(self[axis])


class Named(Protocol):
    """Something with a folder in a store."""

    @property
    def id(self) -> str:
        """A hash of everything that determines the result. It names the folder."""


class Task(Named, Protocol):
    """Something to do once. It must be picklable, since it is done in another process."""

    @property
    def cost(self) -> float:
        """In any unit, such as FLOPs. The largest task starts first, and the time left is estimated from it."""

    @property
    def ranks(self) -> int:
        """The number of processes (GPUs) that it uses."""

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that its process imports. The fork server imports them once, so tasks start at once."""

    def memory(self) -> float:
        """Bytes of this machine's memory that it needs."""

    def describe(self) -> str:
        """One line for the user."""

    def carry_out(self, folder: Path, lock: int) -> None:
        """Do the task and write result.json with a `status`: done, diverged or hopeless.

        If the task was asked to stop, it writes no result. `lock` is the descriptor of the lock on its folder. Child
        processes may inherit it. A task that cannot be done raises an error; of a `TaskError`, only the text is shown.
        """

    def loss(self, result: Mapping[str, object]) -> float | None:
        """The loss that a search minimises; None if the result has none."""


def is_enough(task: Task, result: Mapping[str, object]) -> bool:
    """Is the task done with this result? A hopeless run counts only for a search that stops runs: its tasks have a
    `bar`.
    """
    return result["status"] != "hopeless" or bool(getattr(task, "bar", ()))


class TaskError(Exception):
    """A task could not be done. The text says why: it is shown without a traceback."""


@dataclass(frozen=True)
class Trial:
    """A task and its point on the axes."""

    point: Point
    task: Task
