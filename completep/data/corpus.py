"""A corpus on disk: a manifest, and shards of raw little-endian token ids that are memory-mapped."""

import hashlib
import json
import os
import re
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from completep.config import parse_json, structure
from completep.data.tokenizer import DTYPES, Tokenizer, load_tokenizer
from completep.errors import UserError, some
from completep.files import cache_folder, lock, open_regular, read_bytes, read_text, write_over

FORMAT = 1
MANIFEST = "manifest.json"
BLOCK = 2**24  # bytes read at a time to verify a shard; a multiple of every id's size
AGAIN = "prepare the corpus again with `completep prepare`, into another folder"


def _shown(number: int) -> str:
    """A number of a manifest, for an error message. It may have thousands of digits."""
    return str(number) if abs(number) < 2**63 else "far too many"


@dataclass(frozen=True)
class Shard:
    file: str
    tokens: int
    sha256: str

    def __post_init__(self) -> None:
        if not 0 <= self.tokens < 2**63:
            raise UserError(f"{self.file:.80}: {_shown(self.tokens)} tokens", fix=AGAIN)


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a corpus, as stored in the manifest."""

    name: str
    vocabulary: int
    end: int
    fingerprint: str


@dataclass(frozen=True)
class Splits:
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    format: int
    tokenizer: Vocabulary
    dtype: str
    splits: Splits
    source: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True)
class Corpus:
    folder: Path
    manifest: Manifest

    @property
    def sha256(self) -> str:
        """A hash of the tokens and the tokenizer, so the same corpus made elsewhere has the same hash.

        The name of the source and the path of the tokenizer are labels and are left out.
        """
        content = asdict(self.manifest)
        del content["source"], content["tokenizer"]["name"]
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def vocabulary(self) -> int:
        return self.manifest.tokenizer.vocabulary

    @property
    def end(self) -> int:
        return self.manifest.tokenizer.end

    def shards(self, split: str) -> tuple[Shard, ...]:
        if split not in ("train", "validation"):
            raise UserError(f"there is no split {split!r}", fix="use train or validation")
        return self.manifest.splits.train if split == "train" else self.manifest.splits.validation

    def tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self.shards(split))

    def open(self, split: str) -> list[npt.NDArray[Any]]:
        """The shards of a split, memory-mapped."""
        return [
            np.memmap(self.folder / shard.file, dtype=self._dtype, mode="r", shape=(shard.tokens,))
            for shard in self.shards(split)
        ]

    def verify(self) -> None:
        """Read every shard, and compare it with its hash and the vocabulary."""
        for shard in self._all_shards():
            self._verify(shard)

    def verify_once(self) -> None:
        """`verify`, once per corpus and machine. Later calls only compare sizes and modification times."""
        place = hashlib.sha256(os.path.realpath(self.folder).encode(errors="surrogateescape")).hexdigest()[:16]
        path = _stamp_file(f"{place}-{self.sha256[:16]}.json")
        if path is None:
            self.verify()
        elif _read_stamps(path) != self._stamps():
            with ExitStack() as stack:
                with suppress(UserError):  # a cache that cannot be written
                    stack.enter_context(lock(path.with_suffix(".lock"), wait=True))  # of several runs, one reads
                if _read_stamps(path) != (before := self._stamps()):
                    self.verify()
                    with suppress(UserError):
                        write_over(path, json.dumps(before))

    def _verify(self, shard: Shard) -> None:
        path, hashed = self.folder / shard.file, hashlib.sha256()
        largest = 0
        try:
            with open_regular(path) as file:
                while block := file.read(BLOCK):
                    hashed.update(block)
                    largest = max(largest, int(np.frombuffer(block, self._dtype).max()))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the shard {path}: {error}", fix=AGAIN) from error
        if hashed.hexdigest() != shard.sha256:
            raise UserError(f"the shard {path} is damaged: it does not match its hash in {MANIFEST}", fix=AGAIN)
        if largest >= self.vocabulary:
            what = f"the shard {path} has the token id {largest}, past its vocabulary of {self.vocabulary}"
            raise UserError(what, fix=AGAIN)

    def _stamps(self) -> dict[str, list[object]]:
        stamps: dict[str, list[object]] = {}
        for shard in self._all_shards():
            status = (self.folder / shard.file).stat()
            stamps[shard.file] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, shard.sha256]
        return stamps

    def _all_shards(self) -> tuple[Shard, ...]:
        return (*self.manifest.splits.train, *self.manifest.splits.validation)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(self.manifest.dtype).newbyteorder("<")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the corpus. Another one under the same name is refused."""
        loaded = load_tokenizer(self.manifest.tokenizer.name)
        if loaded.fingerprint != self.manifest.tokenizer.fingerprint:
            raise UserError(
                f"{loaded.name} is not the tokenizer that made {self.folder}: its fingerprint is {loaded.fingerprint}",
                fix=f"restore the tokenizer with the fingerprint {self.manifest.tokenizer.fingerprint}",
            )
        return loaded


def _stamp_file(name: str) -> Path | None:
    """Where the stamp of a corpus is kept; None if there is no place for it."""
    try:
        folder = cache_folder() / "verified"
        folder.mkdir(parents=True, exist_ok=True)
    except (UserError, OSError):
        return None
    return folder / name


def _read_stamps(path: Path) -> object:
    try:
        return json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return None


def load_corpus(folder: "str | Path") -> Corpus:
    """Open a corpus, after checking everything that can be checked without reading the shards."""
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(
            f"{folder} has no {MANIFEST}, so it is not a finished corpus",
            fix="make one with `completep prepare`; if it was interrupted, run the same command again",
        )
    manifest = _manifest(read_text(path), path)
    _check_vocabulary(manifest, path)
    _check_names(manifest, path)
    _check_sizes(manifest, folder)
    return Corpus(folder, manifest)


def _manifest(text: str, path: Path) -> Manifest:
    content = parse_json(text, str(path), AGAIN)
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT or isinstance(version, bool):
        raise UserError(f"{path} has format {version!r:.40}; this completep reads format {FORMAT}", fix=AGAIN)
    return structure(content, Manifest, str(path), AGAIN)


def _check_vocabulary(manifest: Manifest, path: Path) -> None:
    size, end = manifest.tokenizer.vocabulary, manifest.tokenizer.end
    if manifest.dtype not in DTYPES:
        raise UserError(f"{path}: dtype {manifest.dtype!r}, not one of {', '.join(DTYPES)}", fix=AGAIN)
    if not 1 <= size <= DTYPES[manifest.dtype]:
        raise UserError(f"{path}: a vocabulary of {_shown(size)} does not fit into {manifest.dtype}", fix=AGAIN)
    if not 0 <= end < size:
        raise UserError(f"{path}: the end id {_shown(end)} lies outside the vocabulary of {size}", fix=AGAIN)


def _check_names(manifest: Manifest, path: Path) -> None:
    """A manifest may list only files of its own folder, each once: it may come from somebody else."""
    shards = (*manifest.splits.train, *manifest.splits.validation)
    if not manifest.splits.train:
        raise UserError(f"{path}: the train split is empty", fix=AGAIN)
    for shard in shards:
        if not re.fullmatch(r"(?!\.\.?$)[\w.-]+", shard.file):
            what = f"{path}: {shard.file!r} is not a plain file name"
            raise UserError(what, fix="move the shard into the folder of the manifest, and give its name alone")
        if shard.tokens < 1 or not re.fullmatch(r"[0-9a-f]{64}", shard.sha256):
            raise UserError(f"{path}: {shard.file} has {shard.tokens} tokens, sha256 {shard.sha256!r}", fix=AGAIN)
    names = [shard.file for shard in shards]
    if len(set(names)) < len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise UserError(f"{path} lists shards more than once: {some(repeated)}", fix=AGAIN)


def _check_sizes(manifest: Manifest, folder: Path) -> None:
    itemsize = np.dtype(manifest.dtype).itemsize
    for shard in (*manifest.splits.train, *manifest.splits.validation):
        path, expected = folder / shard.file, shard.tokens * itemsize
        if not path.is_file():
            raise UserError(f"the shard {path} is missing", fix=AGAIN)
        if path.stat().st_size != expected:
            what = f"the shard {path} has {path.stat().st_size} bytes; its {shard.tokens} tokens take {expected}"
            raise UserError(what, fix=AGAIN)
