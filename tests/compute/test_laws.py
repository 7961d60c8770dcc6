"""Laws: recovered from made-up data, and the paper's own savings from its own losses."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from completep import UserError, paper
from completep.compute.laws import (
    PowerLaw,
    fit_power_law,
    flop_savings,
    frontier,
    loss_increase,
    savings_interval,
    shape_range,
)
from tests.measure.bowls import Noise, law_coverage, share

RESULTS = {
    (r["label"], r["task"]): r
    for r in csv.DictReader((Path(__file__).parent / "results_table.csv").read_text().splitlines())
    if r["table"] == "downstream"
}
B = paper.SCALING_EXPONENT


def inverse(law, loss):
    """F = a · X^(-1/b)."""
    return law.a * loss ** (-1 / law.b)


def test_a_law_and_its_inverse():
    law = PowerLaw(a=1e25, b=0.05)
    assert inverse(law, law.loss(1e18)) == pytest.approx(1e18)
    assert fit_power_law([1e18, 1e19, 1e20], law.loss([1e18, 1e19, 1e20])).b == pytest.approx(0.05)
    assert fit_power_law([1e18, 1e19], law.loss([1e18, 1e19])).a == pytest.approx(1e25)


def test_synthetic_recovery_and_coverage():
    """0.3 % noise, 300 draws: b within 2 %, and the 90 % interval covers the truth as often as it says."""
    a, b, level = 1e26, 0.0554, 0.9
    F = np.logspace(17, 21, 9)
    rng = np.random.default_rng(0)
    hits, errors = 0, []
    for _ in range(300):
        X = PowerLaw(a, b).loss(F) * np.exp(0.003 * rng.standard_normal(len(F)))
        fit = fit_power_law(F, X, level=level)
        errors.append(abs(fit.b / b - 1))
        hits += b in fit.b_interval
    assert np.median(errors) < 0.01
    assert np.quantile(errors, 0.95) < 0.02
    # 300 draws at 0.9 scatter by 0.017; three of those either side
    assert abs(hits / 300 - level) < 3 * math.sqrt(level * (1 - level) / 300)


def test_three_points_cover_too():
    """The paper fits three sizes: Student's interval with one degree of freedom is wide, and right."""
    F, b, rng = np.array([1e18, 1e19, 1e20]), 0.0554, np.random.default_rng(1)
    laws = [fit_power_law(F, PowerLaw(1e26, b).loss(F) * np.exp(0.003 * rng.standard_normal(3))) for _ in range(400)]
    assert abs(np.mean([b in law.b_interval for law in laws]) - 0.9) < 3 * math.sqrt(0.09 / 400)


def test_an_interval_that_is_too_narrow_would_be_seen():
    """The negative control: intervals shrunk to a third do not cover."""
    a, b = 1e26, 0.0554
    F = np.logspace(17, 21, 9)
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        fit = fit_power_law(F, PowerLaw(a, b).loss(F) * np.exp(0.003 * rng.standard_normal(len(F))))
        hits += abs(fit.b - b) < (fit.b_interval.high - fit.b_interval.low) / 6
    assert hits < 75


def test_seeds_are_averaged_not_counted():
    """What a law misses at a size is the same for every seed: five seeds of three sizes are three points."""
    F, seeds = np.array([1e18, 1e19, 1e20]), 5
    X = PowerLaw(1e26, 0.06).loss(F) * np.exp([0.01, -0.02, 0.01])
    luck = np.exp(np.linspace(-0.05, 0.05, seeds))
    means = fit_power_law(F, X)
    runs = fit_power_law(np.repeat(F, seeds), np.outer(X, luck).ravel(), np.tile(np.arange(seeds), 3))
    assert (runs.b, runs.freedom) == (pytest.approx(means.b), 1)
    assert runs.b_interval.low == pytest.approx(means.b_interval.low)
    # By hand: the residual standard deviation with one degree of freedom, times 6.314.
    x, y = np.log(F), np.log(X)
    rest = y - np.polyval(np.polyfit(x, y, 1), x)
    reach = 6.314 * np.sqrt(rest @ rest / ((x - x.mean()) @ (x - x.mean())))
    assert means.b_interval.high - means.b == pytest.approx(reach, rel=1e-3)
    # A lucky seed that was run at one size only does not tilt the law.
    lucky = fit_power_law([*np.repeat(F, 2), 1e20], [*np.repeat(X, 2), 0.5 * X[2]], [0, 1, 0, 1, 0, 1, 2])
    assert lucky.b == pytest.approx(means.b)


def test_savings_are_as_uncertain_as_the_gap_and_the_exponent():
    F, seeds = np.logspace(18, 21, 5), 8
    rng = np.random.default_rng(0)
    law = fit_power_law(F, PowerLaw(1e26, 0.06).loss(F) * np.exp(0.006 * rng.standard_normal(5)))
    loss = law.loss(F[2]) * np.exp(0.01 * rng.standard_normal(seeds))
    reference = loss * np.exp(0.03 + 0.002 * rng.standard_normal(seeds))
    both = savings_interval(reference, loss, F[2] * 1.01, law)
    value = flop_savings(*(loss_increase(x, law.loss(F[2])) for x in (reference, loss)), law.b).mean()
    assert both.low < value < both.high
    surely = savings_interval(reference, loss, F[2] * 1.01, replace(law, b_error=0.0, freedom=1000))
    assert both.low < surely.low < surely.high < both.high
    # With b known: Student's interval of the gap, by hand.
    gaps = -np.log(1 - (loss_increase(reference, law.loss(F[2] * 1.01)) - loss_increase(loss, law.loss(F[2] * 1.01))))
    reach = 1.895 * gaps.std(ddof=1) / np.sqrt(seeds)
    expected = [1 - np.exp(-(gaps.mean() + side * reach) / law.b) for side in (-1, 1)]
    assert [surely.low, surely.high] == pytest.approx(expected, rel=0.01)
    assert savings_interval(reference[:1], loss[:1], F[2], law) is None  # one seed
    assert savings_interval(reference, loss, F[2], fit_power_law(F[:2], law.loss(F[:2]))) is None  # two sizes


def test_a_run_that_the_law_was_fitted_to_moves_both():
    """The weight is the derivative of b, by a finite difference."""
    F = np.logspace(18, 21, 4)
    X = PowerLaw(1e26, 0.06).loss(F)
    law, step = fit_power_law(F, X), 1e-6
    for i, flops in enumerate(F):
        moved = X.copy()
        moved[i] *= np.exp(-step)
        assert law.weight(flops) == pytest.approx((fit_power_law(F, moved).b - law.b) / step, rel=1e-3)
    assert law.weight(3e19) == 0


@pytest.mark.slow
def test_exponent_and_savings_cover():
    """A small version of benchmarks/coverage.py, with a law that is not exact."""
    rng = np.random.default_rng(2)
    for sizes, seeds in ((3, 3), (5, 8)):
        counts = law_coverage(sizes, seeds, Noise(), 0.002, 0.02, 400, rng)
        for name in ("exponent", "savings"):
            assert 0.85 < share(counts, name) < 0.95


SHAPES = {"1.5B optimal": (3.99e20, 11.8, -19.6), "1.5B deepest": (4.10e20, 34.4, -23.7)}


def published(label):
    row = RESULTS[label, "slimpajama"]
    return float(row["mup"]), float(row["alpha_0.5"]), float(row["completep"])


@pytest.mark.parametrize("label", SHAPES)
def test_the_papers_savings_follow_from_its_losses(label):
    flops, complete_saves, half_saves = SHAPES[label]
    best = published("1.5B optimal")[2]  # on the frontier
    law = PowerLaw(a=3.99e20 * best ** (1 / B), b=B)
    assert law.loss(3.99e20) == pytest.approx(best)
    mup, half, complete = (loss_increase(x, law.loss(flops)) for x in published(label))
    assert 100 * flop_savings(mup, complete, B) == pytest.approx(complete_saves, abs=0.5)
    assert 100 * flop_savings(mup, half, B) == pytest.approx(half_saves, abs=1.5)
    printed_sign = 100 * (1 - (1 - (mup - complete)) ** (-1 / B))
    assert printed_sign < 0  # the printed exponent turns the saving into a loss
    assert abs(printed_sign - complete_saves) > 20


def test_savings_are_flops_saved():
    """Independently: the FLOPs at which a law reaches each of two losses."""
    law = PowerLaw(1e26, 0.05)
    slow, fast = 3.0, 2.95
    saved = 1 - inverse(law, slow) / inverse(law, fast)
    increase_slow, increase_fast = loss_increase(slow, fast), loss_increase(fast, fast)
    assert flop_savings(increase_slow, increase_fast, 0.05) == pytest.approx(float(saved), rel=1e-9)


def test_shape_range_finds_the_crossings():
    x = np.log([4.0, 8, 16, 32, 64, 128, 256])
    d = 0.004 * (x - math.log(40)) ** 2 + 0.0004 * (x - math.log(40)) ** 3
    found = shape_range(np.exp(x), d)
    assert found.best == pytest.approx(40, rel=0.01)
    for edge in (found.low, found.high):
        u = math.log(edge / 40)
        assert 0.004 * u**2 + 0.0004 * u**3 == pytest.approx(0.01, abs=1e-4)
    assert not found.open_low
    assert not found.open_high
    narrow = shape_range(np.exp(x), d, tolerance=0.001)
    assert found.low < narrow.low < narrow.best < narrow.high < found.high


def test_shape_range_that_never_closes_says_so():
    r = [10.0, 20, 40, 80]
    flat = shape_range(r, [0.001, 0.0, 0.0005, 0.002])
    assert flat.open_low
    assert flat.open_high
    above = shape_range(r, [0.05, 0.04, 0.045, 0.06], best=0.0)
    assert math.isnan(above.low)


def test_frontier_takes_the_best_of_each_size():
    frame = pl.DataFrame({"size": ["a", "a", "b"], "flops": [1.0, 1.5, 9.0], "loss": [3.0, 2.9, 2.5]})
    assert frontier(frame)["loss"].to_list() == [2.9, 2.5]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_power_law([1e18], [3.0]), "too few"),
        (lambda: fit_power_law([1e18, 1e18], [3.0, 2.9]), "too few"),
        (lambda: fit_power_law([1e18, 1e19], [3.0]), "2 x values but 1 y"),
        (lambda: fit_power_law([1e18, 1e19, 1e20], [3.0, 3.1, 2.5]), "3 at 1e\\+18 FLOPs, 3.1 at 1e\\+19"),
        (lambda: fit_power_law([1e18, 1e19], [3.0, float("nan")]), "not positive"),
        (lambda: fit_power_law([-1, 1e19], [3.0, 2.0]), "not positive"),
        (lambda: shape_range([1, 2, 3], [0.1, 0.2, 0.3]), "too few"),
        (lambda: shape_range([1, 2, 3, 4], [0.1, 0.2, 0.3]), "finite loss increase"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(UserError, match=message) as e:
        call()
    assert e.value.fix
