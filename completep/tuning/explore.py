"""A search over several dimensions at the base, in three parts:

1. Propose points and run them with one seed, round by round. Proposals come from Optuna (TPE or a Gaussian process), or
   from a random search in a trust region, which needs no further package and suits many multipliers.
2. Polish: the last third of the runs goes to neighbours of the best points, one dimension at a time. If the budget
   allows, the search ends in a minimum of the grid.
3. Confirm: the best of many runs with one seed is partly luck. So the best points are run with all seeds, a few at a
   time, until the point with the best mean is one that was confirmed.

Everything is a function of the results so far and of a fixed seed. After an interruption the same points are proposed
again, and those that were run are in the store already.
"""

import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from completep.errors import UserError
from completep.sweep.search import Runner
from completep.sweep.task import Task, Trial, Value
from completep.tuning.ignored import refuse_argument
from completep.tuning.space import Dimension
from completep.tuning.stopping import StopsEarly

Method = Literal["tpe", "gp", "random"]
Place = tuple[int, ...]  # an index into the values of every dimension
ROUND = 4  # proposals per round; they decide what comes next, so this does not depend on the workers
POLISH = 1 / 3  # share of the runs
CONFIRMED = 3  # points that are confirmed at a time
MOST_CONFIRMED = 1 / 3  # largest share of the points that are confirmed
PER_DIMENSION = 10  # runs per dimension, if no number is given
MANY = 12  # more dimensions are searched at random
ALIKE = 3  # equal losses along a dimension, after which the script is said to ignore it
PATIENCE = 3  # rounds without a new point, after which polishing starts


class Proposer(Protocol):
    def ask(self) -> Place: ...

    def tell(self, place: Place, loss: float) -> None:
        """Report the loss of a place, in the order of `ask`. It is infinite if the run diverged or failed."""


@dataclass
class ByOptuna:
    """TPE or a Gaussian process, on the indices of the values."""

    dimensions: Sequence[Dimension]
    method: Literal["tpe", "gp"]
    budget: int

    def __post_init__(self) -> None:
        try:
            import optuna
        except ImportError as error:
            raise UserError(
                f"a search over {len(self.dimensions)} dimensions by {self.method} needs Optuna",
                fix="pip install 'completep[tune]', or use search=random, which needs no further package",
            ) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        first = min(10, max(ROUND, self.budget // 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if self.method == "gp":
                sampler: optuna.samplers.BaseSampler = optuna.samplers.GPSampler(seed=0, n_startup_trials=first)
            else:
                sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=first, constant_liar=True)
            self.study = optuna.create_study(sampler=sampler)
        self.axes: dict[str, optuna.distributions.BaseDistribution] = {
            d.name: optuna.distributions.IntDistribution(0, len(d.values) - 1)
            if d.ordered
            else optuna.distributions.CategoricalDistribution(range(len(d.values)))
            for d in self.dimensions
        }
        self.asked: list[optuna.trial.Trial] = []
        self.losses: list[float] = []

    def ask(self) -> Place:
        trial = self.study.ask(self.axes)
        self.asked.append(trial)
        return tuple(int(trial.params[d.name]) for d in self.dimensions)

    def tell(self, place: Place, loss: float) -> None:
        """A run that diverged gets a loss above all others, because the sampler cannot use infinity."""
        if math.isfinite(loss):
            self.losses.append(loss)
        low, high = min(self.losses, default=1.0), max(self.losses, default=1.0)
        self.study.tell(self.asked.pop(0), loss if math.isfinite(loss) else high + (high - low))


@dataclass
class TrustRegion:
    """Random steps from the best point, in some of the dimensions. The region shrinks until a step is better."""

    dimensions: Sequence[Dimension]
    best: tuple[float, Place] | None = None
    reach: float = 1.0  # share of a dimension's values that a step may cross
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def ask(self) -> Place:
        if self.best is None or not math.isfinite(self.best[0]):
            return tuple(self.dice.randrange(len(d.values)) for d in self.dimensions)
        moved = self.dice.sample(range(len(self.dimensions)), max(1, round(len(self.dimensions) * self.dice.random())))
        return tuple(self._step(i, d) if i in moved else self.best[1][i] for i, d in enumerate(self.dimensions))

    def _step(self, i: int, d: Dimension) -> int:
        assert self.best is not None
        count = len(d.values)
        if not d.ordered:
            return self.dice.randrange(count)
        size = max(1, round(self.reach * (count - 1)))
        return min(count - 1, max(0, self.best[1][i] + self.dice.choice([-1, 1]) * self.dice.randint(1, size)))

    def tell(self, place: Place, loss: float) -> None:
        if self.best is None or loss < self.best[0]:
            self.best = (loss, place)
            self.reach = min(1.0, 1.5 * self.reach)
        else:
            self.reach = max(0.01, 0.9 * self.reach)


@dataclass
class Explore:
    """A `Strategy` for `conduct` that makes its own trials."""

    dimensions: Sequence[Dimension]
    method: Method
    budget: int
    trial: Callable[[Mapping[str, Value], int], Trial]  # of values and a seed
    stop_early: bool = True
    seeds: int = 1
    losses: dict[Place, float] = field(default_factory=dict)  # with the first seed
    means: dict[Place, float] = field(default_factory=dict)  # over all seeds, of the best points
    done: list[Trial] = field(default_factory=list)
    failed: list[Task] = field(default_factory=list)

    def __call__(self, engine: Runner, trials: Sequence[Trial]) -> tuple[list[Trial], list[Task]]:
        kind = self.proposer()
        plain, engine = engine, StopsEarly(engine) if self.stop_early else engine
        proposed, idle = math.ceil((1 - POLISH) * self.budget), 0
        while len(self.losses) < proposed and idle < PATIENCE:
            before = len(self.losses)
            places = [kind.ask() for _ in range(min(ROUND, proposed - before))]
            self._run(engine, places)
            for place in places:
                kind.tell(place, self.losses[place])
            idle = idle + 1 if len(self.losses) == before else 0
        self._polish(engine)
        self._confirm(plain)
        return self.done, list({task.id: task for task in self.failed}.values())

    def proposer(self) -> Proposer:
        if self.method == "random":
            return TrustRegion(self.dimensions)
        return ByOptuna(self.dimensions, self.method, self.budget)

    @property
    def best(self) -> dict[str, Value]:
        """The values with the smallest loss."""
        known = self.means or self.losses
        place = min(known, key=lambda p: (known[p], p))
        if not math.isfinite(known[place]):
            raise UserError(
                f"all {len(self.losses)} runs of the search diverged or failed",
                fix="extend the ranges to smaller values; if the loss is always NaN, check the script",
            )
        return self._values(place)

    def _values(self, place: Place) -> dict[str, Value]:
        return {d.name: d.values[i] for d, i in zip(self.dimensions, place, strict=True)}

    def _polish(self, engine: Runner) -> None:
        """Try the neighbours of the best point, then those of the next best, until the budget ends."""
        while (left := self.budget - len(self.losses)) > 0:
            ranked = sorted(self.losses, key=lambda p: (self.losses[p], p))
            unknown = next((new for p in ranked if (new := self._unknown(p))), [])
            if not unknown:
                return  # the whole grid is known
            self._run(engine, unknown[: min(left, 2)])  # both sides of one dimension

    def _unknown(self, place: Place) -> list[Place]:
        return [p for p in self._neighbours(place) if p not in self.losses]

    def _neighbours(self, place: Place) -> list[Place]:
        around = []
        for i, d in enumerate(self.dimensions):
            steps = (place[i] - 1, place[i] + 1) if d.ordered else range(len(d.values))
            around += [(*place[:i], k, *place[i + 1 :]) for k in steps if 0 <= k < len(d.values) and k != place[i]]
        return around

    def _run(self, engine: Runner, places: Sequence[Place]) -> None:
        """Run what is new, and note the losses."""
        new = [p for p in dict.fromkeys(places) if p not in self.losses]
        self.losses |= self._losses_of(engine, new, 0)
        for i, d in enumerate(self.dimensions):
            if not self.failed:  # what a failure leaves over says nothing
                self._refuse_ignored(i, d)

    def _refuse_ignored(self, i: int, d: Dimension) -> None:
        """Refuse a dimension that the script ignores: points that differ only in it have the same loss."""
        groups: dict[Place, list[Place]] = {}
        for place, loss in self.losses.items():
            if math.isfinite(loss):
                groups.setdefault((*place[:i], *place[i + 1 :]), []).append(place)
        several = [sorted(group) for group in groups.values() if len(group) > 1]
        alike = all(len({self.losses[place] for place in group}) == 1 for group in several)
        if alike and sum(len(group) - 1 for group in several) >= ALIKE:
            refuse_argument(d, [d.values[place[i]] for place in several[0]], self.losses[several[0][0]])

    def _confirm(self, engine: Runner) -> None:
        """Run the best points with all seeds, until the best one is confirmed. A point that was lucky falls back."""
        most = max(CONFIRMED, round(MOST_CONFIRMED * self.budget)) if self.seeds > 1 else 0
        while len(self.means) < min(most, len(self.losses)):
            ranked = sorted(self.losses, key=lambda p: (self.means.get(p, self.losses[p]), p))
            if ranked[0] in self.means:
                return
            few = [p for p in ranked[:CONFIRMED] if p not in self.means][: most - len(self.means)]
            each = [{p: self.losses[p] for p in few}]
            each += [self._losses_of(engine, few, seed) for seed in range(1, self.seeds)]
            self.means |= {p: sum(losses[p] for losses in each) / len(each) for p in few}

    def _losses_of(self, engine: Runner, places: Sequence[Place], seed: int) -> dict[Place, float]:
        """Infinite where a run diverged, failed or was stopped."""
        trials = {p: self.trial(self._values(p), seed) for p in places}
        self.failed += engine.run([t.task for t in trials.values()])
        results = engine.store.results(t.task for t in trials.values())
        self.done += trials.values()
        losses = {}
        for place, trial in trials.items():
            result = results.get(trial.task.id)
            loss = trial.task.loss(result) if result and result["status"] == "done" else None
            losses[place] = math.inf if loss is None or not math.isfinite(loss) else loss
        return losses


def choose_method(search: str, dimensions: int) -> Method:
    if search in ("tpe", "gp", "random"):
        return search  # type: ignore[return-value]
    return "tpe" if dimensions <= MANY else "random"


def default_budget(dimensions: Sequence[Dimension]) -> int:
    """Ten runs per dimension, and not more than half of the grid."""
    points = math.prod(len(d.values) for d in dimensions)
    return max(2, min(PER_DIMENSION * len(dimensions), points // 2))
