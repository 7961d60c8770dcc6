"""`Scaling`: the table, resolved for every parameter of one model: starting values, optimizer groups, multipliers.

Everything is keyed by parameter *name*, not by tensor attributes, so it survives deepcopy, torch.compile, DDP, FSDP2
and the meta device. Methods look the tensors up when they are called.
"""

import hashlib
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor, nn

from completep.anatomy.names import named_parameters, unwrap
from completep.anatomy.roles import Anatomy, Part
from completep.config import Shape
from completep.errors import UserError, some
from completep.rules import multipliers
from completep.rules.explain import Explanation, Row, summary
from completep.rules.fold import Optimizers, Schedulers, move
from completep.rules.multipliers import Multiplier, Style
from completep.rules.table import (
    LR_NAMES,
    Column,
    Folded,
    Role,
    Rule,
    Rules,
    check_lr_of,
    known_rules,
    optimizer_kind,
)
from completep.rules.weights import Origin, as_constructed, is_loaded, is_sharded, mark_initialised, whole
from completep.tuned import TunedValues

FORMAT = 1


@dataclass(frozen=True)
class Factors:
    """What the tuned base values are multiplied by."""

    init_std: float
    lr: float
    weight_decay: float
    eps: float


@dataclass(frozen=True)
class Resolved:
    """One parameter of your model, with its ratios to the base."""

    name: str
    template: str
    part: Part
    shape: tuple[int, ...]
    m_N: float  # of the fan-in
    m_out: float  # of the fan-out
    m_L: float
    fold: float = 1.0  # c, if a multiplier folds into this parameter: W' = cW
    muon: float = 1.0  # change of sqrt(fan_out / fan_in), without what torch's Muon does itself
    width: float = 1.0  # m_N of the model
    further: Mapping[str, float] = field(default_factory=dict)  # ratios of further axes, such as experts

    @property
    def role(self) -> Role:
        return self.part.role

    def ratios(self, rule: Rule) -> tuple[float, float, float, Mapping[str, float]]:
        """What the powers of a rule are powers of."""
        fans = (self.width, self.width) if rule.by_model else (self.m_N, self.m_out)
        return fans[0], self.m_L, fans[1], self.further

    def factors(self, rule: Rule, column: Column, c: float) -> Factors:
        """The row of the table for this parameter, in the coordinates W' = cW."""
        folded, muon = Folded.by(c, column), self.muon if column is Column.MUON else 1.0
        ratios = self.ratios(rule)
        lr, eps = rule.lr(*ratios) * folded.lr * muon, rule.eps(*ratios) * folded.eps
        decay = rule.weight_decay(*ratios) * folded.weight_decay / muon if self.role.trait.decayed else 0.0
        return Factors(self.init_std(rule, c), lr, decay, eps)

    def init_std(self, rule: Rule, c: float) -> float:
        return rule.init_std(*self.ratios(rule)) * c


@dataclass(eq=False, repr=False)
class Scaling:
    """What `parametrize` returns: the rules, resolved for every parameter of one model."""

    model: nn.Module
    rules: Rules
    style: Style
    base: Shape
    target: Shape  # of this model
    anatomy: Anatomy
    parameters: dict[str, Resolved]
    multipliers: tuple[Multiplier, ...]
    assumed: frozenset[str] = (
        frozenset()
    )  # parameters that are taken to grow with the width, since a Shape says nothing
    meta_buffers: tuple[str, ...] = ()  # those on the meta device when the model was parametrized
    constructed: dict[str, Tensor] = field(default_factory=dict)  # first values of the parts that keep them
    unchecked: tuple[str, ...] = ()  # what could not be checked when the model was parametrized
    origin: Origin = field(default_factory=Origin)  # where the weights come from
    tuned: TunedValues | None = None  # what `init_` and `param_groups` take where nothing is given

    @property
    def m_N(self) -> float:
        return self.target.width / self.base.width

    @property
    def m_L(self) -> float:
        return self.target.depth / self.base.depth

    def factors(self) -> dict[str, float]:
        """The multipliers of the forward pass by kind. Several of one kind are distinguished by their first place."""
        kinds = [m.kind for m in self.multipliers]
        places = [(m.modules or m.parameters)[:1] for m in self.multipliers]
        names = [k if kinds.count(k) == 1 else f"{k} {''.join(place)}" for k, place in zip(kinds, places, strict=True)]
        return {name: m.factor for name, m in zip(names, self.multipliers, strict=True)}

    def __repr__(self) -> str:
        what = summary(self.rules.name, self.style, self.base, self.target, self.factors())
        return f"<Scaling of {type(self.model).__name__}: {what}>"

    def _repr_html_(self) -> str:
        return self.explain()._repr_html_()

    def tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the model by plain name. One that was added after `parametrize` is an error."""
        for name, parameter in named_parameters(self.model):
            if name not in self.parameters:
                what = f"parameter '{name}' was not there when the model was parametrized"
                raise UserError(what, fix="call parametrize after the model is complete")
            yield name, parameter

    def fold_factor(self, name: str) -> float:
        """c of a parameter in the present style: W' = cW. It is 1 in the multiplier style."""
        return self.parameters[name].fold if self.style == "folded" else 1.0

    def settings(self, name: str, column: Column = Column.ADAM) -> Factors:
        """The factors on std, lr, weight decay and eps for a parameter, in the present style."""
        r = self.parameters[name]
        return r.factors(self.rules.rule_of(r.template, r.role, column), column, self.fold_factor(name))

    def take(self, tuned: TunedValues) -> None:
        """Use tuned values by default. They hold for the base and the rules that they were tuned with."""
        if (tuned.base, tuned.rules) != (self.base, self.rules.key):
            a, b = tuned.base, self.base
            raise UserError(
                f"the values were tuned at {a.width} × {a.depth} under {tuned.rules}; this model's base is "
                f"{b.width} × {b.depth}, its rules are {self.rules.key}",
                fix="parametrize with the base and the rules that were tuned, or tune again",
            )
        if tuned.verdict != "PASS":
            warnings.warn(f"the transfer of the tuned values is {tuned.verdict}: {tuned.why}", stacklevel=3)
        self.tuned = tuned

    def _tuned(self, name: str) -> float | None:
        return None if self.tuned is None else self.tuned.number(name)

    # -- starting values -------------------------------------------------------------------------

    def init_(
        self, std: float | None = None, *, seed: int = 0, buffers_filled: bool = False, overwrite: bool = False
    ) -> "Scaling":
        """Fill every trainable parameter. Frozen ones are not changed. `std` is by default the tuned one, or 0.02.

        A value depends only on the seed and the parameter's name: not on construction order, device, rank count or
        sharding. A parameter that the table does not start (a gate or decay whose role you gave) keeps the values of
        its constructor. Buffers and such parameters hold garbage if the model came from the meta device: fill them
        yourself after to_empty(), then pass `buffers_filled=True`. Weights that were loaded are only overwritten with
        `overwrite=True`.
        """
        std = _check("std", 0.02 if (known := std if std is not None else self._tuned("std")) is None else known)
        if is_loaded(self.model, self.origin) and not overwrite:
            kind = type(self.model).__name__
            what = f"the weights of this {kind} were loaded or set after its constructor: init_ would overwrite them"
            raise UserError(what, fix="leave init_ out to train on from them, or pass overwrite=True")
        unfilled = [] if buffers_filled else list(self.meta_buffers)
        for name, parameter in self.tensors():
            if not parameter.requires_grad:
                continue
            if parameter.is_meta:
                what = f"'{name}' is on the meta device and has no memory to fill"
                raise UserError(what, fix="call model.to_empty(device=…) first, then init_")
            r = self.parameters[name]
            if r.part.kept and r.part.constant is None and name not in self.constructed:
                if not buffers_filled:
                    unfilled.append(name)
                    continue
                self.constructed[name] = parameter.detach().clone()
            _fill(parameter, self._start(r, std, seed, parameter))
        if unfilled:
            what = "these parameters keep the values of their constructor, which the meta device does not have: "
            what += some(unfilled)
            raise UserError(what, fix="fill them from a real model, then call init_(…, buffers_filled=True)")
        for module in self.model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None and module.weight.requires_grad:
                with torch.no_grad():
                    module.weight[module.padding_idx] = 0.0
        mark_initialised(self.model, self.origin)
        return self

    def _start(self, r: Resolved, std: float, seed: int, parameter: nn.Parameter) -> Tensor | float:
        c = self.fold_factor(r.name)
        if r.part.kept:
            values = self.constructed.get(r.name)
            return r.part.folded(r.part.constant or 0.0, c) if values is None else r.part.folded(values, c)
        if r.role.trait.start == "constant":
            return r.part.folded(r.part.start, c)
        digest = hashlib.sha256(f"{seed}/{r.name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8]) >> 1)
        noise = torch.randn(r.shape, generator=generator, device="cpu")
        noise = noise.double() if parameter.dtype == torch.float64 else noise
        return noise.mul_(std * r.init_std(self.rules.rule_of(r.template, r.role), c))

    def _start_in_words(self, r: Resolved, std: float) -> str:
        c = self.fold_factor(r.name)
        if r.part.kept:
            return "as constructed" if c == 1.0 else f"{c:.4g} × as constructed"
        return f"N(0, {std:.4g}²)" if r.role.trait.start == "random" else f"{r.part.folded(r.part.start, c):g}"

    # -- optimizer -------------------------------------------------------------------------------

    def param_groups(
        self,
        lr: float | None = None,
        *,
        weight_decay: float | None = None,
        eps: float | None = None,
        optimizer: str | type[torch.optim.Optimizer] = "adamw",
        roles: Collection[Role] | None = None,
        lr_of: Mapping[str, float] | None = None,
    ) -> list[dict[str, object]]:
        """Groups for a torch optimizer, one per distinct setting.

        Each group has its `lr`, `weight_decay` and `eps`, the factor `lr_scale` (lr = lr_scale × the base lr), and the
        `roles` and `names` in it. Schedulers that multiply keep the ratios. OneCycleLR and CyclicLR assign learning
        rates, so give them `max_lr=[g["lr"] for g in optimizer.param_groups]`. `lr_of` multiplies the learning rates of
        roles, at every size: {"embedding": 4.0}. What you leave out is the tuned value, if `parametrize` was given one;
        otherwise there is no weight decay and no such multiplier, and `eps` is the optimizer's own.
        """
        kind = optimizer_kind(optimizer)
        lr, weight_decay = self._base_values(lr, weight_decay)
        eps = self._tuned("eps") if eps is None and kind.eps is not None else eps
        if weight_decay and not kind.decoupled:
            what = f"{optimizer!r} adds weight decay to the gradient and then normalises it, so no rule can scale it"
            raise UserError(what, fix="use AdamW, whose weight decay is decoupled, or weight_decay=0")
        if eps is not None and kind.eps is None:
            raise UserError(f"{optimizer!r} has no eps that the rules scale", fix="leave eps out")
        eps = _check("eps", eps) if eps is not None else kind.eps
        wanted = self._roles(roles, kind.column)
        times = self._lr_multipliers(lr_of, wanted)
        tensors = dict(self.tensors())
        settings: dict[tuple[float, ...], dict[str, float]] = {}
        members: dict[tuple[float, ...], list[str]] = {}
        for name, parameter in tensors.items():
            r = self.parameters[name]
            if r.role not in wanted or not parameter.requires_grad:
                continue
            if kind.column is Column.MUON:
                self._refuse_what_muon_cannot_take(name, parameter)
            f = self.settings(name, kind.column)
            k = times.get(r.role, 1.0)
            setting = {"lr": lr * f.lr * k, "weight_decay": weight_decay * f.weight_decay, "lr_scale": f.lr * k}
            if eps is not None:
                setting["eps"] = eps * f.eps
            # c is not a setting, but it is part of the key: fold() must be able to change whole groups.
            key = (*setting.values(), r.fold)
            settings[key] = setting
            members.setdefault(key, []).append(name)
        more = {"adjust_lr_fn": "original"} if kind.column is Column.MUON else {}
        groups: list[dict[str, object]] = []
        for key, names in members.items():
            roles_in_group = list(dict.fromkeys(str(self.parameters[n].role) for n in names))
            contents = {"params": [tensors[n] for n in names], "roles": roles_in_group, "names": names}
            groups.append({**contents, **settings[key], **more})
        self._warn_of_constructor_weights(tensors)
        return groups

    def _base_values(self, lr: float | None, weight_decay: float | None) -> tuple[float, float]:
        """What was given, or else what was tuned."""
        lr = self._tuned("lr") if lr is None else lr
        weight_decay = self._tuned("weight_decay") if weight_decay is None else weight_decay
        if lr is None:
            raise UserError("no learning rate is given, and none was tuned", fix="param_groups(lr=…)")
        if weight_decay is None and self.tuned is not None and (tau := self.tuned.number("tau")) is not None:
            raise UserError(
                f"tau = {tau:g} was tuned, and the weight decay that it gives depends on the number of steps",
                fix=f"param_groups(weight_decay=1 / ({tau:g} * {lr:g} * steps))",
            )
        decay = 0.0 if weight_decay is None else weight_decay
        return _check("lr", lr), _check("weight_decay", decay)

    def _lr_multipliers(self, lr_of: Mapping[str, float] | None, wanted: set[Role]) -> Mapping[str, float]:
        """By role: what was given, or else what was tuned. Tuned ones may belong to the groups of another optimizer."""
        present = {r.role for r in self.parameters.values()}
        if lr_of is not None:
            check_lr_of(lr_of, present & wanted)
            return lr_of
        tuned = {} if self.tuned is None else self.tuned.lr_of(LR_NAMES)
        if absent := [str(role) for role in tuned if role not in present]:
            raise UserError(
                f"a multiplier of the learning rate was tuned for {some(absent)}, a role that this model does not have",
                fix="give the multipliers that you want: param_groups(lr_of={…}), or lr_of={} for none",
            )
        check_lr_of(tuned, present)
        return tuned

    def _warn_of_constructor_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Weights that neither `init_` nor a checkpoint has filled do not have the table's starting size."""
        if self.origin.initialised or is_loaded(self.model, self.origin):
            return
        drawn = [n for n, r in self.parameters.items() if r.role.trait.start == "random" and r.fold == 1.0]
        trained = [n for n in drawn if tensors[n].requires_grad]  # folding changes the others
        scaled = any(self.settings(name).init_std != 1.0 for name in trained)
        if scaled and as_constructed(tensors, self.origin, trained):
            what = "the weights are as the constructor made them, not as the rules start them"
            warnings.warn(f"{what}; call scaling.init_(std=…) first, or load a checkpoint", stacklevel=3)

    def check_ratios(self, *optimizers: torch.optim.Optimizer) -> None:
        """Raise an error if the learning rates have lost their ratios, as a scheduler with one floor makes them.

        `param_groups` cannot see the scheduler. Call this at any step, for example after the last one of a test run.
        """
        for optimizer in optimizers:
            rates = {group["lr"] / group["lr_scale"]: group["names"] for group in optimizer.param_groups}
            low, high = min(rates, default=0.0), max(rates, default=0.0)
            if not high - low <= 1e-6 * high:
                what = f"the learning rates no longer have the rules' ratios: {some(rates[low], 2)} have a base "
                what += f"learning rate of {low:.4g}, {some(rates[high], 2)} of {high:.4g}"
                fix = "give the scheduler no floor (eta_min=0), or use a LambdaLR whose factor stops at your floor"
                raise UserError(what, fix=fix)

    def _roles(self, roles: Collection[Role] | None, column: Column) -> set[Role]:
        known = self.rules.columns.get(column, {})
        if not known:
            what = f"{self.rules.name} has no {column} column"
            raise UserError(what, fix="use an optimizer of the Adam family with these rules")
        for role in roles or ():
            if not isinstance(role, Role):
                what = f"roles: {role!r} is not a Role"
                raise UserError(what, fix="use " + ", ".join(f"Role.{r.name}" for r in Role))
        if roles is None and column is Column.MUON:  # experts only if asked for: AdamW may have them already
            return {role for role in known if not role.trait.routed}
        return set(known) if roles is None else set(roles)

    def is_one_expert(self, name: str) -> bool:
        """True if a parameter is one matrix of one expert, in a list of them."""
        r, stack = self.parameters[name], self.anatomy.stack_of(name)
        listed = stack is not None and stack.expert(name) is not None
        return r.role.trait.routed and listed and len(r.shape) == 2

    def _refuse_what_muon_cannot_take(self, name: str, parameter: Tensor) -> None:
        """Muon orthogonalises the step of one matrix. Several in one tensor would be taken for one."""
        role, shape = self.parameters[name].role, tuple(parameter.shape)
        fix = f"leave Role.{role.name} out of Muon's roles and add it to AdamW's: param_groups(..., roles=[...])"
        if role.trait.routed and not self.is_one_expert(name):
            what = f"Muon takes one matrix per tensor; '{name}', of shape {shape}, holds those of several experts"
            raise UserError(what, fix=f"{fix}; or keep the experts in a list of modules")
        if parameter.dim() != 2:
            raise UserError(f"Muon takes matrices only; '{name}' has shape {shape}", fix=fix)

    def grad_norm(self) -> Tensor:
        """The global gradient norm in unfolded coordinates: the same number in both styles."""
        grads = {name: p.grad for name, p in self.tensors() if p.grad is not None}
        if not grads:
            return torch.tensor(0.0)
        norms = [torch.linalg.vector_norm(grad) * self.fold_factor(name) for name, grad in grads.items()]
        total = torch.linalg.vector_norm(torch.stack(norms))
        return whole(total)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Like torch.nn.utils.clip_grad_norm_, with the norm that the unfolded model would have."""
        total = self.grad_norm()
        shrink = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for _, p in self.tensors():
            if p.grad is not None:
                p.grad.mul_(shrink.to(p.grad.device))
        return total

    # -- the two styles --------------------------------------------------------------------------

    def fold(self, *optimizers: torch.optim.Optimizer, schedulers: Schedulers = ()) -> "Scaling":
        """Move every multiplier into the weights. This works at any step: the run continues as before.

        The result is an ordinary model that loads into its plain class. To continue training, pass all optimizers and
        schedulers, or build new ones afterwards.
        """
        return self._restyle("folded", optimizers, schedulers)

    def unfold(self, *optimizers: torch.optim.Optimizer, schedulers: Schedulers = ()) -> "Scaling":
        """The inverse of `fold`: plain weights, and multipliers in the forward pass."""
        return self._restyle("multiplier", optimizers, schedulers)

    def _restyle(self, style: Style, optimizers: Optimizers, schedulers: Schedulers) -> "Scaling":
        if style == self.style:
            return self
        multipliers.refuse_style(style, self.model, self.multipliers)
        folding = style == "folded"
        factors = {name: r.fold if folding else 1 / r.fold for name, r in self.parameters.items()}
        offsets = {name: r.part.offset for name, r in self.parameters.items()}
        move(dict(self.tensors()), factors, offsets, optimizers, schedulers)
        if folding:
            multipliers.remove(self.model)
        else:
            multipliers.install(self.model, self.multipliers)
        self.style = style
        return self

    @contextmanager
    def folded(self) -> Iterator[nn.Module]:
        """The model in the folded style inside a `with` block, for saving it as an ordinary model.

        Afterwards weights and gradients are bit for bit what they were.
        """
        before = {n: (p.detach().clone(), None if p.grad is None else p.grad.clone()) for n, p in self.tensors()}
        moved = {n: tensors for n, tensors in before.items() if self.parameters[n].fold != 1.0}
        style = self.style
        self.fold()
        try:
            yield self.model
        finally:
            if style == "multiplier":
                self.unfold()
                for name, parameter in self.tensors():
                    if name in moved:
                        parameter.data.copy_(moved[name][0])
                        parameter.grad = moved[name][1]

    def on(self, model: nn.Module) -> "Scaling":
        """The same scaling for a copy of the model (deepcopy, or the same class with these weights loaded)."""
        if not isinstance(model, nn.Module):
            raise UserError(f"model is a {type(model).__name__}, not an nn.Module", fix="pass the model itself")
        theirs = {name: tuple(p.shape) for name, p in named_parameters(unwrap(model))}
        ours = {name: r.shape for name, r in self.parameters.items()}
        if theirs != ours:
            different = sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
            what = f"this model has other parameters than the one that was parametrized: {some(different)}"
            raise UserError(what, fix="call parametrize on it")
        return replace(self, model=unwrap(model), origin=replace(self.origin))

    # -- checkpoints and explanation -------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Plain data for a checkpoint: the resolved rules, so that a resume under other rules is noticed."""
        table: dict[str, dict[str, object]] = {}
        for r in self.parameters.values():
            ratios = {key: getattr(r, key) for key in ("m_N", "m_out", "m_L", "fold")}
            factors = asdict(r.factors(self.rules.rule_of(r.template, r.role), Column.ADAM, 1.0))
            table[r.template] = {"role": str(r.role), **ratios, **factors}
        return {
            "format": FORMAT,
            "rules": self.rules.key,
            "style": self.style,
            "base": asdict(self.base),
            "multipliers": self.factors(),
            "parameters": table,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Compare a checkpoint with these rules. If they differ, raise an error that lists the differences."""
        saved = dict(state)
        if (rules := known_rules(str(state.get("rules")))) is not None:
            saved["rules"] = rules.key  # older versions stored the display name
        differences = list(_differences(saved, self.state_dict()))
        if differences:
            listed = "\n    ".join([*differences[:12], *["…"] * (len(differences) > 12)])
            what = f"this checkpoint was made under other rules; {len(differences)} differences (checkpoint → here):"
            fix = "parametrize with the checkpoint's rules, base and style, or start a new run"
            raise UserError(f"{what}\n    {listed}", fix=fix)

    def explain(
        self,
        *,
        std: float = 1.0,
        lr: float = 1.0,
        weight_decay: float = 1.0,
        eps: float = 1.0,
        lr_of: Mapping[str, float] | None = None,
    ) -> Explanation:
        """The resolved table, one row per parameter. With base values of 1, the numbers are the factors themselves."""
        check_lr_of(lr_of or {}, {r.role for r in self.parameters.values()})
        for name, value in {"std": std, "lr": lr, "weight_decay": weight_decay, "eps": eps}.items():
            _check(name, value)
        folded = self.style == "folded"
        # A tied table makes embeddings, so the logit multiplier is shown on the final norm instead.
        forward = {} if folded else {name: m.factor for m in self.multipliers for name in m.parameters}
        rows = []
        for name, parameter in self.tensors():
            r, f = self.parameters[name], self.settings(name)
            settings = (
                self._start_in_words(r, std * f.init_std),
                lr * f.lr * (lr_of or {}).get(r.role, 1.0),
                weight_decay * f.weight_decay,
                eps * f.eps,
                forward.get(name, 1.0),
            )
            origin = (self.rules.rule_of(r.template, r.role).source, r.template, parameter.requires_grad)
            rows.append(Row(name, str(r.role), r.shape, r.m_N, r.m_L, *settings, *origin))
        model, rules = type(self.model).__name__, self.rules
        sizes = (self.base, self.target, self.m_N, self.m_L)
        contents = (self.factors(), tuple(rows), self.unchecked)
        return Explanation(model, rules.key, rules.name, self.style, *sizes, *contents)


def _check(name: str, value: float) -> float:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
        raise UserError(f"{name}={value!r} cannot be used here", fix=f"give a finite {name} of at least 0")
    return value


def _fill(parameter: nn.Parameter, value: Tensor | float) -> None:
    with torch.no_grad():
        if not isinstance(value, Tensor):
            parameter.fill_(value)
        elif is_sharded(parameter):  # every rank draws the whole tensor and keeps its part
            from torch.distributed.tensor import DTensor, distribute_tensor

            assert isinstance(parameter, DTensor)
            full = value.to(parameter.device)
            parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None))
        else:
            parameter.copy_(value)


def _differences(saved: object, here: object, path: str = "") -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(here, Mapping):
        for key in {**here, **saved}:
            yield from _differences(saved.get(key), here.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(saved, float) and isinstance(here, float):
        if not math.isclose(saved, here, rel_tol=1e-12):
            yield f"{path}: {saved:g} → {here:g}"
    elif saved != here:
        yield f"{path}: {saved!r} → {here!r}"
