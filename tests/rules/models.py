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


class ValueHead(Model):
    """Logits and a value, as in actor-critic models."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.value = nn.Linear(width, 1)

    def forward(self, ids):
        x = self.norm(self.run(self.embed(ids)))
        return self.head(x), self.value(x)


class Heads(nn.Module):
    """Attention with two heads that grow with the width. Its names say nothing."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.alice, self.bob = nn.Linear(width, width), nn.Linear(width, width)
        self.carol, self.dave = nn.Linear(width, width), nn.Linear(width, width)
        self.calm = nn.Identity()

    def split(self, x):
        return x.unflatten(-1, (2, -1)).transpose(1, 2)

    def prepare(self, q, k):
        return q, k

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        h = self.norm(x)
        q, k = self.prepare(self.split(self.alice(h)), self.split(self.bob(h)))
        return x + self.dave(self.attend(q, k, self.split(self.carol(h))).transpose(1, 2).flatten(2))


class BareNorm(nn.Module):
    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:])


class NormModule(Heads):
    def __init__(self, width):
        super().__init__(width)
        self.calm_q, self.calm_k = BareNorm(), BareNorm()

    def prepare(self, q, k):
        return self.calm_q(q), self.calm_k(k)


def heads(kind):
    class Attending(Model):
        block = kind

    return Attending


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
