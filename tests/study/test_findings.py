"""From losses to outcomes: made-up frames whose answer is known, and beside each its negative control."""

import math
from itertools import product

import numpy as np
import polars as pl
import pytest

from completep.config import Shape
from completep.errors import UserError
from completep.study import findings
from completep.study.findings import UNSEEN

BASE = Shape(64, 2)


def transfer_frame(drift, regret=0.05, seeds=3, noise=1e-4, deepening=0.1):
    """Parabolas in log2 η whose minimum moves by `drift[rules]` octaves a doubling of depth."""
    rng = np.random.default_rng(0)
    rows = []
    for (rules, move), depth, e, seed in product(drift.items(), (2, 8, 32), range(-10, -2), range(seeds)):
        place = -6.3 + move * math.log2(depth / 2)
        loss = 2 - deepening * math.log2(depth / 2) / 4 + regret * (e - place) ** 2 + noise * rng.normal()
        rows.append({"rules": rules, "width": 64, "depth": depth, "lr": 2.0**e, "seed": seed, "loss": loss})
    return pl.DataFrame(rows)


def test_transfer_agrees_where_only_completep_stays():
    found = findings.find_transfer("lr", BASE)(transfer_frame({"mup": -0.5, "alpha=0.5": 0.5, "completep": 0.0}))
    assert found.agreement == "agrees"
    assert "CompleteP PASS" in found.sentence
    table = found.table.filter((pl.col("rules") == "mup") & (pl.col("depth") == 32))
    assert table["drift_octaves"].item() == pytest.approx(-2, abs=0.05)
    assert table["verdict"].item() == "FAIL"


@pytest.mark.parametrize(
    ("drift", "agreement"),
    [
        ({"mup": -0.5, "alpha=0.5": 0.5, "completep": 0.5}, "does not agree"),
        ({"mup": 0.0, "alpha=0.5": 0.5, "completep": 0.0}, UNSEEN),
        ({"completep": 0.0}, UNSEEN),
    ],
)
def test_transfer_does_not_agree_where_it_does_not(drift, agreement):
    assert findings.find_transfer("lr", BASE)(transfer_frame(drift)).agreement == agreement


def test_one_seed_says_nothing_of_transfer():
    frame = transfer_frame({"mup": -0.5, "completep": 0.0}, seeds=1)
    assert findings.find_transfer("lr", BASE)(frame).agreement == UNSEEN


def test_nothing_done_is_told():
    frame = pl.DataFrame({"rules": ["mup"], "loss": [None]}, schema={"rules": pl.String, "loss": pl.Float64})
    with pytest.raises(UserError, match="no run of this study is done"):
        findings.find_transfer("lr", BASE)(frame)


def test_optimal_transfer_ranks_at_the_bases_best():
    frame = transfer_frame({"mup": -0.5, "alpha=0.5": 0.5, "completep": 0.0}, seeds=1)
    assert findings.find_optimal_transfer(2)(frame).agreement == "agrees"
    swapped = frame.with_columns(rules=pl.col("rules").replace({"mup": "completep", "completep": "mup"}))
    assert findings.find_optimal_transfer(2)(swapped).agreement == "does not agree"


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
def test_ranking(losses, agreement):
    assert findings.ranking(losses, "here")[0] == agreement


def eps_frame(reach):
    """Loss rises tenfold of itself past what ε each rule and depth allows."""
    rows = []
    for (rules, limits), e in product(reach.items(), range(-7, -1)):
        for depth, limit in limits.items():
            rows.append({"rules": rules, "depth": depth, "eps": 10.0**e, "loss": 2.0 if 10.0**e <= limit else 3.0})
    return pl.DataFrame(rows)


def test_eps():
    right = findings.find_eps(eps_frame({"completep": {2: 1e-4, 16: 1e-4}, "flat-eps=1": {2: 1e-4, 16: 1e-5}}))
    assert right.agreement == "agrees"
    assert right.table.filter((pl.col("rules") == "completep") & (pl.col("depth") == 16))[
        "decades"
    ].item() == pytest.approx(3)
    same = findings.find_eps(eps_frame({"completep": {2: 1e-4, 16: 1e-4}, "flat-eps=1": {2: 1e-4, 16: 1e-4}}))
    assert same.agreement == UNSEEN
    wrong = findings.find_eps(eps_frame({"completep": {2: 1e-4, 16: 1e-6}, "flat-eps=1": {2: 1e-4, 16: 1e-4}}))
    assert wrong.agreement == "does not agree"


def dynamics_frame(ends):
    rows = []
    for (rules, losses), lr, step in product(ends.items(), (2**-6, 2**-4), range(10, 160, 10)):
        for depth, end in losses.items():
            start = 4 + 0.1 * depth  # deeper starts behind
            rows.append(
                {
                    "rules": rules,
                    "lr": lr,
                    "depth": depth,
                    "seed": 0,
                    "step": step,
                    "loss": start + (end - start) * step / 150,
                }
            )
    return pl.DataFrame(rows)


def test_dynamics():
    right = findings.find_dynamics(dynamics_frame({"mup": {2: 2.0, 8: 2.1}, "completep": {2: 2.0, 8: 1.8}}))
    assert right.agreement == "agrees"
    crossing = right.table.filter(pl.col("rules") == "completep")["last_step_behind"].unique().to_list()
    assert len(crossing) == 1
    assert 100 <= crossing[0] <= 130  # 4.2 - 2.2 s/150 and 4.8 - 3 s/150 meet at step 112, and three steps are averaged
    wrong = findings.find_dynamics(dynamics_frame({"mup": {2: 2.0, 8: 2.1}, "completep": {2: 2.0, 8: 2.2}}))
    assert wrong.agreement == "does not agree"


def shape_frame(penalty):
    """Loss on a law, plus a bowl in log N:L, plus what muP loses with depth."""
    rows = []
    for size, shapes in (
        (50e3, ((16, 16), (32, 4), (48, 2), (64, 1))),
        (400e3, ((32, 32), (64, 8), (96, 4), (128, 2))),
    ):
        for (width, depth), (rules, lost) in product(shapes, penalty.items()):
            flops = 1e12 * (size / 50e3) ** 2
            loss = (flops / 1e18) ** -0.06 * (
                1 + 0.01 * math.log2(width / depth / 16) ** 2 / 4 + lost * math.log2(depth + 1)
            )
            rows.append(
                {
                    "rules": rules,
                    "width": width,
                    "depth": depth,
                    "parameters": int(12 * width**2 * depth),
                    "flops": flops,
                    "loss": loss,
                }
            )
    return pl.DataFrame(rows)


find_shapes = findings.find_shapes(Shape(64, 2))


def test_shapes():
    found = find_shapes(shape_frame({"mup": 0.004, "completep": 0.0}))
    assert found.agreement == "agrees"
    assert found.detail.law.b == pytest.approx(0.06, rel=0.02)
    assert set(found.table["size"]) == {"52.2K", "418K"}
    ranges = found.detail.ranges
    size = found.table["size"][0]
    assert ranges["completep", size].low < ranges["mup", size].low  # deeper shapes stay good under CompleteP only
    assert find_shapes(shape_frame({"mup": -0.004, "completep": 0.0})).agreement == "does not agree"


def test_savings_that_do_not_grow_agree_in_part():
    """About the same share at every depth beyond the base; that it is nothing at the base makes no trend."""
    frame = shape_frame({"mup": 0.0, "completep": 0.0})
    more = pl.col("depth").replace_strict({4: 1.022, 8: 1.018, 16: 1.018, 32: 1.022}, default=1.0)
    dearer = frame.with_columns(loss=pl.when(pl.col("rules") == "mup").then(pl.col("loss") * more).otherwise("loss"))
    assert find_shapes(dearer).agreement == "agrees in part"


def test_shapes_need_two_sizes():
    frame = shape_frame({"mup": 0.0, "completep": 0.0}).filter(pl.col("parameters") < 60000)
    with pytest.raises(UserError, match="two sizes"):
        find_shapes(frame)


def test_sizes_are_named_by_what_they_hold():
    named = findings.sizes([49_152, 50_000, 55_296, 98_304, 110_592, 1_488_800_000, 1_512_300_000])
    assert named[49_152] == named[55_296] == "51.5K"
    assert named[98_304] == named[110_592] == "104K"
    assert named[1_488_800_000] == named[1_512_300_000] == "1.5B"


def tau_frame(best):
    return pl.DataFrame(
        [
            {"rules": r, "width": 32, "depth": 4, "tau": 0.1407 * 2.0**e, "loss": 2 + 0.02 * (e - place) ** 2}
            for r, place in best.items()
            for e in range(-3, 4)
        ]
    )


def test_tau():
    assert findings.find_tau(tau_frame({"mup": 0.5, "completep": -0.4})).agreement == "agrees"
    off = findings.find_tau(tau_frame({"mup": 0.5, "completep": 2.0}))
    assert off.agreement == "does not agree"
    assert off.table.filter(pl.col("rules") == "completep")["best_tau"].item() == pytest.approx(0.1407 * 4)


def grid_frame(slope):
    return pl.DataFrame(
        [
            {
                "rules": r, "width": 32, "lr": 2.0**e, "weight_decay": 2.0**w, "steps": 500,
                "loss": 2 + 0.01 * (w - (-1.0 + slope * (e + 6))) ** 2,
            }
            for r in ("sp", "mup") for e in (-7, -6, -5) for w in range(-5, 4)
        ]
    )  # fmt: skip


def test_grid_of_lr_and_weight_decay():
    constant_tau = findings.find_grid(grid_frame(-1.0))
    assert constant_tau.agreement == "agrees"
    assert constant_tau.table["best_tau"].std() == pytest.approx(0, abs=1e-6)
    assert findings.find_grid(grid_frame(0.0)).agreement == "does not agree"
    edge = grid_frame(-1.0).filter(pl.col("weight_decay") >= 2.0)
    assert findings.find_grid(edge).agreement == UNSEEN


def test_horizon():
    rules = ("mup", "alpha=0.5", "completep")
    losses = {(32, 2): (2.1, 2.2, 2.0), (16, 8): (2.4, 2.3, 2.2)}
    rows = [
        {"rules": r, "width": w, "depth": d, "loss": x}
        for (w, d), by in losses.items()
        for r, x in zip(rules, by, strict=True)
    ]
    assert findings.find_horizon(pl.DataFrame(rows)).agreement == "agrees"
    rows[0]["loss"] = 1.9
    assert findings.find_horizon(pl.DataFrame(rows)).agreement == "does not agree"


def downstream_frame(scores, error=0.5):
    return pl.DataFrame(
        [
            {"rules": r, "shape": "64x4", "task": t, "metric": "acc", "items": 100, "score": x + j, "stderr": error}
            for r, x in scores.items()
            for j, t in enumerate(("piqa", "boolq"))
        ]
    )


def test_downstream():
    found = findings.find_downstream(downstream_frame({"mup": 50.0, "completep": 52.0}))
    assert found.agreement == "agrees"
    average = found.table.filter((pl.col("task") == "average") & (pl.col("rules") == "completep"))
    assert average["score"].item() == 52.5
    assert average["stderr"].item() == pytest.approx(0.5 * 2**0.5 / 2)
    assert findings.find_downstream(downstream_frame({"mup": 52.0, "completep": 50.0})).agreement == "does not agree"
    assert findings.find_downstream(downstream_frame({"mup": 50.0, "completep": 52.0}, error=5.0)).agreement == UNSEEN
    with pytest.raises(UserError, match="no run"):
        findings.find_downstream(pl.DataFrame())


def test_a_claim_of_two_parts_may_hold_in_part():
    frame = transfer_frame({"mup": -0.5, "alpha=0.5": 0.5, "completep": 0.0}, deepening=-0.1)
    found = findings.find_transfer("lr", BASE)(frame)
    assert found.agreement == "agrees in part"
    assert "deeper is not better throughout" in found.sentence


def test_what_was_not_tried_is_not_what_diverged():
    frame = transfer_frame({"mup": 0.0, "completep": 0.0}, seeds=1)
    far = (pl.col("rules") == "mup") & (pl.col("depth") == 32) & (pl.col("lr") > 2**-8)
    assert findings.find_optimal_transfer(2)(frame.filter(~far)).agreement == UNSEEN
    lost = frame.with_columns(loss=pl.when(far).then(math.nan).otherwise("loss"))
    assert findings.find_optimal_transfer(2)(lost).agreement == "agrees"


def test_the_demo_compares_at_one_depth():
    frame = transfer_frame({"mup": -0.5, "completep": 0.0}, seeds=1)
    whole = findings.find_transfer_once(BASE)(frame)
    assert whole.agreement == "agrees"
    assert "at depth 32" in whole.sentence
    without = frame.filter((pl.col("rules") != "completep") | (pl.col("depth") < 32))
    assert findings.find_transfer_once(BASE)(without).agreement == UNSEEN
    # Better than the base at 32 layers, but not than 8: one half of the claim.
    lower = (pl.col("rules") == "completep") & (pl.col("depth") == 8)
    dip = frame.with_columns(loss=pl.when(lower).then(pl.col("loss") * 0.9).otherwise("loss"))
    assert findings.find_transfer_once(BASE)(dip).agreement == "agrees in part"
    assert "not better throughout" in findings.find_transfer_once(BASE)(dip).sentence


def test_diverged_curves_count():
    frame = dynamics_frame({"mup": {2: 2.0, 8: 2.1}, "completep": {2: 2.0, 8: 1.8}})
    cut = frame.filter((pl.col("rules") != "completep") | (pl.col("depth") < 8) | (pl.col("step") < 50))
    assert findings.find_dynamics(cut).agreement == "does not agree"
    with pytest.raises(UserError, match="one depth"):
        findings.find_dynamics(frame.filter(pl.col("depth") == 2))


def test_diverged_shapes_count_and_noise_is_not_savings():
    frame = shape_frame({"mup": 0.004, "completep": 0.0})
    lost = frame.with_columns(
        loss=pl.when((pl.col("rules") == "completep") & (pl.col("depth") >= 16)).then(math.nan).otherwise("loss")
    )
    assert find_shapes(lost).agreement == "does not agree"
    dead = frame.with_columns(
        loss=pl.when((pl.col("rules") == "mup") & (pl.col("depth") >= 32)).then(math.nan).otherwise("loss")
    )
    assert find_shapes(dead).agreement == "agrees"
    assert find_shapes(shape_frame({"mup": 1e-6, "completep": 0.0})).agreement == UNSEEN


def test_tau_that_was_not_tried_or_does_not_matter():
    frame = tau_frame({"mup": 0.5, "completep": -0.4})
    assert findings.find_tau(frame.filter(pl.col("tau") > 0.2)).agreement == UNSEEN
    flat = frame.with_columns(loss=2 + 1e-4 * (pl.col("loss") - 2))
    assert findings.find_tau(flat).agreement == UNSEEN
    lost = frame.with_columns(loss=pl.when(pl.col("rules") == "mup").then(math.nan).otherwise("loss"))
    assert findings.find_tau(lost).agreement == "does not agree"


def test_one_learning_rate_has_no_slope():
    assert findings.find_grid(grid_frame(-1.0).filter(pl.col("lr") == 2**-6)).agreement == UNSEEN


def test_no_epsilon_that_is_good():
    frame = eps_frame({"completep": {2: 1e-4, 16: 1e-9}, "flat-eps=1": {2: 1e-4, 16: 1e-4}})
    assert findings.find_eps(frame).agreement == "does not agree"


def test_coordinates_need_their_controls(monkeypatch):
    from completep.measure import verdict
    from completep.measure.verdict import Finding

    def finding(rules, word):
        return Finding(rules, "depth", 1, "stream", None, None, 0.2, word, "")

    words = {"muP": "FAIL", "literature alpha=0.5": "FAIL", "alpha=0.5": "PASS", "CompleteP": "PASS"}
    for some, agreement in (
        (words, "agrees"),
        ({"CompleteP": "PASS"}, UNSEEN),
        ({"SP": "FAIL"}, UNSEEN),
        (words | {"CompleteP": "FAIL"}, "does not agree"),
        (words | {"muP": "PASS"}, "does not agree"),
    ):
        monkeypatch.setattr(verdict, "judge", lambda found, some=some: [finding(r, w) for r, w in some.items()])
        assert findings.find_coordinates(None).agreement == agreement
