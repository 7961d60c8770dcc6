"""How fast a training step is, beside what a user would pick instead: transformers' GPT-2 with torch's AdamW.

Ratios measured in one run, each side in a process of its own, one thread:  python benchmarks/training_speed.py [--compile]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from completep import parametrize
from completep.compute import flops
from completep.config import GPTConfig
from completep.model.gpt import GPT
from completep.train import speed

RESULTS = Path(__file__).parent / "results" / "training_speed.json"
# (N, L, T, B, V, wanted ratio to the peer, wanted share of the GEMM rate, wanted share of the peer's memory)
SHAPES = [
    (256, 2, 512, 4, 50257, 1.7, 0.75, 0.5),
    (256, 16, 512, 4, 256, 1.15, 0.75, None),
    (64, 32, 64, 16, 256, 1.5, 0.6, None),
]
DEPTHS = (2, 8, 32, 128)


def peer(N, L, T, B, V):
    from transformers import GPT2Config, GPT2LMHeadModel

    options = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=N, n_layer=L, n_head=max(1, N // 64), vocab_size=V, n_positions=T, **options)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(V, (B, T))

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(N, L, T, B, V):
    speed.keep_large_blocks()
    config = GPTConfig(N, L, V)
    model = GPT(config)
    scaling = parametrize(model, base=lambda: GPT(GPTConfig(64, 2, V)))
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-4, weight_decay=0.1), fused=True)
    if "--compile" in sys.argv:
        speed.compile_blocks(model, print)
    ids = torch.randint(V, (B, T + 1))

    def step():
        model(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(side, shape):
    """Seconds of the best of a few steps, and the process's peak memory."""
    torch.set_num_threads(1)
    step = {"peer": peer, "ours": ours}[side](*shape)
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    step()
    best = math.inf
    for _ in range(6):
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    gemm = max(speed.measure_peak(torch.device("cpu")) for _ in range(5))
    return {"seconds": best, "first": first, "GB": memory, "gemm": gemm}


def apart(side, shape):
    command = [sys.executable, __file__, "one", side, json.dumps(shape), *(w for w in sys.argv if w == "--compile")]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def matmul_flops(N, L, T, B, V):
    costs = flops.flops_per_token(GPTConfig(N, L, V), T)
    return B * T * sum(costs[m].total for m in flops.MATMULS)


def main():
    rows = []
    for N, L, T, B, V, ratio, share, memory in SHAPES:
        shape = (N, L, T, B, V)
        mine, theirs = apart("ours", shape), apart("peer", shape)
        name = f"N={N} L={L} T={T} B={B} V={V}"
        rows.append((f"{name}: times the peer's tokens/s", theirs["seconds"] / mine["seconds"], ">=", ratio))
        rows.append(
            (f"{name}: share of the GEMM rate", matmul_flops(*shape) / mine["seconds"] / mine["gemm"], ">=", share)
        )
        if memory:
            rows.append((f"{name}: share of the peer's peak memory", mine["GB"] / theirs["GB"], "<=", memory))
    times = [apart("ours", (128, L, 128, 4, 256)) for L in DEPTHS]
    x, y = [math.log(L) for L in DEPTHS], [math.log(t["seconds"]) for t in times]
    slope = (y[-1] - y[1]) / (x[-1] - x[1])  # from 8 layers up, where what is outside the blocks no longer counts
    rows.append(("N=128, L=8…128: step time grows as L to the power", slope, "<=", 1.03))
    told = []
    for what, value, sign, target in rows:
        met = value >= target if sign == ">=" else value <= target
        told.append({"what": what, "value": value, "sign": sign, "target": target, "met": met})
        print(f"{what:62} {value:7.3f}   target {sign} {target:g}   {'met' if met else 'MISSED'}")
    RESULTS.write_text(json.dumps({"compiled": "--compile" in sys.argv, "rows": told}, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        print(json.dumps(timed(sys.argv[2], json.loads(sys.argv[3]))))
    else:
        main()
