"""Statistics against known answers: slopes, intervals that cover, minima of curves."""

import math
from collections import Counter

import numpy as np
import polars as pl
import pytest

from completep import stats
from completep.stats import (
    Interval,
    error_of_mean,
    height_at,
    log_slope,
    mean_loss,
    mean_over_seeds,
    minimum,
    slope,
    slope_estimate,
    slope_weights,
)
from tests.measure.bowls import Noise, recorded, share, transfer_coverage


def test_a_known_slope_is_recovered_and_its_interval_covers():
    sizes = np.tile([2.0, 4, 8, 16], 3)
    seeds = np.repeat([0, 1, 2], 4)
    level = np.repeat([1.0, 5.0, 0.1], 4)  # seeds start apart; the slope is common
    exact = log_slope(sizes, level * sizes**0.3, seeds)
    assert (exact.value, exact.high - exact.low) == (pytest.approx(0.3), pytest.approx(0, abs=1e-9))
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        slope_ = log_slope(sizes, level * sizes**0.3 * np.exp(0.1 * rng.standard_normal(12)), seeds)
        covered += slope_.low <= 0.3 <= slope_.high
    assert 870 < covered < 930  # 90 % intervals


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042)]
)
def test_the_interval_is_students(freedom, quantile):
    """Against printed tables of t, with residuals of known size."""
    x = np.arange(freedom + 2.0)
    y = np.where(x % 2, 1.0, -1.0)
    fit, level = slope(x, y, level=0.95), np.polyfit(x, y, 1)
    residual = y - np.polyval(level, x)
    error = np.sqrt(residual @ residual / freedom / ((x - x.mean()) @ (x - x.mean())))
    assert fit.value == pytest.approx(level[0])
    assert fit.high - fit.value == pytest.approx(quantile * error, rel=1e-3)


def test_groups_have_levels_of_their_own():
    x, y, groups = [0.0, 1, 0, 1], [0.0, 2, 100, 102], ["a", "a", "b", "b"]
    assert slope(x, y, groups).value == pytest.approx(2)
    assert slope(x, y).low < -50  # the negative control: one level for all says nothing


@pytest.mark.parametrize("place", [-8.0, -7.7, -9.4])
def test_the_minimum_of_a_parabola_is_exact(place):
    x = np.arange(-12.0, -4)
    best = minimum(x, 2 + 0.05 * (x - place) ** 2)
    assert (best.place, best.height, best.interior) == (pytest.approx(place), pytest.approx(2), True)
    assert height_at(x, 2 + 0.05 * (x - place) ** 2, -8.3) == pytest.approx(2 + 0.05 * (-8.3 - place) ** 2)


def test_an_edge_or_a_divergent_neighbour_gives_the_point_itself():
    x = np.arange(3.0)
    assert not minimum(x, np.array([0.0, 1, 2])).interior
    assert not minimum(x, np.array([2.0, 1, 0])).interior
    beside = minimum(x, np.array([1.0, 0.0, np.inf]))
    assert (beside.place, beside.height, beside.interior) == (1.0, 0.0, True)
    assert height_at(x, x, -0.5) == np.inf


def test_two_values_are_a_line_between_them():
    assert height_at(np.array([0.0, 2.0]), np.array([1.0, 3.0]), 0.5) == pytest.approx(1.5)


def test_the_mean_counts_what_diverged_and_skips_what_is_missing():
    losses = np.array([[1.0, 3.0], [np.nan, 2.0], [np.inf, 1.0], [np.nan, np.nan]])
    assert mean_over_seeds(losses).tolist() == [2.0, 2.0, np.inf, np.inf]


def test_students_quantiles_and_p_values():
    """Against printed tables."""
    assert [stats.quantile(f) for f in (1, 2, 9, 30)] == pytest.approx([6.314, 2.920, 1.833, 1.697], rel=1e-3)
    assert stats.beyond(2.920, 1.0, 2, limit=0.0) == pytest.approx(0.05, rel=1e-3)
    assert stats.beyond(0.0, 1.0, 2, limit=0.0) == 0.5
    assert (stats.beyond(1.0, 0.0, 2, limit=0.5), stats.beyond(0.5, 0.0, 2, limit=0.5)) == (0.0, 1.0)


def test_holm_by_hand():
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.5, 0.6]) == [1.0, 1.0]
    assert stats.holm([]) == []


def test_a_mean_and_its_interval_by_hand():
    interval = stats.mean_interval([1.0, 2.0, 6.0])
    reach = 2.920 * np.sqrt(7 / 3)  # the variance of 1, 2, 6 is 7
    assert (interval.low, interval.high) == pytest.approx((3 - reach, 3 + reach), rel=1e-3)
    assert stats.mean_interval([1.0]) is None
    assert stats.mean_estimate([1.0]).freedom == 0


def test_welch_by_hand():
    assert stats.welch(2.0, 4, 3.0, 6) == pytest.approx(25 / (1 + 1.5))
    assert stats.welch(2.0, 4, 0.0, np.inf) == 4


@pytest.mark.parametrize("covariance", [0.0, 0.002, -0.002])
def test_the_ratio_against_every_ratio_tried(covariance):
    """Fieller: a ratio is in the interval exactly if one - ratio · two is not told from 0."""
    one, two = stats.Estimate(0.3, 0.08, 7), stats.Estimate(0.9, 0.1, 7)
    interval = stats.ratio_interval(one, two, covariance)
    t = stats.quantile(stats.welch(0.08**2, 7, (0.1 / 3) ** 2, 7))
    for ratio in np.linspace(-1, 1, 2001):
        variance = one.error**2 - 2 * ratio * covariance + (ratio * two.error) ** 2
        told = abs(one.value - ratio * two.value) > t * np.sqrt(variance)
        assert told != (ratio in interval) or min(abs(ratio - interval.low), abs(ratio - interval.high)) < 1e-3
    vague = stats.ratio_interval(one, stats.Estimate(0.1, 0.2, 7))
    assert (vague.low, vague.high) == (-np.inf, np.inf)


def bowl_of(place=-6.3, seeds=3, noise=0.005, values=range(-9, -2), bend=0.01, skew=0.0, rng=0, level=0.02):
    """(x, losses): a bowl with a level per seed."""
    rng, x = np.random.default_rng(rng), np.array(values, float)
    logs = 0.7 + bend * ((x - place) ** 2 + skew * (x - place) ** 3)
    return x, np.exp(logs[:, None] + level * rng.standard_normal(seeds) + noise * rng.standard_normal((len(x), seeds)))


def penalty(x, losses, constraint=None):
    """Least squares with levels and what is known of bowls, written out again: the minimum of the sum of squares over
    the residual variance, with a derivative of 0 at `constraint`.
    """
    y = np.log(losses)
    i = int(y.mean(1).argmin())
    u, y = x[i - 2 : i + 3] - x[i], y[i - 2 : i + 3]
    values, seeds = y.shape
    rest = y - y.mean(1, keepdims=True) - y.mean(0) + y.mean()
    sigma = np.sqrt((rest**2).sum() / ((values - 1) * (seeds - 1)))
    columns = [np.repeat(u**k, seeds) for k in range(1, 5)] + [
        np.tile(np.arange(seeds) == s, values) for s in range(seeds)
    ]
    design, target = np.stack(columns, 1).astype(float), y.ravel()
    c2 = abs(np.linalg.lstsq(np.delete(design, 3, 1), target, rcond=None)[0][1])
    prior = np.zeros((2, design.shape[1]))
    prior[0, 2], prior[1, 3] = 1 / (stats.SKEW * c2), 1 / (stats.TAIL * c2)
    design, target = np.concatenate([design / sigma, prior]), np.concatenate([target / sigma, [0, 0]])
    if constraint is not None:  # c1 = -(2 c2 v + 3 c3 v² + 4 c4 v³)
        v = constraint - x[i]
        rewritten = design[:, 1:].copy()
        rewritten[:, :3] -= np.outer(design[:, 0], [2 * v, 3 * v**2, 4 * v**3])
        design = rewritten
    rest = target - design @ np.linalg.lstsq(design, target, rcond=None)[0]
    return rest @ rest


@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_against_the_profile(seed):
    """At the ends of the interval, a minimum there fits worse by t² standard errors, by brute force."""
    x, losses = bowl_of(rng=seed, skew=0.1)
    bowl = stats.fit_bowl(x, losses)
    interval, t = bowl.optimum(), stats.quantile(8)  # (5 - 1)(3 - 1) degrees of freedom
    assert bowl.freedom == 8
    best = penalty(x, losses)
    assert penalty(x, losses, bowl.place) == pytest.approx(best, rel=1e-6)
    for end in (interval.low, interval.high):
        assert penalty(x, losses, end) - best == pytest.approx(t**2, rel=1e-4)
    assert interval.low < bowl.place < interval.high


def test_a_parabola_is_fiellers(monkeypatch):
    """If nothing but a parabola is allowed: the textbook interval of the ratio -c1 / 2 c2."""
    monkeypatch.setattr(stats, "SKEW", 1e-9)
    monkeypatch.setattr(stats, "TAIL", 1e-9)
    x, losses = bowl_of(values=(-8, -7, -6, -5), place=-6.4)
    bowl = stats.fit_bowl(x, losses)
    c1, c2 = bowl.coefficients[1:3]
    v = bowl.covariance
    one, two = (stats.Estimate(c, np.sqrt(w), bowl.freedom) for c, w in ((-c1, v[1, 1]), (2 * c2, 4 * v[2, 2])))
    t, welch = stats.quantile(bowl.freedom), stats.quantile
    monkeypatch.setattr(stats, "quantile", lambda freedom, level: t)  # one fit has one number of degrees of freedom
    expected = stats.ratio_interval(one, two, -2 * v[1, 2])
    monkeypatch.setattr(stats, "quantile", welch)
    found = bowl.optimum()
    assert (found.low, found.high) == pytest.approx((bowl.origin + expected.low, bowl.origin + expected.high), abs=1e-5)


def test_levels_of_seeds_do_not_matter():
    x, losses = bowl_of()
    moved = losses * np.array([1.0, 1.7, 0.6])
    one, two = stats.fit_bowl(x, losses), stats.fit_bowl(x, moved)
    assert (two.place, two.optimum().low) == pytest.approx((one.place, one.optimum().low))
    unequal = moved.copy()
    unequal[2, 1] = unequal[5, 2] = np.nan
    assert stats.fit_bowl(x, unequal).place == pytest.approx(one.place, abs=0.2)
    exact, _ = np.log(bowl_of(noise=0, seeds=3)[1]), None
    effects = exact.mean(1)
    exact[0, 0] = exact[3, 2] = np.nan
    found = stats.levels(exact)
    assert np.diff(found) == pytest.approx(np.diff(effects))
    assert not np.allclose(np.diff(np.nanmean(exact, 1)), np.diff(effects))  # the negative control: plain means are off


def test_few_values_give_wide_intervals():
    widths = []
    for values in (range(-8, -3), (-7, -6, -5)):
        interval = stats.fit_bowl(*bowl_of(noise=1e-4, values=values)).optimum()
        widths.append(interval.high - interval.low)
    assert widths[1] > 3 * widths[0]  # three values do not show how far the bowl is from a parabola


def test_a_flat_bowl_has_no_optimum_and_one_seed_no_interval():
    flat = [stats.fit_bowl(*bowl_of(bend=1e-4, rng=rng)).optimum() for rng in range(20)]
    assert np.mean([np.isinf(i.high - i.low) for i in flat]) > 0.7  # noise makes a minimum now and then
    one = stats.fit_bowl(*bowl_of(seeds=1, noise=0))
    assert one.place == pytest.approx(-6.3, abs=0.01)
    assert one.freedom == 0
    assert one.optimum() == Interval(-np.inf, np.inf)
    assert stats.drift_interval(one, one) == Interval(-np.inf, np.inf)


def test_what_diverged_ends_a_bowl():
    x, losses = bowl_of(place=-5.2)
    losses[5:] = np.inf  # -4 and above
    bowl = stats.fit_bowl(x, losses)
    assert (bowl.high, bowl.edge) == (-4.0, False)
    assert bowl.optimum().high <= -4
    losses[2:] = np.inf
    assert stats.fit_bowl(x, losses) is None
    assert stats.fit_bowl(x, np.full_like(losses, np.inf)) is None


def test_the_drift_of_sharp_bowls_is_welchs():
    one, two = (
        stats.fit_bowl(*bowl_of(noise=1e-3, bend=0.05)),
        stats.fit_bowl(*bowl_of(-5.8, 5, 1e-3, bend=0.03, rng=1)),
    )
    variance = one.place_variance + two.place_variance
    t = stats.quantile(stats.welch(one.place_variance, one.freedom, two.place_variance, two.freedom))
    found = stats.drift_interval(one, two)
    assert found.high - found.low == pytest.approx(2 * t * np.sqrt(variance), rel=0.02)
    assert 0.5 in found
    # The p-value is that of the interval which just reaches the limit.
    p = stats.drift_beyond(one, two, 0.45)
    assert stats.drift_interval(one, two, 1 - 2 * p).low == pytest.approx(0.45, abs=1e-6)
    assert stats.drift_beyond(one, two, 0.6) == 1.0


def test_regret_in_one_fit_and_over_two():
    """On a parabola in log loss, by hand: bend · distance²."""
    for place in (-6.9, -5.1, -8.6, -3.4):  # the last two lie outside the fit
        x, losses = bowl_of(noise=0)
        regret = stats.regret_at(stats.Place(place), x, losses, stats.fit_bowl(x, losses))
        assert regret.value == pytest.approx(0.01 * (place + 6.3) ** 2, rel=1e-4)
    noisy, base = bowl_of(noise=0.003), stats.fit_bowl(*bowl_of(-7.3, noise=0.003, rng=5))
    fitted = stats.fit_bowl(*noisy)
    known = stats.regret_at(stats.Place(base.place), *noisy, fitted)
    unsure = stats.regret_at(base.estimate, *noisy, fitted)
    assert unsure.value == known.value
    assert unsure.error > known.error  # where the base's optimum lies is uncertain too
    assert stats.regret_at(stats.Place(-12.0), *noisy, fitted) is None


def test_regret_beyond_the_last_value_is_a_lower_bound():
    x, losses = bowl_of(-10.0, noise=1e-4)
    regret = stats.regret_at(stats.Place(-7.0), x, losses, stats.fit_bowl(x, losses))
    assert regret.at_least
    assert regret.interval().high == np.inf
    assert regret.value == pytest.approx(0.01 * (9 - 1), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("truth", [0.0, 0.4, 1.0, 1.6, 4.0])
def test_the_interval_of_something_that_is_never_negative(truth):
    """Exactly 90 % at every distance from 0, where root ± 1.645 covers 95 % next to it."""
    rng = np.random.default_rng(7)
    estimates = truth + rng.standard_normal(1500)
    intervals = [stats.Regret(z, 1.0, 1e6).interval() for z in estimates]
    assert np.mean([i.low - 1e-9 <= truth**2 <= i.high for i in intervals]) == pytest.approx(0.9, abs=0.025)
    wide = [max(abs(abs(z) + 1.645), 0) >= truth and (abs(z) < 1.645 or abs(z) - 1.645 <= truth) for z in estimates]
    if 0 < truth < 1.6:
        assert np.mean(wide) > 0.93


@pytest.mark.slow
def test_intervals_cover_on_recorded_bowls():
    """A small version of benchmarks/coverage.py."""
    curves, x = list(recorded("lr-transfer", "lr").values()), np.arange(-9.0, -2)
    rng, counts = np.random.default_rng(1), Counter()
    for other in curves:
        counts += transfer_coverage(curves[0], other, x, 3, Noise(), 25, rng)
    for name in ("optimum", "drift", "regret"):
        assert 0.83 < share(counts, name) < 0.97  # 175 draws at 0.9 scatter by 0.023


@pytest.mark.slow
def test_a_parabola_alone_would_not_cover(monkeypatch):
    """The negative control: without what is known of bowls, their asymmetry is taken for a drift."""
    monkeypatch.setattr(stats, "SKEW", 1e-6)
    monkeypatch.setattr(stats, "TAIL", 1e-6)
    curves, x = list(recorded("lr-transfer", "lr").values()), np.arange(-9.0, -2)
    rng, counts = np.random.default_rng(1), Counter()
    for other in curves:
        counts += transfer_coverage(curves[0], other, x, 8, Noise(), 8, rng)
    assert share(counts, "optimum") < 0.6


def test_the_noise_is_what_levels_of_values_and_seeds_leave():
    dice = np.random.default_rng(0)
    logs = dice.normal(0, 1, (5, 1)) + dice.normal(0, 1, (1, 400)) + dice.normal(0, 0.03, (5, 400))
    noise = stats.noise_beside_levels([np.exp(logs)])
    assert noise.value == pytest.approx(0.03, rel=0.05)
    assert noise.freedom == 4 * 399
    assert stats.noise_beside_levels([np.exp(logs[:, :1])]) is None
    exact = np.exp(logs.mean(1, keepdims=True) + logs.mean(0, keepdims=True))
    assert stats.noise_beside_levels([exact]).value < 1e-12
    exact[2] = np.inf  # a value that diverged says nothing
    exact[1:, 7] = np.nan  # nor does a seed of one value
    rest = stats.noise_beside_levels([exact])
    assert rest.value < 1e-12
    assert rest.freedom == 3 * 398


def test_the_limit_of_a_noise_is_kept_as_often_as_it_says():
    dice = np.random.default_rng(1)
    curves = [np.exp(dice.normal(0, 0.02, (3, 3))) for _ in range(2000)]
    kept = [stats.noise_beside_levels([c]).at_most(0.8) >= 0.02 for c in curves]
    assert np.mean(kept) == pytest.approx(0.8, abs=0.03)


def test_the_mean_loss_of_each_point_is_over_the_seeds_that_ended():
    frame = pl.DataFrame(
        {
            "depth": [8, 2, 8, 2, 4, 4, 16],
            "seed": [0, 0, 1, 1, 0, 1, 0],
            "loss": [2.0, 3.0, 4.0, None, 1.0, math.nan, None],
        }
    )
    means = mean_loss(frame, "depth")
    assert means["depth"].to_list() == [8, 2, 4]  # as they appear; nothing of a point without an end
    assert means["loss"].to_list()[:2] == [3.0, 3.0]
    assert math.isnan(means["loss"][2])  # a run that diverged is not averaged away
    assert mean_loss(frame.reverse(), "depth")["depth"].to_list() == [4, 8, 2]


def test_the_error_of_a_mean_of_estimates():
    """By simulation: the standard deviation of the mean of three numbers with these errors."""
    errors = np.array([1.0, 2.0, 0.5])
    means = (np.random.default_rng(0).normal(size=(100_000, 3)) * errors).mean(1)
    assert error_of_mean(errors) == pytest.approx(means.std(), rel=0.01)


def test_the_weights_of_a_slope_are_how_much_it_moves():
    x, y = np.array([0.0, 1.0, 3.0, 7.0]), np.array([1.0, 0.5, 2.0, 2.5])
    moved = [slope(x, y + np.eye(4)[i]).value - slope(x, y).value for i in range(4)]
    assert slope_weights(x) == pytest.approx(moved)


def test_an_estimate_of_a_slope_and_its_interval_are_scipys():
    from scipy.stats import linregress

    x, y = np.array([0.0, 1.0, 3.0, 7.0]), np.array([1.0, 0.5, 2.0, 2.5])
    estimate, expected = slope_estimate(x, y), linregress(x, y)
    assert (estimate.value, estimate.error, estimate.freedom) == pytest.approx((expected.slope, expected.stderr, 2))
    assert slope(x, y).high - slope(x, y).value == pytest.approx(estimate.reach())
