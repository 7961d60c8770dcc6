"""A script in the style of nanoGPT: settings are globals, and `key=value` words on the command line change them.

python examples/tune_nanogpt.py n_embd=64 n_layer=2 learning_rate=0.01 seed=0 out_dir=runs/nano
"""

import ast
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import completep as cp

n_layer, n_embd, block_size, vocab_size = 2, 64, 64, 256
base_n_layer, base_n_embd, rules = 2, 64, "completep"
batch_size, max_iters, warmup_iters, eval_iters = 16, 150, 50, 20
learning_rate, init_std, beta1, beta2 = 2**-6, 0.125, 0.9, 0.95
seed, out_dir = 0, "out"
for word in sys.argv[1:]:  # nanoGPT's configurator
    key, value = word.split("=", 1)
    assert key in globals(), f"unknown setting: {key}"
    globals()[key] = value if isinstance(globals()[key], str) else ast.literal_eval(value)


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, -1, 16).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), CausalSelfAttention(width)
        self.ln_2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(block_size, width)
        self.h = nn.ModuleList(Block(width) for _ in range(depth))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def get_batch(data: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - block_size - 1, (size,), generator=generator).tolist()
    rows = torch.stack([data[i : i + block_size + 1] for i in starts])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def estimate_loss(model: nn.Module, data: Tensor) -> float:
    generator = torch.Generator().manual_seed(0)
    batches = (get_batch(data, 32, generator) for _ in range(eval_iters))
    return sum(F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item() for x, y in batches) / eval_iters


if __name__ == "__main__":
    text = b"\n".join(p.read_bytes() for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))[:4_000_000]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    train_data, val_data = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    torch.manual_seed(seed)
    model = GPT(n_embd, n_layer)
    scaling = cp.parametrize(model, base=lambda: GPT(base_n_embd, base_n_layer), rules=rules)
    scaling.init_(std=init_std, seed=seed)
    optimizer = torch.optim.AdamW(scaling.param_groups(lr=learning_rate, eps=1e-12), betas=(beta1, beta2))
    lrs = [group["lr"] for group in optimizer.param_groups]
    generator = torch.Generator().manual_seed(seed)
    for it in range(max_iters):
        factor = min((it + 1) / warmup_iters, (max_iters - it) / (max_iters - warmup_iters + 1))
        for group, lr in zip(optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr * factor
        X, Y = get_batch(train_data, batch_size, generator)
        loss = F.cross_entropy(model(X).flatten(0, 1), Y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if it % 50 == 49 or it == max_iters - 1:
            print(f"step {it + 1}: val loss {estimate_loss(model, val_data):.6f}")
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), Path(out_dir) / "ckpt.pt")
