"""A training script for tests, without torch: its loss is a bowl over lr, with an optimum that may drift with depth."""

import argparse
import json
import math
import random
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
parser.add_argument("--depth", type=int)
parser.add_argument("--lr", type=float)
parser.add_argument("--wd", type=float, default=0.1)
parser.add_argument("--seed", type=int)
parser.add_argument("--out", type=Path)
parser.add_argument("--drift", type=float, default=0.0)
parser.add_argument("--wd-drift", type=float, default=0.0)
parser.add_argument("--act", default="gelu")
parser.add_argument("--diverges", type=float, default=math.inf)
parser.add_argument("--log", type=Path)
a = parser.parse_args()
noise = random.Random(f"{a.width} {a.depth} {a.lr} {a.seed}").gauss(0, 0.001)
luck = random.Random(f"{a.seed}").gauss(0, 0.01)
place = -7.3 + a.drift * math.log2(a.depth / 2)
loss = 2 - 0.1 * math.log2(a.depth) + 0.03 * (math.log2(a.lr) - place) ** 2 + noise + luck
loss += 0.02 * (math.log2(a.wd / 0.1) - a.wd_drift * math.log2(a.depth / 2)) ** 2
if a.act != "gelu":
    loss += 0.05 + 0.001 * random.Random(f"{a.act} {a.seed} {a.depth}").gauss(0, 1)
if a.log:
    with a.log.open("a") as file:
        file.write(f"{a.width} {a.depth} {a.lr} {a.seed}\n")
a.out.mkdir(parents=True, exist_ok=True)
with (a.out / "metrics.jsonl").open("w") as file:
    for step in (1, 2, 3):
        value = math.nan if a.lr > a.diverges else loss + 1 / step - 1 / 3
        file.write(json.dumps({"step": step, "val_loss": value, "name": "bowl"}) + "\n")
print(f"step 3 val loss {loss:.6f}")
