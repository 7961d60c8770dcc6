"""`parametrize` and `explain`: find the roles, compare with the base, resolve the table, place the multipliers."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from completep.anatomy.blocks import refuse_sharing, refuse_what_has_no_rule
from completep.anatomy.examine import examine
from completep.anatomy.forward import ForwardFactors, OwnFactors, measure_forward
from completep.anatomy.names import named_parameters, unwrap
from completep.anatomy.ratios import Dimensions, Ratios, Shapes, product, shapes_of
from completep.anatomy.roles import Anatomy
from completep.anatomy.specimen import Base, Factory, choose_specimen, on_cpu
from completep.anatomy.trace import Example, recording
from completep.config import Shape
from completep.errors import UserError, some
from completep.rules import multipliers
from completep.rules.explain import Explanation
from completep.rules.multipliers import Multiplier, Style
from completep.rules.placing import place_multipliers, refuse_own_multipliers
from completep.rules.scaling import Resolved, Scaling
from completep.rules.table import COMPLETEP, Role, Rules, as_rules, muon_shape_factor
from completep.rules.weights import Origin, find_origin, watch_loads
from completep.tuned import TunedValues, read_tuned

BaseLike = Factory | Shape
Table = dict[str, Resolved]


@dataclass(frozen=True)
class Hints:
    """What you can say about a model. All of it is found if you say nothing, or an error asks for it."""

    roles: Mapping[str, Role] | None = None
    writers: Sequence[str] | None = None
    example: Example | None = None
    specimen: Factory | nn.Module | None = None

    def __post_init__(self) -> None:
        if self.roles is not None and not isinstance(self.roles, Mapping):
            raise UserError(f"roles={self.roles!r} is not a mapping", fix="roles={'blocks.*.gate.weight': Role.HIDDEN}")
        for pattern, role in (self.roles or {}).items():
            if not isinstance(role, Role):
                names = ", ".join(f"Role.{r.name}" for r in Role)
                raise UserError(f"roles: {pattern!r} is given {role!r}", fix=f"use a Role: {names}")


def parametrize(
    model: nn.Module,
    *,
    base: Factory | Shape,
    rules: Rules | str = COMPLETEP,
    style: Style = "multiplier",
    roles: Mapping[str, Role] | None = None,
    writers: Sequence[str] | None = None,
    example: Example | None = None,
    specimen: Factory | nn.Module | None = None,
    tuned: "TunedValues | Path | str | None" = None,
) -> Scaling:
    """Give `model` the scaling that `rules` prescribe for its size relative to `base`.

    A base factory is called twice: on the meta device, which shows its size and takes no memory, and for real if it has
    at most 300M parameters. The real copy is run three times, and twice more for each kind of branch, to find and prove
    the roles: seven times for attention and MLP. Then copies of the base and of your model are run twice each, to
    measure the factors that they already contain. For a model on the meta device or with more than 100M parameters
    this is a reduced copy, with one block of each kind. If the base is a Shape, a copy of your model is run instead.
    `Scaling.unchecked` says what could not be checked.

    Args:
        model: your model, on any device, including the meta device.
        base: the tuned model: a factory, or Shape(width, depth).
        rules: COMPLETEP, alpha(0.5), MUP or SP, or a key such as "completep" or "alpha=0.5".
        style: "multiplier": factors in the forward pass; "folded": the same training run with ordinary weights only.
        roles: {name pattern: Role} for parameters whose role cannot be found, or should be a different one.
        writers: name patterns of the parameters that write last into each residual branch, if they cannot be found.
        example: inputs to run the model on, if they cannot be guessed: a tensor, a tuple of arguments, or a dict.
        specimen: a small model of the same class to examine instead, if model and base are both too large to run.
        tuned: what `tune` found (tuned.json). `init_` and `param_groups` then take its values where you give none, and
            another base or other rules than it was tuned with are refused.
    """
    tuned_values = None if tuned is None else read_tuned(tuned)
    scaling, _ = _prepare(model, base, rules, style, Hints(roles, writers, example, specimen))
    if tuned_values is not None:
        scaling.take(tuned_values)
    return _install(scaling, style)


def parametrize_on(base: Base, model: nn.Module, rules: Rules, hints: Hints) -> tuple[Scaling, ForwardFactors]:
    """`parametrize` for one of many models with the same base, hints and rows by name.

    The base is examined for the first of them. The style is folded where a multiplier has no module to act on. The
    second result are the factors of the forward pass with its multipliers, measured.
    """
    scaling, own_factors = _prepare(model, base, rules, None, hints)
    scaling = _install(scaling, multipliers.possible_style(scaling.model, scaling.multipliers))
    return scaling, _installed_factors(scaling, own_factors)


def _installed_factors(scaling: Scaling, own_factors: OwnFactors) -> ForwardFactors:
    """Measured on the copy whose own factors are known already, with the same multipliers on it."""
    if not own_factors.is_whole:
        return measure_forward(scaling.model, scaling.anatomy, own_factors.example)
    if scaling.style == "multiplier":
        multipliers.install(own_factors.bench.model, scaling.multipliers)
    return own_factors.bench.measure_again()


def _install(scaling: Scaling, style: Style) -> Scaling:
    """Puts the factors on the forward pass, or into the weights."""
    for line in scaling.unchecked:
        warnings.warn(f"not checked: {line}", stacklevel=3)
    watch_loads(scaling.model)
    if style == "folded":
        return scaling.fold()
    multipliers.install(scaling.model, scaling.multipliers)
    return scaling


def explain(
    model: nn.Module,
    *,
    base: Factory | Shape,
    rules: Rules | str = COMPLETEP,
    style: Style = "multiplier",
    roles: Mapping[str, Role] | None = None,
    writers: Sequence[str] | None = None,
    example: Example | None = None,
    specimen: Factory | nn.Module | None = None,
    std: float = 1.0,
    lr: float = 1.0,
    weight_decay: float = 1.0,
    eps: float = 1.0,
    lr_of: Mapping[str, float] | None = None,
) -> Explanation:
    """What `parametrize` would do to each parameter of `model`, and why. The model is not changed.

    The other arguments are those of `parametrize`. `std`, `lr`, `weight_decay`, `eps` and `lr_of` are your tuned base
    values. With the default of 1, the numbers are the factors themselves.
    """
    scaling, _ = _prepare(model, base, rules, style, Hints(roles, writers, example, specimen))
    return replace(scaling, style=style).explain(std=std, lr=lr, weight_decay=weight_decay, eps=eps, lr_of=lr_of)


@recording()
def _prepare(
    model: nn.Module, base: BaseLike | Base, rules: Rules | str, style: Style | None, hints: Hints
) -> tuple[Scaling, OwnFactors]:
    """What `resolve` returns, after everything that can refuse the model or the style. None: any that is possible."""
    if style not in ("multiplier", "folded", None):
        raise UserError(f"style={style!r}", fix="use 'multiplier' or 'folded'")
    if isinstance(model, nn.Module) and multipliers.installed(unwrap(model)):
        what = "this model is parametrized already: its multipliers would act twice"
        raise UserError(what, fix="build a new model; to see what was done to this one, use scaling.explain()")
    scaling, own_factors = resolve(model, base, rules, hints)
    refuse_own_multipliers(own_factors)
    style = style or multipliers.possible_style(scaling.model, scaling.multipliers)
    multipliers.refuse_style(style, scaling.model, scaling.multipliers)
    unchecked = (*scaling.anatomy.unchecked, *dict.fromkeys(own_factors.unchecked))
    return replace(scaling, unchecked=unchecked, origin=_origin(scaling, own_factors.base)), own_factors


def _origin(scaling: Scaling, base: Base) -> Origin:
    """Where the weights come from. The base's constructor shows how a fresh model looks."""
    counts: dict[str, int] = {}
    for name, version in (base.versions or {}).items():
        counts.setdefault(scaling.anatomy.template(name), version)
    templates = {name: r.template for name, r in scaling.parameters.items()}
    gains = [n for n, r in scaling.parameters.items() if (r.part.start or r.part.offset) and not r.part.kept]
    return find_origin(scaling.model, counts or None, templates, gains)


@recording()
def resolve(model: nn.Module, base: BaseLike | Base, rules: Rules | str, hints: Hints) -> tuple[Scaling, OwnFactors]:
    """(the table for this model and base, the factors in their forward passes). The model is not changed."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model is a {type(model).__name__}, not an nn.Module", fix="pass the model itself")
    rules, tuned = as_rules(rules), base if isinstance(base, Base) else Base(base)
    model = unwrap(model)
    refuse_what_has_no_rule(model)
    refuse_sharing(model)
    roles = {**rules.named_roles, **(hints.roles or {})}
    find = partial(_anatomy, model, tuned, roles, hints)
    anatomy = tuned.once("anatomy", find) if hints.specimen is None and tuned.is_small else find()
    own_factors = OwnFactors(model, tuned, anatomy, hints.example)
    ratios = Ratios(anatomy, *_shapes(model, tuned, anatomy))
    parameters = {}
    _refuse_absent_rows(rules, anatomy)
    further = _further(rules, ratios)
    for name, shape in ratios.shapes.items():
        place = (name, anatomy.template(name), anatomy.part(name), shape)
        muon = _muon_factor(name, ratios)
        parameters[name] = Resolved(*place, *ratios.of(name), muon=muon, width=ratios.m_N, further=further)
    placed = tuple(place_multipliers(own_factors, parameters, ratios, rules))
    buffers = tuple(name for name, b in model.named_buffers() if b.is_meta)
    with_c = with_folds(parameters, placed, anatomy)
    shapes = (ratios.base, ratios.target)
    assumed = frozenset(name for name in parameters if ratios.is_assumed(name))
    scaling = Scaling(model, rules, "multiplier", *shapes, anatomy, with_c, placed, assumed, buffers)
    return replace(scaling, constructed=_constructed(model, with_c)), own_factors


def _anatomy(model: nn.Module, base: Base, roles: Mapping[str, Role], hints: Hints) -> Anatomy:
    writers = [hints.writers] if isinstance(hints.writers, str) else hints.writers
    with on_cpu():  # you may be inside `with torch.device("meta")`, but the proof needs numbers
        specimen = choose_specimen(model, base, hints.specimen)
        return examine(specimen, example=hints.example, patterns=roles, writers=writers)


def _constructed(model: nn.Module, parameters: Table) -> dict[str, torch.Tensor]:
    """The values of the parameters that keep what their constructor gave them."""
    kept = {name: p for name, p in named_parameters(model) if parameters[name].part.kept}
    return {name: p.detach().clone() for name, p in kept.items() if not p.is_meta}


def _shapes(model: nn.Module, base: Base, anatomy: Anatomy) -> tuple[Shapes, Shapes | Shape]:
    """Parameter shapes of the model and of the base, which must have the same parts."""
    shapes = shapes_of(model)
    _check_names(shapes, set(anatomy.parts), anatomy, "the model", "the specimen that was examined")
    if base.model is None:
        assert base.shape is not None
        return shapes, base.shape
    base_shapes = shapes_of(base.model)
    _check_names(base_shapes, set(map(anatomy.template, shapes)), anatomy, "the base", "the model")
    return shapes, base_shapes


def _check_names(names: Mapping[str, object], expected: set[str], anatomy: Anatomy, this: str, that: str) -> None:
    templates = set(map(anatomy.template, names))
    missing, extra = sorted(expected - templates), sorted(templates - expected)
    no_blocks = not any(s.depth(names) for s in anatomy.blocks)
    if missing and not extra and no_blocks and all("*" in name for name in missing):
        stems = ", ".join(f"{s.stem}<number>" for s in anatomy.blocks)
        raise UserError(f"{this} has zero layers: no parameter is named {stems}…", fix="use at least one block")
    if missing or extra:
        lists = [f"only in {that}: {some(missing)}"] * bool(missing) + [f"only in {this}: {some(extra)}"] * bool(extra)
        what = f"{this} and {that} have different parameters: " + "; ".join(lists)
        raise UserError(what, fix="build both from the same class with the same options, except for width and depth")


def _further(rules: Rules, ratios: Ratios) -> dict[str, float]:
    """The ratio of every further axis."""
    try:
        return {axis: ratios.along(parameter, dimension) for axis, parameter, dimension in rules.axes}
    except IndexError as error:
        places = some([f"dimension {dimension} of {parameter}" for _, parameter, dimension in rules.axes])
        what = f"{rules.name}: the model does not have every dimension that the axes are read from: {places}"
        raise UserError(what, fix="use rules that were measured on this model") from error


def _refuse_absent_rows(rules: Rules, anatomy: Anatomy) -> None:
    """A row by name that no parameter follows would change nothing, without a word."""
    absent = [row.template for row in rules.named if row.template not in anatomy.parts]
    if absent:
        what = f"{rules.name}: there are rows for parameters that the model does not have: {some(absent)}"
        raise UserError(what, fix="use rules that `completep derive` measured on this model")


def _muon_factor(name: str, ratios: Ratios) -> float:
    axes, base = ratios.anatomy.part(name).fan_in, ratios.base_shape(name)
    if not axes or base is None:
        return 1.0

    def factor(s: Dimensions) -> float:
        fan_in, rows = product(s, axes), s[0]
        return muon_shape_factor(math.prod(s) // fan_in, fan_in, rows, math.prod(s) // rows)

    return factor(ratios.shapes[name]) / factor(base)


def with_folds(parameters: Table, placed: Sequence[Multiplier], anatomy: Anatomy) -> Table:
    """The parameters with c, the factor that each holds in the folded form."""
    folds = dict.fromkeys(parameters, 1.0)
    for m in placed:
        for name in m.parameters:
            folds[name] *= m.factor
        if m.kind == "embedding" and anatomy.tied:
            # The embedding's factor acts on both uses of a tied table; the final norm gives it back to the logits.
            for name, r in parameters.items():
                if r.template in anatomy.readout.parameters:
                    folds[name] /= m.factor
    for weight, gain in anatomy.readers.items():  # it reads a norm whose gain holds the multiplier of a tied readout
        folds[weight] /= folds[gain]
    return {name: replace(r, fold=folds[name]) for name, r in parameters.items()}
