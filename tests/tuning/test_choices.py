"""Words and pairs of values: the base's choice must cost little beside every other one at every larger shape."""

import math
import random

import polars as pl
import pytest

from completep.config import Shape
from completep.tuning.choices import choice_table, judge_choice
from completep.tuning.space import Dimension

BASE, LARGE = Shape(64, 2), Shape(64, 8)
ACT = Dimension("act", "choice", ("gelu", "relu", "tanh"))


def frame(losses, seeds=4, noise=0.001):
    """`losses` by shape and value."""
    dice = random.Random(0)
    level = [0.05 * dice.gauss(0, 1) for _ in range(seeds)]
    return pl.DataFrame(
        [
            {"width": shape.width, "depth": shape.depth, "act": value, "seed": seed,
             "loss": loss * math.exp(level[seed] + noise * dice.gauss(0, 1))}
            for shape, table in losses.items() for value, loss in table.items() for seed in range(seeds)
        ]
    )  # fmt: skip


def judged(large, **how):
    return judge_choice(frame({BASE: {"gelu": 2.0, "relu": 2.1, "tanh": 2.2}, LARGE: large}, **how), ACT, BASE)


@pytest.mark.parametrize(
    ("large", "how", "word", "why"),
    [
        ({"gelu": 1.5, "relu": 1.6, "tanh": 1.7}, {}, "PASS", ""),
        ({"gelu": 1.5, "relu": 1.497, "tanh": 1.7}, {}, "PASS", ""),  # 0.2 % worse is within the limit
        ({"gelu": 1.6, "relu": 1.5, "tanh": 1.7}, {}, "FAIL", "relu is better by 6"),
        ({"gelu": 1.5, "relu": 1.5, "tanh": 1.7}, {"noise": 0.02}, "INCONCLUSIVE", "add seeds"),
        ({"gelu": 1.5, "relu": 1.6, "tanh": 1.7}, {"seeds": 1}, "INCONCLUSIVE", "add seeds"),
        ({"gelu": math.nan, "relu": 1.5, "tanh": 1.7}, {}, "FAIL", "gelu diverges here"),
        ({"gelu": 1.5, "relu": math.nan, "tanh": 1.7}, {}, "PASS", ""),
        ({"gelu": math.nan, "relu": math.nan, "tanh": math.nan}, {}, "INCONCLUSIVE", "as all do"),
        ({"gelu": 1.5}, {}, "INCONCLUSIVE", "were not run here"),
    ],
)
def test_the_verdict_of_a_choice(large, how, word, why):
    found = judged(large, **how)
    assert found.best == "gelu"
    assert found.word == word, found
    assert why in found.why
    assert word in str(choice_table(found))


@pytest.mark.slow
def test_a_choice_that_is_no_better_fails_as_rarely_as_it_should():
    """Four alternatives as good as the base's, with three seeds: 5 % of all verdicts may fail."""
    act = Dimension("act", "choice", tuple("abcde"))
    dice, failed = random.Random(1), 0
    for _ in range(300):
        rows = [
            {"width": s.width, "depth": s.depth, "act": v, "seed": k,
             "loss": math.exp(0.02 * dice.gauss(0, 1)) * (1 if v != "a" else 0.9 if s == BASE else 1.005)}
            for s in (BASE, LARGE) for v in "abcde" for k in range(3)
        ]  # fmt: skip
        failed += judge_choice(pl.DataFrame(rows), act, BASE).word == "FAIL"
    assert failed / 300 <= 0.08


def test_seeds_are_compared_with_themselves():
    """A missing run is left out, and no seed is compared with another one."""
    whole = frame({BASE: {"gelu": 2.0, "relu": 2.1}, LARGE: {"gelu": 1.5, "relu": 1.6}}, noise=0)
    part = whole.filter(~((pl.col("seed") == 1) & (pl.col("depth") == 8) & (pl.col("act") == "gelu")))
    two = Dimension("act", "choice", ("gelu", "relu"))
    assert judge_choice(part, two, BASE).shapes[0].regret == pytest.approx(100 * (1.5 / 1.6 - 1))
