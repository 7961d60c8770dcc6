"""What a run writes down, shown elsewhere too: TensorBoard, Weights & Biases, trackio. metrics.jsonl stays the truth.

A tracker that fails is let go with a word; training goes on.
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
    """Event files in the run's own folder: `tensorboard --logdir RUNS`."""

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
    """Under the run's hash, so that a resumed run goes on in the same place; WANDB_MODE=offline keeps it here."""

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
    """Hugging Face's local dashboard: `trackio show`."""

    def __init__(self, run: Run, folder: Path) -> None:
        import trackio

        self.run: Any = trackio.init(
            project=PROJECT, name=folder.name, config=json.loads(to_json(run)), resume="allow", embed=False
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[Kind, type[Any]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


def open_tracker(kind: Kind, run: Run, folder: Path) -> Tracker:
    try:
        made: Tracker = TRACKERS[kind](run, folder)
    except ImportError as error:
        raise UserError(
            f"{kind} is not installed", fix=f"pip install {kind}, or 'completep[track]' for all trackers"
        ) from error
    except Exception as error:  # whatever a service says: no key, no network, no such project
        raise UserError(
            f"{kind} cannot start: {error}", fix="wandb login, or WANDB_MODE=offline; or leave out --track"
        ) from error
    return made


def close(tracker: Tracker, tell: Callable[[str], None]) -> None:
    """The run is done and written by then, whatever happens here."""
    try:
        tracker.close()
    except Exception as error:
        tell(f"the tracker failed at its end: {type(error).__name__}: {error}; metrics.jsonl has it all")


def following(tracker: Tracker, tell: Callable[[str], None]) -> Callable[[Record], None]:
    """Pass records on for as long as the tracker takes them."""
    alive = True

    def follow(record: Record) -> None:
        nonlocal alive
        if not alive:
            return
        try:
            tracker.log(values_of(record), record.step)
        except Exception as error:
            alive = False
            tell(f"the tracker failed and is let go: {type(error).__name__}: {error}; metrics.jsonl goes on")

    return follow


def values_of(record: Record) -> dict[str, float]:
    if record.kind == "eval":
        return {"validation/loss": record.loss}
    known = {"loss": record.loss, "lr": record.lr, "grad_norm": record.grad_norm, "mfu": record.mfu}
    known["tokens_per_second"] = record.tokens_per_second
    return {f"train/{name}": value for name, value in known.items() if value is not None}
