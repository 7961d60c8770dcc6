"""How a run is executed, and the corpus that it is trained on. Light to import: no torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from completep.config import BUILTIN, Data, Run, whole
from completep.data.builtin import builtin_corpus
from completep.data.corpus import Corpus, load_corpus
from completep.errors import UserError

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
