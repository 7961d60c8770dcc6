"""The study of a mixture of experts: its runs, a small run of the whole, and verdicts on losses that are known."""

import pytest

from completep import study
from completep.config import Evaluation, Shape, run_id
from completep.studies import expert_transfer
from completep.studies.expert_transfer import STUDY
from completep.studies.scale import LAPTOP
from tests.studies.frames import expert_frame


def points(**values):
    return list(STUDY.at(LAPTOP).narrowed(values).points())


def test_its_sizes_are_depth_and_experts_times_four():
    runs = [STUDY.run(LAPTOP, p) for p in points(rules="completep", seed=0, lr=2**-6)]
    sizes = {(r.model.depth, r.model.experts): r.model for r in runs}
    assert set(sizes) == {(2, 4), (2, 16), (8, 4), (8, 16)}
    assert {m.experts / m.active_experts for m in sizes.values()} == {4}
    assert {m.expert_width for m in sizes.values()} == {2 * LAPTOP.base.width}
    assert len({run_id(r) for r in runs}) == 4
    assert len(points(rules="completep", depth=2, experts=4, lr=2**-6)) == 3  # seeds


@pytest.mark.slow
def test_the_verdict_sees_a_drift_over_either_axis():
    experiment = STUDY.at(LAPTOP)
    steady = expert_transfer.find(experiment, expert_frame({"mup": 2.0}))
    assert steady.agreement == "agrees"
    words = {t.rules: t.word for t in steady.detail}
    assert words == {"completep": "PASS", "mup": "FAIL"}
    assert set(steady.table["experts"]) == {4, 16}
    drifting = expert_transfer.find(experiment, expert_frame({"completep": 2.0}))
    assert drifting.agreement == "does not agree"
    assert steady.detail[0].base == Shape(4, 2)


@pytest.mark.slow
def test_it_is_run_judged_drawn_and_reported(tmp_path):
    values = {"rules": ["completep"], "depth": [1, 2], "experts": [4, 8], "lr": [2**-8, 2**-7, 2**-6], "seed": [0, 1]}
    small = study(tiny(), values=values, out=tmp_path, workers=1)
    assert small.failed == 0
    assert set(small.table["experts"]) == {4, 8}
    assert set(small.table["depth"]) == {1, 2}
    assert "2 layers and 8 experts" in str(small)
    assert "<svg" in small._repr_html_()


def tiny():
    """The same study, with six steps of a narrow model."""
    from dataclasses import replace

    def run(scale, point):
        made = expert_transfer.run(scale, point)
        model = replace(made.model, width=32, expert_width=32)
        few = {"schedule": replace(made.schedule, steps=6, warmup=1), "evaluation": Evaluation(tokens=4096)}
        return replace(made, model=model, base=Shape(32, 1), batch=2, **few)

    return replace(STUDY, name="expert-transfer-tiny", run=run)
