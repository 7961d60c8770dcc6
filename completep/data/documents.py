"""A piece of input → its documents, one at a time; what is wrong with one is said with its file and line."""

import hashlib
import json
import mmap
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from completep.data.sources import Piece, hub_library, hub_name
from completep.data.tokenizer import well_formed
from completep.errors import UserError, some

PART_BYTES = 16 * 2**20  # a longer text file is encoded in parts, so that it need not fit into memory
# Between two visible characters a newline is a word of its own, so a cut after it changes no id.
SAFE_CUT = re.compile(rb"[!-~]\n(?=[!-~])")
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass(frozen=True)
class Document:
    """`parts` in order are its text; `digest` hashes the text, wherever it came from."""

    digest: bytes
    parts: Iterable[str]

    def is_held_out(self, share: float) -> bool:
        """By content alone, so neither order nor workers matter, and copies of a document stay on one side."""
        return int.from_bytes(self.digest, "big") < share * 2**64


def documents(piece: Piece, text_field: str, *, in_parts: bool) -> Iterator[Document]:
    """Documents without any text are left out."""
    try:
        if piece.kind == "text":
            yield from _text_file(Path(piece.path), in_parts)
        else:
            rows = {"jsonl": _json_rows, "gzip": _json_rows, "parquet": _parquet_rows, "hf": _hub_rows}[piece.kind]
            texts = (_text_of(row, text_field, where) for row, where in rows(piece, text_field))
            yield from (Document(_digest(text.encode()), (text,)) for text in texts if text)
    except (OSError, EOFError, zlib.error) as error:
        told = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {piece.path}: {told}", fix="check the file, or leave it out") from error


def _digest(data: "bytes | mmap.mmap") -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _text_file(path: Path, in_parts: bool) -> Iterator[Document]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield Document(_digest(data), _parts(data, path, PART_BYTES if in_parts else len(data)))


def _parts(data: mmap.mmap, path: Path, each: int) -> Iterator[str]:
    start = 0
    while start < len(data):
        cut = SAFE_CUT.search(data, start + each)
        stop = cut.end() if cut else len(data)
        yield _decoded(data[start:stop], path, start)
        start = stop


def _decoded(data: bytes, path: "str | Path", offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8: byte {offset + error.start} is 0x{data[error.start]:02x}",
            fix="convert it, as in `iconv -f latin1 -t utf-8`, or leave it out if it is not text",
        ) from error


Row = tuple[Any, Callable[[], str]]  # and what to call the place it stands at, worked out only for an error


def _text_of(row: Any, field: str, where: Callable[[], str]) -> str:
    if not isinstance(row, dict):
        raise UserError(f"{where()} is not a JSON object: {str(row)[:40]!r}", fix=f'write {{"{field}": "…"}} per line')
    if field not in row:
        raise UserError(
            f"{where()} has no field {field!r}; it has: {some([*row]) or 'none'}",
            fix="name the field that has the text",
        )
    if not isinstance(row[field], str):
        raise UserError(f"{where()}: the field {field!r} is {row[field]!r:.40}, not text", fix="take such rows out")
    return well_formed(row[field])


def _opened(path: str) -> IO[bytes]:
    import gzip

    return gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _json_rows(piece: Piece, _: str) -> Iterator[Row]:
    """The lines that begin within the piece; the last may end beyond it."""
    for offset, line in _lines(piece):
        if not line.isspace():
            where = _Line(piece.path, offset)
            yield _parsed(line, where), where


def _lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    with _opened(piece.path) as file:
        offset = piece.start
        if offset:  # the line that the piece before ends with; none if that ends with a newline
            file.seek(offset - 1)
            offset += len(file.readline()) - 1
        for line in file:
            if piece.kind == "jsonl" and offset >= piece.stop:
                return
            yield offset, line
            offset += len(line)


def _parsed(line: bytes, where: "_Line") -> Any:
    mark = b"\xef\xbb\xbf" if where.offset == 0 else b""  # some programs begin a file with one
    text = _decoded(line.removeprefix(mark), where.path, where.offset + len(mark) * line.startswith(mark))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where()} is not JSON: {error}", fix="write one JSON object per line") from error


@dataclass(frozen=True)
class _Line:
    """`file:line`, counted only when it is asked for."""

    path: str
    offset: int

    def __call__(self) -> str:
        line, left = 1, self.offset
        with _opened(self.path) as file:
            while left and (block := file.read(min(left, 2**20))):
                line += block.count(b"\n")
                left -= len(block)
        return f"{self.path}:{line}"


def _parquet_rows(piece: Piece, text_field: str) -> Iterator[Row]:
    import polars as pl

    frame = pl.scan_parquet(piece.path).select(text_field).slice(piece.start, piece.stop - piece.start)
    try:
        texts = frame.collect()[text_field]
    except pl.exceptions.PolarsError as error:
        raise UserError(f"cannot read {piece.path}: {error}", fix="check the file, or leave it out") from error
    for i, text in enumerate(texts, piece.start):
        yield {text_field: text}, partial("{} row {}".format, piece.path, i)


def _hub_rows(piece: Piece, _: str) -> Iterator[Row]:
    name, configuration, split = hub_name(piece.path)
    load = hub_library().load_dataset
    builder = BUILDERS.get(Path(name).suffix) if Path(name).is_file() else None
    try:
        if builder:
            stream = load(builder, data_files=name, split=split, streaming=True)
        else:
            stream = load(name, configuration, split=split, streaming=True)
        for i, row in enumerate(stream):
            yield row, partial("{} row {}".format, piece.path, i)
    except Exception as error:  # a name that is not there, no network, a broken file: the library has many
        raise UserError(
            f"{piece.path}: {type(error).__name__}: {error}", fix="check the name, the split and the network"
        ) from error
