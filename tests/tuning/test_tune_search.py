"""The three stages: the grid's answer with at most half of its runs, on sweeps that were really run."""

import math

import polars as pl
import pytest

from completep.config import Shape
from completep.errors import UserError
from completep.measure.curves import judge_transfer
from completep.sweep.store import Store
from completep.sweep.task import Point, Trial
from completep.tuning.search import Staged, expected_runs
from completep.tuning.space import Dimension
from tests.tuning.recorded import Looked, Recorded, sweep

CASES = [
    ("lr-transfer", "lr", rules, depths)
    for rules in ("completep", "mup", "alpha=0.5")
    for depths in ((2, 8), (2, 8, 32))
] + [("init-transfer", "std", rules, (2, 8, 32)) for rules in ("completep", "mup")]


def searched(tmp_path, study, name, rules, depths):
    frame, trials = sweep(study, name, rules)
    trials = [t for t in trials if t.point["depth"] in depths]
    engine = Recorded(Store(tmp_path))
    dimension = Dimension(name, "octaves", tuple(sorted(frame[name].unique())))
    done, failed = Staged(dimension, Shape(frame["width"][0], min(depths)))(engine, trials)
    assert failed == []
    few = pl.DataFrame([{**t.point, "loss": t.task.known, "rules": rules} for t in done])
    grid = frame.filter(pl.col("depth").is_in(depths))
    return engine, grid, few, name


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[2]}-{c[3]}")
def test_half_of_the_grid_gives_its_optimum_and_its_verdict(tmp_path, case):
    engine, grid, few, name = searched(tmp_path, *case)
    whole, found = judge_transfer(grid, name)[0], judge_transfer(few, name)[0]
    assert abs(math.log2(found.best / whole.best)) <= 0.25
    if case[:3] != ("lr-transfer", "lr", "mup"):  # there the optimum drifts, and is followed
        assert len(engine.asked) <= 0.5 * grid.height
    assert len(engine.asked) <= 0.6 * grid.height
    if whole.word != "INCONCLUSIVE":
        assert found.word == whole.word


def bowl_trials(optimum, seeds=3, depths=(2, 8), octaves=range(-12, -2), loss=None):
    def known(depth, e, seed):
        return 2 + 0.03 * (e - optimum(depth)) ** 2 + 0.01 * seed + 0.001 * math.sin(e * seed + depth)

    return [
        Trial(Point(width=64, depth=d, seed=s, lr=2.0**e), Looked(f"{d} {e} {s}", (loss or known)(d, e, s), float(d)))
        for d in depths
        for e in octaves
        for s in range(seeds)
    ]


def staged(tmp_path, trials):
    engine = Recorded(Store(tmp_path))
    values = tuple(sorted({t.point.number("lr") for t in trials}))
    return engine, Staged(Dimension("lr", "octaves", values), Shape(64, 2))(engine, trials)[0]


def test_seeds_are_spent_near_the_optimum_only(tmp_path):
    engine, done = staged(tmp_path, bowl_trials(lambda depth: -10.2))
    at_base = [t for t in done if t.point["depth"] == 2]
    with_seeds = {t.point["lr"] for t in at_base if t.point["seed"]}
    assert with_seeds == {2.0**-11, 2.0**-10, 2.0**-9}
    assert len({t.point["lr"] for t in at_base}) > 3  # the walk from the middle took one seed
    assert len(engine.asked) == len(set(engine.asked)) == len(done)


def test_a_drift_is_followed_to_its_minimum(tmp_path):
    _, done = staged(tmp_path, bowl_trials(lambda depth: -7.0 if depth == 2 else -10.0))
    assert {t.point["lr"] for t in done if t.point["depth"] == 8} >= {2.0**-11, 2.0**-10, 2.0**-9}


@pytest.mark.parametrize(("is_open", "values"), [(False, 3), (True, 5)])
def test_an_open_verdict_widens_every_curve_by_one_value_on_either_side(tmp_path, is_open, values):
    trials = bowl_trials(lambda depth: -7.2)
    engine, asked_about = Recorded(Store(tmp_path)), []
    dimension = Dimension("lr", "octaves", tuple(2.0**e for e in range(-12, -2)))

    def open_(done):
        asked_about.append(len(done))
        return is_open

    done, _ = Staged(dimension, Shape(64, 2), is_open=open_)(engine, trials)
    assert len(asked_about) == 1
    for depth in (2, 8):
        whole = [t.point["lr"] for t in done if t.point["depth"] == depth and t.point["seed"] == 2]
        assert sorted(whole) == [2.0**e for e in range(-7 - values // 2, -6 + values // 2)]
    assert len(engine.asked) == len(set(engine.asked)) == len(done)


def test_a_script_that_ignores_its_argument_is_noticed_in_the_first_round(tmp_path):
    trials = bowl_trials(None, loss=lambda depth, e, seed: 2.5)
    engine = Recorded(Store(tmp_path))
    strategy = Staged(Dimension("lr", "octaves", tuple(2.0**e for e in range(-12, -2))), Shape(64, 2))
    with pytest.raises(UserError, match=r"ignore lr: with lr = 2\^-8 and 2\^-7 the loss is 2.5"):
        strategy(engine, trials)
    assert len(engine.asked) == 3


def test_a_script_that_ignores_its_seed_is_noticed(tmp_path):
    with pytest.raises(UserError, match="ignore the seed: seeds 0, 1, 2"):
        staged(tmp_path, bowl_trials(None, loss=lambda depth, e, seed: 2 + e**2))


def test_a_loss_that_is_always_nan_is_an_error(tmp_path):
    with pytest.raises(UserError, match="every run at the base diverged"):
        staged(tmp_path, bowl_trials(None, loss=lambda depth, e, seed: math.nan))


@pytest.mark.parametrize(("values", "seeds", "proxies"), [(6, 3, 1), (10, 3, 2), (3, 1, 1), (2, 3, 1)])
def test_what_is_expected_is_the_mean_over_every_place_of_the_optimum(tmp_path, values, seeds, proxies):
    depths, octaves = [2 * 4**i for i in range(proxies + 1)], range(-values, 0)
    counts = [
        len(staged(tmp_path / str(o), bowl_trials(lambda depth, o=o: o + 0.01, seeds, depths, octaves))[0].asked)
        for o in octaves
    ]
    expected = expected_runs(values, seeds, proxies)
    assert expected.base + expected.seeds + expected.proxies == pytest.approx(sum(counts) / len(counts))
    assert expected.most == values * seeds * (proxies + 1) >= max(counts)
