"""Which trials to run: the whole grid, or a walk to each curve's minimum that stops once it is bracketed.

A curve is a set of trials that differ only in the swept value (and the seed). The curves of the smallest shape are
walked first. The others start at the minimum found there, and stay there if the value transfers.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from completep.errors import UserError
from completep.sweep.engine import Engine, More, nothing_more
from completep.sweep.store import Store
from completep.sweep.task import Task, Trial, Value

Curve = tuple[tuple[str, Value], ...]
Search = Literal["grid", "bracket"]
# Any other search: from an engine and all trials to (the trials that were run, the tasks that failed).
Strategy = Callable[[Engine, Sequence[Trial]], tuple[list[Trial], list[Task]]]
Losses = Mapping[float, float]  # by the swept value


def next_values(values: Sequence[float], losses: Mapping[float, float], start: float) -> list[float]:
    """The values to run next on one curve: none once both neighbours of the best value are known, or the axis ends."""
    if not losses:
        middle = min(max(values.index(start), 1), len(values) - 2) if len(values) > 2 else len(values) // 2
        return list(values[max(0, middle - 1) : middle + 2])
    finite = {v: x for v, x in losses.items() if math.isfinite(x)}
    best = min(finite, key=lambda v: finite[v]) if finite else min(losses)  # if all diverged, try smaller values
    i = values.index(best)
    return [v for v in values[max(0, i - 1) : i + 2] if v not in losses]


class Runner(Protocol):
    """What a search needs of an engine."""

    @property
    def store(self) -> Store: ...

    def run(self, tasks: Sequence[Task], more: More = nothing_more) -> list[Task]:
        """Do the tasks that are not done yet, and those that `more` returns for each task as soon as it is done.

        Returns those that failed.
        """


@dataclass(frozen=True)
class Replay:
    """Runs nothing. A search on it asks for what it would have asked for, as far as the results in the store go."""

    store: Store

    def run(self, tasks: Sequence[Task], more: More = nothing_more) -> list[Task]:
        """Returns the tasks that are not done."""
        waiting, missing = deque(tasks), []
        while waiting:
            task = waiting.popleft()
            if self.store.result(task) is None:
                missing.append(task)
            else:
                waiting.extend(more(task))
        return missing


def needed(trials: Sequence[Trial], store: Store, search: Search, swept: str | None) -> list[Trial]:
    """The trials that a search over them needs, as far as the results in the store show."""
    if search == "grid":
        return list(trials)
    if swept is None:
        raise UserError("search='bracket' needs a swept axis, and there is none", fix="use search='grid'")
    return Bracketing(Replay(store), swept, swept_values(trials, swept)).run(trials)[0]


def swept_values(trials: Sequence[Trial], swept: str) -> list[float]:
    return sorted({trial.point.number(swept) for trial in trials})


def unseen(losses: Losses) -> None:
    """Ignore the losses."""


@dataclass
class Bracketing:
    """A search over all curves of a sweep at once."""

    engine: Runner
    swept: str
    values: Sequence[float]
    on_round: Callable[[Losses], None] = unseen  # called with the losses of a curve, after each of its rounds

    def __post_init__(self) -> None:
        self.values = sorted(self.values)
        self.done: list[Trial] = []
        self.failed: list[Task] = []

    def run(self, trials: Sequence[Trial]) -> tuple[list[Trial], list[Task]]:
        """(the trials that were run, the tasks that failed)."""
        cost = min(trial.task.cost for trial in trials)
        small = [t.task.cost <= 1.001 * cost for t in trials]
        start = self.walk([t for t, is_small in zip(trials, small, strict=True) if is_small])
        self.walk([t for t, is_small in zip(trials, small, strict=True) if not is_small], start)
        return self.done, self.failed

    def walk(self, trials: Sequence[Trial], start: float | None = None) -> float:
        """Walk the curves of these trials, each as fast as its own runs end. Returns the best value of the first curve.

        Starts at `start`, by default in the middle.
        """
        curves: dict[Curve, list[Trial]] = {}
        for trial in trials:
            key = tuple((k, v) for k, v in trial.point.items() if k not in (self.swept, "seed"))
            curves.setdefault(key, []).append(trial)
        begin = self.values[len(self.values) // 2] if start is None else start
        losses: dict[Curve, dict[float, float]] = {key: {} for key in curves}
        asked: dict[Curve, list[Trial]] = {key: [] for key in curves}  # in the round that is running
        ended: set[str] = set()

        def next_round(key: Curve) -> list[Task]:
            """What a curve needs next, once everything that it asked for has ended."""
            while all(trial.task.id in ended for trial in asked[key]):
                if asked[key]:
                    losses[key] |= self._losses(asked[key])
                    self.on_round(losses[key])
                wanted = next_values(self.values, losses[key], begin)
                asked[key] = [t for t in curves[key] if t.point.number(self.swept) in wanted]
                if not asked[key]:
                    del asked[key]  # bracketed
                    return []
                self.done += asked[key]
            return [trial.task for trial in asked[key]]

        def more(task: Task) -> list[Task]:
            ended.add(task.id)
            ready = [key for key, group in asked.items() if all(trial.task.id in ended for trial in group)]
            return [following for key in ready for following in next_round(key)]

        self.failed += self.engine.run([task for key in curves for task in next_round(key)], more)
        first = next(iter(losses.values()), {})
        return min(first, key=lambda v: first[v]) if first else begin

    def _losses(self, trials: Sequence[Trial]) -> dict[float, float]:
        values = dict.fromkeys(trial.point.number(self.swept) for trial in trials)
        return {v: self._loss([t.task for t in trials if t.point.number(self.swept) == v]) for v in values}

    def _loss(self, tasks: Sequence[Task]) -> float:
        """The mean over seeds; infinite if one of them diverged or failed."""
        losses = []
        for task in tasks:
            result = self.engine.store.result(task)
            loss = task.loss(result) if result and result["status"] == "done" else None
            losses.append(math.inf if loss is None else loss)
        return sum(losses) / len(losses)
