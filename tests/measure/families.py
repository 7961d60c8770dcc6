"""Small families of models for `derive`: each has parameters that the table does not know, or that hide a factor."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 64


class Mixer(nn.Module):
    """A causal mean over tokens between two bare matrices, with a bare gain in the middle."""

    def __init__(self, width):
        super().__init__()
        self.rise = nn.Parameter(torch.randn(width, 2 * width))
        self.gain = nn.Parameter(torch.ones(2 * width))
        self.fall = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("btn,nm->btm", x, self.rise)
        h = h.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return self.fall(F.silu(h) * self.gain)


class Planted(nn.Linear):
    """A linear layer that multiplies its product by a factor of its own."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.factor, self.bias)


class Block(nn.Module):
    def __init__(self, width, factor):
        super().__init__()
        self.norm, self.norm2, self.mixer = nn.LayerNorm(width), nn.LayerNorm(width), Mixer(width)
        self.up, self.down = Planted(width, 2 * width), nn.Linear(2 * width, width)
        self.up.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Family(nn.Module):
    """Bare matrices and gains; `power` plants a factor (width/32)^a · (depth/2)^b in the first layer of the MLP."""

    def __init__(self, width, depth, power=(0.0, 0.0), dropout=0.0, nothing=0):
        super().__init__()
        self.embed, self.drop = nn.Embedding(VOCABULARY, width), nn.Dropout(dropout)
        factor = (width / 32) ** power[0] * (depth / 2) ** power[1]
        self.blocks = nn.ModuleList(Block(width, factor) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def family(width, depth, **options):
    return Family(width, depth, **options)


class Idle(nn.Module):
    """A gain that is multiplied by zero, so no gradient reaches it, and one whose start grows with the width."""

    def __init__(self, width):
        super().__init__()
        self.still = nn.Parameter(torch.ones(width))
        self.steep = nn.Parameter(torch.arange(1.0, width + 1).log())
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * (1 + 0 * self.still) * torch.exp(-0.1 * self.steep))


def with_idle_gains(width, depth):
    model = Family(width, depth)
    for block in model.blocks:
        block.mixer = Idle(width)
    return model
