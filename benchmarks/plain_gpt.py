"""A GPT as people write it by hand: one product for q, k and v, torch's attention, fused AdamW. The peer for speed."""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x):
        batch, time, width = x.shape
        q, k, v = (h.view(batch, time, self.heads, -1).transpose(1, 2) for h in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(batch, time, width))

    def forward(self, x):
        x = x + self.attention(self.first_norm(x))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class PlainGPT(nn.Module):
    def __init__(self, width, depth, vocabulary, time, heads):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(time, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
