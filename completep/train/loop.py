"""train(run, folder): one linear training loop, from a config to metrics, checkpoints, plain weights and a result.

A run is a folder: run.json (fully resolved), metrics.jsonl, checkpoints/, model.safetensors, result.json. The same call
resumes an interrupted run. A folder that contains another run is refused.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from completep.compute import flops
from completep.config import Data, GPTConfig, Run, run_from_json, to_json
from completep.data.builtin import builtin_corpus
from completep.data.corpus import Corpus, load_corpus
from completep.data.sampler import Sampler, validation_batches
from completep.errors import UserError, some
from completep.files import read_text, write_new
from completep.model.gpt import GPT
from completep.rules.parametrize import parametrize
from completep.rules.scaling import Scaling
from completep.rules.table import rules_named
from completep.train import speed
from completep.train.checkpoint import Checkpoints, barrier
from completep.train.distributed import Parallel, World, agree, join, mean, shard, syncing
from completep.train.export import export
from completep.train.records import EvalRecord, Metrics, Record, Result, Status, StepRecord
from completep.train.schedule import lr_factor


@dataclass(frozen=True)
class How:
    """How a run is executed. Nothing here changes its result beyond rounding."""

    micro_batch: int | None = None  # sequences per rank and forward pass; None means all of the rank's share
    parallel: Parallel = "none"
    replicas: int = 1
    precision: Literal["auto", "float32", "bf16"] = "auto"
    compile: bool = False
    peak: float | Literal["measure"] | None = "measure"  # FLOP/s of the device; None records no utilisation
    checkpoint_every: int = 1000
    keep: int = 2
    log_every: int = 10


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
    corpus = open_corpus(run.data)
    run = replace(run, data=replace(run.data, sha256=corpus.sha256))
    sampler, validation = read_data(run, corpus)
    if world.first:
        claim(folder, run)
    barrier()
    if (done := finished(folder)) is not None:
        tell(f"{folder} is done already")
        return done
    model, scaling = build(run, how, world)
    wrapped = nn.parallel.DistributedDataParallel(model) if how.parallel == "ddp" else model
    if how.compile:
        speed.compile_blocks(model, tell)
    h = run.hyperparameters
    groups = scaling.param_groups(h.lr, weight_decay=h.weight_decay, eps=h.eps)
    optimizer = torch.optim.AdamW(groups, betas=(h.beta1, h.beta2), fused=True)
    base_lrs = [group["lr"] for group in optimizer.param_groups]
    checkpoints = Checkpoints(folder / "checkpoints", how.keep, tell)
    meta = {"run": json.loads(to_json(run)), "scaling": scaling.state_dict()}
    start = checkpoints.load(model, optimizer, lambda saved: scaling.load_state_dict(saved["scaling"]))
    metrics = Metrics(folder / "metrics.jsonl")
    if world.first:
        metrics.keep_until(start)
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

    def evaluate(step: int) -> float:
        loss = evaluation_loss(wrapped, validation, world, autocast)
        log(EvalRecord(step, loss))
        return loss

    status: Status = "done"
    # If the run was interrupted after its last step, before its result was written, the metrics have the last loss.
    last_loss = metrics.last_loss()
    validation_loss: float | None = None
    began = clock = time.perf_counter()
    step = logged = start
    with stop_signals() as stop:
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
            if how.checkpoint_every and step % how.checkpoint_every == 0 and step < run.schedule.steps:
                checkpoints.save(step, model, optimizer, meta)
            if run.evaluation.every and step % run.evaluation.every == 0 and step < run.schedule.steps:
                validation_loss = evaluate(step)
                clock = time.perf_counter()
    if status != "diverged":
        checkpoints.save(step, model, optimizer, meta)
    if status == "done":
        validation_loss = evaluate(step)
        export(folder, model, scaling, run.model, world)
    seconds = time.perf_counter() - began
    trained = (step - start) * run.batch * run.sequence
    result = Result(status, step, last_loss, validation_loss, run.tokens, seconds, trained / seconds, corpus.sha256)
    if world.first and status != "stopped":
        write_new(folder / "result.json", json.dumps(asdict(result), indent=2) + "\n")
    barrier()
    return result


def open_corpus(data: Data) -> Corpus:
    """The corpus of a run; an error if its content has changed since."""
    corpus = builtin_corpus(data.tokenizer) if data.source == "python" else load_corpus(Path(data.source))
    if data.sha256 is not None and data.sha256 != corpus.sha256:
        raise UserError(
            f"the data of {data.source!r} has changed: sha256 {corpus.sha256[:12]}…, in the run {data.sha256[:12]}…",
            fix="restore the old data, or plan a new run",
        )
    return corpus


def read_data(run: Run, corpus: Corpus) -> tuple[Sampler, list[Tensor]]:
    """The sampler and the validation batches. The data is checked against the model before the first step."""
    if corpus.vocabulary > run.model.vocabulary:
        raise UserError(
            f"the data has ids up to {corpus.vocabulary - 1}, past the model's vocabulary of {run.model.vocabulary}",
            fix=f"use a model with vocabulary={corpus.vocabulary}",
        )
    sampler = Sampler(corpus, "train", run.sequence, run.batch, run.seed)
    validation = validation_batches(corpus, run.sequence, run.batch, run.evaluation.batches)
    return sampler, [torch.from_numpy(batch) for batch in validation]


def claim(folder: Path, run: Run) -> None:
    """Write run.json into a new folder, or check that the folder belongs to this run."""
    path = folder / "run.json"
    if not path.exists():
        write_new(path, to_json(run))
        return
    old = run_from_json(read_text(path), str(path))
    if old != run:
        raise UserError(
            f"{folder} contains another run: {some(list(differences(old, run)), 8)}",
            fix="train in another folder, or use the old settings",
        )


def differences(old: Run, new: Run) -> Iterator[str]:
    """The settings that differ, with both values."""

    def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from flat(inner, f"{path}.{key}" if path else key)
        else:
            yield path, value

    changed = dict(flat(asdict(new)))
    for name, value in flat(asdict(old)):
        if changed.get(name) != value:
            yield f"{name} is {value} in the folder and {changed.get(name)} in this run"


def finished(folder: Path) -> Result | None:
    """The result of a run that is done or diverged."""
    path = folder / "result.json"
    return Result(**json.loads(read_text(path))) if path.exists() else None


def build(run: Run, how: How, world: World) -> tuple[nn.Module, Scaling]:
    """The model and its scaling. For FSDP it is built on the meta device, so that no rank ever holds all of it."""
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
    """Mean loss over the validation batches. Every rank computes all of them, so that no rank waits for another."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        moved = batch.to(world.device)
        with autocast():
            total += model(moved[:, :-1], moved[:, 1:]).double().cpu()
    return float(total / len(batches))


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
