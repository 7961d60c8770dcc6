"""A learning-rate sweep over depth in plain Python, and its verdict. It made examples/sweep.csv, in five minutes on two cores.

python examples/sweep.py sweep.csv
completep check transfer examples/sweep.csv
"""

import csv
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

from completep.config import Data, Evaluation, GPTConfig, Hyperparameters, Run, Schedule, Shape
from completep.measure.pool import each
from completep.train.loop import How, train

DEPTHS, RATES, SEEDS = (2, 4, 8, 16), [2.0**k for k in range(-11, -4)], (0, 1)
BASE = Shape(64, 2)


def loss_of(steps, setting):
    depth, lr, seed = setting
    run = Run(
        model=GPTConfig(BASE.width, depth, 256, head_size=16),
        hyperparameters=Hyperparameters(lr=lr, std=0.02),
        schedule=Schedule(steps, steps // 10),
        batch=8,
        sequence=64,
        base=BASE,
        seed=seed,
        data=Data("python"),
        evaluation=Evaluation(batches=40),
    )
    with tempfile.TemporaryDirectory() as folder:
        result = train(run, Path(folder) / "run", How(checkpoint_every=0, peak=1e11))
    return result.validation_loss if result.status == "done" else float("nan")


def main(path, depths=DEPTHS, rates=RATES, seeds=SEEDS, steps=300):
    settings = sorted(product(depths, rates, seeds), reverse=True)
    losses = dict(each(partial(loss_of, steps), settings))
    with open(path, "x", newline="") as file:
        table = csv.writer(file)
        table.writerow(("rules", "width", "depth", "lr", "seed", "loss"))
        table.writerows(("CompleteP", BASE.width, *setting, losses[setting]) for setting in sorted(settings))


if __name__ == "__main__":
    main(sys.argv[1])
