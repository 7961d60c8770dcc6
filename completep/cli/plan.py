"""`completep plan`: from a budget or a size to a run."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from completep import paper
from completep.cli.shared import RulesKey, show


def plan(
    params: str | None = None,
    flops: str | None = None,
    width: int | None = None,
    depth: int | None = None,
    gpu_hours: str | None = None,
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
    tokens: str | None = None,
    batch: int | None = None,
    rules: RulesKey | None = None,
    base_shape: tuple[int, int] | None = None,
    lr: float | None = None,
    std: float | None = None,
    tau: float | None = None,
    from_: Annotated[Path | None, arg(name="from")] = None,
    law: Literal["paper", "completed"] = "paper",
    horizon_exponent: float | None = None,
    ranks: int = 1,
    micro_batch: int = 1,
    run: Path | None = None,
    json: bool = False,
) -> int:
    """Plan a run from a budget or a size: shape, tokens, batch, steps, learning rates, weight decay, FLOPs, memory.

    Give the size in one way: --params, --flops, --gpu-hours, or --width and --depth.

    Example: completep plan --params 1.5B --max-depth 48 --ranks 8

    Args:
        params: non-embedding parameters, such as 300M or 1.5B.
        flops: training budget, such as 4e20.
        width: width N, with --depth.
        depth: depth L, with --width.
        gpu_hours: training budget in device hours, with --device and --mfu.
        device: name (h100, a100, …) or peak FLOP/s (989e12).
        mfu: share of the peak that training reaches.
        max_width: largest width, if memory limits it.
        max_depth: largest depth, if latency limits it.
        head_size: dimensions per attention head; by default that of --from, else 64, or less to have four heads.
        vocabulary: size of the vocabulary; by default that of --from, else 50257.
        experts: experts in every block; by default those of --from, else none.
        active_experts: experts that a token is sent to; by default those of --from, else 1.
        expert_width: inner width of an expert; by default that of --from, else four times the width.
        shared_experts: experts that every token passes; by default those of --from, else none.
        sequence: tokens per sequence; by default that of --from, else 2048.
        tpp: tokens per parameter.
        tokens: tokens to train on, instead of --tpp.
        batch: sequences per step, instead of the batch law.
        rules: the parameterization; by default that of --from, else completep.
        base_shape: width and depth of the base that was tuned; by default that of --from, else 256 2.
        lr: base learning rate; by default that of --from, else the paper's 2^-8.
        std: base init standard deviation; by default that of --from, else the paper's 0.02.
        tau: weight-decay timescale, 1 / (lr · weight decay · steps); by default that of --from, else 0.1407.
        from_: a tuned.json from `completep tune`, or the run.json of a tuned run, to carry over to the larger target.
            Other flags override it.
        law: with --from: how batch and duration transfer (the paper's laws, or Complete(d)P's).
        horizon_exponent: with --law completed, by default 0.5; published values are 0.28 to 0.5.
        ranks: devices that share the state (FSDP2).
        micro_batch: sequences per device and forward pass, for the memory estimate.
        run: write the run here, for `completep train`.
        json: print JSON.
    """
    from completep import plan as make_plan
    from completep.config import to_json
    from completep.files import write_new

    planned = make_plan(
        params=params, flops=flops, gpu_hours=gpu_hours, width=width, depth=depth, device=device, mfu=mfu,
        max_width=max_width, max_depth=max_depth, head_size=head_size, vocabulary=vocabulary, experts=experts,
        active_experts=active_experts, expert_width=expert_width, shared_experts=shared_experts, sequence=sequence,
        tpp=tpp, tokens=tokens, batch=batch, rules=rules, base=base_shape, lr=lr, std=std, tau=tau, tuned=from_,
        law=law, horizon_exponent=horizon_exponent, ranks=ranks, micro_batch=micro_batch,
    )  # fmt: skip
    if run is not None:
        write_new(run, to_json(planned.run))
    show(planned, json)
    return 0
