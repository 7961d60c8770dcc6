"""Blocks for models of several kinds: a plain one, one with experts, and the model that holds a list of them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 61


class Plain(nn.Module):
    """One branch."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def branch(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Model(nn.Module):
    def __init__(self, width, kinds):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(kind(width) for kind in kinds)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Routed(nn.Module):
    """The best two of four experts, one after the other, as a list of tensors or stacked."""

    def __init__(self, width, leak=0.0):
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = Stacked(width)
        self.leak = leak

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.router(x).softmax(-1).topk(2, -1)
        made = self.experts(x, share, chosen)
        return made + self.leak * x if self.leak else made


class Stacked(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, width, width)), nn.Parameter(torch.randn(4, width, width))

    def forward(self, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(4):
            weight = (share * (chosen == expert)).sum(-1, keepdim=True)
            y = y + weight * (F.silu(x @ self.up[expert]) @ self.down[expert])
        return y


class RoutedBlock(Plain):
    leak = 0.0

    def __init__(self, width):
        super().__init__(width)
        self.norm2, self.mixture = nn.LayerNorm(width), Routed(width, self.leak)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(x)
        return x + self.mixture(self.norm2(x))
