"""`check` on families beyond the plain transformer: right rules pass, and a wrong rule of a new role is named."""

from dataclasses import replace

import pytest
import torch

from completep import COMPLETEP, Role, check
from completep.measure.bare import BareGradients
from completep.rules.table import Column
from tests.rules.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"widths": (64, 128, 256), "depths": (2, 4, 8), "workers": 1}


def calm(name):
    """With constant decays and time steps: few random numbers of a constructor are noise."""

    def build(width, depth):
        model = ZOO[name](width, depth)
        with torch.no_grad():
            for parameter, values in model.named_parameters():
                if parameter.endswith(("A_log", "dt_bias")):
                    values.fill_(0.0 if parameter.endswith("A_log") else -2.0)
        return model

    return build


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "llama4", "nanochat", "lfm2", "mamba2", "modernbert"])
def test_right_rules_pass(name):
    result = check(calm(name), **SIZES)
    assert result.verdict == "PASS", [str(f) for f in result.findings if f.word != "PASS"]


def without(role, setting):
    """CompleteP with one setting of one role left unscaled."""
    rows = COMPLETEP.columns[Column.ADAM]
    row = replace(rows[role], **{setting: replace(getattr(rows[role], setting), width=0.0, out=0.0)})
    return replace(COMPLETEP, columns={Column.ADAM: rows | {role: row}})


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["lr", "eps"])
def test_a_wrong_rule_for_experts_is_named(setting):
    result = check(ZOO["llama4"], widths=SIZES["widths"], base=(64, 2), rules=without(Role.EXPERT, setting), workers=1)
    assert result.verdict == "FAIL"
    assert {f.tensor for f in result.culprits} == {
        "model.layers.*.feed_forward.experts.gate_up_proj", "model.layers.*.feed_forward.experts.down_proj",
    }  # fmt: skip


def test_terms_of_a_bare_vector_are_added_without_their_signs():
    """Against the terms written out, for a vector behind an exponential and a reshape."""
    p = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, 4, dtype=torch.float64)
    bare = BareGradients({"p": p})
    with bare:
        y = x * (-p.exp()).reshape(1, 1, -1)
    (weight * y).sum().backward(retain_graph=True)
    terms = weight * x.detach() * -p.detach().exp()
    assert torch.allclose(p.grad, terms.sum((0, 1)))
    assert torch.allclose(bare.unsigned()["p"], terms.abs().sum((0, 1)))
    assert not torch.allclose(bare.unsigned()["p"], p.grad.abs())
