"""Small models that the tests change one thing at a time."""

import torch.nn.functional as F
from torch import nn

from completep import parametrize
from tests.rules.training import VOCABULARY, logits, tokens, worst


class Block(nn.Module):
    def __init__(self, width, inner=None):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner or 2 * width), nn.Linear(inner or 2 * width, width)

    def branch(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return x + self.branch(x)


class Model(nn.Module):
    """Embedding, blocks, norm, head; the tests change one thing at a time."""

    block = Block

    def __init__(self, width, depth=2):
        super().__init__()
        self.width, self.depth = width, depth
        self.table = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(self.block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def embed(self, ids):
        return self.table(ids)

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids):
        return self.head(self.norm(self.run(self.embed(ids))))


def scale(kind, width=64, depth=8, base=(32, 2), **options):
    model = kind(width, depth)
    return model, parametrize(model, base=lambda: kind(*base), **options)


def roles(scaling):
    return {r.template: r.role for r in scaling.parameters.values()}


def changed_by_folding(model, scaling, inputs=None):
    inputs = tokens(0) if inputs is None else inputs
    before = logits(model, inputs).detach()
    scaling.fold()
    return worst(logits(model, inputs), before)


def clean(audit):
    """Nothing departs, and all was checked, except for a factor that all parameters have in common."""
    return not audit.departures and all("that all parameters have in common" in line for line in audit.unchecked)
