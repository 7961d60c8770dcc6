"""parametrize(): the table × a model × its base → init, param groups, multipliers, as one serialisable object.

Everything is keyed by parameter *name*, never by tensor attributes, so deepcopy, torch.compile, DDP, FSDP2
and the meta device lose nothing. Methods look the tensors up when they are called.
"""

import hashlib
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from completep.config import Shape
from completep.errors import UserError, some
from completep.rules.multipliers import Multiplier, plain
from completep.rules.roles import Anatomy, Part
from completep.rules.table import DECAYED, RANDOM, Column, Folded, Role, Rule, Rules, optimizer_kind

Style = Literal["multiplier", "folded"]
FORMAT = 1


@dataclass(frozen=True)
class Resolved:
    """One parameter of the user's model, and every factor that the rules give it."""

    name: str
    template: str
    part: Part
    shape: tuple[int, ...]
    m_N: float  # of the fan-in
    m_out: float  # of the fan-out
    m_L: float
    fold: float = 1.0  # c, where a multiplier folds into this parameter: W' = cW
    muon: float = 1.0  # change of sqrt(fan_out / fan_in), beyond what torch's Muon does itself

    @property
    def role(self) -> Role:
        return self.part.role

    def factors(self, rule: Rule, column: Column, c: float) -> "Factors":
        """The resolved row, in the coordinates W' = cW."""
        folded, muon = Folded.by(c, column), self.muon if column is Column.MUON else 1.0
        at = (self.m_N, self.m_L, self.m_out)
        return Factors(
            init_std=rule.init_std(*at) * c,
            lr=rule.lr(*at) * folded.lr * muon,
            weight_decay=rule.weight_decay(*at) * folded.weight_decay / muon if self.role in DECAYED else 0.0,
            eps=rule.eps(*at) * folded.eps,
        )


@dataclass(frozen=True)
class Factors:
    init_std: float
    lr: float
    weight_decay: float
    eps: float


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names as they were before any wrapper (DDP, torch.compile, activation checkpointing) added its own."""
    for name, parameter in model.named_parameters():
        yield plain(name), parameter


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DDP or torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


@dataclass(eq=False)
class Scaling:
    """What `parametrize` returns: the rules, resolved for every parameter of one model."""

    model: nn.Module = field(repr=False)
    rules: Rules
    style: Style
    anatomy: Anatomy = field(repr=False)
    parameters: dict[str, Resolved] = field(repr=False)
    multipliers: tuple[Multiplier, ...] = field(repr=False)
    base: Shape
    meta_buffers: tuple[str, ...] = field(
        default=(), repr=False
    )  # were on the meta device when the model was parametrized

    # -- starting values -------------------------------------------------------------------------

    def init_(self, std: float = 0.02, *, seed: int = 0, buffers_filled: bool = False) -> "Scaling":
        """Fill every trainable parameter. A value depends on (seed, parameter name) alone: not on construction
        order, device, rank count or sharding. Frozen parameters are left alone. Buffers that came from the meta device
        hold garbage after to_empty(): fill them yourself, then say so with `buffers_filled`."""
        positive("std", std, zero=True)
        for name, parameter in self._tensors():
            if not parameter.requires_grad:
                continue
            if parameter.is_meta:
                raise UserError(
                    f"'{name}' is on the meta device and has no memory to fill",
                    fix="call model.to_empty(device=…) first, then init_",
                )
            _fill(parameter, self._start(self.parameters[name], std, seed, parameter))
        if self.meta_buffers and not buffers_filled:
            raise UserError(
                f"the parameters are filled, but not the buffers that came from the meta device: {some(list(self.meta_buffers))}",
                fix="fill them (copy them from a model built for real), then call init_(…, buffers_filled=True)",
            )
        self._zero_padding()
        return self

    @torch.no_grad()
    def _zero_padding(self) -> None:
        for module in self.model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None and module.weight.requires_grad:
                module.weight[module.padding_idx] = 0.0

    def _start(self, r: Resolved, std: float, seed: int, parameter: nn.Parameter) -> "Tensor | float":
        if r.role not in RANDOM:
            return r.part.folded(r.part.start, self._c(r))
        digest = hashlib.sha256(f"{seed}/{r.name}".encode()).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8]) >> 1)
        noise = torch.randn(r.shape, generator=generator, device="cpu")
        noise = noise.double() if parameter.dtype == torch.float64 else noise
        return noise.mul_(std * self._factors(r).init_std)

    # -- optimizer -------------------------------------------------------------------------------

    def param_groups(
        self,
        lr: float,
        *,
        weight_decay: float = 0.0,
        eps: float | None = None,
        optimizer: "str | type[torch.optim.Optimizer]" = "adamw",
        roles: "Collection[Role] | None" = None,
    ) -> list[dict[str, Any]]:
        """Groups for a torch optimizer, one per distinct setting.

        Each has `lr`, `weight_decay` and `eps` resolved, the factor `lr_scale` (lr = lr_scale × the base lr), and
        the `roles` and `names` in it. Schedulers that multiply keep the ratios; OneCycleLR and CyclicLR assign, so
        give them `max_lr=[g["lr"] for g in optimizer.param_groups]`.
        """
        kind = optimizer_kind(optimizer)
        positive("lr", lr, zero=True)
        positive("weight_decay", weight_decay, zero=True)
        if weight_decay and not kind.decoupled:
            raise UserError(
                f"{optimizer!r} adds weight decay to the gradient, where its normalisation undoes any scaling: there is no rule",
                fix="use AdamW, whose weight decay is decoupled, or weight_decay=0",
            )
        if eps is not None and kind.eps is None:
            raise UserError(f"{optimizer!r} has no eps that the rules scale", fix="leave eps out")
        eps = positive("eps", eps, zero=True) if eps is not None else kind.eps
        wanted = self._roles(roles, kind.column)
        groups: dict[tuple[float, ...], dict[str, Any]] = {}
        for name, parameter in self._tensors():
            r = self.parameters[name]
            if r.role not in wanted or not parameter.requires_grad:
                continue
            if kind.column is Column.MUON and parameter.dim() != 2:
                raise UserError(
                    f"Muon takes matrices only; '{name}' has shape {tuple(parameter.shape)}",
                    fix="give its role to AdamW",
                )
            f = self._factors(r, kind.column)
            setting = {"lr": lr * f.lr, "weight_decay": weight_decay * f.weight_decay, "lr_scale": f.lr}
            if eps is not None:
                setting["eps"] = eps * f.eps
            more: dict[str, Any] = {"adjust_lr_fn": "original"} if kind.column is Column.MUON else {}
            # c belongs to the key although it is not a setting: fold() must be able to move whole groups.
            key = (*setting.values(), r.fold)
            group = groups.setdefault(key, {"params": [], **setting, **more, "roles": [], "names": []})
            group["params"].append(parameter)
            group["names"].append(name)
            if str(r.role) not in group["roles"]:
                group["roles"].append(str(r.role))
        return list(groups.values())

    def _roles(self, roles: "Collection[Role] | None", column: Column) -> set[Role]:
        known = self.rules.columns.get(column, {})
        if not known:
            raise UserError(
                f"{self.rules.name} has no {column} column", fix="use an optimizer of the Adam family with these rules"
            )
        for role in roles or ():
            if not isinstance(role, Role):
                raise UserError(f"roles: {role!r} is no role", fix="use " + ", ".join(f"Role.{r.name}" for r in Role))
        return set(known) if roles is None else set(roles)

    def grad_norm(self) -> Tensor:
        """The global gradient norm in unfolded coordinates: the same number whatever the style."""
        norms = [
            torch.linalg.vector_norm(p.grad) * self._c(self.parameters[name])
            for name, p in self._tensors()
            if p.grad is not None
        ]
        if not norms:
            return torch.tensor(0.0)
        total = torch.linalg.vector_norm(torch.stack(norms))
        return total.full_tensor() if isinstance(total, DTensor) else total

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_, but with the norm that the unfolded model would have."""
        total = self.grad_norm()
        shrink = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for _, p in self._tensors():
            if p.grad is not None:
                p.grad.mul_(shrink.to(p.grad.device))
        return total

    # -- the two styles --------------------------------------------------------------------------

    def fold(self, *optimizers: torch.optim.Optimizer, schedulers: "Collection[Any]" = ()) -> "Scaling":
        """Move every multiplier into the weights, at any moment of training: the same run goes on, and what is left is
        an ordinary model that loads into its plain class. Give all optimizers and schedulers, or train on afresh."""
        from completep.rules.fold import restyle

        return restyle(self, "folded", optimizers, schedulers)

    def unfold(self, *optimizers: torch.optim.Optimizer, schedulers: "Collection[Any]" = ()) -> "Scaling":
        """The way back: plain weights, multipliers in the forward pass."""
        from completep.rules.fold import restyle

        return restyle(self, "multiplier", optimizers, schedulers)

    def on(self, model: nn.Module) -> "Scaling":
        """The same scaling for a copy of the model (deepcopy, or the same class with these weights loaded)."""
        theirs = {name: tuple(p.shape) for name, p in named_parameters(unwrap(model))}
        ours = {name: r.shape for name, r in self.parameters.items()}
        if theirs != ours:
            odd = sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
            raise UserError(
                f"this model has other parameters than the one that was parametrized: {some(odd)}",
                fix="call parametrize on it",
            )
        return replace(self, model=unwrap(model))

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint: what the rules came to, so that a resume under others is noticed."""
        table: dict[str, dict[str, Any]] = {}
        for r in self.parameters.values():
            f = r.factors(self.rules.rule(r.role), Column.ADAM, 1.0)
            table[r.template] = {
                "role": str(r.role), "m_N": r.m_N, "m_out": r.m_out, "m_L": r.m_L, "fold": r.fold,
                "init_std": f.init_std, "lr": f.lr, "weight_decay": f.weight_decay, "eps": f.eps,
            }  # fmt: skip
        return {
            "format": FORMAT,
            "rules": self.rules.name,
            "style": self.style,
            "base": {"width": self.base.width, "depth": self.base.depth},
            "multipliers": self.factors(),
            "parameters": table,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check a checkpoint against these rules; refuse it with the differences listed."""
        differences = list(_differences(state, self.state_dict()))
        if differences:
            raise UserError(
                f"this checkpoint was made under other rules; {len(differences)} differences (checkpoint → here):\n    "
                + "\n    ".join(differences[:12])
                + ("\n    …" if len(differences) > 12 else ""),
                fix="parametrize with the checkpoint's rules, base and style, or start a new run",
            )

    def explain(self, *, std: float = 1.0, lr: float = 1.0, weight_decay: float = 1.0, eps: float = 1.0) -> "list[Any]":
        """The resolved table, one row per parameter; see `completep.rules.explain`."""
        from completep.rules.explain import explain

        return explain(self, std=std, lr=lr, weight_decay=weight_decay, eps=eps)

    def factors(self) -> dict[str, float]:
        """The multipliers of the forward pass by kind; a model with several stacks has several of a kind, told apart by place."""
        kinds = [m.kind for m in self.multipliers]
        return {m.kind if kinds.count(m.kind) == 1 else f"{m.kind} {m.modules[0]}": m.factor for m in self.multipliers}

    # -- inside ----------------------------------------------------------------------------------

    def _tensors(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in named_parameters(self.model):
            if name not in self.parameters:
                raise UserError(
                    f"parameter '{name}' was not there when the model was parametrized",
                    fix="call parametrize after the model is complete",
                )
            yield name, parameter

    def _c(self, r: Resolved) -> float:
        return r.fold if self.style == "folded" else 1.0

    def _factors(self, r: Resolved, column: Column = Column.ADAM) -> Factors:
        return r.factors(self.rules.rule(r.role, column), column, self._c(r))


def positive(name: str, value: float, *, zero: bool = False) -> float:
    ok = isinstance(value, (int, float)) and math.isfinite(value) and (value > 0 or (zero and value == 0))
    if not ok:
        raise UserError(
            f"{name}={value!r} is not a number that can be used here",
            fix=f"give a finite {name} {'of at least' if zero else 'above'} 0",
        )
    return value


def _fill(parameter: nn.Parameter, value: "Tensor | float") -> None:
    with torch.no_grad():
        if not isinstance(value, Tensor):
            parameter.fill_(value)
        elif isinstance(parameter, DTensor):  # sharded: every rank draws the whole tensor and keeps its part
            full = value.to(parameter.device)
            parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None))
        else:
            parameter.copy_(value)


def _differences(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in ours | theirs:
            yield from _differences(theirs.get(key), ours.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(theirs, float) and isinstance(ours, float):
        if not math.isclose(theirs, ours, rel_tol=1e-12):
            yield f"{path}: {theirs:g} → {ours:g}"
    elif theirs != ours:
        yield f"{path}: {theirs!r} → {ours!r}"
