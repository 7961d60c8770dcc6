"""The check of models whose multipliers are in their weights: only the product of both is right or wrong."""

import pytest
import torch
import torch.nn.functional as F

import completep as cp
from completep.measure.diagnosis import culprits
from completep.model.gpt import gpt

SIZES = {"widths": (32, 64, 128), "depths": (2, 4, 8), "base": (32, 2), "workers": 1}
pytestmark = pytest.mark.slow


class Functional(torch.nn.Module):
    """A decoder whose readout is a call of F.linear with the embedding: no module can hold the logit multiplier."""

    def __init__(self, width, depth):
        super().__init__()
        self.body = gpt(width, depth, 61, head_size=16, tied=True)
        self.divisor = 1.0

    def forward(self, tokens):
        x = self.body.stream(tokens)
        return F.linear(self.body.final_norm(x), self.body.embedding.weight) / self.divisor


def tied(width, depth):
    return gpt(width, depth, 61, head_size=16, tied=True)


def growing(width, depth):
    """Two heads at every width."""
    return gpt(width, depth, 61, head_size=width // 2)


def folded(build, change=None):
    """A factory of (model, optimizer) in the folded form, with a change that breaks it."""

    def factory(width, depth):
        model = build(width, depth)
        scaling = cp.parametrize(model, base=lambda: build(32, 2), style="folded")
        scaling.init_(0.06, seed=torch.initial_seed())
        groups = scaling.param_groups(2e-3, weight_decay=0.1, eps=1e-16)
        if change is not None:
            change(model, groups, width / 32)
        return model, torch.optim.AdamW(groups)

    return factory


@pytest.mark.parametrize("build", [tied, growing, Functional])
def test_the_folded_form_passes(build):
    assert cp.check(folded(build), **SIZES).verdict == "PASS"


def test_a_functional_readout_passes_under_rules():
    check = cp.check(Functional, **SIZES)
    assert check.verdict == "PASS"
    assert {f.why for f in check.findings if f.tensor.endswith("(tied)") and f.axis == "width"} == {"folded"}


def unfolded_start(model, groups, m_N):
    """The final norm starts at 1, as if the logit multiplier were in the forward pass."""
    norm = model.body.final_norm if isinstance(model, Functional) else model.final_norm
    torch.nn.init.ones_(norm.weight)


def divided_again(model, groups, m_N):
    model.divisor = m_N


def unfolded_rate(model, groups, m_N):
    norm = model.body.final_norm if isinstance(model, Functional) else model.final_norm
    own = next(g for g in groups if any(p is norm.weight for p in g["params"]))
    own["lr"] *= m_N


@pytest.mark.parametrize(
    ("build", "change", "setting"),
    [
        (tied, unfolded_start, "multiplier"),
        (Functional, unfolded_start, "multiplier"),
        (Functional, divided_again, "multiplier"),
        (tied, unfolded_rate, "learning rate"),
    ],
)
def test_half_a_fold_fails(build, change, setting):
    """A start without its fold, a multiplier beside the fold, and a learning rate that did not follow."""
    check = cp.check(folded(build, change), widths=SIZES["widths"], depths=(2,), base=(32, 2), workers=1)
    assert check.verdict == "FAIL"
    assert setting in {f.setting for f in culprits(check.findings)}
