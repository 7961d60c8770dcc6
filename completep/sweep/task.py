"""What the sweep machinery must know of a task. A training run is one (training.py); any script can be another."""

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
        """Names its folder: a hash of everything that determines the result."""


class Task(Named, Protocol):
    """Something to do once. It must be picklable, since it is done in another process."""

    @property
    def cost(self) -> float:
        """In any unit, such as FLOPs: the largest start first, and time left is estimated by it."""

    @property
    def ranks(self) -> int:
        """Processes (GPUs) that it takes."""

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that its process needs. A server that has imported them starts such tasks at once."""

    def memory(self) -> float:
        """Bytes of this machine's memory that it needs."""

    def describe(self) -> str:
        """One line for people."""

    def carry_out(self, folder: Path, lock: int) -> None:
        """Do it and leave result.json, with a `status` of done, diverged or hopeless; none if it was asked to stop.

        `lock` is the descriptor of the lock on its folder. Child processes may inherit it. A task that cannot be done
        raises an error; `TaskError` is one whose text says all that a person needs.
        """

    def loss(self, result: Mapping[str, object]) -> float | None:
        """What a search minimises; None where there is none."""


def is_enough(task: Task, result: Mapping[str, object]) -> bool:
    """Is this result all that is asked for? That of a run which a search stopped serves only a search that stops runs,
    which says so by a `bar`.
    """
    return result["status"] != "hopeless" or bool(getattr(task, "bar", ()))


class TaskError(Exception):
    """A task could not be done. The text says why: it is shown without a traceback."""


@dataclass(frozen=True)
class Trial:
    """A task and where it lies on the axes."""

    point: Point
    task: Task
