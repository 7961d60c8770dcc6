"""How often `check` is wrong, on models that it was not tuned on.

BAND, the width of the accepted interval, was set on the reference decoder and frozen. Everything here is other
architectures (benchmarks/architectures.py), with other init, data, sequence lengths and base shapes.

Right models: every architecture under every variation, each with its own seeds, so the checks are independent.

Faults: one setting of one tensor × size^e, with e = ±1/4, ±1/2, ±1, in width or in depth. A wrong learning rate,
epsilon or weight decay does not change a gradient at init, so its survey is the right one with one column multiplied.
A wrong init or multiplier is put right on the copy before gradients are measured, so the same holds. A sample of all
kinds is also planted in real optimizers and models and checked from the start (`planted`).

    python -m benchmarks.check_power [--quick]
"""

import collections
import itertools
import json
import multiprocessing
import os
import random
import sys
import time
import warnings
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

import polars as pl
import torch

from benchmarks.architectures import ARCHITECTURES
from completep import COMPLETEP, check
from completep.config import Shape
from completep.measure.check import Check, decided, grid_of_shapes
from completep.measure.diagnosis import culprits, judge_survey, overall
from completep.measure.subject import Family, Setting, Source, python_bytes
from completep.measure.survey import survey
from tests.measure.controls import planted

RESULTS = Path(__file__).parent / "results" / "check_power.json"
EXPONENTS = (-1.0, -0.5, -0.25, 0.25, 0.5, 1.0)
CELLS = {"learning rate": ("pull",), "epsilon": ("eps_ratio",), "weight decay": ("decay",), "init": ("gain",)}
PLANTED_AT = ("Qwen3", "by hand", "OLMo2", "GPT-NeoX", "GPT-2, tied", "Gemma3")


@dataclass(frozen=True)
class Variation:
    name: str
    base: tuple[int, int] = (64, 2)
    std: float = 0.06
    time: int = 16
    text: bool = False


VARIATIONS = (
    Variation("as the default"),
    Variation("σ 0.02, T 24", std=0.02, time=24),
    Variation("σ 0.12, base 64 × 3", std=0.12, base=(64, 3)),
    Variation("text, base 96 × 2", text=True, base=(96, 2)),
    Variation("T 8, base 64 × 4", time=8, base=(64, 4)),
)


def text_batch(step, *, time, seed):
    """Python's source as bytes, another part for every number."""
    size = 16 * (time + 1)
    tokens = python_bytes(size, (1000 * seed + step) * size).view(16, time + 1)
    return tokens[:, :-1], tokens[:, 1:]


def sizes(base):
    width, depth = base
    return {"widths": (width, 2 * width, 4 * width), "depths": (depth, 2 * depth, 4 * depth, 8 * depth), "base": base}


def right(name, variation, offset) -> Check:
    """A check with seeds of its own, so that it is independent of the others."""
    v = variation
    batches = partial(text_batch, time=v.time, seed=offset) if v.text and name != "ViT" else None
    source = Source(ARCHITECTURES[name], Shape(*v.base), batches=batches)
    setting = Setting(v.std, batch=16, time=v.time, weight_decay=0.1)
    every, _ = grid_of_shapes(**sizes(v.base))
    family = Family(source, setting)

    def measure(seeds, shapes=every, **options):
        own = [1000 * offset + seed for seed in seeds]
        return survey(source, [COMPLETEP], shapes, setting, seeds=own, workers=1, family=family, **options)

    measured, findings = decided(measure, 3)
    return Check(measured, tuple(findings), ())


def with_fault(result, tensor, setting, axis, exponent):
    """The findings of the same survey with one setting wrong. Those of all other tensors are as they were."""
    own = result.survey.tensors.filter(pl.col("template") == tensor)
    factor = (pl.col(axis) / getattr(result.survey.base, axis)) ** exponent
    changed = [(pl.col(c) * factor).alias(c) for c in CELLS.get(setting, ("gain", "pull"))]
    if setting == "multiplier":
        changed.append((pl.col("eps_ratio") / factor).alias("eps_ratio"))
    judged = judge_survey(replace(result.survey, tensors=own.with_columns(changed)))
    others = [f for f in result.findings if f.tensor != tensor]
    return [*others, *(f for f in judged if f.tensor == tensor)]


def faults_of(result):
    """Every cell that this model has."""
    seen = {(f.tensor, f.setting) for f in result.findings if f.setting in (*CELLS, "multiplier")}
    tied = {t for t, _ in seen if t.endswith("(tied)")}
    cells = [(t, s) for t, s in sorted(seen) if t not in tied]
    own = result.survey.tensors.filter(pl.col("expected_multiplier").n_unique().over("template") > 1)
    multiplied = sorted(set(own["template"]) - tied)
    return [*cells, *((t, "multiplier") for t in multiplied if (t, "init") in seen)]


def named(findings, tensor, setting):
    """True if the tensor and the setting, and nothing else, are named."""
    return {(f.tensor, f.setting) for f in culprits(findings)} == {(tensor, setting)}


def tally(rows, *keys):
    groups = collections.defaultdict(list)
    for row in rows:
        groups[tuple(row[k] for k in keys)].append(row)
    for key, own in sorted(groups.items()):
        fails = sum(r["word"] == "FAIL" for r in own) / len(own)
        names = sum(r["named"] for r in own) / len(own)
        yield {**dict(zip(keys, key, strict=True)), "faults": len(own), "FAIL": fails, "named": names}


def one(job):
    """One check of a right model and, under the default settings, all faults of that model."""
    offset, name, variation = job
    start = time.perf_counter()
    result = right(name, variation, offset)
    row = {"architecture": name, "variation": variation.name, "verdict": result.verdict}
    row |= {"seeds": result.survey.tensors["seed"].n_unique(), "seconds": round(time.perf_counter() - start, 1)}
    row["open"] = [f"{f} ({f.axis})" for f in result.findings if f.word != "PASS"][:4]
    print(json.dumps(row), flush=True)
    faults = []
    if variation == VARIATIONS[0]:
        for (tensor, setting), axis, e in itertools.product(faults_of(result), ("width", "depth"), EXPONENTS):
            findings = with_fault(result, tensor, setting, axis, e)
            fault = {"architecture": name, "tensor": tensor, "setting": setting, "axis": axis, "size": abs(e)}
            faults.append({**fault, "word": overall(findings), "named": named(findings, tensor, setting)})
    return row, faults


def prepare_worker():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def main():
    prepare_worker()
    quick = "--quick" in sys.argv
    names = list(ARCHITECTURES)[:: 12 if quick else 1]
    variations = VARIATIONS[:: 4 if quick else 1]
    pairs = itertools.product(variations, names)
    jobs = [(offset, name, variation) for offset, (variation, name) in enumerate(pairs)]
    checks, faults, real = [], [], []
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count(), prepare_worker) as pool:
        for row, several in pool.imap_unordered(one, jobs):
            checks.append(row)
            faults += several
            save(checks, faults, real)  # what is done so far, in case of an interruption
        for several in pool.imap_unordered(partial(plant, quick=quick), PLANTED_AT[:: 5 if quick else 1]):
            real += several
            save(checks, faults, real)
    print(RESULTS.read_text())


def save(checks, faults, real):
    words = collections.Counter(r["verdict"] for r in checks)
    summary = {
        "date": date.today().isoformat(), "band set on": "the reference decoder", "right": dict(words),
        "architectures": len({r["architecture"] for r in checks}),
        "faults": list(tally(faults, "size")), "by setting": list(tally(faults, "setting", "size")),
        "planted": list(tally(real, "size")),
    }  # fmt: skip
    missed = [f for f in (*faults, *real) if not f["named"]]
    RESULTS.write_text(json.dumps({**summary, "missed": missed[:200], "checks": checks}, indent=1) + "\n")


def plant(name, quick):
    """Faults in real optimizers and models, checked from the start."""
    base, rows = (64, 2), []
    result = right(name, VARIATIONS[0], 0)
    cells = list(itertools.product(faults_of(result), ("width", "depth"), EXPONENTS))
    for (tensor, setting), axis, e in random.Random(name).sample(cells, 4 if quick else 12):
        varied = {k: v if k.startswith(axis) or k == "base" else () for k, v in sizes(base).items()}
        factory = partial(planted, ARCHITECTURES[name], base, (tensor, setting, axis, e))
        findings = check(factory, **varied, workers=1).findings
        row = {"architecture": name, "tensor": tensor, "setting": setting, "axis": axis, "size": abs(e)}
        rows.append({**row, "word": overall(findings), "named": named(findings, tensor, setting)})
    return rows


if __name__ == "__main__":
    main()
