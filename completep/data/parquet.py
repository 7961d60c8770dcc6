"""Rows of a parquet file, read by a child process whose memory is limited: a small file may unpack to any size.

This file is also what the child runs, so it imports nothing of the package at the top.
"""

import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

UNREADABLE, TOO_LONG, TOO_MUCH = 3, 4, 5  # exit codes of the child
STALLED = 120  # seconds without work after which the child gives up
NULL = 2**64 - 1  # the length that stands for a row without text


def memory_budget(max_document: int) -> int:
    """Bytes that reading may take. Many rows are unpacked at once, so that this is much more than a document."""
    return 2**30 + 16 * max_document


def texts(path: str, field: str, start: int, stop: int, max_document: int) -> Iterator[str | None]:
    """The texts of rows start … stop - 1."""
    from completep.errors import UserError

    budget = memory_budget(max_document)
    command = [sys.executable, "-P", __file__, path, field, *map(str, (start, stop, max_document, budget))]
    settings = os.environ | {"POLARS_MAX_THREADS": "1", "PYTHONUTF8": "1"}
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=settings)
        assert child.stdout is not None
        try:
            yield from _received(child.stdout, max_document)
            child.wait()
        finally:
            child.kill()
            child.stdout.close()
            child.wait()
        if child.returncode == 0:
            return
        errors.seek(0)
        said = errors.read(2000).decode(errors="replace").strip()
    larger = f"raise the limit: --max-document {2 * max_document} (max_document in Python)"
    if child.returncode == UNREADABLE:
        raise UserError(f"cannot read {path}: {said}", fix="check the file, or leave it out")
    if child.returncode == TOO_LONG:
        raise UserError(f"{path} {said}, more than the limit of {max_document}", fix=larger)
    what = f"{path} takes more than {budget / 1e9:.1f} GB of memory to unpack"
    raise UserError(what, fix=f"leave it out, or {larger}")


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
    """Until the event is set, end this process when it takes more memory than the budget, or does nothing for long.

    A limit of the system is no help: where polars cannot get memory, its threads may wait for each other for ever.
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


def _send(path: str, field: str, start: int, stop: int, max_document: int, budget: int) -> None:
    import polars as pl

    out = sys.stdout.buffer
    done = _guard(budget)
    try:
        frame = pl.scan_parquet(path).select(field).slice(start, stop - start).collect()
        done.set()
    except (pl.exceptions.PolarsError, OSError) as error:
        sys.stderr.write(str(error))
        sys.exit(UNREADABLE)
    for i, text in enumerate(frame[field], start):
        data = None if text is None else text.encode()
        if data is not None and len(data) > max_document:
            sys.stderr.write(f"row {i} has a document of {len(data)} bytes")
            out.flush()
            sys.exit(TOO_LONG)
        out.write(struct.pack("<Q", NULL if data is None else len(data)))
        out.write(data or b"")
    out.flush()


if __name__ == "__main__":
    _send(sys.argv[1], sys.argv[2], *(int(word) for word in sys.argv[3:]))
