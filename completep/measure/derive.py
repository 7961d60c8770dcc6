"""`derive`: the rule of parameters that the table does not know, measured over widths, depths and further axes."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import polars as pl
import torch
from torch import nn

from completep import paper
from completep.anatomy.blocks import matches
from completep.anatomy.examine import examine
from completep.anatomy.names import named_parameters
from completep.anatomy.roles import Anatomy, NoRoleError
from completep.anatomy.trace import call, find_logits
from completep.config import Shape, as_shape
from completep.errors import UserError, some
from completep.measure.check import GPT, MOST_SEEDS, grid_of_shapes
from completep.measure.confirm import confirm as confirmed_by_loss
from completep.measure.curves import Transfer
from completep.measure.kept import Kept
from completep.measure.solving import SETTINGS, Exponent, confirmed, solve, undecided
from completep.measure.subject import Batches, Setting, Source, random_batch, speaking_of
from completep.measure.survey import Limit, Survey, survey
from completep.measure.words import Progress, Word, quiet, worst
from completep.report.document import Cell, Document, Json, Part, Table, Text, Verdict
from completep.report.result import Result
from completep.rules.measured import MeasuredRow, MeasuredRules
from completep.rules.table import ONE, NamedRow, Power, Role, Rule, Rules, as_rules

LEAST_SIZES = 3
STEPS = 20
NAMES = {"init": "init_std", "learning rate": "lr", "epsilon": "eps"}  # in a rule


@dataclass(frozen=True, eq=False, repr=False)
class Derivation(Result):
    """The exponents of every parameter that was asked for, and what they rest on."""

    exponents: tuple[Exponent, ...]
    family: Rules  # what all other parameters follow
    roles: Mapping[str, Role]  # what parameters without a role were taken for
    gauges: Mapping[str, tuple[str, int]]  # further axis → a parameter and its dimension that grow with it
    limit: Limit
    tensors: pl.DataFrame
    later: pl.DataFrame | None  # after some training steps
    source: Mapping[str, object]
    confirmed: Transfer | None = None  # at the level of the loss, if that was asked for

    slug = "derive"

    @property
    def verdict(self) -> Word:
        """PASS if every exponent is known, and the loss does not contradict them."""
        words = [e.word for e in self.exponents]
        return worst(words if self.confirmed is None else [*words, self.confirmed.word])

    @cached_property
    def by_parameter(self) -> dict[str, list[Exponent]]:
        grouped: dict[str, list[Exponent]] = {}
        for e in self.exponents:
            grouped.setdefault(e.parameter, []).append(e)
        return grouped

    @property
    def measured(self) -> MeasuredRules:
        """The rows whose exponents are all known, as a file holds them."""
        known = {
            name: exponents
            for name, exponents in self.by_parameter.items()
            if worst(e.word for e in exponents) == "PASS"
        }
        if not known:
            what = f"no rule could be derived: {self._open()[0]}"
            raise UserError(what, fix="see the reason of every open exponent; give what it asks for")
        rows = tuple(_row(name, exponents, self.roles.get(name)) for name, exponents in known.items())
        return MeasuredRules(self.family.key, rows, self.gauges, self.source)

    @property
    def rules(self) -> Rules:
        """For `parametrize`, `explain`, `audit` and `check`. Parameters with an open exponent have no row."""
        return self.measured.rules()

    def save(self, path: Path | str) -> Path:
        """Write the rules to a file for `load_rules`. A derivation with an open exponent is not saved."""
        if self._open():
            what = f"{len(self._open())} exponents are open, for instance {self._open()[0]}"
            raise UserError(what, fix="give what it asks for, or name only the parameters that are decided")
        if self.verdict != "PASS":
            raise UserError(
                f"the loss does not confirm these rules: {self._loss()}", fix="see the reason that it gives"
            )
        return self.measured.save(path)

    def _open(self) -> list[str]:
        return [f"{e.setting} of {e.parameter} in {e.axis}: {e.why}" for e in self.exponents if e.value is None]

    def _loss(self) -> str:
        """What training says, in words."""
        if self.confirmed is None:
            return ""
        t = self.confirmed
        larger = t.shapes[0]
        drift = larger.drift_interval
        reach = "" if drift is None else f" ({drift.low:+.2f} to {drift.high:+.2f})"
        sizes = f"from {t.base.width} × {t.base.depth} to {larger.shape.width} × {larger.shape.depth}"
        why = f"; {t.why}" if t.why else ""
        return (
            f"{t.word}: the best multiple of its learning rate moves by {larger.drift:+.2f} octaves{reach} {sizes}{why}"
        )

    def document(self) -> Document:
        parts: list[Part] = [Verdict(self.verdict, self._sentence())]
        parts += [Text(line) for line in self._open()]
        parts += [Text(f"At the level of the loss, {self._loss()}.")] if self.confirmed is not None else []
        return Document("Which rule does it need?", (*parts, self._table(), Text(str(self.limit))), "completep derive")

    def _sentence(self) -> str:
        done = sum(worst(e.word for e in exponents) == "PASS" for exponents in self.by_parameter.values())
        return f"{done} of {len(self.by_parameter)} parameters have a rule that the measurement decides"

    def _table(self) -> Table:
        rows: list[dict[str, Cell]] = []
        for parameter, exponents in self.by_parameter.items():
            for axis in dict.fromkeys(e.axis for e in exponents):
                by_setting = {e.setting: e for e in exponents if e.axis == axis}
                word = worst(e.word for e in by_setting.values())
                rows.append(
                    {"parameter": parameter, "in": axis, "verdict": word, **{s: _cell(by_setting[s]) for s in SETTINGS}}
                )
        notes = (
            "A setting is proportional to size^exponent: the exponent, then what was measured at init, and → after "
            "training steps.",
            "Weight decay has the learning rate's exponent with the other sign.",
        )
        return Table.of("Exponents", rows, notes)

    def frames(self) -> Mapping[str, pl.DataFrame]:
        return {"tensors": self.tensors} | ({} if self.later is None else {"later": self.later})

    def _fields(self) -> Json:
        exponents = [asdict(e) | {"word": e.word} for e in self.exponents]
        fields: Json = {"verdict": self.verdict, "exponents": exponents, "source": dict(self.source)}
        fields |= {"rho": self.limit.rho}
        return fields if self.confirmed is None else fields | {"loss": asdict(self.confirmed)}


def _cell(e: Exponent) -> str:
    if e.measured is None:
        return "?"
    value = "?" if e.value is None else f"{e.value:+g}" if e.value else "0"
    reach = (e.measured.high - e.measured.low) / 2
    later = "" if e.later is None else f" → {e.later.value:+.2f}"
    return f"{value}  ({e.measured.value:+.2f}±{reach:.2f}{later})"


def _row(name: str, measured: Sequence[Exponent], role: Role | None) -> MeasuredRow:
    exponents: dict[str, dict[str, float]] = {}
    intervals: dict[str, dict[str, tuple[float, float, float]]] = {}
    for e in measured:
        assert e.value is not None
        exponents.setdefault(NAMES[e.setting], {})[e.axis] = e.value
        if (used := e.used) is not None:
            intervals.setdefault(NAMES[e.setting], {})[e.axis] = (used.value, used.low, used.high)
    return MeasuredRow(name, exponents, intervals, role)


def derive(
    factory: "str | Callable[..., object]" = GPT,
    *,
    depths: Sequence[int] = (),
    widths: Sequence[int] = (),
    axes: "Mapping[str, Sequence[int]] | None" = None,
    parameters: "Sequence[str] | str" = (),
    base: "Shape | tuple[int, int] | None" = None,
    rules: "Rules | str" = "completep",
    arguments: "Mapping[str, object] | None" = None,
    names: tuple[str, str] = ("width", "depth"),
    roles: "Mapping[str, Role] | None" = None,
    batches: "str | Batches | None" = None,
    seeds: int = 3,
    steps: int = STEPS,
    lr: float = paper.CHECK_LR,
    std: float = paper.CHECK_STD,
    batch: int = 16,
    time: int = 16,
    workers: int | None = None,
    progress: Progress = quiet,
    keep: "Path | str | None" = None,
    confirm: "Shape | tuple[int, int] | None" = None,
) -> Derivation:
    """Measure how learning rate, epsilon, init and weight decay of a parameter must change with the size of the model.

    One backward pass at every size gives the exponents at init. A few training steps show whether they stay. All other
    parameters follow `rules`. An exponent counts only if it is one multiple of 1/2 within its interval.

    Args:
        factory: takes width, depth and the further axes, and returns a model. A callable, or "package.module:factory".
        depths: at least three numbers of layers, at the base's width.
        widths: at least three widths, at the base's depth.
        axes: further arguments of the factory, at least three sizes each, the base's first: {"experts": (4, 8, 16)}.
        parameters: names or patterns, such as "layers.*.router.weight". By default those whose role cannot be found.
        base: width and depth of the base; by default the smallest width and the smallest depth.
        rules: what all other parameters follow.
        arguments: further arguments of the factory.
        names: what the factory calls width and depth, such as ("n_embd", "n_layer").
        roles: {name pattern: Role} for parameters whose role cannot be found and should not be measured.
        batches: number → (inputs, targets), if forward needs special inputs.
        seeds: number of seeds, at first; an interval that is too wide gets more.
        steps: training steps before the second measurement; 0 leaves it out.
        lr: base learning rate of these steps.
        std: base init standard deviation.
        batch: sequences per batch.
        time: tokens per sequence.
        workers: processes; by default one per core, or none where that is faster.
        progress: called with (done, total, what) after every measurement.
        keep: a folder for finished measurements. The same call continues from there if it was interrupted.
        confirm: width and depth of a larger model. It and the base are trained with several multiples of the learning
            rates that were derived; the best multiple must stay the same. This takes 42 short runs.
    """
    grown = {axis: tuple(map(int, sizes)) for axis, sizes in (axes or {}).items()}
    _refuse_short({names[0]: widths, names[1]: depths} | grown)
    shapes, start = _shapes(widths, depths, None if base is None else as_shape(base))
    constants = {axis: sizes[0] for axis, sizes in grown.items()}
    options = ({"vocabulary": 256} if factory == GPT else {}) | dict(arguments or {}) | constants
    source = Source(factory, start, options, names, roles, batches)
    setting = Setting(std, lr, batch=batch, time=time, steps=max(steps, 1))
    family = as_rules(rules)
    anatomy, guesses = _examine(source, setting)
    wanted = _wanted(anatomy, [parameters] if isinstance(parameters, str) else parameters, guesses)
    gauges = {axis: _gauge(source, axis, sizes, anatomy, setting) for axis, sizes in grown.items()}
    source = replace(source, roles={**guesses, **(roles or {})})
    kept = None if keep is None else Kept(Path(keep), source, setting)
    measure = partial(
        survey, source, shapes=shapes, setting=setting, further=grown, workers=workers, progress=progress, kept=kept
    )
    varied = [*(["width"] if len(set(widths)) > 1 else []), *(["depth"] if len(set(depths)) > 1 else []), *grown]
    run = Measurement(measure, family, wanted, varied, gauges, steps)
    exponents, first, late = run.decided(seeds)
    grid = {names[0]: list(widths), names[1]: list(depths), **{a: list(s) for a, s in grown.items()}}
    about = _about(factory, grid, start, setting, first, steps)
    taken = {name: role for name, role in guesses.items() if name in wanted}
    later = None if late is None else late.tensors
    shown = {axis: gauge for axis, gauge in gauges.items() if gauge is not None}
    derivation = Derivation(tuple(exponents), family, taken, shown, first.limit, first.tensors, later, about)
    if confirm is None or worst(e.word for e in exponents) != "PASS":
        return derivation
    larger, train = as_shape(confirm, "confirm"), partial(confirmed_by_loss, workers=workers, progress=progress)
    return replace(derivation, confirmed=train(source, derivation.rules, wanted, larger, setting, kept=kept))


def _shapes(widths: Sequence[int], depths: Sequence[int], base: Shape | None) -> tuple[list[Shape], Shape]:
    """(the shapes along width and depth, the base)."""
    if base is None and not (widths and depths):
        missing = "depths" if widths else "widths" if depths else "widths and depths"
        raise UserError(f"no base is given, and no {missing} to take it from", fix="base=(64, 2)")
    if base is not None and not widths and not depths:
        return [], base
    return grid_of_shapes(widths or [base.width if base else 0], depths or [base.depth if base else 0], base)


def _refuse_short(sizes: Mapping[str, Sequence[int]]) -> None:
    for axis, several in sizes.items():
        if several and len(set(several)) < LEAST_SIZES:
            what = f"{axis} has {len(set(several))} sizes ({', '.join(map(str, several))}): an exponent needs three"
            raise UserError(what, fix=f"give at least {LEAST_SIZES}, each twice the one before")
    if not any(len(several) for several in sizes.values()):
        raise UserError("no axis is varied", fix="give widths, depths or axes, with at least three sizes each")


def _examine(source: Source, setting: Setting) -> tuple[Anatomy, dict[str, Role]]:
    """(the anatomy of the base, the roles that parameters without one are taken for)."""
    with speaking_of("the base"):
        base = source.base_model()
        example = random_batch(source, base, setting, 0)[0] if source.batches is not None else None
        try:
            return examine(base.eval(), example=example, patterns=source.roles), {}
        except NoRoleError as error:
            guesses = error.guesses
        again = source.base_model().eval()
        return examine(again, example=example, patterns={**guesses, **(source.roles or {})}), guesses


def _wanted(anatomy: Anatomy, patterns: Sequence[str], guesses: Mapping[str, Role]) -> list[str]:
    """The templates to measure."""
    named = [t for t in anatomy.parts if matches(t, patterns) or t in patterns]
    for pattern in patterns:
        if not any(matches(t, (pattern,)) or t == pattern for t in anatomy.parts):
            what = f"parameters: nothing matches {pattern!r}"
            raise UserError(what, fix=f"names look like: {some(list(anatomy.parts), 4)}")
    wanted = list(dict.fromkeys([*guesses, *named]))
    if not wanted:
        what = "the table has a rule for every parameter of this model"
        raise UserError(what, fix=f"name those to measure: parameters=['{next(iter(anatomy.parts))}']")
    return wanted


def _gauge(
    source: Source, axis: str, sizes: Sequence[int], anatomy: Anatomy, setting: Setting
) -> tuple[str, int] | None:
    """A parameter and its dimension that grow with a further axis. None if no shape shows it, but the output does."""
    models = [_built(replace(source, grown={axis: size})) for size in sizes]
    shapes = [{anatomy.template(n): tuple(p.shape) for n, p in named_parameters(m)} for m in models]
    for template, first in shapes[0].items():
        for dimension, length in enumerate(first):
            here = [s[template][dimension] if template in s else 0 for s in shapes]
            if all(n * sizes[0] == length * size for n, size in zip(here, sizes, strict=True)):
                return template, dimension
    if shapes[0] == shapes[-1] and _same_output(models[0], models[-1], source, setting):
        what = f"the model with {axis}={sizes[-1]} is the same as the one with {axis}={sizes[0]}"
        raise UserError(f"{what}: the factory does not use {axis}", fix="give an argument that changes the model")
    return None


def _built(source: Source) -> nn.Module:
    made = source.make(source.base)
    model = made[0] if isinstance(made, tuple) else made
    if not isinstance(model, nn.Module):
        raise UserError(f"the factory returned {type(model).__name__}", fix="let it return a model")
    return model.float().eval()


@torch.no_grad()
def _same_output(one: nn.Module, other: nn.Module, source: Source, setting: Setting) -> bool:
    other.load_state_dict(one.state_dict())
    inputs = random_batch(source, one, setting, 0)[0]
    first, second = find_logits(call(one, inputs)), find_logits(call(other, inputs))
    return first is not None and second is not None and torch.equal(first, second)


@dataclass(frozen=True)
class Measurement:
    """The surveys of a derivation, one after the other: starting sizes, then rates, then training steps."""

    measure: Callable[..., Survey]  # rules → survey
    family: Rules
    wanted: Sequence[str]
    axes: Sequence[str]
    gauges: Mapping[str, tuple[str, int] | None]
    steps: int

    def decided(self, seeds: int) -> tuple[list[Exponent], Survey, Survey | None]:
        """With more seeds until every interval is narrow enough, or there are MOST_SEEDS times as many."""
        first = self._survey({}, range(seeds), None)
        starts = [e for e in solve(first, first, self.wanted, self.family.key, self.axes) if e.setting == "init"]
        again = (
            self._survey(self._powers(starts), range(seeds), first.limit) if any(e.estimate for e in starts) else first
        )
        used = seeds
        while undecided(exponents := self._solve(first, again)) and used < MOST_SEEDS * seeds:
            more = range(used, used + seeds)
            further = self._survey({}, more, first.limit)
            both = again is first
            again = again.joined(further if both else self._survey(self._powers(starts), more, first.limit))
            first, used = again if both else first.joined(further), used + seeds
        if not self.steps:
            return exponents, first, None
        powers, used = self._powers(exponents), seeds
        late = self._survey(powers, range(seeds), first.limit, self.steps)
        while (
            undecided(settled := confirmed(exponents, late, self.family.key, self.steps)) and used < MOST_SEEDS * seeds
        ):
            late = late.joined(self._survey(powers, range(used, used + seeds), first.limit, self.steps))
            used += seeds
        return settled, first, late

    def _solve(self, first: Survey, again: Survey) -> list[Exponent]:
        return solve(first, again, self.wanted, self.family.key, self.axes)

    def _powers(self, exponents: Sequence[Exponent]) -> dict[str, dict[str, dict[str, float]]]:
        """parameter → setting → axis → exponent, as far as it is known."""
        powers: dict[str, dict[str, dict[str, float]]] = {}
        for e in exponents:
            powers.setdefault(e.parameter, {}).setdefault(NAMES[e.setting], {})[e.axis] = e.estimate
        return powers

    def _survey(
        self, powers: Mapping[str, Mapping[str, Mapping[str, float]]], seeds: range, limit: Limit | None, steps: int = 0
    ) -> Survey:
        named = []
        for name in self.wanted:
            lr, eps, std = (Power.of(powers.get(name, {}).get(setting, {})) for setting in ("lr", "eps", "init_std"))
            named.append(NamedRow(name, Rule(std, lr, ONE / lr, eps, by_model=True)))
        axes = tuple((axis, *gauge) for axis, gauge in self.gauges.items() if gauge is not None)
        rules = replace(self.family, named=tuple(named), axes=axes)
        return self.measure([rules], seeds=seeds, limit=limit, steps=steps)


def _about(
    factory: object, grid: Mapping[str, object], base: Shape, setting: Setting, first: Survey, steps: int
) -> dict[str, object]:
    from completep import __version__

    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", type(factory).__name__)
    return {
        "factory": factory if isinstance(factory, str) else f"{module}:{name}",
        "grid": {axis: sizes for axis, sizes in grid.items() if sizes},
        "base": [base.width, base.depth],
        "seeds": first.tensors["seed"].n_unique(),
        "steps": steps,
        "settings": {"std": setting.std, "lr": setting.lr, "batch": setting.batch, "time": setting.time},
        "limit": {"rho": first.limit.rho, "scale": first.limit.scale},
        "versions": {"completep": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
