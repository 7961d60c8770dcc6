"""The exponents of every parameter tensor: `tensors.py` over shapes, parameterizations and seeds, on all cores.

Everything is measured where the theory holds, near the limit of large depth. There the embedding is larger than what
the branches add to it. At ordinary starting values it is not: ρ = RMS(sum of branches) / RMS(embedding) at the base is
3 to 30, and every slope over depth is bent up to the depth L* = L_base · ρ². So the branches of a copy are scaled down,
by one constant for all sizes, until ρ is at most MOST_RHO.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Protocol

import polars as pl
import torch
from torch import Tensor

from completep.anatomy.names import named_parameters
from completep.config import Shape
from completep.measure.coordinates import refuse_randomness
from completep.measure.outputs import PartRow
from completep.measure.pool import each
from completep.measure.subject import Batch, Family, Setting, Source, Subject, make_batches, speaking_of
from completep.measure.tensors import (
    State,
    TensorRow,
    aligned_heads,
    branch_share,
    measure_start,
    measure_tensors,
    repeat_starts_,
    scale_,
    scaled_readout,
    tied_readout,
    train_,
)
from completep.measure.words import Axis, Progress, quiet
from completep.rules.table import Rules

MOST_RHO = 0.05  # ρ of the copy that is measured
# RMS of its logits at the base. The softmax of larger ones is uneven, and less so in wider models. With few classes
# this uneven part is most of a gradient that sums over tokens. Training needs logits that can move.
SMALL, SMALL_TRAINED = 0.02, 1.0
FIT = 8.0  # the paper's own base has ρ = 7
START_SECONDS = 25.0  # new processes import torch first, on cores that could already measure
AS_IT_IS = "as it is"  # instead of a rules key, for a factory's own optimizer

Repairs = Mapping[tuple[str, Axis, str], float]  # (rules, axis, template) → exponent to multiply its weights by


@dataclass(frozen=True)
class Limit:
    """How far the base is from the limit of large depth."""

    base: Shape
    rho: float  # RMS of what all branches add to the stream, relative to the embedding
    scale: float  # on the branches of the copy that is measured
    logits: float  # on its readout, at init
    trained: float  # on its readout, where it is trained for some steps
    heads: Mapping[str, int]  # head size by attention module, as templates

    @property
    def depth(self) -> float:
        """L*: from here on, more depth no longer changes the stream's size."""
        return self.base.depth * self.rho**2

    @property
    def fit(self) -> bool:
        """True if a base like this one can be tuned at."""
        return self.rho <= FIT

    def __str__(self) -> str:
        size = (
            f"ρ = {self.rho:.2g}: at init the branches of the base add {self.rho:.2g} times the embedding to the stream"
        )
        if self.rho <= 1:
            return f"{size}. The base is at the limit of large depth: it is fit to tune at."
        settled = f"{size}, and the stream's size settles at a depth of L* ≈ {self.depth:.3g}"
        if self.fit:
            return f"{settled}. This is as near to the limit as the paper's base (ρ = 7): it is fit to tune at."
        fix = "Use a smaller init std for the blocks, or a larger one for the embedding"
        return f"{settled}. The best learning rate may drift until there. {fix}, until ρ is below {FIT:g}."


@dataclass(frozen=True)
class Job:
    """All seeds of one shape."""

    rules: Rules
    shape: Shape
    seeds: tuple[int, ...]
    limit: Limit
    repairs: Repairs
    grown: Mapping[str, int] = field(default_factory=dict)  # further axes that are not as at the base
    steps: int = 0  # training steps before the measurement

    def __str__(self) -> str:
        more = "".join(f", {axis} {size}" for axis, size in self.grown.items())
        return f"{self.rules.name}, width {self.shape.width}, depth {self.shape.depth}{more}"


@dataclass(frozen=True, eq=False)
class Survey:
    """Everything that was measured. Rules are written as keys."""

    base: Shape
    limit: Limit
    tensors: pl.DataFrame  # a row per rules, shape, seed and template
    states: pl.DataFrame  # a row per rules, shape and seed
    attentions: pl.DataFrame  # a row per rules, shape and attention module; empty if there is none
    untrained: tuple[str, ...] = ()  # templates of parameters that no optimizer trains
    further: Mapping[str, int] = field(default_factory=dict)  # further axes, with their sizes at the base
    parts: pl.DataFrame = field(default_factory=pl.DataFrame)  # a row per part of the outputs of a matrix; may be empty

    def joined(self, other: "Survey") -> "Survey":
        """With further seeds."""
        tensors, states = pl.concat([self.tensors, other.tensors]), pl.concat([self.states, other.states])
        return replace(self, tensors=tensors, states=states, parts=pl.concat([self.parts, other.parts]))

    def shapes(self, axes: Iterable[str]) -> list[Shape]:
        """The shapes that were measured along these axes."""
        rules = self.states["rules"][0]
        along = (self.along(self.states, axis, rules).select("width", "depth").iter_rows() for axis in axes)
        return [Shape(*shape) for shape in dict.fromkeys(chain.from_iterable(along))]

    def along(self, frame: pl.DataFrame, axis: str, rules: str) -> pl.DataFrame:
        """Only the shapes that differ along one axis: at the base's width or depth, or else at the smallest."""
        rows = frame.filter(pl.col("rules") == rules)
        for name, size in self.further.items():
            rows = rows if name == axis else rows.filter(pl.col(name) == size)
        if axis in self.further:
            base = (pl.col("width") == self.base.width) & (pl.col("depth") == self.base.depth)
            return rows.filter(base)
        other = "width" if axis == "depth" else "depth"
        at_base = rows.filter(pl.col(other) == getattr(self.base, other))
        fixed = getattr(self.base, other) if at_base[axis].n_unique() > 1 else rows[other].min()
        return rows.filter(pl.col(other) == fixed)


def survey(
    source: Source,
    rules: Sequence[Rules],
    shapes: Sequence[Shape],
    setting: Setting,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    near_limit: bool = True,
    repairs: Repairs | None = None,
    limit: Limit | None = None,
    further: Mapping[str, Sequence[int]] | None = None,
    steps: int = 0,
    workers: int | None = None,
    progress: Progress = quiet,
    kept: "Keeper | None" = None,
    family: Family | None = None,
) -> Survey:
    """Measure every parameterization at every shape, and at the base's shape along further axes.

    The first size of a further axis is the base's. With `steps`, the model is trained for so many steps first. What
    `kept` has is not measured again. Several surveys of one source and setting share a `family`.
    """
    family = family or Family(source, setting)
    limit = limit or _find_limit(family, rules[0], near_limit=near_limit)
    distinct = {r.key: r for r in rules}.values()
    axes = {axis: sizes[0] for axis, sizes in (further or {}).items()}
    points: list[tuple[Shape, dict[str, int]]] = [(shape, {}) for shape in dict.fromkeys(shapes)]
    points += [(source.base, {axis: n}) for axis, sizes in (further or {}).items() for n in sizes if n != sizes[0]]
    if axes and source.base not in shapes:
        points.append((source.base, {}))
    jobs = [Job(r, s, tuple(seeds), limit, repairs or {}, grown, steps) for r in distinct for s, grown in points]
    measure = partial(measure_shape, family)
    tensors: list[Mapping[str, object]] = []
    states: list[Mapping[str, object]] = []
    attentions: list[Mapping[str, object]] = []
    parts: list[Mapping[str, object]] = []
    untrained: dict[str, None] = {}
    for done, (job, measured) in enumerate(_all(measure, jobs, workers, kept), 1):
        labels = {"rules": job.rules.key, "width": job.shape.width, "depth": job.shape.depth, **axes, **job.grown}
        untrained |= dict.fromkeys(measured.untrained)
        attentions += [labels | vars(row) for row in measured.attentions]
        for seed, (state, rows) in measured.seeds.items():
            states.append(labels | {"seed": seed} | vars(state))
            tensors += [labels | {"seed": seed} | vars(row) for row in rows]
            parts += [labels | {"seed": seed} | vars(row) for row in measured.parts.get(seed, ())]
        progress(done, len(jobs), str(job))
    order = ["rules", "width", "depth", *axes]
    frames = (pl.DataFrame(rows, infer_schema_length=None) for rows in (tensors, states, attentions, parts))
    by_seed, at_start, heads, split = (
        frame.sort(order, maintain_order=True) if len(frame) else frame for frame in frames
    )
    return Survey(source.base, limit, by_seed, at_start, heads, tuple(untrained), axes, split)


@dataclass(frozen=True)
class AttentionRow:
    """The scale on q·k of one attention module, which does not depend on the weights.

    It cannot be measured where a product of two activations does not go into a softmax.
    """

    template: str
    head_size: int  # how many numbers its product sums over
    scale: float | None  # None: it cannot be measured
    expected: float  # in any unit: only its exponent matters


@dataclass(frozen=True)
class Measured:
    """One shape."""

    seeds: dict[int, tuple[State, list[TensorRow]]]
    attentions: list[AttentionRow]
    untrained: list[str]
    parts: dict[int, list[PartRow]] = field(default_factory=dict)  # by seed; `derive` does not keep them


class Keeper(Protocol):
    """Remembers measurements."""

    def get(self, job: Job) -> "Measured | None": ...
    def put(self, job: Job, measured: "Measured") -> None: ...


def _all(
    measure: Callable[[Job], Measured], jobs: list[Job], workers: int | None, kept: Keeper | None
) -> Iterator[tuple[Job, Measured]]:
    """What is kept first, then what is measured now."""
    missing = []
    for job in jobs:
        known = None if kept is None else kept.get(job)
        if known is None:
            missing.append(job)
        else:
            yield job, known
    for job, measured in _on_cores(measure, missing, workers) if missing else ():
        if kept is not None:
            kept.put(job, measured)
        yield job, measured


def _on_cores(
    measure: Callable[[Job], Measured], jobs: list[Job], workers: int | None
) -> Iterator[tuple[Job, Measured]]:
    """The smallest job runs in this process. New processes are started if the others take longer than starting them."""
    smallest, *others = sorted(jobs, key=lambda job: job.shape.width**2 * job.shape.depth)
    start = time.perf_counter()
    yield smallest, measure(smallest)
    seconds = time.perf_counter() - start
    work = seconds * sum(job.shape.depth / smallest.shape.depth for job in others)
    others.reverse()  # the longest first, so that no core waits for it at the end
    yield from each(measure, others, 1 if workers is None and work < START_SECONDS else workers)


def measure_shape(family: Family, job: Job) -> Measured:
    with speaking_of(str(job)), denormals_kept():
        return _measure_shape(family, job)


@contextmanager
def denormals_kept() -> Iterator[None]:
    """Numbers below 1e-38 are kept, as in a new process. Training before, in the same process, flushes them to zero."""
    flushed = float(torch.tensor(1e-40) * 1.0) == 0.0
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)


def _measure_shape(family: Family, job: Job) -> Measured:
    source = family.source
    subjects = family.subjects(job.shape, job.rules, job.grown)
    seeds, parts = {}, {}
    for seed in job.seeds:
        batch = family.batch(seed)
        subject = subjects.start(seed)
        state, gains = measure_start(subject, batch)
        repeat_starts_(subject, _starts(source, subject, seed))
        factors = {t: repair(job, source.base, t) for t in subject.anatomy.parts}
        factors |= {t: job.limit.scale * factors[t] for t in subject.writers}
        small = job.limit.trained if job.steps else job.limit.logits
        logits = small * repair(job, source.base, tied_readout(subject))
        if not subject.anatomy.tied:
            factors |= {t: small * factors[t] for t in subject.anatomy.readout.parameters}
        elif subject.anatomy.readout.module is None:  # then the final norm holds what acts on the logits
            factors |= {t: logits * factors[t] for t in subject.anatomy.readout.parameters}
        scale_(subject, factors.__getitem__)
        with aligned_heads(subject, job.limit.heads), scaled_readout(subject, logits):
            if job.steps:
                text = make_batches(source, family.base, family.setting, seed)[0]
                train_(subject, factors, text, job.steps)
                batch = text(job.steps)
            rows, parts[seed] = measure_tensors(subject, batch, gains)
            seeds[seed] = state, rows
        scale_(subject, {t: 1 / factor for t, factor in factors.items()}.__getitem__)  # frozen weights are kept
    return Measured(seeds, _attentions(subject), subject.untrained, parts)


def _starts(source: Source, subject: Subject, seed: int) -> dict[str, list[Tensor]]:
    """By template: the values that the base's constructor draws for parameters that keep them, block by block."""
    drawn = {t for t, part in subject.anatomy.parts.items() if part.kept and part.constant is None}
    starts: dict[str, list[Tensor]] = {}
    if drawn:
        torch.manual_seed(seed)
        for name, parameter in named_parameters(source.base_model()):
            if (template := subject.anatomy.template(name)) in drawn:
                starts.setdefault(template, []).append(parameter.detach())
    return starts


def _attentions(subject: Subject) -> list[AttentionRow]:
    """One row per template: its blocks run the same code."""
    rows = {}
    for name, attention in subject.forward.attentions.items():
        expected = subject.expected.rules.attention(attention.head_size)
        template = subject.anatomy.template(name)
        rows[template] = AttentionRow(template, attention.head_size, attention.scale, expected)
    for name, size in subject.forward.unmeasured.items():
        template = f"{subject.anatomy.template(name)} (product of activations)"
        rows[template] = AttentionRow(template, size, None, subject.expected.rules.attention(size))
    return list(rows.values())


def repair(job: Job, base: Shape, template: str) -> float:
    """A wrong starting value or multiplier changes the gradients of other tensors, so the copy has it put right."""
    rules, (width, depth) = job.rules.key, (job.shape.width / base.width, job.shape.depth / base.depth)
    wider = width ** job.repairs.get((rules, "width", template), 0.0)
    return float(wider * depth ** job.repairs.get((rules, "depth", template), 0.0))


def find_limit(source: Source, rules: Rules, setting: Setting, *, near_limit: bool) -> Limit:
    """ρ of the base, and the factor on its branches that makes it small."""
    return _find_limit(Family(source, setting), rules, near_limit=near_limit)


def _find_limit(family: Family, rules: Rules, *, near_limit: bool) -> Limit:
    base = family.source.base
    with speaking_of(f"the base, width {base.width}, depth {base.depth}"):
        subject, batch = family.subjects(base, rules).start(0), family.batch(0)
        refuse_randomness(subject, batch)
        limit = _limit(base, subject, batch, near_limit=near_limit)
        undone = {t: 1 / limit.scale if t in subject.writers else 1.0 for t in subject.anatomy.parts}
        scale_(subject, undone.__getitem__)  # frozen weights are kept
        return limit


def _limit(base: Shape, subject: Subject, batch: Batch, *, near_limit: bool) -> Limit:
    state, _ = measure_start(subject, batch)
    first = rho = branch_share(subject, batch)
    scale = 1.0
    while near_limit and rho > MOST_RHO:  # twice or three times: the branches read a stream that they change
        smaller = 0.8 * MOST_RHO / rho
        scale_(subject, {t: smaller if t in subject.writers else 1.0 for t in subject.anatomy.parts}.__getitem__)
        scale, rho = scale * smaller, branch_share(subject, batch)
    known = near_limit and 0 < state.logits < math.inf
    logits, trained = (min(1.0, most / state.logits) if known else 1.0 for most in (SMALL, SMALL_TRAINED))
    heads = {row.template: row.head_size for row in _attentions(subject)}
    return Limit(base, first, scale, logits, trained, heads)
