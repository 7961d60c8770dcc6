"""The rows of a parquet file, read by a child process with limited memory.

A small file may unpack to any size, and polars panics on some damaged files. The child runs this file as a script, so
it imports nothing of the package at the top.
"""

import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

UNREADABLE, TOO_LONG, TOO_MUCH = 3, 4, 5  # exit codes of the child
STALLED = 120  # seconds without work after which the child gives up
FIX = "check the file, or leave it out"
ROWS, SLICE = 4096, 2**20  # rows whose lengths are looked at together, and bytes of text that are
NULL = 2**64 - 1  # the length that stands for a row without text


def memory_budget(max_document: int) -> int:
    """Bytes that reading may take. Many rows are unpacked at once, so this is much more than one document."""
    return 2**30 + 16 * max_document


def columns(path: str) -> tuple[int, dict[str, str]]:
    """(number of rows, type by column)."""
    budget = memory_budget(0)
    with _child([path, str(budget)], budget, FIX) as pipe:
        answer = pipe.read()
    rows, types = json.loads(answer)
    return rows, types


def texts(path: str, field: str, start: int, stop: int, max_document: int) -> Iterator[str | None]:
    """The texts of rows start … stop - 1."""
    budget, fix = memory_budget(max_document), f"leave it out, or raise the limit: max_document={2 * max_document}"
    with _child([path, str(budget), field, *map(str, (start, stop, max_document))], budget, fix) as pipe:
        yield from _received(pipe, max_document)


@contextmanager
def _child(words: list[str], budget: int, fix: str) -> Iterator[IO[bytes]]:
    """The output of the child. Raises a UserError if it cannot read the file; `fix` is for a file that is too large."""
    from completep.errors import UserError

    path, settings = words[0], os.environ | {"POLARS_MAX_THREADS": "1", "PYTHONUTF8": "1"}
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-P", __file__, *words]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=settings)
        assert child.stdout is not None
        try:
            yield child.stdout
            code = child.wait()
        finally:
            child.kill()
            child.stdout.close()
            child.wait()
        errors.seek(0)
        last = errors.read(2**20).decode(errors="replace").strip().rpartition("\n")[2][:500]
    if code == TOO_LONG:
        raise UserError(f"{path} {last}", fix=fix)
    if code == TOO_MUCH:
        raise UserError(f"{path} takes more than {budget / 1e9:.1f} GB of memory to unpack", fix=fix)
    if code:
        what = f"{path} is not a parquet file that can be read: {last or f'its reader ended with {code}'}"
        raise UserError(what, fix=FIX)


def _received(pipe: IO[bytes], max_document: int) -> Iterator[str | None]:
    while len(head := pipe.read(8)) == 8:
        (length,) = struct.unpack("<Q", head)
        if length == NULL:
            yield None
        elif length > max_document or len(text := pipe.read(length)) < length:
            return  # the child died; its exit code says why
        else:
            yield text.decode()


def _guard(budget: int) -> threading.Event:
    """End this process if it takes more memory than the budget. Until the event is set, also if it does nothing for
    long; after that, it may wait for the reader of its output.

    A memory limit of the system does not help: without memory, the threads of polars may wait for each other forever.
    """
    unpacked, page = threading.Event(), os.sysconf("SC_PAGE_SIZE")

    def watch() -> None:
        worked, since = time.process_time(), time.monotonic()
        while True:
            time.sleep(0.02)
            if int(Path("/proc/self/statm").read_text().split()[1]) * page > budget:
                os._exit(TOO_MUCH)
            if (now := time.process_time()) - worked > 1:
                worked, since = now, time.monotonic()
            if not unpacked.is_set() and time.monotonic() - since > STALLED:
                os._exit(TOO_MUCH)

    if Path("/proc/self/statm").exists():
        threading.Thread(target=watch, daemon=True).start()
    return unpacked


def _describe(path: str) -> None:
    import polars as pl

    frame = pl.scan_parquet(path)
    types = {name: str(kind) for name, kind in frame.collect_schema().items()}
    json.dump([int(frame.select(pl.len()).collect().item()), types], sys.stdout)
    sys.stdout.flush()


def _send(path: str, unpacked: threading.Event, field: str, start: int, stop: int, max_document: int) -> None:
    import polars as pl

    out = sys.stdout.buffer
    column = pl.scan_parquet(path).select(field).slice(start, stop - start).collect()[field]
    unpacked.set()
    for first in range(0, len(column), ROWS):
        rows = column.slice(first, ROWS)
        lengths = rows.str.len_bytes().to_list()
        good = next((i for i, length in enumerate(lengths) if (length or 0) > max_document), len(lengths))
        for i, count in _slices(lengths[:good]):
            for text in rows.slice(i, count).to_list():
                data = None if text is None else text.encode()
                out.write(struct.pack("<Q", NULL if data is None else len(data)))
                out.write(data or b"")
        if good < len(lengths):
            out.flush()
            what = f"row {start + first + good} has a document of {lengths[good]} bytes"
            sys.stderr.write(f"{what}, more than the limit of {max_document}")
            sys.exit(TOO_LONG)
    out.flush()


def _slices(lengths: "list[int | None]") -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of slices with few bytes; a long row is alone.

    Equal rows may share one text until they are Python strings: a file of 2 KB can hold many rows of 20 MB.
    """
    first = total = 0
    for i, length in enumerate(lengths):
        if i > first and total + (length or 0) > SLICE:
            yield first, i - first
            first, total = i, 0
        total += length or 0
    if lengths:
        yield first, len(lengths) - first


def _read(path: str, budget: str, *words: str) -> None:
    """The child: the number of rows and the columns, or with further words the texts of some rows."""
    unpacked = _guard(int(budget))
    try:
        if words:
            _send(path, unpacked, words[0], *(int(word) for word in words[1:]))
        else:
            _describe(path)
    except SystemExit:
        raise
    except BaseException as error:  # polars raises many kinds; its panics are no Exceptions
        sys.stderr.write("\n" + (str(error).strip() or type(error).__name__).partition("\n")[0])
        sys.exit(UNREADABLE)


if __name__ == "__main__":
    _read(*sys.argv[1:])
