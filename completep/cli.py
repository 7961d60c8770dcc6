"""The command line: parse, call, print. No logic."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from completep import __version__, paper
from completep.config import Shape
from completep.errors import UserError
from completep.rules.table import rules_named

if TYPE_CHECKING:
    from rich.console import Console

Target = Annotated[Positional[str], arg(metavar="MODULE:FACTORY")]
Words = Annotated[tuple[str, ...], arg(metavar="NAME=VALUE …")]
RulesName = Annotated[str, arg(metavar="sp|mup|completep|alpha=0.5", help="which parameterization")]
Style = Annotated[Literal["multiplier", "folded"], arg(help="factors in the forward pass, or in the weights")]


def console(stderr: bool = False) -> "Console":
    from rich.console import Console

    wide = None if sys.stdout.isatty() else 200
    return Console(stderr=stderr, width=wide, highlight=False)


def _models(
    target: str, args: tuple[str, ...], base: tuple[str, ...], base_shape: tuple[int, int] | None
) -> tuple[Any, Any]:
    """(how to build the target, the base) from the words on the command line."""
    from completep.load import call_factory, load_factory, parse_arguments

    factory = load_factory(target)
    if not base and base_shape is None:
        raise UserError(
            "no base given: the rules are relative to the model you tuned",
            fix="--base width=256 depth=2 (arguments of the factory), or --base-shape 256 2",
        )
    chosen = (
        Shape(*base_shape)
        if base_shape is not None
        else (lambda: call_factory(factory, parse_arguments(args) | parse_arguments(base)))
    )
    return (lambda: call_factory(factory, parse_arguments(args))), chosen


def explain(
    target: Target,
    /,
    args: Words = (),
    base: Words = (),
    base_shape: tuple[int, int] | None = None,
    rules: RulesName = "completep",
    style: Style = "multiplier",
    lr: float = 1.0,
    weight_decay: float = 1.0,
    eps: float = 1.0,
    std: float = 1.0,
    json: bool = False,
    html: Path | None = None,
) -> int:
    """Show, parameter by parameter, what the rules do to your model and why.

    The model is built on the meta device: any size costs nothing. Without --lr and its like, the numbers are factors.

    Example: completep explain completep.model.gpt:gpt --args width=1024 depth=24 --base width=256 depth=2 --lr 0.0039

    Args:
        target: your factory, as package.module:factory or file.py:factory.
        args: its arguments for the model to train.
        base: its arguments for the base model that was tuned (the others as in --args).
        base_shape: width and depth of the base, if a factory cannot build it.
        lr: tuned base learning rate.
        weight_decay: tuned base weight decay.
        eps: tuned base epsilon.
        std: tuned base init standard deviation.
        json: print JSON, one entry per parameter.
        html: also write the table to this file.
    """
    from completep.files import write_new
    from completep.rules import explain as view
    from completep.rules.examine import build
    from completep.rules.parametrize import parametrize

    make, chosen = _models(target, args, base, base_shape)
    scaling = parametrize(
        build(make, "meta"), base=chosen, rules=rules_named(rules), style=style, specimen=None if base else make
    )
    rows = scaling.explain(std=std, lr=lr, weight_decay=weight_decay, eps=eps)
    if html is not None:
        write_new(html, view.to_html(scaling, rows))
    if json:
        _print_json(view.to_json(scaling, rows))
    else:
        console().print(view.to_table(rows, view.summary(scaling)))
    return 0


def audit(
    target: Target,
    /,
    args: Words = (),
    base: Words = (),
    base_shape: tuple[int, int] | None = None,
    rules: RulesName = "completep",
    lr: float | None = None,
    weight_decay: float | None = None,
    eps: float | None = None,
    std: float | None = None,
    check_init: bool = True,
    json: bool = False,
) -> int:
    """Compare your own model and optimizer with the rules; exit code 1 if anything departs.

    The factory returns (model, optimizer). What you tuned is read off the embedding's group unless you give it.

    Example: completep audit examples/own_model.py:model_and_optimizer --args width=128 depth=8 --base width=64 depth=2

    Args:
        target: your factory, as package.module:factory or file.py:factory.
        args: its arguments for the model to train.
        base: its arguments for the base model that was tuned (the others as in --args).
        base_shape: width and depth of the base, if a factory cannot build it.
        lr: tuned base learning rate.
        weight_decay: tuned base weight decay.
        eps: tuned base epsilon.
        std: tuned base init standard deviation.
        check_init: compare starting values too; switch it off for a trained model.
        json: print JSON.
    """
    from completep.rules import audit as checker

    make, chosen = _models(target, args, base, base_shape)
    pair = make()
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise UserError(f"{target} returned {type(pair).__name__}", fix="let it return (model, optimizer)")
    base_model = chosen if isinstance(chosen, Shape) else (lambda: chosen()[0])
    found = checker.audit(
        *pair,
        base=base_model,
        rules=rules_named(rules),
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        std=std,
        check_init=check_init,
    )
    if json:
        _print_json(checker.to_json(found))
    else:
        for line in checker.to_lines(found):
            console().print(line)
    return 0 if found.passed else 1


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
    head_size: int = paper.HEAD_SIZE,
    vocabulary: int = paper.VOCABULARY,
    sequence: int = paper.SEQUENCE,
    tpp: float = paper.TOKENS_PER_PARAMETER,
    tokens: str | None = None,
    batch: int | None = None,
    rules: RulesName = "completep",
    base_shape: tuple[int, int] = (paper.BASE.width, paper.BASE.depth),
    lr: float = paper.LR,
    std: float = paper.STD,
    tau: float = paper.TAU,
    from_: Annotated[Path | None, arg(name="from")] = None,
    law: Literal["paper", "completed"] = "paper",
    horizon_exponent: float = 0.5,
    ranks: int = 1,
    micro_batch: int = 1,
    run: Path | None = None,
    json: bool = False,
) -> int:
    """From a budget or a size to a run: shape, tokens, batch, steps, learning rates, weight decay, FLOPs, memory.

    Say the size one way: --params, --flops, --gpu-hours, or --width and --depth.

    Example: completep plan --params 1.5B --max-depth 48 --ranks 8

    Args:
        params: non-embedding parameters, as 300M or 1.5B.
        flops: training budget, as 4e20.
        width: width N, with --depth.
        depth: depth L, with --width.
        gpu_hours: training budget in device hours, with --device and --mfu.
        device: name (h100, a100, …) or peak FLOP/s (989e12).
        mfu: share of the peak that training reaches.
        max_width: widest model that fits, for memory.
        max_depth: deepest model that is fast enough, for latency.
        head_size: of every attention head.
        vocabulary: tokens in the vocabulary.
        sequence: tokens per sequence.
        tpp: tokens per parameter.
        tokens: tokens to train on, instead of --tpp.
        batch: sequences per step, instead of the batch law.
        base_shape: width and depth of the base that was tuned.
        lr: tuned base learning rate.
        std: tuned base init standard deviation.
        tau: weight-decay timescale, 1 / (lr · weight decay · steps).
        from_: a tuned run.json to carry over to the larger target.
        law: with --from: how batch and duration transfer (the paper's laws, or Complete(d)P's).
        horizon_exponent: with --law completed; published values are 0.28 to 0.5.
        ranks: devices that share the state (FSDP2).
        micro_batch: sequences per device and pass, for the memory estimate.
        run: write the run here, for `completep train`.
        json: print JSON.
    """
    from completep.compute import plan as planner
    from completep.compute.memory import memory
    from completep.config import to_json
    from completep.files import write_new
    from completep.report.plan_view import plan_json, plan_tables

    request = planner.Request(
        params=params, flops=flops, width=width, depth=depth, gpu_hours=gpu_hours, device=device, mfu=mfu, max_width=max_width,
        max_depth=max_depth, head_size=head_size, vocabulary=vocabulary, sequence=sequence, tpp=tpp, tokens=tokens, batch=batch,
        rules=rules, base=Shape(*base_shape), lr=lr, std=std, tau=tau, tuned=_read_run(from_), law=law, horizon_exponent=horizon_exponent,
    )  # fmt: skip
    found = planner.answer(request)
    chosen = rules_named(found.run.rules)
    needed = memory(found.run.model, sequence=found.run.sequence, micro_batch=micro_batch, ranks=ranks)
    if run is not None:
        write_new(run, to_json(found.run))
    if json:
        _print_json(plan_json(found, chosen, needed))
    else:
        for part in plan_tables(found, chosen, needed, ranks, micro_batch):
            console().print(part)
    return 0


def _read_run(path: Path | None) -> Any:
    from completep.config import run_from_json
    from completep.files import read_text

    return None if path is None else run_from_json(read_text(path), str(path))


def prepare(
    sources: Annotated[Positional[tuple[str, ...]], arg(metavar="SOURCE …")],
    /,
    out: Path,
    tokenizer: str = "bytes",
    validation: float = 0.01,
    text_field: str = "text",
    workers: int = 2,
    json: bool = False,
) -> int:
    """Turn text into memory-mapped token shards. Run it again after an interruption, and it goes on.

    Example: completep prepare python --out data/python --tokenizer bytes

    Args:
        sources: text files, folders, .jsonl, .jsonl.gz, .parquet, hf:NAME[:SPLIT], or `python` for Python's own source.
        out: folder for the shards and their manifest.
        tokenizer: bytes, gpt2, or the path of a tokenizer.json.
        validation: share of the documents to keep for validation.
        text_field: the field that holds the text, in JSON and Parquet.
        workers: processes.
        json: print JSON.
    """
    from rich.progress import Progress

    from completep.data.prepare import prepare as run

    with Progress(console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("tokenizing", total=None)
        corpus = run(
            sources,
            out,
            tokenizer=tokenizer,
            validation=validation,
            text_field=text_field,
            workers=workers,
            progress=lambda done, total, tokens: progress.update(task, completed=done, total=total),
        )
    counts = {split: corpus.tokens(split) for split in ("train", "validation")}
    if json:
        _print_json({"folder": str(out), "sha256": corpus.sha256, "vocabulary": corpus.vocabulary, "tokens": counts})
    else:
        told = f"{counts['train']:,} training and {counts['validation']:,} validation tokens"
        console().print(f"{out}: {told}, sha256 {corpus.sha256[:12]}…")
    return 0


def train(
    run: Annotated[Positional[Path], arg(metavar="RUN.json")],
    /,
    out: Path | None = None,
    data: str | None = None,
    micro_batch: int | None = None,
    parallel: Literal["none", "ddp", "fsdp"] = "none",
    replicas: int = 1,
    precision: Literal["auto", "float32", "bf16"] = "auto",
    compile: bool = False,
    peak: str | None = None,
    checkpoint_every: int = 1000,
    keep: int = 2,
    log_every: int = 10,
    json: bool = False,
) -> int:
    """Train the run that `completep plan --run` wrote, or go on with it: the same command resumes.

    Under torchrun: torchrun --nproc-per-node 2 -m completep train run.json --parallel fsdp

    Example: completep train run.json --out runs/first --data python

    Args:
        run: a run.json.
        out: the run's folder; by default beside run.json, with its name.
        data: a folder that `completep prepare` wrote, or `python`, instead of the run's own.
        micro_batch: sequences per device and pass; the rest of a batch is accumulated.
        parallel: with torchrun: copies (ddp) or shards (fsdp) of the model on each device.
        replicas: with fsdp: groups of devices that each hold a whole copy (HSDP).
        precision: auto is bf16 autocast where the device has it.
        compile: compile block by block.
        peak: peak FLOP/s of the device, for utilisation; measured if not given.
        checkpoint_every: steps between checkpoints.
        keep: checkpoints to keep.
        log_every: steps between records.
        json: print the result as JSON.
    """
    from dataclasses import asdict, replace

    from completep.train.distributed import leave
    from completep.train.loop import How
    from completep.train.loop import train as run_it
    from completep.units import parse_quantity

    config = _read_run(run)
    config = replace(config, data=replace(config.data, source=data, sha256=None)) if data is not None else config
    top = None if peak is None else parse_quantity(peak, "peak")
    how = How(micro_batch, parallel, replicas, precision, compile, top, checkpoint_every, keep, log_every)
    folder = out if out is not None else run.with_suffix("")
    talk = console(stderr=True)
    with _watch(talk, config) as on_record:
        result = run_it(config, folder, how, on_record=on_record, tell=talk.print)
    leave()
    if json:
        _print_json(asdict(result))
    elif result.status == "stopped":
        console().print(f"stopped at step {result.step}; resume with: completep train {run} --out {folder}")
    else:
        known = {"train": result.train_loss, "validation": result.validation_loss}
        losses = ", ".join(f"{name} loss {loss:.4f}" for name, loss in known.items() if loss is not None)
        pace = f"{result.tokens_per_second:,.0f} tokens/s"
        console().print(f"{result.status} at step {result.step}: {losses}; {pace}; {folder}")
    return 0


@contextmanager
def _watch(talk: "Console", run: Any) -> Iterator[Callable[[Any], None]]:
    """One live line on a terminal, plain lines elsewhere."""
    if not talk.is_terminal:
        yield lambda record: talk.print(_record_line(record, run))
        return
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(BarColumn(20), TextColumn("{task.description}"), console=talk) as progress:
        task = progress.add_task("starting", total=run.schedule.steps)
        yield lambda record: progress.update(task, completed=record.step, description=_record_line(record, run))


def _record_line(record: Any, run: Any) -> str:
    if record.kind == "eval":
        return f"step {record.step}: validation loss {record.loss:.4f}"
    left = (run.schedule.steps - record.step) * run.batch * run.sequence / record.tokens_per_second
    share = f", {record.mfu:.0%} of peak" if record.mfu is not None else ""
    pace = f"{record.tokens_per_second:,.0f} tokens/s{share}, {left:.0f} s left"
    return f"step {record.step}/{run.schedule.steps}: loss {record.loss:.4f}, {pace}"


def demo(
    depths: tuple[int, ...] = (2, 4, 8, 16, 32), seed: int = 0, out: Path = Path("runs"), json: bool = False
) -> int:
    """A small real coordinate check: which parameterizations stay stable as the model deepens?

    Trains the reference decoder for ten AdamW steps at each depth, on Python's own source, under three parameterizations.

    Example: completep demo --depths 2 4 8 16

    Args:
        depths: numbers of layers; the base has 2.
        seed: of the starting weights.
        out: the picture goes into a new folder here.
        json: print JSON.
    """
    from completep.files import fresh_folder, write_new
    from completep.measure import coordinates
    from completep.report import figures
    from completep.rules.table import COMPLETEP, MUP, alpha

    if len(set(depths)) < 2 or min(depths) < 1:
        raise UserError(
            f"--depths {' '.join(map(str, depths))}: a slope needs two different depths of at least 1",
            fix="--depths 2 4 8 16",
        )
    talk = console(stderr=True)
    rules = (MUP, alpha(0.5), COMPLETEP)
    with talk.status("starting") as status:
        frame = coordinates.coordinate_check(
            rules, depths, coordinates.Setting(seed=seed), lambda what: status.update(f"training: {what}")
        )
    verdicts = coordinates.growth(frame)
    folder = fresh_folder(out, "demo")
    chart = figures.coordinate_chart(frame, verdicts)
    files = [write_new(folder / f"coordinates.{kind}", figures.render(chart, kind)) for kind in KINDS]
    files.append(write_new(folder / "coordinates.csv", frame.write_csv()))
    if json:
        _print_json({"verdicts": verdicts.to_dicts(), "rows": frame.to_dicts(), "files": [str(f) for f in files]})
    else:
        _print_demo(frame, verdicts, files)
    return 0


def _print_demo(frame: Any, verdicts: Any, files: list[Path]) -> None:
    from rich.table import Table

    last = frame.filter(frame["step"] == frame["step"].max())
    depths = sorted(set(last["depth"]))
    table = Table(
        title=f"RMS of the last residual stream after {frame['step'].max()} steps of AdamW", title_justify="left"
    )
    for heading in ("parameterization", *(f"L={d}" for d in depths), "grows as", "bounded?"):
        table.add_column(heading, justify="left" if heading == "parameterization" else "right")
    for row in verdicts.iter_rows(named=True):
        values = last.filter(last["rules"] == row["rules"]).sort("depth")["stream"].to_list()
        colour = "green" if row["verdict"] == "PASS" else "red"
        table.add_row(
            row["rules"], *(f"{v:.3g}" for v in values), f"L^{row['slope']:+.2f}", f"[{colour}]{row['verdict']}[/]"
        )
    console().print(table)
    console().print(f"picture: {files[0]} (also svg, png, csv)")


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


KINDS: tuple[Literal["html", "svg", "png"], ...] = ("html", "svg", "png")
COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "explain": explain,
    "audit": audit,
    "plan": plan,
    "prepare": prepare,
    "train": train,
}


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if words in (["--version"], ["-V"]):
        print(f"completep {__version__}")
        return 0
    try:
        description = "Tune a transformer small, train it large: CompleteP and its kin for any PyTorch model."
        code: int = tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="completep", description=description, args=words
        )
        return code
    except UserError as error:
        from rich.markup import escape

        console(stderr=True).print(f"[red]error:[/] {escape(error.what)}\n  [bold]fix:[/] {escape(error.fix)}")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
