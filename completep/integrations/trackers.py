"""Metrics of a run in TensorBoard, Weights & Biases or trackio, in addition to metrics.jsonl.

If a tracker fails during training, a message says so and training continues without it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from completep.config import Run, run_id, to_json
from completep.errors import UserError
from completep.train.records import Record

Kind = Literal["tensorboard", "wandb", "trackio"]
PROJECT = "completep"


class Tracker(Protocol):
    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder. View them with `tensorboard --logdir RUNS`."""

    def __init__(self, run: Run, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("run", "```json\n" + to_json(run) + "```")

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Logs under the hash of the run, so a resumed run continues there. WANDB_MODE=offline keeps the data local."""

    def __init__(self, run: Run, folder: Path) -> None:
        import wandb

        config, name = json.loads(to_json(run)), run_id(run)
        self.run = wandb.init(
            project=PROJECT, name=folder.name, id=name, resume="allow", dir=str(folder), config=config
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio:
    """The local dashboard of Hugging Face. View it with `trackio show`."""

    def __init__(self, run: Run, folder: Path) -> None:
        import trackio

        self.run: Any = trackio.init(
            project=PROJECT, name=folder.name, config=json.loads(to_json(run)), resume="allow", embed=False
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[Kind, Callable[[Run, Path], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


def open_tracker(kind: Kind, run: Run, folder: Path) -> Tracker:
    try:
        return TRACKERS[kind](run, folder)
    except ImportError as error:
        fix = f"pip install {kind}, or pip install 'completep[track]' for all trackers"
        raise UserError(f"{kind} is not installed", fix=fix) from error
    except Exception as error:  # services fail in many ways: no key, no network, no such project
        fix = "train without a tracker"
        if kind == "wandb":
            fix = f"log in with `wandb login`, or set WANDB_MODE=offline, or {fix}"
        raise UserError(f"{kind} cannot start: {error}", fix=fix) from error


def close(tracker: Tracker, tell: Callable[[str], None]) -> None:
    """Close a tracker. An error is only reported, since the run is complete by now."""
    try:
        tracker.close()
    except Exception as error:
        tell(f"the tracker failed to close: {type(error).__name__}: {error}; metrics.jsonl is complete")


def following(tracker: Tracker, tell: Callable[[str], None]) -> Callable[[Record], None]:
    """A function that logs records, until the tracker fails for the first time."""
    alive = True

    def follow(record: Record) -> None:
        nonlocal alive
        if not alive:
            return
        try:
            tracker.log(values_of(record), record.step)
        except Exception as error:
            alive = False
            tell(f"the tracker failed: {type(error).__name__}: {error}; training continues without it")

    return follow


def values_of(record: Record) -> dict[str, float]:
    """The values to log, by name. Values that are None are left out."""
    if record.kind == "eval":
        return {"validation/loss": record.loss}
    values = {"loss": record.loss, "lr": record.lr, "grad_norm": record.grad_norm, "mfu": record.mfu}
    values["tokens_per_second"] = record.tokens_per_second
    return {f"train/{name}": value for name, value in values.items() if value is not None}
