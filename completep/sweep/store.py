"""Tasks as content-addressed folders: the name is a hash of everything that determines the result, so each is done
once.

A task that a process works on is locked. The kernel drops the lock when that process ends, however it ends.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from completep import __version__
from completep.errors import UserError
from completep.files import is_locked, lock, read_text, write_new
from completep.sweep.task import Task, Trial, Value

FORMAT = 1  # of a store's folders; another one is refused


@dataclass(frozen=True)
class Counts:
    """How many tasks are done, diverged, running, begun and left, or not begun."""

    runs: int = 0
    done: int = 0
    diverged: int = 0
    running: int = 0
    interrupted: int = 0
    missing: int = 0

    @property
    def unfinished(self) -> int:
        return self.runs - self.done - self.diverged


@dataclass(frozen=True)
class Store:
    """All tasks under one root."""

    root: Path

    def open(self) -> None:
        """Make the root, or check that it is a store of this version."""
        manifest = self.root / "store.json"
        if not manifest.exists():
            others = [p for p in self.root.glob("*") if not p.name.startswith(".")]  # a kill may leave .store.json.part
            if others and not manifest.exists():  # another process may have written it meanwhile
                raise UserError(f"{self.root} is not empty and is not a run store", fix="choose another folder for out")
            try:
                write_new(manifest, json.dumps({"format": FORMAT, "completep": __version__}) + "\n")
            except UserError:
                if not manifest.exists():  # otherwise another process was faster
                    raise
        try:
            version = json.loads(read_text(manifest))["format"]
        except (json.JSONDecodeError, KeyError, TypeError):
            version = "unknown"
        if version != FORMAT:
            raise UserError(
                f"{self.root} has format {version}; this version of completep ({__version__}) writes format {FORMAT}",
                fix="use the version that wrote it, or another folder for out",
            )

    def folder(self, task: Task) -> Path:
        return self.root / task.id

    def result(self, task: Task) -> dict[str, Value | None] | None:
        """The content of result.json, once the task is done or has diverged."""
        path = self.folder(task) / "result.json"
        if not path.exists():
            return None
        try:
            content: dict[str, Value | None] = json.loads(read_text(path))
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path} is damaged: {error}", fix=f"remove the folder {path.parent}, and run the same command again"
            ) from error
        return content

    @contextmanager
    def holding(self, task: Task) -> Iterator[int | None]:
        """The lock's descriptor if this process may do the task now; None if another process is doing it."""
        self.root.mkdir(parents=True, exist_ok=True)
        with lock(self.root / f"{task.id}.lock") as descriptor:
            yield descriptor

    def held(self, task: Task) -> bool:
        """Is a process working on it now?"""
        return is_locked(self.root / f"{task.id}.lock")

    def state(self, task: Task) -> str:
        """done, diverged, running, interrupted or missing."""
        result = self.result(task)
        if result is not None:
            return str(result["status"])
        if self.held(task):
            return "running"
        return "interrupted" if (self.folder(task) / "run.json").exists() else "missing"

    def counts(self, tasks: Sequence[Task]) -> Counts:
        states = [self.state(task) for task in {task.id: task for task in tasks}.values()]
        return Counts(len(states), **{state: states.count(state) for state in set(states)})

    def frame(self, trials: "Sequence[tuple[Mapping[str, Value], Task]]") -> pl.DataFrame:
        """A row per labelled task: its labels, and its result where there is one."""
        rows = [{**labels, "run": task.id, **(self.result(task) or {"status": "missing"})} for labels, task in trials]
        return pl.DataFrame(rows, infer_schema_length=None)


def distinct(trials: Sequence[Trial]) -> list[Task]:
    """Every task once, although several points may share it."""
    return list({trial.task.id: trial.task for trial in trials}.values())
