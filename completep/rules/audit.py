"""Somebody's own model and optimizer against the table, parameter by parameter.

What she tuned (η, λ, ε, σ) is read off her embedding, whose row has no depth factor, unless she says it. Multipliers are
measured in her forward pass; where they are missing, the folded form is tried before anything is called wrong.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from completep.config import Shape
from completep.errors import UserError
from completep.rules import examine, parametrize
from completep.rules.examine import Factory
from completep.rules.measure_forward import own_factors, own_tables
from completep.rules.multipliers import Multiplier
from completep.rules.ratios import product
from completep.rules.scaling import Factors, Resolved, Scaling, named_parameters, unwrap
from completep.rules.table import COMPLETEP, RANDOM, Role, Rules, optimizer_kind

Quantity = Literal["lr", "weight_decay", "eps", "init", "multiplier", "optimizer"]
EXACT = 1e-3  # settings are typed, so they agree or they do not
MEASURED = 2e-2  # multipliers pass through float32 and a soft-cap


@dataclass(frozen=True)
class Departure:
    """One setting that is not what the rules say."""

    name: str
    role: str
    quantity: Quantity
    expected: float
    found: float
    cause: str = ""

    @property
    def factor(self) -> float:
        return self.found / self.expected if self.expected else math.inf


@dataclass(frozen=True)
class Audit:
    rules: str
    departures: tuple[Departure, ...]
    parameters: int
    tuned: dict[str, float]  # the base values that were used
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.departures


def audit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    base: "Factory | Shape",
    rules: Rules = COMPLETEP,
    lr: float | None = None,
    weight_decay: float | None = None,
    eps: float | None = None,
    std: float | None = None,
    check_init: bool = True,
    roles: "Mapping[str, Role] | None" = None,
    writers: "list[str] | None" = None,
    example: Any = None,
    specimen: "Factory | nn.Module | None" = None,
) -> Audit:
    """Compare a model and its optimizer with what `rules` prescribe; `check_init=False` once it has been trained."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer is a {type(optimizer).__name__}, not a torch optimizer", fix="pass the optimizer itself"
        )
    scaling = parametrize.resolve(
        unwrap(model), base=base, rules=rules, roles=roles, writers=writers, example=example, specimen=specimen
    )
    settings = settings_of(scaling, optimizer)
    given = {"lr": lr, "weight_decay": weight_decay, "eps": eps, "std": std}
    with torch.device("cpu"):
        lacking, wrong, notes = missing_multipliers(scaling, base, example)

    def departures_with(folds: Mapping[str, float]) -> tuple[dict[str, float], list[Departure]]:
        tuned = read_off(scaling, settings, optimizer, given, check_init, folds)
        return tuned, list(compare(scaling, settings, tuned, optimizer, check_init, folds))

    tuned, departures = departures_with({})
    if wrong:
        # Folded it is if every parameter that would have taken a multiplier up has the learning rate for it.
        folded_tuned, folded = departures_with(lacking)
        taken = {name for name, c in lacking.items() if c != 1.0}
        if not any(d.name in taken and d.quantity == "lr" for d in folded):
            tuned, departures, notes = (
                folded_tuned,
                folded,
                (*notes, "read as folded: the multipliers sit in the weights"),
            )
        else:
            departures = [*wrong, *departures]
    explained = explain_causes(departures, scaling, settings)
    return Audit(rules.name, tuple(explained), len(scaling.parameters), tuned, notes)


@dataclass(frozen=True)
class Setting:
    lr: float
    weight_decay: float
    eps: float | None
    std: float | None  # measured; None on the meta device


def settings_of(scaling: Scaling, optimizer: torch.optim.Optimizer) -> dict[str, Setting]:
    """What each parameter is trained with. `initial_lr` is what a scheduler started from."""
    names = {id(p): name for name, p in named_parameters(scaling.model)}
    found: dict[str, Setting] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in names:
                raise UserError(
                    "the optimizer holds a parameter that is not in this model",
                    fix="build the optimizer from this very model's parameters",
                )
            std = None if p.is_meta else p.detach().float().std(unbiased=False).item()
            found[names[id(p)]] = Setting(
                float(group.get("initial_lr", group["lr"])), group.get("weight_decay", 0.0), group.get("eps"), std
            )
    return found


def read_off(
    scaling: Scaling,
    settings: dict[str, Setting],
    optimizer: Any,
    given: dict[str, float | None],
    check_init: bool,
    folds: Mapping[str, float],
) -> dict[str, float]:
    """The tuned base values: as given, or as the largest embedding shows them."""
    needless = ({"std"} if not check_init else set()) | ({"eps"} if optimizer_kind(optimizer).eps is None else set())
    tuned = {k: v for k, v in given.items() if v is not None}
    unknown = sorted(given.keys() - tuned.keys() - needless)
    if not unknown:
        return tuned
    tables = [r for n, r in scaling.parameters.items() if r.role is Role.EMBEDDING and n in settings]
    if not tables:
        raise UserError(
            f"no embedding is in the optimizer, so I cannot read off {', '.join(unknown)}",
            fix="give them: " + ", ".join(f"{k}=…" for k in unknown),
        )
    r = max(tables, key=lambda r: math.prod(r.shape))
    s, f = settings[r.name], _expected(scaling, r, optimizer, folds)
    if not s.weight_decay and "weight_decay" in unknown and any(x.weight_decay for x in settings.values()):
        raise UserError(
            f"'{r.name}' has no weight decay while other parameters do, so I cannot read off the base value",
            fix="give it: weight_decay=…",
        )
    seen = {
        "lr": s.lr / f.lr,
        "weight_decay": s.weight_decay / f.weight_decay,
        "eps": None if s.eps is None else s.eps / f.eps,
        "std": None if s.std is None else s.std / f.init_std,
    }
    return {k: v for k, v in seen.items() if v is not None and k not in needless} | tuned


def _expected(scaling: Scaling, r: Resolved, optimizer: Any, folds: Mapping[str, float]) -> Factors:
    column = optimizer_kind(optimizer).column
    return r.factors(scaling.rules.rule(r.role, column), column, folds.get(r.name, 1.0))


def compare(
    scaling: Scaling,
    settings: dict[str, Setting],
    tuned: dict[str, float],
    optimizer: Any,
    check_init: bool,
    folds: Mapping[str, float],
) -> Iterable[Departure]:
    tensors = dict(named_parameters(scaling.model))
    coupled = not optimizer_kind(optimizer).decoupled
    for name, r in scaling.parameters.items():
        if not tensors[name].requires_grad:
            continue
        if name not in settings:
            yield Departure(name, r.role, "optimizer", 1, 0, "trainable, but in no group of the optimizer")
            continue
        s, f = settings[name], _expected(scaling, r, optimizer, folds)
        if coupled and s.weight_decay:
            yield Departure(
                name,
                r.role,
                "weight_decay",
                0,
                s.weight_decay,
                "added to the gradient, where normalisation undoes it: use AdamW",
            )
        checks: list[tuple[Quantity, float, float | None]] = [
            ("lr", tuned["lr"] * f.lr, s.lr),
            ("weight_decay", tuned["weight_decay"] * f.weight_decay, None if coupled else s.weight_decay),
            ("eps", tuned["eps"] * f.eps if "eps" in tuned else 0.0, s.eps if "eps" in tuned else None),
        ]
        for quantity, expected, found in checks:
            if found is not None and not math.isclose(expected, found, rel_tol=EXACT):
                yield Departure(name, r.role, quantity, expected, found)
        if check_init and s.std is not None:
            yield from _compare_init(r, tensors[name], s.std, tuned.get("std", 0.0) * f.init_std, folds.get(name, 1.0))


def _compare_init(r: Resolved, parameter: torch.Tensor, found: float, expected: float, c: float) -> Iterable[Departure]:
    if r.role in RANDOM:
        sampling = 5 / math.sqrt(2 * parameter.numel())  # five standard errors of a measured std
        if (abs(found / expected - 1) > sampling + 0.01) if expected else found:
            yield Departure(r.name, r.role, "init", expected, found)
        return
    start = r.part.folded(r.part.start, c)
    value = parameter.detach().float()
    if (value - start).abs().max().item() > 1e-6:
        yield Departure(r.name, r.role, "init", start, value.mean().item())


def missing_multipliers(
    scaling: Scaling, base: "Factory | Shape", example: Any
) -> tuple[dict[str, float], list[Departure], tuple[str, ...]]:
    """What the forward pass lacks: as factors that the weights would have to hold instead, and as departures; and notes."""
    found = scaling.anatomy
    if examine.on_meta(scaling.model) or examine.size(scaling.model) > examine.LARGEST_SPECIMEN:
        return {}, [], ("the forward pass was not checked: the model is on the meta device or too large to run here",)
    real = None if isinstance(base, Shape) else examine.build(base, "cpu")
    here, there = (
        own_factors(scaling.model, found, example),
        own_factors(real, found, example) if real is not None else {},
    )
    at_base = {found.template(name): value for name, value in there.items()}
    here |= _embedding_factors(scaling, real, example)
    lacking: list[Multiplier] = []
    wrong: list[Departure] = []
    for m in scaling.multipliers:
        relative = {site: here[site] / at_base.get(found.template(site), 1.0) for site in m.modules if site in here}
        off = {site: value for site, value in relative.items() if abs(value / m.factor - 1) > MEASURED}
        wrong += [Departure(site, f"{m.kind} multiplier", "multiplier", m.factor, value) for site, value in off.items()]
        lacking.append(replace(m, factor=m.factor / next(iter(off.values())) if off else 1.0))
    unseen = {m.kind for m in scaling.multipliers if m.factor != 1.0 and not any(site in here for site in m.modules)}
    notes = tuple(
        f"the {kind} multiplier is not checked in the forward pass; take it to be × {scaling.factors()[kind]:.4g}"
        for kind in sorted(unseen)
    )
    folds = parametrize.with_folds(scaling.parameters, tuple(lacking), found)
    return {name: r.fold for name, r in folds.items()}, wrong, notes


def _embedding_factors(scaling: Scaling, real: nn.Module | None, example: Any) -> dict[str, float]:
    """Beside the model's own sqrt(N): what an embedding is multiplied by here, relative to the base."""
    found = scaling.anatomy
    scaled = {m.modules[0]: m.factor for m in scaling.multipliers if m.kind == "embedding"}
    if not scaled:
        return {}
    here = own_tables(scaling.model, found, example)
    there = (
        own_tables(real, found, example) if real is not None else {n: float(scaling.base.width) ** 0.5 for n in here}
    )
    return {site: factor * here[f"{site}.weight"] / there[f"{site}.weight"] for site, factor in scaled.items()}


def explain_causes(departures: list[Departure], scaling: Scaling, settings: dict[str, Setting]) -> list[Departure]:
    """Name the known mistake behind a departure, where its numbers give it away."""
    one_eps = len({s.eps for s in settings.values()}) == 1
    depth = max(s.depth(list(scaling.parameters)) for s in scaling.anatomy.stacks)
    spectral = _is_spectral(scaling, settings)
    return [replace(d, cause=d.cause or _cause(d, scaling, one_eps, depth, spectral)) for d in departures]


def _cause(d: Departure, scaling: Scaling, one_eps: bool, depth: int, spectral: bool) -> str:
    r = scaling.parameters.get(d.name)
    if r is None:
        return "the forward pass does not have this multiplier" if _near(d.found, 1.0) else ""
    if d.quantity == "eps" and one_eps:
        return "one global eps for all groups"
    if d.quantity == "weight_decay" and r.role is Role.HIDDEN and _near(d.factor * r.m_N, 1.0):
        return "weight decay not scaled with width (λ·m_N): lr·λ shrinks as the model widens"
    if d.quantity == "weight_decay" and d.found == 0 and d.expected:
        return "not decayed"
    if d.quantity == "weight_decay" and d.expected == 0:
        return "biases and norms are decayed"
    if d.quantity == "init" and r.role is Role.HIDDEN and _near(d.factor * math.sqrt(2 * depth), 1.0, 0.05):
        return "GPT-2's 1/sqrt(2L) init of the residual projections left in; the multiplier does that job"
    if d.quantity == "lr" and r.role is Role.HIDDEN and spectral:
        return "lr ∝ fan_out/fan_in, the spectral rule for SGD, used with Adam (wants 1/fan_in)"
    return _missing_factor(d, r, scaling)


def _missing_factor(d: Departure, r: Resolved, scaling: Scaling) -> str:
    """A setting that lacks its whole width or depth factor, or both."""
    if (
        d.quantity not in ("lr", "eps", "init")
        or not d.expected
        or r.role not in scaling.rules.columns[next(iter(scaling.rules.columns))]
    ):
        return ""
    rule = scaling.rules.rule(r.role)
    power = {"lr": rule.lr, "eps": rule.eps, "init": rule.init_std}[d.quantity]
    width, depth = (power.keep(width=w, depth=not w)(r.m_N, r.m_L, r.m_out) for w in (True, False))
    tolerance = 0.05 if d.quantity == "init" else EXACT
    for missing, words in ((width, "width"), (depth, "depth"), (width * depth, "width and depth")):
        if not _near(missing, 1.0) and _near(d.factor * missing, 1.0, tolerance):
            return f"{d.quantity} not scaled with {words}"
    return ""


def _is_spectral(scaling: Scaling, settings: dict[str, Setting]) -> bool:
    """Do the hidden learning rates go as fan_out / fan_in, over matrices of different aspect?"""
    constants, aspects = set(), set()
    for name, r in scaling.parameters.items():
        if r.role is Role.HIDDEN and r.part.fan_in and name in settings:
            fan_in = product(r.shape, r.part.fan_in)
            aspect = math.prod(r.shape) / fan_in**2
            aspects.add(round(aspect, 6))
            constants.add(round(settings[name].lr / aspect, 12))
    return len(aspects) > 1 and len(constants) == 1


def _near(a: float, b: float, tolerance: float = EXACT) -> bool:
    return math.isclose(a, b, rel_tol=tolerance)


def to_json(found: Audit) -> dict[str, Any]:
    rows = [{**asdict(d), "factor": d.factor if math.isfinite(d.factor) else None} for d in found.departures]
    return {
        "rules": found.rules,
        "passed": found.passed,
        "parameters": found.parameters,
        "tuned": found.tuned,
        "notes": found.notes,
        "departures": rows,
    }


def to_lines(found: Audit) -> list[Any]:
    """What a person reads: departures of one kind in all blocks together."""
    from rich.table import Table

    tuned = ", ".join(f"{k} {v:.4g}" for k, v in found.tuned.items())
    lines: list[Any] = [
        f"audited {found.parameters} parameters against {found.rules}; base values: {tuned}",
        *found.notes,
    ]
    if found.passed:
        return [*lines, "[green]PASS[/]: everything is as the rules say"]
    groups: dict[tuple[str, ...], list[Departure]] = {}
    for d in found.departures:
        groups.setdefault(
            (d.role, d.quantity, f"{d.expected:.4g}", f"{d.found:.4g}" if d.quantity != "init" else "", d.cause), []
        ).append(d)
    table = Table(header_style="bold")
    for heading in ("role", "setting", "parameters", "expected", "found", "off by", "likely cause"):
        table.add_column(heading, overflow="fold")
    for (role, quantity, expected, _, cause), group in groups.items():
        names = group[0].name + (f" (+{len(group) - 1} more)" if len(group) > 1 else "")
        table.add_row(role, quantity, names, expected, f"{group[0].found:.4g}", f"×{group[0].factor:.4g}", cause)
    return [*lines, table, f"[red]FAIL[/]: {len(found.departures)} settings depart from {found.rules}"]
