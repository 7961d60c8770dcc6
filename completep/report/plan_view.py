"""A plan as tables for a person and as plain data for a program."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from completep.compute import flops
from completep.compute.memory import Memory
from completep.compute.plan import Plan, per_role
from completep.rules.table import Rules, rules_named
from completep.units import human


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.3g} GB"


def plan_tables(plan: Plan, rules: Rules, memory: Memory, ranks: int, micro_batch: int) -> list[Any]:
    return [
        *_change_table(plan),
        _run_table(plan, memory, ranks, micro_batch),
        _role_table(plan, rules),
        _cost_table(plan),
        *plan.notes,
    ]


def _run_table(plan: Plan, memory: Memory, ranks: int, micro_batch: int) -> Table:
    run, h, laws = plan.run, plan.run.hyperparameters, plan.laws
    table = Table("what", "value", "by", title="The run", title_justify="left", header_style="bold")
    shape = f"width {run.model.width}, depth {run.model.depth}, {run.model.heads} heads of {run.model.head_size}"
    rows = [
        ("shape", shape, laws.get("shape", "given")),
        ("parameters", f"{human(flops.non_embedding(run.model))} in blocks, {human(flops.total(run.model))} in all", "count"),
        ("tokens", f"{human(run.tokens)} ({run.tokens / flops.total(run.model):.1f} per parameter)", laws["tokens"]),
        ("training FLOPs", f"{plan.flops:.3g}", "granular count (docs/paper-numbers.md)"),
        ("batch", f"{run.batch} sequences of {run.sequence} ({human(run.batch * run.sequence)} tokens)", laws["batch"]),
        ("steps", f"{run.schedule.steps}, {run.schedule.warmup} of them warm-up", laws["warm-up"]),
        ("base learning rate η", f"{h.lr:.6g}", laws.get("lr, ε, β", "tuned at the base")),
        ("base init std σ", f"{h.std:.6g}", "tuned at the base"),
        ("base weight decay λ", f"{h.weight_decay:.6g}", laws["weight decay"]),
        ("base epsilon ε", f"{h.eps:.6g}", laws.get("lr, ε, β", "tuned at the base")),
        ("betas", f"{h.beta1:g}, {h.beta2:g}", laws.get("lr, ε, β", "tuned at the base")),
        ("branch × / logits ×", "{:.4g} / {:.4g}".format(*_multipliers(plan)), laws["per role"]),
        ("memory per rank", f"{gigabytes(memory.per_rank)}, micro-batch {micro_batch}, ranks {ranks}", _memory_words(memory)),
        ("checkpoint", gigabytes(memory.checkpoint), "weights and both moments, float32"),
    ]  # fmt: skip
    for row in rows:
        table.add_row(*row)
    return table


def _memory_words(m: Memory) -> str:
    return f"state {gigabytes(m.state)}, gathered {gigabytes(m.gathered)}, activations {gigabytes(m.activations)} (estimate)"


def _multipliers(plan: Plan) -> tuple[float, float]:
    rules = rules_named(plan.run.rules)
    return rules.branch(plan.m_N, plan.m_L), rules.logits(plan.m_N, plan.m_L)


def _role_table(plan: Plan, rules: Rules) -> Table:
    base = plan.run.base
    title = f"AdamW by role: {rules.name}, m_N = {plan.m_N:g}, m_L = {plan.m_L:g} (base width {base.width}, depth {base.depth})"
    table = Table(
        "role", "init std", "lr", "weight decay", "eps", title=title, title_justify="left", header_style="bold"
    )
    for s in per_role(plan, rules):
        start = "constant" if s.init_std is None else f"{s.init_std:.4g}"
        table.add_row(str(s.role), start, f"{s.lr:.4g}", f"{s.weight_decay:.4g}", f"{s.eps:.4g}")
    return table


def _cost_table(plan: Plan) -> Table:
    costs = flops.flops_per_token(plan.run.model, plan.run.sequence)
    everything = sum(c.total for c in costs.values())
    table = Table(
        "component", "forward", "backward", "share", title="FLOPs per token", title_justify="left", header_style="bold"
    )
    for name, cost in costs.items():
        table.add_row(name, f"{cost.forward:.3g}", f"{cost.backward:.3g}", f"{cost.total / everything:.1%}")
    return table


def _change_table(plan: Plan) -> list[Table]:
    if not plan.changes:
        return []
    table = Table(
        "setting",
        "tuned run",
        "here",
        "why",
        title="What transfers, what changes",
        title_justify="left",
        header_style="bold",
    )
    for setting, before, after, why in plan.changes:
        table.add_row(setting, before, after if after != before else "the same", why)
    return [table]


def plan_json(plan: Plan, rules: Rules, memory: Memory) -> dict[str, Any]:
    model = plan.run.model
    costs = flops.flops_per_token(model, plan.run.sequence)
    branch, logits = _multipliers(plan)
    return {
        "run": asdict(plan.run),
        "tokens": plan.run.tokens,
        "flops": plan.flops,
        "parameters": {"non_embedding": flops.non_embedding(model), "total": flops.total(model), **flops.parameters(model)},
        "flops_per_token": {name: asdict(cost) for name, cost in costs.items()},
        "multipliers": {"branch": branch, "logits": logits},
        "roles": [asdict(s) for s in per_role(plan, rules)],
        "memory": {**asdict(memory), "per_rank": memory.per_rank},
        "laws": plan.laws,
        "changes": [dict(zip(("setting", "before", "after", "why"), c, strict=True)) for c in plan.changes],
        "notes": plan.notes,
    }  # fmt: skip
