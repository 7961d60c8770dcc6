"""`check`: does training scale as the rules say? From a factory to a verdict that names the tensor and the setting."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from numbers import Integral

import polars as pl

from completep import paper
from completep.config import Shape, as_shape
from completep.errors import UserError
from completep.measure.diagnosis import (
    PER_TENSOR,
    Finding,
    culprits,
    exponents,
    judge_survey,
    noisy,
    overall,
    repairs_for,
    unchecked,
)  # fmt: skip
from completep.measure.figures import coordinate_figures, exponent_figure
from completep.measure.grid import Coordinates, coordinate_check
from completep.measure.subject import NO_RULES, Batches, Family, OptimizerName, Setting, Source
from completep.measure.survey import AS_IT_IS, Survey, survey
from completep.measure.verdict import Finding as Movement
from completep.measure.verdict import judge_coordinates
from completep.measure.verdict import overall as overall_movement
from completep.measure.words import Axis, Progress, Word, quiet, with_reason, worst
from completep.report.document import Cell, Document, Json, Part, Table, Text, Verdict
from completep.report.result import Result
from completep.rules.table import Role, Rules, as_rules, display_name

GPT = "completep.model.gpt:gpt"
LEAST_SEEDS = 3  # for FAIL: with fewer, the noise of one of many tensors may look like a fault
MOST_SEEDS = 4  # times the seeds asked for, where an interval is too wide to decide


@dataclass(frozen=True, eq=False, repr=False)
class Check(Result):
    """The verdict of a check, and everything it rests on."""

    survey: Survey
    findings: tuple[Finding, ...]
    unchecked: tuple[str, ...]  # what could not be seen
    movement: Coordinates | None = None  # the second opinion: a few training steps
    moved: tuple[Movement, ...] = ()

    slug = "check"

    @property
    def verdict(self) -> Word | None:
        """None if no rules were given: then there is nothing to judge."""
        words = [self.word(rules) for rules in self.by_rules]
        return worst(words) if self.judged else None

    @property
    def judged(self) -> bool:
        return NO_RULES.key not in self.by_rules

    def word(self, rules: str) -> Word:
        """The verdict of one parameterization, by its key."""
        word = overall(self.by_rules[rules])
        disagrees = overall_movement(f for f in self.moved if f.rules == rules) == "FAIL" if self.moved else False
        return "INCONCLUSIVE" if word == "PASS" and disagrees else word

    @cached_property
    def by_rules(self) -> dict[str, list[Finding]]:
        """The findings of each parameterization, by its key."""
        grouped: dict[str, list[Finding]] = {}
        for f in self.findings:
            grouped.setdefault(f.rules, []).append(f)
        return grouped

    @property
    def culprits(self) -> list[Finding]:
        """What is wrong, without what follows from it."""
        return [f for findings in self.by_rules.values() for f in culprits(findings)]

    @property
    def axes(self) -> list[Axis]:
        return list(dict.fromkeys(f.axis for f in self.findings))

    def document(self) -> Document:
        parts: list[Part] = [*self._verdicts(), Text(str(self.survey.limit))]
        if self.unchecked:
            parts.append(Text("Not checked: " + "; ".join(self.unchecked) + "."))
        if self.judged:
            parts += [exponents_table(self.findings), whole_table(self.findings)]
        else:
            parts.append(as_measured(self.survey))
        parts += [exponent_figure(self.survey, self.findings, axis) for axis in self.axes]
        if self.movement is not None:
            parts.append(movement_table(self.moved))
            parts += [figure for a in self.axes for figure in coordinate_figures(self.movement, self.moved, a)]
        return Document("Does training behave the same as the model grows?", tuple(parts), "completep check")

    def _verdicts(self) -> Iterator[Part]:
        if not self.judged:
            yield Text("No rules were given: these are the exponents that this implementation has.")
            return
        for rules, findings in self.by_rules.items():
            word, wrong = self.word(rules), culprits(findings)
            if word == "PASS":
                count = len({f.tensor for f in findings if f.role})
                what = "setting that could be checked" if self.unchecked else "setting"
                sentence = f"every {what} of {count} parameter tensors scales as it should"
            elif word == "FAIL":
                sentence = "; ".join(map(str, wrong[:3])) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
            elif overall(findings) == "PASS":
                sentence = "every setting scales as it should, but training moves the model differently: see below"
            else:
                open_ones = [f for f in findings if f.word == "INCONCLUSIVE"]
                sentence = (
                    f"{len(open_ones)} exponents cannot be decided, for instance {open_ones[0]} ({open_ones[0].why})"
                )
            yield Verdict(word, f"{display_name(rules)}: {sentence}")

    def frames(self) -> Mapping[str, pl.DataFrame]:
        frames = {"tensors": self.survey.tensors, "states": self.survey.states}
        if self.movement is not None:
            frames |= {"stream": self.movement.stream, "roles": self.movement.roles}
        return frames

    def _fields(self) -> Json:
        limit = self.survey.limit
        return {
            "verdict": self.verdict,
            "verdicts": {rules: self.word(rules) for rules in self.by_rules} if self.judged else {},
            "culprits": {r: [str(f) for f in culprits(findings)] for r, findings in self.by_rules.items()}
            if self.judged
            else {},
            "rho": limit.rho,
            "settled_depth": limit.depth,
            "fit": limit.fit,
            "unchecked": list(self.unchecked),
            "findings": [asdict(f) for f in self.findings],
            "movement": [asdict(f) for f in self.moved],
        }


ORDER: Mapping[Word, int] = {"FAIL": 0, "INCONCLUSIVE": 1, "PASS": 2}


def exponents_table(findings: Sequence[Finding]) -> Table:
    """One row per tensor and axis: each setting's exponent, and in brackets what it should be. Failures come first."""
    groups: dict[tuple[str, str, Axis], list[Finding]] = {}
    for f in findings:
        if f.setting in PER_TENSOR:
            groups.setdefault((f.rules, f.tensor, f.axis), []).append(f)
    columns = [name for name in PER_TENSOR if any(f.setting == name for f in findings)]
    several = len({rules for rules, _, _ in groups}) > 1
    rows: list[dict[str, Cell]] = []
    for (rules, tensor, axis), group in sorted(groups.items(), key=lambda item: ORDER[overall(item[1])]):
        cells: dict[str, Cell] = {f.setting: f.cell for f in group}
        head: dict[str, Cell] = {"tensor": tensor, "rules": display_name(rules)} if several else {"tensor": tensor}
        rows.append(head | {"in": axis, "verdict": overall(group)} | {name: cells.get(name) for name in columns})
    return Table.of("Exponents: measured (expected). A setting is proportional to size^exponent.", rows)


def whole_table(findings: Sequence[Finding]) -> Table:
    """The model as it starts, and blocks that differ from the others of their stack."""
    rows: list[dict[str, Cell]] = [
        {"quantity": f"{f.tensor} at init" if f.setting == "size" else f"{f.tensor}, largest block",
         "rules": display_name(f.rules), "in": f.axis, "verdict": with_reason(f.word, f.why),
         "exponent": f"{f.exponent.value:+.2f}" if f.exponent else None}
        for f in sorted(findings, key=lambda f: ORDER[f.word])
        if f.setting == "size" or (f.setting == "one block" and f.word != "PASS")
    ]  # fmt: skip
    return Table.of("The model as it is: nothing may grow", rows)


def as_measured(measured: Survey) -> Table:
    """What an implementation does, without a judgement."""
    notes = (
        "pull: by how much one step of this tensor lowers the loss. It should not depend on the size.",
        "gain: output over input of its module, into the stream or the logits where it writes there.",
    )
    return Table.of("Exponents in width and depth", exponents(measured), notes)


def movement_table(moved: Sequence[Movement]) -> Table:
    """The second opinion: how far a few training steps move the stream, and each role's update alone."""
    rows: list[dict[str, Cell]] = [
        {
            "quantity": f.quantity, "rules": display_name(f.rules), "in": f.axis,
            "slope": f"{f.slope.value:+.2f}" if f.slope else "–",
            "90 % interval": f"{f.slope.low:+.2f} … {f.slope.high:+.2f}" if f.slope else "",
            "allowed": f"{'' if f.least is None else f'{f.least:+.1f}'} … {f.most:+.1f}",
            "verdict": with_reason(f.word, f.why),
        }
        for f in sorted(moved, key=lambda f: ORDER[f.word])
    ]  # fmt: skip
    return Table.of("Second opinion: how far training moves the model", rows)


def check(
    factory: "str | Callable[..., object]" = GPT,
    *,
    depths: Sequence[int] = (),
    widths: Sequence[int] = (),
    base: "Shape | tuple[int, int] | None" = None,
    rules: "Rules | str | Sequence[Rules | str]" = "completep",
    arguments: "Mapping[str, object] | None" = None,
    names: tuple[str, str] = ("width", "depth"),
    roles: "Mapping[str, Role] | None" = None,
    batches: "str | Batches | None" = None,
    seeds: int = 3,
    steps: int = 0,
    optimizer: OptimizerName = "adamw",
    lr: float = paper.CHECK_LR,
    std: float = paper.CHECK_STD,
    eps: float = paper.EPS,
    weight_decay: float = 0.1,
    batch: int = 16,
    time: int = 16,
    near_limit: bool = True,
    workers: int | None = None,
    progress: Progress = quiet,
) -> Check:
    """Does training behave the same as the model grows, and if not, which setting of which tensor is wrong?

    One backward pass at every shape gives the exponents of learning rate, epsilon, weight decay, init and multipliers
    for every parameter tensor, in width and in depth. An interval that is too wide to decide gets more seeds.

    Args:
        factory: takes width and depth and returns a model, which gets `rules`; or returns (model, optimizer), which are
            checked as they are. A callable, or the text "package.module:factory" or "file.py:factory".
        depths: numbers of layers, at the base's width.
        widths: widths, at the base's depth.
        base: width and depth of the base; by default the smallest width and the smallest depth.
        rules: one parameterization or several, as objects or keys ("completep", "alpha=0.5"). "none" judges nothing:
            the result shows the exponents that the factory's model and optimizer have.
        arguments: further arguments of the factory.
        names: what the factory calls width and depth, such as ("n_embd", "n_layer").
        roles: {name pattern: Role} for parameters whose role cannot be found.
        batches: number → (inputs, targets), if forward needs special inputs; by default random tokens or images.
        seeds: number of seeds, at first. A FAIL takes at least three.
        steps: training steps for a second opinion, which is slower and less precise: how far they move the model.
        optimizer: what trains a model that comes without one: "adamw", "sgd", or "muon" (hidden matrices; AdamW for the
            rest).
        lr: base learning rate.
        std: base init standard deviation.
        eps: base epsilon.
        weight_decay: base weight decay.
        batch: sequences per batch.
        time: tokens per sequence.
        near_limit: measure a copy whose branches are scaled down, where the exponents of the theory hold. With False
            the model is measured as it is.
        workers: processes; by default one per core, or none where that is faster.
        progress: called with (shapes done, all shapes, the shape that was just measured).
    """
    if seeds < 1:
        raise UserError(f"seeds={seeds}: must be at least 1", fix="give 3 or more")
    several = [rules] if isinstance(rules, (Rules, str)) else list(rules)
    if not several or (len(several) > 1 and NO_RULES.key in several):
        raise UserError(f"rules={several!r}", fix="give one parameterization or several, or 'none' alone")
    for name, sizes in (("widths", widths), ("depths", depths)):
        if isinstance(sizes, (Integral, str)):
            raise UserError(f"{name}={sizes!r} is not a list", fix=f"give several sizes, such as {name}=[64, 128, 256]")
    widths, depths = ([int(n) if isinstance(n, Integral) else n for n in sizes] for sizes in (widths, depths))
    if len(names) != 2:
        raise UserError(f"names={names!r}", fix="give two names, for width and depth, such as ('n_embd', 'n_layer')")
    shapes, start = grid_of_shapes(widths, depths, base)
    options = dict(arguments or {})
    if factory == GPT:
        options = {"vocabulary": 256} | options
    source = Source(factory, start, options, names, roles, batches)
    setting = Setting(std, lr, eps, weight_decay, batch, time, max(steps, 1), optimizer)
    judged = [NO_RULES if r == NO_RULES.key else as_rules(r) for r in several]
    if judged != [NO_RULES] and isinstance(source.make(source.base), tuple):
        if len(judged) > 1:
            what = f"the factory brings its own optimizer, which cannot follow {len(judged)} parameterizations"
            raise UserError(what, fix="give the one that it should follow as rules")
        judged = [replace(judged[0], key=AS_IT_IS, name=AS_IT_IS)]  # your own optimizer, with whatever rules are in it
    measure = partial(
        survey, source, judged, shapes=shapes, setting=setting, near_limit=near_limit, workers=workers,
        progress=progress, family=Family(source, setting),
    )  # fmt: skip
    measured, findings = decided(measure, seeds)
    movement = None
    if steps:
        movement = coordinate_check(
            source, judged, shapes, setting, seeds=range(seeds), workers=workers, progress=progress
        )
    moved = () if movement is None else tuple(judge_coordinates(movement))
    return Check(measured, tuple(findings), tuple(unchecked(measured, findings)), movement, moved)


def decided(measure: "Callable[..., Survey]", seeds: int) -> tuple[Survey, list[Finding]]:
    """Measure with more seeds until every interval is narrow enough, or there are MOST_SEEDS times as many.

    Only the shapes along an axis with a wide interval are measured again.
    """
    first, repaired, used = measure(seeds=range(seeds)), None, seeds
    findings = judge_survey(first)
    if seeds < LEAST_SEEDS and any(f.word == "FAIL" for f in findings):
        first = first.joined(measure(seeds=range(seeds, LEAST_SEEDS), limit=first.limit))
        findings, used = judge_survey(first), LEAST_SEEDS
    if repairs := repairs_for(findings):
        repaired = measure(seeds=range(used), repairs=repairs, limit=first.limit)
        findings = judge_survey(first, repaired)
    while (axes := noisy(_not_failed(findings))) and used < MOST_SEEDS * seeds:
        more = partial(measure, shapes=first.shapes(axes), seeds=range(used, used + seeds), limit=first.limit)
        first = first.joined(more())
        if repaired is not None:
            repaired = repaired.joined(more(repairs=repairs))
        findings, used = judge_survey(first, repaired), used + seeds
    return first, findings


def _not_failed(findings: Sequence[Finding]) -> list[Finding]:
    """Those of parameterizations that more seeds could still decide."""
    failed = {f.rules for f in findings if f.word == "FAIL"}
    return [f for f in findings if f.rules not in failed]


def grid_of_shapes(
    widths: Sequence[int], depths: Sequence[int], base: "Shape | tuple[int, int] | None"
) -> tuple[list[Shape], Shape]:
    """Depths at one width and widths at one depth: one axis is varied at a time."""
    if len(set(widths)) < 2 and len(set(depths)) < 2:
        raise UserError(
            "one shape has no slope", fix="give several depths (2 4 8 16), several widths (64 128 256), or both"
        )
    if base is None:
        base = Shape(min(widths, default=256), min(depths, default=2))
    start = as_shape(base)
    at_width = widths[0] if len(set(widths)) == 1 else start.width
    at_depth = depths[0] if len(set(depths)) == 1 else start.depth
    deeper = [Shape(at_width, d) for d in depths if len(set(depths)) > 1]
    wider = [Shape(w, at_depth) for w in widths if len(set(widths)) > 1]
    return [*deeper, *wider], start
