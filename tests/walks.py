"""The walks of CONTRIBUTING, and what really happens."""

import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import completep

PACKAGE = Path(completep.__file__).parent
ROOT = PACKAGE.parent


def steps(heading: str) -> list[tuple[str, str]]:
    """(file, function) of a walk in CONTRIBUTING."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split(f"### {heading}")[1].split("\n#")[0]
    return re.findall(r"`([\w/]+\.py):(\w+(?:\.\w+)?)`", text)


def left_out_of(heading: str) -> list[str]:
    """The files that a walk says it leaves out."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split(f"### {heading}")[1].split("\n#")[0]
    return re.findall(r"`([\w/]+\.py)`", text.partition("are left out")[2])


def calls_of(action: Callable[[], object]) -> dict[tuple[str, str], int]:
    """(file, function) of the package → when the action first calls it. What an import calls does not count."""
    first: dict[tuple[str, str], int] = {}

    def in_package(frame) -> bool:
        return frame.f_code.co_filename.startswith(f"{PACKAGE}/")

    def importing(frame) -> bool:
        while frame is not None and not (frame.f_code.co_name == "<module>" and in_package(frame)):
            frame = frame.f_back
        return frame is not None

    def note(frame, event: str, _: object) -> None:
        if event == "call" and in_package(frame) and not importing(frame):
            file = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
            first.setdefault((file, frame.f_code.co_qualname), len(first))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return first


def departures(walk: list[tuple[str, str]], calls: dict[tuple[str, str], int]) -> list[str]:
    """Where a walk is not what happened: a file or function that is not entered, one that is left out, the order."""
    times = {}
    for file, name in walk:
        called = [i for (f, q), i in calls.items() if f == file and (q == name or q.startswith(f"{name}."))]
        times[file] = min(called, default=-1)
    entered = {file for file, _ in calls} - {"__init__.py"}  # which only imports what it is asked for
    wrong = [f"{file} is not in the walk" for file in sorted(entered - times.keys())]
    wrong += [f"{file}:{name} is not called" for file, name in walk if times[file] < 0]
    return wrong + [f"{b} comes before {a}" for a, b in pairwise(times) if 0 <= times[b] < times[a]]
