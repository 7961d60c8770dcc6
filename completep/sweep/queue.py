"""A queue of tasks for workers on other machines: plain JSON, one file per task, no pickle.

.queue/ID.json     the task; the process that asked for it removes the file
.queue/ID.failed   the last lines of a task that failed
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, cast

from completep.config import whole
from completep.errors import UserError
from completep.files import make_folder, read_text, write_over
from completep.sweep.store import Store
from completep.sweep.task import Task

FOLDER = ".queue"


class Portable(Task, Protocol):
    """A task that can be written to a file and read from it."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, object]: ...

    @staticmethod
    def from_json(content: dict[str, Any]) -> Task: ...


PortableClass = TypeVar("PortableClass", bound=type[Portable])
KINDS: dict[str, type[Portable]] = {}  # as far as their modules are imported; a file never chooses what is imported


def register(task_class: PortableClass) -> PortableClass:
    """A decorator: tasks of this class can be in a queue. A worker imports its module (cli/worker.py)."""
    KINDS[task_class.kind] = task_class
    return task_class


def queue_folder(store: Store) -> Path:
    return store.root / FOLDER


def ask(store: Store, task: Task) -> None:
    """Put a task on the queue. If it failed before, it is tried again."""
    kind = getattr(task, "kind", None)
    if kind not in KINDS:
        raise UserError(f"{type(task).__name__} cannot be sent to another machine", fix="use the local engine, or Ray")
    portable = cast(Portable, task)
    make_folder(queue_folder(store))
    (queue_folder(store) / f"{task.id}.failed").unlink(missing_ok=True)
    write_over(queue_folder(store) / f"{task.id}.json", json.dumps({"kind": kind, "task": portable.to_json()}))


def withdraw(store: Store, task: Task) -> None:
    for ending in ("json", "failed"):
        (queue_folder(store) / f"{task.id}.{ending}").unlink(missing_ok=True)


def asked(store: Store) -> Iterator[Task]:
    """The tasks on the queue that are neither done nor failed, the largest first."""
    tasks = []
    for path in queue_folder(store).glob("*.json"):
        with suppress(FileNotFoundError):  # withdrawn just now
            if not path.with_suffix(".failed").exists() and not (store.root / path.stem / "result.json").exists():
                tasks.append(read_task(path))
    return iter(sorted(tasks, key=lambda task: (-task.cost, task.id)))


def read_task(path: Path) -> Task:
    """Read a task. A file of another user is refused, since the worker would run its command with your rights."""
    if path.stat(follow_symlinks=False).st_uid != os.getuid():
        raise UserError(f"{path} belongs to another user", fix="run workers as the user who runs the tuning")
    try:
        content = json.loads(read_text(path))
        task = KINDS[content["kind"]].from_json(content["task"])
        whole("ranks", task.ranks)
        name, _ = task.id, (task.cost + task.memory(), task.describe())  # what does not fit fails here
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ArithmeticError) as error:
        if isinstance(error, UserError) and str(path) in error.what:
            raise
        reason = error.what if isinstance(error, UserError) else error
        raise UserError(f"{path} is not a task: {reason}", fix="remove it, and run the same command again") from error
    if name != path.stem:
        raise UserError(f"{path} holds another task ({name})", fix="remove it, and run the same command again")
    return task


def note_failure(store: Store, task: Task, detail: str) -> None:
    write_over(queue_folder(store) / f"{task.id}.failed", detail)


def failure(store: Store, task: Task) -> str | None:
    """The last lines of a task that failed; None if it has not."""
    path = queue_folder(store) / f"{task.id}.failed"
    return read_text(path) if path.exists() else None
