"""From a survey to findings: which tensor has which exponent wrong, measured and expected.

A quantity that should not depend on the size is fitted as size^slope, with a level per seed. Its interval must lie
within BAND of 0. BAND was set on the reference decoder (docs/check.md) and is the same for every model.

The forward pass comes first. A wrong starting value or multiplier also changes the gradients of other tensors, so the
survey is repeated on a copy where it is put right. What is still wrong there is the learning rate or epsilon itself.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import polars as pl

from completep.measure.survey import Repairs, Survey
from completep.measure.tensors import TIED
from completep.measure.words import Axis, Word, worst
from completep.report.document import Cell
from completep.rules.table import Column, Role
from completep.stats import Slope, log_slope

AXES: tuple[Axis, ...] = ("width", "depth")
BAND = 0.12
SGD_BAND = 0.2  # SGD's pull goes as the square of the gradient, and so does its deviation
LATE_BAND = 0.4  # for gradients that are zero until another tensor has moved, and for vectors with few entries
EXACT = 0.02  # for quantities that are typed numbers
EXACT_SCALE = 0.1  # for the scale on q·k, which is measured on small random numbers
RISE = 0.2  # of the stream and the logits at init
ONE_BLOCK = 0.2  # of one block relative to the median: two blocks against sixteen give about 0.05
LEAST_SHAPES = 3

SettingName = Literal[
    "learning rate", "epsilon", "weight decay", "init", "multiplier", "attention", "size", "one block"
]
PER_TENSOR: tuple[SettingName, ...] = ("learning rate", "epsilon", "weight decay", "init", "multiplier", "attention")
Key = tuple[str, SettingName]
BLAME: tuple[SettingName, ...] = (
    "multiplier", "attention", "init", "one block", "learning rate", "weight decay", "epsilon", "size",
)  # fmt: skip
EXPECTED = {
    "init": "expected_std",
    "multiplier": "expected_multiplier",
    "learning rate": "expected_lr",
    "epsilon": "expected_eps",
    "weight decay": "expected_decay",
}
WIDE = "the interval exceeds the allowed range: give more seeds"


@dataclass(frozen=True)
class Finding:
    """One exponent of one tensor along one axis."""

    rules: str  # key
    axis: Axis
    tensor: str  # template; or "stream", "logits"
    setting: SettingName
    exponent: Slope | None  # of the setting, as measured; None where it cannot be seen
    expected: float
    word: Word
    why: str = ""
    role: str | None = None
    follows: str = ""  # the tensor whose fault explains this one

    @property
    def deviation(self) -> float:
        return float("nan") if self.exponent is None else self.exponent.value - self.expected

    @property
    def cell(self) -> str:
        """The measured exponent and the expected one."""
        if self.exponent is None:
            return self.why
        mark = {"FAIL": " ✗", "INCONCLUSIVE": " ?"}.get(self.word, "")
        return f"{round(self.exponent.value, 2) + 0.0:+.2f} ({round(self.expected, 2) + 0.0:g}){mark}"

    def __str__(self) -> str:
        ratio = "m_N" if self.axis == "width" else "m_L"
        if self.exponent is None:
            return f"{self.tensor}: {self.setting} {self.why}"
        if self.setting in ("size", "one block"):
            return f"{self.tensor}: {self.why}"
        verb = "falls" if self.exponent.value < 0 else "grows"
        flat = abs(self.exponent.value) < 0.1 and round(self.expected, 2) != 0
        is_as = "is constant" if flat else f"{verb} as {ratio}^{self.exponent.value:+.2f}"
        names = {"init": "init", "attention": "attention scale", "weight decay": "learning rate × weight decay"}
        name = names.get(self.setting, self.setting)
        return f"{self.tensor}: {name} {is_as}, should be {_power(ratio, self)}"


def _power(ratio: str, f: Finding) -> str:
    expected = round(f.expected, 2)
    return "constant" if expected == 0 else f"{ratio}^{expected:+g}"


def judge_survey(first: Survey, repaired: Survey | None = None) -> list[Finding]:
    """Every exponent of every tensor. `repaired` is the survey after `repairs_for` of the first."""
    findings = []
    for rules in first.tensors["rules"].unique(maintain_order=True):
        for axis in AXES:
            tensors = first.along(first.tensors, axis, rules)
            if tensors[axis].n_unique() > 1:
                again = tensors if repaired is None else repaired.along(repaired.tensors, axis, rules)
                states = first.along(first.states, axis, rules)
                attentions = first.along(first.attentions, axis, rules) if len(first.attentions) else first.attentions
                split = (repaired or first).parts
                parts = first.along(split, axis, rules) if len(split) else split
                rows, later = by_template(tensors), by_template(again)
                by_tensor = [*_findings(rules, axis, rows, later, parts), *_attentions(rules, axis, attentions)]
                multipliers = {t: _exponent(columns, axis, EXPECTED["multiplier"]) for t, columns in rows.items()}
                typed = {t: _typed_deviation(columns, axis) for t, columns in rows.items() if min(columns["lr"]) != 0}
                every = _seen_by_decay([*_folded(by_tensor), *_whole(rules, axis, states)], typed)
                findings += _explained(every, multipliers)
    return findings


Rows = Mapping[str, list[Any]]  # the columns of a frame: hundreds of small fits are slow on frames


def by_template(tensors: pl.DataFrame) -> dict[str, Rows]:
    """The rows of every tensor, in the order in which the tensors were measured."""
    parts = tensors.partition_by("template", as_dict=True, maintain_order=True)
    return {str(template): rows.to_dict(as_series=False) for (template,), rows in parts.items()}


def repairs_for(findings: Iterable[Finding]) -> Repairs:
    """What to multiply the weights by, where a starting value or multiplier is wrong."""
    wrong = [f for f in findings if f.word == "FAIL" and f.setting in ("init", "multiplier") and f.exponent]
    return {(f.rules, f.axis, f.tensor): -f.deviation for f in wrong}


def _findings(
    rules: str, axis: Axis, first: Mapping[str, Rows], again: Mapping[str, Rows], parts: pl.DataFrame
) -> Iterator[Finding]:
    columns: list[tuple[SettingName, bool, str, str | None, float]] = [  # …, after repairs, shown by, divided by, band
        ("init", False, "gain", "expected_gain", BAND),
        ("learning rate", True, "pull", None, BAND),
        ("epsilon", True, "eps_ratio", None, BAND),
        ("weight decay", False, "decay", "expected_decay", EXACT),
    ]
    for template, rows in first.items():
        role, kept = rows["role"][0], rows["kept"][0]
        grows = kept and _growth(rows, axis) is not None
        if max(rows["lr"]) == 0 and not template.endswith(TIED):
            expected, why = _exponent(rows, axis, "expected_lr"), "is 0: it is not trained"
            yield Finding(rules, axis, template, "learning rate", None, expected, "INCONCLUSIVE", why, role)
        for setting, repaired, value, divisor, band in columns:
            if (setting == "init" and kept) or (repaired and grows):  # `unchecked` says if its start grows
                continue
            if setting == "init" and template.endswith(TIED):  # its starting values are the embedding's
                setting = "multiplier"
            measured = again[template] if repaired else rows
            sgd = value == "pull" and rows["column"][0] == Column.SGD
            start = _random_sum(rows, axis) * {"pull": 2 if sgd else 1, "eps_ratio": -1}.get(value, 0)
            allowed = SGD_BAND if sgd else band
            least, most = start - allowed, start + allowed
            mixed = repaired and _is_mixed(rows, axis)
            if mixed:
                least, most = min(2 * start, 0.0) - allowed, max(2 * start, 0.0) + allowed
            if repaired and (any(rows["late"]) or kept):  # what has moved may be aligned already
                least, most = min(least, min(start, 0.0) - LATE_BAND), max(most, max(start, 0.0) + LATE_BAND)
                start = 0.0
            values = _over(measured[value], measured[divisor]) if divisor else measured[value]
            judged = _judge(measured, values, axis, least, most)
            if mixed and value == "pull" and (by_part := _judge_parts(parts, template, axis, sgd=sgd)) is not None:
                judged, start, mixed = by_part, 0.0, False
            if judged is None:
                continue
            slope, word, why = judged
            if mixed and word != "FAIL":  # `unchecked` says so
                continue
            expected = _exponent(rows, axis, EXPECTED[setting])
            yield Finding(rules, axis, template, setting, _shifted(slope, expected - start), expected, word, why, role)
        if "*" in template and not kept and (judged := _judge(rows, rows["spread"], axis, None, ONE_BLOCK)) is not None:
            slope, word, why = judged
            why = f"one block differs from the others, the more the larger the {axis}" if word == "FAIL" else why
            yield Finding(rules, axis, template, "one block", slope, 0.0, word, why, role)


def _over(values: list[float | None], divisors: list[float | None]) -> list[float | None]:
    """Value by value; None where one of them does not exist."""
    pairs = zip(values, divisors, strict=True)
    return [None if a is None or b is None else a / b if b else a * math.inf for a, b in pairs]


def _random_sum(rows: Rows, axis: Axis) -> float:
    """The exponent by which the gradient of an output that does not grow is smaller at init than in training.

    A router, keys and values in a fixed number of heads, and a bottleneck act on the whole width. So their gradient is
    a sum over it: a random one at init, whose exponent is smaller by exactly a half, and an aligned one in training.
    """
    return -max(0.0, _exponent(rows, axis, "lag")) / 2


def _is_mixed(rows: Rows, axis: Axis) -> bool:
    """True if only a part of the outputs grows, as in Mamba's x_proj: its gradient follows no single power."""
    return _is_partial(_exponent(rows, axis, "lag"))


def _is_partial(lag: float) -> bool:
    return 0.15 < lag < 0.85


def _judge_parts(parts: pl.DataFrame, template: str, axis: Axis, *, sgd: bool) -> tuple[Slope | None, Word, str] | None:
    """The pull of a matrix whose outputs are split, as a deviation from what is expected of each part.

    A wrong learning rate changes all parts alike, so one slope is fitted to all of them, with a level per part and
    seed. None if the model does not split the outputs, or if a part itself grows only in part.
    """
    own = parts.filter(pl.col("template") == template) if len(parts) else parts
    relative = []
    for rows in own.partition_by("part", maintain_order=True) if len(own) else ():
        columns = rows.to_dict(as_series=False)
        lag = _exponent(columns, axis, axis) - _exponent(columns, axis, "size")
        if _is_partial(lag):
            return None
        start = -max(0.0, lag) / 2 * (2 if sgd else 1)
        level = pl.col("seed") * own["part"].n_unique() + pl.col("part")
        relative.append(rows.select(axis, seed=level, value=pl.col("pull") / pl.col(axis) ** start))
    if not relative:
        return None
    points, allowed = pl.concat(relative).to_dict(as_series=False), SGD_BAND if sgd else BAND
    return _judge(points, points["value"], axis, -allowed, allowed)


def _attentions(rules: str, axis: Axis, rows: pl.DataFrame) -> Iterator[Finding]:
    """The scale on q·k: it goes with the size of a head, not with the model's."""
    for template, columns in by_template(rows).items() if len(rows) else ():
        scales = {**columns, "seed": [0] * len(columns["scale"])}
        if None in scales["scale"]:
            if len(set(scales["head_size"])) > 1:
                why = f"cannot be measured, and it sums over more numbers the larger the {axis}"
                yield Finding(rules, axis, template, "attention", None, 0.0, "INCONCLUSIVE", why)
            continue
        values = _over(scales["scale"], scales["expected"])
        if (judged := _judge(scales, values, axis, -EXACT_SCALE, EXACT_SCALE)) is not None:
            slope, word, why = judged
            expected = _exponent(scales, axis, "expected")
            yield Finding(rules, axis, template, "attention", _shifted(slope, expected), expected, word, why)


def _whole(rules: str, axis: Axis, states: pl.DataFrame) -> Iterator[Finding]:
    """The stream and the logits at init, as the model is."""
    columns = states.to_dict(as_series=False)
    for name in ("stream", "logits"):
        judged = _judge(columns, columns[name], axis, None, RISE)
        if judged is not None:
            slope, word, why = judged
            why = f"at init it grows as {axis}^{slope.value:+.2f}" if word == "FAIL" and slope else why
            yield Finding(rules, axis, name, "size", slope, 0.0, word, why)


def _judge(
    rows: Rows, values: Sequence[float | None], axis: Axis, least: float | None, most: float
) -> tuple[Slope | None, Word, str] | None:
    """(slope, word, why) of a value per row; None where the quantity does not exist at any size."""
    missing = [size for size, value in zip(rows[axis], values, strict=True) if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        return None, "INCONCLUSIVE", f"is nothing at {axis} {min(missing)}, but something at other sizes"
    sizes, y = np.array(rows[axis]), np.array(values, float)
    broken = sizes[~np.isfinite(y)]
    if len(broken) and broken.min() == sizes.min():
        return None, "INCONCLUSIVE", f"is not finite at {axis} {broken.min()} already: start smaller"
    if len(broken):
        return None, "FAIL", f"is not finite from {axis} {broken.min()} on"
    if (count := len(set(rows[axis]))) < LEAST_SHAPES:
        return None, "INCONCLUSIVE", f"cannot be fitted with {count} {axis}s: give at least {LEAST_SHAPES}"
    slope = log_slope(sizes, y, rows["seed"])
    if not (math.isfinite(slope.low) and math.isfinite(slope.high)):
        return None, "INCONCLUSIVE", "cannot be fitted: a value is 0"
    if slope.low > most or (least is not None and slope.high < least):
        return slope, "FAIL", ""
    if slope.high <= most and (least is None or slope.low >= least):
        return slope, "PASS", ""
    return slope, "INCONCLUSIVE", WIDE


def _exponent(rows: Rows, axis: Axis, column: str) -> float:
    return log_slope(rows[axis], np.array(rows[column], float), rows["seed"]).value


def _shifted(slope: Slope | None, by: float) -> Slope | None:
    return None if slope is None else Slope(slope.value + by, slope.low + by, slope.high + by)


# -- which fault explains which --------------------------------------------------------------------


def _folded(findings: list[Finding]) -> list[Finding]:
    """A multiplier may be in the starting values instead, as in the folded form: only their product is right or wrong.

    The logit multiplier of a tied readout may be in the gain of the final norm, and the scale on q·k in the matrix of
    the queries. The learning rate and ε have to follow: the pull and the ratio of ε show if they do.
    """
    failed = [f for f in findings if f.word == "FAIL" and f.exponent]
    starts = [f for f in failed if f.setting == "init"]
    changed: dict[Key, Finding] = {}
    for f in failed:
        if f.setting == "attention":
            holders = [s for s in starts if s.tensor.startswith(f"{f.tensor}.")]
        else:
            holders = [s for s in starts if f.tensor.endswith(TIED) and s.role and _scales_logits(Role(s.role))]
        held = [s for s in holders if abs(s.deviation + f.deviation) <= EXACT_SCALE]
        if len(held) == 1:
            changed |= {(x.tensor, x.setting): replace(x, word="PASS", why="folded") for x in (f, held[0])}
    return [changed.get((f.tensor, f.setting), f) for f in findings]


def _typed_deviation(rows: Rows, axis: Axis) -> float:
    """How far the exponent of a learning rate, as it is typed, is from the rules'. Other coordinates change it too."""
    return _exponent(rows, axis, "lr") - _exponent(rows, axis, "expected_lr")


def _scales_logits(role: Role) -> bool:
    """True for the gain of the final norm."""
    return role.trait.acts_on == "logits" and not role.trait.matrix


def _seen_by_decay(findings: list[Finding], typed: Mapping[str, float]) -> list[Finding]:
    """Blame a learning rate whose own interval is too wide to decide, by its weight decay.

    This is done if lr × weight decay, which is exact, deviates by the same exponent as the learning rate that was set,
    and the measured pull does not contradict it. In other coordinates the learning rate that is set deviates too, but
    the pull does not.
    """
    decays = {f.tensor: f for f in findings if f.setting == "weight decay" and f.word == "FAIL" and f.exponent}
    changed = []
    for f in findings:
        decay = decays.get(f.tensor)
        if f.setting == "learning rate" and decay is not None and f.exponent is not None:
            deviation = decay.deviation
            agrees = f.exponent.low <= f.expected + deviation <= f.exponent.high or _same(f.deviation, deviation)
            if agrees and abs(deviation - typed.get(f.tensor, 0.0)) < EXACT:
                f = replace(f, word="FAIL", why="")
        changed.append(f)
    return changed


def _explained(findings: list[Finding], multipliers: Mapping[str, float]) -> list[Finding]:
    """Findings of one axis: multipliers told from starting values, and consequences marked as such.

    `multipliers` are the expected exponents of the multiplier on each tensor's product.
    """
    failed = {(f.tensor, f.setting): f for f in findings if f.word == "FAIL" and f.exponent}
    changed: dict[Key, Finding] = {}
    for (tensor, setting), f in failed.items():
        pull = failed.get((tensor, "learning rate"))
        if setting == "init" and pull is not None and _same(f.deviation, pull.deviation):
            # A multiplier scales output and gradient alike; a starting value scales the output alone.
            expected = multipliers[tensor]
            exponent = _shifted(f.exponent, expected - f.expected)
            changed[tensor, "init"] = replace(f, setting="multiplier", exponent=exponent, expected=expected)
            changed |= _follow_multiplier(f, failed)
        if setting == "attention":
            changed |= _follow_attention(f, failed)
        decay = failed.get((tensor, "weight decay"))
        if setting == "learning rate" and decay is not None and _same(f.deviation, decay.deviation):
            changed[tensor, "weight decay"] = replace(decay, follows=tensor)  # λ is right, η is not
    return [changed.get((f.tensor, f.setting), f) for f in findings]


def _follow_multiplier(f: Finding, failed: Mapping[Key, Finding]) -> dict[Key, Finding]:
    """The gradients of all parameters of a module are proportional to the multiplier on its output."""
    changed: dict[Key, Finding] = {}
    for (tensor, setting), other in failed.items():
        shift = {"learning rate": f.deviation, "epsilon": -f.deviation}.get(setting)
        same_module = tensor.rpartition(".")[0] == f.tensor.rpartition(".")[0]
        if same_module and shift is not None and _same(other.deviation, shift):
            changed[tensor, setting] = replace(other, follows=f.tensor)
    return changed


def _follow_attention(f: Finding, failed: Mapping[Key, Finding]) -> dict[Key, Finding]:
    """The gradients of queries and keys are proportional to the scale on their product."""
    changed: dict[Key, Finding] = {}
    for (tensor, setting), pull in failed.items():
        eps = failed.get((tensor, "epsilon"))
        if setting != "learning rate" or eps is None or not _same(pull.deviation, -eps.deviation):
            continue
        if abs(pull.deviation - f.deviation) < 2 * BAND:
            changed[tensor, "learning rate"] = replace(pull, follows=f.tensor)
            changed[tensor, "epsilon"] = replace(eps, follows=f.tensor)
    return changed


def _same(a: float, b: float) -> bool:
    return abs(a - b) < BAND


def overall(findings: Iterable[Finding]) -> Word:
    return worst(f.word for f in findings)


def culprits(findings: Iterable[Finding]) -> list[Finding]:
    """What is wrong, without what follows from it: the forward pass first, the largest deviation first."""
    roots = [f for f in findings if f.word == "FAIL" and not f.follows]
    named = [f for f in roots if f.setting != "size"] or roots
    return sorted(named, key=lambda f: (BLAME.index(f.setting), -abs(f.deviation) if f.exponent else 0.0))


def noisy(findings: Iterable[Finding]) -> list[Axis]:
    """The axes along which more seeds could decide something that is open: it was measured, but not well enough."""
    wide = {f.axis for f in findings if f.word == "INCONCLUSIVE" and f.exponent is not None}
    return [axis for axis in AXES if axis in wide]


def unchecked(survey: Survey, findings: Collection[Finding]) -> Iterator[str]:
    """What the survey cannot see, by tensor and setting."""
    seen = {(f.tensor, f.setting) for f in findings}
    tensors = survey.tensors.filter(~pl.col("template").str.ends_with(TIED))
    roles = {template: Role(role) for template, role in tensors.select("template", "role").unique().iter_rows()}
    templates = tensors["template"].unique(maintain_order=True).to_list()
    mixed = [
        rows["template"][0] for rows in tensors.partition_by("template", maintain_order=True) if _mixed(survey, rows)
    ]
    for axis in AXES:
        if survey.tensors[axis].n_unique() == 1:
            yield f"{axis}, which was not varied"
    yield from _growing_starts(survey)
    if len(survey.untrained):
        yield f"{', '.join(survey.untrained)}, which no optimizer trains"
    by_part = {f.tensor for f in findings if f.axis == "width" and f.setting == "learning rate"}
    for what, names in {
        "learning rate and epsilon": [t for t in mixed if t not in by_part],
        "epsilon": [t for t in mixed if t in by_part],
    }.items():
        if names:
            yield f"{what} of {', '.join(names)} in width, since only a part of the outputs grows"
    without = [t for t in templates if (t, "learning rate") not in seen and t not in mixed]
    if without:
        yield f"learning rate and epsilon of {', '.join(without)}, which no gradient reaches"
    if not any(setting == "attention" for _, setting in seen):
        yield "attention, since no product of queries and keys was seen"
    adam = dict.fromkeys(tensors.filter(pl.col("column") == Column.ADAM)["template"])
    reached = [t for t in adam if t not in without and t not in mixed]
    yield from _missing("epsilon", reached, seen, "which is 0 or does not exist")
    yield from _missing("weight decay", [t for t in templates if roles[t].trait.decayed], seen, "which is 0")
    zero = [t for t in templates if (t, "init") not in seen and roles[t].trait.start == "random"]
    if zero:
        yield f"init of {', '.join(zero)}, which starts at zero"


def _missing(setting: SettingName, templates: Iterable[str], seen: Collection[Key], why: str) -> Iterator[str]:
    """The tensors whose setting was not seen; only the setting, if it was seen of none."""
    wanted = list(templates)
    without = [t for t in wanted if (t, setting) not in seen]
    if without:
        yield f"{setting}, {why}" if without == wanted else f"{setting} of {', '.join(without)}, {why}"


def _mixed(survey: Survey, rows: pl.DataFrame) -> bool:
    along = survey.along(rows, "width", rows["rules"][0])
    return along["width"].n_unique() > 1 and _is_mixed(along.to_dict(as_series=False), "width")


def _growing_starts(survey: Survey) -> Iterator[str]:
    """Constructors whose values depend on the size, as Mamba2's for A_log."""
    rules = survey.tensors["rules"][0]
    for axis in AXES:
        kept = survey.along(survey.tensors, axis, rules).filter(pl.col("kept"))
        for name, rows in by_template(kept).items():
            if (slope := _growth(rows, axis)) is not None:
                power = f"{axis}^{slope.value:+.2f}"
                yield f"{name} in {axis}, since the values that its constructor gives it change, as {power}"


def _growth(rows: Rows, axis: Axis) -> Slope | None:
    """How the starting values of one tensor change along an axis, if they clearly do."""
    judged = _judge(rows, rows["gain"], axis, -BAND, BAND)
    return judged[0] if judged is not None and judged[1] == "FAIL" else None


def exponents(survey: Survey) -> list[dict[str, Cell]]:
    """The exponents of every tensor as they are, one row per tensor and axis."""
    rules = survey.tensors["rules"][0]
    columns = {
        "learning rate": "lr", "pull": "pull", "epsilon": "eps", "epsilon / gradient": "eps_ratio",
        "lr × weight decay": "decay", "gain": "gain",
    }  # fmt: skip
    rows: list[dict[str, Cell]] = []
    for template in survey.tensors["template"].unique(maintain_order=True):
        for axis in AXES:
            tensor = survey.along(survey.tensors, axis, rules).filter(pl.col("template") == template)
            if tensor[axis].n_unique() > 1:
                cells = {name: _shown_exponent(tensor, axis, column) for name, column in columns.items()}
                rows.append({"tensor": template, "in": axis, **cells})
    return rows


def _shown_exponent(rows: pl.DataFrame, axis: Axis, column: str) -> str | None:
    if rows[column].null_count() or not rows[column].is_finite().all() or not (rows[column] > 0).all():
        return None
    slope = log_slope(rows[axis].to_numpy(), rows[column].to_numpy(), rows["seed"].to_numpy())
    reach = (slope.high - slope.low) / 2
    return f"{slope.value + 0.0:+.2f}" + (f" ± {reach:.2f}" if reach >= 0.05 else "")
