"""Vectors that act on all channels at once: biases of token mixing, and norms with one number as their gain."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import completep as cp
from completep.measure.diagnosis import culprits
from tests.measure.controls import planted

TIME, BASE = 16, (32, 2)
SIZES = {"widths": (32, 64, 128), "depths": (2, 4, 8), "base": BASE, "workers": 1}
pytestmark = pytest.mark.slow


class ScaleNorm(nn.Module):
    """x / RMS(x) times one number."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * self.gain


class Mixing(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.first, self.second = norm(width), norm(width)
        self.over_tokens = nn.Sequential(nn.Linear(TIME, 2 * TIME), nn.GELU(), nn.Linear(2 * TIME, TIME))
        self.over_channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.over_tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.second(x))


class Model(nn.Module):
    def __init__(self, width, depth, norm=nn.LayerNorm):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(61, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Mixing(width, norm) for _ in range(depth))
        self.head = nn.Linear(width, 61, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mixer(width, depth):
    return Model(width, depth)


def scale_norm(width, depth):
    return Model(width, depth, ScaleNorm)


def batches(step):
    tokens = torch.randint(61, (16, TIME + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("factory", [mixer, scale_norm])
def test_right_models_pass(factory):
    result = cp.check(factory, batches=batches, **SIZES)
    assert result.verdict == "PASS", [str(f) for f in result.findings if f.word != "PASS"]


@pytest.mark.parametrize(
    ("factory", "tensor"),
    [
        (mixer, "blocks.*.over_tokens.0.bias"),
        (mixer, "blocks.*.over_tokens.2.bias"),
        (scale_norm, "blocks.*.first.gain"),
    ],
)
@pytest.mark.parametrize("setting", ["learning rate", "epsilon"])
@pytest.mark.parametrize("exponent", [-0.5, 0.25])
def test_faults_are_named(factory, tensor, setting, exponent):
    fault = (tensor, setting, "width", exponent)

    def faulty(width, depth):
        return planted(factory, BASE, fault, width, depth, example=batches(0)[0])

    result = cp.check(faulty, batches=batches, **{**SIZES, "depths": ()})
    assert {(f.tensor, f.setting) for f in culprits(result.findings)} == {(tensor, setting)}
