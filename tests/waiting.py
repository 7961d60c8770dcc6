"""Waiting for a condition. A loaded machine makes it later, not wrong; the limit only ends what would hang."""

import subprocess
import time
from collections.abc import Callable

LIMIT = 300.0  # seconds


def wait_until(condition: Callable[[], object], what: str = "this", *, process: subprocess.Popen | None = None) -> None:
    """Until the condition holds. A process that should make it come true must not end before."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert process is None or process.poll() is None or condition(), f"the process ended before {what} happened"
        assert time.monotonic() < deadline, f"{what} never happened"
        time.sleep(0.02)
