"""The speed of a training step, compared with two peers: a plain GPT written by hand, and transformers' GPT-2.

All sides of a ratio are measured in one run. They take turns, each in its own processes with one thread. Ours is the
faster of `completep train` as it is (with kernels.c) and with `--compile`; its name says which:

    python -m benchmarks.training_speed
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.plain_gpt import PlainGPT
from completep import parametrize
from completep.compute import flops
from completep.config import Data, GPTConfig, Hyperparameters, Run, Schedule
from completep.model.gpt import GPT
from completep.train import speed
from completep.train.fused import fuse

RESULTS = Path(__file__).parent / "results" / "training_speed.json"
# (N, L, head size, T, B, V), wanted: ratio to the plain GPT, share of the GEMM rate, share of the plain GPT's memory
SHAPES = [
    ((256, 2, 64, 512, 4, 50304), 1.5, 0.82, 0.5),
    ((256, 16, 64, 512, 4, 256), 1.12, 0.82, 1.0),
    ((128, 8, 32, 128, 8, 256), 1.2, 0.78, 1.0),
    ((64, 32, 16, 64, 16, 256), 1.25, 0.6, 1.0),
    ((32, 16, 8, 64, 16, 256), 1.2, None, 1.0),  # bound by the softmax of many small heads
]
SIDES = ("ours", "compiled", "plain", "huggingface")
ROUNDS = 3
DEPTHS = (2, 8, 32, 128)
COMPILED_DEPTHS = (2, 8, 32)
TWO_RANKS = Run(
    GPTConfig(256, 4, 256), Hyperparameters(2**-8, 0.02), Schedule(12, 2), batch=32, sequence=256, data=Data("python")
)


def huggingface(N, L, head_size, T, B, V):
    from transformers import GPT2Config, GPT2LMHeadModel

    options = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=N, n_layer=L, n_head=N // head_size, vocab_size=V, n_positions=T, **options)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(V, (B, T))
    return stepper(optimizer, lambda: model(input_ids=ids, labels=ids).loss)


def plain(N, L, head_size, T, B, V):
    model = PlainGPT(N, L, V, T, N // head_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(V, (B, T + 1))
    return stepper(optimizer, lambda: model(ids[:, :-1], ids[:, 1:]))


def ours(N, L, head_size, T, B, V, compiled=False):
    speed.tune_process()
    model = GPT(GPTConfig(N, L, V, head_size))
    scaling = parametrize(model, base=lambda: GPT(GPTConfig(N, 2, V, head_size))).init_()
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-4, weight_decay=0.1), fused=True)
    if compiled:
        speed.compile_blocks(model, print)
    else:
        fuse(model, T)  # as the training loop does
    ids = torch.randint(V, (B, T + 1))
    return stepper(optimizer, lambda: model(ids[:, :-1], ids[:, 1:]))


def stepper(optimizer, loss):
    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compiled(*shape):
    return ours(*shape, compiled=True)


def timed(side, shape):
    """Seconds of the first step and of the best of five, peak memory of the process, and the GEMM rate."""
    torch.set_num_threads(1)
    step = {"plain": plain, "huggingface": huggingface, "ours": ours, "compiled": compiled}[side](*shape)
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    step()
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    gemm = max(speed.measure_peak(torch.device("cpu")) for _ in range(5))
    return {"seconds": best, "first": first, "GB": memory, "gemm": gemm}


def apart(side, shape, **environment):
    command = [sys.executable, "-m", "benchmarks.training_speed", "one", side, json.dumps(shape)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        sys.exit(f"{side} {shape} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def matmul_flops(N, L, head_size, T, B, V):
    costs = flops.flops_per_token(GPTConfig(N, L, V, head_size), T)
    return B * T * sum(costs[m].total for m in flops.MATMULS)


def against_the_peers():
    for shape, ratio, share, memory in SHAPES:
        N, L, head_size, T, B, V = shape
        name = f"N={N} L={L} hs={head_size} T={T} B={B} V={V}"
        rounds = [{side: apart(side, shape) for side in SIDES} for _ in range(ROUNDS)]
        seconds = {side: min(r[side]["seconds"] for r in rounds) for side in rounds[0]}
        highest = {side: max(r[side]["GB"] for r in rounds) for side in rounds[0]}
        gemm = max(one["gemm"] for r in rounds for one in r.values())
        better = min("ours", "compiled", key=seconds.__getitem__)
        mine = seconds[better]
        with_what = "compiled" if better == "compiled" else "kernels.c"
        yield f"{name}: times the plain GPT's tokens/s, {with_what}", seconds["plain"] / mine, ">=", ratio
        rate = matmul_flops(*shape) / mine / gemm
        yield f"{name}: share of the GEMM rate ({gemm / 1e9:.0f} GFLOP/s)", rate, ">=", share
        yield f"{name}: share of the plain GPT's memory", highest[better] / highest["plain"], "<=", memory
        yield f"{name}: times the tokens/s of transformers' GPT-2", seconds["huggingface"] / mine, ">=", None


def growth_with_depth():
    seconds = {L: min(apart("ours", (128, L, 32, 128, 4, 256))["seconds"] for _ in range(2)) for L in DEPTHS}
    # From 8 layers up, where the layers outside the blocks no longer matter.
    slope = math.log(seconds[128] / seconds[8]) / math.log(128 / 8)
    yield "N=128, L=8…128: step time grows as L to the power", slope, "<=", 1.03
    compiling = {}
    for L in COMPILED_DEPTHS:
        with tempfile.TemporaryDirectory() as empty:
            one = apart("compiled", (128, L, 32, 128, 4, 256), TORCHINDUCTOR_CACHE_DIR=empty)
        compiling[L] = one["first"] - one["seconds"]
    yield f"compile time at L=32 ({compiling[32]:.0f} s) over L=2", compiling[32] / compiling[2], "<=", 1.5


def train_once(ranks):
    """Tokens per second of a real run, and seconds from calling train() to the end of its first step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--module"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, "benchmarks.training_speed", "train", folder], check=True, capture_output=True)
        return json.loads((Path(folder) / "speed.json").read_text())


def training_process(folder):
    """One rank of a run, under torchrun."""
    from completep.train.loop import How, train
    from completep.train.records import StepRecord

    torch.set_num_threads(1)
    start, seen = time.perf_counter(), []

    def on_record(record):
        if isinstance(record, StepRecord):
            seen.append((time.perf_counter() - start, record.tokens_per_second))

    parallel = "fsdp" if int(os.environ["WORLD_SIZE"]) > 1 else "none"
    train(TWO_RANKS, Path(folder) / "run", How(parallel=parallel, log_every=1), on_record=on_record)
    if os.environ["RANK"] == "0":
        result = {"first step": seen[0][0], "tokens/s": sorted(speed for _, speed in seen)[len(seen) // 2]}
        (Path(folder) / "speed.json").write_text(json.dumps(result))
    os._exit(0)  # gloo's threads may abort an interpreter that shuts down


def ranks():
    rounds = [(train_once(1), train_once(2)) for _ in range(ROUNDS)]
    one, two = (max(r[side]["tokens/s"] for r in rounds) for side in (0, 1))
    yield "N=256 L=4 T=256 B=32: 2 ranks FSDP2 on 2 cores over one rank on one core", two / one, ">=", 1.6
    yield "seconds from train() to the end of its first step", min(r[0]["first step"] for r in rounds), "<=", 5


def main():
    rows = []
    for measure in (against_the_peers, growth_with_depth, ranks):
        for what, value, sign, target in measure():
            met = None if target is None else value >= target if sign == ">=" else value <= target
            rows.append({"what": what, "value": value, "sign": sign, "target": target, "met": met})
            wanted = "" if target is None else f"target {sign} {target:g}   {'met' if met else 'MISSED'}"
            print(f"{what:84} {value:7.3f}   {wanted}", flush=True)
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        print(json.dumps(timed(sys.argv[2], json.loads(sys.argv[3]))))
    elif sys.argv[1:2] == ["train"]:
        training_process(sys.argv[2])
    else:
        main()
