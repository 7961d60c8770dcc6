"""A run that takes about a second, and its data."""

from dataclasses import replace
from pathlib import Path

from completep.config import Data, Evaluation, GPTConfig, Hyperparameters, Run, Schedule, Shape
from completep.data.prepare import prepare
from completep.train.loop import How

EVERY_STEP = How(log_every=1, checkpoint_every=5, peak=1e11)


def small_run(data: Path, steps=12, **changes) -> Run:
    run = Run(
        model=GPTConfig(width=32, depth=3, vocabulary=256, head_size=8),
        hyperparameters=Hyperparameters(lr=0.01, std=0.05, weight_decay=0.1, eps=1e-10),
        schedule=Schedule(steps, 3),
        batch=4,
        sequence=16,
        base=Shape(16, 2),
        data=Data(str(data)),
        evaluation=Evaluation(tokens=128),
    )
    return replace(run, **changes)


def small_data(folder: Path) -> Path:
    text = folder / "text"
    text.mkdir(parents=True)
    for i in range(30):
        (text / f"{i}.txt").write_text(
            f"document {i}: " + "the quick brown fox jumps over the lazy dog; " * (3 + i % 5)
        )
    prepare([str(text)], folder / "data", validation=0.2, workers=1)
    return folder / "data"
