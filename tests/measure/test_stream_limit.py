"""The stream at init against the paper's limit, and a network that is not the paper's as a control."""

import math

import pytest

from completep import COMPLETEP, MUP, alpha
from completep.errors import UserError
from completep.measure.stream_limit import derived_growth, limit, limit_words, measure_growth


def test_the_limits_are_the_papers():
    assert limit(COMPLETEP) == limit(alpha(0.75)) == 1
    assert limit(alpha(0.5), std=2.0) == pytest.approx(math.exp(2))
    assert limit(MUP) == math.inf
    for rules in (alpha(0.5), alpha(0.75), COMPLETEP):
        assert derived_growth(rules, 2**40) == pytest.approx(limit(rules), rel=2e-3)
    assert derived_growth(alpha(0.5), 4) == pytest.approx((1 + 1 / 8) ** 4)


@pytest.mark.slow
def test_the_stream_grows_as_derived():
    growths = measure_growth([MUP, alpha(0.5), COMPLETEP], [2, 8, 32], width=384, seeds=range(6), workers=1)
    assert "FAIL" not in {g.word for g in growths}
    assert {g.word for g in growths if g.rules == "completep"} == {"PASS"}
    for g in growths:
        assert math.log(g.measured) == pytest.approx(math.log(g.derived), rel=0.05, abs=0.05)
    assert "muP" in limit_words(growths)
    assert "at depth 32 (limit inf)" in limit_words(growths)


def test_another_init_is_not_as_derived(monkeypatch):
    """The recursion holds for N(0, σ²/N): with half the variance it must fail where the stream grows."""
    monkeypatch.setattr("completep.measure.stream_limit.derived_growth", lambda r, d, s: derived_growth(r, d, s / 2))
    growths = measure_growth([alpha(0.5)], [8, 32], width=256, seeds=range(4), workers=1)
    assert {g.word for g in growths} == {"FAIL"}


def test_one_seed_has_no_interval():
    with pytest.raises(UserError, match="1 seed has no interval"):
        measure_growth([COMPLETEP], [2], seeds=[0])
