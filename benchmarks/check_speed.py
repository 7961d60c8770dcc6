"""The speed of `check` on a small family, and of the paper's depth coordinate check.

The check (one backward pass per shape and seed) is compared with the movement check (ten steps and a pass per role) at
the same shapes and seeds, each with its own default batches, in one process with one thread. What counts there is CPU
time, which depends less on what else runs, and the smallest of five runs, done in turn.

The coordinate check is compared with the same grid in plain PyTorch, which stores activations with hooks and does one
run after another, with torch's threads.

    python benchmarks/check_speed.py [DEEPEST]     128 by default
    python benchmarks/check_speed.py family        only the small family
"""

import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from completep import parametrize
from completep.config import Shape
from completep.measure.grid import coordinate_check
from completep.measure.subject import Setting, Source, python_bytes
from completep.measure.survey import survey
from completep.model.gpt import gpt
from completep.rules.table import COMPLETEP, MUP, alpha, literature

RESULTS = Path(__file__).parent / "results" / "check_speed.json"
RULES = (MUP, literature(0.5), alpha(0.5), COMPLETEP)
WIDTH, BASE, SETTING = 256, 2, Setting()
ONLY_FAMILY = sys.argv[1:] == ["family"]
DEEPEST = int(sys.argv[1]) if len(sys.argv) > 1 and not ONLY_FAMILY else 128
FAMILY = [Shape(width, 2) for width in (64, 128, 256)] + [Shape(64, depth) for depth in (4, 8, 16)]
SEEDS = (0, 1, 2)
CHECK = Setting(batch=16, time=16, weight_decay=0.1)  # the defaults of `check`
DEPTHS = [2**k for k in range(1, DEEPEST.bit_length())]


def plain_run(rules, depth):
    """The obvious way: hooks store the output of every block, and a fixed batch is run before every step."""
    model = gpt(WIDTH, depth, 256)
    scaling = parametrize(model, base=lambda: gpt(WIDTH, BASE, 256), rules=rules)
    scaling.init_(SETTING.std, seed=0)
    optimizer = torch.optim.AdamW(scaling.param_groups(SETTING.lr, eps=SETTING.eps), betas=(0.9, 0.95))
    tokens = python_bytes(11 * 4 * 129).view(11, 4, 129)
    seen, probing = {}, []
    for name, module in model.named_modules():
        if name.endswith((".attention", ".mlp")) or name in ("final_norm", *(f"blocks.{i}" for i in range(depth))):
            module.register_forward_hook(
                lambda m, a, out, name=name: seen.update({name: out.detach().clone()}) if probing else None
            )
    first, rows = None, []
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(SETTING.steps + 1):
        probing.append(True)
        with torch.no_grad():
            model(tokens[-1, :1, :-1])
        probing.clear()
        now = dict(seen)
        first = first or now
        rows += [
            (name, x.square().mean().sqrt().item(), (x - first[name]).square().mean().sqrt().item())
            for name, x in now.items()
        ]
        if step < SETTING.steps:
            loss = F.cross_entropy(model(tokens[step, :, :-1]).flatten(0, 1), tokens[step, :, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    end = {n: p.detach().clone() for n, p in model.named_parameters()}
    roles = {n: r.role for n, r in scaling.parameters.items()}
    for role in set(roles.values()):
        with torch.no_grad():
            probing.append(True)
            for n, p in model.named_parameters():
                p.copy_(end[n] if roles[n] is role else start[n])
            model(tokens[-1, :1, :-1])
        rows.append((role, seen[f"blocks.{depth - 1}"].square().mean().sqrt().item(), 0.0))
    return rows


def family():
    """{what: CPU seconds} for three widths, four depths and three seeds."""
    source = Source("completep.model.gpt:gpt", FAMILY[0], {"vocabulary": 256})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = {}
    for _ in range(5):  # in turn, so that both see the same load
        for name, measure, setting in (("check s", survey, CHECK), ("movement s", coordinate_check, SETTING)):
            start = time.process_time()
            measure(source, [COMPLETEP], FAMILY, setting, seeds=SEEDS, workers=1)
            seconds[name] = min(seconds.get(name, math.inf), time.process_time() - start)
    torch.set_num_threads(threads)
    ratio = seconds["movement s"] / seconds["check s"]
    return {**seconds, "ratio": ratio, "target": 10, "met": ratio >= 10}


def main():
    small = family()
    seconds = f"{small['check s']:.1f} CPU s; movement {small['movement s']:.1f} CPU s"
    print(f"small family: {seconds};  {small['ratio']:.1f}×   target >= 10   {'met' if small['met'] else 'MISSED'}")
    if ONLY_FAMILY:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(known | {"small family": small}, indent=2) + "\n")
        return
    source = Source("completep.model.gpt:gpt", Shape(WIDTH, BASE), {"vocabulary": 256})
    start = time.perf_counter()
    coordinate_check(source, RULES, [Shape(WIDTH, d) for d in DEPTHS], SETTING, seeds=(0,))
    ours = time.perf_counter() - start
    print(f"completep: {ours:.0f} s", flush=True)
    start = time.perf_counter()
    for rules in RULES:
        for depth in DEPTHS:
            plain_run(rules, depth)
    plain = time.perf_counter() - start
    ratio = plain / ours
    print(f"plain PyTorch: {plain:.0f} s;  {ratio:.2f}×   target >= 2   {'met' if ratio >= 2 else 'MISSED'}")
    result = {"deepest": DEEPEST, "completep s": ours, "plain s": plain, "ratio": ratio, "target": 2, "met": ratio >= 2}
    result["small family"] = small
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
