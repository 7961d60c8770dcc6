"""A child process of a task. It inherits the task's lock, is stopped with the task, and dies with it."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

GRACE = 60.0  # seconds that a child has to save after SIGTERM
SOONEST, LATEST = 0.02, 0.5  # seconds between two looks at a child; short at first, so short runs end soon
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Exit:
    """How a child ended."""

    code: int
    stopped: bool  # because this process was asked to stop
    ended_early: bool  # because `enough` said so


@contextmanager
def passing_on(stop: Callable[[], None]) -> Iterator[list[int]]:
    """SIGTERM and SIGINT call `stop` instead of ending this process. Yields the list of signals so far."""
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        came.append(number)
        stop()

    if threading.current_thread() is not threading.main_thread():  # its owner handles signals
        yield came
        return
    old = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield came
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def run_child(
    words: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    lock: int,
    stdout: int,
    stderr: int,
    enough: Callable[[], bool] = lambda: False,
) -> Exit:
    """Run a command in a session of its own until it ends, or until `enough` or a signal ends it.

    No shell is used. An OSError means that it could not be started.
    """
    started: list[subprocess.Popen[bytes]] = []

    def stop() -> None:
        for process in started:
            signal_all(process, signal.SIGTERM)

    with passing_on(stop) as signals:
        process = subprocess.Popen(
            list(words), cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            pass_fds=[lock], start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        started.append(process)
        if signals:  # the signal came before the process was in the list
            stop()
        early = False
        pause, deadline = SOONEST, float("inf")
        while not ended(process, pause):
            pause = min(LATEST, 1.5 * pause)
            if not (signals or early) and enough():
                early = True
                stop()
            if signals or early:
                deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() > deadline:
                signal_all(process, signal.SIGKILL)
    return Exit(process.returncode, bool(signals), early)


def ended(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def signal_all(process: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the whole session of the child: a wrapper script does not pass signals on."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _prctl() -> Callable[[], None]:
    if sys.platform != "linux":
        return lambda: None
    library = ctypes.CDLL(
        None, use_errno=True
    )  # loaded before the fork, because loading after it might wait for a lock

    def call() -> None:
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    return call


die_with_parent = _prctl()
