"""What is checked: a model with its optimizer at one shape, and the batches it is trained and measured on.

A factory that returns a model gets the rules under check. A factory that returns (model, optimizer), such as your own
implementation of muP, is checked as it is.
"""

import sysconfig
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from completep import paper
from completep.anatomy.forward import ForwardFactors, measure_forward
from completep.anatomy.names import named_parameters
from completep.anatomy.roles import Anatomy
from completep.anatomy.specimen import Base, build, guess_example, size
from completep.anatomy.trace import call, find_logits, logits_of
from completep.config import Shape
from completep.errors import UserError
from completep.load import call_factory, load_factory
from completep.measure.layout import Layout
from completep.measure.optimizers import SGD, AdamW, Muon
from completep.rules.parametrize import Hints, parametrize_on, resolve
from completep.rules.scaling import Factors, Scaling
from completep.rules.table import COMPLETEP, RANDOM_SUM, SP, Column, Role, Rules, alpha, optimizer_kind

Inputs = Tensor | tuple[object, ...] | dict[str, object]  # as forward takes them
Batch = tuple[Inputs, Tensor]  # and the target classes
Batches = Callable[[int], Batch]
OptimizerName = Literal["adamw", "sgd", "muon"]
LARGEST_KEPT = 2_000_000  # parameters of a model that a family keeps
NO_RULES = replace(SP, key="none", name="no rules")  # a model as its constructor made it, with one AdamW group


@dataclass(frozen=True)
class Setting:
    """The paper's coordinate-check settings (experiment table, Figure "Coordinate check"), with shorter sequences."""

    std: float = paper.CHECK_STD
    lr: float = paper.CHECK_LR
    eps: float = paper.EPS
    weight_decay: float = 0.0
    batch: int = paper.CHECK_BATCH
    time: int = 128
    steps: int = paper.CHECK_STEPS
    optimizer: OptimizerName = "adamw"

    def __post_init__(self) -> None:
        for name in ("batch", "time", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1", fix=f"set {name} to 1 or more")
        if not self.std > 0:
            raise UserError(f"std={self.std}: must be positive", fix="give the init standard deviation of your base")
        if self.optimizer not in get_args(OptimizerName):
            what = f"optimizer={self.optimizer!r}"
            raise UserError(what, fix="use 'adamw', 'sgd' or 'muon', or let the factory return (model, optimizer)")


@dataclass(frozen=True)
class Source:
    """How to build what is checked at any width and depth."""

    factory: "str | Callable[..., object]"
    base: Shape
    arguments: Mapping[str, object] = field(default_factory=dict)
    names: tuple[str, str] = ("width", "depth")  # what the factory calls them
    roles: "Mapping[str, Role] | None" = None  # as for parametrize, where a role cannot be found
    batches: "str | Batches | None" = None  # step → (inputs, targets); None: Python's own source, or noise for images
    grown: Mapping[str, object] = field(default_factory=dict)  # arguments that are other than the base's

    def make(self, shape: Shape) -> object:
        factory = load_factory(self.factory) if isinstance(self.factory, str) else self.factory
        sizes = dict(zip(self.names, (shape.width, shape.depth), strict=True))
        return call_factory(factory, {**self.arguments, **sizes, **self.grown})

    def base_model(self) -> nn.Module:
        """Built for real, in float32. Callers build it once and pass it on."""

        def model() -> nn.Module:
            return _model_and_optimizers(replace(self, grown={}).make(self.base))[0]

        return build(model, "cpu").float()


@contextmanager
def speaking_of(what: str) -> Iterator[None]:
    """Any error of a user's model or batches becomes one that says where it came from."""
    try:
        yield
    except UserError as error:
        if "example=" not in error.fix:
            raise
        fix = "give batches=<function of a number that returns (inputs, targets)>, with inputs that forward takes"
        raise UserError(error.what, fix=fix) from error  # the check takes its example from the batches
    except Exception as error:
        raise UserError(
            f"{what}: {type(error).__name__}: {error}",
            fix="check that the batches fit the model: ids and classes below its vocabulary, integer targets",
        ) from error


@dataclass(frozen=True)
class Trained:
    """What one parameter is trained with."""

    lr: float
    weight_decay: float
    eps: float | None  # None where the optimizer's step does not depend on one


@dataclass
class Subject:
    """One shape of it, ready to train."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    expected: Scaling  # what the reference rules say about every parameter
    forward: ForwardFactors  # the multipliers in the forward pass, measured
    layout: Layout

    @property
    def anatomy(self) -> Anatomy:
        return self.expected.anatomy

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By name, as in `named_parameters`."""
        return self.layout.parameters

    @cached_property
    def settings(self) -> dict[str, Trained]:
        """The settings of every parameter that an optimizer trains."""
        names = {id(p): name for name, p in self.parameters.items() if p.requires_grad}
        trained: dict[str, Trained] = {}
        for optimizer in self.optimizers:
            has_eps = optimizer_kind(optimizer).column is Column.ADAM
            for group in optimizer.param_groups:
                _refuse_group(optimizer, group)
                lr = float(group.get("initial_lr", group["lr"]))  # a scheduler changes lr, but not initial_lr
                eps = float(group["eps"]) if has_eps and "eps" in group else None
                settings = Trained(lr, float(group.get("weight_decay", 0.0)), eps)
                trained |= {names[id(p)]: settings for p in group["params"] if id(p) in names}
        if not trained:
            what = "the optimizer trains no parameter of this model"
            raise UserError(what, fix="build the optimizer from the parameters of the model that the factory returns")
        return trained

    @cached_property
    def untrained(self) -> list[str]:
        """Templates of parameters that no optimizer trains, or that are frozen."""
        names = [name for name in self.parameters if name not in self.settings]
        return list(dict.fromkeys(map(self.anatomy.template, names)))

    def expected_settings(self, name: str) -> Factors:
        """What the reference rules multiply the base's settings by."""
        r = self.expected.parameters[name]
        column = self.columns.get(name, Column.ADAM)
        rule = self.expected.rules.rule_of(r.template, r.role, column)
        factors = r.factors(rule, column, 1.0)
        decay = rule.weight_decay(*r.ratios(rule))  # also for roles that the rules do not decay, but you may
        return replace(factors, weight_decay=decay if r.role.trait.decayed else 1 / factors.lr)

    def expected_std(self, name: str) -> float:
        """The starting size that makes the output of a product as large as the forward rules want it.

        This is the role's row, also where a parameter has a row of its own.
        """
        r = self.expected.parameters[name]
        rule = self.expected.rules.rule(r.role)
        return rule.init_std(*r.ratios(rule))

    def lag(self, name: str) -> float:
        """How much more the model's width has grown than the output of a parameter in its blocks, in any unit.

        A gain that heads share has as large an output as its norm. Outside the blocks nothing has to grow.
        """
        r, width = self.expected.parameters[name], self.expected.m_N
        if r.role.trait.shared and (size := self.forward.normed.get(name.rpartition(".")[0])):
            return width / size
        return width / r.m_out if r.role.trait.inside and r.role.trait.fan in ("matrix", "vector") else 1.0

    def expected_gain(self, name: str) -> float:
        """The same for the gain: starting values, the sum over the fan-in, and the multipliers after it."""
        r = self.expected.parameters[name]
        sums = r.role.trait.matrix and not r.role.trait.table
        sum_over_inputs = RANDOM_SUM(r.m_N) if sums else 1.0
        return self.expected_std(name) * sum_over_inputs * self.expected_multiplier(name)

    def expected_multiplier(self, name: str) -> float:
        """The same for what the forward pass multiplies the product by."""
        r = self.expected.parameters[name]
        rules, kinds = self.expected.rules, {m.kind for m in self.expected.multipliers if name in m.parameters}
        outside = rules.branch(1.0, r.m_L) if "branch" in kinds else 1.0
        if "logits" in kinds and r.role.trait.matrix:  # a tied readout has a row of its own
            outside *= rules.logits(r.m_N)
        return outside

    @property
    def expected_tied_multiplier(self) -> float:
        """The same for a tied readout, whose matrix is the embedding."""
        return self.expected.rules.logits(self.expected.m_N)

    def factor(self, name: str) -> float:
        """What the forward pass multiplies a parameter's product by on its way into the stream or the logits."""
        if name in self.forward.tables and not self.normed_entry:
            return abs(self.forward.tables[name])
        if name in self.forward.bare:
            return abs(self.forward.bare[name])
        module = self.site(name)
        return 1.0 if module is None else abs(self.forward.sites.get(module, 1.0))

    def site(self, name: str) -> str | None:
        """The module at the end of a branch, or the readout, whose product this parameter makes."""
        module, stack = self._ends.get(self.anatomy.template(name)), self.anatomy.stack_of(name)
        if module is None or stack is None or (match := stack.pattern.match(name)) is None:
            return module
        return module.replace("*", match.group(1), 1).replace("*", stack.expert(name) or "*", 1)

    @cached_property
    def _ends(self) -> dict[str, str | None]:
        """By template of a parameter: the template of such a module."""
        anatomy = self.anatomy
        outlets = {outlet.weight: outlet.module for outlet in anatomy.outlets if outlet.weight in outlet.parameters}
        return outlets | {p: branch.module for branch in anatomy.branches for p in branch.parameters}

    @cached_property
    def writers(self) -> set[str]:
        """Templates of the parameters whose product enters the stream last in each branch."""
        return {p for branch in self.anatomy.branches for p in branch.parameters}

    @cached_property
    def columns(self) -> dict[str, Column]:
        names = {id(p): name for name, p in self.parameters.items()}
        return {
            names[id(p)]: optimizer_kind(optimizer).column
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in names
        }

    @property
    def normed_entry(self) -> bool:
        """True if a norm follows the embedding, so that the size of the embedding does not matter."""
        return self.anatomy.normed_entry

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def first_step(self, eps: float) -> None:
        """The first step of the optimizers, without weight decay, with another ε, and with the first learning rates."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
            adam = optimizer_kind(optimizer).column is Column.ADAM
            for group in optimizer.param_groups:
                group["lr"] = group.get("initial_lr", group["lr"])
                group |= {key: 0.0 for key in ("weight_decay",) if key in group}
                group |= {key: eps for key in ("eps",) if key in group and adam}
        self.step()

    def share(self, names: list[str]) -> float:
        """The share of a stack's blocks that have a parameter. It changes with depth if the first block lacks it."""
        stack = self.anatomy.stack_of(names[0])
        return 1.0 if stack is None else stack.depth(names) / self.layout.depths[stack.stem]

    def roles(self) -> dict[Role, list[nn.Parameter]]:
        """The trained parameters of each role."""
        by_role: dict[Role, list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                by_role.setdefault(self.anatomy.part(name).role, []).append(parameter)
        return by_role

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        logits = logits_of(call(self.model, inputs))
        if logits.shape[:-1] != targets.shape:
            raise UserError(
                f"logits of shape {tuple(logits.shape)} do not fit targets of shape {tuple(targets.shape)}",
                fix="let the batch factory give one target class for every vector of logits",
            )
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    def loss_everywhere(self, batch: Batch) -> Tensor:
        """The loss over all tokens, for a model that reads out only one of them.

        Where a class token alone is read, the others reach the loss through the branches, whose sum over depth is
        random at init and aligned in training. Here random targets for all tokens take the place of that alignment.
        """
        norm, readout = self.anatomy.final_norm, self.anatomy.readout.module
        if norm is None or readout is None:
            return self.loss(batch)
        kept: list[Tensor] = []
        handle = self.model.get_submodule(norm).register_forward_hook(lambda module, args, out: kept.append(out))
        try:
            loss = self.loss(batch)
        finally:
            handle.remove()
        if kept[-1].dim() != 3 or kept[-1].shape[:-1] == batch[1].shape or kept[-1].shape[1] == 1:
            return loss
        outlet = self.anatomy.readout
        length = self.model.get_parameter(outlet.weight).shape[outlet.axis]
        if length != kept[-1].shape[-1]:  # the readout joins several tokens
            return loss
        logits = self.model.get_submodule(readout)(kept[-1]).flatten(0, -2).float()
        generator = torch.Generator().manual_seed(0)
        return F.cross_entropy(logits, torch.randint(logits.shape[-1], logits.shape[:1], generator=generator))


class Subjects:
    """The subjects of one shape. The model is examined once; a model without its own optimizer is also built once."""

    def __init__(
        self,
        source: Source,
        base: nn.Module,
        shape: Shape,
        rules: Rules,
        setting: Setting,
        example: Inputs | None,
        examined: Base | None = None,
    ) -> None:
        """`base` is used up, unless another one is `examined`: its weights are not the factory's afterwards."""
        self.source, self.base, self.shape, self.rules = source, base, shape, rules
        self.setting, self.example = setting, example
        self.examined = Base(lambda: base) if examined is None else examined
        self.parametrized: Scaling | None = None
        self.resolved: Scaling | None = None
        self.factors: ForwardFactors | None = None
        self.layout: Layout | None = None
        self.recipes: tuple[Recipe, ...] = ()

    def start(self, seed: int) -> Subject:
        """A model at its start: weights drawn with this seed, and a new optimizer."""
        torch.manual_seed(seed)  # for factories that draw their own starting weights
        if self.parametrized is not None:
            return self._under_rules(self.parametrized, seed)
        made = self.source.make(self.shape)
        model, optimizers = _model_and_optimizers(made)
        _refuse_same(self.base, model, self.source, self.shape)
        _refuse_not_finite(model)
        model.float()  # the parameters stay the same objects, so an optimizer that holds them still does
        hints = Hints(self.source.roles, example=self.example)
        if not optimizers and self.rules.key == NO_RULES.key:
            optimizers = (plain_adamw(model, self.setting),)
        if not optimizers:
            scaling, self.factors = parametrize_on(self.examined, model, self.rules, hints)
            return self._under_rules(scaling, seed)
        if self.resolved is None:
            self.resolved, own = resolve(model, self.examined, reference(self.rules), hints)
            self.factors = own.here.trained if own.is_whole else None
        return self._subject(self.resolved.on(model), optimizers)

    def _under_rules(self, scaling: Scaling, seed: int) -> Subject:
        if self.parametrized is not None and scaling.constructed:  # values of the constructor may be random
            fresh = dict(named_parameters(_model_and_optimizers(self.source.make(self.shape))[0]))
            scaling.constructed = {name: fresh[name].detach().clone() for name in scaling.constructed}
        self.parametrized = scaling.init_(self.setting.std, seed=seed)
        self.recipes = self.recipes or tuple(optimizer_recipes(scaling, self.setting))
        optimizers = tuple(recipe.make() for recipe in self.recipes)
        return self._subject(replace(scaling, rules=reference(self.rules)), optimizers)

    def _subject(self, expected: Scaling, optimizers: tuple[torch.optim.Optimizer, ...]) -> Subject:
        _refuse_swapped(expected, self.source, self.shape)
        if self.factors is None:  # they do not depend on the weights
            self.factors = measure_forward(expected.model, expected.anatomy, self.example)
        if self.layout is None or self.layout.model is not expected.model:
            self.layout = Layout(expected.model, expected.anatomy)
        return Subject(expected.model, optimizers, expected, self.factors, self.layout)


class Family:
    """All sizes of what is checked. What does not depend on the size is built and examined once per process.

    Small models are kept as well, for further seeds.
    """

    def __init__(self, source: Source, setting: Setting) -> None:
        self.source, self.setting = source, setting
        self._bases: dict[Hashable, Base] = {}
        self._kept: dict[Hashable, Subjects] = {}

    def __reduce__(self) -> tuple[type["Family"], tuple[Source, Setting]]:
        """What another process needs. It builds the models again: not every model can be sent."""
        return Family, (self.source, self.setting)

    @cached_property
    def base(self) -> nn.Module:
        """With the weights of the constructor. It is not changed."""
        return self.source.base_model()

    @cached_property
    def example(self) -> Inputs | None:
        return None if self.source.batches is None else self.batch(0)[0]

    def batch(self, seed: int) -> Batch:
        return random_batch(self.source, self.base, self.setting, seed)

    def subjects(self, shape: Shape, rules: Rules, grown: Mapping[str, object] | None = None) -> "Subjects":
        """`grown` are arguments that are other than the base's."""
        source, base = replace(self.source, grown=grown or {}), self.source.base
        key = (shape, rules.key, rules.named, rules.axes, tuple(source.grown.items()))
        if key in self._kept:
            return self._kept[key]
        made = Subjects(source, self.base, shape, rules, self.setting, self.example, self._examined(rules))
        about = size(self.base) * (shape.width / base.width) ** 2 * shape.depth / base.depth
        if about <= LARGEST_KEPT:
            self._kept[key] = made
        return made

    def _examined(self, rules: Rules) -> Base:
        """Rows by name give roles, so what is found on a base holds for rules with the same rows."""
        roles = frozenset(rules.named_roles.items())
        if roles not in self._bases:
            model = self.source.base_model()
            self._bases[roles] = Base(lambda: model)
        return self._bases[roles]


def _refuse_group(optimizer: torch.optim.Optimizer, group: Mapping[str, object]) -> None:
    name = type(optimizer).__name__
    if float(group["lr"]) < 0:  # type: ignore[arg-type]
        raise UserError(f"{name} has a negative learning rate, {group['lr']}", fix="give a positive one")
    if group.get("maximize"):
        raise UserError(f"{name} maximizes the loss", fix="build it without maximize=True")
    if group.get("weight_decay") and not optimizer_kind(optimizer).decoupled:
        what = f"{name} adds weight decay to the gradient and then normalises it, so no rule can scale it"
        raise UserError(what, fix="use AdamW, whose weight decay is decoupled, or weight_decay=0")


@dataclass(frozen=True)
class Recipe:
    """A new optimizer of the same parameters for every seed."""

    kind: Callable[[list[dict[str, object]]], torch.optim.Optimizer]
    groups: list[dict[str, object]]

    def make(self) -> torch.optim.Optimizer:
        return self.kind([dict(group) for group in self.groups])


def optimizer_recipes(scaling: Scaling, setting: Setting) -> Iterator[Recipe]:
    """The optimizer of the setting; Muon for hidden matrices has AdamW beside it for the other roles."""
    lr, decay = setting.lr, setting.weight_decay
    if setting.optimizer == "sgd":
        yield Recipe(SGD, scaling.param_groups(lr, weight_decay=decay, optimizer="sgd"))
        return
    hidden = _roles_for_muon(scaling) if setting.optimizer == "muon" else []
    if hidden:
        yield Recipe(Muon, scaling.param_groups(lr, weight_decay=decay, optimizer="muon", roles=hidden))
    others = [role for role in Role if role not in hidden]
    groups = scaling.param_groups(lr, weight_decay=decay, eps=setting.eps, roles=others)
    yield Recipe(partial(AdamW, betas=paper.BETAS, fused=True), groups)


def _roles_for_muon(scaling: Scaling) -> list[Role]:
    """Those of its column. Experts that are stacked in one tensor are left to AdamW."""
    routed = {name: r.role for name, r in scaling.parameters.items() if r.role.trait.routed}
    stacked = {role for name, role in routed.items() if not scaling.is_one_expert(name)}
    return [role for role in COMPLETEP.columns[Column.MUON] if role not in stacked]


def plain_adamw(model: nn.Module, setting: Setting) -> torch.optim.AdamW:
    lr, decay, eps = setting.lr, setting.weight_decay, setting.eps
    return AdamW(model.parameters(), lr, paper.BETAS, eps, decay, fused=True)


def reference(rules: Rules) -> Rules:
    """The member of the paper's family that these rules are judged by: the one with their branch multiplier, and
    CompleteP where they have none.
    """
    family = alpha(-rules.branch.depth) if -rules.branch.depth >= 0.5 else COMPLETEP
    return replace(family, named=rules.named, axes=rules.axes) if rules.named else family


def _refuse_same(base: nn.Module, model: nn.Module, source: Source, shape: Shape) -> None:
    """A factory that ignores its arguments would pass every check."""
    here, there = ([tuple(p.shape) for p in m.parameters()] for m in (model, base))
    if shape != source.base and here == there:
        deeper = shape.depth != source.base.depth
        name, size = (source.names[1], shape.depth) if deeper else (source.names[0], shape.width)
        raise UserError(
            f"the model with {name}={size} is no larger than the base: the factory does not use {name}",
            fix="give the names it uses for width and depth as names, for instance n_embd and n_layer",
        )


def _refuse_swapped(expected: Scaling, source: Source, shape: Shape) -> None:
    """A factory that takes width for depth would pass every check too."""
    wider, deeper = shape.width != source.base.width, shape.depth != source.base.depth
    if wider != deeper and (expected.m_N != 1, expected.m_L != 1) == (deeper, wider):
        name, what = (source.names[0], "number of blocks") if wider else (source.names[1], "width")
        fix = f"exchange the names: names={source.names[::-1]}; or correct the factory"
        raise UserError(f"'{name}' changes the {what} of the model", fix=fix)


def _refuse_not_finite(model: nn.Module) -> None:
    for name, parameter in named_parameters(model):
        # One number that is not finite makes a sum that is not. Finite numbers may overflow it.
        if not (parameter.is_meta or parameter.detach().sum().isfinite() or parameter.isfinite().all()):
            what = f"the factory returned a model whose '{name}' is not finite"
            raise UserError(what, fix="correct its starting values")


def _model_and_optimizers(made: object) -> tuple[nn.Module, tuple[torch.optim.Optimizer, ...]]:
    """What a factory may return: a model, (model, optimizer), or (model, [optimizers])."""
    model, *rest = made if isinstance(made, tuple) else (made,)
    several = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    optimizers = tuple(o for o in several if isinstance(o, torch.optim.Optimizer))
    if isinstance(model, nn.Module) and len(optimizers) == len(several):
        return model, optimizers
    kinds = ", ".join(type(m).__name__ for m in made) if isinstance(made, tuple) else ""
    what = f"the factory returned ({kinds})" if kinds else f"the factory returned {type(made).__name__}"
    raise UserError(what, fix="let it return a model, or (model, optimizer)")


# -- batches ---------------------------------------------------------------------------------------


def make_batches(source: Source, base: nn.Module, setting: Setting, seed: int) -> tuple[Batches, Batch]:
    """(the batch of each step, the probe that everything is measured on)."""
    if source.batches is not None:
        factory = load_factory(source.batches) if isinstance(source.batches, str) else source.batches
        return (lambda step: _checked(factory, step)), _checked(factory, setting.steps)
    example = guess_example(base)
    if example.is_floating_point():
        with torch.no_grad():
            logits = find_logits(call(base, example))
        assert logits is not None
        classes = logits.shape[-1]
        return (lambda step: _noise(example, classes, setting, step + 1)), _noise(example, classes, setting, 0)
    smallest = min(m.num_embeddings for m in base.modules() if isinstance(m, nn.Embedding))
    time = min(setting.time, smallest)  # the smallest table may hold the positions

    def batch(step: int) -> Batch:
        return _text(smallest, setting.batch, time, 1 + step + seed * setting.steps)

    inputs, targets = _text(smallest, setting.batch, time, 0)
    return batch, (inputs[:1], targets[:1])  # one sequence has enough numbers to average over


def random_batch(source: Source, base: nn.Module, setting: Setting, seed: int) -> Batch:
    """Random tokens and targets: at init no text is needed, and every token weighs the same, so there is less noise."""
    if source.batches is not None:
        factory = load_factory(source.batches) if isinstance(source.batches, str) else source.batches
        return _checked(factory, seed)
    example = guess_example(base)
    if example.is_floating_point():
        return make_batches(source, base, setting, seed)[0](seed)
    tables = [m for m in base.modules() if isinstance(m, nn.Embedding)]
    smallest, padding = min(m.num_embeddings for m in tables), {m.padding_idx for m in tables}
    ids = torch.tensor([i for i in range(smallest) if i not in padding])  # a padding row is zero: not an embedding
    generator = torch.Generator().manual_seed(seed)
    tokens = ids[torch.randint(len(ids), (setting.batch, min(setting.time, smallest) + 1), generator=generator)]
    return tokens[:, :-1], tokens[:, 1:]


def _checked(factory: Callable[..., object], step: int) -> Batch:
    made = call_factory(factory, {"step": step})
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], Tensor):
        raise UserError(
            f"the batch factory returned {type(made).__name__}",
            fix="let it take step and return (inputs, targets), inputs as forward takes them",
        )
    return made


def _text(vocabulary: int, batch: int, time: int, number: int) -> tuple[Tensor, Tensor]:
    size = batch * (time + 1)
    tokens = python_bytes(size, number * size).view(batch, time + 1) % vocabulary
    return tokens[:, :-1], tokens[:, 1:]


def _noise(like: Tensor, classes: int, setting: Setting, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(setting.batch, *like.shape[1:], generator=generator)
    return images, torch.randint(classes, (setting.batch,), generator=generator)


@cache
def _library() -> Tensor:
    """Real text that every machine has: Python's standard library, in the order of its file names."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)


def python_bytes(count: int, start: int = 0) -> Tensor:
    """Bytes of the standard library as token ids. After its last byte comes its first."""
    text = _library()
    return text[torch.arange(start, start + count) % len(text)].long()
