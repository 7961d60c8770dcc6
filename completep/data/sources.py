"""Sources (files, folders, hf:…, python, torch) → pieces of input → units of work."""

import importlib
import importlib.util
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from completep.config import BUILTIN
from completep.data.parquet import columns
from completep.errors import UserError, some

TEXT_BYTES = 16 * 2**20  # small text files are grouped up to this size, so that there are few shards
JSONL_BYTES = 64 * 2**20
PARQUET_BYTES = 32 * 2**20  # compressed size of a piece; its text is several times larger and must fit into memory
# Some distributions leave out the tests, so with tests the corpus would differ between machines.
NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
HF_INSTALL = "pip install 'completep[hf]'"


@dataclass(frozen=True)
class Piece:
    """A part of one input: bytes [start, stop) of a file, or rows of a parquet file.

    A piece contains the size and modification time of its file, so a piece of a changed file is a different piece.
    """

    kind: Literal["text", "jsonl", "gzip", "parquet", "hf"]
    path: str
    start: int
    stop: int
    size: int
    changed: int


def units(sources: Sequence[str], text_field: str) -> list[tuple[Piece, ...]]:
    """The units of work. They depend on the inputs alone, not on the number of workers."""
    if not sources:
        raise UserError(
            "no sources are given", fix="name text files, folders, .jsonl, .parquet, hf:NAME, python or torch"
        )
    try:
        groups = list(_grouped(piece for source in sources for piece in _pieces(source, text_field)))
    except OSError as error:  # a broken link, a loop of links, no permission
        what = f"cannot read {error.filename}: {error.strerror}"
        raise UserError(what, fix="check the file, or move it out of the folder") from error
    if not groups:
        raise UserError(f"there are no documents in {some(list(sources))}", fix="name files that contain text")
    return groups


def _pieces(source: str, text_field: str) -> Iterator[Piece]:
    if source in BUILTIN:
        return (piece for path in library_sources(source)[1] for piece in _file_pieces(path, text_field))
    if source.startswith("hf:"):
        return iter([_hub_piece(source)])
    path = Path(source)
    if path.is_dir():
        return (piece for file in _files_below(path) for piece in _file_pieces(file, text_field))
    if not path.is_file():
        raise UserError(
            f"there is no file or folder {source!r}",
            fix="check the name; hf:NAME is a Hugging Face data set, python and torch are the built-in corpora",
        )
    if path.stat().st_size == 0:
        raise UserError(f"{source} is empty", fix="leave it out")
    return _file_pieces(path, text_field)


def library_sources(source: str) -> tuple[Path, list[Path]]:
    """(folder, its Python files) of the running Python's standard library, or of the installed torch."""
    if source == "python":
        root = Path(sysconfig.get_path("stdlib"))
    else:  # found without importing it, which takes seconds
        spec = importlib.util.find_spec(source)
        if spec is None or spec.origin is None:
            raise UserError(f"{source} is not installed", fix="use python, the other built-in corpus")
        root = Path(spec.origin).parent
    bundled = str(root / "ensurepip" / "_bundled")
    sources: list[str] = []
    for parent, folders, files in os.walk(root):  # as text: joining thousands of Paths takes a tenth of a second
        folders[:] = [n for n in folders if n not in NOT_THE_LIBRARY and os.path.join(parent, n) != bundled]
        sources += [os.path.join(parent, name) for name in files if name.endswith(".py")]
    if not sources:
        raise UserError(f"this Python has no library sources under {root}", fix="use text files of your own")
    return root, [Path(path) for path in sorted(sources, key=lambda path: path.split(os.sep))]


def _files_below(folder: Path) -> list[Path]:
    """All files in a folder and its subfolders, except hidden ones. Sorted, since file systems have no fixed order."""

    def fail(error: OSError) -> None:
        raise error

    paths: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(parent) / name for name in files if not name.startswith(".")]
    return sorted(paths)


def _file_pieces(path: Path, text_field: str) -> Iterator[Piece]:
    """The pieces of a file. An empty file has none: folders often contain some, such as `__init__.py`."""
    status, name = path.stat(), path.name.lower()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is not a regular file", fix="move it out of the folder, or leave it out")
    path, size = path.resolve(), status.st_size
    if not size:
        return
    if name.endswith(".parquet"):
        rows = _parquet_rows(path, text_field)
        yield from _cut(path, "parquet", rows, max(1, rows * PARQUET_BYTES // size))
    elif name.endswith(".jsonl"):
        yield from _cut(path, "jsonl", size, JSONL_BYTES)
    else:
        yield from _cut(path, "gzip" if name.endswith(".jsonl.gz") else "text", size, size)


def _cut(path: Path, kind: Literal["text", "jsonl", "gzip", "parquet"], length: int, step: int) -> Iterator[Piece]:
    status = path.stat()
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield Piece(kind, str(path), start, stop, status.st_size, status.st_mtime_ns)


def _parquet_rows(path: Path, text_field: str) -> int:
    rows, types = columns(str(path))
    if text_field not in types:
        raise UserError(f"{path} has no field {text_field!r}", fix=f"set text_field to one of {some([*types])}")
    if types[text_field] != "String":
        raise UserError(
            f"{path}: the field {text_field!r} is {types[text_field]}, not text",
            fix="set text_field to a field of text",
        )
    return rows


def _grouped(pieces: Iterable[Piece]) -> Iterator[tuple[Piece, ...]]:
    """Small text files share a unit; every other piece is a unit."""
    group: list[Piece] = []
    for piece in pieces:
        if piece.kind != "text" or sum(p.size for p in group) + piece.size > TEXT_BYTES:
            if group:
                yield tuple(group)
            group = []
        if piece.kind == "text":
            group.append(piece)
        else:
            yield (piece,)
    if group:
        yield tuple(group)


def _hub_piece(source: str) -> Piece:
    """A stream cannot be cut, so it is one piece. For local files, sizes and modification times are known."""
    hub_library()
    path = Path(hub_name(source)[0])
    stats = [file.stat() for file in ([path] if path.is_file() else _files_below(path) if path.is_dir() else [])]
    return Piece("hf", source, 0, 0, sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0))


def hub_library() -> ModuleType:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise UserError("hf:… needs the package datasets", fix=HF_INSTALL) from error


def hub_name(source: str) -> tuple[str, str | None, str]:
    """hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIGURATION:SPLIT → name, configuration, split."""
    parts = source.removeprefix("hf:").split(":")
    if not all(parts) or len(parts) > 3:
        raise UserError(
            f"{source!r} does not name a data set", fix="write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT"
        )
    return parts[0], parts[1] if len(parts) == 3 else None, parts[-1] if len(parts) > 1 else "train"
