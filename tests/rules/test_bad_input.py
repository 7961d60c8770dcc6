"""Every wrong argument gives an error that contains your input and says what to do."""

import copy
import re

import pytest
import torch
from torch import nn

import completep as cp
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


class ClassToken(nn.Module):
    """Reads one token only, before or after the final norm."""

    def __init__(self, width, depth, before):
        super().__init__()
        self.before = before
        self.tokens, self.norm, self.head = nn.Embedding(61, width), nn.LayerNorm(width), nn.Linear(width, 10)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        layer = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 16, width, **layer) for _ in range(depth)
        )

    def forward(self, tokens):
        x = torch.cat([self.first.expand(len(tokens), 1, -1), self.tokens(tokens)], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]) if self.before else self.norm(x)[:, 0])


@pytest.mark.filterwarnings("ignore")
def test_a_class_token_is_chosen_after_the_norm():
    with pytest.raises(UserError, match=r"'tokens\.weight' reaches the readout only through branches") as error:
        parametrize(ClassToken(64, 4, True), base=lambda: ClassToken(32, 2, True))
    assert "norm(x)[:, 0]" in error.value.fix
    assert parametrize(ClassToken(64, 4, False), base=lambda: ClassToken(32, 2, False)).m_N == 2


def parametrized():
    scaling = parametrize(small(64, 4), base=small).init_(0.02)
    return scaling, torch.optim.AdamW(scaling.param_groups(1e-3))


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda scaling, optimizer: scaling.on("x"), "model is a str"),
        (lambda scaling, optimizer: scaling.explain(std="x"), "std='x'"),
        (lambda scaling, optimizer: scaling.explain(lr=float("nan")), "lr=nan"),
        (lambda scaling, optimizer: cp.audit(scaling.model, optimizer, base=small, lr="1"), "lr='1'"),
        (lambda scaling, optimizer: cp.check(small, widths=32), "widths=32 is not a list"),
        (lambda scaling, optimizer: cp.check(small, depths="2 4"), "depths='2 4' is not a list"),
    ],
)
def test_values_of_another_kind_are_named(call, what):
    with pytest.raises(UserError, match=re.escape(what)):
        call(*parametrized())


@pytest.mark.filterwarnings("ignore")
def test_a_traced_model_is_refused_and_data_parallel_is_taken_off():
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(UserError, match="compiled code"):
        parametrize(torch.jit.trace(small(64, 4), tokens), base=small)
    inner = small(64, 4)
    assert parametrize(torch.nn.DataParallel(inner), base=small).model is inner


def test_the_check_asks_for_batches_and_not_for_an_example():
    """Its own example has another length than the model takes; the fix works when applied."""

    class FixedLength(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.body = small(width, depth)

        def forward(self, tokens):
            if tokens.shape[1] != 5:
                raise ValueError("five tokens, please")
            return self.body(tokens)

    def batches(step):
        tokens = torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(step))
        return tokens[:, :-1], tokens[:, 1:]

    with pytest.raises(UserError) as error:
        cp.check(FixedLength, depths=[2, 4], widths=[32], workers=1)
    assert "batches=" in error.value.fix
    assert "example=" not in error.value.fix
    assert cp.check(FixedLength, depths=[2, 4, 8], widths=[32], batches=batches, workers=1).verdict == "PASS"
