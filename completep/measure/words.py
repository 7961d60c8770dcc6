"""The words of every verdict, and what is grown in a check. Light to import."""

from collections.abc import Callable, Iterable
from typing import Literal

Word = Literal["PASS", "FAIL", "INCONCLUSIVE"]
Axis = Literal["width", "depth"]
Progress = Callable[[int, int, str], None]  # runs done, all runs, the one that just ended


def quiet(done: int, total: int, what: str) -> None:
    """No progress report."""


def with_reason(word: Word, why: str) -> str:
    return f"{word}: {why}" if why else word


def worst(words: Iterable[Word]) -> Word:
    """FAIL if anything fails; PASS only if everything passes."""
    distinct = set(words)
    if "FAIL" in distinct:
        return "FAIL"
    return "PASS" if distinct == {"PASS"} else "INCONCLUSIVE"
