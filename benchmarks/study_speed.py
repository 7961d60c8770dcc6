"""What `lr-transfer` costs at laptop scale, compared with the plain way to the same verdict.

The plain way: every point of the grid is a training in plain PyTorch (benchmarks/plain_gpt.py with torch's fused AdamW,
not compiled), one after another with all threads, with the same steps and the same tokens of validation. It has no
start-up, no logging, and writes no weights.

Ours: `--search bracket` with the local engine and everything it does: a process per run, locks, records, weights. A run
that two parameterizations share is done once. Which runs the search asks for, and that the verdicts are the grid's, is
read from the published runs of the whole grid (docs/results/lr-transfer).

All runs of one depth cost the same, so each side is measured on a few runs per depth and multiplied up. Our side runs
from start to end, with twice as many runs as run at a time. The plain side is timed over some steps after a warm-up.
Both sides use all cores, so the ratio of seconds is the ratio of core-seconds.

    python -m benchmarks.study_speed
"""

import json
import os
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import polars as pl
import torch

from benchmarks.plain_gpt import PlainGPT
from completep.studies.judging import transfers_of
from completep.studies.lr_transfer import STUDY
from completep.studies.scale import LAPTOP
from completep.sweep.engine import Engine, nothing_more
from completep.sweep.local import Local
from completep.sweep.search import Bracketing
from completep.sweep.store import Store
from completep.sweep.training import Training
from completep.train.speed import measure_peak

RESULTS = Path(__file__).parent / "results" / "study_speed.json"
GRID = Path(__file__).parents[1] / "docs" / "results" / "lr-transfer" / "runs.csv"
WANTED = 5.0
STEPS = 20
ROUNDS = 2


class Recorded:
    """An engine that has done every run of the grid already."""

    def __init__(self, losses):
        self.losses, self.asked, self.store = losses, {}, self

    def run(self, tasks, more=nothing_more):
        todo = list(tasks)
        while todo:
            task = todo.pop(0)
            self.asked[task.id] = task
            todo += more(task)
        return []

    def result(self, task):
        return {"status": "done", "validation_loss": self.losses[task.id], "train_loss": None}


def searched(trials, frame):
    """How many runs of each depth the search asks for, and whether its verdicts are those of the grid."""
    losses = {row["run"]: row["loss"] for row in frame.iter_rows(named=True)}
    engine = Recorded(losses)
    ran, _ = Bracketing(engine, "lr", sorted(frame["lr"].unique())).run(trials)
    keys = {(t.point.text("rules"), t.point.whole("depth"), t.point.number("lr"), t.point.whole("seed")) for t in ran}
    asked = pl.struct("rules", "depth", "lr", "seed").map_elements(
        lambda row: tuple(row.values()) in keys, return_dtype=pl.Boolean
    )
    words = [{t.rules: t.word for t in transfers_of(part, "lr", LAPTOP.base)} for part in (frame, frame.filter(asked))]
    return Counter(task.run.model.depth for task in engine.asked.values()), *words


def plain_seconds(run):
    """Seconds of one training in plain PyTorch, with all threads."""
    torch.set_num_threads(os.cpu_count() or 1)
    m = run.model
    model = PlainGPT(m.width, m.depth, m.vocabulary, run.sequence, m.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(m.vocabulary, (run.batch, run.sequence))

    def step():
        model(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate():
        with torch.no_grad():
            model(ids, ids)

    def each(work, count):
        work()
        began = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - began) / count

    passes = run.evaluation.tokens / (run.batch * run.sequence)
    return run.schedule.steps * each(step, STEPS) + passes * each(evaluate, STEPS)


def engine_seconds(runs, workers):
    """Seconds that the local engine takes for these runs, in an empty store."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store")
        store.open()
        began = time.perf_counter()
        assert Engine(store, Local(workers)).run([Training.of(run) for run in runs]) == []
        return time.perf_counter() - began


def start_seconds(run):
    """Seconds of the engine's first run. It imports everything in the server that later runs are forked from."""
    schedule, evaluation = replace(run.schedule, steps=1, warmup=0), replace(run.evaluation, tokens=run.sequence)
    return engine_seconds([replace(run, schedule=schedule, evaluation=evaluation)], 1)


def our_seconds(run):
    """Mean wall-clock seconds per run, with all cores busy."""
    workers = os.cpu_count() or 1
    runs = [replace(run, seed=1000 + i) for i in range(2 * workers)]
    return engine_seconds(runs, workers) / len(runs)


def measure(depth, trials, runs):
    """Seconds per run on both sides at one depth, the points of the grid there, and the runs that the search takes."""
    here = [trial for trial in trials if trial.point.whole("depth") == depth]
    run = next(trial.task.run for trial in here if trial.point.text("rules") == "completep")
    plain, ours = [], []
    for _ in range(ROUNDS):  # the two sides take turns
        plain.append(plain_seconds(run))
        ours.append(our_seconds(run))
    return {"depth": depth, "points": len(here), "runs": runs, "plain_seconds": min(plain), "our_seconds": min(ours)}


def main():
    experiment = STUDY.at(LAPTOP).narrowed({"base_lr": LAPTOP.lr, "base_std": LAPTOP.std})
    trials = STUDY.trials(experiment)
    counts, grid_words, words = searched(trials, pl.read_csv(GRID))
    start = start_seconds(trials[0].task.run)
    rows = []
    for depth in experiment.axes["depth"]:
        rows.append(measure(depth, trials, counts[depth]))
        print(rows[-1], flush=True)
    plain = sum(row["points"] * row["plain_seconds"] for row in rows)
    ours = start + sum(row["runs"] * row["our_seconds"] for row in rows)
    torch.set_num_threads(1)
    result = {
        "threads": os.cpu_count(),
        "gemm_flops_per_core": measure_peak(torch.device("cpu")),
        "start_seconds": start,
        "depths": rows,
        "verdicts of the grid": grid_words,
        "verdicts of the search": words,
        "plain_minutes": plain / 60,
        "our_minutes": ours / 60,
        "ratio": plain / ours,
        "wanted": WANTED,
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(f"plain {plain / 60:.1f} min, ours {ours / 60:.1f} min: {plain / ours:.2f} times as fast (wanted {WANTED})")


if __name__ == "__main__":
    main()
