"""Your own model and training loop, with CompleteP in five lines.

python examples/own_model.py
completep explain examples/own_model.py:model --args width=128 depth=8 --base width=64 depth=2
completep audit examples/own_model.py:model_and_optimizer --args width=128 depth=8 --base width=64 depth=2
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import completep as cp

VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, width // 32, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class MyModel(nn.Module):
    """An ordinary model. It does not use completep."""

    def __init__(self, width, depth):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        time = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=ids.device)
        x = self.tokens(ids) + self.places(torch.arange(time, device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def model(width=64, depth=2):
    return MyModel(width, depth)


def model_and_optimizer(width=64, depth=2):
    """Hyperparameters tuned at width 64 and depth 2, for a model of any size."""
    big = MyModel(width, depth)
    scaling = cp.parametrize(big, base=model, rules=cp.COMPLETEP)
    scaling.init_(std=0.02, seed=0)
    groups = scaling.param_groups(lr=2**-8, weight_decay=0.1, eps=1e-16)
    return big, torch.optim.AdamW(groups, betas=(0.9, 0.95))


def main():
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    big, optimizer = model_and_optimizer(width=128, depth=8)
    for step in range(20):
        start = torch.randint(len(text) - 65, (8,), generator=torch.Generator().manual_seed(step))
        batch = torch.stack([text[s : s + 65] for s in start.tolist()])
        loss = F.cross_entropy(big(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
