"""A training run of the reference decoder that a search may stop early, by the losses of its training steps.

Two runs with the same seed see the same batch at every step, so their losses at a step can be compared. A stopped run
saves a checkpoint: if its result is needed later, it continues from there.
"""

import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from completep.config import Shape
from completep.sweep.queue import register
from completep.sweep.training import Training
from completep.train.folder import METRICS
from completep.train.records import Record, read_metrics
from completep.tuning.hopeless import hopeless
from completep.tuning.reading import Reading
from completep.tuning.tasks import RESULT, write_hopeless


@register
@dataclass(frozen=True)
class Decoder:
    """A `Training` that also knows the loss curve of the best run so far."""

    kind: ClassVar[str] = "decoder"
    training: Training
    bar: tuple[Reading, ...] = ()  # that curve; not part of the id

    @property
    def id(self) -> str:
        return self.training.id

    @property
    def group(self) -> tuple[Shape, int]:
        """Runs of one group can be compared while they train."""
        run = self.training.run
        return Shape(run.model.width, run.model.depth), run.seed

    @property
    def cost(self) -> float:
        return self.training.cost

    @property
    def ranks(self) -> int:
        return self.training.ranks

    @property
    def imports(self) -> tuple[str, ...]:
        return (*self.training.imports, __name__)

    def memory(self) -> float:
        return self.training.memory()

    def describe(self) -> str:
        return self.training.describe()

    def loss(self, result: Mapping[str, object]) -> float | None:
        return self.training.loss(result)

    def to_json(self) -> dict[str, object]:
        return {"training": self.training.to_json(), "bar": [[r.step, r.loss] for r in self.bar]}

    @staticmethod
    def from_json(content: dict[str, Any]) -> "Decoder":
        bar = tuple(Reading(float(step), float(loss)) for step, loss in content["bar"])
        return Decoder(Training.from_json(content["training"]), bar)

    def carry_out(self, folder: Path, lock: int) -> None:
        """Train. A hopeless run is stopped by SIGTERM, so it saves; this works only in the main thread."""
        began, stopped = time.monotonic(), False
        readings: list[Reading] = []

        def look(record: Record) -> None:
            nonlocal stopped
            if record.kind != "step" or stopped:
                return
            if readings:
                readings.append(Reading(record.step, record.loss))
            else:  # the first record, which is in the file already, after those of a run that is resumed
                readings.extend(self.readings(folder))
            if hopeless(readings, self.bar):
                stopped = True
                signal.raise_signal(signal.SIGTERM)

        can_stop = bool(self.bar) and threading.current_thread() is threading.main_thread()
        if can_stop:
            self.training.carry_out(folder, lock, look)
        else:
            self.training.carry_out(folder, lock)
        if stopped and not (folder / RESULT).exists():
            write_hopeless(folder, self.readings(folder), time.monotonic() - began)

    def readings(self, folder: Path) -> list[Reading]:
        """The losses of the training steps so far."""
        path = folder / METRICS
        records = read_metrics(path) if path.exists() else ()
        return [Reading(r.step, r.loss) for r in records if r.kind == "step"]
