"""Corpora for the tests, written and checked without the code under test."""

import hashlib
import json
from pathlib import Path

import numpy as np

NO_SUCH_FINGERPRINT = "f" * 64


def manifest_of(folder: Path, train, validation=(), *, vocabulary=256, dtype="uint8") -> dict:
    """Write the shards; return the manifest that fits them."""
    folder.mkdir(parents=True, exist_ok=True)
    splits: dict = {"train": [], "validation": []}
    for split, shards in (("train", train), ("validation", validation)):
        for i, ids in enumerate(shards):
            data = np.asarray(ids, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()
            name = f"{split}-{i:05d}.bin"
            (folder / name).write_bytes(data)
            splits[split].append({"file": name, "tokens": len(ids), "sha256": hashlib.sha256(data).hexdigest()})
    tokenizer = {"name": "bytes", "vocabulary": vocabulary, "end": 0, "fingerprint": NO_SUCH_FINGERPRINT}
    return {"format": 1, "tokenizer": tokenizer, "dtype": dtype, "splits": splits, "source": "made up"}


def write_corpus(folder: Path, train, validation=(), **options) -> Path:
    (folder / "manifest.json").write_text(json.dumps(manifest_of(folder, train, validation, **options)))
    return folder


def verify(corpus) -> None:
    """Every shard has the hash in the manifest, and contains only ids of the vocabulary."""
    for split in ("train", "validation"):
        for shard, ids in zip(corpus.shards(split), corpus.open(split), strict=True):
            assert hashlib.sha256((corpus.folder / shard.file).read_bytes()).hexdigest() == shard.sha256
            assert int(ids.max()) < corpus.vocabulary


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
