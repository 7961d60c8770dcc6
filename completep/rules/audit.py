"""`audit`: your own model and optimizer compared with the table, parameter by parameter.

Your tuned values (η, λ, ε, σ) are those that you pass, or those of the base's own optimizer, or those that explain the
settings of most roles: the odd one out is blamed. Multipliers are measured in the forward pass. If they are missing,
the audit checks whether the model is in the folded form before it reports them.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from completep.anatomy.forward import OwnFactors
from completep.anatomy.heads import named_heads
from completep.anatomy.names import named_parameters
from completep.anatomy.ratios import product
from completep.anatomy.roles import Anatomy
from completep.anatomy.specimen import Factory, on_meta, without_history
from completep.anatomy.trace import Example
from completep.config import Shape
from completep.errors import UserError
from completep.report.document import Cell, Document, Json, Part, Table, Text, Verdict
from completep.report.result import Result
from completep.rules.multipliers import Multiplier
from completep.rules.parametrize import Hints, resolve, with_folds
from completep.rules.placing import SizeFactorError
from completep.rules.scaling import Factors, Resolved, Scaling
from completep.rules.table import COMPLETEP, OptimizerKind, Role, Rules, alpha, as_rules, check_lr_of, optimizer_kind

Quantity = Literal["lr", "weight_decay", "eps", "init", "multiplier", "optimizer"]
Notes = tuple[str, ...]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
SWAPPED = "base and target are swapped: the factor is the inverse of what it should be"
NO_FACTORS = Factors(1.0, 1.0, 1.0, 1.0)
EXACT = 1e-3  # settings are typed numbers, so they agree or they do not
MEASURED = 2e-2  # multipliers are measured in float32 and through a soft-cap


@dataclass(frozen=True)
class Departure:
    """One setting that differs from the rules."""

    name: str
    role: str
    quantity: Quantity
    expected: float
    found: float
    cause: str = ""

    @property
    def factor(self) -> float:
        return self.found / self.expected if self.expected else math.inf


@dataclass(frozen=True, repr=False)
class Audit(Result):
    """What departs from the rules."""

    slug = "audit"
    rules: str  # key
    name: str  # of the rules
    departures: tuple[Departure, ...]
    parameters: int
    tuned: Mapping[str, float]  # the base values that were used
    notes: Notes
    unchecked: Notes = ()  # what could not be compared

    @property
    def passed(self) -> bool:
        return self.verdict == "PASS"

    @property
    def verdict(self) -> Literal["PASS", "FAIL", "INCONCLUSIVE"]:
        """INCONCLUSIVE if nothing departs, but not everything could be checked."""
        return "FAIL" if self.departures else "INCONCLUSIVE" if self.unchecked else "PASS"

    def document(self) -> Document:
        count = f"{len(self.departures)} settings depart" if len(self.departures) != 1 else "1 setting departs"
        sentences = {
            "PASS": f"every setting is as {self.name} prescribes",
            "FAIL": f"{count} from {self.name}",
            "INCONCLUSIVE": f"what could be checked is as {self.name} prescribes, but not everything could be",
        }
        tuned = ", ".join(f"{k} {v:.4g}" for k, v in self.tuned.items())
        facts = f"Compared {self.parameters} parameters with {self.name}. Base values: {tuned}."
        parts: list[Part] = [Verdict(self.verdict, sentences[self.verdict]), Text(facts), *map(Text, self.notes)]
        parts += [Text(f"Not checked: {line}.") for line in self.unchecked]
        if self.departures:
            parts.append(Table.of("Departures", _rows(self.departures)))
        return Document(f"Audit against {self.name}", tuple(parts), kind="completep audit")

    def _fields(self) -> Json:
        rows = [{**asdict(d), "factor": d.factor} for d in self.departures]
        return {**asdict(self), "verdict": self.verdict, "passed": self.passed, "departures": rows}


def _rows(departures: Sequence[Departure]) -> list[dict[str, Cell]]:
    """One row for all departures of one kind, over all blocks."""
    groups: dict[tuple[str, ...], list[Departure]] = {}
    for d in departures:
        actual = "" if d.quantity == "init" else f"{d.found:.4g}"  # measured stds all differ
        groups.setdefault((d.role, d.quantity, f"{d.expected:.4g}", actual, d.cause), []).append(d)
    return [
        {
            "parameters": group[0].name + (f" (+{len(group) - 1} more)" if len(group) > 1 else ""),
            "role": group[0].role,
            "setting": group[0].quantity,
            "expected": group[0].expected,
            "found": group[0].found,
            "off by ×": group[0].factor,
            "likely cause": group[0].cause,
        }
        for group in groups.values()
    ]


def audit(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    base: "Callable[[], nn.Module | tuple[nn.Module, Optimizers]] | Shape",
    rules: Rules | str = COMPLETEP,
    lr: float | None = None,
    weight_decay: float | None = None,
    eps: float | None = None,
    std: float | None = None,
    lr_of: Mapping[str, float] | None = None,
    check_init: bool = True,
    roles: Mapping[str, Role] | None = None,
    writers: Sequence[str] | None = None,
    example: Example | None = None,
    specimen: Factory | nn.Module | None = None,
) -> Audit:
    """Compare your model and optimizer with what `rules` prescribe.

    A base factory is called twice, as in `parametrize`; then copies of the base and of your model are run twice each.

    Args:
        model: your model, as you would train it. The arguments that are not listed here are those of `parametrize`.
        optimizer: its optimizer, or several, such as [muon, adamw]. Then the base must return its own ones.
        base: a factory that returns the base model, or better (model, optimizer): then the tuned values are read from
            that optimizer, parameter by parameter. Or a Shape.
        lr: your tuned base learning rate. If you leave it out, like the next three, it is read from the base's
            optimizer, or else it is the value that explains the settings of most roles. Then a factor that all
            parameters have in common cannot be seen, and the verdict is INCONCLUSIVE instead of PASS.
        weight_decay: your tuned base weight decay.
        eps: your tuned base epsilon.
        std: your tuned base init standard deviation.
        lr_of: your tuned multipliers of the learning rate by role, as in `param_groups`. If the base's own optimizer is
            there to be read, it has them already.
        check_init: compare starting values as well. Switch it off for a trained model.
    """
    for name, value in {"lr": lr, "weight_decay": weight_decay, "eps": eps, "std": std}.items():
        least = 0.0 if name in ("weight_decay", "eps") else 1e-30
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and value >= least):
            raise UserError(
                f"{name}={value!r} is not a base value", fix=f"give the {name} that you tuned, or leave it out"
            )
    optimizers = _several(optimizer)
    with_optimizer = _BaseWithOptimizer(base) if callable(base) and not isinstance(base, (Shape, nn.Module)) else None
    hints = Hints(roles, writers, example, specimen)
    try:
        scaling, own_factors = resolve(model, with_optimizer or base, rules, hints)  # type: ignore[arg-type]
    except SizeFactorError as error:
        return _stream_is_scaled(error, as_rules(rules))
    tuned = {"lr": lr, "weight_decay": weight_decay, "eps": eps, "std": std}
    at_base = {} if with_optimizer is None else with_optimizer.settings(scaling.anatomy)
    if len(optimizers) > 1 and (not at_base or any(v is not None for q, v in tuned.items() if q != "std")):
        what = f"{len(optimizers)} optimizers have no base values in common"
        raise UserError(what, fix="let base return (model, [optimizers]), and pass no lr, weight_decay or eps")
    check_lr_of(lr_of or {}, {r.role for r in scaling.parameters.values()})
    subject = _Subject(scaling, _settings(scaling.model, optimizers), at_base, tuned, lr_of or {}, check_init)
    lacking, wrong, unchecked = _missing_multipliers(scaling, own_factors)
    read, departures = subject.compare({})
    notes: Notes = ("base values are those of the base's own optimizer",) if at_base else ()
    bare = any(m.factor != 1.0 and not m.modules for m in scaling.multipliers)
    if wrong or bare:
        # The model is folded if every parameter that would hold a multiplier has the learning rate for it.
        read_folded, in_folded = subject.compare(lacking)
        holders = {name for name, c in lacking.items() if c != 1.0}
        if not holders or any(d.name in holders and d.quantity == "lr" for d in in_folded):
            departures = [*wrong, *departures]
        else:
            read, departures, unchecked = read_folded, in_folded, ()
            notes = (*notes, "read as folded: the multipliers are in the weights")
    explained = tuple(replace(d, cause=d.cause or subject.cause(d)) for d in departures)
    elected = [quantity for quantity, value in read.items() if subject.given[quantity] is None and value]
    if elected and not at_base:
        common = f"a factor on {', '.join(elected)} that all parameters have in common"
        why = "the base values were read from this optimizer: let base return (model, optimizer), or pass them"
        unchecked = (*unchecked, f"{common}, since {why}")
    if check_init and on_meta(scaling.model):
        unchecked = (*unchecked, "the starting values, which a model on the meta device does not have")
    unseen = tuple(dict.fromkeys((*scaling.anatomy.unchecked, *own_factors.unchecked, *unchecked)))
    return Audit(scaling.rules.key, scaling.rules.name, explained, len(scaling.parameters), read, notes, unseen)


def _several(optimizer: object) -> list[torch.optim.Optimizer]:
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers = [o for o in given if isinstance(o, torch.optim.Optimizer)]
    if not given or len(optimizers) < len(given):
        what = f"optimizer is a {type(optimizer).__name__}, not a torch optimizer"
        raise UserError(what, fix="pass the optimizer itself, or a list of optimizers")
    return optimizers


def _stream_is_scaled(error: SizeFactorError, rules: Rules) -> Audit:
    cause = "the multiplier acts on the stream itself: it belongs on the branch, x + c·f(x)"
    departure = Departure(error.table, "stream", "multiplier", error.at_base, error.here, cause)
    unchecked = ("everything else: first take that multiplier off the stream",)
    return Audit(rules.key, rules.name, (departure,), 0, {}, (), unchecked)


class _BaseWithOptimizer:
    """A base factory that may return (model, optimizer). Called as a factory it returns the model."""

    def __init__(self, factory: Callable[[], object]) -> None:
        self.factory = factory
        self.pair: tuple[nn.Module, Optimizers] | None = None

    def __call__(self) -> object:
        made = self.factory()
        if not isinstance(made, tuple):
            return made
        several = made[1] if len(made) == 2 and isinstance(made[1], (list, tuple)) else made[1:]
        if len(made) != 2 or not several or not all(isinstance(o, torch.optim.Optimizer) for o in several):
            kinds = ", ".join(type(m).__name__ for m in made)
            raise UserError(f"the base factory returned ({kinds})", fix="let it return a model, or (model, optimizer)")
        meta = on_meta(made[0])
        self.pair = made if meta else copy.deepcopy(made, without_history(made[0]))  # the proof overwrites the weights
        return made[0]

    def settings(self, anatomy: Anatomy) -> "dict[str, _Setting]":
        """By template, as the base is trained."""
        if self.pair is None:
            return {}
        model, optimizers = self.pair
        return {anatomy.template(name): setting for name, setting in _settings(model, _several(optimizers)).items()}


@dataclass(frozen=True)
class _Setting:
    """What one parameter is trained with."""

    lr: float
    weight_decay: float
    eps: float | None
    std: float | None  # measured; None on the meta device
    entries: int  # that it was measured on
    kind: OptimizerKind


def _settings(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, _Setting]:
    names = {id(p): name for name, p in named_parameters(model)}
    settings: dict[str, _Setting] = {}
    for kind, group in ((optimizer_kind(o), group) for o in optimizers for group in o.param_groups):
        lr = float(group.get("initial_lr", group["lr"]))  # a scheduler changes lr, but not initial_lr
        for p in group["params"]:
            if id(p) not in names:
                what = "the optimizer holds a parameter that is not in this model"
                raise UserError(what, fix="build the optimizer from the parameters of this model")
            std = None if p.is_meta else p.detach().float().std(unbiased=False).item()
            eps = None if kind.eps is None else group.get("eps")  # Muon's is part of its iteration
            settings[names[id(p)]] = _Setting(lr, group.get("weight_decay", 0.0), eps, std, p.numel(), kind)
    return settings


@dataclass(frozen=True)
class _Subject:
    """What is audited. `folds` below are the multipliers that the weights hold, by parameter."""

    scaling: Scaling
    settings: Mapping[str, _Setting]
    at_base: Mapping[str, _Setting]  # by template, from the base's own optimizer; empty if there is none
    given: Mapping[str, float | None]  # base values that you passed
    lr_of: Mapping[str, float]  # by role, on the learning rate that you passed or that is elected
    check_init: bool

    def compare(self, folds: Mapping[str, float]) -> tuple[dict[str, float], list[Departure]]:
        """(base values, departures)."""
        tuned = self.tuned(folds)
        return tuned, list(self.departures(tuned, folds))

    def expected(self, r: Resolved, folds: Mapping[str, float]) -> Factors:
        kind = self.settings[r.name].kind if r.name in self.settings else next(iter(self.settings.values())).kind
        column = kind.column
        return r.factors(self.scaling.rules.rule_of(r.template, r.role, column), column, folds.get(r.name, 1.0))

    def tuned(self, folds: Mapping[str, float]) -> dict[str, float]:
        """The base values: those that you passed, and else those that explain the settings of most roles."""
        unused = {"std"} if not self.check_init else set()
        unused |= {"eps"} if all(s.kind.eps is None for s in self.settings.values()) else set()
        tuned: dict[str, float] = {}
        for quantity, given in self.given.items():
            value = given if given is not None else None if quantity in unused else self.elected(quantity, folds)
            if value is not None:
                tuned[quantity] = value
        return tuned

    def elected(self, quantity: str, folds: Mapping[str, float]) -> float | None:
        """Every role has one vote, for the base value that most of its parameters have; the most votes win.

        Roles differ in how they scale, so a mistake in one of them is outvoted. A tie goes to the role that is named
        first in the table, the embedding.
        """
        tolerance = 0.05 if quantity == "std" else EXACT
        if quantity == "eps" and (shared_eps := self.global_eps(folds)) is not None:
            return shared_eps
        votes: dict[Role, float] = {}
        for role in Role:
            of_role = [r for name, r in self.scaling.parameters.items() if r.role is role and name in self.settings]
            values = [v for r in of_role if (v := self.implied(quantity, r, folds)) is not None]
            if values and quantity == "std":  # measured: the largest tensor has the least noise
                largest = max(of_role, key=lambda r: math.prod(r.shape) if self.implied("std", r, folds) else 0)
                values = [self.implied("std", largest, folds) or values[0]]
            if values:
                votes[role] = max(values, key=lambda v: sum(_near(v, w, tolerance) for w in values))
        if not votes:
            return 0.0 if quantity == "weight_decay" else None
        return max(votes.values(), key=lambda v: sum(_near(v, w, tolerance) for w in votes.values()))

    def global_eps(self, folds: Mapping[str, float]) -> float | None:
        """The one ε of all groups, where the rules want different ones: then it is the base's, and no role is right."""
        names = [name for name in self.scaling.parameters if name in self.settings]
        values = {self.settings[name].eps for name in names}
        factors = [self.expected(self.scaling.parameters[name], folds).eps for name in names]
        differ = not all(_near(f, factors[0]) for f in factors)
        return values.pop() if len(values) == 1 and differ and not self.at_base else None

    def implied(self, quantity: str, r: Resolved, folds: Mapping[str, float]) -> float | None:
        """The base value that a parameter's setting implies; None where it implies none."""
        s = self.settings[r.name] if r.template not in self.at_base else self.at_base[r.template]
        f = self.expected(r, folds) if r.template not in self.at_base else NO_FACTORS
        if quantity == "std":
            return s.std / f.init_std if r.role.trait.start == "random" and s.std else None
        if quantity == "weight_decay":
            return s.weight_decay / f.weight_decay if r.role.trait.decayed and s.weight_decay else None
        if quantity == "eps":
            return s.eps / f.eps if s.eps else None
        return s.lr / f.lr / (self.lr_of.get(r.role, 1.0) if r.template not in self.at_base else 1.0)

    def base_value(self, quantity: str, r: Resolved, tuned: Mapping[str, float]) -> float:
        """What the factor acts on: the base's own setting of this parameter if it is known."""
        base_settings = self.at_base.get(r.template)
        if base_settings is None or self.given[quantity] is not None:
            return tuned.get(quantity, 0.0) * (self.lr_of.get(r.role, 1.0) if quantity == "lr" else 1.0)
        value = getattr(base_settings, quantity)
        return tuned.get(quantity, 0.0) if value is None else float(value)

    def departures(self, tuned: Mapping[str, float], folds: Mapping[str, float]) -> Iterator[Departure]:
        tensors = dict(named_parameters(self.scaling.model))
        for name, r in self.scaling.parameters.items():
            if not tensors[name].requires_grad:
                continue
            if name not in self.settings:
                yield Departure(name, r.role, "optimizer", 1, 0, "trainable, but in no group of the optimizer")
                continue
            s, ways = self.settings[name], [self.expected(way, folds) for way in self.possible(r)]
            coupled = not s.kind.decoupled
            if coupled and s.weight_decay:
                cause = "added to the gradient, where normalisation cancels it: use AdamW"
                yield Departure(name, r.role, "weight_decay", 0, s.weight_decay, cause)
            base = {quantity: self.base_value(quantity, r, tuned) for quantity in self.given}
            pairs: list[tuple[Quantity, float | None]] = [("lr", s.lr)]
            pairs += [] if coupled else [("weight_decay", s.weight_decay)]
            pairs += [("eps", s.eps)] if "eps" in tuned else []
            for quantity, actual in pairs:
                expected = [base[quantity] * getattr(f, quantity) for f in ways]
                if actual is not None and not any(_near(e, actual) for e in expected):
                    yield Departure(name, r.role, quantity, expected[0], actual)
            if self.check_init and s.std is not None and not r.part.kept:
                entries = min(s.entries, self.at_base[r.template].entries if r.template in self.at_base else s.entries)
                found_by_way = [
                    list(
                        _compare_init(r, tensors[name], s.std, base["std"] * f.init_std, folds.get(name, 1.0), entries)
                    )
                    for f in ways
                ]
                yield from found_by_way[0] if all(found_by_way) else ()

    def possible(self, r: Resolved) -> list[Resolved]:
        """A parameter with the ratios to a base that is a Shape: its sides may have grown with the width, or not."""
        if r.name not in self.scaling.assumed:
            return [r]
        return [r, *(replace(r, m_N=m_N, m_out=m_out) for m_N, m_out in ((r.m_N, 1.0), (1.0, r.m_out)))]

    def cause(self, d: Departure) -> str:
        """The known mistake behind a departure, if its numbers show one."""
        r = self.scaling.parameters.get(d.name)
        if r is None or d.quantity == "multiplier":
            return self.multiplier_cause(d)
        hidden = r.role.trait.inside and r.role.trait.matrix
        if d.quantity == "eps" and len({s.eps for s in self.settings.values()}) == 1:
            return "one global eps for all groups"
        if d.quantity == "weight_decay" and hidden and _near(d.factor * r.m_N, 1.0):
            return "weight decay not scaled with width (λ·m_N): lr·λ shrinks as the model widens"
        if d.quantity == "weight_decay" and d.found == 0 and d.expected:
            return "not decayed"
        if d.quantity == "weight_decay" and d.expected == 0:
            return "biases and norms are decayed"
        if d.quantity == "init" and hidden and _near(d.factor * math.sqrt(2 * self.depth), 1.0, 0.05):
            return "GPT-2's 1/sqrt(2L) init of the residual projections is still there; the multiplier replaces it"
        if d.quantity == "lr" and hidden and self.spectral:
            return "lr ∝ fan_out/fan_in, the spectral rule for SGD, used with Adam (which needs 1/fan_in)"
        if (
            d.quantity == "lr"
            and d.expected
            and _near(d.factor, self.expected(r, {}).lr ** -2)
            and not _near(d.factor, 1)
        ):
            return SWAPPED
        reasons = []
        if d.quantity == "lr" and r.m_N != 1 and _near(d.factor * r.m_N, 1.0):
            reasons.append("divided by m_N twice" if hidden else "divided by m_N, which only hidden matrices need")
        reasons += [_missing_factor(d, r, self.scaling.rules) or _root_of_depth(d, r)]
        return "; or ".join(filter(None, reasons))  # several have the same size

    def multiplier_cause(self, d: Departure) -> str:
        if _near(d.found, 1.0):
            return "the forward pass does not have this multiplier"
        if d.expected and _near(d.found * d.expected, 1.0, MEASURED):
            return SWAPPED
        branch = any(m.kind == "branch" and d.name in (*m.modules, *m.parameters) for m in self.scaling.multipliers)
        if branch and _near(d.found, alpha(0.5).branch(1.0, self.scaling.m_L), MEASURED):
            return "1/sqrt(m_L), which is alpha=0.5: CompleteP needs 1/m_L"
        return ""

    @cached_property
    def depth(self) -> int:
        return max(s.depth(self.scaling.parameters) for s in self.scaling.anatomy.blocks)

    @cached_property
    def spectral(self) -> bool:
        """True if the hidden learning rates are proportional to fan_out / fan_in, over matrices of different aspect."""
        constants, aspects = set(), set()
        for name, r in self.scaling.parameters.items():
            if r.role.trait.inside and r.role.trait.matrix and r.part.fan_in and name in self.settings:
                aspect = math.prod(r.shape) / product(r.shape, r.part.fan_in) ** 2
                aspects.add(round(aspect, 6))
                constants.add(round(self.settings[name].lr / aspect, 12))
        return len(aspects) > 1 and len(constants) == 1


def _compare_init(
    r: Resolved, parameter: torch.Tensor, actual: float, expected: float, c: float, entries: int
) -> Iterator[Departure]:
    if r.role.trait.start == "random":
        sampling = 5 / math.sqrt(entries)  # five standard errors of the ratio of two measured stds
        if (abs(actual / expected - 1) > sampling + 0.01) if expected else actual:
            yield Departure(r.name, r.role, "init", expected, actual)
        return
    start = r.part.folded(r.part.start, c)
    values = parameter.detach().float()
    if (values - start).abs().max().item() > 1e-6:
        yield Departure(r.name, r.role, "init", start, values.mean().item())


def _missing_factor(d: Departure, r: Resolved, rules: Rules) -> str:
    """Names the width or depth factor, or both, that a setting lacks."""
    first_column = next(iter(rules.columns.values()))
    if d.quantity not in ("lr", "eps", "init") or not d.expected or r.role not in first_column:
        return ""
    rule = rules.rule_of(r.template, r.role)
    power = {"lr": rule.lr, "eps": rule.eps, "init": rule.init_std}[d.quantity]
    width, depth = (power.keep(width=w, depth=not w)(*r.ratios(rule)) for w in (True, False))
    tolerance = 0.05 if d.quantity == "init" else EXACT
    for missing, words in ((width, "width"), (depth, "depth"), (width * depth, "width and depth")):
        if not _near(missing, 1.0) and _near(d.factor * missing, 1.0, tolerance):
            return f"{d.quantity} not scaled with {words}"
    return ""


def _root_of_depth(d: Departure, r: Resolved) -> str:
    if d.quantity == "lr" and r.m_L != 1 and _near(d.factor, alpha(0.5).branch(1.0, r.m_L)):
        return "divided by sqrt(m_L), which is alpha=0.5's rule"
    return ""


def _near(a: float, b: float, tolerance: float = EXACT) -> bool:
    return math.isclose(a, b, rel_tol=tolerance)


def _missing_multipliers(
    scaling: Scaling, own_factors: OwnFactors
) -> tuple[Mapping[str, float], list[Departure], Notes]:
    """(what the weights would have to hold because the forward pass lacks it, departures, what was not checked)."""
    here, at_base = own_factors.here_or_reduced, own_factors.at_base
    if here is None:
        return {}, [], ("the multipliers of the forward pass",)
    template = scaling.anatomy.template
    base_sites = {} if at_base is None else at_base.trained.sites | at_base.trained.bare
    factors = here.trained.sites | here.trained.bare
    relative = {site: value / base_sites.get(template(site), 1.0) for site, value in factors.items()}
    lacking: list[Multiplier] = []
    wrong: list[Departure] = []
    for m in scaling.multipliers:
        if m.kind in ("attention", "embedding"):  # placed only where the forward pass does not have the factor
            wrong += [Departure(site, f"{m.kind} multiplier", "multiplier", m.factor, 1.0) for site in m.modules]
            lacking.append(m)
            continue
        measured = {site: relative[site] for site in m.modules or m.parameters if site in relative}
        if not m.modules and not measured:  # used as bare parameters: the weights may hold it
            lacking.append(m)
            continue
        off = {site: value for site, value in measured.items() if not abs(value / m.factor - 1) <= MEASURED}
        wrong += [Departure(site, f"{m.kind} multiplier", "multiplier", m.factor, value) for site, value in off.items()]
        lacking.append(replace(m, factor=m.factor / next(iter(off.values())) if off else 1.0))
    unchecked = [
        f"the {m.kind} multiplier, which should be {m.factor:.4g}"
        for m in scaling.multipliers
        if m.factor != 1.0
        and m.kind in ("branch", "logits")
        and not any(s in relative for s in m.modules or m.parameters)
    ]
    if not here.attentions and _heads_may_have_grown(scaling, own_factors):
        unchecked.append("the scale on q·k, since no attention was seen in the forward pass")
    folds = with_folds(scaling.parameters, lacking, scaling.anatomy)
    return {name: r.fold for name, r in folds.items()}, wrong, tuple(unchecked)


def _heads_may_have_grown(scaling: Scaling, own_factors: OwnFactors) -> bool:
    """True if the model has attention, and its attributes do not say that its heads are as large as the base's."""
    if not any("attention" in type(m).__name__.lower() for m in own_factors.model.modules()):
        return False
    if own_factors.base.model is None:
        return True
    template, stack_of = scaling.anatomy.template, scaling.anatomy.stack_of

    def sizes(model: nn.Module, width: int) -> dict[str, int]:
        return {template(n): size for n, size in named_heads(model, width, lambda name: stack_of(name) is not None)}

    here = sizes(own_factors.model, scaling.target.width)
    return not here or here != sizes(own_factors.base.model, scaling.base.width)
