"""A plain PyTorch training script with CompleteP in five lines, ready to be tuned.

python examples/tune_plain.py --width 64 --depth 2 --lr 0.01 --seed 0 --out runs/plain
"""

import argparse
import json
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from own_model import MyModel
from torch import Tensor

import completep as cp

TIME = 64


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--base-width", type=int, default=64)
    parser.add_argument("--base-depth", type=int, default=2)
    parser.add_argument("--rules", default="completep")
    parser.add_argument("--lr", type=float, default=2**-6)
    parser.add_argument("--std", type=float, default=0.125)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def read_text() -> tuple[Tensor, Tensor]:
    """Python's own source as bytes: (training, validation)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in files)[:4_000_000]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def draw(data: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(data) - TIME - 1, (batch,), generator=generator)
    return torch.stack([data[s : s + TIME + 1] for s in starts.tolist()])


def loss_on(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def validate(model: torch.nn.Module, data: Tensor) -> float:
    generator = torch.Generator().manual_seed(0)  # the same batches for every run
    return sum(loss_on(model, draw(data, 32, generator)).item() for _ in range(20)) / 20


def main() -> None:
    a = parse()
    train, validation = read_text()
    torch.manual_seed(a.seed)
    model = MyModel(a.width, a.depth)
    scaling = cp.parametrize(model, base=lambda: MyModel(a.base_width, a.base_depth), rules=a.rules)
    scaling.init_(std=a.std, seed=a.seed)
    optimizer = torch.optim.AdamW(scaling.param_groups(lr=a.lr, eps=1e-12), betas=(0.9, 0.95))
    warm = max(1, a.steps // 3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (a.steps - step) / (a.steps - warm + 1))
    )
    generator = torch.Generator().manual_seed(a.seed)
    a.out.mkdir(parents=True, exist_ok=True)
    with (a.out / "metrics.jsonl").open("w", buffering=1) as metrics:
        for step in range(1, a.steps + 1):
            loss = loss_on(model, draw(train, a.batch, generator))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % max(1, a.steps // 4) == 0 or step == a.steps:
                metrics.write(json.dumps({"step": step, "val_loss": validate(model, validation)}) + "\n")


if __name__ == "__main__":
    main()
