"""Which runs a tuning makes, in four stages.

1. At the base, with one seed: walk to the minimum. With several dimensions, explore.py has found the best point before.
2. At the base, with all seeds: run the best value and its neighbours, one dimension after the other, with the other
   dimensions at their best. If the mean over seeds has its minimum elsewhere, walk on.
3. At every larger proxy, with all seeds: run the base's best value and its neighbours, in every dimension. If the
   minimum has drifted, walk on.
4. After stage 2 and again after stage 3: run as many more values and seeds as the noise requires (precision.py). The
   verdict so far does not matter for this.

A dimension of words or of two values has no neighbours: all of its values are run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from completep.config import Shape
from completep.errors import UserError
from completep.sweep.search import Bracketing, Losses, Runner, next_values
from completep.sweep.task import Task, Trial, Value
from completep.tuning.ignored import refuse_ignored, refuse_ignored_seeds, refuse_ignored_shapes
from completep.tuning.precision import WIDEST, Advice, Design
from completep.tuning.space import Dimension
from completep.tuning.stopping import StopsEarly

PASSES = 3  # over all dimensions at the base, until none moves


def no_advice(name: str, trials: Sequence[Trial], first: Design) -> Advice | None:
    """The noise requires nothing more."""
    return None


@dataclass
class Staged:
    """A `Strategy` for `conduct` that makes its own trials. The point of a trial holds the places of its values."""

    dimensions: Sequence[Dimension]
    shapes: Sequence[Shape]  # the base first
    seeds: int
    trial: Callable[[Shape, Mapping[str, Value], int], Trial]  # of a shape, values and a seed
    point: dict[str, Value] = field(default_factory=dict)  # where a search has ended; empty with one dimension
    stop_early: bool = True
    # What the noise of one dimension's runs requires.
    advise: Callable[[str, Sequence[Trial], Design], Advice | None] = no_advice
    tell: Callable[[str], None] = lambda line: None
    done: list[Trial] = field(default_factory=list)
    failed: list[Task] = field(default_factory=list)
    designs: dict[str, Design] = field(default_factory=dict)
    advice: dict[str, Advice] = field(default_factory=dict)

    def __call__(self, engine: Runner, trials: Sequence[Trial]) -> tuple[list[Trial], list[Task]]:
        self.designs = {d.name: Design(1, self.seeds) for d in self.dimensions}
        if not self.point:
            self._find(engine)
        base, larger = self.shapes[:1], self.shapes[1:]
        self._settle(engine)
        self._refine(engine, base)
        for shape in larger:
            for d in self.dimensions:
                self._walk(engine, d, shape)
        if not self.failed:
            refuse_ignored_shapes(engine, self.done)
        self._refine(engine, self.shapes)
        self.done = list({(t.task.id, tuple(t.point.items())): t for t in self.done}.values())
        return self.done, list({task.id: task for task in self.failed}.values())

    def _find(self, engine: Runner) -> None:
        """Find the minimum of one dimension at the base, with one seed."""
        (d,) = self.dimensions
        self.point = {d.name: d.values[len(d.values) // 2]}
        first = StopsEarly(engine) if self.stop_early else engine
        self.point[d.name] = self._walk(first, d, self.shapes[0], range(1))
        self._refuse_all_diverged(engine)

    def _settle(self, engine: Runner) -> None:
        """Walk along every dimension with all seeds, until the point is the best in each of them."""
        for _ in range(PASSES):
            before = dict(self.point)
            for d in self.dimensions:
                self.point[d.name] = self._walk(engine, d, self.shapes[0])
            if self.point == before or len(self.dimensions) == 1:
                return
        for d in self.dimensions:  # the point still moves, but the curves at the last point are needed anyway
            self._walk(engine, d, self.shapes[0])

    def _walk(self, engine: Runner, d: Dimension, shape: Shape, seeds: range | None = None) -> Value:
        """Walk along one dimension, starting at the point. Returns the best value."""
        trials = self.line(d, shape, range(self.designs[d.name].seeds) if seeds is None else seeds)
        if not d.bracketed:
            return self._all(engine, d, trials)
        values = [d.place(v) for v in d.values]
        walker = Bracketing(engine, d.name, values, lambda losses: self._refuse_ignored(engine, d, trials, losses))
        best = walker.walk(trials, d.place(self.point[d.name]))
        self._note(engine, walker.done, walker.failed)
        return d.near(best)

    def _refuse_ignored(self, engine: Runner, d: Dimension, trials: Sequence[Trial], losses: Losses) -> None:
        """Only if no run has failed: what a failure leaves over says nothing."""
        asked = {t.task.id: t.task for t in trials if t.point.number(d.name) in losses}
        if not self.failed and asked.keys() <= engine.store.results(asked.values()).keys():
            refuse_ignored(d, losses)

    def _all(self, engine: Runner, d: Dimension, trials: Sequence[Trial]) -> Value:
        failed = engine.run([t.task for t in trials])
        self._note(engine, trials, failed)
        losses = mean_losses(engine, trials, d)
        if not self.failed:  # what a failure leaves over says nothing
            refuse_ignored(d, losses)
        return d.near(min(losses, key=lambda place: (losses[place], place)))

    def _note(self, engine: Runner, trials: Sequence[Trial], failed: Sequence[Task]) -> None:
        self.done += trials
        self.failed += failed
        if not self.failed:
            refuse_ignored_seeds(engine, trials)

    def line(self, d: Dimension, shape: Shape, seeds: range) -> list[Trial]:
        """Every trial along one dimension, with the other dimensions at the point."""
        return [self.trial(shape, {**self.point, d.name: v}, seed) for v in d.values for seed in seeds]

    def _refine(self, engine: Runner, shapes: Sequence[Shape]) -> None:
        """Run what the noise at these shapes requires."""
        for d in self.dimensions:
            if not d.bracketed:
                continue
            trials = [t for shape in shapes for t in self._known(d, shape)]
            advice = self.advise(d.name, trials, self.designs[d.name])
            if advice is None:
                continue
            before = self.advice.get(d.name)
            if before is None or (before.design, before.seeds) != (advice.design, advice.seeds):
                self.tell(f"{d.name}: {advice}")
            self.advice[d.name] = advice
            self.designs[d.name] |= advice.design
            for shape in shapes:
                best = self._widen(engine, d, shape)
                if shape == self.shapes[0] and len(self.dimensions) == 1:
                    self.point[d.name] = best

    def _known(self, d: Dimension, shape: Shape) -> list[Trial]:
        """The trials along one dimension that this search has run."""
        asked = {t.task.id for t in self.done}
        return [t for t in self.line(d, shape, range(self.designs[d.name].seeds)) if t.task.id in asked]

    def _widen(self, engine: Runner, d: Dimension, shape: Shape) -> Value:
        """Run the seeds of the design, for its values on either side of the best one. Returns the best value."""
        design = self.designs[d.name]
        best = self._walk(engine, d, shape)
        i = d.values.index(best)
        near = [d.place(v) for v in d.values[max(0, i - design.reach) : i + design.reach + 1]]
        trials = [t for t in self.line(d, shape, range(design.seeds)) if t.point.number(d.name) in near]
        self._note(engine, trials, engine.run([t.task for t in trials]))
        return best

    def _refuse_all_diverged(self, engine: Runner) -> None:
        results = engine.store.results(t.task for t in self.done)
        if results and all(r["status"] == "diverged" for r in results.values()):
            name = self.dimensions[0].name
            raise UserError(
                f"every run at the base diverged (the loss is NaN or infinite): {len(results)} values of {name}",
                fix=f"extend the range of {name} to smaller values; if the loss is always NaN, check the script",
            )


def mean_losses(engine: Runner, trials: Sequence[Trial], d: Dimension) -> dict[float, float]:
    """Place → the mean over seeds, infinite if one of them diverged or failed."""
    results = engine.store.results(t.task for t in trials)
    losses: dict[float, list[float]] = {}
    for t in trials:
        result = results.get(t.task.id, {})
        loss = t.task.loss(result) if result.get("status") == "done" else None
        losses.setdefault(d.place(d.at_point(t.point)), []).append(math.inf if loss is None else loss)
    return {place: sum(several) / len(several) for place, several in losses.items()}


@dataclass(frozen=True)
class Expected:
    """The number of runs that the stages are likely to need, if the optimum transfers and the noise is small."""

    base: float  # to find the optimum of one dimension with one seed
    seeds: float  # for the other seeds at the base
    proxies: float  # at all proxies
    most: int  # if every value and the largest number of seeds are needed

    @property
    def runs(self) -> int:
        return math.ceil(self.base + self.seeds + self.proxies)


def expected_runs(dimensions: Sequence[Dimension], seeds: int, most_seeds: int, proxies: int) -> Expected:
    """The mean over all values that could be the optimum."""
    counts = [len(d.values) for d in dimensions]
    beside = [mean_beside(len(d.values)) if d.bracketed else len(d.values) for d in dimensions]
    at_shape = (1 + sum(b - 1 for b in beside)) * seeds  # all lines share the best point
    walked = mean_walk(counts[0]) if len(dimensions) == 1 else 0.0
    # Some of these are done already, by the walk or by the search.
    here = at_shape - beside[0] if len(dimensions) == 1 else at_shape - seeds
    wide = [min(2 * WIDEST + 1, n) if d.bracketed else 0 for n, d in zip(counts, dimensions, strict=True)]
    more = max(0, most_seeds - seeds) if seeds > 1 else 0
    most = sum(n * seeds + w * more for n, w in zip(counts, wide, strict=True)) * (1 + proxies)
    return Expected(walked, here, at_shape * proxies, most)


def mean_walk(values: int) -> float:
    """The mean number of runs of a walk that starts in the middle."""
    axis = [float(i) for i in range(values)]
    total = 0
    for optimum in axis:
        losses: dict[float, float] = {}
        while wanted := next_values(axis, losses, axis[len(axis) // 2]):
            losses |= {v: abs(v - optimum) for v in wanted}
        total += len(losses)
    return total / values


def mean_beside(values: int) -> float:
    """The mean size of a value with its neighbours."""
    axis = [float(i) for i in range(values)]
    return sum(len(next_values(axis, {}, optimum)) for optimum in axis) / values
