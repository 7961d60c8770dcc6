"""The output of a run: typed records, one per line of metrics.jsonl, and the result."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from completep.errors import UserError

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


Record = StepRecord | EvalRecord
KINDS: dict[str, type[StepRecord] | type[EvalRecord]] = {"step": StepRecord, "eval": EvalRecord}


class Metrics:
    """Appends to metrics.jsonl. A line that a crash left incomplete is dropped on resume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")
        except OSError as error:
            what = f"cannot write {self.path}: {error.strerror}"
            raise UserError(what, fix="free some space, then run the same command again") from error

    def last_loss(self) -> float | None:
        """The last recorded training loss."""
        if not self.path.exists():
            return None
        return next((r.loss for r in reversed(list(read_metrics(self.path))) if r.kind == "step"), None)

    def keep_until(self, step: int) -> None:
        """Drop the records after a checkpoint. The resumed run writes them again."""
        if not self.path.exists():
            return
        kept = [json.dumps(asdict(r)) + "\n" for r in read_metrics(self.path) if r.step <= step]
        part = self.path.with_suffix(".part")
        part.write_text("".join(kept), encoding="utf-8")
        os.replace(part, self.path)


def read_metrics(path: Path) -> Iterator[Record]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            data = json.loads(line)
            yield KINDS[data["kind"]](**data)
        except (ValueError, KeyError, TypeError):
            continue  # a crash left the line incomplete
