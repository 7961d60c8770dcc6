"""`check` on state-space models and hybrids: what it passes, what it cannot see, and faults that it names."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import completep as cp
from completep.measure.outputs import SplitOutputs
from tests.measure.controls import assert_named, planted
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
    assert_named(ZOO[name], BASE, fault, SIZES[fault[2]])


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
    outputs = SplitOutputs({f"{name}.weight": module for name, module in model.named_children()})
    with outputs.watching():
        loss = model(torch.randn(6, 4))
    assert outputs.sizes(loss) == {"split.weight": [2, 4], "again.weight": [5, 1]}
    assert not model.split._forward_hooks


class Split(nn.Module):
    """A block with a matrix of which a part grows, as Mamba's x_proj."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
        self.sizes = [width // 16, 8]
        self.x_proj = nn.Linear(width, sum(self.sizes), bias=False)
        self.from_a, self.from_b = (nn.Linear(size, width, bias=False) for size in self.sizes)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        h = self.norm(x)
        a, b = torch.split(self.x_proj(h), self.sizes, -1)
        return x + self.out(F.silu(self.mix(h)) + self.from_a(a) + self.from_b(b))


def of_split_blocks(width, depth):
    blocks = nn.Sequential(*(Split(width) for _ in range(depth)))
    head = nn.Linear(width, 64, bias=False)
    return nn.Sequential(OrderedDict(table=nn.Embedding(64, width), blocks=blocks, norm=nn.LayerNorm(width), head=head))


def with_writers_at_zero(width, depth):
    model = of_split_blocks(width, depth)
    scaling = cp.parametrize(model, base=lambda: of_split_blocks(64, 2)).init_(std=0.1, seed=0)
    for block in model.blocks:
        nn.init.zeros_(block.out.weight)
    return model, torch.optim.AdamW(scaling.param_groups(lr=2**-8, weight_decay=0.1, eps=1e-12))


@pytest.mark.slow
def test_parts_behind_a_writer_that_starts_at_zero_are_not_judged():
    """The first backward pass does not reach them."""
    result = cp.check(with_writers_at_zero, **SIZES["width"], workers=1)
    assert result.verdict == "PASS", [str(f) for f in result.culprits]
    assert any("x_proj" in line and "only a part of the outputs grows" in line for line in result.unchecked)
    assert not any("which is 0 or does not exist" in line for line in result.unchecked)


@pytest.mark.slow
def test_a_fail_takes_three_seeds():
    """With one seed and three widths, one of Mamba's many tensors is often off by chance."""
    right = cp.check(ZOO["mamba"], **SIZES["width"], workers=1, seeds=1)
    assert right.verdict != "FAIL", [str(f) for f in right.culprits]
    fault = ("backbone.layers.*.mixer.in_proj.weight", "learning rate", "width", 1.0)
    wrong = cp.check(partial(planted, ZOO["mamba"], BASE, fault), **SIZES["width"], base=BASE, workers=1, seeds=1)
    assert wrong.verdict == "FAIL"
    assert wrong.survey.tensors["seed"].n_unique() == 3
