"""What the user names (files, folders, hf:…, python) → pieces of input, and pieces → units of work."""

import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from completep.data.builtin import python_sources
from completep.errors import UserError, some

TEXT_BYTES = 16 * 2**20  # small text files are taken together up to this, so that there are few shards
JSONL_BYTES = 64 * 2**20
PARQUET_BYTES = 32 * 2**20  # compressed, so that a piece's text fits into memory many times over
HF_INSTALL = "pip install 'completep[hf]'"


@dataclass(frozen=True)
class Piece:
    """A stretch of one input: bytes [start, stop) of a file, or rows of a parquet file.

    Size and time of change are in it so that a piece whose file has changed is another piece.
    """

    kind: Literal["text", "jsonl", "gzip", "parquet", "hf"]
    path: str
    start: int
    stop: int
    size: int
    changed: int


def units(sources: Sequence[str], text_field: str) -> list[tuple[Piece, ...]]:
    """The work, cut up; the same for the same inputs whatever the number of workers."""
    if not sources:
        raise UserError("no sources are given", fix="name text files, folders, .jsonl, .parquet, hf:NAME or python")
    found = list(_grouped(piece for source in sources for piece in _pieces(source, text_field)))
    if not found:
        raise UserError(f"there are no documents in {some(list(sources))}", fix="name files that hold text")
    return found


def _pieces(source: str, text_field: str) -> Iterator[Piece]:
    if source == "python":
        return (piece for path in python_sources() for piece in _of_file(path, text_field))
    if source.startswith("hf:"):
        return iter([_of_hub(source)])
    path = Path(source)
    if path.is_dir():
        return (piece for file in _walked(path) for piece in _of_file(file, text_field))
    if not path.is_file():
        raise UserError(
            f"there is no file or folder {source!r}",
            fix="check the name; hf:NAME is a Hugging Face data set, and python the built-in corpus",
        )
    if path.stat().st_size == 0:
        raise UserError(f"{source} is empty", fix="leave it out")
    return _of_file(path, text_field)


def _walked(folder: Path) -> list[Path]:
    """Every file below, sorted, so that the order of the file system does not matter; none that is hidden."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent) / name for name in files if not name.startswith(".")]
    return sorted(found)


def _of_file(path: Path, text_field: str) -> Iterator[Piece]:
    """Empty files hold no document, and a folder may have some (every `__init__.py`)."""
    path = path.resolve()
    size, name = path.stat().st_size, path.name.lower()
    if not size:
        return
    if name.endswith(".parquet"):
        rows = _parquet_rows(path, text_field)
        yield from _cut(path, "parquet", rows, max(1, rows * PARQUET_BYTES // size))
    elif name.endswith(".jsonl"):
        yield from _cut(path, "jsonl", size, JSONL_BYTES)
    else:
        yield from _cut(path, "gzip" if name.endswith(".jsonl.gz") else "text", size, size)


def _cut(path: Path, kind: Literal["text", "jsonl", "gzip", "parquet"], length: int, each: int) -> Iterator[Piece]:
    status = path.stat()
    for start in range(0, length, each):
        stop = min(start + each, length)
        yield Piece(kind, str(path), start, stop, status.st_size, status.st_mtime_ns)


def _parquet_rows(path: Path, text_field: str) -> int:
    import polars as pl

    frame = pl.scan_parquet(path)
    try:
        schema = frame.collect_schema()
        rows = int(frame.select(pl.len()).collect().item())
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"{path} is not a parquet file: {error}", fix="check the file, or leave it out") from error
    if text_field not in schema:
        raise UserError(f"{path} has no field {text_field!r}", fix=f"it has: {some(schema.names())}")
    if schema[text_field] != pl.String:
        raise UserError(f"{path}: the field {text_field!r} is {schema[text_field]}, not text", fix="name another field")
    return rows


def _grouped(pieces: Iterable[Piece]) -> Iterator[tuple[Piece, ...]]:
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


def _of_hub(source: str) -> Piece:
    """A stream cannot be cut, so it is one piece; if it lies on this disk, its size and time of change count."""
    hub_library()
    name, _, _ = hub_name(source)
    files = [Path(name)] if Path(name).is_file() else _walked(Path(name)) if Path(name).is_dir() else []
    stats = [file.stat() for file in files]
    return Piece("hf", source, 0, 0, sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0))


def hub_library() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise UserError("hf:… needs the package datasets", fix=HF_INSTALL) from error


def hub_name(source: str) -> tuple[str, str | None, str]:
    """hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIGURATION:SPLIT → name, configuration, split."""
    parts = source.removeprefix("hf:").split(":")
    if not all(parts) or len(parts) > 3:
        raise UserError(f"{source!r} names no data set", fix="write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    return parts[0], parts[1] if len(parts) == 3 else None, parts[-1] if len(parts) > 1 else "train"
