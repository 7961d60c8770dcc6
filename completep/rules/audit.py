"""`audit`: your own model and optimizer compared with the table, parameter by parameter.

Your tuned values (η, λ, ε, σ) are read from the embedding, whose row has no depth factor, unless you pass them.
Multipliers are measured in the forward pass. If they are missing, the audit checks whether the model is in the folded
form before it reports them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from completep.anatomy.forward import OwnFactors
from completep.anatomy.names import named_parameters
from completep.anatomy.ratios import product
from completep.anatomy.specimen import LARGEST_SPECIMEN, Factory, on_meta, size
from completep.anatomy.trace import Example
from completep.config import Shape
from completep.errors import UserError
from completep.report.document import Cell, Document, Json, Part, Table, Text, Verdict
from completep.report.result import Result
from completep.rules.multipliers import Multiplier
from completep.rules.parametrize import Hints, resolve, with_folds
from completep.rules.scaling import Factors, Resolved, Scaling
from completep.rules.table import COMPLETEP, Role, Rules, optimizer_kind

Quantity = Literal["lr", "weight_decay", "eps", "init", "multiplier", "optimizer"]
Notes = tuple[str, ...]
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

    @property
    def passed(self) -> bool:
        return not self.departures

    @property
    def verdict(self) -> Literal["PASS", "FAIL"]:
        return "PASS" if self.passed else "FAIL"

    def document(self) -> Document:
        count = f"{len(self.departures)} settings depart" if len(self.departures) != 1 else "1 setting departs"
        sentence = f"every setting is as {self.name} prescribes" if self.passed else f"{count} from {self.name}"
        tuned = ", ".join(f"{k} {v:.4g}" for k, v in self.tuned.items())
        facts = f"Compared {self.parameters} parameters with {self.name}. Base values: {tuned}."
        parts: list[Part] = [Verdict(self.verdict, sentence), Text(facts), *map(Text, self.notes)]
        if self.departures:
            parts.append(Table.of("Departures", _rows(self.departures)))
        return Document(f"Audit against {self.name}", tuple(parts), kind="completep audit")

    def to_json(self) -> Json:
        rows = [{**asdict(d), "factor": d.factor if math.isfinite(d.factor) else None} for d in self.departures]
        return {**asdict(self), "verdict": self.verdict, "passed": self.passed, "departures": rows}


def _rows(departures: Sequence[Departure]) -> list[dict[str, Cell]]:
    """One row for all departures of one kind, over all blocks."""
    groups: dict[tuple[str, ...], list[Departure]] = {}
    for d in departures:
        found = "" if d.quantity == "init" else f"{d.found:.4g}"  # measured stds all differ
        groups.setdefault((d.role, d.quantity, f"{d.expected:.4g}", found, d.cause), []).append(d)
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
    optimizer: torch.optim.Optimizer,
    *,
    base: Factory | Shape,
    rules: Rules | str = COMPLETEP,
    lr: float | None = None,
    weight_decay: float | None = None,
    eps: float | None = None,
    std: float | None = None,
    check_init: bool = True,
    roles: Mapping[str, Role] | None = None,
    writers: Sequence[str] | None = None,
    example: Example | None = None,
    specimen: Factory | nn.Module | None = None,
) -> Audit:
    """Compare your model and optimizer with what `rules` prescribe.

    A base factory is called twice, as in `parametrize`; then copies of the base and of your model are run once each.

    Args:
        model: your model, as you would train it. The arguments that are not listed here are those of `parametrize`.
        optimizer: its optimizer.
        lr: your tuned base learning rate. It is read from the embedding if you leave it out, like the next three.
        weight_decay: your tuned base weight decay.
        eps: your tuned base epsilon.
        std: your tuned base init standard deviation.
        check_init: compare starting values as well. Switch it off for a trained model.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = f"optimizer is a {type(optimizer).__name__}, not a torch optimizer"
        raise UserError(what, fix="pass the optimizer itself")
    scaling, own = resolve(model, base, rules, Hints(roles, writers, example, specimen))
    tuned = {"lr": lr, "weight_decay": weight_decay, "eps": eps, "std": std}
    subject = _Subject(scaling, optimizer, _settings(scaling, optimizer), tuned, check_init)
    lacking, wrong, notes = _missing_multipliers(scaling, own)
    read, departures = subject.compare({})
    if wrong:
        # The model is folded if every parameter that would hold a multiplier has the learning rate for it.
        read_folded, in_folded = subject.compare(lacking)
        holders = {name for name, c in lacking.items() if c != 1.0}
        if any(d.name in holders and d.quantity == "lr" for d in in_folded):
            departures = [*wrong, *departures]
        else:
            read, departures = read_folded, in_folded
            notes = (*notes, "read as folded: the multipliers are in the weights")
    explained = tuple(replace(d, cause=d.cause or subject.cause(d)) for d in departures)
    return Audit(scaling.rules.key, scaling.rules.name, explained, len(scaling.parameters), read, notes)


@dataclass(frozen=True)
class _Setting:
    """What one parameter is trained with."""

    lr: float
    weight_decay: float
    eps: float | None
    std: float | None  # measured; None on the meta device


def _settings(scaling: Scaling, optimizer: torch.optim.Optimizer) -> dict[str, _Setting]:
    names = {id(p): name for name, p in named_parameters(scaling.model)}
    settings: dict[str, _Setting] = {}
    for group in optimizer.param_groups:
        lr = float(group.get("initial_lr", group["lr"]))  # a scheduler changes lr, but not initial_lr
        for p in group["params"]:
            if id(p) not in names:
                what = "the optimizer holds a parameter that is not in this model"
                raise UserError(what, fix="build the optimizer from the parameters of this model")
            std = None if p.is_meta else p.detach().float().std(unbiased=False).item()
            settings[names[id(p)]] = _Setting(lr, group.get("weight_decay", 0.0), group.get("eps"), std)
    return settings


@dataclass(frozen=True)
class _Subject:
    """What is audited. `folds` below are the multipliers that the weights hold, by parameter."""

    scaling: Scaling
    optimizer: torch.optim.Optimizer
    settings: Mapping[str, _Setting]
    given: Mapping[str, float | None]  # base values that you passed
    check_init: bool

    def compare(self, folds: Mapping[str, float]) -> tuple[dict[str, float], list[Departure]]:
        """(base values, departures)."""
        tuned = self.tuned(folds)
        return tuned, list(self.departures(tuned, folds))

    def expected(self, r: Resolved, folds: Mapping[str, float]) -> Factors:
        column = optimizer_kind(self.optimizer).column
        return r.factors(self.scaling.rules.rule(r.role, column), column, folds.get(r.name, 1.0))

    def tuned(self, folds: Mapping[str, float]) -> dict[str, float]:
        """The base values: those that you passed, and the others as the largest embedding has them."""
        unused = {"std"} if not self.check_init else set()
        unused |= {"eps"} if optimizer_kind(self.optimizer).eps is None else set()
        tuned = {k: v for k, v in self.given.items() if v is not None}
        unknown = sorted(self.given.keys() - tuned.keys() - unused)
        if not unknown:
            return tuned
        parameters = self.scaling.parameters
        tables = [r for n, r in parameters.items() if r.role is Role.EMBEDDING and n in self.settings]
        if not tables:
            what = f"no embedding is in the optimizer, so the audit cannot read off {', '.join(unknown)}"
            raise UserError(what, fix="pass them: " + ", ".join(f"{k}=…" for k in unknown))
        r = max(tables, key=lambda r: math.prod(r.shape))
        s, f = self.settings[r.name], self.expected(r, folds)
        if not s.weight_decay and "weight_decay" in unknown and any(x.weight_decay for x in self.settings.values()):
            what = f"'{r.name}' has no weight decay but others do, so the audit cannot read off the base value"
            raise UserError(what, fix="pass it: weight_decay=…")
        eps, std = s.eps and s.eps / f.eps, s.std and s.std / f.init_std
        read = {"lr": s.lr / f.lr, "weight_decay": s.weight_decay / f.weight_decay, "eps": eps, "std": std}
        return {k: v for k, v in read.items() if v is not None and k not in unused} | tuned

    def departures(self, tuned: Mapping[str, float], folds: Mapping[str, float]) -> Iterator[Departure]:
        tensors = dict(named_parameters(self.scaling.model))
        coupled = not optimizer_kind(self.optimizer).decoupled
        for name, r in self.scaling.parameters.items():
            if not tensors[name].requires_grad:
                continue
            if name not in self.settings:
                yield Departure(name, r.role, "optimizer", 1, 0, "trainable, but in no group of the optimizer")
                continue
            s, f = self.settings[name], self.expected(r, folds)
            if coupled and s.weight_decay:
                cause = "added to the gradient, where normalisation cancels it: use AdamW"
                yield Departure(name, r.role, "weight_decay", 0, s.weight_decay, cause)
            pairs: list[tuple[Quantity, float, float | None]] = [("lr", tuned["lr"] * f.lr, s.lr)]
            if not coupled:
                pairs.append(("weight_decay", tuned["weight_decay"] * f.weight_decay, s.weight_decay))
            if "eps" in tuned:
                pairs.append(("eps", tuned["eps"] * f.eps, s.eps))
            for quantity, expected, found in pairs:
                if found is not None and not _near(expected, found):
                    yield Departure(name, r.role, quantity, expected, found)
            if self.check_init and s.std is not None:
                std = tuned.get("std", 0.0) * f.init_std
                yield from _compare_init(r, tensors[name], s.std, std, folds.get(name, 1.0))

    def cause(self, d: Departure) -> str:
        """The known mistake behind a departure, if its numbers show one."""
        r = self.scaling.parameters.get(d.name)
        if r is None:
            return "the forward pass does not have this multiplier" if _near(d.found, 1.0) else ""
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
        return _missing_factor(d, r, self.scaling.rules)

    @cached_property
    def depth(self) -> int:
        return max(s.depth(self.scaling.parameters) for s in self.scaling.anatomy.stacks)

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


def _compare_init(r: Resolved, parameter: torch.Tensor, found: float, expected: float, c: float) -> Iterator[Departure]:
    if r.role.trait.start == "random":
        sampling = 5 / math.sqrt(2 * parameter.numel())  # five standard errors of a measured std
        if (abs(found / expected - 1) > sampling + 0.01) if expected else found:
            yield Departure(r.name, r.role, "init", expected, found)
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
    rule = rules.rule(r.role)
    power = {"lr": rule.lr, "eps": rule.eps, "init": rule.init_std}[d.quantity]
    width, depth = (power.keep(width=w, depth=not w)(r.m_N, r.m_L, r.m_out) for w in (True, False))
    tolerance = 0.05 if d.quantity == "init" else EXACT
    for missing, words in ((width, "width"), (depth, "depth"), (width * depth, "width and depth")):
        if not _near(missing, 1.0) and _near(d.factor * missing, 1.0, tolerance):
            return f"{d.quantity} not scaled with {words}"
    return ""


def _near(a: float, b: float, tolerance: float = EXACT) -> bool:
    return math.isclose(a, b, rel_tol=tolerance)


def _missing_multipliers(scaling: Scaling, own: OwnFactors) -> tuple[Mapping[str, float], list[Departure], Notes]:
    """(what the weights would have to hold because the forward pass lacks it, departures, notes)."""
    if on_meta(scaling.model) or size(scaling.model) > LARGEST_SPECIMEN:
        return {}, [], ("the forward pass was not checked: the model is on the meta device or too large to run here",)
    anatomy = scaling.anatomy
    at_base = own.at_base.sites if own.at_base is not None else {}
    relative = {site: value / at_base.get(anatomy.template(site), 1.0) for site, value in own.here.sites.items()}
    relative |= _embedding_factors(scaling, own)
    lacking: list[Multiplier] = []
    wrong: list[Departure] = []
    for m in scaling.multipliers:
        measured = {site: relative[site] for site in m.modules if site in relative}
        off = {site: value for site, value in measured.items() if abs(value / m.factor - 1) > MEASURED}
        wrong += [Departure(site, f"{m.kind} multiplier", "multiplier", m.factor, value) for site, value in off.items()]
        lacking.append(replace(m, factor=m.factor / next(iter(off.values())) if off else 1.0))
    unseen = [m for m in scaling.multipliers if m.factor != 1.0 and not any(s in relative for s in m.modules)]
    unchecked = "multiplier is not checked in the forward pass; it should be"
    notes = tuple(f"the {m.kind} {unchecked} × {m.factor:.4g}" for m in unseen)
    folds = with_folds(scaling.parameters, lacking, anatomy)
    return {name: r.fold for name, r in folds.items()}, wrong, notes


def _embedding_factors(scaling: Scaling, own: OwnFactors) -> dict[str, float]:
    """The factor on each embedding beside the model's own sqrt(N), relative to the base."""
    factors = {m.modules[0]: m.factor for m in scaling.multipliers if m.kind == "embedding"}
    if not factors:
        return {}
    at_base = own.at_base.tables if own.at_base is not None else {}
    root = float(scaling.base.width) ** 0.5
    here = own.here.tables
    return {s: factor * here[f"{s}.weight"] / at_base.get(f"{s}.weight", root) for s, factor in factors.items()}
