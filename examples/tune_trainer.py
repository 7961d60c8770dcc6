"""Hugging Face's Trainer, ready to be tuned: the loss is in trainer_state.json.

python examples/tune_trainer.py --width 64 --depth 2 --lr 0.01 --seed 0 --out runs/trainer
"""

import argparse
from pathlib import Path

import torch
from hf_trainer import BATCH, TIME, llama
from transformers import Trainer, TrainingArguments, get_linear_schedule_with_warmup

import completep as cp
from completep.data.builtin import builtin_corpus
from completep.data.sampler import Sampler


def rows(split: str, steps: int, seed: int) -> list[dict[str, torch.Tensor]]:
    sampler = Sampler(builtin_corpus(), split, TIME, BATCH, seed=seed)
    tokens = [torch.from_numpy(row[:-1]) for step in range(steps) for row in sampler.batch_at(step)]
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("width", 64), ("depth", 2), ("steps", 100), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=2**-6)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    model = llama(a.width, a.depth)
    scaling = cp.parametrize(model, base=lambda: llama(64, 2))
    scaling.init_(std=0.1, seed=a.seed)
    optimizer = torch.optim.AdamW(scaling.param_groups(lr=a.lr, eps=1e-12), betas=(0.9, 0.95))
    schedule = get_linear_schedule_with_warmup(optimizer, a.steps // 5, a.steps)
    arguments = TrainingArguments(
        str(a.out), max_steps=a.steps, per_device_train_batch_size=BATCH, seed=a.seed, report_to="none",
        save_strategy="no", eval_strategy="steps", eval_steps=max(1, a.steps // 4), disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), max_grad_norm=0.0,
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=rows("train", a.steps, a.seed), eval_dataset=rows("validation", 4, 0),
        optimizers=(optimizer, schedule),
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    trainer.save_state()  # trainer_state.json, with every eval_loss


if __name__ == "__main__":
    main()
