"""From losses to outcomes: made-up frames whose answer is known, and a negative control beside each."""

import math
from pathlib import Path
from typing import get_args

import numpy as np
import polars as pl
import pytest

from completep import report
from completep.compute.laws import ShapeRange
from completep.errors import UserError
from completep.measure.linearization import PLACES, LazyVerdict, TermVerdict
from completep.measure.stream_limit import Growth
from completep.stats import Interval
from completep.studies import coordinates, demo, judging, laziness, shape
from completep.studies.coordinates import conclude
from completep.studies.design import ONE_SEED, UNSEEN, Agreement, Outcome, with_seeds
from completep.studies.downstream import STUDY as DOWNSTREAM
from completep.studies.dynamics import STUDY as DYNAMICS
from completep.studies.embedding_lr import STUDY as EMBEDDING
from completep.studies.eps_transfer import STUDY as EPS
from completep.studies.horizon import STUDY as HORIZON
from completep.studies.lr_transfer import STUDY as LR
from completep.studies.lr_transfer_compute_optimal import STUDY as OPTIMAL
from completep.studies.lr_wd_grid import STUDY as GRID
from completep.studies.qk_norm import STUDY as QK
from completep.studies.result import SHOWN
from completep.studies.run import study_named
from completep.studies.scale import LAPTOP
from completep.studies.shape import STUDY as SHAPE
from completep.studies.tau import STUDY as TAU
from completep.sweep.task import Point
from tests.studies.frames import (
    RESULTS,
    downstream_frame,
    dynamics_frame,
    eps_frame,
    grid_frame,
    optimal_frame,
    shape_frame,
    tau_frame,
    transfer_frame,
    width_frame,
)


def find(study, frame):
    return study.find(study.at(LAPTOP), frame)


@pytest.mark.slow
def test_transfer_agrees_where_only_completep_stays():
    found = find(LR, transfer_frame({"mup": -0.5, "alpha=0.5": 0.5, "completep": 0.0}))
    assert found.agreement == "agrees"
    assert "CompleteP PASS" in found.sentence
    table = found.table.filter((pl.col("rules") == "mup") & (pl.col("depth") == 32))
    assert table["drift_octaves"].item() == pytest.approx(-2, abs=0.05)
    assert table["verdict"].item() == "FAIL"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drift", "agreement"),
    [
        ({"mup": -0.5, "alpha=0.5": 0.5, "completep": 0.5}, "does not agree"),
        ({"mup": 0.0, "alpha=0.5": 0.5, "completep": 0.0}, UNSEEN),
        ({"completep": 0.0}, UNSEEN),
    ],
)
def test_transfer_does_not_agree_where_it_does_not(drift, agreement):
    assert find(LR, transfer_frame(drift)).agreement == agreement


def test_one_seed_says_nothing_of_transfer():
    frame = transfer_frame({"mup": -0.5, "completep": 0.0}, seeds=1)
    assert find(LR, frame).agreement == UNSEEN


def test_a_study_without_finished_runs_is_an_error():
    frame = pl.DataFrame({"rules": ["mup"], "loss": [None]}, schema={"rules": pl.String, "loss": pl.Float64})
    with pytest.raises(UserError, match="no run of this study is done"):
        find(LR, frame)


def test_optimal_transfer_ranks_at_the_bases_best():
    frame = optimal_frame({"mup": -0.5, "alpha=0.5": 0.5, "completep": 0.0})
    assert find(OPTIMAL, frame).agreement == "agrees in part"  # one horizon says nothing of Finding 3
    swapped = frame.with_columns(rules=pl.col("rules").replace({"mup": "completep", "completep": "mup"}))
    assert find(OPTIMAL, swapped).agreement == "does not agree"


@pytest.mark.slow
@pytest.mark.parametrize(("flatter", "agreement"), [(3.0, "agrees"), (1.0, "agrees in part"), (0.3, "agrees in part")])
def test_longer_runs_are_less_sensitive_or_not(flatter, agreement):
    """Finding 3: after few tokens, a step away from the best η costs more."""
    found = find(OPTIMAL, optimal_frame({"mup": -0.5, "alpha=0.5": 0.5, "completep": 0.0}, 3, flatter))
    assert found.agreement == agreement
    assert "an octave away from the best η costs" in found.sentence


@pytest.mark.parametrize(
    ("losses", "agreement"),
    [
        ({"mup": 2.1, "alpha=0.5": 2.05, "completep": 2.0}, "agrees"),
        ({"mup": math.nan, "completep": 2.0}, "agrees"),
        ({"mup": 2.001, "completep": 2.0}, UNSEEN),
        ({"mup": 1.9, "alpha=0.5": 2.05, "completep": 2.0}, "does not agree"),
        ({"mup": 1.9}, UNSEEN),
        ({"mup": 2.1, "completep": math.nan}, "does not agree"),
        ({"mup": None, "completep": 2.0}, UNSEEN),
        ({"mup": math.inf, "completep": math.nan}, UNSEEN),
    ],
)
def test_ranking_of_one_seed(losses, agreement):
    assert judging.ranking({r: x if x is None else {0: x} for r, x in losses.items()}, "here")[0] == agreement


def test_ranking_compares_seed_by_seed():
    """A small gap that every seed has is told from noise; the same mean gap with seeds that disagree is not."""
    ours = {0: 2.00, 1: 2.04, 2: 1.98}
    alike = {seed: loss + 0.004 + 0.0005 * seed for seed, loss in ours.items()}
    assert judging.ranking({"mup": alike, "completep": ours}, "")[0] == "agrees"
    assert judging.ranking({"mup": ours, "completep": alike}, "")[0] == "does not agree"
    mixed = dict(zip(ours, (2.06, 2.00, 1.975), strict=True))
    assert sum(mixed.values()) > sum(ours.values())
    assert judging.ranking({"mup": mixed, "completep": ours}, "")[0] == UNSEEN
    # Gaps are from common seeds only, and all others must be above.
    assert judging.ranking({"mup": alike | {7: 1.0}, "completep": ours | {8: 9.0}}, "")[0] == "agrees"
    assert judging.ranking({"mup": alike, "alpha=0.5": mixed, "completep": ours}, "")[0] == UNSEEN


def test_more_comparisons_need_more():
    """Bonferroni: the interval of one of ten comparisons is wider than that of a single one."""
    ours, others = {0: 2.0, 1: 2.0, 2: 2.0}, {0: 2.1, 1: 2.12, 2: 2.14}
    one, ten = judging.gap(ours, others), judging.gap(ours, others, tests=10)
    assert ten.low < one.low < one.high < ten.high
    changes = [math.log(others[s] / ours[s]) for s in ours]
    centre, error = sum(changes) / 3, pl.Series(changes).std() / 3**0.5
    assert (one.low, one.high) == pytest.approx((centre - 2.920 * error, centre + 2.920 * error), rel=1e-3)


FRAMES = {
    "lr-transfer": transfer_frame({"mup": -0.5, "alpha=0.5": 0.5, "completep": 0.0}, seeds=1),
    "lr-transfer-compute-optimal": optimal_frame({"mup": -0.5, "alpha=0.5": 0.5, "completep": 0.0}),
    "eps-transfer": eps_frame({"completep": {2: 1e-4, 16: 1e-4}, "flat-eps=1": {2: 1e-4, 16: 1e-5}}),
    "dynamics": dynamics_frame({"mup": {2: 2.0, 8: 2.1}, "completep": {2: 2.0, 8: 1.8}}),
    "shape": shape_frame({"mup": 0.004, "completep": 0.0}),
    "tau": tau_frame({"mup": 0.5, "completep": -0.4}),
    "lr-wd-grid": grid_frame(-1.0),
    "downstream": downstream_frame({"mup": 50.0, "completep": 52.0}),
}


@pytest.mark.parametrize("name", FRAMES)
def test_one_seed_never_agrees(name):
    study, frame = study_named(name), FRAMES[name]
    one = study.outcome(study.at(LAPTOP), frame)
    assert one.agreement in (ONE_SEED, UNSEEN)
    if name != "lr-transfer":  # it says nothing at all without intervals
        assert study.find(study.at(LAPTOP), frame).agreement in ("agrees", "agrees in part")
        assert "one seed" in one.sentence


def test_two_seeds_may_agree_and_one_may_disagree():
    frame = eps_frame({"completep": {2: 1e-4, 16: 1e-4}, "flat-eps=1": {2: 1e-4, 16: 1e-5}})
    several = pl.concat([frame.with_columns(seed=pl.lit(s), loss=pl.col("loss") * (1 + 0.01 * s)) for s in (0, 1, 2)])
    assert EPS.outcome(EPS.at(LAPTOP), several).agreement == "agrees"
    off = tau_frame({"mup": 0.5, "completep": 2.0})
    assert TAU.outcome(TAU.at(LAPTOP), off).agreement == "does not agree"


def test_a_measurement_of_one_seed_never_agrees():
    study = study_named("laziness").at(LAPTOP)
    outcome = Outcome("agrees", "slopes", pl.DataFrame(), None)
    assert with_seeds(outcome, 1).agreement == ONE_SEED
    assert with_seeds(outcome, 2) is outcome
    one = study.narrowed({"seed": [0]})
    measured = laziness.Measured(*(pl.read_csv(RESULTS / "laziness" / f"{name}.csv") for name in ("runs", "terms")))
    assert study.study.outcome(study, measured).agreement == "agrees in part"
    assert one.study.outcome(one, measured).agreement == ONE_SEED


def test_laziness_needs_every_place_and_every_order():
    def outcome(places, orders, lazy="FAIL"):
        shares = [LazyVerdict("completep", place, None, word, "") for place, word in zip(PLACES, places, strict=True)]
        shares += [LazyVerdict("alpha=0.5", place, None, lazy, "") for place in PLACES]
        terms = [TermVerdict("completep", k, -1.0, None, word) for k, word in enumerate(orders, 1)]
        return laziness.conclude(laziness.Verdicts(shares, terms)).agreement

    assert outcome(["PASS"] * 3, ["PASS"] * 3) == "agrees"
    assert outcome(["PASS", "PASS", "FAIL"], ["PASS"] * 3) == "does not agree"
    assert outcome(["PASS"] * 3, ["PASS", "FAIL", "PASS"]) == "does not agree"
    assert outcome(["PASS"] * 3, ["PASS"] * 3, lazy="PASS") == "does not agree"
    assert outcome(["PASS"] * 3, ["PASS", "PASS", "INCONCLUSIVE"]) == "agrees in part"
    assert outcome(["PASS", "PASS", "INCONCLUSIVE"], ["PASS"] * 3) == UNSEEN


def test_coordinates_need_the_limit_of_the_stream():
    def outcome(word):
        growth = Growth("completep", 32, 1.01, Interval(1.0, 1.02), 1.016, word)
        return coordinates.with_limit(Outcome("agrees", "slopes", pl.DataFrame(), []), [growth])

    assert outcome("PASS").agreement == "agrees"
    assert outcome("INCONCLUSIVE").agreement == UNSEEN
    assert outcome("FAIL").agreement == "does not agree"
    assert "CompleteP 1.01 at depth 32 (limit 1)" in outcome("PASS").sentence


def noisy(frame, spread, seeds=3):
    """The same runs with several seeds, whose losses differ by `spread` independently of each other."""
    rng = np.random.default_rng(0)
    luck = [np.exp(spread * rng.standard_normal(frame.height)) for _ in range(seeds)]
    return pl.concat([frame.with_columns(seed=pl.lit(s), loss=frame["loss"] * x) for s, x in enumerate(luck)])


@pytest.mark.parametrize("name", ["eps-transfer", "tau"])
def test_noise_hides_an_agreement(name):
    study = study_named(name)
    quiet, loud = (study.outcome(study.at(LAPTOP), noisy(FRAMES[name], spread)) for spread in (1e-4, 0.5))
    assert quiet.agreement == "agrees"
    assert loud.agreement != "agrees"


@pytest.mark.slow
def test_deeper_is_better_only_beyond_the_noise():
    frame = transfer_frame({"mup": -0.5, "alpha=0.5": 0.5, "completep": 0.0}, deepening=0.002, noise=0.005, regret=0.5)
    found = find(LR, frame)
    assert found.detail[-1].deeper == "unclear"
    assert found.agreement == "agrees in part"
    assert "cannot be told from the noise" in found.sentence
    curves = dynamics_frame({"mup": {2: 2.0, 8: 2.1}, "completep": {2: 2.0, 8: 1.9}})
    assert "2 → 8 alike" in find(DYNAMICS, noisy(curves, 0.05)).sentence.split("CompleteP")[1]
    assert "2 → 8 better" in find(DYNAMICS, noisy(curves, 1e-5)).sentence.split("CompleteP")[1]


def test_savings_have_intervals_where_there_are_seeds():
    frame = shape_frame({"mup": 0.004, "completep": 0.0}, sizes=3)
    assert find(SHAPE, frame).table["savings_low"].null_count() == frame.height
    table = find(SHAPE, noisy(frame, 1e-3)).table.filter(pl.col("rules") == "completep")
    assert table["savings_low"].null_count() == 0
    assert ((table["savings_low"] < table["savings"]) & (table["savings"] < table["savings_high"])).all()


def test_eps():
    right = find(EPS, eps_frame({"completep": {2: 1e-4, 16: 1e-4}, "flat-eps=1": {2: 1e-4, 16: 1e-5}}))
    assert right.agreement == "agrees"
    shifts = dict(right.table.select("rules", "decades").iter_rows())
    assert shifts["completep"] == pytest.approx(0, abs=0.02)
    assert shifts["flat-eps=1"] == pytest.approx(-1, abs=0.02)
    assert "decades with the depth rule and by" in right.sentence
    assert right.sentence.endswith("decades without it; without the rule -log10 m_L = -0.90 is expected")
    same = find(EPS, eps_frame({"completep": {2: 1e-4, 16: 1e-4}, "flat-eps=1": {2: 1e-4, 16: 1e-4}}))
    assert same.agreement == "does not agree"  # the rule makes no difference
    wrong = find(EPS, eps_frame({"completep": {2: 1e-4, 16: 1e-6}, "flat-eps=1": {2: 1e-4, 16: 1e-4}}))
    assert wrong.agreement == "does not agree"


def test_dynamics():
    right = find(DYNAMICS, dynamics_frame({"mup": {2: 2.0, 8: 2.1}, "completep": {2: 2.0, 8: 1.8}}))
    assert right.agreement == "agrees in part"  # nothing to compare the crossing with
    crossing = right.table.filter(pl.col("rules") == "completep")["last_step_behind"].unique().to_list()
    assert len(crossing) == 1
    assert 100 <= crossing[0] <= 130  # 4.2 - 2.2 s/150 and 4.8 - 3 s/150 meet at step 112, and three steps are averaged
    three = dynamics_frame({"mup": {2: 2.0, 8: 2.1}, "alpha=0.5": {2: 2.0, 8: 2.05}, "completep": {2: 2.0, 8: 1.8}})
    whole = find(DYNAMICS, noisy(three, 1e-3))
    assert whole.agreement == "agrees"
    assert "100 % under alpha=0.5" in whole.sentence
    swap = {"alpha=0.5": "completep", "completep": "alpha=0.5"}
    assert find(DYNAMICS, noisy(three.with_columns(pl.col("rules").replace(swap)), 1e-3)).agreement == "does not agree"
    wrong = find(DYNAMICS, dynamics_frame({"mup": {2: 2.0, 8: 2.1}, "completep": {2: 2.0, 8: 2.2}}))
    assert wrong.agreement == "does not agree"


def test_shapes():
    found = find(SHAPE, shape_frame({"mup": 0.004, "completep": 0.0}))
    assert found.agreement == "agrees"
    assert found.detail.law.b == pytest.approx(0.06, rel=0.02)
    assert set(found.table["size"]) == {"52.2K", "418K"}
    ranges = found.detail.ranges
    size = found.table["size"][0]
    assert ranges["completep", size].low < ranges["mup", size].low  # deeper shapes stay good under CompleteP only
    assert find(SHAPE, shape_frame({"mup": -0.004, "completep": 0.0})).agreement == "does not agree"


def test_savings_that_do_not_grow_agree_in_part():
    """About the same share at every depth beyond the base; that it is nothing at the base makes no trend."""
    frame = shape_frame({"mup": 0.0, "completep": 0.0})
    more = pl.col("depth").replace_strict({4: 1.022, 8: 1.018, 16: 1.018, 32: 1.022}, default=1.0)
    dearer = frame.with_columns(loss=pl.when(pl.col("rules") == "mup").then(pl.col("loss") * more).otherwise("loss"))
    assert find(SHAPE, dearer).agreement == "agrees in part"


def test_shapes_need_two_sizes():
    frame = shape_frame({"mup": 0.0, "completep": 0.0}).filter(pl.col("parameters") < 60000)
    with pytest.raises(UserError, match="two sizes"):
        find(SHAPE, frame)


def test_sizes_are_named_by_what_they_hold():
    named = shape.size_names([49_152, 50_000, 55_296, 98_304, 110_592, 1_488_800_000, 1_512_300_000])
    assert named[49_152] == named[55_296] == "51.5K"
    assert named[98_304] == named[110_592] == "104K"
    assert named[1_488_800_000] == named[1_512_300_000] == "1.5B"


def test_tau():
    assert find(TAU, tau_frame({"mup": 0.5, "completep": -0.4})).agreement == "agrees"
    off = find(TAU, tau_frame({"mup": 0.5, "completep": 2.0}))
    assert off.agreement == "does not agree"
    assert off.table.filter(pl.col("rules") == "completep")["best_tau"].item() == pytest.approx(0.1407 * 4)


def test_grid_of_lr_and_weight_decay():
    constant_tau = find(GRID, grid_frame(-1.0))
    assert constant_tau.agreement == "agrees"
    assert constant_tau.table["best_tau"].std() == pytest.approx(0, abs=1e-6)
    assert find(GRID, grid_frame(0.0)).agreement == "does not agree"
    edge = grid_frame(-1.0).filter(pl.col("weight_decay") >= 2.0)
    assert find(GRID, edge).agreement == UNSEEN


def test_horizon():
    rules = ("mup", "alpha=0.5", "completep")
    losses = {(32, 2): (2.1, 2.2, 2.0), (16, 8): (2.4, 2.3, 2.2)}
    rows = [
        {"rules": r, "width": w, "depth": d, "loss": x}
        for (w, d), by in losses.items()
        for r, x in zip(rules, by, strict=True)
    ]
    assert find(HORIZON, pl.DataFrame(rows)).agreement == "agrees"
    rows[0]["loss"] = 1.9
    assert find(HORIZON, pl.DataFrame(rows)).agreement == "does not agree"


def test_downstream():
    found = find(DOWNSTREAM, downstream_frame({"mup": 50.0, "completep": 52.0}))
    assert found.agreement == "agrees"
    average = found.table.filter((pl.col("task") == "average") & (pl.col("rules") == "completep"))
    assert average["score"].item() == 52.5
    assert average["stderr"].item() == pytest.approx(0.5 * 2**0.5 / 2)
    assert find(DOWNSTREAM, downstream_frame({"mup": 52.0, "completep": 50.0})).agreement == "does not agree"
    assert find(DOWNSTREAM, downstream_frame({"mup": 50.0, "completep": 52.0}, error=5.0)).agreement == UNSEEN
    with pytest.raises(UserError, match="no run"):
        find(DOWNSTREAM, pl.DataFrame())


def test_downstream_has_the_validation_loss_too():
    frame = downstream_frame({"mup": 50.0, "completep": 52.0}, losses={"mup": 2.0, "completep": 2.1})
    found = find(DOWNSTREAM, frame)
    assert found.agreement == "does not agree"  # better answers, but a higher loss
    row = found.table.filter((pl.col("task") == "validation loss") & (pl.col("rules") == "completep"))
    assert row["score"].item() == 2.1
    assert "validation loss at 64x4: muP 2.0000, CompleteP 2.1000" in found.sentence


def test_narrow_shapes_are_judged_where_the_range_ends():
    def within(low, *, open_low=False):
        return ShapeRange(32.0, low, 100.0, open_low, False)

    ours = {("completep", "1M"): within(4.0)}
    assert shape.narrow_shapes(ours | {("mup", "1M"): within(9.0)})[0] == "agrees"
    assert shape.narrow_shapes(ours | {("mup", "1M"): within(2.0)})[0] == "does not agree"
    assert shape.narrow_shapes(ours | {("mup", "1M"): within(math.nan)})[0] == "agrees"  # no shape of muP's is good
    both = {("completep", "1M"): within(4.0, open_low=True), ("mup", "1M"): within(4.0, open_low=True)}
    assert shape.narrow_shapes(both) == (
        UNSEEN, "; N:L within 1 % of the best: 1M from 4 or less (muP from 4 or less), best at 32"
    )  # fmt: skip
    assert shape.narrow_shapes({}) == (UNSEEN, "")


@pytest.mark.slow
def test_the_critics_studies():
    alike = find(EMBEDDING, width_frame({"sp": 0.05, "sp-embedding": 0.0, "mup": 0.0}, {"sp": -2, "sp-embedding": -2}))
    assert alike.agreement == "agrees"
    assert {t.rules: t.word for t in alike.detail} == {"sp": "FAIL", "sp-embedding": "FAIL", "mup": "PASS"}
    assert "to width 128" in alike.sentence
    assert (
        find(EMBEDDING, width_frame({"sp": 0.05, "sp-embedding": 0.02, "mup": 0.0}, {})).agreement == "does not agree"
    )
    free = transfer_frame({"mup": 0.0, "completep": 0.0})
    assert find(QK, free).agreement == "agrees"
    assert find(QK, transfer_frame({"mup": -0.5, "completep": 0.0})).agreement == "does not agree"
    model = QK.run(LAPTOP, Point(rules="mup", depth=2, lr=2**-6, seed=0)).model
    assert model.qk_norm
    wide = EMBEDDING.run(LAPTOP, Point(rules="sp-embedding", width=128, lr=2**-6, seed=0))
    assert (wide.model.width, wide.model.depth) == (128, 2)


@pytest.mark.slow
def test_a_claim_of_two_parts_may_hold_in_part():
    frame = transfer_frame({"mup": -0.5, "alpha=0.5": 0.5, "completep": 0.0}, deepening=-0.1)
    found = find(LR, frame)
    assert found.agreement == "agrees in part"
    assert "deeper is not better throughout" in found.sentence


def test_what_was_not_tried_is_not_what_diverged():
    frame = optimal_frame({"mup": 0.0, "completep": 0.0})
    far = (pl.col("rules") == "mup") & (pl.col("depth") == 32) & (pl.col("lr") > 2**-8)
    assert find(OPTIMAL, frame.filter(~far)).agreement == UNSEEN
    lost = frame.with_columns(loss=pl.when(far).then(math.nan).otherwise("loss"))
    assert find(OPTIMAL, lost).agreement == "agrees in part"


def test_the_demo_compares_at_one_depth():
    """With the tried value that is best at the base: the deepest model is better, worse, or as good as the base."""
    frame = transfer_frame({"mup": -0.5, "completep": 0.0}, seeds=1)
    whole = demo.DEMO.outcome(demo.DEMO.at(LAPTOP), frame)
    assert whole.agreement == "agrees"
    assert {t.rules: t.word for t in whole.detail} == {"mup": "FAIL", "completep": "PASS"}
    losses = {(r, d): x for r, d, lr, x in frame.select("rules", "depth", "lr", "loss").iter_rows() if lr == 2**-6}
    worse, better = (100 * (losses[r, 32] / losses[r, 2] - 1) for r in ("mup", "completep"))
    assert f"at depth 32 the same learning rate makes muP {worse:.1f} % worse" in whole.sentence
    assert f"CompleteP {-better:.1f} % better" in whole.sentence
    for t in whole.detail:  # the table has tried values too: how far the best one moved
        tried = frame.filter((pl.col("rules") == t.rules) & (pl.col("depth") == 32)).sort("loss")["lr"][0]
        assert (t.shapes[-1].optimum, t.shapes[-1].drift) == (tried, math.log2(tried / 2**-6))
    assert {t.rules: t.shapes[-1].drift for t in whole.detail} == {"mup": -2.0, "completep": 0.0}
    flat = demo.DEMO.outcome(demo.DEMO.at(LAPTOP), transfer_frame({"mup": -0.5, "completep": 0.0}, 0.05, 1, 0, 0.0))
    assert flat.agreement == "does not agree"
    assert {t.rules: t.word for t in flat.detail} == {"mup": "FAIL", "completep": "FAIL"}
    without = frame.filter((pl.col("rules") != "completep") | (pl.col("depth") < 32))
    assert find(demo.DEMO, without).agreement == UNSEEN
    swapped = frame.with_columns(rules=pl.col("rules").replace({"mup": "completep", "completep": "mup"}))
    assert find(demo.DEMO, swapped).agreement == "does not agree"


def test_diverged_curves_count():
    frame = dynamics_frame({"mup": {2: 2.0, 8: 2.1}, "completep": {2: 2.0, 8: 1.8}})
    cut = frame.filter((pl.col("rules") != "completep") | (pl.col("depth") < 8) | (pl.col("step") < 50))
    assert find(DYNAMICS, cut).agreement == "does not agree"
    with pytest.raises(UserError, match="one depth"):
        find(DYNAMICS, frame.filter(pl.col("depth") == 2))


def test_diverged_shapes_count_and_noise_is_not_savings():
    frame = shape_frame({"mup": 0.004, "completep": 0.0}, sizes=3)
    lost = frame.with_columns(
        loss=pl.when((pl.col("rules") == "completep") & (pl.col("depth") >= 16)).then(math.nan).otherwise("loss")
    )
    assert find(SHAPE, lost).agreement == "does not agree"
    dead = frame.with_columns(
        loss=pl.when((pl.col("rules") == "mup") & (pl.col("depth") >= 64)).then(math.nan).otherwise("loss")
    )
    assert find(SHAPE, dead).agreement == "agrees"
    assert find(SHAPE, shape_frame({"mup": 1e-6, "completep": 0.0})).agreement == UNSEEN


def test_tau_that_was_not_tried_or_does_not_matter():
    frame = tau_frame({"mup": 0.5, "completep": -0.4})
    assert find(TAU, frame.filter(pl.col("tau") > 0.2)).agreement == UNSEEN
    flat = frame.with_columns(loss=2 + 1e-4 * (pl.col("loss") - 2))
    assert find(TAU, flat).agreement == UNSEEN
    lost = frame.with_columns(loss=pl.when(pl.col("rules") == "mup").then(math.nan).otherwise("loss"))
    assert find(TAU, lost).agreement == "does not agree"


def test_one_learning_rate_has_no_slope():
    assert find(GRID, grid_frame(-1.0).filter(pl.col("lr") == 2**-6)).agreement == UNSEEN


def test_no_epsilon_that_is_good():
    frame = eps_frame({"completep": {2: 1e-4, 16: 1e-9}, "flat-eps=1": {2: 1e-4, 16: 1e-4}})
    assert find(EPS, frame).agreement == "does not agree"


def test_coordinates_need_their_controls():
    from completep.measure.verdict import Finding

    words = {"mup": "FAIL", "literature=0.5": "FAIL", "alpha=0.5": "PASS", "completep": "PASS"}
    for some, agreement in (
        (words, "agrees"),
        ({"completep": "PASS"}, UNSEEN),
        ({"sp": "FAIL"}, UNSEEN),
        (words | {"completep": "FAIL"}, "does not agree"),
        (words | {"mup": "PASS"}, "does not agree"),
    ):
        findings = [Finding(rules, "depth", 1, "stream", None, None, 0.2, word, "") for rules, word in some.items()]
        assert conclude(findings).agreement == agreement


def test_every_agreement_has_a_tone_and_a_headline_which_the_report_does_not_name():
    assert set(SHOWN) == set(get_args(Agreement))
    sources = "".join(p.read_text() for p in Path(report.__file__).parent.glob("*.*") if p.suffix in (".py", ".html"))
    assert "INCONCLUSIVE" in sources  # the files that are looked through
    assert [word for word in get_args(Agreement) if f'"{word}"' in sources] == []
