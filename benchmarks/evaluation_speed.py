"""Log-likelihoods of multiple-choice items, compared with the naive way, which reads every (question, answer) pair.

Items are cut from Python's own source: a question of 100 to 600 bytes and four answers of 10 to 60, like hellaswag's.
Both sides use the same model and the same threads, and take turns in one process:

    python benchmarks/evaluation_speed.py
"""

import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from completep.data.builtin import builtin_corpus
from completep.integrations.scoring import score
from completep.model.gpt import gpt
from completep.train.speed import measure_peak, tune_process

RESULTS = Path(__file__).parent / "results" / "evaluation_speed.json"
WANTED, ITEMS, ROUNDS = 3.0, 100, 3


def items():
    text = builtin_corpus().open("validation")[0]
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(ITEMS):
        size, place = int(rng.integers(100, 600)), int(rng.integers(0, len(text) - 2000))
        begin = tuple(int(t) for t in text[place : place + size])
        for _ in range(4):
            start, length = int(rng.integers(0, len(text) - 100)), int(rng.integers(10, 60))
            pairs.append((begin, tuple(int(t) for t in text[start : start + length])))
    return pairs


@torch.no_grad()
def naive(model, pairs):
    likelihoods = []
    for begin, end in pairs:
        whole = torch.tensor([begin + end])
        logits = model(whole[:, :-1])[0, -len(end) :]
        likelihoods.append(F.log_softmax(logits, -1).gather(1, whole[0, -len(end) :, None]).sum().item())
    return likelihoods


def main():
    torch.set_num_threads(1)
    tune_process()
    pairs = items()
    rows = []
    for width, depth in ((64, 8), (256, 6)):
        torch.manual_seed(0)
        model = gpt(width, depth, 256, head_size=min(64, width)).eval()
        times = {"naive": [], "ours": []}
        for _ in range(ROUNDS):
            began = time.perf_counter()
            slow = naive(model, pairs)
            times["naive"].append(time.perf_counter() - began)
            began = time.perf_counter()
            fast = [s.log_likelihood for s in score(model, pairs, longest=2048)]
            times["ours"].append(time.perf_counter() - began)
        apart = max(abs(a - b) for a, b in zip(slow, fast, strict=True))
        best = {name: min(t) for name, t in times.items()}
        rows.append(
            {"width": width, "depth": depth, **best, "ratio": best["naive"] / best["ours"], "largest_difference": apart}
        )
        print(rows[-1])
    result = {"threads": 1, "gemm_flops_per_core": measure_peak(torch.device("cpu")), "wanted": WANTED, "models": rows}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
