"""Hide the table, and let `derive` find it again: right, inconclusive or wrong?

A cell is one setting (init, learning rate, epsilon) of one parameter along one axis. What is hidden is not used: the
parameters start with a constant size and train with constant settings at every size. The whole table is hidden at once,
which is harder than one role at a time; `--in-turn` hides one role after the other. The expected exponent is that of
the table, resolved for the same model. REACH was set on the reference decoder; the other architectures
(benchmarks/architectures.py) were not used for it.

    python -m benchmarks.derive_power [--in-turn] [name of an architecture …]
"""

import json
import math
import sys
import time
import warnings
from collections import Counter
from datetime import date
from pathlib import Path

import torch

from benchmarks.architectures import ARCHITECTURES
from completep import derive, parametrize
from completep.model.gpt import gpt

RESULTS = Path(__file__).parent / "results" / "derive_power.json"
WIDTHS, DEPTHS, BASE = (64, 128, 256), (2, 4, 8, 16), (64, 2)
NAMES = {"init": "init_std", "learning rate": "lr", "epsilon": "eps"}


def decoder(width, depth):
    return gpt(width, depth, 256, head_size=16)


def tested():
    names = (
        "by hand",
        "Qwen3",
        "OLMo2",
        "GPT-NeoX",
        "GPT-2, tied",
        "Gemma",
        "ViT",
        "convolutional",
        "DeepSeek-V3, dense",
    )
    return {"reference decoder": decoder} | {name: ARCHITECTURES[name] for name in names}


def expected_exponents(build):
    """parameter → setting → axis → exponent of the table, from a model twice as wide and one twice as deep."""
    found = {}
    for axis, (width, depth) in {"width": (128, 2), "depth": (64, 4)}.items():
        scaling = parametrize(build(width, depth), base=lambda: build(*BASE))
        for name, r in scaling.parameters.items():
            factors = scaling.settings(name)
            for setting, attribute in NAMES.items():
                own = found.setdefault(r.template, {}).setdefault(setting, {})
                own[axis] = (
                    0.0
                    if r.role.trait.start == "constant" and setting == "init"
                    else round(math.log2(getattr(factors, attribute)), 6)
                )
    roles = {r.template: str(r.role) for r in scaling.parameters.values()}
    return found, roles


def recover(name, build, in_turn):
    """Cells of one architecture."""
    expected, roles = expected_exponents(build)
    groups = [[t for t, own in roles.items() if own == role] for role in dict.fromkeys(roles.values())]
    cells = []
    start = time.perf_counter()
    for hidden in groups if in_turn else [list(roles)]:
        found = derive(build, widths=WIDTHS, depths=DEPTHS, base=BASE, parameters=hidden, workers=1)
        for e in found.exponents:
            wanted = expected[e.parameter][e.setting][e.axis]
            word = "inconclusive" if e.value is None else "right" if e.value == wanted else "wrong"
            measured = None if e.used is None else round(e.used.value, 3)
            cells.append(
                {"architecture": name, "role": roles[e.parameter], "parameter": e.parameter, "setting": e.setting,
                 "axis": e.axis, "expected": wanted, "measured": measured, "found": e.value, "cell": word, "why": e.why}
            )  # fmt: skip
    seconds = time.perf_counter() - start
    print(f"{name}: {dict(Counter(c['cell'] for c in cells))}, {seconds:.0f} s", flush=True)
    for cell in cells:
        if cell["cell"] != "right":
            print("   ", cell, flush=True)
    return cells


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    chosen = {name: build for name, build in tested().items() if not words or name in words}
    cells = [cell for name, build in chosen.items() for cell in recover(name, build, "--in-turn" in sys.argv)]
    counts = {name: dict(Counter(c["cell"] for c in cells if c["architecture"] == name)) for name in chosen}
    total = Counter(c["cell"] for c in cells)
    print(dict(total))
    document = {
        "date": date.today().isoformat(), "torch": torch.__version__, "widths": WIDTHS, "depths": DEPTHS,
        "hidden": "each role in turn" if "--in-turn" in sys.argv else "the whole table at once", "total": dict(total),
        "architectures": counts, "not right": [c for c in cells if c["cell"] != "right"],
    }  # fmt: skip
    if not words:
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
