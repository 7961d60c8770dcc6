"""How long the whole laptop `lr-transfer` grid takes, beside the same trainings one after another in plain PyTorch.

The plain side is transformers' GPT-2 with torch's AdamW, eager, all threads, every point of the grid in turn in one process: the
same steps and the same batches of evaluation at the end, without start-up, logging or weights written. Ours is the local engine with
all that it does: a process per run, locks, records, weights written; runs that two parameterizations share are done once. All runs of
one depth cost the same, so each side is measured on a few of each depth (ours: from start to end, twice as many as run at a time;
plain: a number of steps after a warm-up) and multiplied up to the grid; the engine's own start is measured apart and counted once:

    python benchmarks/study_speed.py
"""

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from completep.study.engine import Local, undone, with_data
from completep.study.named import lr_transfer
from completep.study.scale import LAPTOP
from completep.study.store import Store
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


def start_seconds(run):
    """The engine's first run: until then nothing is imported in the server that runs are forked from."""
    tiny = replace(
        run, schedule=replace(run.schedule, steps=1, warmup=0), evaluation=replace(run.evaluation, batches=1)
    )
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        assert Local(Store(Path(folder)), 1).run([tiny]) == []
        return time.perf_counter() - began


def our_seconds(run):
    """Wall seconds that one run takes on average, with all cores at work."""
    workers = os.cpu_count() or 1
    runs = [replace(run, seed=1000 + i) for i in range(2 * workers)]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        assert Local(Store(Path(folder)), workers).run(runs) == []
        return (time.perf_counter() - began) / len(runs)


def main():
    sweep = lr_transfer(LAPTOP)
    points = [with_data(run) for _, run in sweep.runs()]
    with tempfile.TemporaryDirectory() as folder:
        distinct = undone(Store(Path(folder)), points)
    rows, start = [], start_seconds(points[0])
    for depth in LAPTOP.depths:
        run = next(r for r in points if r.model.depth == depth and r.rules == "completep")
        plain, ours = [], []
        for _ in range(ROUNDS):  # in turn
            plain.append(plain_seconds(run))
            ours.append(our_seconds(run))
        count = [sum(r.model.depth == depth for r in runs) for runs in (points, distinct)]
        rows.append(
            {
                "depth": depth,
                "points": count[0],
                "runs": count[1],
                "plain_seconds": min(plain),
                "our_seconds": min(ours),
            }
        )
        print(rows[-1])
    plain = sum(r["points"] * r["plain_seconds"] for r in rows)
    ours = start + sum(r["runs"] * r["our_seconds"] for r in rows)
    torch.set_num_threads(1)
    found = {
        "threads": os.cpu_count(), "gemm_flops_per_core": measure_peak(torch.device("cpu")), "start_seconds": start, "depths": rows,
        "plain_minutes": plain / 60,
        "our_minutes": ours / 60, "ratio": plain / ours, "wanted": WANTED,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    print(f"plain {plain / 60:.1f} min, ours {ours / 60:.1f} min: {plain / ours:.2f} times as fast (wanted {WANTED})")


if __name__ == "__main__":
    main()
