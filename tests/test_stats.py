"""Statistics against known answers: slopes, intervals that cover, minima of curves."""

import numpy as np
import pytest

from completep.stats import Interval, bootstrap, height_at, log_slope, mean_over_seeds, minimum, slope


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


def test_bootstrap_needs_seeds_and_finds_their_spread():
    x = np.arange(-12.0, -4)
    rng = np.random.default_rng(3)
    losses = 2 + 0.05 * (x[:, None] + 8.3) ** 2 + 0.01 * rng.standard_normal((len(x), 6))
    found = bootstrap(lambda y: minimum(x, y).place, losses, 500, least=3)
    assert isinstance(found, Interval)
    assert -8.3 in found
    assert found.high - found.low < 0.5
    assert bootstrap(lambda y: minimum(x, y).place, losses[:, :2], 500, least=3) is None
