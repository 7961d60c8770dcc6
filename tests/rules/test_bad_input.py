"""Every wrong argument gives an error that contains your input and says what to do."""

import copy

import pytest
import torch
from torch import nn

from completep import COMPLETEP, Role, Shape, UserError, parametrize
from completep.model.gpt import GPTConfig, gpt
from tests.rules.training import VOCABULARY
from tests.rules.zoo import OuterSum


def small(width=32, depth=2, **options):
    return gpt(width, depth, VOCABULARY, head_size=16, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rules": "completed"}, "no rules named 'completed'"),
        ({"rules": 1.0}, "rules=1.0 are not rules"),
        ({"style": "fold"}, "style='fold'"),
        ({"roles": {"embedding.*": "embedding"}}, "'embedding.\\*' is given 'embedding'"),
        ({"roles": {"nothing.like.this": Role.HIDDEN}}, "no parameter matches nothing.like.this"),
        ({"writers": ["*.nothing"]}, r"writers=\['\*.nothing'\] match no parameter"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UserError, match=message):
        parametrize(small(64, 4), base=small, **arguments)


@pytest.mark.parametrize(("width", "depth"), [(0, 2), (2, 0), (-1, 1), (1.5, 2), ("256", 2)])
def test_bad_shapes(width, depth):
    with pytest.raises(UserError, match="must be a whole number"):
        Shape(width, depth)


def test_twice_is_once_too_often():
    for model, base in (small(64, 4), small), (OuterSum(64, 4), lambda: OuterSum(32, 2)):
        parametrize(model, base=base)
        with pytest.raises(UserError, match="parametrized already"):
            parametrize(model, base=base)
        with pytest.raises(UserError, match="parametrized already"):
            parametrize(copy.deepcopy(model), base=base)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": "1e-3"}, "lr='1e-3'"),
        ({"lr": 1e-3, "weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"lr": 1e-3, "eps": float("inf")}, "eps=inf"),
        ({"lr": 1e-3, "optimizer": "adafactor"}, "adafactor"),
        ({"lr": 1e-3, "optimizer": torch.optim.LBFGS}, "LBFGS"),
        ({"lr": 1e-3, "optimizer": "adam", "weight_decay": 0.1}, "adds weight decay to the gradient"),
        ({"lr": 1e-3, "optimizer": "sgd", "eps": 1e-8}, "has no eps"),
        ({"lr": 1e-3, "optimizer": "muon", "roles": [Role.EMBEDDING]}, "no Muon rule for the role 'embedding'"),
    ],
)
def test_bad_optimizer_settings(arguments, message):
    scaling = parametrize(small(64, 4), base=small)
    with pytest.raises(UserError, match=message):
        scaling.param_groups(**arguments)


def test_bad_init():
    scaling = parametrize(small(64, 4), base=small)
    with pytest.raises(UserError, match=r"std=-0\.1"):
        scaling.init_(-0.1)


def test_a_parameter_added_later_is_noticed():
    model = small(64, 4)
    scaling = parametrize(model, base=small)
    model.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(UserError, match="'extra' was not there"):
        scaling.param_groups(1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"width": 0},
        {"width": 100, "head_size": 64},
        {"positions": "sinus"},
        {"activation": "tanh"},
        {"norm": "batch"},
        {"depth": 1.5},
    ],
)
def test_bad_reference_models(options):
    with pytest.raises(UserError):
        GPTConfig(**options)
    with pytest.raises(UserError, match="no option 'widht'"):
        gpt(widht=3)


def test_errors_have_two_parts():
    error = UserError("what", fix="way out")
    assert (error.what, error.fix, str(error)) == ("what", "way out", "what\n  fix: way out")
    assert isinstance(error, ValueError)
    assert COMPLETEP.name == "CompleteP"
