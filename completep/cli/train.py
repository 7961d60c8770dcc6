"""`completep prepare` and `completep train`: from text to trained weights."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from completep.cli.shared import RulesKey, console, print_json
from completep.config import Run, run_id
from completep.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from completep.integrations.trackers import Kind
    from completep.train.records import Record


def prepare(
    sources: Annotated[Positional[tuple[str, ...]], arg(metavar="SOURCE …")],
    /,
    out: Path,
    tokenizer: str = "bytes",
    validation: float = 0.01,
    text_field: str = "text",
    workers: int = 2,
    max_document: str = "64M",
    json: bool = False,
) -> int:
    """Turn text into memory-mapped token shards, for training.

    After an interruption the same command continues.

    Example: completep prepare python --out data/python --tokenizer bytes

    Args:
        sources: text files, folders, .jsonl, .jsonl.gz, .parquet, hf:NAME[[:CONFIG]:SPLIT], or `python` or `torch` for
            their own source code.
        out: folder for the shards and their manifest.
        tokenizer: bytes, gpt2, or the path of a tokenizer.json.
        validation: share of the documents that is held out for validation.
        text_field: the field with the text, in JSON and Parquet.
        workers: number of processes.
        max_document: largest document, or line of JSON, in bytes. A longer one is an error.
        json: print JSON.
    """
    from rich.progress import Progress

    from completep.data.prepare import prepare as run
    from completep.units import parse_quantity

    most = int(parse_quantity(max_document, "max_document"))
    with Progress(console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("tokenizing", total=None)
        corpus = run(
            sources, out, tokenizer=tokenizer, validation=validation, text_field=text_field, workers=workers,
            max_document=most, progress=lambda done, total, tokens: progress.update(task, completed=done, total=total),
        )  # fmt: skip
    counts = {split: corpus.tokens(split) for split in ("train", "validation")}
    if json:
        print_json({"folder": str(out), "sha256": corpus.sha256, "vocabulary": corpus.vocabulary, "tokens": counts})
    else:
        tokens = f"{counts['train']:,} training and {counts['validation']:,} validation tokens"
        console().print(f"{out}: {tokens}, sha256 {corpus.sha256[:12]}…")
    return 0


def train(
    run: Annotated[Positional[Path | None], arg(metavar="RUN.json")] = None,
    /,
    out: Path | None = None,
    data: str | None = None,
    tokenizer: str | None = None,
    width: int | None = None,
    depth: int | None = None,
    head_size: int | None = None,
    tokens: str | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    rules: RulesKey | None = None,
    base_shape: tuple[int, int] | None = None,
    lr: float | None = None,
    std: float | None = None,
    tau: float | None = None,
    seed: int | None = None,
    micro_batch: int | None = None,
    parallel: Literal["none", "ddp", "fsdp"] = "none",
    replicas: int = 1,
    precision: Literal["auto", "float32", "bf16"] = "auto",
    compile: bool = False,
    peak: str | None = None,
    checkpoint_every: int = 1000,
    keep: int = 2,
    log_every: int = 10,
    track: Literal["tensorboard", "wandb", "trackio"] | None = None,
    json: bool = False,
) -> int:
    """Train a run that `completep plan --run` wrote, or one that is described by flags.

    Without a file, --width and --depth are needed, and everything else follows the paper's recipe, as in `completep
    plan`. After an interruption the same command resumes the run. Under torchrun: torchrun --nproc-per-node 2 -m
    completep train run.json --parallel fsdp

    Example: completep train --width 64 --depth 8 --tokens 1M --batch 16 --sequence 128 --base-shape 64 2

    Args:
        run: a run.json.
        out: folder of the run; by default RUN for RUN.json, or runs/ID without a file.
        data: a folder that `completep prepare` wrote, or `python` or `torch` (their own source code). By default the
            data of RUN.json, else `python`.
        tokenizer: with `python` or `torch`: bytes or gpt2.
        width: width N.
        depth: depth L.
        head_size: dimensions per attention head.
        tokens: tokens to train on, such as 300M; by default 20 per parameter.
        batch: sequences per step; by default the paper's batch law.
        sequence: tokens per sequence.
        rules: the parameterization.
        base_shape: width and depth of the base that was tuned.
        lr: tuned base learning rate.
        std: tuned base init standard deviation.
        tau: weight-decay timescale, 1 / (lr · weight decay · steps).
        seed: seed of the initial weights and of the order of the data.
        micro_batch: sequences per device and forward pass; gradients are accumulated over the batch.
        parallel: with torchrun: each device holds a copy (ddp) or a shard (fsdp) of the model.
        replicas: with fsdp: groups of devices that each hold a whole copy (HSDP).
        precision: auto means bf16 autocast if the device supports it.
        compile: compile the model, block by block.
        peak: peak FLOP/s of the device, for utilisation; measured if not given; `none` records no utilisation.
        checkpoint_every: steps between checkpoints.
        keep: checkpoints to keep.
        log_every: steps between records.
        track: also send the records to this tracker. WANDB_MODE=offline keeps those of wandb on this machine.
        json: print the result as JSON.
    """
    from dataclasses import asdict

    from completep.train.distributed import leave
    from completep.train.loop import train as run_it
    from completep.train.settings import How, make_run
    from completep.units import parse_quantity

    config = make_run(
        run, data=data, tokenizer=tokenizer, seed=seed, width=width, depth=depth, head_size=head_size, tokens=tokens,
        batch=batch, sequence=sequence, rules=rules, base=base_shape, lr=lr, std=std, tau=tau,
    )  # fmt: skip
    top: float | Literal["measure"] | None = "measure" if peak is None else None
    if peak is not None and peak != "none":
        top = parse_quantity(peak, "peak")
    how = How(micro_batch, parallel, replicas, precision, compile, top, checkpoint_every, keep, log_every)
    folder = out or _folder_beside(run, config)
    terminal = console(stderr=True)
    with _watch(terminal, config) as on_record, _tracking(track, config, folder, terminal) as follow:

        def note(record: "Record") -> None:
            on_record(record)
            follow(record)

        result = run_it(config, folder, how, on_record=note, tell=terminal.print)
    leave()
    if json:
        print_json(asdict(result))
    elif result.status == "stopped":
        again = run if run is not None else folder / "run.json"
        console().print(f"stopped at step {result.step}; resume with: completep train {again} --out {folder}")
    else:
        known = {"train": result.train_loss, "validation": result.validation_loss}
        losses = ", ".join(f"{name} loss {loss:.4f}" for name, loss in known.items() if loss is not None)
        pace = f"{result.tokens_per_second:,.0f} tokens/s"
        console().print(f"{result.status} at step {result.step}: {losses}; {pace}; {folder}")
    return 0


def _folder_beside(run: Path | None, config: Run) -> Path:
    """The folder of a run for which none is given. A link there is refused: the files may come from somebody else."""
    folder = run.with_suffix("") if run is not None else Path("runs") / run_id(config)
    if run is not None and folder.is_symlink():
        raise UserError(f"{folder} is a symbolic link", fix=f"if the run belongs there, give --out {folder}")
    return folder


@contextmanager
def _tracking(kind: "Kind | None", run: Run, folder: Path, terminal: "Console") -> "Iterator[Callable[[Record], None]]":
    """Send records to a tracker, if one is wanted; under torchrun only those of the first rank."""
    if kind is None or os.environ.get("RANK", "0") != "0":
        yield lambda record: None
        return
    from completep.integrations.trackers import close, following, open_tracker

    folder.mkdir(parents=True, exist_ok=True)
    tracker = open_tracker(kind, run, folder)
    try:
        yield following(tracker, terminal.print)
    finally:
        close(tracker, terminal.print)


@contextmanager
def _watch(terminal: "Console", run: Run) -> "Iterator[Callable[[Record], None]]":
    """One live line on a terminal, plain lines elsewhere."""
    if not terminal.is_terminal:
        yield lambda record: terminal.print(_record_line(record, run))
        return
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(BarColumn(20), TextColumn("{task.description}"), console=terminal) as progress:
        task = progress.add_task("starting", total=run.schedule.steps)
        yield lambda record: progress.update(task, completed=record.step, description=_record_line(record, run))


def _record_line(record: "Record", run: Run) -> str:
    if record.kind == "eval":
        return f"step {record.step}: validation loss {record.loss:.4f}"
    left = (run.schedule.steps - record.step) * run.batch * run.sequence / record.tokens_per_second
    share = f", {record.mfu:.0%} of peak" if record.mfu is not None else ""
    pace = f"{record.tokens_per_second:,.0f} tokens/s{share}, {left:.0f} s left"
    return f"step {record.step}/{run.schedule.steps}: loss {record.loss:.4f}, {pace}"
