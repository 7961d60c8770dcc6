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

from completep import __version__
from completep.config import Run, Shape, run_id
from completep.errors import UserError
from completep.files import read_text, write_new
from completep.rules.table import rules_named
from completep.train.records import Record, read_metrics

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


FORMAT = 1  # of a store's folders; another one is refused


@dataclass(frozen=True)
class Store:
    """All runs under one root."""

    root: Path

    def open(self) -> None:
        """Make the root, or see that it is a store of this version."""
        manifest = self.root / "store.json"
        if not manifest.exists():
            mine = [p for p in self.root.glob("*") if not p.name.startswith(".")]  # not what a kill left of a manifest
            if mine and not manifest.exists():  # it may have come since
                raise UserError(f"{self.root} is no run store, and not empty", fix="choose another --out")
            try:
                write_new(manifest, json.dumps({"format": FORMAT, "completep": __version__}) + "\n")
            except UserError:
                if not manifest.exists():  # else somebody was faster
                    raise
        try:
            found = json.loads(read_text(manifest))["format"]
        except (json.JSONDecodeError, KeyError, TypeError):
            found = "unknown"
        if found != FORMAT:
            raise UserError(
                f"{self.root} was written in format {found}, by another version; this one ({__version__}) writes format {FORMAT}",
                fix="use that version, or another --out",
            )

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
    def holding(self, run: Run) -> Iterator[int | None]:
        """The lock's descriptor if the run is ours to do now; None if another process is at it."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self._lock(run), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            yield lock.fileno()

    def _lock(self, run: Run) -> Path:
        return self.root / f"{run_id(canonical(run))}.lock"

    def held(self, run: Run) -> bool:
        """Is somebody at work on it now?"""
        path = self._lock(run)
        if not path.exists():
            return False
        with open(path) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def counts(self, runs: Sequence[Run]) -> dict[str, int]:
        """How many of these are done, diverged, being worked on, begun and left, or not begun."""
        found = dict.fromkeys(("runs", "done", "diverged", "running", "interrupted", "missing"), 0)
        for folder, run in {self.folder(run): run for run in runs}.items():
            result = self._read(folder)
            if result is not None:
                found[result["status"]] += 1
            elif self.held(run):
                found["running"] += 1
            else:
                found["interrupted" if (folder / "run.json").exists() else "missing"] += 1
            found["runs"] += 1
        return found

    def frame(self, runs: Sequence[tuple[Mapping[str, Any], Run]]) -> pl.DataFrame:
        """A row per labelled run: its labels, and the result where there is one."""
        rows = []
        for labels, run in runs:
            folder = self.folder(run)
            rows.append({**labels, "run": folder.name, **(self._read(folder) or {"status": "missing"})})
        return pl.DataFrame(rows, infer_schema_length=None)

    def history(self, runs: Sequence[tuple[Mapping[str, Any], Run]]) -> pl.DataFrame:
        """A row per training step that was written down: the labels, step, tokens and loss."""
        rows = [
            {
                **labels,
                "run": self.folder(run).name,
                "step": record.step,
                "tokens": record.step * run.batch * run.sequence,
                "loss": record.loss,
            }
            for labels, run in runs
            for record in self._records(run)
            if record.kind == "step"
        ]
        return pl.DataFrame(rows, infer_schema_length=None)

    def _records(self, run: Run) -> Iterator[Record]:
        path = self.folder(run) / "metrics.jsonl"
        return read_metrics(path) if path.exists() else iter(())
