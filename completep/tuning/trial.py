"""The argument of your `train(trial)`: the shape, the values, a folder of its own, and a way to report the loss."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from completep.config import Shape
from completep.files import append, read_bytes
from completep.sweep.task import TaskError, Value
from completep.tuning.reading import MOST_BYTES, Reading

REPORTS = "reports.jsonl"  # beside the trial's folder


class Hopeless(BaseException):
    """Ends a run that is hopeless. It is not an Exception, so `except Exception` in your script does not catch it."""


class Trial:
    """One run: `trial.width`, `.depth`, `.base_width`, `.base_depth`, `.m_N`, `.m_L`, `.seed`, `.rules`, `.folder`, and
    the values of the search and the constants by their names, such as `trial.lr`.
    """

    def __init__(
        self,
        names: Mapping[str, Value],
        folder: Path,
        hopeless: Callable[[list[Reading]], bool] = lambda readings: False,
    ) -> None:
        self.folder = folder
        self.names = dict(names)
        self.hopeless = hopeless
        self.readings: list[Reading] = []

    def __getattr__(self, name: str) -> Any:
        names = self.__dict__.get("names", {})
        if name in names:
            return names[name]
        raise AttributeError(f"this trial has no {name!r}; it has {', '.join(names)} and folder")

    @property
    def shape(self) -> Shape:
        """Width and depth of this run."""
        return Shape(int(self.names["width"]), int(self.names["depth"]))

    @property
    def base(self) -> Shape:
        """Width and depth of the base."""
        return Shape(int(self.names["base_width"]), int(self.names["base_depth"]))

    def report(self, step: float, loss: float) -> None:
        """Report the loss at a step, as often as you like. A hopeless run is stopped here, by raising `Hopeless`."""
        with os.fdopen(append(self.folder.parent / REPORTS), "w") as file:
            file.write(json.dumps({"step": float(step), "loss": float(loss)}) + "\n")
        self.readings.append(Reading(float(step), float(loss)))
        if self.hopeless(self.readings):
            raise Hopeless


def read_reports(path: Path) -> list[Reading]:
    """The losses that a trial has reported so far."""
    if not path.exists():
        return []
    try:
        text = read_bytes(path, MOST_BYTES).decode(errors="replace")
        records = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [Reading(float(r["step"]), float(r["loss"])) for r in records]
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise TaskError(f"{path} is damaged: {error}") from error
