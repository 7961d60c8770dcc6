"""From a budget or a size to a run: shape, tokens, batch, steps, learning rates, weight decay.

Every choice that is not the user's is made by a law with a name, and the plan carries those names.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from completep import paper
from completep.compute import flops
from completep.config import GPTConfig, Hyperparameters, Run, Schedule, Shape
from completep.errors import UserError
from completep.rules.table import COMPLETEP, DECAYED, Horizon, Role, Rules, rules_named
from completep.units import parse_quantity

Law = Literal["paper", "completed"]
WIDEST = 65536  # no search goes beyond
DEEPEST = 4096

MOST_TOKENS = 1e17
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

# Dense peaks in FLOP/s of the formats people train in (bf16), from the vendors' data sheets.
DEVICES = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12, "mi300x": 1307e12, "tpu-v5p": 459e12}


@dataclass(frozen=True)
class Limits:
    """What the user's hardware allows: depth costs latency, width costs memory per layer."""

    max_width: int = WIDEST
    max_depth: int = DEEPEST

    def __post_init__(self) -> None:
        for name in ("max_width", "max_depth"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"{name}={getattr(self, name)}: must be at least 1", fix=f"raise or drop --{name.replace('_', '-')}"
                )


@dataclass(frozen=True)
class Plan:
    run: Run
    flops: float
    laws: dict[str, str]  # what was chosen → by which law
    changes: tuple[tuple[str, str, str, str], ...] = ()  # (setting, in the tuned run, here, why), for a re-plan
    notes: tuple[str, ...] = field(default=())

    @property
    def m_N(self) -> float:
        return self.run.model.width / self.run.base.width

    @property
    def m_L(self) -> float:
        return self.run.model.depth / self.run.base.depth


def best_ratio(parameters: float) -> float:
    """The compute-optimal N:L at a non-embedding size: a power law through the paper's three best shapes."""
    points = [(math.log(p), math.log(r)) for p, r in paper.BEST_RATIO.items()]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return math.exp(mean_y + slope * (math.log(parameters) - mean_x))


def shapes_for_parameters(target: float, like: GPTConfig, limits: Limits) -> Iterator[GPTConfig]:
    """For every width, the depth that comes closest to this many non-embedding parameters."""
    for width in _widths(like, limits):
        one = flops.non_embedding(replace(like, width=width, depth=1))
        depth = round(target / one)
        if 1 <= depth <= limits.max_depth and abs(depth * one / target - 1) <= 0.06:
            yield replace(like, width=width, depth=depth)


def shapes_for_flops(budget: float, like: GPTConfig, limits: Limits, tpp: float, sequence: int) -> Iterator[GPTConfig]:
    """For every width, the deepest model whose whole training fits the budget and uses nearly all of it."""

    def share(width: int, depth: int) -> float:
        model = replace(like, width=width, depth=depth)
        return flops.training_flops(model, sequence, tpp * flops.total(model)) / budget

    found = {}
    for width in _widths(like, limits):
        if share(width, 1) > 1:
            break
        low, high = 1, limits.max_depth
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if share(width, middle) <= 1 else (low, middle - 1)
        found[width, low] = share(width, low)
    enough = min(0.95, max(found.values(), default=0.0))
    if enough < 0.5:
        return  # the limits bind: nothing comes near the budget
    for (width, depth), used in found.items():
        if used >= enough:
            yield replace(like, width=width, depth=depth)


def _widths(like: GPTConfig, limits: Limits) -> range:
    if limits.max_width < like.head_size:
        raise UserError(
            f"--max-width {limits.max_width} is less than one head of {like.head_size}",
            fix="raise --max-width or lower --head-size",
        )
    return range(like.head_size, limits.max_width + 1, like.head_size)


def nearest_ratio(candidates: Iterator[GPTConfig], what: str, limits: Limits) -> GPTConfig:
    """Among shapes of one size or cost, the one whose N:L is nearest the paper's optimum."""
    found = list(candidates)
    if not found:
        raise UserError(
            f"no shape comes to {what} with width ≤ {limits.max_width} and depth ≤ {limits.max_depth}",
            fix="raise --max-depth or --max-width, change --head-size, or give another size",
        )
    return min(found, key=lambda m: abs(math.log(m.width / m.depth / best_ratio(flops.non_embedding(m)))))


def gpu_flops(hours: float, peak: float, mfu: float) -> float:
    if not 0 < mfu <= 1:
        raise UserError(f"--mfu {mfu}: model FLOPs utilisation lies in (0, 1]", fix="0.4 is a common value")
    return hours * 3600 * peak * mfu


def device_peak(device: str) -> float:
    if device.lower() in DEVICES:
        return DEVICES[device.lower()]
    try:
        return parse_quantity(device, "device")
    except UserError:
        raise UserError(
            f"--device {device}: unknown",
            fix="name one of " + ", ".join(DEVICES) + ", or give its peak FLOP/s, as 989e12",
        ) from None


def batch_size(total_flops: float) -> int:
    return 8 * max(1, round(paper.batch_law(total_flops) / 8))


def warmup_steps(steps: int, tokens_per_step: int) -> int:
    return int(min(paper.WARMUP_SHARE * steps, paper.WARMUP_TOKENS / tokens_per_step))


def weight_decay(tau: float, lr: float, steps: int) -> float:
    """λ that keeps AdamW's timescale τ = 1 / (η λ steps): Wang & Aitchison 2024."""
    return 1 / (tau * lr * steps)


def plan(
    model: GPTConfig,
    *,
    rules: Rules = COMPLETEP,
    rules_name: str = "completep",
    base: Shape = paper.BASE,
    tpp: float = paper.TOKENS_PER_PARAMETER,
    tokens: float | None = None,
    batch: int | None = None,
    sequence: int = paper.SEQUENCE,
    lr: float = paper.LR,
    std: float = paper.STD,
    tau: float = paper.TAU,
    seed: int = 0,
) -> Plan:
    """The paper's compute-optimal recipe for one shape."""
    for name, value in (("lr", lr), ("tau", tau), ("tpp", tpp)):
        if not value > 0:
            raise UserError(f"{name}={value}: must be above 0", fix=f"give a positive {name}")
    tokens_wanted = tokens if tokens is not None else tpp * flops.total(model)
    cost = flops.training_flops(model, sequence, tokens_wanted)
    chosen = batch if batch is not None else batch_size(cost)
    steps = int(tokens_wanted // (chosen * sequence))
    if steps < 1:
        raise UserError(
            f"{tokens_wanted:.3g} tokens are less than one step of {chosen} sequences of {sequence}",
            fix="give more tokens or parameters, a smaller --batch or a shorter --sequence",
        )
    laws = {
        "tokens": f"{tpp:g} per parameter (Hoffmann et al. 2022)" if tokens is None else "given",
        "batch": "max(32, 0.7857·F^0.1527 - 306.8), to a multiple of 8 (paper)" if batch is None else "given",
        "warm-up": "min(10 % of steps, 375M tokens), then linear to zero (paper)",
        "weight decay": f"timescale τ = 1/(η λ steps) = {tau:g} (Wang & Aitchison 2024, tuned in the paper)",
        "per role": rules.name,
    }
    hyper = Hyperparameters(lr, std, weight_decay(tau, lr, steps), paper.EPS, *paper.BETAS)
    schedule = Schedule(steps, warmup_steps(steps, chosen * sequence))
    run = Run(model, hyper, schedule, chosen, sequence, rules_name, base, seed=seed)
    return Plan(run, cost, laws, notes=tuple(shape_notes(model, rules)))


def shape_notes(model: GPTConfig, rules: Rules) -> Iterator[str]:
    ratio, best = model.width / model.depth, best_ratio(flops.non_embedding(model))
    yield f"N:L = {ratio:.3g}; the paper's optimum at this size is about {best:.3g}"
    deepest = paper.DEEPEST_RATIO_WITHIN_1_PERCENT.get(rules.name.lower())
    if deepest and ratio < deepest:
        yield f"N:L below {deepest}: at 1.5B the paper lost more than 1 % there under {rules.name}"


def replan(tuned: Run, model: GPTConfig, *, law: Law, exponent: float = 0.5, tpp: float, batch: int | None) -> Plan:
    """A tuned run's hyperparameters for a larger target: what transfers as it is, and what a law changes."""
    h = tuned.hyperparameters
    tau = 1 / (h.lr * h.weight_decay * tuned.schedule.steps) if h.weight_decay else math.inf
    new = plan(
        model, rules=rules_named(tuned.rules), rules_name=tuned.rules, base=tuned.base, tpp=tpp, batch=batch,
        sequence=tuned.sequence, lr=h.lr, std=h.std, tau=tau, seed=tuned.seed,
    )  # fmt: skip
    kept = replace(new.run.hyperparameters, eps=h.eps, beta1=h.beta1, beta2=h.beta2)
    laws = dict(new.laws)
    if law == "completed":
        m_S = new.run.schedule.steps / tuned.schedule.steps
        horizon = Horizon(exponent)
        kept = Hyperparameters(
            lr=h.lr * horizon.lr(m_S), std=h.std, weight_decay=h.weight_decay * horizon.weight_decay(m_S), eps=h.eps * horizon.eps(m_S),
            beta1=horizon.beta(h.beta1, m_S), beta2=horizon.beta(h.beta2, m_S),
        )  # fmt: skip
        laws["weight decay"] = laws["lr, ε, β"] = (
            f"Complete(d)P (arXiv 2512.22382), steps × {m_S:.3g}, exponent {exponent:g}"
        )
    run = replace(new.run, hyperparameters=kept)
    return replace(new, run=run, laws=laws, changes=tuple(differences(tuned, run, laws)))


def differences(old: Run, new: Run, laws: dict[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """(setting, before, after, why) for all that a person would compare."""
    a, b = old.hyperparameters, new.hyperparameters
    rows = [
        ("width", old.model.width, new.model.width, "target"),
        ("depth", old.model.depth, new.model.depth, "target"),
        ("tokens", old.tokens, new.tokens, laws["tokens"]),
        ("batch", old.batch, new.batch, laws["batch"]),
        ("steps", old.schedule.steps, new.schedule.steps, "tokens / batch"),
        ("base lr", a.lr, b.lr, laws.get("lr, ε, β", f"transfers ({laws['per role']})")),
        ("base init std", a.std, b.std, f"transfers ({laws['per role']})"),
        ("base eps", a.eps, b.eps, laws.get("lr, ε, β", f"transfers ({laws['per role']})")),
        (
            "base weight decay",
            a.weight_decay,
            b.weight_decay,
            laws["weight decay"] if a.weight_decay else "none was tuned",
        ),
        ("beta1", a.beta1, b.beta1, laws.get("lr, ε, β", "transfers")),
        ("beta2", a.beta2, b.beta2, laws.get("lr, ε, β", "transfers")),
    ]
    for name, before, after, why in rows:
        yield name, f"{before:.6g}", f"{after:.6g}", why


@dataclass(frozen=True)
class Request:
    """A plan as it is asked for: one of params, flops, gpu_hours or width and depth, in the user's own words."""

    params: str | None = None
    flops: str | None = None
    width: int | None = None
    depth: int | None = None
    gpu_hours: str | None = None
    device: str = "h100"
    mfu: float = 0.4
    max_width: int | None = None
    max_depth: int | None = None
    head_size: int = paper.HEAD_SIZE
    vocabulary: int = paper.VOCABULARY
    sequence: int = paper.SEQUENCE
    tpp: float = paper.TOKENS_PER_PARAMETER
    tokens: str | None = None
    batch: int | None = None
    rules: str = "completep"
    base: Shape = paper.BASE
    lr: float = paper.LR
    std: float = paper.STD
    tau: float = paper.TAU
    tuned: Run | None = None
    law: Law = "paper"
    horizon_exponent: float = 0.5


def answer(r: Request) -> Plan:
    """The plan that a request asks for."""
    _check(r)
    like = (
        replace(r.tuned.model, width=r.tuned.model.head_size)
        if r.tuned
        else GPTConfig(r.head_size, 1, r.vocabulary, r.head_size)
    )
    sequence = r.tuned.sequence if r.tuned else r.sequence
    model, law = choose_shape(r, like, sequence)
    if r.tuned is not None:
        found = replan(r.tuned, model, law=r.law, exponent=r.horizon_exponent, tpp=r.tpp, batch=r.batch)
    else:
        tokens = parse_quantity(r.tokens, "tokens") if r.tokens else None
        if tokens is not None and tokens > MOST_TOKENS:
            raise UserError(f"--tokens {r.tokens} is more text than there is", fix="check the number")
        found = plan(
            model, rules=rules_named(r.rules), rules_name=r.rules, base=r.base, tpp=r.tpp, tokens=tokens, batch=r.batch,
            sequence=sequence, lr=r.lr, std=r.std, tau=r.tau,
        )  # fmt: skip
    return replace(found, laws={"shape": law, **found.laws})


def choose_shape(r: Request, like: GPTConfig, sequence: int) -> tuple[GPTConfig, str]:
    limits = Limits(r.max_width or WIDEST, r.max_depth or DEEPEST)
    by_ratio = "N:L nearest the paper's optimum for this size"
    if r.params is not None:
        target = parse_quantity(r.params, "params")
        return nearest_ratio(shapes_for_parameters(target, like, limits), f"{r.params} parameters", limits), by_ratio
    if r.width is not None and r.depth is not None:
        return replace(like, width=r.width, depth=r.depth), "given"
    if r.flops is not None:
        budget, words = parse_quantity(r.flops, "flops"), f"{r.flops} FLOPs"
    else:
        hours = parse_quantity(str(r.gpu_hours), "gpu-hours")
        budget = gpu_flops(hours, device_peak(r.device), r.mfu)
        words = f"{r.gpu_hours} hours of {r.device} at {r.mfu:g} of its peak, {budget:.3g} FLOPs"
    return nearest_ratio(
        shapes_for_flops(budget, like, limits, r.tpp, sequence), words, limits
    ), f"{by_ratio}, within {words}"


def _check(r: Request) -> None:
    sizes = {
        "--params": r.params,
        "--flops": r.flops,
        "--gpu-hours": r.gpu_hours,
        "--width and --depth": r.width or r.depth,
    }
    given = [name for name, value in sizes.items() if value is not None]
    if len(given) != 1:
        told = "no size given" if not given else "the size is given " + " and ".join(given)
        raise UserError(
            told, fix="give one of --params 1.5B, --flops 4e20, --gpu-hours 1000, or --width 1024 --depth 24"
        )
    if (r.width is None) != (r.depth is None):
        raise UserError(f"--width {r.width} --depth {r.depth}: a shape has both", fix="give --width and --depth")
    for name in ("tpp", "lr", "std", "tau", "sequence", "vocabulary", "head_size", "batch", "max_width", "max_depth"):
        value = getattr(r, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be above 0", fix="give a positive number")
    for name, most in ABSURD.items():
        value = getattr(r, name)
        if value is not None and value > most:
            raise UserError(
                f"--{name} {value:g} is beyond anything that can be meant (more than {most:g})", fix="check the number"
            )
    if r.tokens is not None and r.flops is not None:
        raise UserError(
            "--tokens with --flops leaves the shape open", fix="give --params or --width and --depth, with --tokens"
        )


@dataclass(frozen=True)
class RoleSettings:
    role: Role
    init_std: float | None  # None where it starts at a constant
    lr: float
    weight_decay: float
    eps: float


def per_role(p: Plan, rules: Rules) -> list[RoleSettings]:
    """The resolved optimizer settings of every role that the model has."""
    h, model = p.run.hyperparameters, p.run.model
    absent = {Role.EMBEDDING_BIAS, Role.UNEMBEDDING_BIAS}
    absent |= set() if model.bias else {Role.HIDDEN_BIAS}
    absent |= set() if model.qk_norm else {Role.QK_NORM}
    absent |= {Role.UNEMBEDDING} if model.tied else set()
    rows = []
    for role in Role:
        if role in absent:
            continue
        rule = rules.rule(role)
        rows.append(
            RoleSettings(
                role,
                h.std * rule.init_std(p.m_N, p.m_L) if role in DECAYED else None,
                h.lr * rule.lr(p.m_N, p.m_L),
                h.weight_decay * rule.weight_decay(p.m_N, p.m_L) if role in DECAYED else 0.0,
                h.eps * rule.eps(p.m_N, p.m_L),
            )
        )
    return rows
