"""Runs as content-addressed folders: the name is a hash of all that determines the result, so a run is done exactly once.

Two parameterizations that come to the same numbers at a shape (all of them at the base; SP and muP in depth) are one run. A run
that somebody is at work on is held by a lock that the kernel drops with its owner, however that ends.
"""

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl

from completep.config import Run, Shape, run_id
from completep.errors import UserError
from completep.files import read_text
from completep.rules.table import rules_named

NAMES = ("sp", "mup", "completep")


def canonical(run: Run) -> Run:
    """The same run under the simplest rules and base that come to the same numbers."""
    shape = Shape(run.model.width, run.model.depth)
    wider, deeper = shape.width != run.base.width, shape.depth != run.base.depth
    name = _simplest(run.rules, wider, deeper)
    # What has no factor along an axis does not know where on it the base was.
    width = run.base.width if _simplest(name, True, False) != "sp" else shape.width
    depth = run.base.depth if _simplest(name, False, True) != "sp" else shape.depth
    return replace(run, rules=name, base=Shape(width, depth))


@cache
def _simplest(rules: str, wider: bool, deeper: bool) -> str:
    effect = rules_named(rules).effect(wider=wider, deeper=deeper)
    return next((n for n in NAMES if rules_named(n).effect(wider=wider, deeper=deeper) == effect), rules)


@dataclass(frozen=True)
class Store:
    """All runs under one root."""

    root: Path

    def folder(self, run: Run) -> Path:
        return self.root / run_id(canonical(run))

    def result(self, run: Run) -> dict[str, Any] | None:
        """What it came to, once it is done (or diverged)."""
        return self._read(self.folder(run))

    def _read(self, folder: Path) -> dict[str, Any] | None:
        path = folder / "result.json"
        if not path.exists():
            return None
        try:
            content: dict[str, Any] = json.loads(read_text(path))
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path} is not a whole result: {error}",
                fix=f"remove the folder {path.parent}, and run the study again",
            ) from error
        return content

    @contextmanager
    def holding(self, run: Run) -> Iterator[bool]:
        """True if the run is ours to do now; False if another process is at it."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / f"{run_id(canonical(run))}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def frame(self, runs: Sequence[tuple[Mapping[str, Any], Run]]) -> pl.DataFrame:
        """A row per labelled run: its labels, and the result where there is one."""
        rows = []
        for labels, run in runs:
            folder = self.folder(run)
            rows.append({**labels, "run": folder.name, **(self._read(folder) or {"status": "missing"})})
        return pl.DataFrame(rows, infer_schema_length=None)
