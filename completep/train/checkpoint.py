"""Checkpoints: torch.distributed.checkpoint folders, written beside and renamed, hashed, and checked before use.

A folder `step-00001000` is complete or not there. Tensors are stored by parameter name, so any number of ranks, sharded any
way, reads what any other wrote.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from completep.errors import UserError
from completep.rules.scaling import named_parameters

MANIFEST = "completep.json"
NAME = re.compile(r"step-(\d{8})$")


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that training changes, by name. AdamW's state is made first if there was no step yet."""
    state: dict[str, Tensor] = {}
    for name, p in named_parameters(model):
        held = optimizer.state[p]
        if not held:
            held["step"] = torch.tensor(0.0)
            held["exp_avg"], held["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state |= {
            f"model.{name}": p.detach(),
            f"exp_avg.{name}": held["exp_avg"],
            f"exp_avg_sq.{name}": held["exp_avg_sq"],
        }
    return state


class Checkpoints:
    """The checkpoints of one run, newest last."""

    def __init__(self, folder: Path, keep: int, tell: Callable[[str], None]) -> None:
        self.folder, self.keep, self.tell = folder, keep, tell

    def all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if NAME.search(p.name))

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, meta: dict[str, Any]) -> None:
        final = self.folder / f"step-{step:08d}"
        if final.exists():
            return
        part = self.folder / f".{final.name}.part"
        try:
            if rank() == 0:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
            barrier()
            with alone_is_fine():
                save(tensors(model, optimizer), checkpoint_id=part, no_dist=not dist.is_initialized())
            barrier()
            if rank() == 0:
                self._seal(part, final, {**meta, "step": step})
        except OSError as error:
            raise self._unwritable(error) from error
        except CheckpointException as error:
            raise self._unwritable(next(iter(error.failures.values()))[0]) from error
        barrier()

    def _unwritable(self, error: BaseException) -> UserError:
        last = self.all()[-1:]
        kept = f"the last good checkpoint is {last[0]}" if last else "there is no checkpoint yet"
        return UserError(
            f"cannot write a checkpoint to {self.folder}: {error}; {kept}",
            fix="free some space, then run the same command again",
        )

    def _seal(self, part: Path, final: Path, meta: dict[str, Any]) -> None:
        """Hashes last, then the rename that makes it a checkpoint; old ones go only after that."""
        files = {str(f.relative_to(part)): sha256(f) for f in sorted(part.rglob("*")) if f.is_file()}
        (part / MANIFEST).write_text(json.dumps({**meta, "files": files}))
        sync(part)
        os.rename(part, final)
        sync(self.folder)
        for old in self.all()[: -self.keep]:
            shutil.rmtree(old)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, check: Callable[[dict[str, Any]], None]) -> int:
        """Put the newest sound checkpoint into model and optimizer; the step it was taken at, 0 if there is none."""
        for folder in reversed(self.all()):
            meta = self._sound(folder)
            if meta is None:
                self.tell(f"checkpoint {folder.name} is damaged; trying the one before it")
                continue
            check(meta)
            with alone_is_fine():
                load(tensors(model, optimizer), checkpoint_id=folder, no_dist=not dist.is_initialized())
            for _, p in named_parameters(model):
                optimizer.state[p]["step"] = torch.tensor(float(meta["step"]))
            return int(meta["step"])
        return 0

    def _sound(self, folder: Path) -> dict[str, Any] | None:
        try:
            meta: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
            whole = all(sha256(folder / name) == digest for name, digest in meta["files"].items())
        except (OSError, ValueError, KeyError):
            return None
        return meta if whole else None


@contextmanager
def alone_is_fine() -> Iterator[None]:
    """torch warns that a single process saves as a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sync(folder: Path) -> None:
    """Make what is in a folder survive a power cut."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
