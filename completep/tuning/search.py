"""Which runs a tuning makes, in three stages, and a fourth if it is needed.

1. At the base, with one seed: walk to the minimum.
2. At the base, with all seeds: the best value and its neighbours. If the mean over seeds moves the minimum, walk on.
3. At every larger proxy, with all seeds: the base's best value and its neighbours. Where it has drifted, walk on.
4. Only if the verdict is still open: one more value on either side of every curve's best, which tells the shape of a
   flat or noisy bowl.

Seeds are spent near the optimum only. Three values and three seeds at each shape decide as the whole grid does on the
recorded sweeps of docs/results (tests/tuning/test_search.py).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from completep.config import Shape
from completep.errors import UserError
from completep.sweep.search import Bracketing, Losses, Runner, next_values
from completep.sweep.task import Task, Trial, Value
from completep.tuning.space import Dimension
from completep.tuning.stopping import FinishesStopped, StopsEarly


def shape_of(trial: Trial) -> Shape:
    return Shape(trial.point.whole("width"), trial.point.whole("depth"))


@dataclass
class Staged:
    """A `Strategy` for `conduct`: the three stages along one dimension. A trial's point has the value's place."""

    dimension: Dimension
    base: Shape
    stop_early: bool = True
    is_open: Callable[[Sequence[Trial]], bool] = lambda trials: False  # can more values decide?
    done: list[Trial] = field(default_factory=list)
    failed: list[Task] = field(default_factory=list)

    def __call__(self, engine: Runner, trials: Sequence[Trial]) -> tuple[list[Trial], list[Task]]:
        at_base = [t for t in trials if shape_of(t) == self.base]
        larger = [t for t in trials if shape_of(t) != self.base]
        first_seed = min(t.point.whole("seed") for t in at_base)
        first = StopsEarly(engine) if self.stop_early else FinishesStopped(engine)
        engine = FinishesStopped(engine)
        best = self._walk(first, [t for t in at_base if t.point.whole("seed") == first_seed], None)
        self._refuse_all_diverged(engine)
        best = self._walk(engine, at_base, best)
        self._walk(engine, larger, best)
        refuse_ignored_shapes(engine, self.done)
        if self.is_open(self.done):
            self._widen(engine, trials)
        self.done = list({(t.task.id, tuple(t.point.items())): t for t in self.done}.values())
        return self.done, list({task.id: task for task in self.failed}.values())

    def _walk(self, engine: Runner, trials: Sequence[Trial], start: float | None) -> float:
        values = [self.dimension.place(v) for v in self.dimension.values]
        walker = Bracketing(engine, self.dimension.name, values, on_round=self.refuse_ignored)
        best = walker.walk(trials, start)
        self.done += walker.done
        self.failed += walker.failed
        refuse_ignored_seeds(engine, walker.done)
        return best

    def _widen(self, engine: Runner, trials: Sequence[Trial]) -> None:
        """Two values on either side of each curve's best, with all seeds, where there are so many."""
        values = sorted(self.dimension.place(v) for v in self.dimension.values)
        batch: list[Trial] = []
        for shape in dict.fromkeys(shape_of(t) for t in trials):
            own = [t for t in trials if shape_of(t) == shape]
            i = values.index(self._best_place(engine, own))
            batch += [t for t in own if t.point.number(self.dimension.name) in values[max(0, i - 2) : i + 3]]
        self.failed += engine.run([t.task for t in batch])
        self.done += batch

    def _best_place(self, engine: Runner, trials: Sequence[Trial]) -> float:
        """The place with the smallest mean over seeds, among those that have all seeds."""
        results = engine.store.results(t.task for t in trials)
        losses: dict[float, list[float]] = {}
        for t in trials:
            result = results.get(t.task.id, {})
            loss = t.task.loss(result) if result.get("status") == "done" else None
            losses.setdefault(t.point.number(self.dimension.name), []).append(math.inf if loss is None else loss)
        return min(losses, key=lambda place: (sum(losses[place]), place))

    def refuse_ignored(self, losses: Losses) -> None:
        """A script that ignores its argument gives the same loss for every value."""
        finite = {place: loss for place, loss in losses.items() if math.isfinite(loss)}
        if len(finite) > 1 and len(set(finite.values())) == 1:
            name = self.dimension.name
            shown = " and ".join(self.dimension.show(self._value(place)) for place in sorted(finite)[:2])
            raise UserError(
                f"the script seems to ignore {name}: with {name} = {shown} the loss is {next(iter(finite.values()))!r}",
                fix=f"check that the command passes {{{name}}} on, and that the script uses it",
            )

    def _value(self, place: float) -> Value:
        return min(self.dimension.values, key=lambda v: abs(math.log2(self.dimension.place(v) / place)))

    def _refuse_all_diverged(self, engine: Runner) -> None:
        results = engine.store.results(t.task for t in self.done)
        if results and all(r["status"] == "diverged" for r in results.values()):
            name = self.dimension.name
            raise UserError(
                f"every run at the base diverged (the loss is NaN or infinite): {len(results)} values of {name}",
                fix=f"extend the range of {name} to smaller values; if the loss is always NaN, check the script",
            )


def refuse_ignored_seeds(engine: Runner, trials: Iterable[Trial]) -> None:
    """Two seeds with the same loss at every point: the script does not use its seed."""
    results = engine.store.results(t.task for t in trials)
    points: dict[object, dict[Value, float]] = {}
    for trial in trials:
        loss = trial.task.loss(results.get(trial.task.id, {}))
        if loss is not None:
            key = tuple((k, v) for k, v in trial.point.items() if k != "seed")
            points.setdefault(key, {})[trial.point["seed"]] = loss
    several = [losses for losses in points.values() if len(losses) > 1]
    if several and all(len(set(losses.values())) == 1 for losses in several):
        seeds, loss = ", ".join(map(str, several[0])), next(iter(several[0].values()))
        raise UserError(
            f"the script seems to ignore the seed: seeds {seeds} give the same loss {loss!r}",
            fix="let the seed set the initial weights and the order of the data; or use one seed",
        )


def refuse_ignored_shapes(engine: Runner, trials: Iterable[Trial]) -> None:
    """Two shapes with the same loss for every value and seed: the script does not use width and depth."""
    results = engine.store.results(t.task for t in trials)
    points: dict[object, dict[Shape, float]] = {}
    for trial in trials:
        loss = trial.task.loss(results.get(trial.task.id, {}))
        if loss is not None and math.isfinite(loss):
            key = tuple((k, v) for k, v in trial.point.items() if k not in ("width", "depth"))
            points.setdefault(key, {})[shape_of(trial)] = loss
    several = [losses for losses in points.values() if len(losses) > 1]
    if len(several) > 1 and all(len(set(losses.values())) == 1 for losses in several):
        shapes = " and ".join(f"{s.width} × {s.depth}" for s in several[0])
        raise UserError(
            f"the script seems to ignore its shape: {shapes} give the same loss {next(iter(several[0].values()))!r}",
            fix="check that the command passes {width} and {depth} on, and that the script builds such a model",
        )


@dataclass(frozen=True)
class Expected:
    """How many runs a search is likely to need."""

    base: float  # with one seed
    seeds: float  # more seeds at the base
    proxies: float
    most: int

    @property
    def runs(self) -> int:
        return math.ceil(self.base + self.seeds + self.proxies)


def expected_runs(values: int, seeds: int, proxies: int) -> Expected:
    """The mean over all places where the optimum may lie, if it transfers."""
    axis = [float(i) for i in range(values)]
    walks = []
    for optimum in axis:
        losses: dict[float, float] = {}
        while wanted := next_values(axis, losses, axis[len(axis) // 2]):
            losses |= {v: abs(v - optimum) for v in wanted}
        walks.append((len(losses), len(next_values(axis, {}, optimum))))
    walked = sum(w for w, _ in walks) / len(walks)
    beside = sum(b for _, b in walks) / len(walks)
    return Expected(walked, beside * (seeds - 1), beside * seeds * proxies, values * seeds * (1 + proxies))
