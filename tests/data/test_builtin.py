"""The built-in corpora: sources on this machine, prepared once, by the first process that needs them."""

import multiprocessing
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from completep.data import builtin
from completep.data.builtin import builtin_corpus
from completep.data.sources import library_sources
from completep.errors import UserError
from tests.data.made import verify


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "completep"


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """A library of two files, among files that do not belong to it."""
    root = tmp_path / "lib"
    for name in ("b.py", "a/x.py", "a/tests/t.py", "test/t.py", "idlelib/idle_test/t.py", "site-packages/p.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    for name in ("dist-packages/p.py", "a/__pycache__/x.py", "ensurepip/_bundled/w.py", "c.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    return root


def test_the_sources_are_the_library_alone(small_library):
    assert library_sources("python") == (small_library, [small_library / "a" / "x.py", small_library / "b.py"])


def test_the_real_library():
    root, paths = library_sources("python")
    assert root == Path(sysconfig.get_path("stdlib"))
    assert {root / "json" / "__init__.py", root / "os.py"} <= {*paths}
    assert 5e6 < sum(path.stat().st_size for path in paths) < 3e7
    assert paths == sorted(paths)


def test_torch_is_found_without_importing_it():
    code = (
        "import sys\nfrom completep.data.sources import library_sources\nroot, paths = library_sources('torch')\n"
        "assert 'torch' not in sys.modules\nassert (root / '__init__.py') in paths\n"
        "assert sum(path.stat().st_size for path in paths) > 2e7"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="torch is not installed"):
        library_sources("torch")


def test_a_python_without_sources(small_library, monkeypatch, tmp_path):
    (tmp_path / "nothing").mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"no library sources under .*nothing"):
        library_sources("python")


def test_bytes_of_the_whole_library(cache):
    start = time.process_time()  # other processes do not count
    corpus = builtin_corpus()
    assert time.process_time() - start < 3
    expected = sum(path.stat().st_size + 1 for path in library_sources("python")[1] if path.stat().st_size)
    assert corpus.tokens("train") + corpus.tokens("validation") == expected  # every byte, and an end per document
    assert 1e6 < corpus.tokens("validation") < 0.15 * expected
    assert corpus.folder.parent == cache
    assert corpus.folder.name.startswith("python-3.")


@pytest.mark.slow
def test_made_once(cache, small_library):
    first = builtin_corpus()
    before = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    again = builtin_corpus()
    assert again.sha256 == first.sha256
    assert {path: path.stat().st_mtime_ns for path in again.folder.iterdir()} == before
    other = builtin_corpus("python", "gpt2")
    (small_library / "c.py").write_text("pass")
    third = builtin_corpus()
    assert sorted(path.name for path in cache.iterdir()) == sorted(c.folder.name for c in (first, other, third))
    assert len({first.folder, other.folder, third.folder}) == 3


def test_home_when_no_cache_is_named(tmp_path, monkeypatch, small_library):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert builtin_corpus().folder.parent == tmp_path / ".cache" / "completep"


def make(_):
    return builtin_corpus().sha256


@pytest.mark.slow
def test_several_at_once(cache):
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert len({*pool.map(make, range(3))}) == 1
    assert len([*cache.iterdir()]) == 1  # no private folder is left
    verify(builtin_corpus())


def test_another_process_was_faster(cache, small_library, monkeypatch):
    rename, theirs = os.rename, []

    def late(private, folder):
        if not theirs:
            theirs.append(folder)
            builtin._make(folder, "python", "bytes")
        rename(private, folder)

    monkeypatch.setattr(os, "rename", late)
    corpus = builtin_corpus()
    assert [*cache.iterdir()] == theirs == [corpus.folder]
    verify(corpus)


def test_a_rename_that_fails_for_another_reason_is_an_error(cache, small_library, monkeypatch):
    def fails(private, folder):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(UserError, match=r"cannot write .*: Operation not permitted"):
        builtin_corpus()


def test_a_cache_that_cannot_be_written(monkeypatch, small_library):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no/such/folder")
    with pytest.raises(UserError, match="cannot write to /proc/no/such/folder/completep: ") as error:
        builtin_corpus()
    assert "XDG_CACHE_HOME" in error.value.fix


def test_a_broken_cache_says_what_to_delete(cache, small_library):
    corpus = builtin_corpus()
    os.truncate(corpus.folder / "train-00000.bin", 3)
    with pytest.raises(UserError, match=r"train-00000\.bin has 3 bytes") as error:
        builtin_corpus()
    assert error.value.fix == f"delete {corpus.folder}; it will be made again"
