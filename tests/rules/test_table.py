"""The table against a copy typed independently from the paper, and its own algebra."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from completep import COMPLETEP, MUP, SP, Role, UserError, alpha
from completep.rules.table import (
    Column,
    Folded,
    Rules,
    as_rules,
    display_name,
    flat_eps,
    known_rules,
    literature,
    muon_shape_factor,
    optimizer_kind,
    rules_named,
)

# role: (init std, learning rate, weight decay, epsilon), as in RULES.md and Table 1; N and L are ratios, a is alpha.
ADAM = {
    "embedding": ("1", "1", "1", "1/N"),
    "embedding bias": ("1", "1", "1", "1/N"),
    "hidden weight": ("N**-0.5", "1/N * L**(a-1)", "N", "1/N * L**-a"),
    "expert weight": ("N**-0.5", "1/N * L**(a-1)", "N", "1/N * L**-a"),
    "router": ("N**-0.5", "1/N * L**(a-1)", "N", "1/N * L**-a"),
    "hidden bias": ("1", "L**(a-1)", "1", "1/N * L**-a"),
    "block table": ("1", "L**(a-1)", "1", "1/N * L**-a"),
    "block vector": ("1", "L**(a-1)", "1", "1/N * L**-a"),
    "stream scale": ("1", "1/L", "1", "1"),
    "block norm": ("1", "L**(a-1)", "1", "1/N * L**-a"),
    "QK norm": ("1", "L**(a-1)", "1", "L**-a"),
    "final norm": ("1", "1", "1", "1/N"),
    "head weight": ("N**-0.5", "1/N", "N", "1/N"),
    "head bias": ("1", "1", "1", "1/N"),
    "unembedding": ("1", "1", "1", "1/N"),
    "unembedding bias": ("1", "1", "1", "1"),
}
SGD = {
    "embedding": ("1", "N", "1/N", "1"),
    "embedding bias": ("1", "N", "1/N", "1"),
    "hidden weight": ("N**-0.5", "L**(2*a-1)", "L**-a", "1"),
    "expert weight": ("N**-0.5", "L**(2*a-1)", "L**-a", "1"),
    "router": ("N**-0.5", "L**(2*a-1)", "L**-a", "1"),
    "hidden bias": ("1", "N * L**(2*a-1)", "1", "1"),
    "block table": ("1", "N * L**(2*a-1)", "1/N * L**-a", "1"),
    "block vector": ("1", "N * L**(2*a-1)", "1", "1"),
    "stream scale": ("1", "1/L", "1", "1"),
    "block norm": ("1", "N * L**(2*a-1)", "1", "1"),
    "QK norm": ("1", "L**(2*a-1)", "1", "1"),
    "final norm": ("1", "N", "1/N", "1"),
    "head weight": ("N**-0.5", "1", "1", "1"),
    "head bias": ("1", "N", "1/N", "1"),
    "unembedding": ("1", "N", "1/N", "1"),
    "unembedding bias": ("1", "1", "1", "1"),
}
MUON = dict.fromkeys(("hidden weight", "expert weight"), ("N**-0.5", "L**(a-1)", "1", "1"))

ratios = st.floats(0.1, 100)
alphas = st.floats(0.5, 1)


def resolved(rules: Rules, column: Column, N: float, L: float) -> dict[str, tuple[float, ...]]:
    return {
        str(role): (r.init_std(N, L), r.lr(N, L), r.weight_decay(N, L), r.eps(N, L))
        for role, r in rules.columns[column].items()
    }


def forward(rules: Rules, N: float, L: float) -> tuple[float, ...]:
    return rules.branch(N, L), rules.logits(N, L), rules.attention(N, L), rules.embedding(N, L)


@pytest.mark.parametrize("a", [0.5, 0.75, 1.0])
@pytest.mark.parametrize(("N", "L"), [(4.0, 8.0), (3.5, 0.5), (1.0, 64.0)])
@pytest.mark.parametrize(("column", "golden"), [(Column.ADAM, ADAM), (Column.SGD, SGD), (Column.MUON, MUON)])
def test_golden_table(a, N, L, column, golden):
    expected = {role: tuple(eval(cell, {"N": N, "L": L, "a": a}) for cell in row) for role, row in golden.items()}
    found = resolved(alpha(a), column, N, L)
    assert found.keys() == expected.keys()
    for role, row in expected.items():
        assert found[role] == pytest.approx(row, rel=1e-14), role
    assert forward(alpha(a), N, L) == pytest.approx((L**-a, 1 / N, 1 / N, N**-0.5), rel=1e-14)


def test_every_role_has_an_adam_and_an_sgd_row():
    for rules in (SP, MUP, COMPLETEP, alpha(0.6)):
        assert set(rules.columns[Column.ADAM]) == set(rules.columns[Column.SGD]) == set(Role)


@given(N=ratios, L=ratios)
def test_sp_has_no_factor_anywhere(N, L):
    for column in Column:
        assert all(row == (1, 1, 1, 1) for row in resolved(SP, column, N, L).values())
    assert forward(SP, N, L) == (1, 1, 1, 1)


@given(a=alphas, N=ratios)
def test_alpha_at_base_depth_is_mup(a, N):
    for column in Column:
        assert resolved(alpha(a), column, N, 1.0) == resolved(MUP, column, N, 1.0)
    assert forward(alpha(a), N, 1.0) == forward(MUP, N, 1.0)


@given(L=ratios)
def test_mup_at_base_width_is_sp(L):
    for column in Column:
        assert resolved(MUP, column, 1.0, L) == resolved(SP, column, 1.0, L)
    assert forward(MUP, 1.0, L) == forward(SP, 1.0, L)


@given(N=ratios, L=ratios)
def test_mup_does_scale_weight_decay_and_epsilon(N, L):
    hidden = MUP.rule(Role.HIDDEN)
    assert hidden.weight_decay(N, L) == N
    assert hidden.eps(N, L) == pytest.approx(1 / N, rel=1e-14)


@given(N=ratios, L=ratios)
def test_completep_learning_rates_are_depth_free(N, L):
    for role in set(Role) - {Role.STREAM_SCALE}:
        assert COMPLETEP.rule(role).lr(N, L) == COMPLETEP.rule(role).lr(N, 1.0)


@given(a=alphas, N=ratios, L=ratios)
def test_a_branch_moves_the_stream_by_one_over_L(a, N, L):
    """Desideratum 2: branch multiplier × step of a vector in the branch = 1/L, at any alpha."""
    rules = alpha(a)
    for role in (Role.HIDDEN_BIAS, Role.BLOCK_NORM):
        assert rules.branch(N, L) * rules.rule(role).lr(N, L) == pytest.approx(1 / L, rel=1e-12)
    assert rules.branch(N, L) * rules.rule(Role.HIDDEN).lr(N, L) * N == pytest.approx(1 / L, rel=1e-12)


@pytest.mark.slow
@given(a=alphas, N=ratios, L=ratios)
def test_sgd_takes_the_steps_that_adam_takes(a, N, L):
    """SGD's lr × the gradient's own size (Adam's ε column) = Adam's lr, and the decay per step agrees: App. D.5."""
    for role in Role:
        adam, sgd = alpha(a).rule(role), alpha(a).rule(role, Column.SGD)
        assert sgd.lr(N, L) * adam.eps(N, L) == pytest.approx(adam.lr(N, L), rel=1e-9), role
        if role in (Role.EMBEDDING, Role.HIDDEN, Role.UNEMBEDDING):
            assert sgd.lr(N, L) * sgd.weight_decay(N, L) == pytest.approx(
                adam.lr(N, L) * adam.weight_decay(N, L), rel=1e-9
            )


@given(a=alphas, N=ratios, L=ratios)
def test_literature_alpha_forgets_biases_norms_and_epsilon(a, N, L):
    right, wrong = alpha(a), literature(a)
    assert wrong.rule(Role.HIDDEN).lr == right.rule(Role.HIDDEN).lr
    assert wrong.branch == right.branch
    for role in (Role.HIDDEN_BIAS, Role.BLOCK_NORM, Role.QK_NORM):
        assert wrong.rule(role).lr(N, L) == 1
    assert all(rule.eps.depth == 0 for rule in wrong.columns[Column.ADAM].values())


def test_every_row_names_its_source():
    for rules in (SP, MUP, COMPLETEP, literature(0.5)):
        for rows in rules.columns.values():
            assert all(rule.source for rule in rows.values())


@pytest.mark.parametrize("a", [0.49, 1.01, -1, math.nan, math.inf, "1", True, None])
def test_alpha_outside_its_range_is_refused(a):
    with pytest.raises(UserError, match=r"\[0.5, 1\]"):
        alpha(a)


@pytest.mark.parametrize(
    ("word", "rules"),
    [
        ("sp", SP),
        ("muP", MUP),
        ("CompleteP", COMPLETEP),
        ("alpha=0.5", alpha(0.5)),
        ("literature=0.5", literature(0.5)),
    ],
)
def test_rules_by_name(word, rules):
    assert rules_named(word) == rules


# role: (start, decayed, matrix, inside, acts on, fan), typed independently.
TRAITS = {
    "embedding": ("random", True, True, False, "stream", "model"),
    "embedding bias": ("constant", False, False, False, "stream", "model"),
    "hidden weight": ("random", True, True, True, "stream", "matrix"),
    "expert weight": ("random", True, True, True, "stream", "matrix"),
    "router": ("random", True, True, True, "stream", "matrix"),
    "hidden bias": ("constant", False, False, True, "stream", "vector"),
    "block table": ("random", True, True, True, "stream", "vector"),
    "block vector": ("constant", False, False, True, "stream", "vector"),
    "stream scale": ("constant", False, False, False, "stream", "fixed"),
    "block norm": ("constant", False, False, True, "stream", "vector"),
    "QK norm": ("constant", False, False, True, "stream", "fixed"),
    "final norm": ("constant", False, False, False, "logits", "vector"),
    "head weight": ("random", True, True, False, "logits", "matrix"),
    "head bias": ("constant", False, False, False, "logits", "vector"),
    "unembedding": ("random", True, True, False, "logits", "readout"),
    "unembedding bias": ("constant", False, False, False, "logits", "fixed"),
}


def test_traits():
    found = {
        str(role): (t.start, t.decayed, t.matrix, t.inside, t.acts_on, t.fan)
        for role, t in ((role, role.trait) for role in Role)
    }
    assert found == TRAITS


@pytest.mark.parametrize(
    ("rules", "key", "name"),
    [
        (SP, "sp", "SP"),
        (MUP, "mup", "muP"),
        (COMPLETEP, "completep", "CompleteP"),
        (alpha(1), "completep", "CompleteP"),
        (alpha(0.75), "alpha=0.75", "alpha=0.75"),
        (literature(0.5), "literature=0.5", "literature alpha=0.5"),
        (flat_eps(1), "flat-eps=1", "CompleteP without the depth rule for ε"),
        (flat_eps(0.5), "flat-eps=0.5", "alpha=0.5 without the depth rule for ε"),
    ],
)
def test_every_parameterization_has_one_key_and_one_name(rules, key, name):
    assert (rules.key, rules.name) == (key, name)
    assert rules_named(key) == rules_named(key.upper()) == as_rules(key) == as_rules(rules) == rules
    assert display_name(key) == name


def test_names_that_are_not_rules_are_left_as_they_are():
    for text in ("my own rules", "", "alpha", "alpha=7"):
        assert display_name(text) == text
        assert known_rules(text) is None
    assert rules_named("literature alpha=0.5") == literature(0.5)
    with pytest.raises(UserError, match="rules=None are not rules"):
        as_rules(None)


@pytest.mark.parametrize("word", ["", "mu", "alpha", "alpha=x", "sp=1"])
def test_unknown_rules_are_refused(word):
    with pytest.raises(UserError, match="no rules named"):
        rules_named(word)


@pytest.mark.parametrize("optimizer", ["adafactor", "LBFGS", "shampoo"])
def test_unknown_optimizer_is_refused(optimizer):
    with pytest.raises(UserError, match=optimizer):
        optimizer_kind(optimizer)


@given(c=st.floats(1e-3, 1e3))
def test_folding_there_and_back_is_nothing(c):
    for column in Column:
        there, back = Folded.by(c, column), Folded.by(1 / c, column)
        for field in dataclasses.fields(Folded):
            assert getattr(there, field.name) * getattr(back, field.name) == pytest.approx(1, rel=1e-12)


def test_muon_shape_factor_completes_torchs_own():
    for fan_out, fan_in in [(64, 64), (256, 64), (64, 256)]:
        for rows, columns in [(fan_out, fan_in), (fan_in, fan_out)]:  # as nn.Linear stores it, and as HF's Conv1D does
            torchs = max(1, rows / columns) ** 0.5
            assert torchs * muon_shape_factor(fan_out, fan_in, rows, columns) == pytest.approx(
                (fan_out / fan_in) ** 0.5
            )
