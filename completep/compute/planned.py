"""A plan: a run, the law behind each of its settings, and how both are shown."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from completep.compute import flops as count
from completep.compute.memory import Memory, memory
from completep.config import Run
from completep.report.document import Document, Json, Part, Table, Text, number, setting
from completep.report.result import Result
from completep.rules.table import Role, Rules, decoder_roles, rules_named
from completep.units import human

BY_ROLE = "learning rate by role"  # the key of this law, if the run has multipliers by role


@dataclass(frozen=True)
class RoleSettings:
    role: Role
    init_std: float | None  # None if the parameter starts at a constant
    lr: float
    weight_decay: float
    eps: float


@dataclass(frozen=True)
class Change:
    """One setting of a tuned run, and what it becomes at the target."""

    setting: str
    before: str | float
    after: str | float
    why: str

    def texts(self, show: Callable[[float], str]) -> tuple[str, str]:
        """Before and after, with numbers as `show` writes them."""
        before, after = (x if isinstance(x, str) else show(x) for x in (self.before, self.after))
        return before, after


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Result):
    """A run, and the law behind each of its settings."""

    run: Run
    flops: float
    laws: Mapping[str, str]  # what was chosen → by which law
    changes: tuple[Change, ...] = ()  # from the tuned run, if there was one
    notes: tuple[str, ...] = ()
    ranks: int = 1
    micro_batch: int = 1
    rules: Rules = field(init=False, repr=False)

    slug = "plan"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", rules_named(self.run.rules))

    @property
    def m_N(self) -> float:
        return self.run.model.width / self.run.base.width

    @property
    def m_L(self) -> float:
        return self.run.model.depth / self.run.base.depth

    @property
    def multipliers(self) -> dict[str, float]:
        return {"branch": self.rules.branch(self.m_N, self.m_L), "logits": self.rules.logits(self.m_N, self.m_L)}

    @property
    def memory(self) -> Memory:
        return memory(self.run.model, sequence=self.run.sequence, micro_batch=self.micro_batch, ranks=self.ranks)

    def roles(self) -> list[RoleSettings]:
        """The resolved optimizer settings of every role that the model has."""
        h, rows = self.run.hyperparameters, []
        for role in decoder_roles(self.run.model):
            rule, trait = self.rules.rule(role), role.trait
            ratios = (self.m_N, self.m_L, 1.0 if trait.fixed_outputs else self.m_N)
            rows.append(
                RoleSettings(
                    role,
                    h.std * rule.init_std(*ratios) if trait.start == "random" else None,
                    h.lr * rule.lr(*ratios) * h.lr_of.get(role, 1.0),
                    h.weight_decay * rule.weight_decay(*ratios) if trait.decayed else 0.0,
                    h.eps * rule.eps(*ratios),
                )
            )
        return rows

    def document(self) -> Document:
        notes = [Text(note) for note in self.notes]
        parts: list[Part] = [self._run_table(), self._role_table(), self._cost_table(), *notes]
        if self.changes:
            rows = tuple(
                (c.setting, before, "the same" if after == before else after, c.why)
                for c in self.changes
                for before, after in [c.texts(_shown)]
            )
            parts.insert(0, Table("What transfers, what changes", ("setting", "tuned run", "here", "why"), rows))
        return Document(f"A plan for {human(count.non_embedding(self.run.model))} parameters", tuple(parts))

    def _run_table(self) -> Table:
        run, h, laws, needed = self.run, self.run.hyperparameters, self.laws, self.memory
        model, total, active = run.model, count.total(run.model), count.active(run.model)
        routed, passed = (f", {human(active)} active", "active ") if model.experts else ("", "")
        shape = f"width {model.width}, depth {model.depth}, {model.heads} heads of {model.head_size}"
        batch = f"{run.batch} sequences of {run.sequence} ({human(run.batch * run.sequence)} tokens)"
        ranks = f", micro-batch {self.micro_batch}, ranks {self.ranks}"
        parts = f"state {_gb(needed.state)}, gathered {_gb(needed.gathered)}, activations {_gb(needed.activations)}"
        rows = (
            ("shape", shape, laws.get("shape", "given")),
            ("parameters", f"{human(count.non_embedding(model))} in blocks, {human(total)} in all{routed}", "counted"),
            ("tokens", f"{human(run.tokens)} ({run.tokens / active:.1f} per {passed}parameter)", laws["tokens"]),
            ("training FLOPs", number(float(self.flops)), "counted by component (docs/paper-numbers.md)"),
            ("batch", batch, laws["batch"]),
            ("steps", f"{run.schedule.steps}, with {run.schedule.warmup} of warm-up", laws["warm-up"]),
            ("base learning rate η", setting(h.lr), laws["learning rate"]),
            *((f"η of {role}", f"× {setting(times)}", laws[BY_ROLE]) for role, times in h.lr_of.items()),
            ("base init std σ", setting(h.std), laws["init std"]),
            ("base weight decay λ", setting(h.weight_decay), laws["weight decay"]),
            ("base epsilon ε", setting(h.eps), laws["epsilon"]),
            ("betas", f"{h.beta1:g}, {h.beta2:g}", laws["betas"]),
            ("branch × / logits ×", " / ".join(map(number, self.multipliers.values())), laws["per role"]),
            ("memory per rank", f"{_gb(needed.per_rank)}{ranks}", f"{parts} (estimate)"),
            ("checkpoint", _gb(needed.checkpoint), "weights and both moments, float32"),
        )  # fmt: skip
        return Table("The run", ("what", "value", "by"), rows)

    def _role_table(self) -> Table:
        base = self.run.base
        sizes = f"m_N = {self.m_N:g}, m_L = {self.m_L:g}, base {base.width} × {base.depth}"
        title = f"AdamW by role: {self.rules.name}, {sizes}"
        rows = tuple(
            (str(s.role), "constant" if s.init_std is None else f"{s.init_std:.4g}", s.lr, s.weight_decay, s.eps)
            for s in self.roles()
        )
        return Table(title, ("role", "init std", "lr", "weight decay", "eps"), rows)

    def _cost_table(self) -> Table:
        costs = count.flops_per_token(self.run.model, self.run.sequence)
        everything = sum(c.total for c in costs.values())
        rows = tuple(
            (name, float(c.forward), float(c.backward), 100 * c.total / everything) for name, c in costs.items()
        )
        return Table("FLOPs per token", ("component", "forward", "backward", "share (%)"), rows)

    def _fields(self) -> Json:
        model = self.run.model
        parameters = {"non_embedding": count.non_embedding(model), "total": count.total(model)}
        parameters |= {"active": count.active(model)} if model.experts else {}
        costs = count.flops_per_token(model, self.run.sequence)
        return {
            "run": asdict(self.run),
            "tokens": self.run.tokens,
            "flops": self.flops,
            "parameters": parameters | count.parameters(model),
            "flops_per_token": {name: asdict(cost) for name, cost in costs.items()},
            "multipliers": self.multipliers,
            "roles": [asdict(s) for s in self.roles()],
            "memory": {**asdict(self.memory), "per_rank": self.memory.per_rank},
            "laws": dict(self.laws),
            "changes": [asdict(c) | dict(zip(("before", "after"), c.texts(_six), strict=True)) for c in self.changes],
            "notes": list(self.notes),
        }


def _shown(value: float) -> str:
    return setting(value) if isinstance(value, float) else str(value) if value < 100_000 else human(value, 4)


def _six(value: float) -> str:
    return f"{value:.6g}"


def _gb(value: float) -> str:
    return f"{value / 1e9:.3g} GB"
