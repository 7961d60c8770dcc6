"""The coordinate check over a grid of shapes, parameterizations and seeds: every core at work, nothing done twice."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import polars as pl

from completep.config import Shape
from completep.errors import UserError
from completep.measure.coordinates import RoleRow, StreamRow, measure
from completep.measure.pool import each
from completep.measure.subject import Setting, Source, make_batches, make_subject
from completep.rules.table import Rules

Axis = Literal["width", "depth"]
Rows = tuple[list[StreamRow], list[RoleRow]]
Progress = Callable[[int, int, str], None]  # runs done, runs in all, the one just done


@dataclass(frozen=True)
class Job:
    rules: Rules
    shape: Shape
    seed: int

    def effect(self, base: Shape) -> Hashable:
        left = self.rules.effect(wider=self.shape.width != base.width, deeper=self.shape.depth != base.depth)
        return self.shape, self.seed, left

    def __str__(self) -> str:
        return f"{self.rules.name}, width {self.shape.width}, depth {self.shape.depth}, seed {self.seed}"


@dataclass(frozen=True)
class Coordinates:
    """All that was measured."""

    base: Shape
    stream: pl.DataFrame  # a row per rules, shape, seed, step, quantity and layer
    roles: pl.DataFrame  # a row per rules, shape, seed and role

    def along(self, axis: Axis, rules: str | None = None) -> "Coordinates":
        """Only the shapes that differ along one axis: at the base's width or depth, or else at the smallest there is."""
        other = "width" if axis == "depth" else "depth"
        at_base = self.stream.filter(pl.col(other) == getattr(self.base, other))
        fixed = getattr(self.base, other) if at_base[axis].n_unique() > 1 else self.stream[other].min()
        mine = (pl.col(other) == fixed) & (pl.lit(True) if rules is None else pl.col("rules") == rules)
        return Coordinates(self.base, self.stream.filter(mine), self.roles.filter(mine))


def coordinate_check(
    source: Source,
    rules: Sequence[Rules],
    shapes: Sequence[Shape],
    setting: Setting = Setting(),  # noqa: B008  (frozen)
    *,
    seeds: Sequence[int] = (0, 1, 2),
    workers: int | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Coordinates:
    """Train and measure at every shape; what two parameterizations have in common is run once."""
    if not shapes or not rules or not seeds:
        raise UserError("nothing to check: no shapes, no rules or no seeds", fix="give at least one of each")
    if isinstance(source.make(source.base), tuple):  # somebody's own optimizer, under whatever rules she put in it
        rules = [replace(rules[0], name="as it is")]
    named = {r.name: r for r in rules}.values()
    jobs = [Job(r, shape, seed) for r in named for shape in dict.fromkeys(shapes) for seed in dict.fromkeys(seeds)]
    distinct = {job.effect(source.base): job for job in reversed(jobs)}
    # The largest first: a long run that starts last would keep one core busy and the others idle.
    todo = sorted(distinct.values(), key=lambda job: -(job.shape.width**2 * job.shape.depth))
    done: dict[Hashable, Rows] = {}
    for job, rows in each(partial(run_one, source, setting), todo, workers):
        done[job.effect(source.base)] = rows
        progress(len(done), len(todo), str(job))
    return Coordinates(source.base, *(_frame(jobs, done, source.base, which) for which in (0, 1)))


def run_one(source: Source, setting: Setting, job: Job) -> Rows:
    try:
        subject = make_subject(source, job.shape, job.rules, setting, job.seed)
        batches, probe = make_batches(source, setting, job.seed)
        return measure(subject, batches, probe, setting.steps)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{job}: {type(error).__name__}: {error}",
            fix="do the batches fit the model: ids and classes below its vocabulary, whole-number targets, the same device?",
        ) from error


def _frame(jobs: Sequence[Job], done: dict[Hashable, Rows], base: Shape, which: int) -> pl.DataFrame:
    rows: list[dict[str, Any]] = []
    for job in jobs:
        place = {"rules": job.rules.name, "width": job.shape.width, "depth": job.shape.depth, "seed": job.seed}
        rows += [place | asdict(row) for row in done[job.effect(base)][which]]
    return pl.DataFrame(rows, infer_schema_length=None)
