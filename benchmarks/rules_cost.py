"""The cost of the rules: forward multipliers as a share of a training step, and parametrize on 70B parameters.

Both sides of a ratio are measured in one run, on one thread:

    python benchmarks/rules_cost.py
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from completep import parametrize
from completep.model.gpt import gpt

RESULTS = Path(__file__).parent / "results" / "rules_cost.json"
VOCABULARY, WIDTH, DEPTH, BATCH, TIME = 256, 256, 12, 4, 256


def huggingface(width, depth):
    from transformers import GPT2Config, GPT2LMHeadModel

    options = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(n_embd=width, n_layer=depth, n_head=width // 64, vocab_size=VOCABULARY, **options)
    )


def reference(width, depth):
    return gpt(width, depth, VOCABULARY)


def stepper(build, scaled):
    model = build(WIDTH, DEPTH)
    groups = [{"params": list(model.parameters())}]
    if scaled:
        scaling = parametrize(model, base=lambda: build(128, 2))
        groups = scaling.param_groups(1e-4)
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    batch = torch.randint(VOCABULARY, (BATCH, TIME + 1))

    def step():
        out = model(batch[:, :-1])
        logits = out.logits if hasattr(out, "logits") else out
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def overhead(build, rounds=25):
    """Median over rounds of (step with multipliers) / (plain step). The two take turns, so that drift affects both."""
    plain, scaled = stepper(build, False), stepper(build, True)
    for _ in range(3):
        plain()
        scaled()
    ratios = []
    for i in range(rounds):
        order = (plain, scaled) if i % 2 else (scaled, plain)
        seconds = {}
        for step in order:
            start = time.perf_counter()
            step()
            seconds[step] = time.perf_counter() - start
        ratios.append(seconds[scaled] / seconds[plain])
    return statistics.median(ratios)


def seventy_billion():
    """Runs in a separate process, to measure its peak memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def llama(width, depth, heads, kv, inner):
        return LlamaForCausalLM(
            LlamaConfig(hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads, num_key_value_heads=kv,
                        intermediate_size=inner, vocab_size=32000, head_dim=128)
        )  # fmt: skip

    with torch.device("meta"):
        model = llama(8192, 80, 64, 8, 28672)
    start = time.perf_counter()
    parametrize(model, base=lambda: llama(256, 2, 2, 1, 896))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "seconds": seconds, "peak_GB": peak}))


def main():
    torch.set_num_threads(1)
    child = subprocess.run([sys.executable, __file__, "seventy-billion"], capture_output=True, text=True, check=True)
    large = json.loads(child.stdout.splitlines()[-1])
    rows = [
        ("multipliers by hooks, transformers GPT-2 N=256 L=12: step ratio", overhead(huggingface), 1.02),
        ("multipliers built in, reference decoder N=256 L=12: step ratio", overhead(reference), 1.02),
        (f"parametrize a {large['parameters'] / 1e9:.1f}B Llama on meta: seconds", large["seconds"], 5.0),
        ("  the whole process with torch and transformers: peak GB", large["peak_GB"], 1.0),
    ]
    for name, value, target in rows:
        print(f"{name:70} {value:8.3f}   target ≤ {target:g}   {'met' if value <= target else 'MISSED'}")
    RESULTS.write_text(
        json.dumps([{"what": n, "value": v, "target": t, "met": v <= t} for n, v, t in rows], indent=2) + "\n"
    )


if __name__ == "__main__":
    seventy_billion() if sys.argv[1:] else main()
