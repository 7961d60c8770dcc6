"""One fuzzed command, run in this process: how it ended, and what is wrong with that."""

import contextlib
import io
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from completep.cli import main
from tests.hostile import TooLongError

ENDS = {0, 1, 2, 3, 130}  # PASS, FAIL, a mistake in the input, INCONCLUSIVE, Ctrl-C
MOST_SECONDS = 10  # of this process's own time, so that a busy machine changes nothing
MOST_WAITING = 60  # by the clock, for what waits and does nothing


@dataclass
class Fuzz:
    """Counts cases and keeps one failure of each kind."""

    ends: Counter[int | str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)

    def run(self, words: list[str], place: Path, what: str = "") -> int | str:
        """One command in the folder `place`; its exit code, or what was wrong."""
        code, said, seconds = run_command(words, place)
        self.ends[code] += 1
        wrong = problem(code, said, seconds, commanded="\x1b" in "".join(words))
        if wrong:
            self.failures.setdefault(wrong, f"{what} {words!r} ended with {code} after {seconds:.1f} s: {said[-2000:]}")
        return wrong or code

    def report(self) -> str:
        return "\n\n".join(f"{kind}\n{case}" for kind, case in self.failures.items())


def run_command(words: list[str], place: Path) -> tuple[int | str, str, float]:
    """(exit code, everything printed, seconds)."""
    said, before, began = io.StringIO(), os.getcwd(), time.process_time()
    limits = ((signal.SIGPROF, signal.ITIMER_PROF, MOST_SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, MOST_WAITING))
    old = {number: signal.signal(number, _too_long) for number, _, _ in limits}
    for _, timer, seconds in limits:
        signal.setitimer(timer, seconds)
    os.chdir(place)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code: int | str = main(words)
    except TooLongError:
        code = "too long"
    except SystemExit as end:  # tyro's own errors, and --help
        code = end.code if isinstance(end.code, int) else f"SystemExit({end.code!r})"
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    finally:
        for number, timer, _ in limits:
            signal.setitimer(timer, 0)
            signal.signal(number, old[number])
        os.chdir(before)
    return code, said.getvalue(), time.process_time() - began


def _too_long(number: int, frame: object) -> None:
    raise TooLongError


def problem(code: int | str, said: str, seconds: float, commanded: bool = False) -> str:
    """What is wrong, in words that are the same for the same cause; empty if nothing is.

    `commanded` is true where the command line itself holds commands of the terminal, which the parser may repeat.
    """
    if code == 70 or "Traceback" in said:
        lines = [line.strip() for line in said.splitlines() if line.strip().startswith('File "')]
        own = [line for line in lines if "completep/" in line and "/cli/__init__" not in line]
        return f"traceback: {(own or lines or [said[-200:]])[-1]}"
    if code not in ENDS:
        return f"ended with {code}"
    if "\x1b" in said and not commanded:
        return "a terminal's command in the output"
    return f"took {seconds:.0f} s" if seconds > MOST_SECONDS else ""
