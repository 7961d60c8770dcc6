"""train(run, folder): one linear training loop, from a config to metrics, checkpoints, plain weights and a result.

A run is a folder: run.json (fully resolved), metrics.jsonl, checkpoints/, model.safetensors, result.json. The same call
resumes an interrupted run. A folder that contains another run is refused.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from completep.compute import flops
from completep.compute.memory import memory
from completep.config import GPTConfig, Run, run_id
from completep.data.corpus import Corpus
from completep.data.sampler import Sampler, validation_batches
from completep.errors import UserError
from completep.model.gpt import GPT
from completep.rules.parametrize import parametrize
from completep.rules.scaling import Scaling
from completep.rules.table import check_lr_of, decoder_roles, rules_named
from completep.train import speed
from completep.train.checkpoint import Checkpoints, Manifest, barrier
from completep.train.distributed import World, agree, join, mean, shard, syncing
from completep.train.export import export
from completep.train.folder import CHECKPOINTS, METRICS, RUN, claim, finished, working_in, write_result
from completep.train.fused import fuse
from completep.train.records import NOTHING, EvalRecord, Metrics, Record, Result, Status, StepRecord
from completep.train.schedule import lr_factor
from completep.train.settings import How, open_corpus
from completep.train.speed import total_memory

EVALUATED = 4096  # tokens
MOST_BASE_WIDTH, MOST_BASE_DEPTH = 2**17, 512  # of the model that was tuned


def quiet(_: object) -> None:
    """Ignore a record or a message."""


def train(
    run: Run,
    folder: Path,
    how: How = How(),  # noqa: B008  (frozen)
    *,
    on_record: Callable[[Record], None] = quiet,
    tell: Callable[[str], None] = quiet,
) -> Result:
    """Train a run, or resume it, and return its result."""
    speed.tune_process()
    world = join(how.parallel)
    check_lr_of(run.hyperparameters.lr_of, decoder_roles(run.model))
    require_small_base(run)
    corpus = open_corpus(run.data)
    run = replace(run, data=replace(run.data, sha256=corpus.sha256))
    if (done := finished(folder, run)) is not None:
        tell(f"{folder} is done already")
        return done
    if not (folder / RUN).exists():  # a run of an earlier version can still be resumed
        run.model.require_heads()
    data = read_data(run, corpus, how.micro_batch or max(1, run.batch // world.size))
    with working_in(folder) if world.first else nullcontext():
        if world.first:
            claim(folder, run)
        barrier()
        if (done := finished(folder, run)) is not None:  # by a process that has ended in the meantime
            return done
        return train_claimed(run, folder, how, world, data, on_record, tell)


def train_claimed(
    run: Run,
    folder: Path,
    how: How,
    world: World,
    data: tuple[Sampler, list[Tensor]],
    on_record: Callable[[Record], None],
    tell: Callable[[str], None],
) -> Result:
    """`train`, in a folder that belongs to the run and to this process."""
    sampler, validation = data
    model, scaling = build(run, how, world)
    wrapped = nn.parallel.DistributedDataParallel(model) if how.parallel == "ddp" else model
    if how.compile:
        speed.compile_blocks(model, tell)
    elif isinstance(model, GPT) and how.precision != "bf16":
        fuse(model, run.sequence)
    h = run.hyperparameters
    groups = scaling.param_groups(h.lr, weight_decay=h.weight_decay, eps=h.eps, lr_of=h.lr_of)
    optimizer = torch.optim.AdamW(groups, betas=(h.beta1, h.beta2), fused=True)
    base_lrs = [group["lr"] for group in optimizer.param_groups]
    checkpoints = Checkpoints(folder / CHECKPOINTS, how.keep, tell)
    metrics = Metrics(folder / METRICS)
    saved = checkpoints.load(model, optimizer, lambda manifest: check_same(manifest, run, scaling))
    start, mark = (saved.step, saved.metrics) if saved is not None else (0, NOTHING)
    if world.first and not metrics.rewind(mark, start):
        tell(f"{metrics.path} is damaged: some of its records up to step {start} may be wrong or missing")
    if start:
        tell(f"resumed at step {start}")
    accumulate = micro_batches(run, how, world)
    per_token = sum(cost.total for cost in flops.flops_per_token(run.model, run.sequence).values())
    peak = speed.measure_peak(world.device) if how.peak == "measure" else how.peak
    autocast = autocasting(how, world)

    def log(record: Record) -> None:
        if world.first:
            metrics.append(record)
            on_record(record)

    def save(step: int) -> None:
        mark = metrics.mark() if world.first else NOTHING
        checkpoints.save(model, optimizer, Manifest(step, run_id(run), scaling.state_dict(), mark))

    def evaluate(step: int) -> float:
        loss = evaluation_loss(wrapped, validation, world, autocast)
        log(EvalRecord(step, loss))
        return loss

    status: Status = "done"
    # If the run was interrupted after its last step, before its result was written, the metrics have the last loss.
    last_loss = metrics.loss_at(start) if start else None
    validation_loss: float | None = None
    began = clock = time.perf_counter()
    step = logged = start
    with speed.settled_objects(), stop_signals() as stop:
        while step < run.schedule.steps:
            if agree(stop.requested, world):
                status = "stopped"
                break
            factor = lr_factor(step, run.schedule)
            for group, lr in zip(optimizer.param_groups, base_lrs, strict=True):
                group["lr"] = lr * factor
            batch = torch.from_numpy(sampler.batch_at(step, world.rank, world.size)).to(world.device)
            total = torch.zeros((), device=world.device)
            for i, part in enumerate(batch.chunk(accumulate)):
                with syncing(wrapped, i == accumulate - 1), autocast():
                    loss = wrapped(part[:, :-1], part[:, 1:]) / accumulate
                    loss.backward()
                total += loss.detach()
            norm = scaling.clip_grad_norm_(run.clip).item() if run.clip is not None else None
            current = mean(total, world)
            if not math.isfinite(current):
                status = "diverged"
                break
            optimizer.step()
            optimizer.zero_grad()
            step, last_loss = step + 1, current
            if step % how.log_every == 0 or step == run.schedule.steps:
                now = time.perf_counter()
                rate = (step - logged) * run.batch * run.sequence / (now - clock)
                mfu = None if peak is None else rate * per_token / peak / world.size
                log(StepRecord(step, current, h.lr * factor, norm, rate, mfu))
                clock, logged = now, step
            if run.evaluation.every and step % run.evaluation.every == 0 and step < run.schedule.steps:
                validation_loss = evaluate(step)
                clock = time.perf_counter()
            if how.checkpoint_every and step % how.checkpoint_every == 0 and step < run.schedule.steps:
                save(step)  # after the records of this step, so that a resumed run has each of them once
    if status != "diverged":
        save(step)
    files: dict[str, str] = {}
    if status == "done":
        validation_loss = evaluate(step)
        if math.isfinite(validation_loss):
            files |= export(folder, model, scaling, run.model, world)
        else:  # the last update diverged; no training step follows that would show it
            status = "diverged"
    if validation_loss is not None and not math.isfinite(validation_loss):
        validation_loss = None
    seconds = time.perf_counter() - began
    trained = (step - start) * run.batch * run.sequence
    pace, corpus = trained / seconds, sampler.corpus.sha256
    files |= {METRICS: metrics.mark().sha256} if world.first and metrics.path.exists() else {}
    result = Result(status, step, last_loss, validation_loss, run.tokens, seconds, pace, corpus, run_id(run), files)
    if world.first and status != "stopped":
        write_result(folder, result)
    barrier()
    return result


def read_data(run: Run, corpus: Corpus, rows: int) -> tuple[Sampler, list[Tensor]]:
    """The sampler and the validation batches. The data is checked against the model before the first step.

    A validation pass keeps nothing for gradients, so it fits where `rows` sequences can be trained on. Tiny passes are
    mostly overhead, so they have at least `EVALUATED` tokens.
    """
    if corpus.vocabulary > run.model.vocabulary:
        raise UserError(
            f"the data has ids up to {corpus.vocabulary - 1}, past the model's vocabulary of {run.model.vocabulary}",
            fix=f"use a model with vocabulary={corpus.vocabulary}",
        )
    corpus.verify_once()
    sampler = Sampler(corpus, "train", run.sequence, run.batch, run.seed)
    several = max(rows, EVALUATED // run.sequence)
    validation = validation_batches(corpus, run.sequence, several, run.evaluation.tokens)
    return sampler, [torch.from_numpy(batch) for batch in validation]


def check_same(manifest: Manifest, run: Run, scaling: Scaling) -> None:
    """Refuse a checkpoint of another run, or of a step that the run does not have."""
    scaling.load_state_dict(manifest.scaling)
    if manifest.run != run_id(run) or manifest.step > run.schedule.steps:
        raise UserError(
            f"the checkpoint at step {manifest.step} belongs to another run",
            fix="train in another folder, or move the checkpoints away",
        )


def build(run: Run, how: How, world: World) -> tuple[nn.Module, Scaling]:
    """The model and its scaling. For FSDP it is built on the meta device, so that no rank ever holds all of it."""
    require_memory(run, how, world)
    with torch.device("meta" if how.parallel == "fsdp" else world.device):
        model: nn.Module = GPT(run.model)
    base = replace(run.model, width=run.base.width, depth=run.base.depth)
    small = smallest(run.model)
    scaling = parametrize(
        model,
        base=run.base if base == run.model else (lambda: GPT(base)),
        rules=rules_named(run.rules),
        style=run.style,
        specimen=lambda: GPT(small),
    )
    if how.parallel == "fsdp":
        shard(model, world, how.replicas)
        model.to_empty(device=world.device)
    scaling.init_(run.hyperparameters.std, seed=run.seed)
    return model, scaling


def require_memory(run: Run, how: How, world: World) -> None:
    """Refuse a run that needs more than all of this machine's memory, before it is filled."""
    if world.device.type != "cpu":
        return
    micro = how.micro_batch or max(1, run.batch // world.size)
    ranks = world.size if how.parallel == "fsdp" else 1
    needed, total = memory(run.model, sequence=run.sequence, micro_batch=micro, ranks=ranks).per_rank, total_memory()
    if needed > total:
        raise UserError(
            f"this run needs about {needed / 1e9:,.0f} GB, and this machine has {total / 1e9:,.0f} GB",
            fix="use a smaller shape, or a smaller micro-batch",
        )


def require_small_base(run: Run) -> None:
    """Refuse a base that nobody tuned at: it is built too, on the meta device and, if it is small, for real."""
    shape = run.base
    if shape.depth > MOST_BASE_DEPTH or shape.width > MOST_BASE_WIDTH:
        most = f"{MOST_BASE_WIDTH} × {MOST_BASE_DEPTH}"
        raise UserError(
            f"the base is {shape.width} × {shape.depth} (width × depth), larger than {most}",
            fix="give the width and depth of the small model that you tuned, such as --base-shape 256 2",
        )


def smallest(model: GPTConfig) -> GPTConfig:
    """The same architecture at its smallest size, on which `parametrize` proves the roles."""
    return replace(
        model, width=model.head_size, depth=1, vocabulary=min(model.vocabulary, 17), context=min(model.context, 16)
    )


def micro_batches(run: Run, how: How, world: World) -> int:
    """The number of forward passes per step on each rank."""
    per_rank = run.batch // world.size
    size = how.micro_batch or per_rank
    if run.batch % world.size or per_rank % size:
        raise UserError(
            f"batch={run.batch} does not divide into {world.size} ranks with micro_batch={size}",
            fix=f"use a multiple of {world.size * size} as the batch, or another micro_batch",
        )
    return per_rank // size


def autocasting(how: How, world: World) -> Callable[[], AbstractContextManager[Any]]:
    bf16 = how.precision == "bf16" or (
        how.precision == "auto" and world.device.type == "cuda" and torch.cuda.is_bf16_supported()
    )
    if not bf16:
        return nullcontext
    return lambda: torch.autocast(world.device.type, dtype=torch.bfloat16)


@torch.no_grad()
def evaluation_loss(
    model: nn.Module, batches: list[Tensor], world: World, autocast: Callable[[], AbstractContextManager[Any]]
) -> float:
    """Mean loss over the validation tokens. Every rank computes all of it, so that no rank waits for another."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        moved = batch.to(world.device)
        with autocast():
            total += len(batch) * model(moved[:, :-1], moved[:, 1:]).double().cpu()
    return float(total / sum(map(len, batches)))


@dataclass
class Stop:
    requested: bool = False


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """SIGTERM and SIGINT request a stop after the current step. A second SIGINT stops at once."""
    stop = Stop()

    def request(number: int, frame: FrameType | None) -> None:
        if stop.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.requested = True

    try:
        old = {s: signal.signal(s, request) for s in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread, which alone can handle signals
        old = {}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
