"""Preparing a corpus: exact tokens from every source, restarts that repeat nothing, errors that name the line."""

import gzip
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from completep.data import documents, shards, sources
from completep.data import prepare as module
from completep.data.corpus import load_corpus
from completep.data.prepare import prepare
from completep.errors import UserError
from tests.data.made import contents, verify

STORIES = [f"story {i}: once upon a time there were {i} words.\n" * (1 + i % 5) for i in range(200)]


def write_jsonl(path, rows=STORIES):
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(rows)))
    return str(path)


def all_tokens(corpus, split="train"):
    return np.concatenate([*corpus.open(split), np.zeros(0, np.uint8)]).astype(np.uint8).tobytes()


def documents_of(corpus):
    """The texts of both splits, split at the end id."""
    return sorted(t for s in ("train", "validation") for t in all_tokens(corpus, s).decode().split("\0")[:-1])


@pytest.fixture
def small_units(monkeypatch):
    """Units of about two kilobytes, so that small inputs make many."""
    monkeypatch.setattr(sources, "JSONL_BYTES", 2000)
    monkeypatch.setattr(sources, "TEXT_BYTES", 2000)
    monkeypatch.setattr(sources, "PARQUET_BYTES", 700)


# ---- the tokens


def test_exact_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.md").write_text("é")
    corpus = prepare([str(tmp_path / "b.md"), str(tmp_path / "a.txt")], tmp_path / "out", validation=0)
    assert all_tokens(corpus) == "é\0ab\0".encode()
    assert corpus.manifest.dtype == "uint8"
    assert [*contents(tmp_path / "out")] == ["manifest.json", "train-00000.bin"]
    verify(corpus)


def test_exact_tokens_of_gpt2(tmp_path):
    (tmp_path / "a.txt").write_text("Hello world")
    corpus = prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer="gpt2", validation=0)
    assert corpus.open("train")[0].tolist() == [15496, 995, 50256]
    assert (tmp_path / "out" / "train-00000.bin").read_bytes() == bytes.fromhex("883c e303 50c4")
    assert corpus.manifest.dtype == "uint16"


def test_a_folder_is_walked_in_order(tmp_path):
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c.txt", ".hidden", ".git/x", "b/empty.txt"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if "empty" in name else name)
    corpus = prepare([str(tmp_path / "in")], tmp_path / "out", validation=0)
    assert all_tokens(corpus) == b"a.txt\0b/1.txt\0b/2.txt\0c.txt\0"


@pytest.mark.slow
def test_every_kind_of_source_gives_the_same_documents(tmp_path, small_units):
    texts = [*STORIES, "日本語\n", "half \ud800 a pair"]
    pl.DataFrame({"n": range(201), "text": texts[:201]}).write_parquet(tmp_path / "a.parquet", row_group_size=50)
    write_jsonl(tmp_path / "a.jsonl", texts[:201])
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write((tmp_path / "a.jsonl").read_bytes())
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts[:201]):
        (tmp_path / "texts" / f"{i:03d}.txt").write_text(text)
    made = [
        prepare([str(tmp_path / name)], tmp_path / f"out-{name}", workers=1, validation=0.2)
        for name in ("a.parquet", "a.jsonl", "a.jsonl.gz", "texts")
    ]
    assert [len(c.shards("train")) > 3 for c in made] == [True, True, False, True]
    for split in ("train", "validation"):
        assert len({all_tokens(corpus, split) for corpus in made}) == 1
    assert documents_of(made[0]) == sorted(texts[:201])


def test_half_a_pair_in_json(tmp_path):
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "a\\ud800b"}\n\n  \n{"text": ""}\n{"text": "c"}')
    assert all_tokens(prepare([str(tmp_path / "a.jsonl")], tmp_path / "o", validation=0)) == "a�b\0c\0".encode()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 60, 61, 10**6])
def test_lines_fall_into_exactly_one_piece(tmp_path, monkeypatch, size):
    rows = ["", "x", "y" * 200, "z" * 40, "é" * 30]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr(sources, "JSONL_BYTES", size)
    corpus = prepare([path], tmp_path / "out", workers=1, validation=0)
    assert all_tokens(corpus) == "".join(f"{row}\0" for row in rows if row).encode()


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_a_long_text_in_parts_gives_the_ids_of_the_whole(tmp_path, monkeypatch, tokenizer):
    text = Path(json.__file__).read_text() + "a\n\nb\n  c\nd\r\ne \nf\n日\n\n" * 50
    (tmp_path / "a.txt").write_bytes(text.encode())
    whole = prepare([str(tmp_path / "a.txt")], tmp_path / "whole", tokenizer=tokenizer, validation=0)
    monkeypatch.setattr(documents, "PART_BYTES", 100)
    parts = prepare([str(tmp_path / "a.txt")], tmp_path / "parts", tokenizer=tokenizer, validation=0)
    assert parts.sha256 == whole.sha256
    if tokenizer == "gpt2":  # the negative control: cut at any newline, the ids differ
        monkeypatch.setattr(documents, "SAFE_CUT", re.compile(rb"\n"))
        other = prepare([str(tmp_path / "a.txt")], tmp_path / "other", tokenizer=tokenizer, validation=0)
        assert other.sha256 != whole.sha256


def test_python_is_a_source(tmp_path, monkeypatch):
    (tmp_path / "lib.py").write_text("pass")
    monkeypatch.setattr(sources, "library_sources", lambda name: (tmp_path, [tmp_path / "lib.py"]))
    for name in ("python", "torch"):
        assert all_tokens(prepare([name], tmp_path / name, validation=0)) == b"pass\0"


def test_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x", "text": "y"}\n')
    corpus = prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", text_field="body", validation=0)
    assert all_tokens(corpus) == b"x\0"


# ---- Hugging Face


def fake_datasets():
    """The part of the library that we use: a stream of rows."""

    def load_dataset(path, name=None, *, data_files=None, split, streaming):
        assert streaming
        if not Path(data_files or path).exists():
            raise FileNotFoundError(f"Couldn't find {path}")
        files = [Path(data_files)] if data_files else sorted(Path(path).glob(f"{split}*.jsonl"))
        return (json.loads(line) for file in files for line in file.read_text().splitlines())

    return SimpleNamespace(load_dataset=load_dataset)


@pytest.fixture(params=["fake", *(["real"] if find_spec("datasets") else [])])
def datasets(request, monkeypatch, tmp_path):
    if request.param == "fake":
        monkeypatch.setitem(sys.modules, "datasets", fake_datasets())
    else:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.mark.slow
@pytest.mark.usefixtures("datasets")
def test_a_hugging_face_stream(tmp_path):
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "train.jsonl", ["one", "two"])
    write_jsonl(tmp_path / "in" / "test.jsonl", ["three"])
    folder = f"hf:{tmp_path / 'in'}"
    for source, expected in {
        folder: b"one\0two\0",
        f"{folder}:test": b"three\0",
        f"{folder}/train.jsonl": b"one\0two\0",
    }.items():
        corpus = prepare([source], tmp_path / f"out{len(source)}", validation=0, workers=1)
        assert all_tokens(corpus) == expected
    with pytest.raises(UserError, match=r"in/train\.jsonl row 0 has no field 'body'; it has: id, text"):
        prepare([f"{folder}/train.jsonl"], tmp_path / "o", text_field="body", workers=1)
    with pytest.raises(UserError, match=r"hf:.*nowhere: .*nowhere"):
        prepare([f"hf:{tmp_path}/nowhere"], tmp_path / "p", workers=1)


@pytest.mark.slow
@pytest.mark.usefixtures("datasets")
@pytest.mark.parametrize("source", ["hf:", "hf::train", "hf:a:b:c:d"])
def test_no_data_set_named(tmp_path, source):
    with pytest.raises(UserError, match=f"'{source}' does not name a data set"):
        prepare([source], tmp_path / "o")


def test_names_of_data_sets():
    assert sources.hub_name("hf:owner/name") == ("owner/name", None, "train")
    assert sources.hub_name("hf:owner/name:test") == ("owner/name", None, "test")
    assert sources.hub_name("hf:owner/name:sample:test") == ("owner/name", "sample", "test")


def test_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="needs the package datasets") as error:
        prepare(["hf:x"], tmp_path / "out")
    assert error.value.fix == "pip install 'completep[hf]'"


# ---- validation


def test_documents_are_held_out_by_content(tmp_path, small_units):
    forward = prepare([write_jsonl(tmp_path / "a.jsonl")], tmp_path / "a", validation=0.2, workers=1)
    backward = prepare([write_jsonl(tmp_path / "b.jsonl", STORIES[::-1])], tmp_path / "b", validation=0.2, workers=1)
    held = [set(all_tokens(c, "validation").decode().split("\0")) for c in (forward, backward)]
    assert held[0] == held[1]
    assert 20 <= len(held[0]) <= 60  # of 200, at a share of 0.2: 40 ± 6
    assert documents_of(forward) == documents_of(backward) == sorted(STORIES)
    more = prepare([write_jsonl(tmp_path / "c.jsonl")], tmp_path / "c", validation=0.4, workers=1)
    assert held[0] < set(all_tokens(more, "validation").decode().split("\0"))


def test_a_single_document_gives_its_tail(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 999)
    for share, held in ((0.01, 10), (0.3, 300), (0.0001, 1), (0.9999, 999)):
        corpus = prepare([str(tmp_path / "a.txt")], tmp_path / f"out{share}", validation=share)
        assert (corpus.tokens("train"), corpus.tokens("validation")) == (1000 - held, held)
        assert all_tokens(corpus) + all_tokens(corpus, "validation") == b"x" * 999 + b"\0"
        assert sorted(contents(corpus.folder)) == ["manifest.json", "train-00000.bin", "validation-00000.bin"]
        verify(corpus)


def test_a_tail_over_several_shards(tmp_path, small_units, monkeypatch):
    monkeypatch.setattr(documents.Document, "is_held_out", lambda *_: False)
    whole = prepare([write_jsonl(tmp_path / "a.jsonl")], tmp_path / "whole", validation=0, workers=1)
    monkeypatch.setattr(shards, "BLOCK", 10)
    for everything_held_out in (False, True):
        monkeypatch.setattr(documents.Document, "is_held_out", lambda *_, all_of=everything_held_out: all_of)
        out = tmp_path / f"out{everything_held_out}"
        corpus = prepare([str(tmp_path / "a.jsonl")], out, validation=0.3, workers=1)
        assert all_tokens(corpus) + all_tokens(corpus, "validation") == all_tokens(whole)
        assert corpus.tokens("validation") == round(0.3 * whole.tokens("train"))
        assert len(corpus.shards("validation")) > 2
        assert all(s.file.startswith(split) for split in ("train", "validation") for s in corpus.shards(split))
        listed = {shard.file for split in ("train", "validation") for shard in corpus.shards(split)}
        assert {*contents(out)} == {*listed, "manifest.json"}
        verify(corpus)


def test_no_validation_when_none_is_asked_for(tmp_path):
    assert prepare([write_jsonl(tmp_path / "a.jsonl")], tmp_path / "a", validation=0).tokens("validation") == 0
    assert prepare([str(tmp_path / "a.jsonl")], tmp_path / "b", validation=0.1).tokens("validation") > 0


# ---- restarts, workers


@pytest.mark.slow
def test_workers_change_nothing(tmp_path, small_units):
    path = write_jsonl(tmp_path / "a.jsonl")
    seen = []
    one = prepare([path], tmp_path / "one", workers=1, validation=0.1)
    two = prepare([path], tmp_path / "two", workers=2, validation=0.1, progress=lambda *p: seen.append(p))
    assert contents(one.folder) == contents(two.folder)
    assert len(one.shards("train")) > 5
    count = seen[0][1]
    assert [p[:2] for p in seen] == [(i, count) for i in range(count + 1)]
    assert (seen[0][2], seen[-1][2]) == (0, one.tokens("train") + one.tokens("validation"))
    other = prepare([path], tmp_path / "other", workers=1, validation=0.2)
    assert contents(other.folder) != contents(one.folder)


def crash_at(number):
    """A progress callback that fails once this many units are done."""

    def progress(done, units, tokens):
        if done == number:
            raise KeyboardInterrupt

    return progress


def inodes(folder):
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.bin")}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_restart_goes_on(tmp_path, small_units, workers):
    path = write_jsonl(tmp_path / "a.jsonl")
    undisturbed = prepare([path], tmp_path / "whole", workers=1, validation=0.1)
    out, seen = tmp_path / "out", []
    with pytest.raises(KeyboardInterrupt):
        prepare([path], out, workers=workers, validation=0.1, progress=crash_at(3))
    assert not (out / "manifest.json").exists()
    with pytest.raises(UserError, match="has no manifest"):
        load_corpus(out)
    before = inodes(out)
    assert before
    corpus = prepare([path], out, workers=workers, validation=0.1, progress=lambda *p: seen.append(p))
    assert contents(out) == contents(undisturbed.folder)
    assert before.items() <= inodes(out).items()  # none was written again
    assert seen[0][0] >= 3
    assert corpus.sha256 == undisturbed.sha256


KILLED = """
import os, signal, sys
from completep.data import sources
from completep.data.prepare import prepare
sources.JSONL_BYTES = 2000
def progress(done, units, tokens):
    if done == 4:
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    prepare([sys.argv[1]], sys.argv[2], workers=1, validation=0.1, progress=progress)
"""


def test_a_killed_process_leaves_what_it_finished(tmp_path, small_units):
    path, out = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, path, str(out)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (out / ".train-00004.bin.part").write_bytes(b"half a sha")  # as if it had been writing one
    before = inodes(out)
    prepare([path], out, workers=1, validation=0.1)
    assert len(before) >= 4
    assert before.items() <= inodes(out).items()
    assert contents(out) == contents(prepare([path], tmp_path / "whole", workers=1, validation=0.1).folder)


@pytest.mark.slow
def test_a_killed_worker_is_an_error_and_does_not_hang(tmp_path, small_units):
    path, out = write_jsonl(tmp_path / "a.jsonl", STORIES * 20), tmp_path / "out"

    def kill_the_workers(done, units, tokens):
        for child in multiprocessing.active_children() if done == 1 else []:
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(UserError, match="a worker process was killed") as error:
        prepare([path], out, workers=2, validation=0.1, progress=kill_the_workers)
    assert "run the same command again" in error.value.fix
    assert list(out.glob(".unit-*.json"))
    prepare([path], out, workers=1, validation=0.1)
    assert contents(out) == contents(prepare([path], tmp_path / "whole", workers=1, validation=0.1).folder)


def interrupted(tmp_path, **options):
    path, out = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare([path], out, workers=1, progress=crash_at(3), **{"validation": 0.1} | options)
    return path, out


DAMAGE = {
    "a shard cut short": lambda out: os.truncate(out / "train-00001.bin", 5),
    "a shard gone": lambda out: (out / "train-00001.bin").unlink(),
    "a record that is none": lambda out: (out / ".unit-00001.json").write_text("{"),
    "a record of something else": lambda out: (out / ".unit-00001.json").write_text("[]"),
    "a record of other inputs": lambda out: (out / ".unit-00001.json").write_text(
        json.dumps(json.loads((out / ".unit-00001.json").read_text()) | {"fingerprint": "0"})
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_unit_that_is_not_whole_is_made_again(tmp_path, small_units, damage):
    path, out = interrupted(tmp_path)
    before = inodes(out)
    damage(out)
    prepare([path], out, workers=1, validation=0.1)
    assert contents(out) == contents(prepare([path], tmp_path / "whole", workers=1, validation=0.1).folder)
    after = inodes(out)
    assert after["train-00001.bin"] != before["train-00001.bin"]
    assert after["train-00000.bin"] == before["train-00000.bin"]


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"validation": 0.3}, {"tokenizer": "gpt2"}, {"text_field": "body"}])
def test_units_made_another_way_are_made_again(tmp_path, small_units, change):
    """A corpus that was begun with other settings keeps none of the old shards."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": t, "body": t.upper()}) + "\n" for t in STORIES))
    with pytest.raises(KeyboardInterrupt):
        prepare([str(path)], tmp_path / "out", workers=1, validation=0.1, progress=crash_at(3))
    settings = {"validation": 0.1, "workers": 1} | change
    corpus = prepare([str(path)], tmp_path / "out", **settings)
    assert contents(corpus.folder) == contents(prepare([str(path)], tmp_path / "whole", **settings).folder)


def test_a_changed_input_is_read_again(tmp_path, small_units):
    path, out = interrupted(tmp_path)
    write_jsonl(Path(path), STORIES[::-1])
    prepare([path], out, workers=1, validation=0.1)
    assert contents(out) == contents(prepare([path], tmp_path / "whole", workers=1, validation=0.1).folder)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_crash_while_the_tail_is_cut(tmp_path, small_units, monkeypatch, cut):
    """Whatever file the crash happens at, the next run gives the same corpus."""
    monkeypatch.setattr(documents.Document, "is_held_out", lambda *_: False)
    path = write_jsonl(tmp_path / "a.jsonl")
    whole = prepare([path], tmp_path / "whole", workers=1, validation=0.3)
    finish, calls = shards.ShardWriter.finish, []

    def finish_or_die(writer):
        if calls or (writer.path.name.startswith("validation") and writer.file):
            calls.append(writer)
        if len(calls) == cut:
            raise KeyboardInterrupt
        return finish(writer)

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "finish", finish_or_die)
        with pytest.raises(KeyboardInterrupt):
            prepare([path], tmp_path / "out", workers=1, validation=0.3)
    prepare([path], tmp_path / "out", workers=1, validation=0.3)
    assert contents(tmp_path / "out") == contents(whole.folder)


def test_a_crash_after_the_manifest(tmp_path, small_units, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_tidy", lambda corpus: corpus)
        left = prepare([path], tmp_path / "out", workers=1, validation=0.1)
    assert (left.folder / ".preparing").exists()
    prepare([path], tmp_path / "out", workers=1, validation=0.1)
    assert contents(left.folder) == contents(prepare([path], tmp_path / "whole", workers=1, validation=0.1).folder)


def test_a_finished_corpus_is_returned_at_once_and_never_written_over(tmp_path, monkeypatch):
    path, out = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "out"
    first = prepare([path], out, validation=0.1)
    before = contents(out)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_process", lambda unit: pytest.fail("work was done again"))
        monkeypatch.chdir(tmp_path)
        assert prepare(["a.jsonl"], "out", validation=0.1).sha256 == first.sha256
    for change in ({"validation": 0.2}, {"tokenizer": "gpt2"}):
        with pytest.raises(UserError, match=r"already contains a corpus made from other inputs: .*a\.jsonl"):
            prepare([path], out, **{"validation": 0.1} | change)
    write_jsonl(tmp_path / "a.jsonl", STORIES[1:])
    with pytest.raises(UserError, match="already contains a corpus made from other inputs"):
        prepare([path], out, validation=0.1)
    assert contents(out) == before


def test_two_at_once(tmp_path):
    path, out, errors = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "out", []

    def meanwhile(*_):
        with pytest.raises(UserError, match="another process is preparing") as error:
            prepare([path], out, validation=0.1)
        errors.append(error)

    prepare([path], out, validation=0.1, progress=meanwhile)
    assert errors
    prepare([path], out, validation=0.1)  # afterwards the lock is free


# ---- errors


def refused(tmp_path, name, content, message, **options):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        prepare([str(path)], tmp_path / "out", **options)


BAD_FILES = {
    "empty text": ("a.txt", "", r"a\.txt is empty"),
    "empty jsonl": ("a.jsonl", "", r"a\.jsonl is empty"),
    "no documents": ("a.jsonl", '\n{"text": ""}\n', r"no documents in .*a\.jsonl"),
    "latin1": ("a.txt", "caf\xe9 au lait".encode("latin1"), r"a\.txt is not UTF-8: byte 3 is 0xe9"),
    "latin1 in a line": ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl is not UTF-8: byte 24 is 0xff"),
    "after a mark": ("a.jsonl", b'\xef\xbb\xbf{"text": "\xff"}\n', r"a\.jsonl is not UTF-8: byte 13 is 0xff"),
    "bad line": ("a.jsonl", '{"text": "a"}\n\n{"text": \n', r"a\.jsonl:3 is not JSON: "),
    "deep line": ("a.jsonl", "[" * 10**5 + "\n", r"a\.jsonl:1 is not JSON: "),
    "no object": ("a.jsonl", '{"text": "a"}\n["b"]\n', r"a\.jsonl:2 is not a JSON object"),
    "no field": ("a.jsonl", '{"text": "a"}\n{"x": 1, "y": 2}\n', r"a\.jsonl:2 has no field 'text'; it has: x, y"),
    "no text": ("a.jsonl", '{"text": null}\n', r"a\.jsonl:1: the field 'text' is None, not text"),
    "no gzip": ("a.jsonl.gz", b"hello", r"cannot read .*a\.jsonl\.gz: Not a gzipped file"),
    "half a gzip": ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:40], r"cannot read .*a\.jsonl\.gz"),
    "gzip line": ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n{\n'), r"a\.jsonl\.gz:2 is not JSON"),
    "no parquet": ("a.parquet", b"hello hello hello", r"a\.parquet is not a parquet file"),
}


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_files(tmp_path, name, content, message):
    refused(tmp_path, name, content, message)


@pytest.mark.slow
def test_a_line_number_is_of_the_file_and_not_of_the_piece(tmp_path, small_units):
    rows = "".join(json.dumps({"text": t}) + "\n" for t in STORIES)
    for workers in (1, 2):
        refused(tmp_path, "a.jsonl", rows + "oops\n", r"a\.jsonl:201 is not JSON", workers=workers)
    (tmp_path / "a.jsonl").write_text(rows)  # once it is correct, the same command continues
    assert len(documents_of(prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", workers=1))) >= 200


def test_an_offset_is_of_the_file_and_not_of_the_part(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PART_BYTES", 10)
    refused(tmp_path, "a.txt", b"line\n" * 100 + b"\xff", "is not UTF-8: byte 500 is 0xff")


@pytest.mark.slow
def test_parquet_fields(tmp_path):
    frame = pl.DataFrame({"n": [1, 2], "text": ["a", None]})
    frame.write_parquet(tmp_path / "a.parquet")
    for field, message in {
        "body": r"a\.parquet has no field 'body'\n  fix: set text_field to one of n, text",
        "n": r"the field 'n' is Int64, not text",
        "text": r"a\.parquet row 1: the field 'text' is None, not text",
    }.items():
        with pytest.raises(UserError, match=message):
            prepare([str(tmp_path / "a.parquet")], tmp_path / "out", text_field=field)
    frame.head(1).write_parquet(tmp_path / "b.parquet")
    assert all_tokens(prepare([str(tmp_path / "b.parquet")], tmp_path / "b", validation=0)) == b"a\0"


def test_no_such_source(tmp_path):
    with pytest.raises(UserError, match="no file or folder 'nowhere'"):
        prepare(["nowhere"], tmp_path / "out")
    with pytest.raises(UserError, match="no sources"):
        prepare([], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no documents in .*empty"):
        prepare([str(tmp_path / "empty")], tmp_path / "out")
    assert not (tmp_path / "out").exists()  # nothing was begun


@pytest.mark.parametrize("options", [{"validation": 1}, {"validation": -0.1}, {"workers": 0}])
def test_options_out_of_range(tmp_path, options):
    with pytest.raises(UserError, match=f"{next(iter(options))}={next(iter(options.values()))}"):
        prepare([write_jsonl(tmp_path / "a.jsonl")], tmp_path / "out", **options)


@pytest.mark.parametrize("out", ["/proc/no/such/folder", "a.jsonl", "a.jsonl/below"])
def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"cannot write .*{out}: ") as error:
        prepare([write_jsonl(tmp_path / "a.jsonl")], out)
    assert "a folder that you can write to" in error.value.fix


def test_a_folder_with_other_things_in_it(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train-00000.bin").write_bytes(b"precious")
    with pytest.raises(UserError, match="out is not empty, and contains no corpus"):
        prepare([write_jsonl(tmp_path / "a.jsonl")], tmp_path / "out")
    assert contents(tmp_path / "out") == {"train-00000.bin": b"precious"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk(tmp_path, monkeypatch):
    """The temporary file is a device that has no space."""
    path, out = write_jsonl(tmp_path / "a.jsonl"), tmp_path / "out"
    monkeypatch.setattr(shards, "create", lambda part, buffering: os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb"))
    with pytest.raises(UserError, match=r"cannot write .*train-00000\.bin: No space left on device"):
        prepare([path], out, validation=0.1)
    monkeypatch.undo()
    assert documents_of(prepare([path], out, validation=0.1)) == sorted(STORIES)  # after making space
