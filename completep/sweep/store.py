"""Tasks as content-addressed folders: the name is a hash of everything that determines the result.

So each task is done once. A process claims the task that it works on (claims.py), so no other process does it too.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import polars as pl

from completep import __version__
from completep.config import unsealed
from completep.errors import UserError
from completep.files import make_folder, read_bytes, read_text, write_new, write_over
from completep.sweep.claims import Kind, claim, claims_for, is_claimed
from completep.sweep.task import Named, Task, Trial, Value
from completep.train.checked import FIELDS, check_result

FORMAT = 1  # of a store's folders; another one is refused
MANIFEST, INDEX, RESULT = "store.json", ".index", "result.json"
MOST_BYTES = 2**30  # of an index
Result = dict[str, Value | None]


@dataclass(frozen=True)
class Counts:
    """How many tasks are done, diverged, stopped as hopeless, running, interrupted or missing (not started)."""

    runs: int = 0
    done: int = 0
    diverged: int = 0
    hopeless: int = 0
    running: int = 0
    interrupted: int = 0
    missing: int = 0

    @property
    def unfinished(self) -> int:
        return self.runs - self.done - self.diverged - self.hopeless


@dataclass(frozen=True)
class Store:
    """All tasks under one root."""

    root: Path

    def open(self) -> None:
        """Make the root, or check that it is a store of this version."""
        self.look()
        manifest = self.root / MANIFEST
        if not manifest.exists():
            try:
                content = {"format": FORMAT, "completep": __version__, "claims": claims_for(self.root)}
                write_new(manifest, json.dumps(content) + "\n")
            except UserError:
                if not manifest.exists():  # otherwise another process was faster
                    raise
            self.look()

    def look(self) -> None:
        """Check that the root is a store of this version, or not there yet. Writes nothing."""
        manifest = self.root / MANIFEST
        if not manifest.exists():
            if self.root.exists() and not self.root.is_dir():
                raise UserError(f"{self.root} is a file, not a folder", fix="choose another folder for out")
            others = [p for p in self.root.glob("*") if not p.name.startswith(".")]  # a kill may leave .store.json.part
            if others and not manifest.exists():  # another process may have written it meanwhile
                raise UserError(
                    f"{self.root} has files, but is not a store of runs", fix="choose another folder for out"
                )
            return
        try:
            version = json.loads(read_text(manifest))["format"]
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError):
            version = "unknown"
        if version != FORMAT:
            raise UserError(
                f"{self.root} has format {version}; this version of completep ({__version__}) writes format {FORMAT}",
                fix="use the version that wrote it, or another folder for out",
            )

    @property
    def claims(self) -> Kind:
        """How processes claim a task. This is chosen when the store is made, so all processes agree."""
        return _claims_of(self.root / MANIFEST)

    def folder(self, task: Named) -> Path:
        return self.root / task.id

    def result(self, task: Named) -> Result | None:
        """The content of result.json, once the task has ended."""
        path = self.folder(task) / RESULT
        return parse_result(read_text(path), path) if path.exists() else None

    def results(self, tasks: Iterable[Named]) -> dict[str, Result]:
        """The results of many tasks, by id. The index saves reading those that have not changed since."""
        index = _read_index(self.root / INDEX)
        results: dict[str, Result] = {}
        for task in tasks:
            path = f"{self.root}/{task.id}/{RESULT}"
            try:
                stamp = _stamp(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            then, result = index.get(task.id, (None, {}))
            results[task.id] = result if then == stamp else parse_result(read_text(Path(path)), Path(path))
        return results

    def write_index(self, tasks: Iterable[Named]) -> None:
        """Add the results of these tasks to the index, one file that is faster to read than all results."""
        results = self.results(tasks)
        old = _read_index(self.root / INDEX)
        new = {name: [_stamp(f"{self.root}/{name}/{RESULT}"), _brief(result)] for name, result in results.items()}
        if new.items() <= old.items():
            return
        body = json.dumps({**old, **new}, separators=(",", ":")).encode()
        with suppress(UserError):  # a store that can only be read
            write_over(self.root / INDEX, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)

    def reopen(self, task: Task) -> None:
        """Forget the result of a task that a search stopped, so that it can be done to its end."""
        if (self.result(task) or {}).get("status") != "hopeless":
            return
        with self.holding(task) as held:
            if held is not None:
                (self.folder(task) / RESULT).unlink(missing_ok=True)

    @contextmanager
    def holding(self, task: Named) -> Iterator[int | None]:
        """Claim a task. Yields the descriptor of the lock, or None if another process is doing the task."""
        make_folder(self.root)
        with claim(self.root / task.id, self.claims) as descriptor:
            yield descriptor

    def held(self, task: Named) -> bool:
        """Is a process working on it now?"""
        return is_claimed(self.root / task.id, self.claims)

    def state(self, task: Named) -> str:
        """How a task ended; otherwise running, interrupted or missing."""
        result = self.result(task)
        return str(result["status"]) if result is not None else self._unfinished(task)

    def _names(self) -> set[str]:
        """The names of everything in the root. One listing is much faster than looking for thousands of tasks."""
        try:
            return set(os.listdir(self.root))
        except (FileNotFoundError, NotADirectoryError):
            return set()

    def _unfinished(self, task: Named) -> str:
        if self.held(task):
            return "running"
        return "interrupted" if (self.folder(task) / "run.json").exists() else "missing"

    def counts(self, tasks: Sequence[Named]) -> Counts:
        once = {task.id: task for task in tasks}
        touched = {name.partition(".")[0] for name in self._names()}  # folders, locks and claims
        results = self.results(task for i, task in once.items() if i in touched)
        states = ["missing"] * len(once.keys() - touched)
        states += [
            str(results[i]["status"]) if i in results else self._unfinished(task)
            for i, task in once.items()
            if i in touched
        ]
        return Counts(len(states), **{state: states.count(state) for state in set(states)})

    def frame(self, trials: "Sequence[tuple[Mapping[str, Value], Named]]") -> pl.DataFrame:
        """A row per labelled task: its labels, and its result where there is one."""
        results = self.results({task.id: task for _, task in trials}.values())
        missing: Result = {"status": "missing"}
        rows = [
            {**labels, **_columns(results.get(task.id, missing), labels), "run": task.id} for labels, task in trials
        ]
        return pl.DataFrame(rows, infer_schema_length=None)


def _claims_of(manifest: Path) -> Kind:
    """A store without a manifest, or with one of an older version, has kernel locks."""
    try:
        return _parsed_claims(manifest, *_stamp(str(manifest)))
    except OSError:
        return "kernel"


@lru_cache(maxsize=16)
def _parsed_claims(manifest: Path, *stamp: int) -> Kind:
    try:
        return "heartbeat" if json.loads(read_bytes(manifest)).get("claims") == "heartbeat" else "kernel"
    except (ValueError, AttributeError, RecursionError):
        return "kernel"


def parse_result(text: "str | bytes", path: Path) -> Result:
    """A training run seals its result; a task of yours may write plain JSON."""
    try:
        content = unsealed(text, or_plain=True)
        check_result(content)
    except ValueError as error:
        fix = f"remove the folder {path.parent}, and run the same command again"
        raise UserError(f"{path} is damaged: {error}", fix=fix) from error
    return content


def _columns(result: Result, labels: Mapping[str, Value]) -> Result:
    """The fields of a result for a report. They never override the labels, which the study sets."""
    return {name: result[name] for name in FIELDS if name in result and name not in labels}


def _brief(result: Result) -> Result:
    """The result without what only its own folder needs."""
    return {name: value for name, value in result.items() if name != "files"}


def _stamp(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_index(path: Path) -> dict[str, list[Any]]:
    """The index; empty if there is none, or if it is damaged."""
    try:
        return _parsed_index(path, *_stamp(str(path)))
    except OSError:
        return {}


@lru_cache(maxsize=4)
def _parsed_index(path: Path, *stamp: int) -> dict[str, list[Any]]:
    """The content is checked too: whoever wrote a forged index also wrote its digest."""
    digest, _, body = read_bytes(path, MOST_BYTES).partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return {}
    try:
        content: dict[str, list[Any]] = json.loads(body)
        for _, result in content.values():
            check_result(result)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}
    return content


def distinct(trials: Sequence[Trial]) -> list[Task]:
    """Every task once. Several points may share a task."""
    return list({trial.task.id: trial.task for trial in trials}.values())
