"""What is remembered of a tuning between two calls: the versions of its scripts, and the runs of each version.

It is one file per tuning in `tunings`, beside the store. It serves `tune_status` and the argument `accept_changes`. If
it is lost, no run is lost.
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
    """A version of the scripts, and the runs that were asked for with it."""

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
    """A task whose id alone is known."""

    id: str


def record_path(tuning: Tuning, out: Path) -> Path:
    """The name is a hash of the settings, without those that only change how the search is done."""
    content = plain(replace(tuning, seeds=1, most_seeds=1, proxies=[], trials=0, factory="", space={}))
    content["space"] = sorted(tuning.space)
    name = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    return out / FOLDER / f"{name}.json"


def read_record(path: Path) -> Record | None:
    """The record of a tuning; None if there is none, or if it is damaged."""
    if not path.exists():
        return None
    try:
        record = structure(json.loads(read_text(path)), Record, str(path), "remove it")
    except (ValueError, UserError, RecursionError):
        return None
    names = (name for version in record.versions for name in version.runs)
    return record if record.versions and all(NAME.fullmatch(name) for name in names) else None


def write_record(path: Path, title: str, scripts: Hashes, runs: Iterable[str]) -> None:
    """Write the newest version. During a tuning, `runs` are all that it may ask for; afterwards those it asked for."""
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
    """The title and the progress of every tuning, for the newest version of its scripts."""
    counts = []
    for path in sorted((out / FOLDER).glob("*.json")):
        record = read_record(path)
        if record is not None:
            counts.append((record.title, store.counts([Known(name) for name in record.versions[-1].runs])))
    return counts
