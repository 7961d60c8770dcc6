"""Shortcuts of the check give what the long way gives."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from completep import COMPLETEP, Role
from completep.anatomy.calls import Call
from completep.anatomy.forward import measure_forward
from completep.anatomy.heads import _follow, _only_moved
from completep.anatomy.specimen import Base
from completep.measure.optimizers import without_compiler
from completep.rules.parametrize import Hints, parametrize_on
from tests.rules.zoo import ZOO, roles_for


class BareWriter(nn.Module):
    """A block that writes with a bare matrix: a multiplier has no module to act on."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Parameter(torch.randn(2 * width, width))

    def forward(self, x):
        return x + self.up(self.norm(x)).relu() @ self.down


class Numbered(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(61, width), nn.LayerNorm(width), nn.Linear(width, 61)
        self.blocks = nn.Sequential(*(BareWriter(width) for _ in range(depth)))

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embedding(ids))))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma", "oddity", "bare"])
def test_factors_with_multipliers_are_those_of_a_new_copy(name):
    family = Numbered if name == "bare" else ZOO[name]
    roles = {"blocks.*.down": Role.HIDDEN} if name == "bare" else roles_for(name)
    base = Base(lambda: family(32, 2))
    scaling, factors = parametrize_on(base, family(64, 4), COMPLETEP, Hints(roles))
    assert factors == measure_forward(scaling.model, scaling.anatomy)
    assert scaling.style == ("folded" if name == "bare" else "multiplier")
    branches = [m for m in scaling.multipliers if m.kind == "branch"]
    assert all(m.factor == 0.5 for m in branches)
    for m in branches:  # folded, the factor is in the weights
        assert [factors.sites[site] for site in m.modules] == pytest.approx([m.factor] * len(m.modules), rel=1e-3)


class FactorInside(nn.Linear):
    """A linear layer that applies a multiplier inside, as mup's readout does."""

    factor = 1.0

    def forward(self, x):
        return self.factor * super().forward(x)


class TakesMultipliers(nn.Module):
    """A model with multipliers of its own, inside its linear layers."""

    def __init__(self, width, depth):
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, width), FactorInside(width, 61, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), FactorInside(width, width))
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)

    def set_multipliers(self, *, branch, logits):
        self.head.factor = logits
        for block in self.blocks:
            block[-1].factor = branch

    def get_multipliers(self):
        return self.blocks[0][-1].factor, self.head.factor

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def test_factors_inside_linear_layers_are_measured_again():
    base = Base(lambda: TakesMultipliers(32, 2))
    scaling, factors = parametrize_on(base, TakesMultipliers(64, 4), COMPLETEP, Hints())
    assert factors == measure_forward(scaling.model, scaling.anatomy)
    assert factors.inside["head"] == pytest.approx(0.5, rel=1e-4)
    assert factors.sites["blocks.0.3"] == pytest.approx(0.5, rel=1e-4)


def queries(path):
    """The factor of queries that take a path from the output of a linear layer, and whether it was measured."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 24)
    made = layer(torch.randn(2, 5, 8))
    q = path(made)
    known = {made.grad_fn: Call("layer", layer, (), {}, None, made)}
    return _follow([q], known), _only_moved(q, made.grad_fn)


@pytest.mark.parametrize(
    ("path", "moved", "factor"),
    [
        (lambda x: x.view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)[0], True, 1.0),
        (lambda x: x.chunk(3, -1)[0].unflatten(-1, (2, 4)).transpose(1, 2), True, 1.0),
        (lambda x: 0.5 * x.view(2, 5, 6, 4), False, 0.5),
        (lambda x: x.view(2, 5, 6, 4).expand(2, 5, 6, 4) * torch.ones(4), False, 1.0),
        (lambda x: (x[..., :8] - 0.25 * x[..., :8]).unflatten(-1, (2, 4)), False, 0.75),
    ],
)
def test_only_queries_that_are_moved_are_not_measured(path, moved, factor):
    followed, seen = queries(path)
    assert seen == moved
    assert followed.factor == pytest.approx(factor, rel=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon])
def test_steps_without_the_compiler_are_those_of_torch(kind):
    starts = [torch.randn(6, 4), torch.randn(4, 4)]
    ends = []
    for optimizer in (kind, without_compiler(kind)):
        parameters = [nn.Parameter(start.clone()) for start in starts]
        steps = optimizer([{"params": [p]} for p in parameters], lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            sum(p.square().sum() for p in parameters).backward()
            steps.step()
        ends.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert not torch.equal(ends[0][0], starts[0])


CHECK = """
import sys, completep
completep.check("completep.model.gpt:gpt", widths=[32], depths=[2, 4], seeds=1, workers=1)
assert "torch.optim.adamw" in sys.modules
assert "torch._dynamo" not in sys.modules, "the compiler was imported"
"""


def test_the_compiler_is_not_imported():
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
