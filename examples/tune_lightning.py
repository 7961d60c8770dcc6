"""Lightning, ready to be tuned: its CSV logger writes the loss.

python examples/tune_lightning.py --width 64 --depth 2 --lr 0.01 --seed 0 --out runs/lightning
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from own_model import MyModel
from torch import Tensor
from torch.utils.data import DataLoader

import completep as cp
from completep.data.builtin import builtin_corpus
from completep.data.sampler import Sampler

BATCH, TIME = 16, 64


class Decoder(L.LightningModule):
    def __init__(self, width: int, depth: int, lr: float, seed: int) -> None:
        super().__init__()
        self.lr = lr
        self.model = MyModel(width, depth)
        self.scaling = cp.parametrize(self.model, base=lambda: MyModel(width=64, depth=2))
        self.scaling.init_(std=0.1, seed=seed)

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", self.loss(batch), on_epoch=True, batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.scaling.param_groups(lr=self.lr, eps=1e-12), betas=(0.9, 0.95))


def batches(split: str, steps: int, seed: int) -> DataLoader:
    sampler = Sampler(builtin_corpus(), split, TIME, BATCH, seed=seed)
    return DataLoader([torch.from_numpy(sampler.batch_at(step)) for step in range(steps)], batch_size=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("width", 64), ("depth", 2), ("steps", 100), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=2**-6)
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    trainer = L.Trainer(
        max_steps=a.steps, accelerator="auto", logger=CSVLogger(a.out, name="", version=""), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Decoder(a.width, a.depth, a.lr, a.seed), batches("train", a.steps, a.seed), batches("validation", 4, 0))


if __name__ == "__main__":
    main()
