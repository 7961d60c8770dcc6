"""The five-line entry: find the parts, compare with the base, resolve the table, put the multipliers on."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from completep.config import Shape
from completep.errors import UserError, some
from completep.rules import multipliers
from completep.rules.anatomy import Stack, refuse_what_has_no_rule
from completep.rules.examine import Factory, build, choose_specimen, examine, on_meta, refuse_sharing, size
from completep.rules.heads import attention_multipliers
from completep.rules.measure_forward import own_factors, own_tables
from completep.rules.multipliers import Multiplier, plain
from completep.rules.ratios import Ratios, product, shapes_of
from completep.rules.roles import Anatomy, Site
from completep.rules.scaling import Resolved, Scaling, Style, unwrap
from completep.rules.table import COMPLETEP, Role, Rules, muon_shape_factor


def parametrize(
    model: nn.Module,
    *,
    base: "Factory | Shape",
    rules: Rules = COMPLETEP,
    style: Style = "multiplier",
    roles: "Mapping[str, Role] | None" = None,
    writers: "list[str] | None" = None,
    example: Any = None,
    specimen: "Factory | nn.Module | None" = None,
) -> Scaling:
    """Give `model` the scaling that `rules` prescribe for its size relative to `base`.

    Args:
        model: yours, on any device, the meta device included.
        base: the tuned model: a factory (built on the meta device, so its size costs nothing), or Shape(width, depth).
        rules: COMPLETEP, alpha(0.5), MUP or SP.
        style: "multiplier": factors in the forward pass; "folded": the same training run with ordinary weights only.
        roles: {name pattern: Role} for parameters whose role cannot be found, or should be another.
        writers: name patterns of the parameters that write last into each residual branch, if they cannot be found.
        example: inputs to run the model on, if they cannot be guessed: a tensor, a tuple of arguments, a dict.
        specimen: a small model of the same class to examine instead, if model and base are both too large to run.
    """
    _check_arguments(model, rules, roles)
    if style not in ("multiplier", "folded"):
        raise UserError(f"style={style!r}", fix="use 'multiplier' or 'folded'")
    if multipliers.installed(unwrap(model)):
        raise UserError(
            "this model is parametrized already: its multipliers would act twice",
            fix="build a fresh model, or call scaling.fold() first",
        )
    scaling = resolve(model, base=base, rules=rules, roles=roles, writers=writers, example=example, specimen=specimen)
    refuse_own_multipliers(scaling, base, example)
    if style == "folded":
        return scaling.fold()
    multipliers.needs_modules(scaling.multipliers, scaling.model)
    multipliers.install(scaling.model, scaling.multipliers)
    return scaling


def resolve(
    model: nn.Module,
    *,
    base: "Factory | Shape",
    rules: Rules,
    roles: "Mapping[str, Role] | None" = None,
    writers: "list[str] | None" = None,
    example: Any = None,
    specimen: "Factory | nn.Module | None" = None,
) -> Scaling:
    """The table for this model and base, with nothing applied to the model yet."""
    _check_arguments(model, rules, roles)
    writers = [writers] if isinstance(writers, str) else writers
    model = unwrap(model)
    refuse_what_has_no_rule(model)
    refuse_sharing(model)
    shape, factory = (base, None) if isinstance(base, Shape) else (None, base)
    base_model = _build_base(factory) if factory is not None else None
    with torch.device("cpu"):  # the user may be inside `with torch.device("meta")`; the proof needs numbers
        body = choose_specimen(model, base_model, factory, specimen)
        found = examine(body, example=example, patterns=roles, writers=writers)
    shapes, base_shapes = shapes_of(model), None
    check_names(shapes, set(found.parts), found, "the model", "the specimen that was examined")
    if base_model is not None:
        base_shapes = shapes_of(base_model)
        check_names(base_shapes, {found.template(n) for n in shapes}, found, "the base", "the model")
    ratios = Ratios(found, shapes, base_shapes, shape)
    buffers = tuple(name for name, b in model.named_buffers() if b.is_meta)
    parameters = resolve_parameters(found, shapes, ratios)
    placed = place_multipliers(model, base_model, found, parameters, ratios, rules, example)
    return Scaling(
        model, rules, "multiplier", found, with_folds(parameters, placed, found), placed, ratios.base, buffers
    )


def _check_arguments(model: Any, rules: Any, roles: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"model is a {type(model).__name__}, not an nn.Module", fix="pass the model itself")
    if not isinstance(rules, Rules):
        raise UserError(f"rules={rules!r} are not rules", fix="use SP, MUP, COMPLETEP or alpha(0.5 … 1)")
    if roles is not None and not isinstance(roles, Mapping):
        raise UserError(f"roles={roles!r} is not a mapping", fix="roles={'blocks.*.gate.weight': Role.HIDDEN}")
    for pattern, role in (roles or {}).items():
        if not isinstance(role, Role):
            raise UserError(
                f"roles: {pattern!r} is given {role!r}", fix="use a Role: " + ", ".join(f"Role.{r.name}" for r in Role)
            )


LARGEST_CHECKED = 100_000_000  # parameters of a target that is copied and run to see what its own forward pass scales


def refuse_own_multipliers(scaling: Scaling, base: "Factory | Shape", example: Any) -> None:
    """A model that already scales its branches or logits with its size would have it twice."""
    model = scaling.model
    if isinstance(base, Shape) or on_meta(model) or size(model) > LARGEST_CHECKED:
        return
    with torch.device("cpu"):
        here, there = (
            own_factors(model, scaling.anatomy, example),
            own_factors(_build_real(base), scaling.anatomy, example),
        )
    at_base = {scaling.anatomy.template(name): value for name, value in there.items()}
    for name, value in here.items():
        before = at_base[scaling.anatomy.template(name)]
        if abs(value / before - 1) > 0.02:
            raise UserError(
                f"the model itself multiplies '{name}' by a factor that depends on its size: {before:.4g} at the base, {value:.4g} here",
                fix="switch that off, and let the rules do it; to check such a model as it is, use `completep audit`",
            )


def _build_real(factory: Factory) -> nn.Module:
    return build(factory, "cpu").float()


def _build_base(factory: Any) -> nn.Module:
    if not callable(factory) or isinstance(factory, nn.Module):
        raise UserError(
            f"base is a {type(factory).__name__}, neither a factory nor a Shape",
            fix="base=lambda: MyModel(width=256, depth=2), or base=Shape(256, 2)",
        )
    try:
        return build(factory, "meta")
    except UserError:
        # Some constructors compute on their tensors; build those for real, and let that fail if it must.
        return build(factory, "cpu")


def check_names(shapes: "dict[str, tuple[int, ...]]", expected: set[str], found: Anatomy, this: str, that: str) -> None:
    """The same parts at another size: nothing may be missing or new."""
    templates = {found.template(name) for name in shapes}
    missing, extra = sorted(expected - templates), sorted(templates - expected)
    if (
        missing
        and not extra
        and all("*" in name for name in missing)
        and not any(s.depth(list(shapes)) for s in found.stacks)
    ):
        stems = ", ".join(f"{s.stem}<number>" for s in found.stacks)
        raise UserError(f"{this} has zero layers: no parameter is named {stems}…", fix="it needs at least one block")
    if missing or extra:
        told = [f"only in {that}: {some(missing)}"] * bool(missing) + [f"only in {this}: {some(extra)}"] * bool(extra)
        raise UserError(
            f"{this} and {that} have different parameters: " + "; ".join(told),
            fix="build both from the same class with the same options, differing in width and depth only",
        )


def resolve_parameters(found: Anatomy, shapes: "dict[str, tuple[int, ...]]", ratios: Ratios) -> dict[str, Resolved]:
    resolved = {}
    for name, shape in shapes.items():
        template = found.template(name)
        part = found.parts[template]
        m_N, m_out, m_L = ratios.of(name)
        muon = _muon(part.fan_in, shape, ratios.base_shape(name))
        resolved[name] = Resolved(name, template, part, shape, m_N, m_out, m_L, muon=muon)
    return resolved


def _muon(axes: tuple[int, ...], shape: tuple[int, ...], base: "tuple[int, ...] | None") -> float:
    if not axes or base is None:
        return 1.0

    def factor(s: tuple[int, ...]) -> float:
        fan_in, rows = product(s, axes), s[0]
        return muon_shape_factor(math.prod(s) // fan_in, fan_in, rows, math.prod(s) // rows)

    return factor(shape) / factor(base)


def place_multipliers(
    model: nn.Module,
    base_model: nn.Module | None,
    found: Anatomy,
    parameters: dict[str, Resolved],
    ratios: Ratios,
    rules: Rules,
    example: Any,
) -> tuple[Multiplier, ...]:
    """The forward factors of this model, at every module that they act on."""
    modules = [plain(name) for name, _ in model.named_modules()]

    def of(templates: "list[str | None]") -> tuple[str, ...]:
        wanted = set(templates)
        return tuple(n for n in modules if found.template(n) in wanted)

    def having(templates: "tuple[str, ...]") -> tuple[str, ...]:
        return tuple(r.name for r in parameters.values() if r.template in templates)

    placed = []
    for stack in found.stacks:
        sites = [b for b in found.branches if any(p.startswith(stack.stem) for p in b.parameters)]
        hooked = of([b.module for b in sites]) if all(b.module for b in sites) else ()
        names = having(tuple(p for b in sites for p in b.parameters))
        _all_hooked(stack, sites, hooked, len(sites) * stack.depth(list(parameters)))
        placed.append(Multiplier("branch", rules.branch(1.0, ratios.depth[stack.stem]), hooked, names))
    m_readout = parameters[found.width[0]].m_N
    placed.append(
        Multiplier(
            "logits",
            rules.logits(m_readout),
            of([found.readout.module]) if found.readout.module else (),
            having(found.readout.parameters),
        )
    )
    for table, scale in found.tables.items():
        if is_root_of_width(scale, found, model, ratios.width, example):
            placed.append(
                Multiplier(
                    "embedding", rules.embedding(ratios.m_N), of([table.removesuffix(".weight")]), having((table,))
                )
            )
    if base_model is not None:
        placed += attention_multipliers(model, base_model, found, rules, ratios.width, ratios.base.width)
    return tuple(placed)


def _all_hooked(stack: Stack, sites: list[Site], hooked: tuple[str, ...], expected: int) -> None:
    distinct = len({b.module for b in sites})
    if hooked and len(hooked) * len(sites) != expected * distinct:
        raise UserError(
            f"of the modules that write to the stream in '{stack.stem}*', {len(hooked)} were found: some blocks hold theirs elsewhere",
            fix="parametrize before wrapping the blocks",
        )


def is_root_of_width(scale: float, found: Anatomy, model: nn.Module, width: int, example: Any) -> bool:
    """Gemma multiplies its embeddings by sqrt(N): a width factor that the rules do not want.

    One number cannot tell sqrt(N) from a constant that happens to equal it, so a model that can be run is asked at its own width.
    """

    def is_root(value: float, width: int) -> bool:
        return value > 1.01 and abs(value / math.sqrt(width) - 1) < 1e-2

    if not is_root(scale, found.specimen_width) or width == found.specimen_width:
        return is_root(scale, found.specimen_width)
    if on_meta(model) or size(model) > LARGEST_CHECKED:
        return True
    return any(is_root(value, width) for value in own_tables(model, found, example).values())


def with_folds(parameters: dict[str, Resolved], placed: tuple[Multiplier, ...], found: Anatomy) -> dict[str, Resolved]:
    """c of every parameter that takes a multiplier in the folded form."""
    folds = dict.fromkeys(parameters, 1.0)
    for m in placed:
        for name in m.parameters:
            folds[name] *= m.factor
        if m.kind == "embedding" and found.tied:
            # The tied table takes the embedding's factor on both of its uses; the final norm gives it back to the logits.
            for name in parameters:
                if found.template(name) in found.readout.parameters:
                    folds[name] /= m.factor
    return {name: replace(r, fold=folds[name]) for name, r in parameters.items()}
