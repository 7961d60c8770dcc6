"""Which trials to run: the whole grid, or a walk to each curve's minimum that stops once it is bracketed.

A curve is a set of trials that differ only in the swept value (and the seed). The smallest shape's curves are walked
first. The others start where those ended, which is also where they end if the value transfers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from completep.sweep.engine import Engine
from completep.sweep.task import Task, Trial, Value

Curve = tuple[tuple[str, Value], ...]
# beside: like bracket, but the larger shapes run only the three values around the smallest shape's best.
Search = Literal["grid", "bracket", "beside"]


def next_values(values: Sequence[float], losses: Mapping[float, float], start: float) -> list[float]:
    """What to try next on one curve: nothing once the best value has both its neighbours, or the axis ends there."""
    if not losses:
        middle = min(max(values.index(start), 1), len(values) - 2) if len(values) > 2 else len(values) // 2
        return list(values[max(0, middle - 1) : middle + 2])
    finite = {v: x for v, x in losses.items() if math.isfinite(x)}
    best = min(finite, key=lambda v: finite[v]) if finite else min(losses)  # where all diverged, smaller is safer
    i = values.index(best)
    return [v for v in values[max(0, i - 1) : i + 2] if v not in losses]


@dataclass
class Bracketing:
    """A search over all curves of a sweep at once."""

    engine: Engine
    swept: str
    values: Sequence[float]

    def __post_init__(self) -> None:
        self.values = sorted(self.values)
        self.done: list[Trial] = []
        self.failed: list[Task] = []

    def run(self, trials: Sequence[Trial], *, walk_all: bool = True) -> tuple[list[Trial], list[Task]]:
        """(the trials that were run, the tasks that failed)."""
        curves: dict[Curve, list[Trial]] = {}
        for trial in trials:
            key = tuple((k, v) for k, v in trial.point.items() if k not in (self.swept, "seed"))
            curves.setdefault(key, []).append(trial)
        cost = {key: group[0].task.cost for key, group in curves.items()}
        smallest = {key: curves[key] for key in curves if cost[key] <= 1.001 * min(cost.values())}
        others = {key: curves[key] for key in curves if key not in smallest}
        start = self._walk(smallest, self.values[len(self.values) // 2], walk=True)
        self._walk(others, start, walk=walk_all)
        return self.done, self.failed

    def _walk(self, curves: Mapping[Curve, Sequence[Trial]], start: float, walk: bool) -> float:
        """Walk these curves together, round by round; the best value of the first one."""
        losses: dict[Curve, dict[float, float]] = {key: {} for key in curves}
        while True:
            wanted = {key: next_values(self.values, losses[key], start) for key in curves}
            rounds = {
                key: [t for t in group if t.point.number(self.swept) in wanted[key]] for key, group in curves.items()
            }
            batch = [trial for group in rounds.values() for trial in group]
            if not batch:
                break
            self.done += batch
            self.failed += self.engine.run([trial.task for trial in batch])
            for key, group in rounds.items():
                for value in wanted[key]:
                    losses[key][value] = self._loss([t.task for t in group if t.point.number(self.swept) == value])
            if not walk:
                break
        first = next(iter(losses.values()), {})
        return min(first, key=lambda v: first[v]) if first else start

    def _loss(self, tasks: Sequence[Task]) -> float:
        """Mean over seeds; infinite where one diverged or failed."""
        losses = []
        for task in tasks:
            result = self.engine.store.result(task)
            loss = task.loss(result) if result and result["status"] == "done" else None
            losses.append(math.inf if loss is None else loss)
        return sum(losses) / len(losses)
