"""How long the whole `lr-transfer` grid takes at laptop scale, compared with the same trainings in plain PyTorch.

The plain side is transformers' GPT-2 with torch's AdamW, not compiled, with all threads. It trains every point of the
grid, one after another in one process, with the same steps and the same evaluation batches at the end. It has no
start-up, no logging, and writes no weights. Our side is the local engine with everything it does: a process per run,
locks, records, weights. A run that two parameterizations share is done once.

All runs of one depth cost the same, so each side is measured on a few runs per depth and multiplied up to the grid. Our
side runs from start to end, with twice as many runs as run at a time. The plain side is timed over some steps after a
warm-up. The start of the engine is measured separately and counted once.

    python benchmarks/study_speed.py
"""

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from completep.studies.lr_transfer import STUDY
from completep.studies.scale import LAPTOP
from completep.sweep.engine import Engine
from completep.sweep.local import Local
from completep.sweep.store import Store, distinct
from completep.sweep.training import Training
from completep.train.speed import measure_peak

RESULTS = Path(__file__).parent / "results" / "study_speed.json"
WANTED = 2.0
STEPS = 20
ROUNDS = 2


def plain_seconds(run):
    """Seconds of one training in plain PyTorch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(os.cpu_count() or 1)
    off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    m = run.model
    config = GPT2Config(
        n_embd=m.width, n_layer=m.depth, n_head=m.heads, vocab_size=m.vocabulary, n_positions=run.sequence, **off
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(m.vocabulary, (run.batch, run.sequence))

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate():
        with torch.no_grad():
            model(input_ids=ids, labels=ids)

    def each(work, count):
        work()
        began = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - began) / count

    step()
    return run.schedule.steps * each(step, STEPS) + run.evaluation.batches * each(evaluate, STEPS)


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
    schedule, evaluation = replace(run.schedule, steps=1, warmup=0), replace(run.evaluation, batches=1)
    return engine_seconds([replace(run, schedule=schedule, evaluation=evaluation)], 1)


def our_seconds(run):
    """Mean wall-clock seconds per run, with all cores busy."""
    workers = os.cpu_count() or 1
    runs = [replace(run, seed=1000 + i) for i in range(2 * workers)]
    return engine_seconds(runs, workers) / len(runs)


def measure(depth, trials):
    """Seconds per run on both sides at one depth, and the number of points and of different runs there."""
    here = [trial for trial in trials if trial.point.whole("depth") == depth]
    run = next(trial.task.run for trial in here if trial.point.text("rules") == "completep")
    plain, ours = [], []
    for _ in range(ROUNDS):  # the two sides take turns
        plain.append(plain_seconds(run))
        ours.append(our_seconds(run))
    counts = {"points": len(here), "runs": len(distinct(here))}
    return {"depth": depth, **counts, "plain_seconds": min(plain), "our_seconds": min(ours)}


def main():
    experiment = STUDY.at(LAPTOP)
    trials = STUDY.trials(experiment)
    start = start_seconds(trials[0].task.run)
    rows = []
    for depth in experiment.axes["depth"]:
        rows.append(measure(depth, trials))
        print(rows[-1], flush=True)
    plain = sum(row["points"] * row["plain_seconds"] for row in rows)
    ours = start + sum(row["runs"] * row["our_seconds"] for row in rows)
    torch.set_num_threads(1)
    result = {
        "threads": os.cpu_count(),
        "gemm_flops_per_core": measure_peak(torch.device("cpu")),
        "start_seconds": start,
        "depths": rows,
        "plain_minutes": plain / 60,
        "our_minutes": ours / 60,
        "ratio": plain / ours,
        "wanted": WANTED,
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(f"plain {plain / 60:.1f} min, ours {ours / 60:.1f} min: {plain / ours:.2f} times as fast (wanted {WANTED})")


if __name__ == "__main__":
    main()
