"""Which run is trained, how it is executed, and its corpus. Light to import: no torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from completep.compute.plan import plan
from completep.config import BUILTIN, Data, Run, Shape, whole
from completep.data.builtin import builtin_corpus
from completep.data.corpus import Corpus, load_corpus
from completep.errors import UserError
from completep.train.folder import read_run

Parallel = Literal["none", "ddp", "fsdp"]


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

    def __post_init__(self) -> None:
        if self.micro_batch is not None:
            whole("micro_batch", self.micro_batch)
        for name, least in (("replicas", 1), ("keep", 1), ("log_every", 1), ("checkpoint_every", 0)):
            whole(name, getattr(self, name), least)


def make_run(
    path: Path | None = None,
    *,
    data: str | None = None,
    tokenizer: str | None = None,
    seed: int | None = None,
    width: int | None = None,
    depth: int | None = None,
    head_size: int | None = None,
    tokens: "float | str | None" = None,
    batch: int | None = None,
    sequence: int | None = None,
    rules: str | None = None,
    base: "Shape | tuple[int, int] | None" = None,
    lr: float | None = None,
    std: float | None = None,
    tau: float | None = None,
) -> Run:
    """The run to train: that of a run.json, or `plan`'s for a width and a depth; with other data or another seed.

    Args:
        path: a run.json. With it, only data, tokenizer and seed can be given.
        data: a prepared folder, or the name of a built-in corpus; by default that of the run.json, else "python".
        tokenizer: of a built-in corpus; by default that of the run.json, else "bytes".
        seed: of the initial weights and of the order of the data.

    The others are arguments of `plan`.
    """
    named = {
        "width": width, "depth": depth, "head_size": head_size, "tokens": tokens, "batch": batch, "sequence": sequence,
        "rules": rules, "base": base, "lr": lr, "std": std, "tau": tau,
    }  # fmt: skip
    for name, word in (("data", data), ("tokenizer", tokenizer)):
        if word == "":
            raise UserError(f"{name} is empty", fix=f"give a value, or leave {name} out")
    given = [name for name, value in named.items() if value is not None]
    if path is not None and given:
        raise UserError(
            f"{given[0]} beside {path}: the run defines it already",
            fix=f"leave out {given[0]}, or leave out {path} and give width and depth",
        )
    if path is not None:
        run = read_run(path)
    elif given:
        vocabulary = open_corpus(Data(data or "python", tokenizer or "bytes")).vocabulary
        run = plan(
            width=width, depth=depth, head_size=head_size, tokens=tokens, batch=batch, sequence=sequence, rules=rules,
            base=base, lr=lr, std=std, tau=tau, vocabulary=vocabulary,
        ).run  # fmt: skip
    else:
        raise UserError("nothing to train", fix="give a run.json, or width and depth")
    run = with_data(run, data, tokenizer)
    return run if seed is None else replace(run, seed=seed)


def with_data(run: Run, source: str | None = None, tokenizer: str | None = None) -> Run:
    """The run on other data; what is None stays. Nothing is known about the content of the new data yet."""
    if source is None and tokenizer is None:
        return run
    return replace(run, data=Data(source or run.data.source, tokenizer or run.data.tokenizer))


def open_corpus(data: Data) -> Corpus:
    """The corpus of a run; an error if its content has changed since."""
    corpus = builtin_corpus(data.source, data.tokenizer) if data.source in BUILTIN else load_corpus(Path(data.source))
    if data.sha256 is not None and data.sha256 != corpus.sha256:
        raise UserError(
            f"the data of {data.source!r} has changed: sha256 {corpus.sha256[:12]}…, in the run {data.sha256[:12]}…",
            fix="restore the old data, or plan a new run",
        )
    return corpus
