"""What a run writes down: one typed record a line in metrics.jsonl, and its result."""

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
    step: int  # steps done
    loss: float
    lr: float  # of a parameter whose factor is 1
    grad_norm: float | None
    tokens_per_second: float
    mfu: float | None
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
    train_loss: float | None  # the last finite one
    validation_loss: float | None
    tokens: int
    seconds: float
    tokens_per_second: float
    data_sha256: str


Record = StepRecord | EvalRecord
KINDS: dict[str, type[StepRecord] | type[EvalRecord]] = {"step": StepRecord, "eval": EvalRecord}


class Metrics:
    """metrics.jsonl, appended line by line; a line that a crash cut short is dropped on resume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as f:
                f.write(json.dumps(asdict(record)) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write {self.path}: {error.strerror}", fix="free some space, then run the same command again"
            ) from error

    def last_loss(self) -> float | None:
        """The latest training loss that was written down."""
        if not self.path.exists():
            return None
        return next((r.loss for r in reversed(list(read_metrics(self.path))) if r.kind == "step"), None)

    def keep_until(self, step: int) -> None:
        """Forget what came after a checkpoint: the resumed run will write it again."""
        if not self.path.exists():
            return
        kept = [json.dumps(asdict(r)) + "\n" for r in read_metrics(self.path) if r.step <= step]
        beside = self.path.with_suffix(".part")
        beside.write_text("".join(kept), encoding="utf-8")
        os.replace(beside, self.path)


def read_metrics(path: Path) -> Iterator[Record]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            data = json.loads(line)
            yield KINDS[data["kind"]](**data)
        except (ValueError, KeyError, TypeError):
            continue  # cut short by a crash
