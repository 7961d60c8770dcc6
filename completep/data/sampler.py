"""Which tokens are in a batch: a pure function of (seed, step), so ranks and restarts change nothing."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from completep.data.corpus import Corpus
from completep.errors import UserError

Indices = npt.NDArray[np.uint64]
Batch = npt.NDArray[np.int64]

ROUNDS = 8  # of the Feistel network; four make it hard to tell from random, eight cost microseconds


class Windows:
    """A split as non-overlapping stretches of `sequence` tokens, each read with the one token after it.

    None straddles two shards. The token after a window is the next window's first, so every token but a shard's
    first is predicted exactly once per epoch, and only a tail shorter than a window is left out.
    """

    def __init__(self, corpus: Corpus, split: str, sequence: int) -> None:
        _at_least_one(sequence=sequence)
        self.sequence = sequence
        shards = [shard.tokens for shard in corpus.shards(split)]
        self.ends = np.cumsum([(tokens - 1) // sequence for tokens in shards], dtype=np.int64)
        self.count = int(self.ends[-1]) if shards else 0
        if not self.count:
            raise UserError(
                f"the {split} split of {corpus.folder} has no stretch of {sequence + 1} tokens "
                f"(sequence {sequence} and the token after): its longest shard has {max(shards, default=0)}",
                fix=f"use a shorter sequence, or prepare more {split} data",
            )
        self.shards = corpus.open(split)

    def read(self, indices: npt.NDArray[Any]) -> Batch:
        out = np.empty((len(indices), self.sequence + 1), dtype=np.int64)
        homes = np.searchsorted(self.ends, indices, side="right")
        for row, index, home in zip(out, indices.tolist(), homes.tolist(), strict=True):
            first = (index - (int(self.ends[home - 1]) if home else 0)) * self.sequence
            row[:] = self.shards[home][first : first + self.sequence + 1]
        return out


class Sampler:
    """Every window once per epoch, in an order of its own for each (seed, epoch); batches may straddle epochs."""

    def __init__(self, corpus: Corpus, split: str, sequence: int, batch: int, seed: int) -> None:
        _at_least_one(batch=batch)
        self.corpus, self.split, self.sequence, self.batch, self.seed = corpus, split, sequence, batch, seed
        self.windows = Windows(corpus, split, sequence)

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another process it maps the shards anew, instead of carrying them along."""
        return Sampler, (self.corpus, self.split, self.sequence, self.batch, self.seed)

    def batch_at(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """This rank's rows of the batch, (batch // world, sequence + 1); the ranks' rows in order are the batch."""
        if self.batch % world if world > 0 else True:
            raise UserError(
                f"a batch of {self.batch} sequences does not divide over {world} ranks",
                fix=f"use a batch like {max(1, round(self.batch / max(1, world))) * max(1, world)}",
            )
        if step < 0 or not 0 <= rank < world:
            raise UserError(f"step {step}, rank {rank} of {world}", fix="count steps and ranks from 0")
        rows = self.batch // world
        return self.windows.read(self.order(step * self.batch + rank * rows, rows))

    def order(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """The windows at places first, first + 1, … of the endless sequence of epochs."""
        windows = self.windows.count
        epochs, places = np.divmod(first + np.arange(count), windows)
        out = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            out[here] = permuted(places[here].astype(np.uint64), windows, f"{self.seed} {epoch}")
        return out


def permuted(places: Indices, size: int, key: str) -> Indices:
    """Where a keyed pseudo-random permutation of range(size) sends each place.

    Written by hand because a shuffled table of 10⁹ windows would take 8 GB on every rank and be made anew at every
    restart; this takes no memory and reaches any place at once. A Feistel network permutes the next power of four;
    results that fall outside range(size) are sent through again until they fall inside (cycle walking), which keeps
    it a permutation (Black and Rogaway 2002, "Ciphers with arbitrary finite domains") and takes under four turns on
    average. Only integer arithmetic and SHAKE, so the order is the same on every machine and under every numpy.
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
    """SplitMix64's finalizer: every bit of the input reaches every bit of the output. Wraps around, as it should."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def validation_batches(corpus: Corpus, sequence: int, batch: int, count: int) -> list[Batch]:
    """The first `count` batches of the validation split, in order: every evaluation sees the same tokens.

    A short split gives fewer batches, and its last one fewer rows.
    """
    _at_least_one(batch=batch, count=count)
    windows = Windows(corpus, "validation", sequence)
    last = min(count * batch, windows.count)
    return [windows.read(np.arange(i, min(i + batch, last))) for i in range(0, last, batch)]


def _at_least_one(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise UserError(f"{name}={value}: must be a whole number of at least 1", fix=f"give a {name}")
