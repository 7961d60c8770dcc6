"""The output of a run: typed records, one per line of metrics.jsonl, and the result."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from completep.errors import UserError
from completep.files import append, write_over

Status = Literal["done", "diverged", "stopped"]


@dataclass(frozen=True)
class StepRecord:
    step: int  # steps completed
    loss: float
    lr: float  # of a parameter with the factor 1
    grad_norm: float | None
    tokens_per_second: float
    mfu: float | None  # share of the peak FLOP/s; None if no peak is known
    kind: Literal["step"] = "step"


@dataclass(frozen=True)
class EvalRecord:
    step: int
    loss: float
    kind: Literal["eval"] = "eval"


@dataclass(frozen=True)
class Result:
    status: Status
    step: int
    train_loss: float | None  # at the last step with a finite loss
    validation_loss: float | None
    tokens: int
    seconds: float
    tokens_per_second: float
    data_sha256: str
    run: str = ""  # the run's id
    files: dict[str, str] = field(default_factory=dict)  # name → sha256 of what the run left: metrics and weights


Record = StepRecord | EvalRecord
KINDS: dict[str, type[StepRecord] | type[EvalRecord]] = {"step": StepRecord, "eval": EvalRecord}


@dataclass(frozen=True)
class Mark:
    """How long metrics.jsonl was at some step, and the hash of that much of it."""

    bytes: int
    sha256: str


NOTHING = Mark(0, hashlib.sha256().hexdigest())


class Metrics:
    """Appends to metrics.jsonl. A checkpoint keeps a mark of it, and a resumed run continues from there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        try:
            with os.fdopen(append(self.path), "wb") as file:
                file.write(line(record))
        except OSError as error:
            what = f"cannot write {self.path}: {error.strerror}"
            raise UserError(what, fix="free some space, then run the same command again") from error

    def mark(self) -> Mark:
        """Where the file ends now. It is flushed to the disk, as the checkpoint that keeps the mark is."""
        if not self.path.exists():
            return NOTHING
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
            content = file.read()
        return Mark(len(content), hashlib.sha256(content).hexdigest())

    def last_loss(self) -> float | None:
        """The last recorded training loss."""
        if not self.path.exists():
            return None
        return next((r.loss for r in reversed(list(read_metrics(self.path))) if r.kind == "step"), None)

    def rewind(self, mark: Mark, step: int) -> bool:
        """Drop what was recorded after a mark; the resumed run writes it again. False if what came before has changed.

        Then the records up to the step are kept as far as they can be read.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        kept = content[: mark.bytes]
        same = hashlib.sha256(kept).hexdigest() == mark.sha256
        if not same:
            kept = b"".join(line(r) for r in read_metrics(self.path) if r.step <= step) if content else b""
        if kept != content:
            write_over(self.path, kept)
        return same


def line(record: Record) -> bytes:
    return (json.dumps(asdict(record)) + "\n").encode()


def read_metrics(path: Path) -> Iterator[Record]:
    """The records. A line that cannot be read is left out: a crash may leave the last one incomplete."""
    for text in path.read_bytes().splitlines():
        try:
            data = json.loads(text)
            record = KINDS[data["kind"]](**data)
            if isinstance(record.step, int) and isinstance(record.loss, (int, float)):
                yield record
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
