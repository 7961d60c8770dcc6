"""How many seeds the noise asks for: the verdict's errors stay what they are, and right models pass more often."""

import math
from collections import Counter

import numpy as np
import polars as pl
import pytest

from completep.config import Shape
from completep.measure.curves import judge_transfer
from completep.tuning.precision import Advice, Design, advise

BASE, PROXY = Shape(64, 2), Shape(64, 8)
OCTAVES = np.arange(-11.0, -2.0)
STEEP = 0.015  # of the log loss per octave²
AT_LIMIT = (math.log1p(0.005) / STEEP) ** 0.5  # octaves at which the regret is half a percent


class Simulated:
    """Losses of a base and a proxy, with noise that is drawn once: more seeds only add runs."""

    def __init__(self, seed, noise, drift):
        dice = np.random.default_rng(seed)
        self.places = {BASE: -7.2, PROXY: -7.2 + drift}
        levels = dice.normal(0, 0.02, 20)
        self.logs = {
            s: STEEP * (OCTAVES[:, None] - p) ** 2 + levels + dice.normal(0, noise, (len(OCTAVES), 20))
            for s, p in self.places.items()
        }

    def frame(self, shapes, design):
        rows = []
        for shape in shapes:
            best = int(self.logs[shape][:, : design.seeds].mean(1).argmin())
            for i in range(best - design.reach, best + design.reach + 1):
                rows += [
                    {"width": shape.width, "depth": shape.depth, "lr": 2.0 ** OCTAVES[i], "seed": s,
                     "loss": float(np.exp(self.logs[shape][i, s]))}
                    for s in range(design.seeds)
                ]  # fmt: skip
        return pl.DataFrame(rows)

    def verdict(self, most):
        """As a tuning does it: asked at the base, and again with the proxy."""
        design = Design(1, 3)
        for shapes in ((BASE,), (BASE, PROXY)):
            advice = advise(self.frame(shapes, design), "lr", BASE, 2.0**OCTAVES, design, most)
            design |= advice.design if advice else design
        return judge_transfer(self.frame((BASE, PROXY), design), "lr", BASE)[0].word, design


def shares(noise, drift, most, count):
    """How often the verdict is each word, and the mean number of runs."""
    ends = [Simulated(seed, noise, drift).verdict(most) for seed in range(count)]
    runs = [2 * (2 * design.reach + 1) * design.seeds for _, design in ends]
    words = Counter(word for word, _ in ends)
    return words["PASS"] / count, words["FAIL"] / count, sum(runs) / count


@pytest.mark.slow
def test_right_models_pass_more_often_and_wrong_ones_do_not():
    """At a noise with which three seeds of three values pass in two of three cases. Of 60 tunings, three are 5 %."""
    noise, count = 0.01, 60
    fixed, _, few = shares(noise, 0.0, 3, count)
    passed, failed, many = shares(noise, 0.0, 8, count)
    assert passed >= 0.85
    assert passed > fixed
    assert failed == 0
    assert few < many < 2 * 5 * 8
    wrong, _, _ = shares(noise, AT_LIMIT, 8, count)
    assert wrong <= 0.1  # 5 % is meant
    _, found, _ = shares(noise, 2 * AT_LIMIT, 8, count)
    assert found >= 0.8


@pytest.mark.slow
def test_little_noise_asks_for_nothing_and_too_much_is_said():
    quiet = Simulated(0, 0.001, 0.0)
    first = Design(1, 3)
    advice = advise(quiet.frame((BASE, PROXY), first), "lr", BASE, 2.0**OCTAVES, first, 8)
    assert advice.design == first
    assert advice.likely
    assert 0.02 < advice.noise < 0.3
    loud = Simulated(0, 0.08, 0.0)
    advice = advise(loud.frame((BASE, PROXY), Design(2, 8)), "lr", BASE, 2.0**OCTAVES, first, 8)
    if advice is not None:
        assert advice.design == first
        assert not advice.likely
        assert advice.seeds is None or advice.seeds > 8


@pytest.mark.slow
def test_the_advice_does_not_depend_on_where_the_optimum_of_a_proxy_lies():
    """The same noise and the same steepness, drifted by a whole value of the grid: the same number of seeds."""
    here, there = Simulated(3, 0.02, 0.0), Simulated(3, 0.02, 0.0)
    there.logs[PROXY] = np.roll(there.logs[PROXY], 1, axis=0)
    first = Design(2, 4)
    one, two = (advise(s.frame((BASE, PROXY), first), "lr", BASE, 2.0**OCTAVES, first, 8) for s in (here, there))
    assert one == two


def test_where_there_is_no_bowl_there_is_no_advice():
    falling = pl.DataFrame(
        [{"width": 64, "depth": 2, "lr": 2.0**e, "seed": s, "loss": 3 - 0.1 * e + 0.01 * s * e} for e in (1, 2, 3)
         for s in (0, 1)]
    )  # fmt: skip
    assert advise(falling, "lr", BASE, [2.0, 4.0, 8.0], Design(), 8) is None


def test_what_is_said():
    assert str(Advice(0.213, Design(2, 6), 6)) == (
        "the noise of a run is 0.21 % of its loss: a PASS needs 6 seeds of 5 values at every shape"
    )
    assert str(Advice(3.0, Design(1, 3), 40)).endswith("a PASS needs about 40 seeds at every shape")
    assert str(Advice(30.0, Design(1, 3), None)).endswith("a PASS needs more than 200 seeds at every shape")
