"""Checkpoints: torch.distributed.checkpoint folders with hashes, which are checked before use.

A folder `step-00001000` is complete if it exists. Tensors are stored by parameter name, so a checkpoint can be read
with another number of ranks and another sharding.
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

from completep.anatomy.names import named_parameters
from completep.errors import UserError

MANIFEST = "completep.json"
NAME = re.compile(r"step-(\d{8})$")


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that training changes, by name. Before the first step, AdamW's state is created as zeros."""
    state: dict[str, Tensor] = {}
    for name, p in named_parameters(model):
        adam = optimizer.state[p]
        if not adam:
            adam["step"] = torch.tensor(0.0)
            adam["exp_avg"], adam["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state[f"model.{name}"] = p.detach()
        state |= {f"{moment}.{name}": adam[moment] for moment in ("exp_avg", "exp_avg_sq")}
    return state


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int, tell: Callable[[str], None]) -> None:
        self.folder, self.keep, self.tell = folder, keep, tell

    def all(self) -> list[Path]:
        """The folders, newest last."""
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
            with no_single_process_warning():
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
        what = f"cannot write a checkpoint to {self.folder}: {error}; {kept}"
        return UserError(what, fix="free some space, then run the same command again")

    def _seal(self, part: Path, final: Path, meta: dict[str, Any]) -> None:
        """Write the hashes, then rename the folder, which makes it a checkpoint, and only then delete old ones."""
        files = {str(f.relative_to(part)): sha256(f) for f in sorted(part.rglob("*")) if f.is_file()}
        (part / MANIFEST).write_text(json.dumps({**meta, "files": files}))
        sync(part)
        os.rename(part, final)
        sync(self.folder)
        for old in self.all()[: -self.keep]:
            shutil.rmtree(old)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer, check: Callable[[dict[str, Any]], None]) -> int:
        """Load the newest undamaged checkpoint into model and optimizer. Returns its step, 0 if there is none."""
        for folder in reversed(self.all()):
            meta = self._verified(folder)
            if meta is None:
                self.tell(f"checkpoint {folder.name} is damaged; trying the one before it")
                continue
            check(meta)
            with no_single_process_warning():
                load(tensors(model, optimizer), checkpoint_id=folder, no_dist=not dist.is_initialized())
            for _, p in named_parameters(model):
                optimizer.state[p]["step"] = torch.tensor(float(meta["step"]))
            return int(meta["step"])
        return 0

    def _verified(self, folder: Path) -> dict[str, Any] | None:
        """The metadata of a checkpoint, or None if it is damaged."""
        try:
            meta: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
            undamaged = all(sha256(folder / name) == digest for name, digest in meta["files"].items())
        except (OSError, ValueError, KeyError):
            return None
        return meta if undamaged else None


@contextmanager
def no_single_process_warning() -> Iterator[None]:
    """Suppress the warning of torch that a single process saves without torch.distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sync(folder: Path) -> None:
    """Flush a folder and its files to the disk, so that they survive a power cut."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
