"""The progress of a sweep and an estimate of the time left, from the events of the engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from completep.sweep.engine import Event
from completep.sweep.store import Store, distinct
from completep.sweep.task import Task, Trial
from completep.units import duration

TO_BRACKET = 3.5  # runs that bracket a minimum, on average
TOO_EARLY = 0.05  # share of the cost below which there is no estimate: the first runs are mostly start-up


@dataclass
class Progress:
    """What runs, what has ended, and an estimate of the time left."""

    swept: str | None
    trials: Sequence[Trial]
    store: Store
    at_most: str = ""  # "at most " where a search may need fewer runs
    expected: int | None = None  # runs that a search is likely to need
    began: float = field(default_factory=time.monotonic)
    running: dict[str, tuple[Task, float]] = field(default_factory=dict)
    ended: dict[str, tuple[str, float | None]] = field(default_factory=dict)  # by id: how it ended, and its loss
    spent: float = 0.0  # cost of the tasks that ended since the start

    def __post_init__(self) -> None:
        self.tasks = distinct(self.trials)
        self.known = {task.id for task in self.tasks}
        results = self.store.results(self.tasks)
        for task in self.tasks:
            if task.id in results:
                self.ended[task.id] = (str(results[task.id]["status"]), task.loss(results[task.id]))
        self.present = len(self.ended)

    def _end(self, task: Task, kind: str | None = None) -> None:
        result = self.store.result(task) or {}
        self.ended[task.id] = (kind or str(result["status"]), task.loss(result))

    def note(self, event: Event) -> None:
        task = event.task
        if task.id not in self.known:  # a search that makes its own trials
            self.known.add(task.id)
            self.tasks.append(task)
        if event.kind == "started":
            self.running[task.id] = (task, time.monotonic())
            return
        self.running.pop(task.id, None)
        if event.kind in ("done", "diverged", "hopeless", "failed"):
            self._end(task, event.kind)
            self.spent += task.cost

    def counts(self) -> str:
        kinds = [kind for kind, _ in self.ended.values()]
        every = f"{self.at_most}{len(self.tasks)}"
        if self.as_expected:
            every = f"about {self.expected}"
        parts = [f"{kinds.count('done')} of {every} done", f"{len(self.running)} running"]
        parts += [f"{kinds.count(k)} {k}" for k in ("diverged", "hopeless", "failed") if k in kinds]
        left = self.seconds_left()
        return ", ".join(parts) + (f", about {duration(left)} left" if left is not None else "")

    @property
    def as_expected(self) -> bool:
        """Has the search needed no more runs than expected so far?"""
        return self.expected is not None and len(self.ended) <= self.expected

    def seconds_left(self) -> float | None:
        """An estimate from the cost that is left and the pace so far; None if it is too early."""
        if not self.spent:
            return None
        left = sum(task.cost for task in self.tasks if task.id not in self.ended)
        if self.expected is not None and self.as_expected:
            mean = sum(task.cost for task in self.tasks) / len(self.tasks)
            left = max(0, self.expected - len(self.ended)) * mean
        elif self.at_most and self.swept is not None:
            left = self.likely_left(self.swept)
        if self.spent < TOO_EARLY * (self.spent + left):
            return None
        begun = sum(task.cost for task, _ in self.running.values()) / 2  # on average they are half done
        return max(0.0, left - begun) * (time.monotonic() - self.began) / (self.spent + begun)

    def likely_left(self, swept: str) -> float:
        """The cost of bracketing every curve that is not bracketed yet. Curves that share their tasks count once."""
        curves: dict[tuple[tuple[str, object], ...], dict[str, float]] = {}
        for trial in self.trials:
            key = tuple((name, value) for name, value in trial.point.items() if name != swept)
            curves.setdefault(key, {})[trial.task.id] = trial.task.cost
        left = 0.0
        for costs in {frozenset(costs): costs for costs in curves.values()}.values():
            ended = sum(name in self.ended for name in costs)
            left += max(0.0, min(TO_BRACKET, len(costs)) - ended) * sum(costs.values()) / len(costs)
        return left

    def mean(self, tasks: Sequence[Task]) -> float | None:
        """The mean loss of the tasks that have one."""
        losses = [loss for task in tasks if (loss := self.ended.get(task.id, ("", None))[1]) is not None]
        return sum(losses) / len(losses) if losses else None
