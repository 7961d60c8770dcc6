"""Checkpoints: safetensors written by torch.distributed.checkpoint, and a manifest that is checked before use.

A folder `step-00001000` is complete if it exists. Tensors are stored by parameter name, so a checkpoint can be read
with another number of ranks and another sharding. Nothing in it is a pickle: reading one runs no code of others.
"""

import itertools
import logging
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from completep.anatomy.names import named_parameters
from completep.config import sealed, structure, unsealed
from completep.errors import UserError
from completep.files import read_bytes, remove_folder, sha256_of, write_new
from completep.train.records import NOTHING, Mark

MANIFEST = "completep.json"
STEP = "step-([0-9]{8}|[1-9][0-9]{8,})"  # `\d` would match the digits of other scripts too
NAME, LEFT_OVER = re.compile(STEP), re.compile(rf"\.{STEP}\.(part|old)")
SET_ASIDE = re.compile(rf"damaged-{STEP}(-[0-9]+)?")
FILE_BYTES = 2**30  # a rank holds one file at a time in memory while it writes it


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself; sealed with its own digest."""

    step: int
    run: str  # the run's id
    scaling: dict[str, object]
    metrics: Mark = NOTHING
    files: dict[str, str] | None = None  # name → sha256


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
    """The checkpoints of one run. Only folders with exactly our names are read, renamed or removed."""

    def __init__(self, folder: Path, keep: int = 1, tell: Callable[[str], None] = lambda message: None) -> None:
        self.folder, self.keep, self.tell = folder, keep, tell

    def all(self) -> list[Path]:
        """The folders, newest last."""
        return sorted(self._named(NAME), key=lambda path: int(path.name.removeprefix("step-")))

    def _refuse_link(self) -> None:
        """What a link leads to is not ours: nothing there may be renamed or removed."""
        if self.folder.is_symlink():
            what = f"{self.folder} is a symbolic link"
            raise UserError(what, fix="put the folder itself there, or link the whole folder of the run")

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [p for p in self.folder.iterdir() if pattern.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, manifest: Manifest) -> None:
        self._refuse_link()
        final = self.folder / f"step-{manifest.step:08d}"
        if final in self.all():
            return
        if os.path.lexists(final):
            fix = f"move {final} away, then run the same command again"
            raise UserError(f"{final} is in the way: it is not a checkpoint", fix=fix)
        part = self.folder / f".{final.name}.part"
        try:
            if rank() == 0:
                remove_folder(part)
                part.mkdir(parents=True)
            barrier()
            state = tensors(model, optimizer)
            writer = HuggingFaceStorageWriter(str(part), in_files(state), save_distributed=True)
            with no_single_process_warning():
                save(state, storage_writer=writer, no_dist=not dist.is_initialized())
            barrier()
            if rank() == 0:
                self._seal(part, final, manifest)
        except OSError as error:
            raise self._unwritable(error) from error
        except CheckpointException as error:
            raise self._unwritable(next(iter(error.failures.values()))[0]) from error
        finally:
            if rank() == 0:
                remove_folder(part)
        barrier()

    def _unwritable(self, error: BaseException) -> UserError:
        last = self.all()[-1:]
        kept = f"the last good checkpoint is {last[0]}" if last else "there is no checkpoint yet"
        what = f"cannot write a checkpoint to {self.folder}: {error}; {kept}"
        return UserError(what, fix="free some space, then run the same command again")

    def _seal(self, part: Path, final: Path, manifest: Manifest) -> None:
        """Write the hashes, then rename the folder, which makes it a checkpoint, and only then remove old ones.

        The new one counts as kept. Newer ones are not touched: `load` has set aside those that it could not use.
        """
        files = {path.name: sha256_of(path) for path in sorted(part.iterdir())}
        write_new(part / MANIFEST, sealed(asdict(replace(manifest, files=files))))
        sync(*part.iterdir(), part)
        os.rename(part, final)
        sync(self.folder)  # not what else lies in it: a named pipe there would make this wait for ever
        older = self.all()[: self.all().index(final)]
        for old in older[: len(older) - self.keep + 1]:
            going = old.with_name(f".{old.name}.old")  # a folder that is half removed must not look like a checkpoint
            os.rename(old, going)
            remove_folder(going)

    def clear(self) -> None:
        """Remove all of them, damaged ones too, and the folder if nothing else lies in it."""
        self._refuse_link()
        for path in itertools.chain.from_iterable(self._named(p) for p in (NAME, LEFT_OVER, SET_ASIDE)):
            remove_folder(path)
        with suppress(OSError):  # there is none, or a user's files are in it
            self.folder.rmdir()

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, check: Callable[[Manifest], None]
    ) -> Manifest | None:
        """Load the newest undamaged checkpoint into model and optimizer, and return its manifest.

        The first rank reads the hashes and sets damaged checkpoints aside; the others load the step that it chose.
        """
        self._refuse_link()
        step = agreed(self._newest_good(check) if rank() == 0 else None, next(model.parameters()).device)
        if step is None:
            return None
        folder = self.folder / f"step-{step:08d}"
        manifest = read_manifest(folder)
        try:
            reader = HuggingFaceStorageReader(str(folder))
            with no_single_process_warning(), no_logged_warnings():
                load(tensors(model, optimizer), storage_reader=reader, no_dist=not dist.is_initialized())
        except (Exception, CheckpointException) as error:  # its hashes are right; torch raises many kinds
            cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
            what = f"checkpoint {folder} does not fit this run: {str(cause)[:200]}"
            raise UserError(what, fix=f"remove {folder}, and run the same command again") from error
        for _, p in named_parameters(model):
            optimizer.state[p]["step"] = torch.tensor(float(step))
        return manifest

    def _newest_good(self, check: Callable[[Manifest], None]) -> int | None:
        for left in self._named(LEFT_OVER):
            remove_folder(left)
        damaged = False
        for folder in reversed(self.all()):
            try:
                manifest = verified(folder)
            except (OSError, ValueError) as error:
                damaged = True
                cause = error.what if isinstance(error, UserError) else error
                self.tell(f"checkpoint {folder.name} is damaged ({cause}); trying the one before it")
                self._set_aside(folder)
                continue
            check(manifest)
            return manifest.step
        if damaged:
            self.tell("no undamaged checkpoint is left; starting from the first step")
        return None

    def _set_aside(self, folder: Path) -> None:
        """Rename it, so that its step can be saved again and nothing is lost."""
        names = (self.folder / f"damaged-{folder.name}{suffix}" for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
        try:
            os.rename(folder, next(name for name in names if not name.exists()))
        except OSError as error:
            raise UserError(f"cannot rename {folder}: {error.strerror}", fix=f"move {folder} away") from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; a ValueError or an OSError if it is damaged."""
    manifest = structure(unsealed(read_bytes(folder / MANIFEST)), Manifest, MANIFEST, "remove the checkpoint")
    if folder.name != f"step-{manifest.step:08d}":
        raise ValueError(f"{MANIFEST} is that of step {manifest.step}")
    return manifest


def verified(folder: Path) -> Manifest:
    """The manifest, after every file of the checkpoint was compared with it."""
    manifest = read_manifest(folder)
    expected = {**(manifest.files or {}), MANIFEST: None}
    present = {path.name for path in folder.iterdir()}
    if present != set(expected):
        raise ValueError(f"{min(present ^ set(expected))} is {'missing' if present < set(expected) else 'unexpected'}")
    for name, digest in expected.items():
        path = folder / name
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"{name} is not a file")
        if digest is not None and sha256_of(path) != digest:
            raise ValueError(f"{name} has changed")
    return manifest


def in_files(state: dict[str, Tensor]) -> dict[str, int]:
    """Tensor → number of the file it goes to, from 1."""
    numbers, total = {}, 0
    for name, tensor in state.items():
        numbers[name] = 1 + total // FILE_BYTES
        total += tensor.numel() * tensor.element_size()
    # The writer wants every number up to the last.
    order = {number: i for i, number in enumerate(sorted(set(numbers.values())), start=1)}
    return {name: order[number] for name, number in numbers.items()}


@contextmanager
def no_single_process_warning() -> Iterator[None]:
    """Suppress the warning of torch that a single process saves without torch.distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


@contextmanager
def no_logged_warnings() -> Iterator[None]:
    """Torch logs the traceback of a file that it cannot read. The error that follows says the same in words."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def sync(*paths: Path) -> None:
    """Flush files and folders to the disk, so that they survive a power cut."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def agreed(step: int | None, device: torch.device) -> int | None:
    """The first rank's answer, on every rank."""
    if not dist.is_initialized():
        return step
    answer = torch.tensor(-1 if step is None else step, device=device)
    dist.broadcast(answer, src=0)
    return None if answer.item() < 0 else int(answer.item())


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
