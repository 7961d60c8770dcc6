"""The tokens of a batch are a function of (seed, step) alone, so the number of ranks and restarts do not matter."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from completep.config import whole
from completep.data.corpus import Corpus
from completep.errors import UserError

Indices = npt.NDArray[np.uint64]
Batch = npt.NDArray[np.int64]

ROUNDS = 8  # of the Feistel network; four already look random, and eight cost microseconds


class Windows:
    """A split, cut into non-overlapping windows of `sequence` tokens. Each is read with the token after it, its target.

    No window spans two shards. The token after a window is the first token of the next one, so in an epoch every token
    is predicted exactly once, except the first token of a shard and a tail shorter than a window.
    """

    def __init__(self, corpus: Corpus, split: str, sequence: int) -> None:
        whole("sequence", sequence)
        self.sequence = sequence
        sizes = [shard.tokens for shard in corpus.shards(split)]
        self.ends = np.cumsum([(tokens - 1) // sequence for tokens in sizes], dtype=np.int64)
        self.count = int(self.ends[-1]) if sizes else 0
        if not self.count:
            raise UserError(
                f"the {split} split of {corpus.folder} has no {sequence + 1} tokens in a row "
                f"(sequence={sequence} and the token after it): its longest shard has {max(sizes, default=0)}",
                fix=f"use a shorter sequence, or prepare more {split} data",
            )
        self.shards = corpus.open(split)

    def read(self, indices: npt.NDArray[Any]) -> Batch:
        batch = np.empty((len(indices), self.sequence + 1), dtype=np.int64)
        shards = np.searchsorted(self.ends, indices, side="right")
        for row, index, shard in zip(batch, indices.tolist(), shards.tolist(), strict=True):
            first = (index - (int(self.ends[shard - 1]) if shard else 0)) * self.sequence
            row[:] = self.shards[shard][first : first + self.sequence + 1]
        return batch


class Sampler:
    """Every window once per epoch, in a different order for each (seed, epoch). A batch may span two epochs."""

    def __init__(self, corpus: Corpus, split: str, sequence: int, batch: int, seed: int) -> None:
        whole("batch", batch)
        self.corpus, self.split, self.sequence, self.batch, self.seed = corpus, split, sequence, batch, seed
        self.windows = Windows(corpus, split, sequence)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without the data: the process that receives it maps the shards again."""
        return Sampler, (self.corpus, self.split, self.sequence, self.batch, self.seed)

    def batch_at(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """The rows of one rank, (batch // world, sequence + 1). The rows of all ranks in order are the batch."""
        if world < 1 or self.batch % world:
            raise UserError(
                f"a batch of {self.batch} sequences does not divide over {world} ranks",
                fix=f"use a batch like {max(1, round(self.batch / max(1, world))) * max(1, world)}",
            )
        if step < 0 or not 0 <= rank < world:
            raise UserError(f"step {step}, rank {rank} of {world}", fix="count steps and ranks from 0")
        rows = self.batch // world
        return self.windows.read(self.order(step * self.batch + rank * rows, rows))

    def order(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """The windows at places first, first + 1, … when the epochs are written one after the other."""
        windows = self.windows.count
        epochs, places = np.divmod(first + np.arange(count), windows)
        order = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            order[here] = permuted(places[here].astype(np.uint64), windows, f"{self.seed} {epoch}")
        return order


def permuted(places: Indices, size: int, key: str) -> Indices:
    """The images of `places` under a keyed pseudo-random permutation of range(size).

    Written by hand because a shuffled table of 10⁹ windows takes 8 GB per rank and must be made again at every restart.
    This needs no memory and computes any place directly. A Feistel network permutes the next power of four. A result
    outside range(size) is permuted again until it is inside (cycle walking), which gives a permutation of range(size)
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains") and takes fewer than four passes on average.
    It uses only integer arithmetic and SHAKE, so the order is the same on every machine and with every numpy version.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.frombuffer(hashlib.shake_128(f"completep order {key}".encode()).digest(8 * ROUNDS), dtype="<u8")
    out = _feistel(places, half, keys)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = _feistel(out[outside], half, keys)
        outside = outside[out[outside] >= size]
    return out


def _feistel(values: Indices, half: int, keys: npt.NDArray[Any]) -> Indices:
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> bits, values & mask
    for i in range(len(keys)):
        left, right = right, left ^ (_mixed(right + keys[i : i + 1]) & mask)
    return (left << bits) | right


def _mixed(x: Indices) -> Indices:
    """The finalizer of SplitMix64: every input bit affects every output bit. Overflow wraps around, as intended."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def validation_batches(corpus: Corpus, sequence: int, batch: int, tokens: int) -> list[Batch]:
    """About `tokens` tokens of the validation split, in windows at equal distances over the whole split.

    They do not depend on the batch, so runs with different batches are scored on the same tokens. A short split is used
    whole. The last batch may have fewer rows.
    """
    whole("batch", batch)
    whole("tokens", tokens)
    windows = Windows(corpus, "validation", sequence)
    rows = min(-(-tokens // sequence), windows.count)
    chosen = np.arange(rows) * windows.count // rows
    return [windows.read(chosen[i : i + batch]) for i in range(0, rows, batch)]
