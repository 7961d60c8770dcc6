"""From a budget or a size to a run: shape, tokens, batch, steps, learning rates, weight decay, FLOPs, memory.

Every setting that is not given is chosen by a law. The plan names the law of each setting.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from completep import paper
from completep.compute import flops as count
from completep.compute.memory import require_devices
from completep.compute.planned import BY_ROLE, Change, Plan
from completep.compute.shapes import Limits, Quantity, Target, best_ratio, choose_shape
from completep.config import (
    GPTConfig,
    Hyperparameters,
    Run,
    Schedule,
    Shape,
    as_shape,
    default_head_size,
    run_from_json,
)
from completep.errors import UserError, choice, some
from completep.files import read_text
from completep.rules.table import LR_NAMES, Horizon, Role, Rules, as_rules, check_lr_of, decoder_roles
from completep.tuned import TunedValues, is_tuned, read_tuned
from completep.units import human, parse_quantity

Law = Literal["paper", "completed"]
MOST_TOKENS = 1e17
LARGEST_DECAY = 1e300  # largest λ whose products are still finite
# Numbers above these are typing mistakes.
ABSURD = {
    "width": 1e6,
    "depth": 1e5,
    "batch": 1e7,
    "sequence": 1e8,
    "tpp": 1e6,
    "vocabulary": 1e8,
    "lr": 1e3,
    "std": 1e3,
}


def plan(
    *,
    params: Quantity | None = None,
    flops: Quantity | None = None,
    gpu_hours: Quantity | None = None,
    width: int | None = None,
    depth: int | None = None,
    device: str = "h100",
    mfu: float = 0.4,
    max_width: int | None = None,
    max_depth: int | None = None,
    head_size: int | None = None,
    vocabulary: int | None = None,
    experts: int | None = None,
    active_experts: int | None = None,
    expert_width: int | None = None,
    shared_experts: int | None = None,
    sequence: int | None = None,
    tpp: float = paper.TOKENS_PER_PARAMETER,
    tokens: Quantity | None = None,
    batch: int | None = None,
    rules: Rules | str | None = None,
    base: "Shape | tuple[int, int] | None" = None,
    lr: float | None = None,
    std: float | None = None,
    tau: float | None = None,
    tuned: "Run | TunedValues | Path | str | None" = None,
    law: Law = "paper",
    horizon_exponent: float | None = None,
    ranks: int = 1,
    micro_batch: int = 1,
) -> Plan:
    """From a budget or a size to a run. Give the size in one way: params, flops, gpu_hours, or width and depth.

    Args:
        params: non-embedding parameters, such as 300e6, "300M" or "1.5B".
        flops: training budget, such as 4e20.
        gpu_hours: training budget in device hours, with device and mfu.
        width: width N, with depth.
        depth: depth L, with width.
        device: name (h100, a100, …) or peak FLOP/s ("989e12").
        mfu: share of the peak that training reaches.
        max_width: largest width, if memory limits it.
        max_depth: largest depth, if latency limits it.
        head_size: dimensions per attention head; by default the tuned run's, else 64, or less to have four heads.
        vocabulary: size of the vocabulary; by default the tuned run's, else 50257.
        experts: experts in every block; by default the tuned run's, else none. With experts, tpp counts the parameters
            that one token passes.
        active_experts: experts that a token is sent to; by default the tuned run's, else 1.
        expert_width: inner width of an expert; by default the tuned run's, else four times the width.
        shared_experts: experts that every token passes; by default the tuned run's, else none.
        sequence: tokens per sequence; by default the tuned run's, else 2048.
        tpp: tokens per parameter.
        tokens: tokens to train on, instead of tpp.
        batch: sequences per step, instead of the batch law.
        rules: the parameterization, as an object or a key; by default the tuned run's, else CompleteP.
        base: width and depth of the base that was tuned; by default the tuned run's, else 256 and 2.
        lr: base learning rate; by default the tuned run's, else the paper's 2^-8.
        std: base init standard deviation; by default the tuned run's, else the paper's 0.02.
        tau: weight-decay timescale, 1 / (lr · weight decay · steps); by default the tuned run's, else 0.1407.
        tuned: a tuned.json from `tune`, or a tuned run (run.json), to carry over to the larger target. Other arguments
            override it.
        law: with tuned: how batch and duration transfer (the paper's laws, or Complete(d)P's).
        horizon_exponent: with law="completed", by default 0.5; published values are 0.28 to 0.5.
        ranks: devices that share the state (FSDP2).
        micro_batch: sequences per device and forward pass, for the memory estimate.
    """
    choice("law", law, get_args(Law))
    tuned_values, tuned_run = _read(tuned)
    start = None if base is None else as_shape(base)
    given = {"learning rate": lr, "init std": std, "weight decay": tau}
    if tuned_values is not None and tuned_run is None:
        _refuse_other_base(start, tuned_values.base)
        start, rules = tuned_values.base, rules or tuned_values.rules
        lr, std = lr or tuned_values.number("lr"), std or tuned_values.number("std")
        tau = tau or tuned_values.tau
    target = Target(params, flops, gpu_hours, width, depth, device, mfu)
    _check_numbers(
        tpp=tpp, lr=lr, std=std, tau=tau, sequence=sequence, vocabulary=vocabulary, head_size=head_size, batch=batch,
        max_width=max_width, max_depth=max_depth, width=width, depth=depth, horizon_exponent=horizon_exponent,
    )  # fmt: skip
    _refuse_contradictions(tuned_run, law, horizon_exponent, start, lr=lr, tau=tau)
    if tokens is not None and (flops is not None or gpu_hours is not None):
        what = f"tokens={tokens} with a budget: the budget decides the number of tokens"
        raise UserError(what, fix="leave tokens out, or give params, or width and depth, instead of the budget")
    wanted = None if tokens is None else parse_quantity(str(tokens), "tokens")
    if wanted is not None and wanted > MOST_TOKENS:
        raise UserError(f"tokens={tokens} is implausible (more than {MOST_TOKENS:g})", fix="check the number")
    narrowest = min(width or paper.BASE.width, (start or paper.BASE).width)
    plain = _like(tuned_run, head_size, vocabulary, narrowest)
    like = replace(
        plain,
        experts=plain.experts if experts is None else experts,
        active_experts=plain.active_experts if active_experts is None else active_experts,
        expert_width=plain.expert_width if expert_width is None else expert_width,
        shared_experts=plain.shared_experts if shared_experts is None else shared_experts,
    )
    length = sequence or (paper.SEQUENCE if tuned_run is None else tuned_run.sequence)
    limits = Limits(**{k: v for k, v in (("max_width", max_width), ("max_depth", max_depth)) if v is not None})
    model, shape_law = choose_shape(target, like, limits, tpp, length)
    if tuned_run is not None:
        planned = replan(
            tuned_run, model, law=law, exponent=horizon_exponent or 0.5, tpp=tpp, batch=batch, tokens=wanted,
            sequence=length, rules=rules, lr=lr, std=std, tau=tau,
        )  # fmt: skip
    else:
        planned = plan_shape(
            model, rules=rules or "completep", base=start or paper.BASE, tpp=tpp, tokens=wanted, batch=batch,
            sequence=length, lr=lr, std=std, tau=tau,
        )  # fmt: skip
    planned = replace(planned, laws={"shape": shape_law, **planned.laws}, ranks=ranks, micro_batch=micro_batch)
    if tuned_values is not None:
        planned = _with_tuned(planned, tuned_values, [name for name, value in given.items() if value is None])
    require_devices(ranks, micro_batch)
    return planned


def _read(tuned: "Run | TunedValues | Path | str | None") -> tuple[TunedValues | None, Run | None]:
    """(tuned values, tuned run), of a file or an object. A tuned.json of your own script has no run."""
    if isinstance(tuned, (Path, str)):
        text = read_text(Path(tuned))
        tuned = read_tuned(tuned) if is_tuned(text) else run_from_json(text, str(tuned))
    return (tuned, tuned.run) if isinstance(tuned, TunedValues) else (None, tuned)


def _like(tuned: Run | None, head_size: int | None, vocabulary: int | None, narrowest: int) -> GPTConfig:
    """A model with all settings but the shape, one head wide. Base and target have the same head size."""
    if tuned is None:
        size = head_size or default_head_size(narrowest)
        return GPTConfig(size, 1, vocabulary or paper.VOCABULARY, size)
    size = head_size or tuned.model.head_size
    return replace(tuned.model, width=size, head_size=size, vocabulary=vocabulary or tuned.model.vocabulary)


def _refuse_contradictions(
    tuned: Run | None, law: Law, exponent: float | None, base: Shape | None, **given: float | None
) -> None:
    """Refuse arguments that would have no effect."""
    if tuned is None and law == "completed":
        raise UserError(
            "law='completed' needs a tuned run, and none is given", fix="give the tuned run, or leave law out"
        )
    if law != "completed" and exponent is not None:
        raise UserError(
            f"horizon_exponent={exponent:g} has no effect under the paper's law",
            fix="add law='completed', or leave horizon_exponent out",
        )
    for name in [name for name, value in given.items() if value is not None and law == "completed"]:
        what = "learning rate" if name == "lr" else "weight decay"
        raise UserError(
            f"{name}={given[name]:g} contradicts law='completed', which sets the {what} from the tuned run's",
            fix=f"leave {name} or law out",
        )
    if tuned is not None:
        _refuse_other_base(base, tuned.base)


def _refuse_other_base(base: Shape | None, tuned: Shape) -> None:
    if base is not None and base != tuned:
        raise UserError(
            f"the base {base.width} × {base.depth} is not the tuned run's, {tuned.width} × {tuned.depth}: "
            "its hyperparameters hold for its own base",
            fix="leave base out, or give lr and std without the tuned run",
        )


def _with_tuned(planned: Plan, tuned: TunedValues, open_: list[str]) -> Plan:
    """The plan with the epsilon, betas and multipliers of tuned.json, which is named as the law of its values."""
    names = {"learning rate": ("lr",), "init std": ("std",), "weight decay": ("tau", "weight_decay")}
    names |= {"epsilon": ("eps",), "betas": ("beta1", "beta2")}
    by = f"tuned at {tuned.base.width} × {tuned.base.depth} (transfer {tuned.verdict})"
    planned = _with_lr_of(planned, tuned.lr_of(LR_NAMES), by)
    from_tuned = [
        law for law in (*open_, "epsilon", "betas") if any(tuned.number(name) is not None for name in names[law])
    ]
    notes = list(planned.notes)
    if tuned.number("weight_decay") is not None and tuned.tau is None:
        from_tuned.remove("weight decay")
        unknown = "The tuned weight decay is not used, because the number of steps that it was tuned for is unknown"
        notes.append(f"{unknown}: give tau, or tune with the constant steps.")
    if tuned.verdict != "PASS":
        notes.append(f"The transfer of the tuned values is {tuned.verdict}, not PASS: {tuned.why}")
    h = planned.run.hyperparameters
    eps, beta1, beta2 = (tuned.number(name) for name in ("eps", "beta1", "beta2"))
    hyper = replace(
        h,
        eps=h.eps if eps is None else eps,
        beta1=h.beta1 if beta1 is None else beta1,
        beta2=h.beta2 if beta2 is None else beta2,
    )
    run = replace(planned.run, hyperparameters=hyper)
    return replace(planned, run=run, laws={**planned.laws, **dict.fromkeys(from_tuned, by)}, notes=tuple(notes))


def _with_lr_of(planned: Plan, lr_of: Mapping[str, float], why: str) -> Plan:
    """The plan with these multipliers, as far as the model has their roles."""
    check_lr_of(lr_of, set(Role))
    present = set(decoder_roles(planned.run.model))
    kept = {str(role): times for role, times in lr_of.items() if role in present}
    hyper = replace(planned.run.hyperparameters, lr_of=kept)
    laws = {**planned.laws, BY_ROLE: why} if kept else planned.laws
    absent = [f"{role} × {times:.4g}" for role, times in lr_of.items() if role not in present]
    note = f"Tuned multipliers of roles that this model does not have are left out: {some(absent)}."
    notes = tuple(dict.fromkeys((*planned.notes, note))) if absent else planned.notes
    return replace(planned, run=replace(planned.run, hyperparameters=hyper), laws=laws, notes=notes)


def _check_numbers(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise UserError(f"{name}={value!r}: must be above 0 and finite", fix="give a positive number")
        if value is not None and value > ABSURD.get(name, math.inf):
            shown = f"{value:g}" if value < 1e300 else "a number of more than 300 digits"
            raise UserError(f"{name}={shown} is implausible (more than {ABSURD[name]:g})", fix="check the number")


DEFAULT = "the paper's default, not tuned on your model"


def plan_shape(
    model: GPTConfig,
    *,
    rules: Rules | str = "completep",
    base: Shape = paper.BASE,
    tpp: float = paper.TOKENS_PER_PARAMETER,
    tokens: float | None = None,
    batch: int | None = None,
    sequence: int = paper.SEQUENCE,
    lr: float | None = None,
    std: float | None = None,
    tau: float | None = None,
    seed: int = 0,
) -> Plan:
    """The paper's compute-optimal recipe for one shape. Arguments that are None get the paper's values."""
    model.require_heads()
    eta, timescale = paper.LR if lr is None else lr, paper.TAU if tau is None else tau
    for name, value in (("lr", eta), ("tau", timescale), ("tpp", tpp)):
        if not value > 0:
            raise UserError(f"{name}={value}: must be above 0", fix=f"give a positive {name}")
    wanted = tokens if tokens is not None else tpp * count.active(model)
    cost = count.training_flops(model, sequence, wanted)
    chosen = batch if batch is not None else batch_size(cost, sequence)
    steps = int(wanted // (chosen * sequence))
    if steps < 1:
        raise UserError(
            f"{wanted:.3g} tokens are less than one step of {chosen} sequences of {sequence}",
            fix="give more tokens or parameters, or a smaller batch",
        )
    parameterization = as_rules(rules)
    source = "tuned in the paper" if tau is None else "given"
    laws = {
        "tokens": f"{tpp:g} per parameter (Hoffmann et al. 2022)" if tokens is None else "given",
        "batch": _batch_law(sequence) if batch is None else "given",
        "warm-up": f"min({paper.WARMUP_SHARE:.0%} of steps, {human(paper.WARMUP_TOKENS)} tokens), then linear to 0",
        "learning rate": DEFAULT if lr is None else "given",
        "init std": DEFAULT if std is None else "given",
        "weight decay": f"timescale τ = 1/(η λ steps) = {timescale:g} (Wang & Aitchison 2024), {source}",
        "epsilon": DEFAULT,
        "betas": DEFAULT,
        "per role": parameterization.name,
    }
    sigma = paper.STD if std is None else std
    hyper = Hyperparameters(eta, sigma, weight_decay(timescale, eta, steps), paper.EPS, *paper.BETAS)
    schedule = Schedule(steps, warmup_steps(steps, chosen * sequence))
    run = Run(model, hyper, schedule, chosen, sequence, parameterization.key, base, seed=seed)
    return Plan(run, cost, laws, notes=tuple(shape_notes(model, parameterization)))


def batch_size(total_flops: float, sequence: int = paper.SEQUENCE) -> int:
    """Sequences per step. The law is for sequences of 2048 tokens; other lengths get as many tokens per step.

    The result is a multiple of 8, as in the paper, unless the law gives fewer than 8 sequences.
    """
    sequences = paper.batch_law(total_flops) * paper.SEQUENCE / sequence
    return 8 * round(sequences / 8) if sequences >= 8 else max(1, round(sequences))


def _batch_law(sequence: int) -> str:
    law = f"{paper.BATCH_LAW} sequences of {paper.SEQUENCE} (paper)"
    return law if sequence == paper.SEQUENCE else f"{law}, the same tokens in sequences of {sequence}"


def warmup_steps(steps: int, tokens_per_step: int) -> int:
    return int(min(paper.WARMUP_SHARE * steps, paper.WARMUP_TOKENS / tokens_per_step))


def weight_decay(tau: float, lr: float, steps: float) -> float:
    """The λ of a given timescale τ = 1 / (η λ steps) of AdamW (Wang & Aitchison 2024)."""
    if (share := tau * lr * steps) < 1 / LARGEST_DECAY:
        what = f"tau={tau:g} with lr={lr:g} over {steps:g} steps: no weight decay is that strong"
        raise UserError(what, fix="give a larger tau, or a larger lr")
    return 1 / share


def shape_notes(model: GPTConfig, rules: Rules) -> Iterator[str]:
    ratio, best = model.width / model.depth, best_ratio(count.non_embedding(model))
    yield f"N:L = {ratio:.3g}; the paper's optimum at this size is about {best:.3g}"
    deepest = paper.DEEPEST_RATIO_WITHIN_1_PERCENT.get(rules.key)
    if model.expert_width is not None:
        yield "the width of experts is fixed, so their ratios differ from m_N: `explain` shows them"
    if deepest and ratio < deepest:
        yield f"N:L below {deepest}: at 1.5B the paper lost more than 1 % there under {rules.name}"


def replan(
    tuned: Run, model: GPTConfig, *, law: Law, exponent: float = 0.5, tpp: float, batch: int | None,
    tokens: float | None = None, sequence: int | None = None, rules: Rules | str | None = None,
    lr: float | None = None, std: float | None = None, tau: float | None = None,
) -> Plan:  # fmt: skip
    """The hyperparameters of a tuned run for a larger target: some transfer unchanged, others are changed by a law.

    Arguments that are given override the tuned run.
    """
    h = tuned.hyperparameters
    share = h.lr * h.weight_decay * tuned.schedule.steps
    tuned_tau = 1 / share if share else math.inf
    new = plan_shape(
        model, rules=rules or tuned.rules, base=tuned.base, tpp=tpp, tokens=tokens, batch=batch,
        sequence=sequence or tuned.sequence, lr=lr or h.lr, std=std or h.std, tau=tau or tuned_tau, seed=tuned.seed,
    )  # fmt: skip
    carried = f"transfers from the tuned run ({new.laws['per role']})"
    new = _with_lr_of(new, h.lr_of, carried)
    laws = dict(new.laws) | {"epsilon": carried, "betas": carried}
    laws |= {name: carried for name, value in (("learning rate", lr), ("init std", std)) if value is None}
    if tau is None:
        kept_tau = f"timescale τ = 1/(η λ steps) = {tuned_tau:.4g}, the tuned run's (Wang & Aitchison 2024)"
        laws["weight decay"] = kept_tau if h.weight_decay else "none was tuned"
    hyper = replace(new.run.hyperparameters, eps=h.eps, beta1=h.beta1, beta2=h.beta2)
    if law == "completed":
        m_S, horizon = new.run.schedule.steps / tuned.schedule.steps, Horizon(exponent)
        hyper = replace(
            hyper,
            lr=h.lr * horizon.lr(m_S),
            weight_decay=h.weight_decay * horizon.weight_decay(m_S),
            eps=h.eps * horizon.eps(m_S),
            beta1=horizon.beta(h.beta1, m_S),
            beta2=horizon.beta(h.beta2, m_S),
        )
        name = f"Complete(d)P (arXiv 2512.22382), steps × {m_S:.3g}, exponent {exponent:g}"
        laws |= dict.fromkeys(("learning rate", "weight decay", "epsilon", "betas"), name)
    run = replace(new.run, hyperparameters=hyper)
    return replace(new, run=run, laws=laws, changes=tuple(changes(tuned, run, laws)))


def changes(old: Run, new: Run, laws: Mapping[str, str]) -> Iterator[Change]:
    """The settings of both runs, side by side; rules, vocabulary and sequence only if they differ."""
    a, b = old.hyperparameters, new.hyperparameters
    words = [("rules", old.rules, new.rules, "given")]
    numbers: list[tuple[str, float, float, str]] = [
        ("vocabulary", old.model.vocabulary, new.model.vocabulary, "given"),
        ("sequence", old.sequence, new.sequence, "given"),
    ]
    for setting, before, after, why in (*words, *numbers):
        if before != after:
            yield Change(setting, str(before), str(after), why)
    transfers = f"transfers ({laws['per role']})"
    rows = (
        ("width", old.model.width, new.model.width, "target"),
        ("depth", old.model.depth, new.model.depth, "target"),
        ("tokens", old.tokens, new.tokens, laws["tokens"]),
        ("batch", old.batch, new.batch, laws["batch"]),
        ("steps", old.schedule.steps, new.schedule.steps, "tokens / batch"),
        ("base lr", a.lr, b.lr, laws.get("learning rate", transfers)),
        *(
            (f"lr multiplier, {role}", times, b.lr_of.get(role, 1.0), laws[BY_ROLE] if role in b.lr_of else "left out")
            for role, times in a.lr_of.items()
        ),
        ("base init std", a.std, b.std, laws.get("init std", transfers)),
        ("base eps", a.eps, b.eps, laws.get("epsilon", transfers)),
        ("base weight decay", a.weight_decay, b.weight_decay, laws["weight decay"]),
        ("beta1", a.beta1, b.beta1, laws.get("betas", transfers)),
        ("beta2", a.beta2, b.beta2, laws.get("betas", transfers)),
    )
    for setting, before, after, why in rows:
        yield Change(setting, before, after, why)
