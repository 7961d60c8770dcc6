"""A store's results as one small file: settings, losses, curves and evaluations, without weights.

With a pack, a study can be continued on another machine, and results can be kept without gigabytes of weights. A pack
may come from somebody else: each run is checked against its name and its digests before it is written, and runs that
the store has already are not changed.
"""

import errno
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from completep.config import run_from_json, run_id, structure, unsealed
from completep.errors import UserError, some
from completep.files import open_regular, read_bytes, remove_folder, write_new
from completep.sweep.store import RESULT, Store
from completep.train.checked import check_result
from completep.train.folder import METRICS, RUN
from completep.train.records import Result, parse_record

FORMAT = "completep results 1"
MOST = 64 * 2**20  # characters of one run; a longer line is not from `pack`
EVALUATION = re.compile(r"evaluations/[\w.-]{1,100}\.json")
ID = re.compile(r"[0-9a-f]{12}")
DAMAGE = (ValueError, KeyError, TypeError, RecursionError)  # what _checked raises


@dataclass(frozen=True)
class Unpacked:
    """How many runs of a pack are new in the store, and how many it had already."""

    new: int
    known: int


def pack(store: Store, path: Path) -> int:
    """Write the finished training runs of a store to a new file. Returns their number.

    The store may come from somebody else: no link is followed, and each run is checked as `unpack` checks it.
    """
    store.look()
    folders = sorted(f.parent for f in store.root.glob(f"*/{RESULT}") if ID.fullmatch(f.parent.name))
    lines, damaged = [], []
    for folder in folders:
        try:
            if os.path.lexists(folder / RUN):
                lines.append(_packed(folder))
        except (OSError, *DAMAGE) as error:
            damaged.append(f"{folder.name} ({_reason(error)})")
    if damaged:
        raise UserError(
            f"{store.root} has damaged runs: {some(damaged, 3)}",
            fix="restore their files, or move these folders out of the store and run the study again",
        )
    if not lines:
        raise UserError(f"{store.root} has no finished training runs", fix="run a study first, or name another folder")
    write_new(path, gzip.compress("\n".join([FORMAT, *lines, ""]).encode(), mtime=0))
    return len(lines)


def _packed(folder: Path) -> str:
    """The line of a run, if `unpack` takes it."""
    entry = {"id": folder.name, "files": _files(folder)}
    _checked(entry)
    if len(line := json.dumps(entry)) >= MOST:
        raise ValueError(f"its files have more than {MOST} characters")
    return line


def _files(folder: Path) -> dict[str, str]:
    """Name → content of the small text files of a run. A link is an OSError: it may lead to any file of yours."""
    for place in (folder, folder / "evaluations"):
        if place.is_symlink():
            raise OSError(errno.ELOOP, f"{place.name} is a link", str(place))
    evaluations = sorted(str(p.relative_to(folder)) for p in folder.glob("evaluations/*.json"))
    names = [RUN, METRICS, *filter(EVALUATION.fullmatch, evaluations), RESULT]
    return {
        name: read_bytes(folder / name, MOST, follow=False).decode() for name in names if os.path.lexists(folder / name)
    }


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        name = Path(os.fsdecode(error.filename or "a file")).name
        return f"{name} is a link" if error.errno == errno.ELOOP else f"{name}: {error.strerror}"
    return error.what if isinstance(error, UserError) else str(error)


def unpack(path: Path, store: Store) -> Unpacked:
    """Add the runs of a file that `pack` wrote to a store. A damaged run does not keep out the others."""
    store.open()
    new = known = 0
    damaged: list[str] = []
    for number, line in enumerate(_lines(path), 1):
        try:
            name, files = _checked(json.loads(line))
        except DAMAGE as error:
            damaged.append(f"run {number} is damaged: {_reason(error)}")
            continue
        if (store.root / name).exists():
            known += 1
        else:
            _write(store.root / name, files)
            new += 1
    if damaged:
        what = (
            f"{path}: {some(damaged, 3)}; of the others, {new} are new in {store.root} and {known} were there already"
        )
        raise UserError(what, fix="pack the store again, if you need the damaged runs")
    return Unpacked(new, known)


def _lines(path: Path) -> Iterator[str]:
    """The runs of a pack, one by one, in bounded memory."""
    damaged = UserError(f"{path} is not a file that `completep study pack` wrote", fix="check the name")
    try:
        with open_regular(path) as packed, gzip.open(packed, "rt", encoding="utf-8", newline="\n") as file:
            if file.readline(len(FORMAT) + 2).rstrip("\n") != FORMAT:
                raise damaged
            while line := file.readline(MOST + 1):
                if len(line) > MOST:
                    raise damaged
                yield line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError):
            raise UserError(f"there is no file {path}", fix="check the name") from error
        raise damaged from error


def _checked(entry: Any) -> tuple[str, dict[str, str]]:
    """(name of the run, its files), if they belong together."""
    files, name = entry.get("files") if isinstance(entry, dict) else None, str(entry["id"])
    if not isinstance(files, dict) or not {RUN, RESULT} <= files.keys():
        raise ValueError("its files are missing")
    for other, text in files.items():
        if not isinstance(text, str) or not (other in (RUN, METRICS, RESULT) or EVALUATION.fullmatch(other)):
            raise ValueError(f"it has a file {other!r:.80}")
    if not ID.fullmatch(name) or run_id(run_from_json(files[RUN])) != name:
        raise ValueError("its settings do not match its name")
    content = unsealed(files[RESULT])
    if content.get("run") != name:
        raise ValueError("its result belongs to another run")
    recorded = dict(content.get("files") or {}).get(METRICS)
    if recorded is not None and hashlib.sha256(files.get(METRICS, "").encode()).hexdigest() != recorded:
        raise ValueError("its loss curve has changed")
    _check_contents(content, files)
    return name, files


def _check_contents(result: dict[str, Any], files: dict[str, str]) -> None:
    """Check the values too: a digest only shows damage, since whoever changes a file can also change its digest."""
    from completep.integrations.harness import evaluation_from_json

    check_result(result)
    structure(result, Result, RESULT, "pack the store again")
    for line in files.get(METRICS, "").encode().splitlines():
        parse_record(line)
    for name, text in files.items():
        if EVALUATION.fullmatch(name):
            evaluation_from_json(text, name)


def _write(folder: Path, files: dict[str, str]) -> None:
    """Write into a temporary folder and rename it, so a run is complete or absent."""
    part = folder.with_name(f".unpacking-{folder.name}")
    remove_folder(part)
    part.mkdir()  # it must be new: a link that was planted here would lead elsewhere
    for name, text in sorted(files.items(), key=lambda file: file[0] == RESULT):  # a folder with a result is finished
        write_new(part / name, text)
    part.rename(folder)
