"""What is remembered of a tuning between two calls: the versions of its scripts, and which runs each was asked for.

A file per tuning in `tunings`, beside the store. Losing it loses no run: it serves `tune status` and the flag that
accepts a changed script.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from completep.config import plain, structure
from completep.errors import UserError
from completep.files import read_text, write_over
from completep.sweep.store import Counts, Store
from completep.tuning.scripts import Hashes
from completep.tuning.settings import Tuning

FOLDER = "tunings"
MOST_VERSIONS = 50  # of scripts that are remembered
NAME = re.compile(r"[\w-]{1,64}")  # of a run


@dataclass(frozen=True)
class Version:
    """The scripts as they were, and the runs that were asked for then."""

    scripts: Hashes
    runs: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """One tuning's file."""

    title: str
    versions: tuple[Version, ...]  # the newest last

    def before(self, scripts: Hashes) -> tuple[Version, ...]:
        """The versions with other scripts than these, the newest first."""
        return tuple(v for v in reversed(self.versions) if v.scripts != scripts)


@dataclass(frozen=True)
class Known:
    """A task of which only the name is known."""

    id: str


def record_path(tuning: Tuning, out: Path) -> Path:
    """Named by everything but the scripts, and by nothing that changes how a search is made."""
    content = plain(replace(tuning, seeds=1, most_seeds=1, proxies=[], trials=0, factory="", space={}))
    content["space"] = sorted(tuning.space)
    name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    return out / FOLDER / f"{name}.json"


def read_record(path: Path) -> Record | None:
    """None if there is none. A damaged one is as good as none: it is only a record."""
    if not path.exists():
        return None
    try:
        record = structure(json.loads(read_text(path)), Record, str(path), "remove it")
    except (ValueError, UserError, RecursionError):
        return None
    names = (name for version in record.versions for name in version.runs)
    return record if record.versions and all(NAME.fullmatch(name) for name in names) else None


def write_record(path: Path, title: str, scripts: Hashes, runs: Iterable[str]) -> None:
    """While a tuning runs, `runs` are those that it may ask for; afterwards those that it asked for."""
    old = read_record(path)
    earlier = [v for v in old.versions if v.scripts != scripts] if old is not None else []
    now = Version(scripts, tuple(dict.fromkeys(runs)))
    content = asdict(Record(title, (*earlier[-MOST_VERSIONS:], now)))
    write_over(path, json.dumps(content) + "\n")


def changed(old: Hashes, new: Hashes) -> list[str]:
    """The names of files that differ."""
    before, after = dict(old), dict(new)
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def all_counts(out: Path, store: Store) -> list[tuple[str, Counts]]:
    """Every tuning's title and how far it is, with its scripts as they were last."""
    counts = []
    for path in sorted((out / FOLDER).glob("*.json")):
        record = read_record(path)
        if record is not None:
            counts.append((record.title, store.counts([Known(name) for name in record.versions[-1].runs])))
    return counts
