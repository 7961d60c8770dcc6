"""Files: written whole or not at all, never overwritten, and locked by one process at a time."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from completep import files
from completep.config import sealed, unsealed
from completep.errors import UserError
from completep.files import (
    append,
    fresh_folder,
    is_locked,
    lock,
    make_folder,
    read_bytes,
    read_text,
    remove_folder,
    sha256_of,
    write_new,
    write_over,
)  # fmt: skip
from tests.hostile import PLANTED, plant, within

HOLD = """
import sys
from pathlib import Path
from completep.files import lock
with lock(Path(sys.argv[1])) as held:
    print(held is not None, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds the lock; it has the lock once the fixture is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "True\n"
    yield process
    process.kill()
    process.communicate()


def test_a_lock_is_held_by_one_process(tmp_path, other):
    path = tmp_path / "lock"
    assert is_locked(path)
    with lock(path) as held:
        assert held is None
    other.communicate("")  # it ends, and with it its lock
    assert not is_locked(path)
    with lock(path) as held:
        assert isinstance(held, int)
        assert is_locked(path)
    assert not is_locked(path)


def test_a_killed_process_holds_nothing(tmp_path, other):
    other.kill()
    other.wait()
    with lock(tmp_path / "lock") as held:
        assert held is not None


def test_a_child_that_inherits_the_descriptor_holds_the_lock(tmp_path):
    path = tmp_path / "lock"
    with lock(path) as held:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[held])
    assert is_locked(path)
    child.communicate(b"\n")
    assert not is_locked(path)


def test_no_file_is_no_lock(tmp_path):
    assert not is_locked(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_planted_link_is_neither_followed_nor_emptied(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(UserError, match=r"cannot write .*lock"), lock(tmp_path / "lock"):
        pass
    assert not is_locked(tmp_path / "lock")
    for write in (write_new, write_over):
        (tmp_path / f".a.txt.{threading.get_native_id()}.part").symlink_to(victim)
        write(tmp_path / "a.txt", "new")
    (tmp_path / "b.txt").symlink_to(victim)
    with pytest.raises(UserError, match="exists already"):
        write_new(tmp_path / "b.txt", "new")
    with pytest.raises(OSError, match="symbolic"):
        append(tmp_path / "b.txt")
    assert victim.read_text() == "precious"
    assert write_over(tmp_path / "b.txt", "new").read_text() == "new"  # the link itself is replaced
    assert victim.read_text() == "precious"


def test_a_lock_is_never_written_to(tmp_path):
    (tmp_path / "lock").write_text("mine")
    with lock(tmp_path / "lock") as held:
        assert held is not None
    assert (tmp_path / "lock").read_text() == "mine"


def test_a_lock_that_is_a_folder_or_a_pipe(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*folder: Is a directory"), lock(tmp_path / "folder"):
        pass
    os.mkfifo(tmp_path / "pipe")
    assert not is_locked(tmp_path / "pipe")  # and does not wait for a writer


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    for make in (make_folder, lambda path: write_new(path / "a", ""), lambda path: fresh_folder(path, "x")):
        with pytest.raises(UserError, match=r"file is a file, not a folder|cannot create .*: Not a directory"):
            make(tmp_path / "file")


def test_names_that_are_not_utf8_can_stand_in_a_file(tmp_path):
    assert write_new(tmp_path / "a", "name \udcff").read_text() == "name \\udcff"


def test_a_seal_shows_every_flipped_bit():
    """Every single bit: an error, or the same content."""
    content = {"step": 50, "loss": 0.1, "files": {"a": "é"}}
    text = sealed(content).encode()
    assert unsealed(text) == content
    for place in range(len(text)):
        for bit in range(8):
            changed = bytearray(text)
            changed[place] ^= 1 << bit
            try:
                assert unsealed(bytes(changed), or_plain=True) == content
            except ValueError:
                continue


def test_plain_json_is_taken_only_where_it_may_be():
    assert unsealed('{"a": 1}', or_plain=True) == {"a": 1}
    for text in ('{"a": 1}', "[]", "[" * 10**5):
        with pytest.raises(ValueError, match=r"digest|object|nested"):
            unsealed(text)


def test_a_lock_in_no_folder(tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*lock: No such file"), lock(tmp_path / "nowhere" / "lock"):
        pass


def test_without_fcntl_nothing_is_locked(tmp_path, other, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    assert not is_locked(tmp_path / "lock")
    with lock(tmp_path / "lock") as held:
        assert isinstance(held, int)


def test_a_file_is_never_overwritten(tmp_path):
    path = write_new(tmp_path / "new" / "a.txt", "first")
    with pytest.raises(UserError, match=r"a\.txt exists already"):
        write_new(path, "second")
    assert path.read_text() == "first"
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("kind", PLANTED)
def test_only_regular_files_are_read_and_nothing_waits(tmp_path, kind):
    path = tmp_path / "file"
    plant(path, kind)
    for read in (read_bytes, sha256_of):
        with within(), pytest.raises(OSError, match=r"regular file|directory"):
            read(path)
    with within(), pytest.raises(UserError, match="cannot read"):
        read_text(path)


def test_what_should_be_small_is_bounded(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_text(path, most=100) == "x" * 100
    with pytest.raises(UserError, match="more than 99 bytes"):
        read_text(path, most=99)


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    remove_folder(tmp_path / "link")
    assert not (tmp_path / "link").exists()
    assert (tmp_path / "victim" / "file").read_text() == "precious"
    remove_folder(tmp_path / "victim")
    assert not (tmp_path / "victim").exists()


def test_a_sealed_file_of_any_depth_is_an_error_of_input():
    """There are depths that json reads, but cannot write again."""
    for depth in range(1, 1200):
        with pytest.raises(ValueError, match=r"digest|nested"):
            unsealed('{"sealed": true, "digest": "x", "a": ' + "[" * depth + "]" * depth + "}")


def test_threads_of_one_process_write_the_same_file(tmp_path):
    def write(name):
        for i in range(100):
            write_over(tmp_path / "a.txt", f"{name} {i}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))  # raises what a thread raised
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert re.fullmatch(r"\d 99", (tmp_path / "a.txt").read_text())
