"""What is remembered of a tuning between two calls: which scripts it ran, and which runs it has asked for.

A file per tuning in `tunings`, beside the store. Losing it loses no run: it serves `tune status` and the flag that
accepts a changed script.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from completep.config import plain, structure
from completep.errors import UserError
from completep.files import read_text, write_over
from completep.sweep.store import Counts, Store
from completep.tuning.scripts import Hashes
from completep.tuning.settings import Tuning

FOLDER = "tunings"


@dataclass(frozen=True)
class Record:
    """One tuning's file."""

    title: str
    scripts: list[list[str]]
    runs: list[str]

    @property
    def hashes(self) -> Hashes:
        return tuple((name, digest) for name, digest in self.scripts)


@dataclass(frozen=True)
class Known:
    """A task of which only the name is known."""

    id: str


def record_path(tuning: Tuning, out: Path) -> Path:
    """Named by everything but the scripts, and by nothing that changes how a search is made."""
    content = plain(replace(tuning, seeds=1, proxies=[], trials=0, factory="", space={}))
    content["space"] = sorted(tuning.space)
    name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    return out / FOLDER / f"{name}.json"


def read_record(path: Path) -> Record | None:
    """None if there is none. A damaged one is as good as none: it is only a record."""
    if not path.exists():
        return None
    try:
        return structure(json.loads(read_text(path)), Record, str(path), "remove it")
    except (ValueError, UserError, RecursionError):
        return None


def write_record(path: Path, title: str, scripts: Hashes, runs: Iterable[str]) -> None:
    """While a tuning runs, `runs` are those that it may ask for; afterwards those that it asked for."""
    content = {"title": title, "scripts": [list(s) for s in scripts], "runs": list(dict.fromkeys(runs))}
    write_over(path, json.dumps(content) + "\n")


def changed(old: Hashes, new: Hashes) -> list[str]:
    """The names of files that differ."""
    before, after = dict(old), dict(new)
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def all_counts(out: Path, store: Store) -> list[tuple[str, Counts]]:
    """Every tuning's title and how far it is."""
    found = []
    for path in sorted((out / FOLDER).glob("*.json")):
        record = read_record(path)
        if record is not None:
            found.append((record.title, store.counts([Known(name) for name in record.runs])))
    return found
