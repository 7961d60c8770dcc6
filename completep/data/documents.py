"""A piece of input → its documents, one at a time. Errors name the file and the line."""

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

from completep.data.parquet import texts
from completep.data.sources import Piece, hub_library, hub_name
from completep.data.tokenizer import well_formed
from completep.errors import UserError, some

PART_BYTES = 16 * 2**20  # a longer text file is encoded in parts, since it may not fit into memory
# A newline between two visible characters is a word of its own, so a cut after it changes no ids.
SAFE_CUT = re.compile(rb"[!-~]\n(?=[!-~])")
MAX_DOCUMENT = 64 * 10**6  # bytes of text held in memory at once, by default
FIX = "check the file, or leave it out"
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass(frozen=True)
class Document:
    """`parts`, joined, are the text; `digest` is a hash of the text."""

    digest: bytes
    parts: Iterable[str]

    def is_held_out(self, share: float) -> bool:
        """Depends on the content alone: order and workers do not matter, and copies of a document share a split."""
        return int.from_bytes(self.digest, "big") < share * 2**64


def documents(piece: Piece, text_field: str, *, in_parts: bool, max_document: int = MAX_DOCUMENT) -> Iterator[Document]:
    """The documents of a piece, except empty ones. None of them is longer than `max_document` bytes."""
    try:
        if piece.kind == "text":
            yield from _text_file(Path(piece.path), in_parts, max_document)
        else:
            rows = {"jsonl": _json_rows, "gzip": _json_rows, "parquet": _parquet_rows, "hf": _hub_rows}[piece.kind]
            texts = (_text_of(row, text_field, where) for row, where in rows(piece, text_field, max_document))
            yield from (Document(_digest(text.encode()), (text,)) for text in texts if text)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        if isinstance(error, UserError):
            raise
        cause = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {piece.path}: {cause}", fix=FIX) from error


def _digest(data: "bytes | mmap.mmap") -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _too_long(where: str, max_document: int) -> UserError:
    fix = f"split it, leave it out, or raise the limit: max_document={2 * max_document}"
    return UserError(f"{where} is longer than the limit of {max_document} bytes", fix=fix)


def _text_file(path: Path, in_parts: bool, max_document: int) -> Iterator[Document]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size = min(PART_BYTES, max_document // 2) if in_parts else len(data)
        yield Document(_digest(data), _parts(data, path, size, max_document))


def _parts(data: mmap.mmap, path: Path, size: int, max_document: int) -> Iterator[str]:
    start = 0
    while start < len(data):
        cut = SAFE_CUT.search(data, start + size, min(len(data), start + max_document))
        stop = cut.end() if cut else len(data)
        if stop - start > max_document:
            raise _too_long(f"{path}: the text from byte {start} on, without a line break to cut at,", max_document)
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


Row = tuple[Any, Callable[[], str]]  # the row, and a function that names its place, called only for an error


def _text_of(row: Any, field: str, where: Callable[[], str]) -> str:
    if not isinstance(row, dict):
        raise UserError(f"{where()} is not a JSON object: {str(row)[:40]!r}", fix=f'write {{"{field}": "…"}} per line')
    if field not in row:
        what = f"{where()} has no field {field!r}; it has: {some([*row]) or 'none'}"
        raise UserError(what, fix="pass the name of the field with the text as text_field")
    if not isinstance(row[field], str):
        raise UserError(f"{where()}: the field {field!r} is {row[field]!r:.40}, not text", fix="remove such rows")
    return well_formed(row[field])


def _opened(path: str) -> IO[bytes]:
    import gzip

    return gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _json_rows(piece: Piece, _: str, max_document: int) -> Iterator[Row]:
    """The lines that begin within the piece. The last one may end after it."""
    for offset, line in _lines(piece, max_document):
        if not line.isspace():
            where = _Line(piece.path, offset)
            yield _parsed(line, where), where


def _lines(piece: Piece, max_document: int) -> Iterator[tuple[int, bytes]]:
    with _opened(piece.path) as file:
        offset = piece.start
        if offset:  # skip the line that began in the previous piece
            file.seek(offset - 1)
            offset -= 1
            while rest := file.readline(PART_BYTES):
                offset += len(rest)
                if rest.endswith(b"\n"):
                    break
        while line := file.readline(max_document + 1):
            if piece.kind == "jsonl" and offset >= piece.stop:
                return
            if len(line) > max_document:
                raise _too_long(f"the line {_Line(piece.path, offset)()}", max_document)
            yield offset, line
            offset += len(line)


def _parsed(line: bytes, where: "_Line") -> Any:
    mark = b"\xef\xbb\xbf" if where.offset == 0 else b""  # the byte-order mark that some programs write
    text = _decoded(line.removeprefix(mark), where.path, where.offset + len(mark) * line.startswith(mark))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where()} is not JSON: {error}", fix="write one JSON object per line") from error


@dataclass(frozen=True)
class _Line:
    """Names a line as `file:line`. The lines before it are counted only when it is called."""

    path: str
    offset: int

    def __call__(self) -> str:
        line, remaining = 1, self.offset
        with _opened(self.path) as file:
            while remaining and (block := file.read(min(remaining, 2**20))):
                line += block.count(b"\n")
                remaining -= len(block)
        return f"{self.path}:{line}"


def _parquet_rows(piece: Piece, text_field: str, max_document: int) -> Iterator[Row]:
    for i, text in enumerate(texts(piece.path, text_field, piece.start, piece.stop, max_document), piece.start):
        yield {text_field: text}, partial("{} row {}".format, piece.path, i)


def _hub_rows(piece: Piece, text_field: str, max_document: int) -> Iterator[Row]:
    name, configuration, split = hub_name(piece.path)
    load = hub_library().load_dataset
    builder = BUILDERS.get(Path(name).suffix) if Path(name).is_file() else None
    try:
        if builder:
            stream = load(builder, data_files=name, split=split, streaming=True)
        else:
            stream = load(name, configuration, split=split, streaming=True)
        for i, row in enumerate(stream):
            if len(str(row.get(text_field))) > max_document:
                raise _too_long(f"{piece.path} row {i}", max_document)
            yield row, partial("{} row {}".format, piece.path, i)
    except UserError:
        raise
    except Exception as error:  # the library raises many kinds: an unknown name, no network, a broken file
        what = f"{piece.path}: {type(error).__name__}: {error}"
        raise UserError(what, fix="check the name, the split and the network") from error
