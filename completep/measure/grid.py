"""The coordinate check over a grid of shapes, parameterizations and seeds, on all cores, without doing a run twice."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import polars as pl

from completep.config import Shape
from completep.errors import UserError
from completep.measure.coordinates import RoleRow, StreamRow, measure
from completep.measure.pool import each
from completep.measure.subject import Setting, Source, Subjects, make_batches, speaking_of
from completep.measure.words import Axis, Progress, quiet
from completep.rules.table import Rules

Rows = tuple[list[StreamRow], list[RoleRow]]
AS_IT_IS = "as it is"  # instead of a rules key, for a factory's own optimizer


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


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Everything that was measured. Rules are written as keys."""

    base: Shape
    stream: pl.DataFrame  # a row per rules, shape, seed, step, quantity and layer
    roles: pl.DataFrame  # a row per rules, shape, seed and role

    def along(self, axis: Axis, rules: str | None = None) -> "Coordinates":
        """Only the shapes that differ along one axis: at the base's width or depth, or else at the smallest
        measured.
        """
        other = "width" if axis == "depth" else "depth"
        at_base = self.stream.filter(pl.col(other) == getattr(self.base, other))
        fixed = getattr(self.base, other) if at_base[axis].n_unique() > 1 else self.stream[other].min()
        wanted = (pl.col(other) == fixed) & (pl.lit(True) if rules is None else pl.col("rules") == rules)
        return Coordinates(self.base, self.stream.filter(wanted), self.roles.filter(wanted))


def coordinate_check(
    source: Source,
    rules: Sequence[Rules],
    shapes: Sequence[Shape],
    setting: Setting = Setting(),  # noqa: B008  (frozen)
    *,
    seeds: Sequence[int] = (0, 1, 2),
    workers: int | None = None,
    progress: Progress = quiet,
) -> Coordinates:
    """Train and measure at every shape. Where two parameterizations give the same run, it is done once."""
    if not shapes or not rules or not seeds:
        raise UserError("nothing to check: no shapes, no rules or no seeds", fix="give at least one of each")
    if isinstance(source.make(source.base), tuple):  # your own optimizer, with whatever rules are in it
        rules = [replace(rules[0], key=AS_IT_IS, name=AS_IT_IS)]
    distinct_rules = {r.key: r for r in rules}.values()
    jobs = [Job(r, shape, s) for r in distinct_rules for shape in dict.fromkeys(shapes) for s in dict.fromkeys(seeds)]
    distinct = {job.effect(source.base): job for job in reversed(jobs)}
    # The largest first: a long run that starts last would leave the other cores idle.
    todo = sorted(distinct.values(), key=lambda job: -(job.shape.width**2 * job.shape.depth))
    done: dict[Hashable, Rows] = {}
    for job, rows in each(partial(run_one, source, setting), todo, workers):
        done[job.effect(source.base)] = rows
        progress(len(done), len(todo), str(job))
    stream: list[Mapping[str, object]] = []
    roles: list[Mapping[str, object]] = []
    for job in jobs:
        labels = {"rules": job.rules.key, "width": job.shape.width, "depth": job.shape.depth, "seed": job.seed}
        streams, effects = done[job.effect(source.base)]
        stream += [labels | asdict(row) for row in streams]
        roles += [labels | asdict(row) for row in effects]
    frames = (pl.DataFrame(rows, infer_schema_length=None) for rows in (stream, roles))
    return Coordinates(source.base, *frames)


def run_one(source: Source, setting: Setting, job: Job) -> Rows:
    with speaking_of(str(job)):
        base = source.base_model()
        batches, probe = make_batches(source, base, setting, job.seed)
        example = batches(0)[0] if source.batches is not None else None
        subject = Subjects(source, base, job.shape, job.rules, setting, example).start(job.seed)
        return measure(subject, batches, probe, setting.steps)
