"""Every example runs with the command in its docstring, learns, and has the losses of a plain loop with these rules."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import completep as cp
from completep.data.builtin import builtin_corpus
from completep.data.sampler import Sampler

ROOT = Path(__file__).parent.parent
NEEDS = {"accelerate_fsdp": "accelerate", "lightning_module": "lightning", "vit": "transformers"}
FALLS = {"fsdp2": 1.0, "accelerate_fsdp": 1.0, "lightning_module": 1.0, "vit": 1.0}


def losses(name, ranks=None):
    """(first, last) loss, as the example's own command prints them, from the root of the project."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="needs the extra `test`")
    launcher, *words = (ROOT / "examples" / f"{name}.py").read_text().split('"""')[1].split("\n\n")[1].split()
    assert words[-2:] == ["-m", f"examples.{name}"]
    if launcher == "torchrun":
        words = ["-m", "torch.distributed.run", "--standalone", *words]
    command = [sys.executable, *words]
    if ranks is not None:
        command[command.index("--nproc-per-node") + 1] = str(ranks)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    first, last = map(float, re.search(r"loss ([\d.]+) → ([\d.]+)", ended.stdout).groups())
    assert last < first - FALLS[name]
    return first, last


def plain(model, base, loss, *, std, lr, steps, one_rate=False):
    """(first, last) loss of the same training in a plain loop.

    With `one_rate`, all groups have one learning rate. It is small, because a loss after few steps hardly depends on
    how a large one is divided among the groups.
    """
    scaling = cp.parametrize(model, base=base)
    scaling.init_(std=std, seed=0)
    groups = scaling.param_groups(lr=lr, eps=1e-12)
    if one_rate:
        groups = [{**g, "lr": lr / 8} for g in groups]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    sampler, history = Sampler(builtin_corpus(), "train", 64, 8, seed=0), []
    for step in range(steps):
        now = loss(model, torch.from_numpy(sampler.batch_at(step)))
        now.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(now.item())
    return history[0], history[-1]


def test_every_example_is_run():
    """By this file, by test_docs.py (own_model), by test_newcomer.py (hf_trainer), or by test_tune_examples.py."""
    elsewhere = {
        "__init__",
        "own_model",
        "hf_trainer",
        *(f"tune_{x}" for x in ("plain", "nanogpt", "trainer", "lightning")),
    }
    assert {p.stem for p in (ROOT / "examples").glob("*.py")} - elsewhere == set(FALLS)


@pytest.mark.slow
def test_vit():
    losses("vit")


def llama():
    from examples.hf_trainer import llama

    return llama, (64, 4), (32, 2), lambda model, batch: model(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss


def own():
    from examples.own_model import MyModel

    def next_token(model, batch):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return MyModel, (128, 4), (64, 2), next_token


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("accelerate_fsdp", llama, {"std": 0.1, "lr": 2**-6, "steps": 20}),
        ("lightning_module", own, {"std": 0.05, "lr": 2**-7, "steps": 40}),
    ],
)
def test_it_trains_like_a_plain_loop(name, kind, settings):
    printed = losses(name)
    build, target, base, loss = kind()
    assert printed == pytest.approx(plain(build(*target), lambda: build(*base), loss, **settings), abs=5e-3)
    other = plain(build(*target), lambda: build(*base), loss, one_rate=True, **settings)
    assert abs(other[1] - printed[1]) > 1e-2  # twice what is allowed above


@pytest.mark.slow
def test_fsdp2_gives_the_same_losses_on_one_and_two_ranks():
    # Over 20 steps: after 40, differences of rounding have grown to 2e-2 on some processors.
    assert losses("fsdp2", ranks=1) == pytest.approx(losses("fsdp2", ranks=2), abs=2e-3)


@pytest.mark.slow
def test_trainer_keeps_the_settings_of_every_group(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs the extra `test`")
    from examples.hf_trainer import batches, llama

    model = llama(64, 4)
    scaling = cp.parametrize(model, base=lambda: llama(32, 2)).init_(std=0.1, seed=0)
    groups = scaling.param_groups(lr=2**-6, weight_decay=0.1, eps=1e-12)
    given = [(g["lr"], g["weight_decay"], g["eps"]) for g in groups]
    assert len({lr for lr, _, _ in given}) > 1
    optimizer = torch.optim.AdamW(groups)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 1, 11)
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=2,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=batches()[:20], optimizers=(optimizer, schedule))
    trainer.train()
    kept = [(g["lr"], g["weight_decay"], g["eps"]) for g in trainer.optimizer.param_groups]
    assert kept == [(pytest.approx(lr * 0.5), decay, eps) for lr, decay, eps in given]
