"""A mixture of experts, trained by the same loop: it learns, both styles are one run, and a stopped run resumes."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from completep.config import GPTConfig
from completep.train.export import load_exported
from completep.train.loop import train
from completep.train.records import read_metrics
from tests.train.runs import EVERY_STEP, small_data, small_run

SPARSE = GPTConfig(32, 3, 256, 8, experts=4, active_experts=2, expert_width=48, shared_experts=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("corpus"))


def losses(folder):
    return [r.loss for r in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.slow
def test_it_learns_and_both_styles_are_one_run(data, tmp_path):
    run = small_run(data, model=SPARSE, steps=30)
    train(run, tmp_path / "a", EVERY_STEP)
    assert losses(tmp_path / "a")[-1] < losses(tmp_path / "a")[0] - 0.5
    train(replace(run, style="folded"), tmp_path / "b", EVERY_STEP)
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-3)


def test_its_weights_are_exported_and_loaded(data, tmp_path):
    run = small_run(data, model=SPARSE, steps=3)
    train(run, tmp_path / "a", EVERY_STEP)
    model = load_exported(tmp_path / "a")
    names = {n for n in load_file(tmp_path / "a" / "model.safetensors") if "experts" in n}
    assert names == {f"blocks.{i}.mlp.experts.{matrix}" for i in range(3) for matrix in ("up", "down")}
    assert torch.isfinite(model(torch.zeros(1, 8, dtype=torch.long))).all()
