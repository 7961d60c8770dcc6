"""What is planted where a file should be, and a limit on how long a test waits for it."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PLANTED = ("pipe", "device", "folder")


def plant(path: Path, kind: str) -> None:
    """Something that is no file, under the name of one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


class TooLongError(SystemExit):
    """A kind of SystemExit, so that no handler of the program takes it for an error."""


@contextmanager
def within(seconds: float = 30) -> Iterator[None]:
    """A hang fails the test instead of stopping all of them."""

    def stop(number: int, frame: object) -> None:
        raise TooLongError(f"not done within {seconds} s")

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
