"""The stages: the grid's answer with at most half of its runs, on sweeps that were really run."""

import math
from dataclasses import replace

import polars as pl
import pytest

from completep.config import Shape
from completep.errors import UserError
from completep.measure.curves import judge_transfer
from completep.sweep.store import Store
from completep.sweep.task import Point, Trial
from completep.tuning.precision import Advice, Design, advise
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
    base, axis, most = Shape(frame["width"][0], min(depths)), frame[name].unique().to_list(), frame["seed"].n_unique()

    def by_noise(swept, runs, first):
        """What the noise asks for: more values here, since the grid has no more seeds."""
        known = [{**t.point, "loss": t.task.known, "rules": rules} for t in runs]
        return advise(pl.DataFrame(known), swept, base, axis, first, most)

    done, failed = strategy(trials, name, advise=by_noise)(engine, trials)
    assert failed == []
    few = pl.DataFrame([{**t.point, "loss": t.task.known, "rules": rules} for t in done])
    grid = frame.filter(pl.col("depth").is_in(depths))
    return engine, grid, few, name


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[2]}-{c[3]}")
def test_half_of_the_grid_gives_its_optimum_and_its_verdict(tmp_path, case):
    engine, grid, few, name = searched(tmp_path, *case)
    whole, found = judge_transfer(grid, name)[0], judge_transfer(few, name)[0]
    assert abs(math.log2(found.best / whole.best)) <= 0.25
    if case[:3] != ("lr-transfer", "lr", "alpha=0.5"):  # there the optimum drifts, and is followed
        assert len(engine.asked) <= 0.5 * grid.height
    assert len(engine.asked) <= 0.6 * grid.height
    if whole.word != "INCONCLUSIVE":
        assert found.word == whole.word


def strategy(trials, name="lr", **more):
    """The stages, over trials whose losses are known."""
    known = {(Shape(t.point.whole("width"), t.point.whole("depth")), t.point[name], t.point["seed"]): t for t in trials}
    shapes = sorted({shape for shape, _, _ in known}, key=lambda s: (s.depth, s.width))
    values, seeds = (sorted({key[i] for key in known}) for i in (1, 2))
    dimension = Dimension(name, "octaves", tuple(values))
    return Staged((dimension,), shapes, len(seeds), lambda s, v, seed: known[s, v[name], seed], **more)


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
    return engine, strategy(trials)(engine, trials)[0]


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


def test_what_the_noise_asks_for_is_run_at_every_shape(tmp_path):
    """Asked for at the base, before any larger shape is run, and once more when all are."""
    engine, asked_about, told = Recorded(Store(tmp_path)), [], []

    def advise(name, trials, first):
        asked_about.append((name, {t.point["depth"] for t in trials}, first))
        design = Design(2, 5) if first.seeds == 5 else Design(1, 5)
        return Advice(0.1, design, 5)

    trials = bowl_trials(lambda depth: -7.2, seeds=5)
    search = replace(strategy(trials), seeds=3, advise=advise, tell=told.append)
    done, _ = search(engine, trials)
    assert asked_about == [("lr", {2}, Design(1, 3)), ("lr", {2, 8}, Design(1, 5))]
    assert told == [f"lr: {Advice(0.1, design, 5)}" for design in (Design(1, 5), Design(2, 5))]
    for depth in (2, 8):
        whole = [t.point["lr"] for t in done if t.point["depth"] == depth and t.point["seed"] == 4]
        assert sorted(whole) == [2.0**e for e in range(-9, -4)]
    assert len(engine.asked) == len(set(engine.asked)) == len(done)


def test_every_dimension_is_walked_and_verified(tmp_path):
    """Two that pull at each other: the walk along one moves the other's best, until both are settled."""
    lr = Dimension("lr", "octaves", tuple(2.0**e for e in range(-10, -3)))
    wd = Dimension("wd", "octaves", tuple(2.0**e for e in range(-6, 1)))
    act = Dimension("act", "choice", ("gelu", "relu"))

    def trial(shape, values, seed):
        a, b = math.log2(values["lr"]) + 7, math.log2(values["wd"]) + 3
        loss = 2 + 0.05 * (a**2 + b**2 + 0.6 * a * b) + 0.01 * seed - 0.01 * shape.depth + (values["act"] == "relu")
        point = Point(width=shape.width, depth=shape.depth, **values, seed=seed)
        return Trial(point, Looked(f"{shape} {values} {seed}", loss + 1e-4 * math.sin(a + 3 * b + 5 * seed), 1.0))

    engine = Recorded(Store(tmp_path))
    start = {"lr": 2.0**-5, "wd": 2.0**-4, "act": "gelu"}
    search = Staged((lr, wd, act), (Shape(64, 2), Shape(64, 8)), 2, trial, start)
    done, _ = search(engine, [])
    assert search.point == {"lr": 2.0**-7, "wd": 2.0**-3, "act": "gelu"}
    for depth in (2, 8):
        own = [t.point for t in done if t.point["depth"] == depth]
        assert {p["lr"] for p in own if p["wd"] == 2**-3 and p["act"] == "gelu"} >= {2**-8, 2**-7, 2**-6}
        assert {p["wd"] for p in own if p["lr"] == 2**-7 and p["act"] == "gelu"} >= {2**-4, 2**-3, 2**-2}
        assert {p["act"] for p in own if p["lr"] == 2**-7 and p["wd"] == 2**-3} == {"gelu", "relu"}


def test_a_second_dimension_that_the_script_ignores_is_refused(tmp_path):
    lr = Dimension("lr", "octaves", tuple(2.0**e for e in range(-10, -3)))
    wd = Dimension("wd", "octaves", tuple(2.0**e for e in range(-6, 1)))

    def trial(shape, values, seed):
        loss = 2 + 0.05 * (math.log2(values["lr"]) + 7) ** 2 + 0.01 * seed
        point = Point(width=shape.width, depth=shape.depth, **values, seed=seed)
        return Trial(point, Looked(f"{shape} {values} {seed}", loss, 1.0))

    search = Staged((lr, wd), (Shape(64, 2), Shape(64, 8)), 2, trial, {"lr": 2.0**-7, "wd": 2.0**-3})
    engine = Recorded(Store(tmp_path))
    with pytest.raises(UserError, match=r"ignore wd: with wd = 2\^-4 and 2\^-3"):
        search(engine, [])
    assert len(engine.asked) == 10


def test_a_script_that_ignores_its_argument_is_noticed_in_the_first_round(tmp_path):
    trials = bowl_trials(None, loss=lambda depth, e, seed: 2.5)
    engine = Recorded(Store(tmp_path))
    with pytest.raises(UserError, match=r"ignore lr: with lr = 2\^-8 and 2\^-7 the loss is 2.5"):
        strategy(trials)(engine, trials)
    assert len(engine.asked) == 3


def test_a_script_that_ignores_its_seed_is_noticed(tmp_path):
    with pytest.raises(UserError, match="ignore the seed: seeds 0, 1, 2"):
        staged(tmp_path, bowl_trials(None, loss=lambda depth, e, seed: 2 + e**2))


def test_a_script_that_ignores_its_shape_is_noticed(tmp_path):
    with pytest.raises(UserError, match="ignore its shape: 64 × 2 and 64 × 8 give the same loss"):
        staged(tmp_path, bowl_trials(None, loss=lambda depth, e, seed: 2 + e**2 + 0.01 * seed))


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
    dimension = Dimension("lr", "octaves", tuple(2.0**o for o in octaves))
    expected = expected_runs([dimension], seeds, seeds, proxies)
    assert expected.base + expected.seeds + expected.proxies == pytest.approx(sum(counts) / len(counts))
    assert expected.most == values * seeds * (proxies + 1) >= max(counts)
    noisy = expected_runs([dimension], seeds, seeds + 2, proxies)
    assert noisy.most - expected.most == (2 * min(5, values) * (proxies + 1) if seeds > 1 and values > 2 else 0)
