"""`file.py:factory`: the file is executed once per process, its classes stay the same, and a change is noticed."""

import json
import pickle
import sys

import pytest

from completep.errors import UserError
from completep.load import load_factory, parse_arguments

COUNTED = """
import pathlib
log = pathlib.Path(__file__).with_suffix(".log")
log.write_text(log.read_text() + "x" if log.exists() else "x")

class Model:
    size = {size}

def make():
    return Model()
"""


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    """Undo what loading does to the interpreter."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path, size=1):
    path.write_text(COUNTED.format(size=size))
    return path


def executions(path):
    return len(path.with_suffix(".log").read_text())


def test_a_file_is_executed_once(tmp_path, monkeypatch):
    path = write(tmp_path / "counted_once.py")
    monkeypatch.chdir(tmp_path)
    classes = {load_factory(f"{place}:Model") for place in (path, "counted_once.py", "./counted_once.py") * 20}
    assert len(classes) == 1
    assert isinstance(load_factory(f"{path}:make")(), classes.pop())
    assert executions(path) == 1


def test_a_changed_file_is_executed_again(tmp_path):
    """Also a change that keeps the size of the file, within one second."""
    path = write(tmp_path / "counted_change.py", size=1)
    old = load_factory(f"{path}:Model")
    write(path, size=2)
    new = load_factory(f"{path}:Model")
    assert (old.size, new.size, executions(path)) == (1, 2, 2)
    assert type(pickle.loads(pickle.dumps(new()))) is new
    assert load_factory(f"{path}:Model") is new


def test_classes_can_be_pickled(tmp_path):
    made = load_factory(f"{write(tmp_path / 'counted_pickle.py')}:make")()
    assert type(made).__module__ == "counted_pickle"
    assert type(pickle.loads(pickle.dumps(made))) is type(made)


@pytest.mark.parametrize("stem", ["json", "counted_taken"])
def test_a_name_that_is_taken_stays_what_it_was(tmp_path, stem):
    """Two files of one name, or a file named like a library."""
    if stem != "json":
        (tmp_path / "other").mkdir()
        load_factory(f"{write(tmp_path / 'other' / f'{stem}.py', size=7)}:make")
    first = sys.modules[stem]
    made = load_factory(f"{write(tmp_path / f'{stem}.py', size=8)}:make")()
    assert made.size == 8
    assert sys.modules[stem] is first
    assert type(pickle.loads(pickle.dumps(made))) is type(made)
    assert json.loads("3") == 3


def test_a_file_that_was_imported_is_not_executed_again(tmp_path, monkeypatch):
    path = write(tmp_path / "counted_import.py")
    monkeypatch.syspath_prepend(tmp_path)
    import counted_import

    assert load_factory(f"{path}:Model") is counted_import.Model
    assert executions(path) == 1


def test_a_file_that_fails_leaves_nothing_behind(tmp_path):
    path = tmp_path / "counted_broken.py"
    path.write_text("def make(): pass\nraise RuntimeError('not today')")
    for _ in range(2):
        with pytest.raises(UserError, match=r"cannot import .*counted_broken\.py: RuntimeError: not today"):
            load_factory(f"{path}:make")
    assert "counted_broken" not in sys.modules
    write(path)
    assert load_factory(f"{path}:make")().size == 1


def test_a_neighbour_can_be_imported(tmp_path):
    (tmp_path / "counted_neighbour.py").write_text("SIZE = 5")
    (tmp_path / "counted_importer.py").write_text("from counted_neighbour import SIZE\ndef make(): return SIZE")
    assert load_factory(f"{tmp_path / 'counted_importer.py'}:make")() == 5


@pytest.mark.parametrize("value", ["-" * 20_000 + "1", "1" + "+1j" * 30_000, "(" * 20_000], ids=["-", "+", "("])
def test_an_argument_without_end_is_a_word(value):
    assert parse_arguments([f"width={value}", "depth=2"]) == {"width": value, "depth": 2}
