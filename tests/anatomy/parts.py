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


class Flat(nn.Module):
    """Experts stored one after the other in two axes."""

    count = 4

    def __init__(self, width):
        super().__init__()
        self.up = nn.Parameter(torch.randn(self.count * width, width) / 8)
        self.down = nn.Parameter(torch.randn(self.count * width, width) / 8)

    def forward(self, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        size = (self.count, -1, x.shape[-1])
        rows = x.flatten(0, 1).expand(self.count, -1, -1)
        made = torch.bmm(F.silu(torch.bmm(rows, self.up.view(size).mT)), self.down.view(size))
        weights = torch.zeros(*x.shape[:-1], self.count).scatter(-1, chosen, share).flatten(0, 1)
        return (made * weights.T[..., None]).sum(0).view_as(x)


def flat_block(kind, experts):
    class Kind(kind):
        count = experts

    class Mixture(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.router, self.experts = nn.Linear(width, experts, bias=False), Kind(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(x, *self.router(x).softmax(-1).topk(2, -1))

    class FlatBlock(Plain):
        def __init__(self, width):
            super().__init__(width)
            self.norm2, self.mixture = nn.LayerNorm(width), Mixture(width)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.branch(x)
            return x + self.mixture(self.norm2(x))

    return FlatBlock
