"""Sources and corpora from others: bounded memory, no links followed, damage seen, every mistake an error."""

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from completep.cli import main
from completep.data import corpus as module
from completep.data import parquet
from completep.data.builtin import builtin_corpus
from completep.data.corpus import load_corpus
from completep.data.prepare import prepare
from completep.errors import UserError
from tests.data.made import write_corpus


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


# -- documents that are too long -------------------------------------------------------------------------------

LONG = {
    "line": ("a.jsonl", lambda n: json.dumps({"text": "a" * n}) + "\n", "a.jsonl:2 is longer than the limit"),
    "gzip": ("a.jsonl.gz", lambda n: json.dumps({"text": "a" * n}) + "\n", "a.jsonl.gz:2 is longer than the limit"),
    "text": ("a.txt", lambda n: "a" * n, "without a line break to cut at"),
    "parquet": ("a.parquet", lambda n: "a" * n, "row 1 has a document of 3000 bytes, more than the limit of 2000"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "content", "message"), LONG.values(), ids=LONG.keys())
def test_a_document_past_the_limit_is_an_error_and_the_fix_works(name, content, message, tmp_path, capsys):
    path = tmp_path / name
    if name.endswith(".parquet"):
        pl.DataFrame({"text": ["short", content(3000)]}).write_parquet(path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress((content(10) + content(3000)).encode()))
    else:
        path.write_text(content(3000) if name.endswith(".txt") else content(10) + content(3000))
    words = ["prepare", str(path), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main([*words, "--max-document", "2K"]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert main([*words, "--max-document", "4000"]) == 0


def test_a_limit_cuts_long_texts_but_not_their_ids(tmp_path):
    text = "line of text\n" * 2000
    (tmp_path / "a.txt").write_text(text)
    corpora = [
        prepare([str(tmp_path / "a.txt")], tmp_path / f"{most}", workers=1, max_document=most) for most in (100, 10**6)
    ]
    assert corpora[0].sha256 == corpora[1].sha256


MEASURE = """
import resource, sys
from completep.data.prepare import prepare
from completep.errors import UserError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    prepare([sys.argv[1]], sys.argv[2], workers=1, max_document=10_000_000)
except UserError as error:
    print(error.what)
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print((max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, children)) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bomb.jsonl.gz", "bomb.jsonl"])
def test_a_bomb_takes_bounded_memory(name, tmp_path):
    """400 MB in one line, from a file of 400 KB where it is packed."""
    packed = name.endswith(".gz")
    with gzip.open(tmp_path / name, "wb", 1) if packed else (tmp_path / name).open("wb") as file:
        for _ in range(400):
            file.write(b"a" * 10**6)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / name), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    what, megabytes = done.stdout.splitlines()
    assert "is longer than the limit of 10000000 bytes" in what
    assert int(megabytes) < 100


@pytest.mark.slow
def test_a_parquet_bomb_takes_bounded_memory(tmp_path, monkeypatch):
    """400 MB in one column of a small file, for a reader that may take 250 MB."""
    path = tmp_path / "bomb.parquet"
    pl.DataFrame({"text": ["a" * 10**6 + str(i) for i in range(400)]}).write_parquet(path, compression="snappy")
    assert path.stat().st_size < 100 * 10**6
    monkeypatch.setattr(parquet, "memory_budget", lambda most: 250 * 10**6)
    with pytest.raises(UserError, match="of memory to unpack") as caught:
        list(parquet.texts(str(path), "text", 0, 400, 2 * 10**6))
    assert "max_document=4000000" in caught.value.fix
    monkeypatch.undo()
    assert len(list(parquet.texts(str(path), "text", 0, 5, 2 * 10**6))) == 5


@pytest.mark.slow
def test_rows_that_share_one_text_are_not_unpacked_together(tmp_path):
    """A dictionary of one text of 10 MB, and 60 rows that refer to it."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "shared.parquet"
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 60, pa.int32()), pa.array(["a" * 10**7]))
    pq.write_table(pa.table({"text": column}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 10**4
    script = f"""if True:
        import resource
        from completep.data import parquet
        print(sum(len(text) for text in parquet.texts({str(path)!r}, "text", 0, 60, 2 * 10**7)))
        print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1000)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    characters, megabytes = map(int, done.stdout.split())
    assert characters == 60 * 10**7
    assert megabytes < 300
    with pytest.raises(UserError, match="row 0 has a document of 10000000 bytes"):
        list(parquet.texts(str(path), "text", 0, 60, 10**6))


@pytest.mark.slow
def test_parquet_rows_survive_the_pipe(tmp_path):
    rows = ["", "é\0\n", None, "x" * 70_000]
    pl.DataFrame({"text": rows}).write_parquet(tmp_path / "a.parquet")
    assert list(parquet.texts(str(tmp_path / "a.parquet"), "text", 0, 4, 10**6)) == rows
    assert list(parquet.texts(str(tmp_path / "a.parquet"), "text", 1, 3, 10**6)) == rows[1:3]
    many = [None if i % 7 == 3 else f"{i}" * (i % 400) for i in range(9000)]
    pl.DataFrame({"text": many}).write_parquet(tmp_path / "b.parquet")
    assert list(parquet.texts(str(tmp_path / "b.parquet"), "text", 0, 9000, 10**6)) == many


# -- names -----------------------------------------------------------------------------------------------------


def broken(folder):
    (folder / "link.txt").symlink_to(folder / "nowhere")


def loop(folder):
    (folder / "link.txt").symlink_to(folder / "link.txt")


def pipe(folder):
    os.mkfifo(folder / "link.txt")


@pytest.mark.parametrize("make", [broken, loop, pipe])
@pytest.mark.parametrize("inside", [True, False])
def test_what_cannot_be_read_is_named(make, inside, tmp_path, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("hello")
    make(folder)
    source = folder if inside else folder / "link.txt"
    assert main(["prepare", str(source), "--out", str(tmp_path / "out"), "--workers", "1"]) == 2
    assert "link.txt" in capsys.readouterr().err


def test_a_loop_of_folders_is_walked_once(tmp_path):
    folder = tmp_path / "text"
    (folder / "deeper").mkdir(parents=True)
    (folder / "a.txt").write_text("hello world")
    (folder / "deeper" / "back").symlink_to(folder)
    assert prepare([str(folder)], tmp_path / "out", workers=1, validation=0).tokens("train") == 12


def test_a_name_that_is_not_utf8(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt"))
    path.write_text("hello world")
    assert main(["prepare", str(path), "--out", str(tmp_path / "out"), "--workers", "1"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("source", ["x" * 5000, "a\0b", ""])
def test_names_that_no_file_has(source, tmp_path):
    with pytest.raises(UserError):
        prepare([source], tmp_path / "out", workers=1)


def test_a_planted_link_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "a.txt").write_text("hello world")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".preparing").touch()
    (tmp_path / "out" / ".train-00000.bin.part").symlink_to(victim)
    prepare([str(tmp_path / "a.txt")], tmp_path / "out", workers=1)
    assert victim.read_text() == "precious"


# -- shards ----------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus", [range(200), range(50)], [range(60)])


def flip(path, place, bit=0):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def test_every_flipped_bit_of_a_shard_is_seen(corpus):
    dice = random.Random(15)
    load_corpus(corpus).verify_once()
    for _ in range(80):
        path = dice.choice(sorted(corpus.glob("*.bin")))
        place, bit = dice.randrange(path.stat().st_size), dice.randrange(8)
        flip(path, place, bit)
        with pytest.raises(UserError, match=f"{path.name} is damaged"):
            load_corpus(corpus).verify_once()
        flip(path, place, bit)
    load_corpus(corpus).verify_once()


def test_a_corpus_is_read_once(corpus, monkeypatch):
    reads = []
    real = module.Corpus.verify
    monkeypatch.setattr(module.Corpus, "verify", lambda self: reads.append(1) or real(self))
    for _ in range(3):
        load_corpus(corpus).verify_once()
    assert len(reads) == 1
    os.utime(corpus / "train-00000.bin")
    load_corpus(corpus).verify_once()
    assert len(reads) == 2


def test_a_damaged_stamp_costs_only_time(corpus, monkeypatch):
    load_corpus(corpus).verify_once()
    (stamp,) = (module.cache_folder() / "verified").glob("*.json")
    stamp.write_text("[" * 10**5)
    load_corpus(corpus).verify_once()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    load_corpus(corpus).verify_once()


@pytest.mark.parametrize("ending", [".lock", ".json"])
def test_a_cache_that_cannot_be_written_costs_only_time(corpus, ending):
    """As on a disk that is full or read-only: a folder in the place of the lock or of the stamp."""
    load_corpus(corpus).verify_once()
    (stamp,) = (module.cache_folder() / "verified").glob("*.json")
    stamp.unlink()
    stamp.with_suffix(".lock").unlink()
    (stamp.with_suffix(ending) / "full").mkdir(parents=True)
    load_corpus(corpus).verify_once()
    flip(corpus / "train-00000.bin", 7)
    with pytest.raises(UserError, match="is damaged"):  # it was read again
        load_corpus(corpus).verify_once()


def test_a_user_without_a_home_can_use_a_corpus(corpus, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    load_corpus(corpus).verify_once()
    with pytest.raises(UserError, match="no home folder") as caught:
        builtin_corpus()
    assert "XDG_CACHE_HOME" in caught.value.fix


def homeless():
    raise RuntimeError("Could not determine home directory.")


def test_ids_past_the_vocabulary_are_an_error(tmp_path):
    folder = write_corpus(tmp_path / "c", [np.array([5, 99, 100])], [[1, 2]], vocabulary=100)
    with pytest.raises(UserError, match="has the token id 100, past its vocabulary of 100"):
        load_corpus(folder).verify()


def test_prepare_reads_back_what_it_wrote(tmp_path):
    (tmp_path / "a.txt").write_text("hello world, " * 50)
    words = [str(tmp_path / "a.txt")], tmp_path / "out"
    prepare(*words, workers=1)
    flip(tmp_path / "out" / "train-00000.bin", 7)
    with pytest.raises(UserError, match="is damaged"):
        prepare(*words, workers=1)


@pytest.mark.parametrize("text", ["[]", "[" * 10**5, '{"format": 1' + "0" * 5000 + "}", "3", '{"format": 1}'])
def test_a_manifest_that_is_none(text, corpus):
    (corpus / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json"):
        load_corpus(corpus)


@pytest.mark.slow
def test_a_parquet_file_on_which_the_reader_panics(tmp_path, capsys):
    """Two bytes of an ordinary file were changed: polars panics, which is not an Exception in Python."""
    words = ["prepare", str(Path(__file__).parent / "panic.parquet"), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main(words) == 2
    assert "is not a parquet file that can be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"end": 0', '"end": -7'),
        ('"vocabulary": 256', '"vocabulary": 0'),
        ('"vocabulary": 256', f'"vocabulary": {"9" * 4300}'),
        ('"tokens": ', f'"tokens": {"9" * 4290}'),
    ],
    ids=["end", "no ids", "many ids", "many tokens"],
)
def test_absurd_numbers_in_a_manifest_are_short_errors(tmp_path, old, new):
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    prepare([str(tmp_path / "a.txt")], tmp_path / "corpus", workers=1)
    path = tmp_path / "corpus" / "manifest.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        load_corpus(tmp_path / "corpus")
    assert len(caught.value.what) < 400
