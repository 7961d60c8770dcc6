"""A diffusion transformer as its authors wrote it: adaLN-zero, a class and a time as condition. Heads of 16."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD, TOKENS, PATCH, CLASSES, TIMES = 16, 16, 12, 10, 16


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attn = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(condition).chunk(6, 1)
        x = x + gate[:, None] * self.attn(modulate(self.norm1(x), shift, scale))
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH, width)
        self.places = nn.Parameter(0.02 * torch.randn(1, TOKENS, width), requires_grad=False)
        self.time = nn.Sequential(nn.Linear(2 * TIMES, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.out = nn.Linear(width, PATCH)

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        angles = time[:, None] * torch.exp(-math.log(1e4) * torch.arange(TIMES) / TIMES)
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.classes(label)
        x = self.patches(x) + self.places
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).chunk(2, 1)
        return self.out(modulate(self.norm(x), shift, scale))


def batches(step: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Noise, times and classes. `check` measures with cross entropy, so the targets are classes of the output."""
    g = torch.Generator().manual_seed(step)
    images, times = torch.randn(16, TOKENS, PATCH, generator=g), 1000 * torch.rand(16, generator=g)
    labels = torch.randint(CLASSES, (16,), generator=g)
    return (images, times, labels), torch.randint(PATCH, (16, TOKENS), generator=g)
