"""Multipliers of learning rates by role: exactly that role's rate is multiplied, at every size and in every form."""

import pytest
import torch

from completep import Role, UserError, audit, parametrize
from completep.config import Hyperparameters
from completep.model.gpt import gpt
from completep.rules.table import LR_NAMES
from completep.tuned import TunedValue, TunedValues
from tests.rules.training import VOCABULARY

BASE = (32, 2)
SIZES = [BASE, (64, 2), (32, 8), (96, 6)]
PRESENT = [
    Role.EMBEDDING, Role.HIDDEN, Role.HIDDEN_BIAS, Role.BLOCK_NORM, Role.QK_NORM, Role.FINAL_NORM, Role.UNEMBEDDING,
]  # fmt: skip
TIMES = 3.7  # no power of two, so that a product in another order would be another float
ALL = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-12}


def model(width, depth):
    return gpt(width, depth, VOCABULARY, head_size=16, qk_norm=True)


def scaled(size, rules="completep", style="multiplier", tuned=None):
    made = parametrize(model(*size), base=lambda: model(*BASE), rules=rules, style=style, tuned=tuned)
    return made.init_(0.02)


def by_name(groups, *keys):
    """The settings of every parameter."""
    return {name: tuple(g.get(key) for key in keys) for g in groups for name in g["names"]}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("rules", "style"), [("completep", "multiplier"), ("completep", "folded"), ("mup", "multiplier"), ("sp", "folded")]
)
def test_exactly_the_rate_of_that_role_is_multiplied(size, rules, style):
    scaling = scaled(size, rules, style)
    plain = by_name(scaling.param_groups(**ALL), "lr", "lr_scale", "weight_decay", "eps")
    assert {scaling.parameters[name].role for name in plain} == set(PRESENT)
    for role in PRESENT:
        groups = scaling.param_groups(**ALL, lr_of={role: TIMES})
        for name, (lr, scale, decay, eps) in by_name(groups, "lr", "lr_scale", "weight_decay", "eps").items():
            k = TIMES if scaling.parameters[name].role is role else 1.0
            assert (lr, scale, decay, eps) == (plain[name][0] * k, plain[name][1] * k, *plain[name][2:])
        scaling.check_ratios(torch.optim.AdamW(groups))


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_other_optimizers_take_it_too(optimizer):
    scaling, roles = scaled((64, 8)), [Role.HIDDEN]
    plain = by_name(scaling.param_groups(0.01, optimizer=optimizer, roles=roles), "lr")
    raised = by_name(scaling.param_groups(0.01, optimizer=optimizer, roles=roles, lr_of={Role.HIDDEN: TIMES}), "lr")
    assert raised == {name: (lr * TIMES,) for name, (lr,) in plain.items()}


def test_folding_later_is_folding_first():
    later, first = scaled((64, 8)), scaled((64, 8), style="folded")
    lr_of = {Role.HIDDEN: TIMES, "unembedding": 0.5}
    optimizer = torch.optim.AdamW(later.param_groups(**ALL, lr_of=lr_of))
    later.fold(optimizer)
    folded = by_name(first.param_groups(**ALL, lr_of=lr_of), "lr", "lr_scale")
    for name, settings in by_name(optimizer.param_groups, "lr", "lr_scale").items():
        assert settings == pytest.approx(folded[name], rel=1e-12)


@pytest.mark.parametrize(
    ("lr_of", "said"),
    [
        ({"embeding": 2.0}, "the role 'embeding'"),
        ({"hidden": 2.0}, "the role 'hidden'"),
        ({Role.ROUTER: 2.0}, "the role 'router'"),
        ({"embedding": 0.0}, "'embedding' has the multiplier 0.0"),
        ({"embedding": float("nan")}, "'embedding' has the multiplier nan"),
        ({"embedding": "2"}, "'embedding' has the multiplier '2'"),
        ([2.0], r"lr_of=\[2.0\] has no roles"),
    ],
)
def test_what_would_have_no_effect_is_refused(lr_of, said):
    with pytest.raises(UserError, match=said) as error:
        scaled(BASE).param_groups(0.01, lr_of=lr_of)
    if "role '" in said:
        assert error.value.fix == "the roles here are " + ", ".join(f"'{role}'" for role in PRESENT)


def test_a_role_of_other_groups_is_refused():
    others = set(Role) - {Role.HIDDEN}
    assert scaled(BASE).param_groups(0.01, roles=others, lr_of={"embedding": 2.0})
    with pytest.raises(UserError, match="no parameter here has the role 'hidden weight'"):
        scaled(BASE).param_groups(0.01, roles=others, lr_of={"hidden weight": 2.0})


def tuned(**values):
    numbers = {name: TunedValue(value) for name, value in values.items()}
    return TunedValues(numbers, scaled(BASE).base, "completep", "PASS", "", [], "x")


def test_tuned_multipliers_are_taken_where_none_are_given():
    found = tuned(lr=0.01, lr_of_embedding=TIMES, lr_of_hidden_weight=0.25)
    scaling = scaled((64, 8), tuned=found)
    taken = by_name(scaling.param_groups(), "lr")
    given = scaled((64, 8)).param_groups(0.01, lr_of={"embedding": TIMES, "hidden weight": 0.25})
    plain = by_name(scaled((64, 8)).param_groups(0.01), "lr")
    assert taken == by_name(given, "lr") != plain
    assert by_name(scaling.param_groups(lr_of={}), "lr") == plain
    assert by_name(scaling.param_groups(lr_of={"embedding": 2.0}), "lr") != taken
    muon = by_name(scaling.param_groups(optimizer="muon"), "lr")  # has hidden weights only
    assert muon == by_name(scaled((64, 8)).param_groups(0.01, optimizer="muon", lr_of={Role.HIDDEN: 0.25}), "lr")


def test_a_tuned_role_that_the_model_lacks_is_refused():
    scaling = scaled((64, 8), tuned=tuned(lr=0.01, lr_of_router=2.0))
    with pytest.raises(UserError, match="was tuned for router, a role that this model does not have"):
        scaling.param_groups()
    assert scaling.param_groups(lr_of={})
    own = scaled((64, 8), tuned=tuned(lr=0.01, lr_of_mine=2.0))  # a name of the script's own
    assert by_name(own.param_groups(), "lr") == by_name(scaled((64, 8)).param_groups(0.01), "lr")


def test_every_role_has_a_name_that_a_command_and_a_file_can_have():
    assert LR_NAMES[Role.QK_NORM] == "lr_of_qk_norm"
    assert len(set(LR_NAMES.values())) == len(Role)
    assert all(name.isidentifier() and name.isascii() for name in LR_NAMES.values())


@pytest.mark.parametrize(("at_base", "verdict"), [({"embedding": TIMES}, "PASS"), ({}, "FAIL")])
def test_audit_follows_a_base_with_the_same_multiplier(at_base, verdict):
    """And blames one that only the larger model has."""

    def base():
        small = scaled(BASE)
        return small.model, torch.optim.AdamW(small.param_groups(**ALL, lr_of=at_base))

    large = scaled((64, 8))
    optimizer = torch.optim.AdamW(large.param_groups(**ALL, lr_of={"embedding": TIMES}))
    found = audit(large.model, optimizer, base=base, std=0.02)
    assert found.verdict == verdict
    assert {(d.role, d.quantity) for d in found.departures} == (set() if at_base else {("embedding", "lr")})


def test_the_audit_and_the_table_take_it():
    scaling, tuned = scaled((64, 8)), {"embedding": TIMES, "hidden weight": 0.3}
    optimizer = torch.optim.AdamW(scaling.param_groups(**ALL, lr_of=tuned))

    def audited(**options):
        return audit(scaling.model, optimizer, base=lambda: model(*BASE), std=0.02, **ALL, **options)

    assert audited(lr_of=tuned).verdict == "PASS"
    plain = audited()
    assert {d.role for d in plain.departures} == {Role.EMBEDDING, Role.HIDDEN}
    assert {d.role for d in audited(lr_of={"embedding": TIMES}).departures} == {Role.HIDDEN}
    rates = {name: lr for name, (lr,) in by_name(optimizer.param_groups, "lr").items()}
    assert {row.name: row.lr for row in scaling.explain(lr=0.01, lr_of=tuned).rows} == pytest.approx(rates, rel=1e-12)
    for wrong in (scaling.explain, audited):
        with pytest.raises(UserError, match="no parameter here has the role 'embeding'"):
            wrong(lr_of={"embeding": 2.0})


def test_what_the_caller_changes_later_does_not_count():
    lr_of = {"embedding": 2.0}
    values = Hyperparameters(0.01, 0.02, lr_of=lr_of)
    lr_of["embedding"] = -1.0
    assert values.lr_of == {"embedding": 2.0}
