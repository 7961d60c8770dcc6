"""A dimension on a line is spoken of in its own values and in steps, never in octaves."""

import math

import polars as pl
import pytest

from completep.measure.transfer import transfer_table
from completep.tuning.run import judge
from completep.tuning.settings import make_tuning
from completep.tuning.space import parse_dimension


def judged(space, best, steepness=0.1):
    """The transfer from 2 to 8 layers of a bowl whose best value lies so many steps up the axis, by depth."""
    (name, text), *_ = space.items()
    d = parse_dimension(name, text)
    rows = [
        {"rules": "completep", "width": 64, "depth": depth, name: value, "seed": seed, "status": "done",
         "loss": math.exp(steepness * (i - place) ** 2 + 1e-3 * seed + 1e-6 * (-1) ** (i + seed))}
        for depth, place in best.items() for i, value in enumerate(d.values) for seed in range(3)
    ]  # fmt: skip
    point = {name: d.values[round(best[2])]}
    return judge(pl.DataFrame(rows), (d,), point, make_tuning({"model": "gpt", "space": space}))[0]


LINE = {"dropout": "0..0.3:linear:0.1"}
OCTAVES = {"lr": "2^-9..2^-6"}


@pytest.mark.parametrize(("space", "unit", "other"), [(LINE, "steps", "octaves"), (OCTAVES, "octaves", "steps")])
def test_a_drift_is_in_steps_on_a_line_and_in_octaves_otherwise(space, unit, other):
    transfer = judged(space, {2: 1, 8: 2})
    assert transfer.word == "FAIL"
    assert f"the optimum drifts by +1.00 {unit}" in transfer.why
    columns = transfer_table([transfer]).columns
    assert f"drift, {unit}" in columns
    assert f"drift, {other}" not in columns


@pytest.mark.parametrize(("space", "last"), [(LINE, "0.3"), (OCTAVES, "0.0156")])
def test_the_last_value_that_was_tried_is_named_as_it_was_written(space, last):
    assert f"the base's best value {last} is the last one tried" in judged(space, {2: 3, 8: 3}).why


def test_a_flat_bowl_is_spoken_of_in_steps_too():
    transfer = judged(LINE, {2: 1, 8: 2}, steepness=1e-4)
    assert transfer.word == "PASS"
    assert "the optimum drifts by +1.00 steps, in a bowl so flat" in transfer.why
