"""Every example runs, learns, and says so; distributed ones under torchrun on two ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDS = {
    "accelerate_fsdp": "accelerate",
    "lightning_module": "lightning",
    "vit": "transformers",
}
RANKS = {"fsdp2": 2, "accelerate_fsdp": 2}
FALLS = {"fsdp2": 1.0, "accelerate_fsdp": 1.0, "lightning_module": 1.0, "vit": 1.0}


@pytest.mark.parametrize("name", [name for name in FALLS if name != "fsdp2"])  # which has a test of its own
def test_it_runs_and_learns(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="needs the extra `test`")
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS[name])] if name in RANKS else []
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, f"examples/{name}.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    first, last = map(float, re.search(r"loss ([\d.]+) → ([\d.]+)", done.stdout).groups())
    assert last < first - FALLS[name]


def test_every_example_is_run():
    """By this file, by the tests of the docs (own_model), or by the newcomer's (hf_trainer)."""
    elsewhere = {"__init__", "own_model", "hf_trainer"}
    assert {p.stem for p in (ROOT / "examples").glob("*.py")} - elsewhere == set(FALLS)


def test_one_rank_is_two_ranks():
    """The FSDP2 example gives the same losses on any number of ranks."""
    said = []
    for ranks in (1, 2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*launcher, "examples/fsdp2.py"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=environment,
            timeout=300,
            check=True,
        )
        said.append([float(x) for x in re.search(r"loss ([\d.]+) → ([\d.]+)", done.stdout).groups()])
    assert said[0] == pytest.approx(said[1], abs=2e-3)
    assert said[0][1] < said[0][0] - FALLS["fsdp2"]
