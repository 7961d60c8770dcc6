"""The estimate of the time left."""

import time

import pytest

from completep.sweep.engine import Event
from completep.sweep.progress import TO_BRACKET, Progress
from completep.sweep.store import Store
from completep.sweep.task import Point, Trial
from tests.sweep.tasks import Script


@pytest.fixture
def progress(tmp_path):
    """Two curves of seven values: runs of the second cost twenty times as much."""
    trials = [
        Trial(Point(depth=depth, lr=2.0**-e), Script(f"{depth}-{e}", cost=cost))
        for depth, cost in ((2, 1.0), (32, 20.0))
        for e in range(7)
    ]
    made = Progress("lr", trials, Store(tmp_path), "at most ")
    made.began = time.monotonic() - 10
    return made


def end(progress, name):
    task = next(trial.task for trial in progress.trials if trial.task.id == f"script-{name}")
    progress.note(Event("started", task))
    progress.running.pop(task.id)
    progress.ended[task.id] = ("done", 1.0)
    progress.spent += task.cost


def test_a_search_is_expected_to_bracket_and_not_to_try_everything(progress):
    assert progress.likely_left("lr") == TO_BRACKET * 21
    end(progress, "32-3")
    assert progress.likely_left("lr") == TO_BRACKET * 21 - 20


def test_no_estimate_from_the_first_small_runs(progress):
    end(progress, "2-3")
    assert progress.seconds_left() is None
    assert "left" not in progress.counts()
    end(progress, "32-3")
    left = (TO_BRACKET - 1) * 21
    assert progress.seconds_left() == pytest.approx(10 * left / 21, rel=0.1)
    assert "about" in progress.counts()
