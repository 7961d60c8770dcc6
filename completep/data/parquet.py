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
    """Until the event is set, end this process if it takes more memory than the budget, or does nothing for long.

    A memory limit of the system does not help: without memory, the threads of polars may wait for each other forever.
    """
    done, page = threading.Event(), os.sysconf("SC_PAGE_SIZE")

    def watch() -> None:
        worked, since = time.process_time(), time.monotonic()
        while not done.wait(0.02):
            if int(Path("/proc/self/statm").read_text().split()[1]) * page > budget:
                os._exit(TOO_MUCH)
            if (now := time.process_time()) - worked > 1:
                worked, since = now, time.monotonic()
            if time.monotonic() - since > STALLED:
                os._exit(TOO_MUCH)

    if Path("/proc/self/statm").exists():
        threading.Thread(target=watch, daemon=True).start()
    return done


def _describe(path: str) -> None:
    import polars as pl

    frame = pl.scan_parquet(path)
    types = {name: str(kind) for name, kind in frame.collect_schema().items()}
    json.dump([int(frame.select(pl.len()).collect().item()), types], sys.stdout)
    sys.stdout.flush()


def _send(path: str, done: threading.Event, field: str, start: int, stop: int, max_document: int) -> None:
    import polars as pl

    out = sys.stdout.buffer
    frame = pl.scan_parquet(path).select(field).slice(start, stop - start).collect()
    done.set()
    for i, text in enumerate(frame[field], start):
        data = None if text is None else text.encode()
        if data is not None and len(data) > max_document:
            sys.stderr.write(f"row {i} has a document of {len(data)} bytes, more than the limit of {max_document}")
            out.flush()
            sys.exit(TOO_LONG)
        out.write(struct.pack("<Q", NULL if data is None else len(data)))
        out.write(data or b"")
    out.flush()


def _read(path: str, budget: str, *words: str) -> None:
    """The child: the number of rows and the columns, or with further words the texts of some rows."""
    done = _guard(int(budget))
    try:
        if words:
            _send(path, done, words[0], *(int(word) for word in words[1:]))
        else:
            _describe(path)
    except SystemExit:
        raise
    except BaseException as error:  # polars raises many kinds; its panics are no Exceptions
        sys.stderr.write("\n" + (str(error).strip() or type(error).__name__).partition("\n")[0])
        sys.exit(UNREADABLE)


if __name__ == "__main__":
    _read(*sys.argv[1:])
