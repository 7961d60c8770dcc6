"""Where the multipliers of a model act, and how large they are, given the factors that the model contains already."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from completep.anatomy.blocks import Stack
from completep.anatomy.forward import OwnFactors
from completep.anatomy.heads import Attention, named_heads
from completep.anatomy.names import plain
from completep.anatomy.ratios import Ratios
from completep.anatomy.roles import Site
from completep.errors import UserError, some
from completep.rules.multipliers import Kind, Multiplier
from completep.rules.scaling import Resolved
from completep.rules.table import ONE, Rules, as_power, power_of

Table = Mapping[str, Resolved]
MEASURED = 2e-2  # accuracy of a factor in a forward pass, through a soft-cap


def place_multipliers(own_factors: OwnFactors, parameters: Table, ratios: Ratios, rules: Rules) -> list[Multiplier]:
    """The multipliers of this model, with every module that they act on."""
    anatomy = ratios.anatomy
    modules = [plain(name) for name, _ in own_factors.model.named_modules()]

    def multiplier(kind: Kind, factor: float, sites: set[str | None], names: set[str]) -> Multiplier:
        hooked = () if None in sites else tuple(n for n in modules if anatomy.template(n) in sites)
        return Multiplier(kind, factor, hooked, tuple(r.name for r in parameters.values() if r.template in names))

    placed = []
    for stack in anatomy.blocks:
        branches = [b for b in anatomy.branches if any(p.startswith(stack.stem) for p in b.parameters)]
        sites = {b.module for b in branches}
        factor = rules.branch(1.0, ratios.depth[stack.stem])
        m = multiplier("branch", factor, sites, {p for b in branches for p in b.parameters})
        if m.modules and len(m.modules) != _count_sites(stack, branches, parameters):
            what = f"some blocks of '{stack.stem}*' hold the modules that write to the stream under another name"
            raise UserError(what, fix="call parametrize before you wrap the blocks")
        placed.append(m)
    for weight in dict.fromkeys(outlet.weight for outlet in anatomy.outlets):
        same = [outlet for outlet in anatomy.outlets if outlet.weight == weight]
        holders = set(same[0].parameters) if len({o.parameters for o in same}) == 1 else set()
        placed.append(multiplier("logits", rules.logits(parameters[weight].m_N), {o.module for o in same}, holders))
    placed += [
        multiplier("embedding", factor, {table.rpartition(".")[0]}, _beside(table, parameters))
        for table, factor in _embedding_factors(own_factors, ratios, rules).items()
    ]
    if own_factors.base.model is not None:
        placed += _attention_multipliers(own_factors, parameters, ratios, rules)
    own_factors.unchecked += _unknown_growth(own_factors, ratios, rules)
    return placed


def _beside(weight: str, parameters: Table) -> set[str]:
    """A weight, and the bias of its module."""
    site = weight.rpartition(".")[0]
    return {name for name in parameters if name.rpartition(".")[0] == site}


def _count_sites(stack: Stack, branches: Sequence[Site], parameters: Table) -> int:
    """How many modules end a branch, by the parameters that they hold. Blocks of a hybrid stack differ."""
    sites = set()
    for name, r in parameters.items():
        if match := stack.pattern.match(name):
            sites |= {(match.group(1), stack.expert(name), b.module) for b in branches if r.template in b.parameters}
    return len(sites)


def _attention_multipliers(
    own_factors: OwnFactors, parameters: Table, ratios: Ratios, rules: Rules
) -> list[Multiplier]:
    """Factors on the queries where the model's own scale on q·k does not grow as the rules want."""
    if rules.attention == ONE:
        return []
    here, at_base = own_factors.here_or_reduced, own_factors.at_base
    measured = {} if here is None or at_base is None else here.attentions
    _refuse_unmeasured_heads(own_factors, ratios, {ratios.anatomy.template(name) for name in measured})
    placed: dict[float, Multiplier] = {}
    for name, attention in measured.items():
        there = at_base.attentions.get(ratios.anatomy.template(name)) if at_base is not None else None
        if there is None:
            continue
        growth = attention.head_size / there.head_size
        factor = rules.attention(growth) / as_power(attention.scale / there.scale, growth)
        if abs(factor - 1) < 1e-3:
            continue
        if attention.query is None:
            raise _no_place(attention, there)
        sites = _query_sites(attention.query, own_factors)
        m = placed.get(factor, Multiplier("attention", factor, (), ()))
        names = [name for name in parameters if name.rpartition(".")[0] in sites]
        modules = tuple(dict.fromkeys((*m.modules, *sites)))
        placed[factor] = replace(m, modules=modules, parameters=tuple(dict.fromkeys((*m.parameters, *names))))
    return list(placed.values())


def _unknown_growth(own_factors: OwnFactors, ratios: Ratios, rules: Rules) -> Iterator[str]:
    """What may have grown in another way than the rules assume, and products of activations that they cannot scale."""
    here, at_base, template = own_factors.here_or_reduced, own_factors.at_base, own_factors.anatomy.template
    if ratios.m_N == 1:
        return
    factory = "a Shape does not say: pass base as a factory"
    if assumed := list(dict.fromkeys(template(name) for name in ratios.shapes if ratios.is_assumed(name))):
        yield f"whether {some(assumed)} grow with the width, as is assumed; {factory}"
    if here is None or rules.attention == ONE:
        return
    if own_factors.base.model is None and (here.attentions or here.unmeasured):
        yield f"the scale on q·k and how large the heads of the base are, which {factory}"
    there = {} if at_base is None else at_base.unmeasured
    for name, size in {template(n): size for n, size in here.unmeasured.items()}.items():
        if there.get(name, size) != size:
            grown = f"which sums over {size / there[name]:.4g} times as many numbers as at the base"
            yield f"the scale on a product of activations in '{name}', {grown}: it cannot be measured"


def _no_place(here: Attention, there: Attention) -> UserError:
    """A factor on the queries is needed, but cannot be put on them."""
    why = f"and {here.obstacle}, so the factor that this needs has no place"
    if here.head_size != there.head_size:
        what = f"'{here.name}' has heads of {here.head_size} where the base has {there.head_size}, {why}"
        return UserError(what, fix=f"keep the head size at {there.head_size} and use more heads")
    scales = f"{there.scale:.4g} at the base, {here.scale:.4g} here"
    what = f"'{here.name}' scales q·k by a number that depends on the size of the model ({scales}), {why}"
    return UserError(what, fix="use one scale for one head size")


def _query_sites(query: str, own_factors: OwnFactors) -> list[str]:
    """The module that makes the queries, and its counterparts if only one block was run."""
    template = own_factors.anatomy.template
    names = [plain(name) for name, _ in own_factors.model.named_modules()]
    return [query] if own_factors.is_whole else [name for name in names if template(name) == template(query)]


def _refuse_unmeasured_heads(own_factors: OwnFactors, ratios: Ratios, measured: set[str]) -> None:
    """An attention that grew, by its attributes, but that the forward pass did not show."""
    assert own_factors.base.model is not None
    anatomy = ratios.anatomy

    def heads(model: nn.Module, width: int) -> dict[str, tuple[str, int]]:
        sizes = list(named_heads(model, width, lambda name: anatomy.stack_of(plain(name)) is not None))
        return {anatomy.template(plain(name)): (plain(name), size) for name, size in reversed(sizes)}

    at_base = heads(own_factors.base.model, ratios.base.width)
    for template, (name, size) in heads(own_factors.model, ratios.target.width).items():
        seen = any(site == template or site.startswith(f"{template}.") for site in measured)
        if not seen and template in at_base and at_base[template][1] != size:
            there = at_base[template][1]
            what = f"'{name}' has heads of {size} where the base has {there}, and its scale on q·k cannot be measured"
            raise UserError(what, fix=f"keep the head size at {there} and use more heads")


def _embedding_factors(own_factors: OwnFactors, ratios: Ratios, rules: Rules) -> dict[str, float]:
    """What takes the width out of factors that the model itself puts on its embeddings, such as Gemma's sqrt(N)."""
    if rules.embedding == ONE:
        return {}
    factors: dict[str, float] = {}
    here, at_base = own_factors.here_or_reduced, own_factors.at_base
    for table, scale in ratios.anatomy.tables.items():
        if here is None or at_base is None or own_factors.guessed_buffers:
            exponent = _assumed_exponent(table, scale, ratios, own_factors)
        elif here.tables[table] == at_base.tables[table] == 0:
            what = f"'{table}' reaches the readout only through branches: the stream that is read holds other tokens"
            fix = "apply the final norm to all tokens and choose one after it: norm(x)[:, 0], not norm(x[:, 0])"
            raise UserError(what, fix=fix)
        else:
            exponent = _measured_exponent(table, here.tables[table], at_base.tables[table], ratios)
        if exponent:
            factors[table] = rules.without_width(exponent, ratios.m_N)
    return factors


class SizeFactorError(UserError):
    """The model multiplies its embedding, or the stream, by a factor that no power of the width explains."""

    def __init__(self, table: str, at_base: float, here: float) -> None:
        sizes = f"{at_base:.4g} at the base, {here:.4g} here"
        what = f"the model multiplies '{table}' by a factor that depends on its size, by no simple power: {sizes}"
        fix = "use the same constant at every size; a multiplier belongs on the branch, x + c·f(x), not on the stream"
        super().__init__(what, fix=fix)
        self.table, self.at_base, self.here = table, at_base, here


def _measured_exponent(table: str, here: float, at_base: float, ratios: Ratios) -> float:
    """The power of the width that the model multiplies an embedding by."""
    exponent = power_of(here / at_base, ratios.m_N) if at_base else None
    if exponent is None:
        raise SizeFactorError(table, at_base, here)
    return exponent


def _assumed_exponent(table: str, scale: float, ratios: Ratios, own_factors: OwnFactors) -> float:
    """One number cannot distinguish sqrt(N) from a constant that happens to be equal, so this is an assumption."""
    is_root = scale > 1.01 and abs(scale / math.sqrt(ratios.anatomy.specimen_width) - 1) < 1e-2
    if not abs(scale - 1) <= 1e-3:
        assumed = "the square root of its width" if is_root else "a constant"
        own_factors.unchecked.append(f"the factor {scale:.4g} on '{table}', which is assumed to be {assumed}")
    return 0.5 if is_root else 0.0


def refuse_own_multipliers(own_factors: OwnFactors) -> None:
    """A model that already scales its branches or logits with its size would be scaled twice."""
    here, at_base = own_factors.here_or_reduced, own_factors.at_base
    for name, value in ({} if here is None else here.sites | here.bare).items():
        if at_base is None:
            if not abs(value - 1) <= MEASURED:
                place = own_factors.anatomy.template(name)
                own_factors.unchecked.append(
                    f"whether the factor {value:.4g} on '{place}' is the same at the base, which was not run"
                )
            continue
        expected = (at_base.sites | at_base.bare)[own_factors.anatomy.template(name)]
        if not abs(value - expected) <= MEASURED * abs(expected):
            sizes = f"{expected:.4g} at the base, {value:.4g} here"
            what = f"the model itself multiplies '{name}' by a factor that depends on its size: {sizes}"
            raise UserError(what, fix="switch that off and let the rules do it; to check the model as it is, use audit")
    _refuse_training_factors(own_factors)


def _refuse_training_factors(own_factors: OwnFactors) -> None:
    """A factor of training mode alone may be any constant, but no rule knows one that depends on the size."""
    here, at_base = own_factors.here_or_reduced, own_factors.at_base
    if here is None:
        return
    there = {} if at_base is None else at_base.in_training()
    for (inside, name), value in here.in_training().items():
        expected = there.get((inside, own_factors.anatomy.template(name)), 1.0)
        if abs(value - expected) <= MEASURED * abs(expected):
            continue
        what = f"in training mode only, the model multiplies {inside}'{name}' by a factor"
        if at_base is None:
            own_factors.unchecked.append(
                f"whether {what.replace('only, ', '')} that is the same at the base: {value:.4g} here"
            )
            continue
        sizes = f"{expected:.4g} at the base, {value:.4g} here"
        fix = "let forward do the same in both modes, or use one constant at every size"
        raise UserError(f"{what} that depends on its size: {sizes}", fix=fix)
