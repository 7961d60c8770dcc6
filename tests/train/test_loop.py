"""Training: the schedule, resuming bit for bit, stopping, diverging, and refusing a folder of another run."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from completep import UserError, parametrize
from completep.cli import main
from completep.compute import flops
from completep.config import Data, Evaluation, GPTConfig, Schedule, Shape, to_json
from completep.data.prepare import prepare
from completep.data.sampler import Sampler
from completep.model.gpt import GPT
from completep.rules.table import rules_named
from completep.sweep.store import parse_result
from completep.train import checkpoint, speed
from completep.train.distributed import World
from completep.train.export import load_exported
from completep.train.folder import write_result
from completep.train.loop import How, evaluation_loss, open_corpus, read_data, train
from completep.train.records import EvalRecord, Result, StepRecord, read_metrics
from completep.train.schedule import lr_factor
from tests.train.runs import EVERY_STEP, small_data, small_run

MODEL = GPTConfig(width=32, depth=3, vocabulary=256, head_size=8)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("corpus"))


def losses(folder):
    return [(r.kind, r.step, r.loss) for r in read_metrics(folder / "metrics.jsonl")]


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.fixture(scope="session")
def straight(data, tmp_path_factory):
    """One undisturbed run."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return folder, train(small_run(data), folder, EVERY_STEP)


def test_schedule_is_linear_up_and_down_to_zero():
    s = Schedule(steps=10, warmup=4)
    assert [lr_factor(t, s) for t in range(10)] == pytest.approx(
        [0.25, 0.5, 0.75, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    )
    assert lr_factor(0, Schedule(3, 0)) == 1


def test_a_run_leaves_a_folder(straight, data):
    folder, result = straight
    assert result.status == "done"
    assert result.step == 12
    assert result.validation_loss < 5.0
    assert json.loads((folder / "result.json").read_text())["validation_loss"] == result.validation_loss
    records = list(read_metrics(folder / "metrics.jsonl"))
    assert [r.step for r in records if isinstance(r, StepRecord)] == list(range(1, 13))
    assert isinstance(records[-1], EvalRecord)
    assert records[-1].loss == result.validation_loss
    assert json.loads((folder / "run.json").read_text())["data"]["sha256"] == result.data_sha256


def test_training_is_what_plain_torch_does(straight, data):
    """The loop against an independent one."""
    folder, _ = straight
    run = small_run(data)
    model = GPT(run.model)
    base = GPTConfig(width=16, depth=2, vocabulary=256, head_size=8)
    scaling = parametrize(model, base=lambda: GPT(base), rules=rules_named("completep")).init_(0.05, seed=0)
    optimizer = torch.optim.AdamW(scaling.param_groups(0.01, weight_decay=0.1, eps=1e-10), betas=(0.9, 0.95))
    first = [g["lr"] for g in optimizer.param_groups]
    sampler = Sampler(open_corpus(run.data), "train", 16, 4, 0)
    expected = []
    for step in range(12):
        for g, lr in zip(optimizer.param_groups, first, strict=True):
            g["lr"] = lr * ((step + 1) / 3 if step < 3 else (12 - step) / 9)
        batch = torch.from_numpy(sampler.batch_at(step))
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert [x for kind, _, x in losses(folder) if kind == "step"] == pytest.approx(expected, rel=1e-5)


def test_a_run_that_is_done_is_not_trained_again(straight, data):
    folder, result = straight
    messages = []
    assert train(small_run(data), folder, EVERY_STEP, tell=messages.append) == result
    assert "done already" in messages[0]


def test_exported_weights_are_plain_and_give_the_same_logits(straight, data):
    folder, result = straight
    model = load_exported(folder)
    assert model.get_multipliers() == (1.0, 1.0)
    run = small_run(data)
    _, validation = read_data(run, open_corpus(run.data), 1)
    loss = evaluation_loss(model, validation, World(0, 1, torch.device("cpu")), nullcontext)
    assert loss == pytest.approx(result.validation_loss, rel=1e-5)


# -- resuming ----------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.train.runs import EVERY_STEP, small_run
from completep.train.loop import train

def wait(record):
    print(record.step, flush=True)
    sys.stdin.readline()

train(small_run(Path(sys.argv[1])), Path(sys.argv[2]), EVERY_STEP, on_record=wait)
"""


@pytest.mark.slow
@pytest.mark.parametrize("last", [3, 7, 11])
def test_kill_nine_loses_nothing(last, straight, data, tmp_path):
    """A child that waits for us after every record is killed at a known step, and the run resumed here."""
    folder = tmp_path / "run"
    command = [sys.executable, "-c", CHILD, str(data), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        while int(child.stdout.readline()) < last:
            child.stdin.write("\n")
            child.stdin.flush()
        child.kill()
    assert not (folder / "result.json").exists()
    with (folder / "metrics.jsonl").open("a") as f:
        f.write('{"step": 99, "lo')  # an incomplete line
    train(small_run(data), folder, EVERY_STEP)
    assert losses(folder) == losses(straight[0])
    assert same(weights(folder), weights(straight[0]))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_resume(number, straight, data, tmp_path):
    (tmp_path / "run.json").write_text(to_json(small_run(data, schedule=Schedule(4000, 3))))
    command = [sys.executable, "-m", "completep", "train", "run.json", "--log-every", "1", "--peak", "1e11"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert any("step 3/" in line for line in process.stderr)  # waits for it, or for the end of the process
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "resume with: completep train run.json --out run" in out
    assert checkpoint.Checkpoints(tmp_path / "run" / "checkpoints", 2, print).all()
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncate", "flip", "missing", "manifest"])
def test_a_damaged_checkpoint_is_seen_and_the_one_before_it_used(damage, straight, data, tmp_path):
    folder = tmp_path / "run"
    train(small_run(data), folder, replace(EVERY_STEP, keep=9))
    for name in ("result.json", "model.safetensors", "model.json"):
        (folder / name).unlink()
    last = folder / "checkpoints" / "step-00000012"
    shard = next(last.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    if damage == "truncate":
        shard.write_bytes(content[:-100])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif damage == "missing":
        shard.unlink()
    else:
        (last / checkpoint.MANIFEST).write_text("{")
    messages = []
    train(small_run(data), folder, replace(EVERY_STEP, keep=9), tell=messages.append)
    assert messages[0].startswith("checkpoint step-00000012 is damaged (")
    assert messages[1] == "resumed at step 10"
    assert (folder / "checkpoints" / "damaged-step-00000012").is_dir()  # set aside, so that its step is saved again
    assert checkpoint.verified(last).step == 12
    assert losses(folder) == losses(straight[0])
    assert same(weights(folder), weights(straight[0]))


def test_only_the_last_checkpoints_are_kept(straight):
    assert [p.name for p in sorted((straight[0] / "checkpoints").iterdir())] == ["step-00000010", "step-00000012"]


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"rules": "mup"}, "rules is completep in the folder and mup in this run"),
        ({"base": Shape(16, 3)}, "base.depth is 2 in the folder and 3 in this run"),
        ({"model": replace(MODEL, depth=4)}, "model.depth is 3 in the folder and 4 in this run"),
        ({"seed": 1}, "seed is 0 in the folder and 1 in this run"),
    ],
)
def test_another_run_in_the_same_folder_is_refused(changes, difference, straight, data):
    with pytest.raises(UserError, match=difference):
        train(small_run(data, **changes), straight[0], EVERY_STEP)


def test_other_data_is_refused(straight, data, tmp_path):
    small_data(tmp_path)
    (tmp_path / "text" / "new.txt").write_text("something else entirely " * 20)
    changed = prepare([str(tmp_path / "text")], tmp_path / "more", validation=0.2, workers=1)
    known = open_corpus(small_run(data).data).sha256
    assert changed.sha256 != known
    with pytest.raises(UserError, match="has changed: sha256"):
        train(replace(small_run(data), data=Data(str(tmp_path / "more"), sha256=known)), tmp_path / "run", EVERY_STEP)


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_good_checkpoint(data, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    real = checkpoint.save

    def full(state, storage_writer, **more):
        if "00000010" in str(storage_writer.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(state, storage_writer=storage_writer, **more)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(UserError, match=r"No space left on device; the last good checkpoint is .*step-00000005"):
        train(small_run(data), folder, EVERY_STEP)
    monkeypatch.undo()
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-00000005"]  # nothing half-written
    messages = []
    assert train(small_run(data), folder, EVERY_STEP, tell=messages.append).status == "done"
    assert messages == ["resumed at step 5"]


def test_divergence_is_a_result(data, tmp_path):
    run = small_run(data, steps=60)
    wild = replace(run, hyperparameters=replace(run.hyperparameters, lr=1e18), schedule=Schedule(60, 0))
    result = train(wild, tmp_path / "run", EVERY_STEP)
    assert result.status == "diverged"
    assert 0 < result.step < 60
    assert result.train_loss is not None
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "diverged"


def test_a_run_whose_last_update_is_too_large_has_diverged(data, tmp_path):
    """No training loss follows that update. A result with a loss of NaN could not be read by a study."""
    huge = replace(small_run(data).hyperparameters, lr=1e30)
    run = small_run(data, schedule=Schedule(1, 0), hyperparameters=huge)
    result = train(run, tmp_path / "run", EVERY_STEP)
    assert (result.status, result.validation_loss) == ("diverged", None)
    assert math.isfinite(result.train_loss)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    text = (tmp_path / "run" / "result.json").read_text()
    assert parse_result(text, tmp_path)["status"] == "diverged"
    assert train(run, tmp_path / "run", EVERY_STEP) == result


def test_a_diverged_run_has_no_loss_that_is_not_a_number(data, tmp_path):
    """Here the validation after the first of two steps sees it first."""
    huge = replace(small_run(data).hyperparameters, lr=1e30)
    run = small_run(data, schedule=Schedule(2, 0), hyperparameters=huge, evaluation=Evaluation(1, 128))
    result = train(run, tmp_path / "run", EVERY_STEP)
    assert (result.status, result.validation_loss) == ("diverged", None)


# -- the same run, executed another way -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"micro_batch": 1}, {"micro_batch": 2}], ids=str)
def test_accumulation_is_rounding(how, straight, data, tmp_path):
    train(small_run(data), tmp_path / "run", replace(EVERY_STEP, **how))
    assert [x for *_, x in losses(tmp_path / "run")] == pytest.approx([x for *_, x in losses(straight[0])], rel=1e-5)


def test_styles_are_one_run(straight, data, tmp_path):
    train(small_run(data, style="folded"), tmp_path / "run", EVERY_STEP)
    assert [x for *_, x in losses(tmp_path / "run")] == pytest.approx([x for *_, x in losses(straight[0])], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("peak", "measured"), [("measure", 1), (None, 0), (2.0e9, 0)])
def test_utilisation_is_relative_to_the_peak(peak, measured, data, tmp_path, monkeypatch):
    """Measured, left out, or relative to a given number; each way says so in the records."""
    calls = []
    monkeypatch.setattr(speed, "measure_peak", lambda device: calls.append(device) or 1.0e9)
    run = small_run(data)
    train(run, tmp_path / "run", replace(EVERY_STEP, peak=peak))
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if isinstance(r, StepRecord)]
    per_token = flops.training_flops(run.model, run.sequence, 1)
    for record in records:
        used = record.tokens_per_second * per_token
        assert record.mfu == (None if peak is None else pytest.approx(used / (1.0e9 if measured else peak)))
    assert len(calls) == measured


def test_clipping_is_recorded(data, tmp_path):
    train(small_run(data, clip=0.5), tmp_path / "run", EVERY_STEP)
    norms = [r.grad_norm for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if isinstance(r, StepRecord)]
    assert all(n > 0 for n in norms)


def under_torchrun(ranks, data, folder, parallel, *more):
    path = folder.parent / "run.json"
    path.write_text(to_json(small_run(data, steps=20)))
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node={ranks}"
    options = f"--out {folder} --parallel {parallel} --log-every 1 --peak 1e11"
    command = [*launcher.split(), "-m", "completep", "train", str(path), *options.split(), *more]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return [x for *_, x in losses(folder)]


@pytest.fixture(scope="session")
def alone(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(small_run(data, steps=20), folder, EVERY_STEP)
    return [x for *_, x in losses(folder)]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "more"), [("ddp", ()), ("fsdp", ()), ("fsdp", ("--replicas", "2"))])
def test_two_ranks_are_one(parallel, more, alone, data, tmp_path):
    assert under_torchrun(2, data, tmp_path / "run", parallel, *more) == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_two_ranks_checkpoint_and_one_resumes(alone, data, tmp_path):
    folder = tmp_path / "run"
    under_torchrun(2, data, folder, "fsdp", "--checkpoint-every", "8", "--keep", "9")
    for name in ("result.json", "model.safetensors", "model.json"):
        (folder / name).unlink()
    for step in (16, 20):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")
    messages = []
    train(small_run(data, steps=20), folder, EVERY_STEP, tell=messages.append)
    assert messages == ["resumed at step 8"]
    assert [x for *_, x in losses(folder)] == pytest.approx(alone, rel=1e-5)


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "how", "message"),
    [
        ({"model": replace(MODEL, vocabulary=100)}, {}, "past the model's vocabulary of 100"),
        ({"sequence": 10**6}, {}, "1000000|sequence"),
        ({"data": Data("/nowhere")}, {}, "/nowhere"),
        ({}, {"micro_batch": 3}, "does not divide"),
        ({}, {"parallel": "ddp"}, "torchrun"),
        ({"rules": "magic"}, {}, "no rules named"),
    ],
)
def test_bad_input_is_an_error_before_the_first_step(changes, how, message, data, tmp_path):
    with pytest.raises(UserError, match=message):
        train(replace(small_run(data), **changes), tmp_path / "run", replace(EVERY_STEP, **how))


def test_an_unwritable_folder(data):
    with pytest.raises(UserError, match="cannot create the folder"):
        train(small_run(data), Path("/proc/nowhere/run"), EVERY_STEP)


@pytest.mark.slow
def test_a_run_that_was_interrupted_before_its_result_was_written(tmp_path):
    data = small_data(tmp_path / "d")
    whole = train(small_run(data), tmp_path / "whole", How(peak=1e11))
    again = tmp_path / "cut"
    train(small_run(data), again, How(peak=1e11))
    (again / "result.json").unlink()
    resumed = train(small_run(data), again, How(peak=1e11))
    assert resumed.train_loss is not None
    for name in ("train_loss", "validation_loss", "step"):
        assert getattr(resumed, name) == getattr(whole, name)
    assert losses(again) == losses(tmp_path / "whole")  # the last evaluation is recorded once


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_another_model_are_not_loaded(tmp_path, tied):
    """Only the second name of tied weights may be missing; other missing weights would stay random."""
    config = GPTConfig(width=16, depth=1, vocabulary=20, head_size=16, tied=tied)
    whole = {n: p.detach() for n, p in GPT(config).named_parameters()}  # a tied weight has one name here
    (tmp_path / "model.json").write_text(json.dumps(asdict(config)))
    write_result(tmp_path, Result("done", 1, 1.0, 1.0, 1, 1.0, 1.0, "x"))
    save_file(whole, tmp_path / "model.safetensors")
    torch.testing.assert_close(load_exported(tmp_path).embedding.weight.detach(), whole["embedding.weight"])
    save_file({"embedding.weight": whole["embedding.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="does not fit the model"):
        load_exported(tmp_path)


@pytest.mark.parametrize("base", [Shape(2**30, 2), Shape(64, 10**6)])
def test_a_base_that_nobody_tuned_at_is_refused_before_it_is_built(tmp_path, base):
    with pytest.raises(UserError, match=rf"the base is {base.width} × {base.depth} \(width × depth\), larger than"):
        train(replace(small_run(small_data(tmp_path)), base=base), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_very_deep_model_is_measured_on_a_reduced_copy(monkeypatch):
    """Freeing the graph of a very deep one overflows the native stack. The factors are the same."""
    shallow, deep = (GPTConfig(width=32, depth=depth, head_size=8, vocabulary=17) for depth in (2, 6))

    def factors():
        scaling = parametrize(GPT(deep), base=lambda: GPT(shallow), specimen=lambda: GPT(shallow))
        return scaling.multipliers, [
            (g["lr"], g["weight_decay"], g["eps"]) for g in scaling.param_groups(0.1, weight_decay=0.1, eps=1e-8)
        ]

    whole = factors()
    monkeypatch.setattr("completep.anatomy.forward.DEEPEST_CHECKED", 4)
    assert factors() == whole
    monkeypatch.setattr("completep.anatomy.forward.DEEPEST_CHECKED", 1)
    with pytest.raises(UserError, match="a model with 2 blocks is too deep to measure as a whole"):
        factors()


def test_a_run_with_a_name_of_megabytes_is_refused(tmp_path, capsys):
    content = json.loads(to_json(small_run(small_data(tmp_path))))
    content["data"]["source"] = "x" * 20_000_000
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert main(["train", str(tmp_path / "run.json"), "--out", str(tmp_path / "out")]) == 2
    said = " ".join(capsys.readouterr().err.split())  # lines are folded at the width of the terminal
    assert "20000000 characters" in said
    assert len(said) < 2000
