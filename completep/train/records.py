"""The output of a run: typed records, one per line of metrics.jsonl, and the result."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from completep.errors import UserError
from completep.files import append, open_regular, read_bytes, write_over

MOST_BYTES = 2**31  # of the records of a run
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
        with open_regular(self.path) as file:
            os.fsync(file.fileno())
            content = file.read()
        return Mark(len(content), hashlib.sha256(content).hexdigest())

    def loss_at(self, step: int) -> float | None:
        """The recorded training loss of a step; None if it was not recorded, or its line is damaged."""
        if not self.path.exists():
            return None
        return next((r.loss for r in read_metrics(self.path) if r.kind == "step" and r.step == step), None)

    def rewind(self, mark: Mark, step: int) -> bool:
        """Drop what was recorded after a mark; the resumed run writes it again. False if what came before has changed.

        Then the records up to the step are kept as far as they can be read.
        """
        content = read_bytes(self.path, MOST_BYTES) if self.path.exists() else b""
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
    for text in read_bytes(path, MOST_BYTES).splitlines():
        with suppress(ValueError):
            yield parse_record(text)


def parse_record(text: bytes) -> Record:
    """A line of metrics.jsonl; a ValueError if it is none."""
    try:
        data = json.loads(text)
        record = KINDS[data["kind"]](**data)
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{text[:60]!r} is not a record of a run") from error
    numbers = {name: value for name, value in vars(record).items() if name != "kind"}
    if not _is_whole(numbers.pop("step")) or not _is_number(numbers.pop("loss")):
        raise ValueError(f"{text[:60]!r} has no step and loss")
    if not all(value is None or _is_number(value) for value in numbers.values()):
        raise ValueError(f"{text[:60]!r} has values that are not numbers")
    return record


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)  # the loss of a run that diverges is not finite
