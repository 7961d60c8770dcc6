"""The live view's estimate of the time left."""

import time

import pytest
from rich.console import Console

from completep.cli.board import TO_BRACKET, Board
from completep.sweep.engine import Event
from completep.sweep.store import Store
from completep.sweep.task import Point, Trial
from tests.sweep.tasks import Script


@pytest.fixture
def board(tmp_path):
    """Two curves of seven values: runs of the second cost twenty times as much."""
    trials = [
        Trial(Point(depth=depth, lr=2.0**-e), Script(f"{depth}-{e}", cost=cost))
        for depth, cost in ((2, 1.0), (32, 20.0))
        for e in range(7)
    ]
    made = Board("sweep", "lr", trials, Store(tmp_path), Console(quiet=True), "at most ")
    made.began = time.monotonic() - 10
    return made


def end(board, name):
    task = next(trial.task for trial in board.trials if trial.task.id == f"script-{name}")
    board.on_event(Event("started", task))
    board.running.pop(task.id)
    board.ended[task.id] = ("done", 1.0)
    board.spent += task.cost


def test_a_search_is_expected_to_bracket_and_not_to_try_everything(board):
    assert board.likely_left("lr") == TO_BRACKET * 21
    end(board, "32-3")
    assert board.likely_left("lr") == TO_BRACKET * 21 - 20


def test_no_estimate_from_the_first_small_runs(board):
    end(board, "2-3")
    assert board.seconds_left() is None
    assert "left" not in board.counts()
    end(board, "32-3")
    left = (TO_BRACKET - 1) * 21
    assert board.seconds_left() == pytest.approx(10 * left / 21, rel=0.1)
    assert "about" in board.counts()
