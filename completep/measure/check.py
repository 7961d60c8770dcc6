"""`check`: the coordinate check as one call, from a factory to a verdict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import polars as pl

from completep import paper
from completep.config import Shape, as_shape
from completep.errors import UserError
from completep.measure.figures import coordinate_figures
from completep.measure.grid import Coordinates, coordinate_check
from completep.measure.subject import Batches, Setting, Source
from completep.measure.verdict import Finding, culprits, judge_coordinates, overall
from completep.measure.words import Axis, Progress, Word, quiet
from completep.report.document import Cell, Document, Json, Part, Table, Verdict
from completep.report.result import Result
from completep.rules.table import Role, Rules, as_rules, display_name

GPT = "completep.model.gpt:gpt"


@dataclass(frozen=True, eq=False, repr=False)
class Check(Result):
    """The verdict of a coordinate check, and everything it rests on."""

    coordinates: Coordinates
    findings: tuple[Finding, ...]

    slug = "check"

    @property
    def verdict(self) -> Word:
        return overall(self.findings)

    @cached_property
    def by_rules(self) -> dict[str, list[Finding]]:
        """The findings of each parameterization, by its key."""
        grouped: dict[str, list[Finding]] = {}
        for f in self.findings:
            grouped.setdefault(f.rules, []).append(f)
        return grouped

    @property
    def axes(self) -> list[Axis]:
        return list(dict.fromkeys(f.axis for f in self.findings))

    def document(self) -> Document:
        parts: list[Part] = []
        for rules, findings in self.by_rules.items():
            word = overall(findings)
            whys = dict.fromkeys(f.why for f in findings if f.why)
            reasons = ", ".join(culprits(findings)[:4]) if word == "FAIL" else "; ".join(whys)
            each = ", ".join(f"desideratum {d} {w}" for d, w in _by_desideratum(findings).items())
            why = f": {reasons}" if reasons else ""
            parts.append(Verdict(word, f"{display_name(rules)} ({each}){why}"))
        figures = [figure for axis in self.axes for figure in coordinate_figures(self.coordinates, self.findings, axis)]
        title = "Does training behave the same as the model grows?"
        return Document(title, (*parts, findings_table(self.findings), *figures), "completep check")

    def frames(self) -> Mapping[str, pl.DataFrame]:
        return {"stream": self.coordinates.stream, "roles": self.coordinates.roles}

    def to_json(self) -> Json:
        return {
            "verdict": self.verdict,
            "verdicts": {rules: overall(own) for rules, own in self.by_rules.items()},
            "desiderata": {rules: _by_desideratum(own) for rules, own in self.by_rules.items()},
            "culprits": {rules: culprits(own) for rules, own in self.by_rules.items()},
            "findings": [asdict(f) for f in self.findings],
        }


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row per quantity: slope, interval, allowed range, verdict; what failed comes first."""
    order = {"FAIL": 0, "INCONCLUSIVE": 1, "PASS": 2}
    rows: list[dict[str, Cell]] = []
    for f in sorted(findings, key=lambda f: order[f.word]):
        interval = f"{f.slope.low:+.2f} … {f.slope.high:+.2f}" if f.slope else ""
        rows.append(
            {
                "quantity": f.quantity, "rules": display_name(f.rules), "grown in": f.axis, "D": f.desideratum,
                "slope": f"{f.slope.value:+.2f}" if f.slope else "–", "90 % interval": interval,
                "allowed": f"{'' if f.least is None else f'{f.least:+.1f}'} … {f.most:+.1f}",
                "verdict": f"{f.word}: {f.why}" if f.why else f.word,
            }
        )  # fmt: skip
    return Table.of("Slopes: quantity ∝ size^slope", rows)


def _by_desideratum(findings: Sequence[Finding]) -> dict[int, Word]:
    return {d: overall(f for f in findings if f.desideratum == d) for d in sorted({f.desideratum for f in findings})}


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
    steps: int = paper.CHECK_STEPS,
    lr: float = paper.CHECK_LR,
    std: float = paper.CHECK_STD,
    eps: float = paper.EPS,
    weight_decay: float = 0.0,
    batch: int = paper.CHECK_BATCH,
    time: int = 128,
    workers: int | None = None,
    progress: Progress = quiet,
) -> Check:
    """Coordinate check: does training behave the same as the model grows, and if not, which role's rule is wrong?

    Args:
        factory: takes width and depth and returns a model, which is trained under `rules`; or returns (model,
            optimizer), which are checked as they are. A callable, or the text "package.module:factory" or
            "file.py:factory".
        depths: numbers of layers, at the base's width.
        widths: widths, at the base's depth.
        base: width and depth of the base; by default the smallest width and the smallest depth.
        rules: one parameterization or several, as objects or keys ("completep", "alpha=0.5").
        arguments: further arguments of the factory.
        names: what the factory calls width and depth, such as ("n_embd", "n_layer").
        roles: {name pattern: Role} for parameters whose role cannot be found.
        batches: step → (inputs, targets), if forward needs special inputs; by default Python's own source as bytes.
        seeds: number of seeds.
        steps: optimizer steps.
        lr: base learning rate.
        std: base init standard deviation.
        eps: base epsilon.
        weight_decay: base weight decay.
        batch: sequences per step.
        time: tokens per sequence.
        workers: processes; by default one per core.
        progress: called with (runs done, all runs, the run that just ended).
    """
    if seeds < 1:
        raise UserError(f"seeds={seeds}: must be at least 1", fix="give 3 or more")
    several = [rules] if isinstance(rules, (Rules, str)) else list(rules)
    shapes, start = grid_of_shapes(widths, depths, base)
    options = dict(arguments or {})
    if factory == GPT:
        options = {"vocabulary": 256} | options
    source = Source(factory, start, options, names, roles, batches)
    setting = Setting(std, lr, eps, weight_decay, batch, time, steps)
    coordinates = coordinate_check(
        source, [as_rules(r) for r in several], shapes, setting, seeds=range(seeds), workers=workers, progress=progress
    )
    return Check(coordinates, tuple(judge_coordinates(coordinates)))


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
