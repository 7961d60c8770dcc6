"""Several dimensions: a fifth of a recorded grid comes within half a percent of its best; resuming repeats nothing."""

import math
import random
from itertools import product

import polars as pl
import pytest

import completep as cp
from completep.errors import UserError
from completep.sweep.store import Store
from completep.sweep.task import Point, Trial
from completep.tuning.explore import Explore, TrustRegion, choose_method, default_budget
from completep.tuning.space import Dimension, parse_space
from tests.tuning.commands import BOWL, GRID, HELD_OUT, LOSS
from tests.tuning.recorded import ROOT, Looked, Recorded

METHODS = ("gp", "tpe", "random")


def recorded_grid(seed):
    frame = pl.read_csv(GRID).filter(pl.col("seed") == seed)
    names = ("lr", "std", "weight_decay")
    rows = frame.iter_rows(named=True)
    return names, {tuple(r[n] for n in names): math.inf if r["loss"] is None else r["loss"] for r in rows}


def mean_grid():
    (names, one), (_, two) = recorded_grid(0), recorded_grid(1)
    return names, {key: (one[key] + two[key]) / 2 for key in one}


def summed_curves(rules, depth=2):
    """A grid of three recorded one-dimensional sweeps, whose losses add up."""

    def curve(study, name, key):
        frame = pl.read_csv(ROOT / "docs" / "results" / study / "runs.csv")
        own = frame.filter((pl.col("rules") == key) & (pl.col("depth") == depth))
        return dict(own.group_by(name).agg(pl.col("loss").cast(pl.Float64).mean()).sort(name).iter_rows())

    lr, std = curve("lr-transfer", "lr", rules), curve("init-transfer", "std", rules)
    eps = curve("eps-transfer", "eps", "flat-eps=1")
    rest = min(std.values()) + min(eps.values())
    grid = {(a, b, c): lr[a] + std[b] + eps[c] - rest for a, b, c in product(lr, std, eps)}
    return ("lr", "std", "eps"), grid


def explored(tmp_path, names, grid, method, budget):
    dimensions = [Dimension(n, "octaves", tuple(sorted({k[i] for k in grid}))) for i, n in enumerate(names)]
    engine = Recorded(Store(tmp_path))

    def trial(values, seed):
        key = tuple(values[name] for name in names)
        return Trial(Point(**values), Looked("-".join(map(repr, key)), grid[key], 1.0))

    search = Explore(dimensions, method, budget, trial)
    search(engine, [])
    return engine, search, grid[tuple(search.best[name] for name in names)]


@pytest.mark.parametrize(
    ("case", "regret"), [("means", 0.005), ("completep", 0.005), ("mup", 0.005), ("seed 0", 0.015), ("seed 1", 0.015)]
)
@pytest.mark.parametrize("method", ["tpe", pytest.param("gp", marks=pytest.mark.slow), "random"])
def test_a_fifth_of_the_grid_finds_its_best(tmp_path, case, method, regret):
    """Within half a percent, but for the grids of one seed, whose best point is luck by a percent: the means have the
    best of seed 0 at 3 % above their own best.
    """
    pytest.importorskip("optuna", reason="needs the extra `tune`")
    if case == "means":
        names, grid = mean_grid()
    else:
        names, grid = recorded_grid(int(case[-1])) if case.startswith("seed") else summed_curves(case)
    engine, _, found = explored(tmp_path, names, grid, method, 30)
    assert len(engine.asked) <= len(grid) // 5
    assert found <= (1 + regret) * min(grid.values())


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("method", ["tpe", pytest.param("gp", marks=pytest.mark.slow), "random"])
def test_as_it_is_used_it_finds_the_best_of_a_grid_that_nothing_was_chosen_by(tmp_path, method, first):
    """Searched with one seed, the best points confirmed with the other: less than a seventh of the grid's runs, and
    the mean over seeds within half a percent of the best mean. Each seed alone has its best up to 6.5 % above that.
    """
    pytest.importorskip("optuna", reason="needs the extra `tune`")
    names = ("lr", "std", "one_minus_beta2")
    rows = pl.read_csv(HELD_OUT).iter_rows(named=True)
    grid = {(*(r[n] for n in names), r["seed"]): r["loss"] for r in rows}
    points = {key[:-1] for key in grid}
    dimensions = [Dimension(n, "octaves", tuple(sorted({p[i] for p in points}))) for i, n in enumerate(names)]
    engine = Recorded(Store(tmp_path))

    def trial(values, seed):
        key = (*(values[n] for n in names), (first + seed) % 2)
        return Trial(Point(**values), Looked("-".join(map(repr, key)), grid[key], 1.0))

    search = Explore(dimensions, method, default_budget(dimensions), trial, seeds=2)
    search(engine, [])
    means = {p: (grid[*p, 0] + grid[*p, 1]) / 2 for p in points}
    assert len(engine.asked) <= len(grid) / 7
    assert means[tuple(search.best[n] for n in names)] <= 1.005 * min(means.values())


def test_as_many_points_at_random_are_worse(tmp_path):
    """The control: the same number of runs without a search, on average over draws."""
    names, grid = mean_grid()
    dice, best = random.Random(0), min(grid.values())
    drawn = [min(dice.sample(list(grid.values()), len(grid) // 5)) / best - 1 for _ in range(200)]
    *_, found = explored(tmp_path, names, grid, "tpe", len(grid) // 5)
    assert found / best - 1 < sum(drawn) / len(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_same_search_asks_for_the_same_runs(tmp_path, method):
    """So that an interrupted one continues: what was run is found, and the rest is proposed again."""
    pytest.importorskip("optuna", reason="needs the extra `tune`")
    names, grid = summed_curves("completep")
    whole, search, _ = explored(tmp_path / "a", names, grid, method, 20)
    half = Recorded(Store(tmp_path / "b"))
    tasks = {t.task.id: t.task for t in search.done}
    half.run([tasks[name] for name in whole.asked[:9]])
    engine, again, _ = explored(tmp_path / "b", names, grid, method, 20)
    assert engine.asked == whole.asked[9:]
    assert again.best == search.best


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_what_diverges_is_left_behind(tmp_path, method):
    pytest.importorskip("optuna", reason="needs the extra `tune`")
    grid = {(a, b): math.inf if a * b > 2**-12 else -math.log2(a) - math.log2(b) for a, b in product(
        [2.0**e for e in range(-10, -2)], repeat=2)}  # fmt: skip
    _, _, found = explored(tmp_path, ("lr", "std"), grid, method, 24)
    assert found <= 13
    with pytest.raises(UserError, match="all 6 runs of the search diverged"):
        explored(tmp_path / "all", ("lr", "std"), dict.fromkeys(grid, math.inf), method, 6)


def test_the_best_few_are_confirmed_with_all_seeds(tmp_path):
    """The best of one seed is luck here, and the mean over seeds says so."""
    (lr,) = parse_space(["lr=2^-9..2^-3"])
    (std,) = parse_space(["std=2^-3..2^-2"])

    def trial(values, seed):
        place = math.log2(values["lr"]) + 6
        luck = -0.5 if place == 2 and seed == 0 else 0.0
        return Trial(Point(), Looked(f"{values} {seed}", 2 + 0.05 * place**2 + values["std"] + luck, 1.0))

    for seeds, found in ((1, 2**-4), (3, 2**-6)):
        search = Explore([lr, std], "random", 14, trial, seeds=seeds)
        search(Recorded(Store(tmp_path / str(seeds))), [])
        assert search.best["lr"] == found


def test_words_are_searched_beside_numbers(tmp_path):
    lr, act = parse_space(["lr=2^-9..2^-3", "act=gelu,relu,tanh"])
    loss = {"gelu": 2.0, "relu": 1.9, "tanh": 2.2}

    def trial(values, seed):
        known = loss[values["act"]] + 0.01 * (math.log2(values["lr"]) + 6) ** 2
        return Trial(Point(), Looked(f"{values}", known, 1.0))

    search = Explore([lr, act], "random", 15, trial)
    search(Recorded(Store(tmp_path)), [])
    assert search.best == {"lr": 2**-6, "act": "relu"}


def test_the_trust_region_shrinks_and_grows():
    region = TrustRegion(parse_space(["lr=2^-9..2^-3"]))
    region.tell((3,), 2.0)
    for _ in range(10):
        region.tell((4,), 3.0)
    small = region.reach
    assert small < 0.5
    assert {region.ask()[0] for _ in range(50)} <= {1, 2, 4, 5}
    region.tell((2,), 1.0)
    assert region.reach > small


def test_defaults():
    assert choose_method("auto", 3) == "tpe"
    assert choose_method("auto", 30) == "random"
    assert choose_method("gp", 30) == "gp"
    dimensions = parse_space(["lr=2^-9..2^-3", "wd=0.1..0.8", "std=2^-6..2^-1"])
    assert default_budget(dimensions) == 30
    assert default_budget(dimensions[:1] + parse_space(["a=x,y"])) == 7


@pytest.mark.slow
def test_two_dimensions_from_a_script_to_a_verdict(tmp_path):
    words = "--width {width} --depth {depth} --lr {lr} --wd {wd} --seed {seed} --out {folder}"
    settings = {"search": "random", "trials": 14}
    result = cp.tune(
        f"python {BOWL} {words}", space={"lr": "2^-9..2^-5", "wd": "0.025..0.4"}, loss=LOSS, proxies=[(64, 8)],
        settings=settings, out=tmp_path,
    )  # fmt: skip
    assert result.verdict == "PASS"
    assert result.values["wd"] == pytest.approx(0.1, rel=0.05)
    assert result.best["wd"].low < 0.1 < result.best["wd"].high
    assert abs(math.log2(result.values["lr"]) + 7.3) < 0.15
    assert set(result.tuned().values) == {"lr", "wd"}
    assert [(t.hyperparameter, t.word) for t in result.transfers] == [("lr", "PASS"), ("wd", "PASS")]
    files = {path.name for path in result.write(tmp_path)}
    assert {"tune.svg", "tune-wd.svg"} <= files
    with pytest.raises(UserError, match="cannot be bracketed"):
        cp.tune(f"python {BOWL} {words}", space={"lr": "2^-9..2^-5", "wd": "0.1..0.4"}, loss=LOSS, out=tmp_path,
                settings={"search": "bracket"})  # fmt: skip


@pytest.mark.slow
def test_a_second_dimension_that_drifts_fails_and_is_named(tmp_path):
    """The first one transfers; so did words, whose verdict is their own."""
    words = "--width {width} --depth {depth} --lr {lr} --wd {wd} --act {act} --seed {seed} --out {folder}"
    result = cp.tune(
        f"python {BOWL} {words} --wd-drift -0.9", loss=LOSS, proxies=[(64, 8)], out=tmp_path,
        space={"lr": "2^-9..2^-5", "wd": "0.0125..0.4", "act": "gelu,relu"},
        settings={"search": "random", "trials": 20},
    )  # fmt: skip
    assert result.values["act"] == "gelu"
    assert [(t.hyperparameter, t.word) for t in result.transfers] == [("lr", "PASS"), ("wd", "FAIL"), ("act", "PASS")]
    assert result.verdict == "FAIL"
    assert "wd: 64 × 8: the optimum drifts by -1." in result.sentence()
    assert "The best wd does not transfer" in str(result)
    assert set(result.to_json()["transfers"]) == {"lr", "wd", "act"}


def test_a_dimension_that_the_script_ignores_is_noticed_in_the_search(tmp_path):
    lr, wd = parse_space(["lr=2^-9..2^-3", "wd=2^-5..2^-1"])

    def trial(values, seed):
        return Trial(Point(), Looked(f"{values}", 2 + 0.05 * (math.log2(values["lr"]) + 6) ** 2, 1.0))

    engine = Recorded(Store(tmp_path))
    with pytest.raises(UserError, match="ignore wd: with wd = "):
        Explore([lr, wd], "random", 20, trial)(engine, [])
    assert len(engine.asked) < 20


def test_a_missing_optuna_is_named_before_anything_runs(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "optuna", None)
    words = "--width {width} --depth {depth} --lr {lr} --wd {wd} --seed {seed} --out {folder}"
    with pytest.raises(UserError, match=r"completep\[tune\]"):
        cp.tune(f"python {BOWL} {words}", space={"lr": "2^-9..2^-5", "wd": "0.1..0.4"}, loss=LOSS, out=tmp_path)
    assert not list(tmp_path.rglob("result.json"))
