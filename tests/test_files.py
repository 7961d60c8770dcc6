"""Files: written whole or not at all, never overwritten, and locked by one process at a time."""

import subprocess
import sys

import pytest

from completep import files
from completep.errors import UserError
from completep.files import is_locked, lock, write_new

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
