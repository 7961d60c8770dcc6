"""Adaptive search: walk to each curve's minimum and stop once it is bracketed, instead of running the whole grid.

A curve is all that differs in the swept hyperparameter only. The smallest shape's curves are walked first; the others start
where those ended, which under a parameterization that transfers is where they end too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from completep.config import Run
from completep.study.design import Point, Sweep, Value
from completep.study.engine import Engine, cost

Curve = tuple[tuple[str, Value], ...]


def next_values(values: Sequence[float], losses: Mapping[float, float], start: float) -> list[float]:
    """What to try next on one curve: nothing once the best value has both its neighbours, or the axis ends there."""
    if not losses:
        middle = min(max(values.index(start), 1), len(values) - 2) if len(values) > 2 else len(values) // 2
        return list(values[max(0, middle - 1) : middle + 2])
    finite = {v: x for v, x in losses.items() if math.isfinite(x)}
    best = min(finite, key=lambda v: finite[v]) if finite else min(losses)  # where all diverged, smaller is safer
    at = values.index(best)
    return [v for v in values[max(0, at - 1) : at + 2] if v not in losses]


@dataclass
class Search:
    """One study's search, over all its curves at once."""

    sweep: Sweep
    engine: Engine
    ready: Callable[[Run], Run] = lambda run: run
    walk: bool = True  # whether curves other than the smallest shape's go on from the three values they start with

    def run(self) -> tuple[list[tuple[Point, Run]], list[Run]]:
        """(the points that were run, the runs that failed)."""
        name = str(self.sweep.swept)
        values = sorted(float(v) for v in self.sweep.axes[name])
        curves: dict[Curve, list[Point]] = {}
        for point in self.sweep.points():
            key = tuple((k, v) for k, v in point.items() if k not in (name, "seed"))
            curves.setdefault(key, []).append(point)
        size = {key: cost(self.sweep.run(**points[0])) for key, points in curves.items()}
        smallest = [key for key in curves if size[key] <= 1.001 * min(size.values())]
        rest = [key for key in curves if key not in smallest]
        done: list[tuple[Point, Run]] = []
        failed: list[Run] = []
        start = values[len(values) // 2]
        for group in (smallest, rest):
            once = group is rest and not self.walk
            found = self._walk({k: curves[k] for k in group}, name, values, start, done, failed, once)
            start = found if found is not None else start
        return done, failed

    def _walk(
        self, curves: dict[Curve, list[Point]], name: str, values: list[float], start: float,
        done: list[tuple[Point, Run]], failed: list[Run], once: bool,
    ) -> float | None:  # fmt: skip
        """Walk these curves together, round by round; the best value of the first."""
        losses: dict[Curve, dict[float, float]] = {key: {} for key in curves}
        while True:
            wanted = {key: next_values(values, losses[key], start) for key in curves}
            batch = [
                (p, self.ready(self.sweep.run(**p)))
                for key, points in curves.items()
                for p in points
                if p[name] in wanted[key]
            ]
            if not batch:
                break
            done += batch
            failed += self.engine.run([run for _, run in batch])
            for key, tried in wanted.items():
                for value in tried:
                    losses[key][value] = self._loss([run for p, run in batch if p[name] == value and _matches(p, key)])
            if once:
                break
        first = next(iter(losses.values()), {})
        return min(first, key=lambda v: first[v]) if first else None

    def _loss(self, runs: Sequence[Run]) -> float:
        """Mean over seeds; infinite where one diverged or failed."""
        results = [self.engine.store.result(run) for run in runs]
        found = [r["validation_loss"] if r and r["status"] == "done" else math.inf for r in results]
        return sum(found) / len(found)


def _matches(point: Point, key: Curve) -> bool:
    return all(point[k] == v for k, v in key)
