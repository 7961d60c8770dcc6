"""A Lightning module: call `parametrize` in the constructor and `param_groups` in `configure_optimizers`.

python -m examples.lightning_module
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import completep as cp
from completep.data.builtin import builtin_corpus
from completep.data.sampler import Sampler
from examples.own_model import MyModel

STEPS, BATCH, TIME = 40, 8, 64


class Decoder(L.LightningModule):
    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.model = MyModel(width, depth)
        self.scaling = cp.parametrize(self.model, base=lambda: MyModel(width=64, depth=2))
        self.scaling.init_(std=0.05, seed=0)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.scaling.param_groups(lr=2**-7, eps=1e-12), betas=(0.9, 0.95))

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        checkpoint["scaling"] = self.scaling.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        self.scaling.load_state_dict(checkpoint["scaling"])  # refuses other rules or another base


def main() -> list[float]:
    sampler = Sampler(builtin_corpus(), "train", TIME, BATCH, seed=0)
    batches = DataLoader([torch.from_numpy(sampler.batch_at(step)) for step in range(STEPS)], batch_size=None)
    module = Decoder()
    trainer = L.Trainer(
        max_steps=STEPS,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches)
    return module.losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
