"""`parametrize` and `explain`: find the roles, compare with the base, resolve the table, place the multipliers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from completep.anatomy.blocks import refuse_sharing, refuse_what_has_no_rule
from completep.anatomy.examine import examine
from completep.anatomy.forward import OwnFactors
from completep.anatomy.heads import grown_heads
from completep.anatomy.names import plain, unwrap
from completep.anatomy.ratios import Dimensions, Ratios, Shapes, product, shapes_of
from completep.anatomy.roles import Anatomy
from completep.anatomy.specimen import Base, Factory, choose_specimen, on_meta, size
from completep.anatomy.trace import Example
from completep.config import Shape
from completep.errors import UserError, some
from completep.rules import multipliers
from completep.rules.explain import Explanation
from completep.rules.multipliers import Multiplier, Style
from completep.rules.scaling import Resolved, Scaling
from completep.rules.table import COMPLETEP, Role, Rules, as_rules, muon_shape_factor

BaseLike = Factory | Shape
Table = dict[str, Resolved]
LARGEST_CHECKED = 100_000_000  # parameters of a model that is copied and run to find multipliers of its own


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
) -> Scaling:
    """Give `model` the scaling that `rules` prescribe for its size relative to `base`.

    A base factory is called twice: once on the meta device and once for real. The real copy is run twice, and twice
    more for each kind of branch, to find and prove the roles: six times for attention and MLP. Then copies of the base
    and of your model are run once each, to check that the model does not scale itself. This is skipped for a model on
    the meta device or with more than 100M parameters. If the base is a Shape, a copy of your model is run instead.

    Args:
        model: your model, on any device, including the meta device.
        base: the tuned model: a factory, or Shape(width, depth).
        rules: COMPLETEP, alpha(0.5), MUP or SP, or a key such as "completep" or "alpha=0.5".
        style: "multiplier": factors in the forward pass; "folded": the same training run with ordinary weights only.
        roles: {name pattern: Role} for parameters whose role cannot be found, or should be a different one.
        writers: name patterns of the parameters that write last into each residual branch, if they cannot be found.
        example: inputs to run the model on, if they cannot be guessed: a tensor, a tuple of arguments, or a dict.
        specimen: a small model of the same class to examine instead, if model and base are both too large to run.
    """
    scaling = _prepare(model, base, rules, style, Hints(roles, writers, example, specimen))
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
) -> Explanation:
    """What `parametrize` would do to each parameter of `model`, and why. The model is not changed.

    The other arguments are those of `parametrize`. `std`, `lr`, `weight_decay` and `eps` are your tuned base values.
    With the default of 1, the numbers are the factors themselves.
    """
    scaling = _prepare(model, base, rules, style, Hints(roles, writers, example, specimen))
    return replace(scaling, style=style).explain(std=std, lr=lr, weight_decay=weight_decay, eps=eps)


def _prepare(model: nn.Module, base: BaseLike, rules: Rules | str, style: Style, hints: Hints) -> Scaling:
    """The table for this model, after everything that can refuse the model or the style."""
    if style not in ("multiplier", "folded"):
        raise UserError(f"style={style!r}", fix="use 'multiplier' or 'folded'")
    if isinstance(model, nn.Module) and multipliers.installed(unwrap(model)):
        what = "this model is parametrized already: its multipliers would act twice"
        raise UserError(what, fix="build a new model; to see what was done to this one, use scaling.explain()")
    scaling, own = resolve(model, base, rules, hints)
    _refuse_own_multipliers(scaling, own)
    multipliers.refuse_style(style, scaling.model, scaling.multipliers)
    return scaling


def resolve(model: nn.Module, base: BaseLike, rules: Rules | str, hints: Hints) -> tuple[Scaling, OwnFactors]:
    """(the table for this model and base, the factors in their forward passes). The model is not changed."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model is a {type(model).__name__}, not an nn.Module", fix="pass the model itself")
    rules, tuned = as_rules(rules), Base(base)
    model = unwrap(model)
    refuse_what_has_no_rule(model)
    refuse_sharing(model)
    writers = [hints.writers] if isinstance(hints.writers, str) else hints.writers
    with torch.device("cpu"):  # you may be inside `with torch.device("meta")`, but the proof needs numbers
        specimen = choose_specimen(model, tuned, hints.specimen)
        anatomy = examine(specimen, example=hints.example, patterns=hints.roles, writers=writers)
    own = OwnFactors(model, tuned, anatomy, hints.example)
    ratios = Ratios(anatomy, *_shapes(model, tuned, anatomy))
    parameters = {}
    for name, shape in ratios.shapes.items():
        muon = _muon_factor(name, ratios)
        parameters[name] = Resolved(
            name, anatomy.template(name), anatomy.part(name), shape, *ratios.of(name), muon=muon
        )
    placed = tuple(_place_multipliers(own, parameters, ratios, rules))
    buffers = tuple(name for name, b in model.named_buffers() if b.is_meta)
    with_c = with_folds(parameters, placed, anatomy)
    return Scaling(model, rules, "multiplier", ratios.base, ratios.target, anatomy, with_c, placed, buffers), own


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
    no_blocks = not any(s.depth(names) for s in anatomy.stacks)
    if missing and not extra and no_blocks and all("*" in name for name in missing):
        stems = ", ".join(f"{s.stem}<number>" for s in anatomy.stacks)
        raise UserError(f"{this} has zero layers: no parameter is named {stems}…", fix="use at least one block")
    if missing or extra:
        lists = [f"only in {that}: {some(missing)}"] * bool(missing) + [f"only in {this}: {some(extra)}"] * bool(extra)
        what = f"{this} and {that} have different parameters: " + "; ".join(lists)
        raise UserError(what, fix="build both from the same class with the same options, except for width and depth")


def _muon_factor(name: str, ratios: Ratios) -> float:
    axes, base = ratios.anatomy.part(name).fan_in, ratios.base_shape(name)
    if not axes or base is None:
        return 1.0

    def factor(s: Dimensions) -> float:
        fan_in, rows = product(s, axes), s[0]
        return muon_shape_factor(math.prod(s) // fan_in, fan_in, rows, math.prod(s) // rows)

    return factor(ratios.shapes[name]) / factor(base)


def _place_multipliers(own: OwnFactors, parameters: Table, ratios: Ratios, rules: Rules) -> list[Multiplier]:
    """The multipliers of this model, with every module that they act on."""
    anatomy = ratios.anatomy
    modules = [plain(name) for name, _ in own.model.named_modules()]

    def multiplier(kind: multipliers.Kind, factor: float, sites: set[str | None], names: set[str]) -> Multiplier:
        hooked = () if None in sites else tuple(n for n in modules if anatomy.template(n) in sites)
        return Multiplier(kind, factor, hooked, tuple(r.name for r in parameters.values() if r.template in names))

    placed = []
    for stack in anatomy.stacks:
        branches = [b for b in anatomy.branches if any(p.startswith(stack.stem) for p in b.parameters)]
        sites = {b.module for b in branches}
        factor = rules.branch(1.0, ratios.depth[stack.stem])
        m = multiplier("branch", factor, sites, {p for b in branches for p in b.parameters})
        if m.modules and len(m.modules) != len(sites) * stack.depth(parameters):
            what = f"some blocks of '{stack.stem}*' hold the modules that write to the stream under another name"
            raise UserError(what, fix="call parametrize before you wrap the blocks")
        placed.append(m)
    m_readout = parameters[anatomy.width[0]].m_N
    readout = anatomy.readout
    placed.append(multiplier("logits", rules.logits(m_readout), {readout.module}, set(readout.parameters)))
    for table, scale in anatomy.tables.items():
        if _is_root_of_width(scale, ratios, own):
            site = table.removesuffix(".weight")
            placed.append(multiplier("embedding", rules.embedding(ratios.m_N), {site}, {table}))
    if own.base.model is not None:
        placed += _attention_multipliers(own.model, own.base.model, ratios, rules)
    return placed


def _attention_multipliers(model: nn.Module, base: nn.Module, ratios: Ratios, rules: Rules) -> list[Multiplier]:
    placed: dict[float, Multiplier] = {}
    for here, there in grown_heads(model, base, ratios.anatomy, ratios.target.width, ratios.base.width):
        factor = rules.attention(here.head_size / there.head_size) / (here.scale / there.scale)
        if not rules.attention.width or abs(factor - 1) < 1e-9:
            continue
        site = here.query_site(there)
        names = tuple(f"{site}.{name}" for name, _ in model.get_submodule(site).named_parameters())
        m = placed.get(factor, Multiplier("attention", factor, (), ()))
        placed[factor] = replace(m, modules=(*m.modules, site), parameters=(*m.parameters, *names))
    return list(placed.values())


def _is_root_of_width(scale: float, ratios: Ratios, own: OwnFactors) -> bool:
    """Gemma multiplies its embeddings by sqrt(N), a width factor that the rules do not want.

    One number cannot distinguish sqrt(N) from a constant that happens to be equal, so the factor is also measured at
    the model's own width, if the model can be run.
    """

    def is_root(value: float, width: int) -> bool:
        return value > 1.01 and abs(value / math.sqrt(width) - 1) < 1e-2

    width, specimen_width = ratios.target.width, ratios.anatomy.specimen_width
    if not is_root(scale, specimen_width) or width == specimen_width:
        return is_root(scale, specimen_width)
    if on_meta(own.model) or size(own.model) > LARGEST_CHECKED:
        return True
    return any(is_root(value, width) for value in own.here.tables.values())


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
    return {name: replace(r, fold=folds[name]) for name, r in parameters.items()}


def _refuse_own_multipliers(scaling: Scaling, own: OwnFactors) -> None:
    """A model that already scales its branches or logits with its size would be scaled twice."""
    model = scaling.model
    if own.base.factory is None or on_meta(model) or size(model) > LARGEST_CHECKED or own.at_base is None:
        return
    for name, value in own.here.sites.items():
        at_base = own.at_base.sites[scaling.anatomy.template(name)]
        if abs(value / at_base - 1) > 0.02:
            sizes = f"{at_base:.4g} at the base, {value:.4g} here"
            what = f"the model itself multiplies '{name}' by a factor that depends on its size: {sizes}"
            raise UserError(what, fix="switch that off and let the rules do it; to check the model as it is, use audit")
