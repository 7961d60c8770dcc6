"""A derivation that was killed continues, and ends with the same numbers, bit for bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from completep import derive
from completep.measure import survey
from tests.measure.families import Family, family
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SMALL = {"widths": (16, 32, 64), "depths": (1, 2, 4), "batch": 4, "time": 8, "steps": 2, "seeds": 2, "workers": 1}


class StoppedError(Exception):
    pass


def run(keep, stop_after=None, factory=family):
    calls = []

    def progress(done, total, what):
        calls.append(what)
        if len(calls) == stop_after:
            raise StoppedError

    return derive(factory, **SMALL, parameters=["*.rise", "*.gain"], keep=keep, progress=progress)


@pytest.fixture
def measured(monkeypatch):
    """The jobs that were really measured."""
    jobs = []
    plain = survey.measure_shape

    def counting(family, job):
        jobs.append(str(job))
        return plain(family, job)

    monkeypatch.setattr(survey, "measure_shape", counting)
    return jobs


@pytest.mark.slow
def test_a_stopped_derivation_continues_with_the_same_numbers(tmp_path, measured):
    whole = run(None)
    needed = len(measured)
    measured.clear()
    with pytest.raises(StoppedError):
        run(tmp_path, stop_after=4)
    assert len(measured) == 4
    resumed = run(tmp_path)
    assert len(measured) == needed
    assert resumed.to_json() == whole.to_json()
    assert resumed.tensors.equals(whole.tensors)
    measured.clear()
    assert run(tmp_path).to_json() == whole.to_json()
    assert measured == []


@pytest.mark.slow
def test_what_is_damaged_is_measured_again(tmp_path, measured):
    whole = run(tmp_path)
    (folder,) = tmp_path.iterdir()
    one, two, *_ = sorted(folder.iterdir())
    one.write_text(one.read_text()[:100])
    two.write_text(two.read_text().replace("0.", "1.", 1))
    measured.clear()
    assert run(tmp_path).to_json() == whole.to_json()
    assert len(measured) == 2


class Other(Family):
    """The same parameters, but another forward pass."""

    def forward(self, ids):
        return 2 * super().forward(ids)


def other(width, depth):
    return Other(width, depth)


other.__module__, other.__qualname__ = family.__module__, family.__qualname__


@pytest.mark.slow
def test_another_model_under_the_same_name_is_measured_anew(tmp_path, measured):
    run(tmp_path)
    count = len(measured)
    measured.clear()
    run(tmp_path, factory=other)
    assert len(measured) >= count - 2
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_kill_nine_loses_only_what_was_under_way(tmp_path):
    words = ["derive", "tests/measure/families.py:family", "--widths", "16", "32", "64", "--depths", "1", "2", "4"]
    words += ["--batch", "4", "--time", "8", "--steps", "2", "--seeds", "2", "--workers", "1", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "completep", *words]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(tmp_path.glob("derive-*/*.json"))) >= 2, process=first)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("derive-*/*.json")}
    assert len(before) >= 2
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 3), done.stderr
    after = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("derive-*/*.json")}
    assert before.items() <= after.items()  # nothing was measured twice
    assert len(after) > len(before)
