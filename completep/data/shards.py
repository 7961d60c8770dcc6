"""Writing shards: hashed while they are written, under a temporary name until they are complete."""

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
from completep.files import create

BLOCK = 2**22  # tokens copied at a time


class ShardWriter:
    """Writes `split-00012.bin`, which is complete once it exists. Without tokens no file is written."""

    def __init__(self, folder: Path, split: str, index: int, dtype: str) -> None:
        self.path = folder / f"{split}-{index:05d}.bin"
        self.part = self.path.with_name(f".{self.path.name}.part")
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.sha256, self.tokens = hashlib.sha256(), 0
        self.file: IO[bytes] | None = None

    def add(self, ids: npt.NDArray[Any]) -> None:
        data = ids.astype(self.dtype, copy=False).tobytes()
        with writing(self.path):
            self.file = self.file or create(self.part, buffering=2**20)
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
            os.replace(self.part, self.path)
        return Shard(self.path.name, self.tokens, self.sha256.hexdigest())

    def drop(self) -> None:
        """Remove an unfinished file. After `finish` there is nothing to remove."""
        if self.file is not None:
            with suppress(OSError):  # on a full disk the buffer cannot be written
                self.file.close()
            self.part.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the errors of the file system into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}",
            fix="make space, or choose a folder that you can write to; then run it again: finished parts are kept",
        ) from error


def cut_tail(folder: Path, shards: Sequence[Shard], share: float, dtype: str) -> Splits:
    """Make the last `share` of all tokens the validation split, where whole documents left one split empty.

    The usual case is a single long text: it is one document, so it cannot be in both splits.
    """
    total = sum(shard.tokens for shard in shards)
    remaining = total - min(max(1, round(share * total)), total - 1)  # training tokens
    train: list[Shard] = []
    validation: list[Shard] = []
    for shard in shards:
        head = min(remaining, shard.tokens)
        remaining -= head
        for split, part in zip((train, validation), _split(folder, shard, head, dtype), strict=True):
            split += [part] if part else []
    return Splits(tuple(train), tuple(validation))


def _split(folder: Path, shard: Shard, head: int, dtype: str) -> tuple[Shard | None, Shard | None]:
    """The first `head` tokens become a training shard, the rest a validation shard."""
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
