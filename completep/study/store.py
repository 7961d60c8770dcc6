"""Runs as content-addressed folders: the name is a hash of all that determines the result, so a run is done exactly once.

Two parameterizations that come to the same numbers at a shape (all of them at the base; SP and muP in depth) are one run. A run
that somebody is at work on is held by a lock that the kernel drops with its owner, however that ends.
"""

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    effect = rules_named(run.rules).effect(wider=wider, deeper=deeper)
    name = next((n for n in NAMES if rules_named(n).effect(wider=wider, deeper=deeper) == effect), run.rules)
    # What has no factor along an axis does not know where on it the base was.
    base = Shape(
        run.base.width if rules_named(name).effect(wider=True, deeper=False) != NOTHING else shape.width,
        run.base.depth if rules_named(name).effect(wider=False, deeper=True) != NOTHING else shape.depth,
    )
    return replace(run, rules=name, base=base)


NOTHING = rules_named("sp").effect(wider=True, deeper=True)


@dataclass(frozen=True)
class Store:
    """All runs under one root."""

    root: Path

    def folder(self, run: Run) -> Path:
        return self.root / run_id(canonical(run))

    def result(self, run: Run) -> dict[str, Any] | None:
        """What it came to, once it is done (or diverged)."""
        path = self.folder(run) / "result.json"
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
            result = self.result(run) or {"status": "missing"}
            rows.append({**labels, "run": self.folder(run).name, **result})
        return pl.DataFrame(rows, infer_schema_length=None)
