"""Tasks for tests of the sweep machinery: training runs that are only named, and tasks that are no training at all."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from completep.config import GPTConfig, Hyperparameters, Run, Schedule, Shape
from completep.sweep.engine import Engine, unwatched
from completep.sweep.local import Local
from completep.sweep.store import Store
from completep.sweep.training import Training, canonical
from completep.train.loop import How
from completep.tuning.reading import Source
from completep.tuning.tasks import Command, Setting
from tests.train.runs import small_run
from tests.waiting import wait_until

BASE = Shape(64, 2)
HOW = How(checkpoint_every=3, keep=1, peak=None, log_every=1)
SELDOM = How(checkpoint_every=20, keep=1, peak=None, log_every=20)
SCRIPT = """
import json, pathlib, sys, time
folder, seed, log = sys.argv[1:]
time.sleep(float(seed) % 7 / 10 + 0.3)
with open(log, "a") as file:
    file.write(seed + "\\n")
pathlib.Path(folder, "m.json").write_text(json.dumps({"loss": 2.0 + int(seed)}))
"""


def run(rules="completep", width=64, depth=2, **changes):
    model, hyper = GPTConfig(width, depth, 256), Hyperparameters(0.01, 0.02)
    return replace(Run(model, hyper, Schedule(10, 1), 4, 16, rules=rules, base=BASE), **changes)


def task(config):
    """As `Training.of`, without looking at data."""
    return Training(canonical(config))


def engine(folder, events=None, workers=None):
    return Engine(Store(folder), Local(workers), unwatched if events is None else events.append)


def training(data, ranks=1, **changes):
    """A real run of about a second."""
    return Training.of(small_run(data, **changes), HOW, ranks)


@dataclass(frozen=True)
class Script:
    """Not a training run: writes a number, or fails, or waits for a file."""

    name: str
    value: float = 0.0
    fails: bool = False
    waits_for: str = ""
    cost: float = 1.0
    ranks: int = 1
    imports: tuple = ()

    @property
    def id(self):
        return f"script-{self.name}"

    def memory(self):
        return 1e6

    def describe(self):
        return f"script {self.name}"

    def carry_out(self, folder: Path, lock: int):
        os.write(1, f"{self.name} in process {os.getpid()}\n".encode())
        wait_until(lambda: not self.waits_for or Path(self.waits_for).exists())
        if self.fails:
            raise RuntimeError(f"{self.name} cannot do this")
        (folder / "result.json").write_text(json.dumps({"status": "done", "loss": self.value}))

    def loss(self, result):
        return result["loss"]


def commands(tmp_path, count):
    """(runs of a script of somebody else, by seed; the log where each of them leaves a line)"""
    (tmp_path / "script.py").write_text(SCRIPT)
    log = tmp_path / "log"
    template = f"python {tmp_path / 'script.py'} {{folder}} {{seed}} {log}"
    return [
        Command(
            template, Source.parse("{folder}/m.json:loss"),
            Setting(Shape(64, 2), Shape(64, 2), "completep", (("lr", 1.0),), seed), (), str(tmp_path),
        )
        for seed in range(count)
    ], log  # fmt: skip
