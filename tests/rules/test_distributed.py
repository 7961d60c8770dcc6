"""DDP and FSDP2 over two real processes: the same weights, losses and clipped norms as one process alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(how, style, kind, ranks, path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "tests.rules.distributed_worker", how, style, kind, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.fixture(scope="module", params=["reference", "hooks"])
def alone(request, tmp_path_factory):
    """(which model, what one process alone makes of it)"""
    return request.param, run("ddp", "multiplier", request.param, 1, tmp_path_factory.mktemp("one") / "out.json")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "style"), [("ddp", "multiplier"), ("fsdp", "multiplier"), ("fsdp", "folded")])
def test_two_ranks_are_one(how, style, alone, tmp_path):
    kind, one = alone
    two = run(how, style, kind, 2, tmp_path / "out.json")
    if style == "multiplier":
        assert two["first"] == pytest.approx(one["first"], rel=1e-6, abs=1e-6)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)
    assert one["losses"][0] != one["losses"][-1]
