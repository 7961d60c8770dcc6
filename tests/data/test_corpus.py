"""The format on disk: it is read back exactly, and damaged or foreign files are refused."""

import json
import os

import numpy as np
import pytest

from completep.data.corpus import load_corpus
from completep.errors import UserError
from tests.data.made import manifest_of, verify, write_corpus


@pytest.fixture
def folder(tmp_path):
    return write_corpus(tmp_path / "corpus", [[1, 2, 3], [4, 5]], [[6, 7]])


def changed(folder, change):
    """Change fields of the manifest; the value None removes a field."""
    content = json.loads((folder / "manifest.json").read_text())
    for path, value in change.items():
        *parents, last = path.split(".")
        place = content
        for part in parents:
            place = place[int(part) if part.isdigit() else part]
        if value is None:
            del place[last]
        else:
            place[int(last) if last.isdigit() else last] = value
    (folder / "manifest.json").write_text(json.dumps(content))


def test_it_is_read_back(folder):
    corpus = load_corpus(str(folder))
    assert [ids.tolist() for ids in corpus.open("train")] == [[1, 2, 3], [4, 5]]
    assert (corpus.tokens("train"), corpus.tokens("validation"), corpus.vocabulary, corpus.end) == (5, 2, 256, 0)
    assert all(isinstance(ids, np.memmap) and not ids.flags.writeable for ids in corpus.open("train"))
    verify(corpus)
    with pytest.raises(UserError, match="no split 'test'"):
        corpus.tokens("test")


@pytest.mark.parametrize(("dtype", "big"), [("uint16", 50256), ("uint32", 99999)])
def test_little_endian_types(tmp_path, dtype, big):
    corpus = load_corpus(write_corpus(tmp_path / "c", [[1, big]], vocabulary=big + 1, dtype=dtype))
    raw = (corpus.folder / "train-00000.bin").read_bytes()
    assert raw == b"".join(n.to_bytes(np.dtype(dtype).itemsize, "little") for n in (1, big))
    assert corpus.open("train")[0].tolist() == [1, big]
    verify(corpus)


REFUSED = {
    "another version": ({"format": 2}, "format 2; this completep reads format 1"),
    "no version": ({"format": None}, "format None"),
    "true is not 1": ({"format": True}, "format True"),
    "missing": ({"source": None}, "source"),
    "missing split": ({"splits.validation": None}, "validation"),
    "missing hash": ({"splits.train.0.sha256": None}, "sha256"),
    "unknown": ({"colour": "red"}, "colour"),
    "unknown, deeper": ({"tokenizer.colour": "red"}, "colour"),
    "ill-typed": ({"splits.train.0.tokens": "3"}, "'3' is not of type int"),
    "negative": ({"splits.train.0.tokens": -3}, "-3 tokens"),
    "ill-typed string": ({"source": 3}, "3 is not of type str"),
    "dtype": ({"dtype": "float32"}, "dtype 'float32'"),
    "vocabulary": ({"tokenizer.vocabulary": 257}, "a vocabulary of 257 does not fit into uint8"),
    "end": ({"tokenizer.end": 256}, "end id 256 lies outside the vocabulary of 256"),
    "escape": ({"splits.train.0.file": "../train-00000.bin"}, r"'\.\./train-00000\.bin' is not a plain file name"),
    "absolute": ({"splits.train.0.file": "/etc/passwd"}, "'/etc/passwd' is not a plain"),
    "backslash": ({"splits.train.0.file": "..\\x"}, "is not a plain"),
    "the folder": ({"splits.train.0.file": ".."}, "is not a plain"),
    "no name": ({"splits.train.0.file": ""}, "is not a plain"),
    "empty train": ({"splits.train": []}, "the train split is empty"),
    "empty shard": ({"splits.train.0.tokens": 0}, "train-00000.bin has 0 tokens"),
    "no hash": ({"splits.train.0.sha256": "abc"}, "sha256 'abc'"),
    "twice": ({"splits.train.1.file": "train-00000.bin"}, "more than once: train-00000.bin"),
    "gone": ({"splits.train.0.file": "train-00009.bin"}, "train-00009.bin is missing"),
    "size": ({"splits.train.0.tokens": 4}, "train-00000.bin has 3 bytes; its 4 tokens take 4"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(folder, change, message):
    load_corpus(folder)  # unchanged, it can be read
    changed(folder, change)
    with pytest.raises(UserError, match=message):
        load_corpus(folder)


def test_an_empty_validation_split_is_allowed(folder):
    changed(folder, {"splits.validation": []})
    assert load_corpus(folder).tokens("validation") == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_manifest_that_is_none(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json"):
        load_corpus(folder)


def test_no_manifest(tmp_path):
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        load_corpus(tmp_path)


def test_a_truncated_shard_is_found(folder):
    os.truncate(folder / "train-00001.bin", 1)
    with pytest.raises(UserError, match=r"train-00001\.bin has 1 bytes; its 2 tokens take 2"):
        load_corpus(folder)


def test_the_helper_finds_changed_shards_and_wrong_ids(folder, tmp_path):
    """The negative control for `verify`, which other tests use."""
    verify(load_corpus(folder))
    (folder / "validation-00000.bin").write_bytes(b"\x06\x08")
    with pytest.raises(AssertionError):
        verify(load_corpus(folder))
    with pytest.raises(AssertionError):
        verify(load_corpus(write_corpus(tmp_path / "c", [[1, 9]], vocabulary=9)))


def test_sha256_is_of_the_content(folder, tmp_path):
    name = load_corpus(folder).sha256
    assert load_corpus(write_corpus(tmp_path / "elsewhere", [[1, 2, 3], [4, 5]], [[6, 7]])).sha256 == name
    changed(folder, {"source": "another name for it", "tokenizer.name": "/moved/tokenizer.json"})
    assert load_corpus(folder).sha256 == name
    others = [
        write_corpus(tmp_path / "a", [[1, 2, 4], [4, 5]], [[6, 7]]),
        write_corpus(tmp_path / "b", [[1, 2, 3], [4, 5]], [[6, 8]]),
        write_corpus(tmp_path / "c", [[4, 5], [1, 2, 3]], [[6, 7]]),
        write_corpus(tmp_path / "d", [[1, 2, 3], [4, 5]], [[6, 7]], vocabulary=255),
    ]
    changed(folder, {"tokenizer.fingerprint": "0" * 64})
    assert len({name, *(load_corpus(other).sha256 for other in (*others, folder))}) == 6


def test_its_tokenizer(folder):
    from completep.data.tokenizer import load_tokenizer

    with pytest.raises(UserError, match="bytes is not the tokenizer that made"):
        load_corpus(folder).tokenizer()
    changed(folder, {"tokenizer.fingerprint": load_tokenizer("bytes").fingerprint})
    assert load_corpus(folder).tokenizer().name == "bytes"


def test_the_helper_writes_what_the_format_says(tmp_path):
    assert set(manifest_of(tmp_path, [[1]])) == {"format", "tokenizer", "dtype", "splits", "source"}
