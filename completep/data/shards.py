"""Shards, written: beside and renamed, hashed on the way."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from completep.data.corpus import Shard, Splits
from completep.errors import UserError

BLOCK = 2**22  # tokens copied at a time


class ShardWriter:
    """A file `split-00012.bin` that is there whole or not at all; without tokens there is none."""

    def __init__(self, folder: Path, split: str, index: int, dtype: str) -> None:
        self.path = folder / f"{split}-{index:05d}.bin"
        self.beside = self.path.with_name(f".{self.path.name}.part")
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.sha256, self.tokens = hashlib.sha256(), 0
        self.file: IO[bytes] | None = None

    def add(self, ids: npt.NDArray[Any]) -> None:
        data = ids.astype(self.dtype, copy=False).tobytes()
        with writing(self.path):
            self.file = self.file or self.beside.open("wb", buffering=2**20)
            self.file.write(data)
        self.sha256.update(data)
        self.tokens += len(ids)

    def copy(self, ids: npt.NDArray[Any]) -> None:
        for start in range(0, len(ids), BLOCK):
            self.add(ids[start : start + BLOCK])

    def finish(self) -> Shard | None:
        if self.file is None:
            return None
        with writing(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())
            os.replace(self.beside, self.path)
        return Shard(self.path.name, self.tokens, self.sha256.hexdigest())

    def drop(self) -> None:
        """Leave nothing half-written behind; after `finish` there is nothing to do."""
        if self.file is not None:
            with suppress(OSError):  # the rest of a full disk's buffer
                self.file.close()
            self.beside.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}",
            fix="make space, or choose a folder that you can write to; finished parts are kept, so run it again",
        ) from error


def cut_tail(folder: Path, shards: Sequence[Shard], share: float, dtype: str) -> Splits:
    """The last `share` of all tokens as validation, for when whole documents could not be shared out.

    A single long text is the usual case: it is one document, and cannot be on both sides.
    """
    total = sum(shard.tokens for shard in shards)
    left = total - min(max(1, round(share * total)), total - 1)
    train: list[Shard] = []
    validation: list[Shard] = []
    for shard in shards:
        head = min(left, shard.tokens)
        left -= head
        for whole, part in zip((train, validation), _split(folder, shard, head, dtype), strict=True):
            whole += [part] if part else []
    return Splits(tuple(train), tuple(validation))


def _split(folder: Path, shard: Shard, head: int, dtype: str) -> tuple[Shard | None, Shard | None]:
    """The first `head` tokens as a train shard, the others as a validation shard."""
    split, _, index = shard.file.removesuffix(".bin").rpartition("-")
    if split == "train" and head == shard.tokens:
        return shard, None
    ids = np.memmap(folder / shard.file, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    train = ShardWriter(folder, "train", int(index), dtype)
    validation = ShardWriter(folder, "validation", int(index), dtype)
    try:
        train.copy(ids[:head])
        validation.copy(ids[head:])
        return train.finish(), validation.finish()
    finally:
        train.drop()
        validation.drop()
