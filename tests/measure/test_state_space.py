"""`check` on state-space models and hybrids: what it passes, what it cannot see, and faults that it names."""

from functools import partial

import pytest
import torch
from torch import nn

import completep as cp
from completep.measure.outputs import SplitOutputs
from tests.measure.controls import planted
from tests.rules.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")
BASE = (64, 2)
SIZES = {"width": {"widths": (64, 128, 256)}, "depth": {"depths": (2, 4, 8)}}
NO_ATTENTION = "attention, since no product of queries and keys was seen"


def growing(tensor):
    return f"{tensor} in width, since the values that its constructor gives it change, as width^+0.43"


def partial_outputs(tensor):
    return f"epsilon of {tensor} in width, since only a part of the outputs grows"


UNCHECKED = {
    "mamba": [partial_outputs("backbone.layers.*.mixer.x_proj.weight"), NO_ATTENTION],
    "mamba2": [growing("backbone.layers.*.mixer.A_log"), NO_ATTENTION],
    "jamba": [partial_outputs("model.layers.*.mamba.x_proj.weight")],
    "falcon-h1": [growing("model.layers.*.mamba.A_log")],
    "recurrent-gemma": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNCHECKED)
def test_right_rules_pass(name):
    result = cp.check(ZOO[name], **SIZES["width"], **SIZES["depth"], workers=1)
    assert result.verdict == "PASS", [str(f) for f in result.findings if f.word != "PASS"]
    assert list(result.unchecked) == UNCHECKED[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("mamba", ("backbone.layers.*.mixer.x_proj.weight", "learning rate", "width", 0.25)),
        ("mamba", ("backbone.layers.*.mixer.x_proj.weight", "learning rate", "width", -0.25)),
        ("mamba", ("backbone.layers.*.mixer.x_proj.weight", "epsilon", "depth", 0.25)),
        ("jamba", ("model.layers.*.mamba.x_proj.weight", "learning rate", "width", -0.25)),
        ("mamba2", ("backbone.layers.*.mixer.in_proj.weight", "learning rate", "depth", 0.25)),
        ("falcon-h1", ("model.layers.*.mamba.conv1d.weight", "learning rate", "width", -0.25)),
        ("recurrent-gemma", ("model.layers.*.temporal_block.linear_out.weight", "multiplier", "depth", 0.25)),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_a_planted_fault_is_named(name, fault):
    tensor, setting, axis, exponent = fault
    result = cp.check(partial(planted, ZOO[name], BASE, fault), **SIZES[axis], base=BASE, workers=1)
    assert result.verdict == "FAIL"
    assert {(f.tensor, f.setting, f.axis) for f in result.culprits} == {(tensor, setting, axis)}
    assert result.culprits[0].deviation == pytest.approx(exponent, abs=0.12)


class Halves(nn.Module):
    """Four layers: two are split into parts, one along another axis, and one is not split."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.again, self.other, self.whole = (nn.Linear(4, 6) for _ in range(4))

    def forward(self, x):
        a, b = torch.split(self.split(x), [2, 4], -1)
        e, f = self.again(x).split([5, 1], 1)
        c, d = torch.split(self.other(x), [2, 4], 0)
        return a.sum() + b.square().sum() + c.sum() + d.square().sum() + self.whole(x).sum() + (e * f).sum()


def test_only_outputs_that_are_split_have_parts():
    model = Halves()
    outputs = SplitOutputs(model, {n: p for n, p in model.named_parameters() if n.endswith("weight")})
    with outputs.watching():
        loss = model(torch.randn(6, 4))
    assert outputs.sizes(loss) == {"split.weight": [2, 4], "again.weight": [5, 1]}
    assert not model.split._forward_hooks
