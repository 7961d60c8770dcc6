"""Damage and forgery: a run's folder never runs code, and nothing that has changed is used without a word."""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from completep.cli import main
from completep.config import sealed, to_json, unsealed
from completep.errors import UserError
from completep.files import sha256_of
from completep.train import checkpoint
from completep.train.checkpoint import verified
from completep.train.export import load_exported
from completep.train.folder import read_run, working_in
from completep.train.loop import How, train
from completep.train.records import read_metrics
from tests.hostile import PLANTED, plant, within
from tests.train.runs import EVERY_STEP, small_data, small_run

OURS = ("result.json", "model.safetensors", "model.json")
KILLS = int(os.environ.get("COMPLETEP_KILLS", "3"))
FLIPS = int(os.environ.get("COMPLETEP_FLIPS", "40"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """An undisturbed run, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(small_run(data), folder, replace(EVERY_STEP, keep=9))
    return folder


@pytest.fixture
def cut(whole, tmp_path):
    """The same run, as a kill before its result would leave it."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for name in OURS:
        (folder / name).unlink()
    return folder


def records(folder):
    return [(r.kind, r.step, r.loss) for r in read_metrics(folder / "metrics.jsonl")]


def resume(data, folder, how=EVERY_STEP):
    messages = []
    train(small_run(data), folder, how, tell=messages.append)
    return messages


def rewrite(path, change):
    """Forge a sealed file: change its content and seal it again, as somebody who can write the folder could."""
    content = unsealed(path.read_text())
    change(content)
    path.write_text(sealed(content))


# -- code ------------------------------------------------------------------------------------------------------


class Evil:
    def __init__(self, victim):
        self.victim = str(victim)

    def __reduce__(self):
        return os.system, (f"touch {self.victim}",)


@pytest.mark.slow
def test_a_pickle_in_a_checkpoint_is_never_loaded(cut, data, tmp_path, caplog):
    """The old format kept torch's pickled `.metadata` here. Its hash is right, and yet nothing happens."""
    ran = tmp_path / "ran"
    last = cut / "checkpoints" / "step-00000012"
    for name in (".metadata", "__0_0.distcp", "shard-00001-model-00001-of-00001.safetensors"):
        (last / name).write_bytes(pickle.dumps(Evil(ran)))
    files = {p.name: sha256_of(p) for p in last.iterdir() if p.name != checkpoint.MANIFEST}
    rewrite(last / checkpoint.MANIFEST, lambda manifest: manifest.update(files=files))
    assert verified(last).step == 12  # a perfect forgery
    with pytest.raises(UserError, match="does not fit this run") as caught:
        resume(data, cut)
    assert not [record for record in caplog.records if record.exc_info]  # torch would log a traceback
    assert not ran.exists()
    shutil.rmtree(last)  # what the error says to do
    assert str(last) in caught.value.fix
    assert resume(data, cut) == ["resumed at step 10"]
    pickle.loads(pickle.dumps(Evil(ran)))
    assert ran.exists()  # loading it would have done it


def test_a_checkpoint_of_an_older_version_is_not_opened(cut, data):
    last = cut / "checkpoints" / "step-00000012"
    (last / checkpoint.MANIFEST).write_text(json.dumps({"step": 12, "files": {}, "run": {}, "scaling": {}}))
    (last / ".metadata").write_bytes(pickle.dumps({}))
    assert resume(data, cut)[1] == "resumed at step 10"


def test_no_pickle_is_written(whole):
    for path in whole.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            path.read_bytes().decode()  # everything else is text


# -- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", ["step", "scaling", "not JSON", "deep", "list", "no digest", "extra", "link", "other", *PLANTED]
)
def test_a_damaged_manifest_means_the_checkpoint_before(damage, cut, whole, data):
    last = cut / "checkpoints" / "step-00000012"
    path = last / checkpoint.MANIFEST
    text = path.read_text()
    if damage == "step":
        path.write_text(text.replace('"step": 12', '"step": 13'))
    elif damage == "scaling":
        path.write_text(text.replace('"rules": "completep"', '"rules": "mup"'))
    elif damage == "extra":
        shutil.copy(next(last.glob("*.safetensors")), last / "zz.safetensors")
    elif damage == "link":
        shard = next(last.glob("*.safetensors"))
        shutil.move(shard, cut / "elsewhere")
        shard.symlink_to(cut / "elsewhere")
    elif damage == "other":
        shutil.copy(cut / "checkpoints" / "step-00000010" / checkpoint.MANIFEST, path)
    elif damage in PLANTED:
        plant(path, damage)
    else:
        content = {"not JSON": "{", "deep": "[" * 100_000, "list": "[1]"}
        path.write_text(content.get(damage) or text.replace('"digest"', '"digesu"'))
    with within():
        messages = resume(data, cut)
    assert messages[0].startswith("checkpoint step-00000012 is damaged")
    assert messages[1:] == ["resumed at step 10"]
    assert records(cut) == records(whole)
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_checkpoint_of_another_run_is_refused(cut, data):
    """Forged, or copied from another folder: same shapes, another seed."""
    rewrite(cut / "checkpoints" / "step-00000012" / checkpoint.MANIFEST, lambda m: m.update(run="0" * 12))
    with pytest.raises(UserError, match="belongs to another run"):
        resume(data, cut)


def test_a_step_that_the_run_does_not_have_is_refused(cut, data):
    """Forged: a run of 12 steps would be done at step 99."""
    late = cut / "checkpoints" / "step-00000099"
    shutil.copytree(cut / "checkpoints" / "step-00000012", late)
    rewrite(late / checkpoint.MANIFEST, lambda m: m.update(step=99))
    with pytest.raises(UserError, match="checkpoint at step 99 belongs to another run"):
        resume(data, cut)
    shutil.move(late, cut / "late")  # what the error says to do
    assert resume(data, cut) == ["resumed at step 12"]


def test_checkpoints_past_eight_digits_are_in_order(tmp_path):
    names = ["step-00000005", "step-99999999", "step-100000000", "step-2000000000"]
    for name in [*names, "step-0000000001", "step-000000٠٣"]:
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint.Checkpoints(tmp_path, 2, print).all()] == names


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_in_the_way_of_a_checkpoint_is_named(kind, cut, data):
    """It is not one of ours, and the run must not go on without checkpoints."""
    taken = cut / "checkpoints" / "step-00000012"
    shutil.rmtree(taken)
    if kind == "file":
        taken.write_text("mine")
    else:
        taken.symlink_to(cut / "checkpoints" / "step-00000005")
    with pytest.raises(UserError, match="step-00000012 is in the way") as caught:
        resume(data, cut)
    assert f"move {taken} away" in caught.value.fix
    os.rename(taken, cut / "mine")
    assert resume(data, cut) == ["resumed at step 10"]
    assert verified(taken).step == 12


def test_only_exactly_our_names_are_checkpoints(cut, data):
    folder = cut / "checkpoints"
    foreign = ["best-step-00000020", "zz-step-00000010", "step-00000010-mine", "step-1", "notes", "step-0000000٣"]
    for name in foreign:
        shutil.copytree(folder / "step-00000005", folder / name)
    (folder / "step-00000099").symlink_to(folder / "step-00000005")
    messages = resume(data, cut, replace(EVERY_STEP, keep=1))
    assert messages == ["resumed at step 12"]
    assert {p.name for p in folder.iterdir()} >= {*foreign, "step-00000099"}


@pytest.mark.slow
def test_a_linked_folder_of_checkpoints_is_refused(cut, data, tmp_path):
    """Damaged, half written and old checkpoints are renamed and removed, which must not reach another folder."""
    victim = Path(shutil.move(cut / "checkpoints", tmp_path / "victim"))
    (victim / "step-00000012" / checkpoint.MANIFEST).write_text("{")
    (victim / ".step-00000099.part").mkdir()
    (cut / "checkpoints").symlink_to(victim)
    before = sorted(victim.rglob("*"))
    with pytest.raises(UserError, match="checkpoints is a symbolic link"):
        resume(data, cut)
    assert sorted(victim.rglob("*")) == before


@pytest.mark.slow
def test_a_damaged_checkpoint_does_not_cost_the_new_ones(cut, data):
    """With one kept, a damaged last one must not make every new one the oldest."""
    folder = cut / "checkpoints"
    shutil.rmtree(folder / "step-00000005")
    shutil.rmtree(folder / "step-00000010")
    (folder / "step-00000012" / checkpoint.MANIFEST).write_text("{")

    def die(record):
        if record.step == 7:
            raise KeyboardInterrupt

    messages = []
    with pytest.raises(KeyboardInterrupt):
        train(small_run(data), cut, replace(EVERY_STEP, keep=1), on_record=die, tell=messages.append)
    assert messages[-1] == "no undamaged checkpoint is left; starting from the first step"
    assert resume(data, cut, replace(EVERY_STEP, keep=1)) == ["resumed at step 5"]
    assert sorted(p.name for p in folder.iterdir()) == ["damaged-step-00000012", "step-00000012"]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_no_checkpoint_is_refused(keep):
    with pytest.raises(UserError, match=f"keep={keep}: must be a whole number of at least 1"):
        How(keep=keep)


def test_what_a_kill_left_half_written_is_removed(cut, data):
    for name in (".step-00000010.part", ".step-00000005.old"):
        (cut / "checkpoints" / name).mkdir()
    foreign = {".mine.part", ".step-0000000٣.part"}
    for name in foreign:
        (cut / "checkpoints" / name).mkdir()
    resume(data, cut)
    assert {p.name for p in (cut / "checkpoints").glob(".*")} == foreign


def test_a_pipe_or_a_dead_link_beside_the_checkpoints_does_not_stop_the_run(cut, data):
    shutil.rmtree(cut / "checkpoints" / "step-00000012")
    os.mkfifo(cut / "checkpoints" / "pipe")
    (cut / "checkpoints" / "dead").symlink_to("nowhere")
    with within():
        assert resume(data, cut) == ["resumed at step 10"]
    assert verified(cut / "checkpoints" / "step-00000012").step == 12


# -- one process at a time -------------------------------------------------------------------------------------


def test_two_processes_do_not_train_in_one_folder(cut, data):
    with working_in(cut), pytest.raises(UserError, match="another process is training in"):
        resume(data, cut)
    assert resume(data, cut) == ["resumed at step 12"]


def test_a_finished_run_needs_no_lock(whole, data):
    with working_in(whole):
        assert "done already" in resume(data, whole)[0]


# -- results and weights ---------------------------------------------------------------------------------------


@pytest.fixture
def done(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


def flip(path, place=None, bit=0):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "metrics.jsonl", "result.json", "run.json"])
def test_a_finished_run_notices_damage(name, done, data):
    assert "done already" in resume(data, done)[0]
    flip(done / name)
    with pytest.raises(UserError) as caught:
        resume(data, done)
    assert name in caught.value.what
    if name in ("model.safetensors", "metrics.jsonl", "result.json"):
        (done / "result.json").unlink()  # what the error says to do
        resume(data, done)
        load_exported(done)


@pytest.mark.parametrize("name", ["model.safetensors", "model.json"])
def test_damaged_weights_are_not_loaded(name, done):
    load_exported(done)
    flip(done / name, -2)
    with pytest.raises(UserError, match=f"{name} is damaged"):
        load_exported(done)


@pytest.mark.parametrize("content", [b"", b"\0" * 200, b"\xff" * 8 + b"{}", "shapes"])
def test_forged_weights_are_refused(content, done):
    path = done / "model.safetensors"
    if content == "shapes":
        save_file({n: torch.zeros(max(1, t.numel() // 2 * 2)) for n, t in load_file(path).items()}, path)
    else:
        path.write_bytes(content)
    rewrite(done / "result.json", lambda r: r["files"].update({path.name: sha256_of(path)}))
    with pytest.raises(UserError, match="does not fit the model"):
        load_exported(done)


@pytest.mark.parametrize("text", ["[]", "{}", "[" * 100_000, '{"width": 1e300}', '{"depth": 1' + "0" * 5000 + "}"])
def test_a_forged_model_config_is_refused(text, done):
    (done / "model.json").write_text(text)
    rewrite(done / "result.json", lambda r: r["files"].update({"model.json": sha256_of(done / "model.json")}))
    with pytest.raises(UserError):
        load_exported(done)


def test_a_huge_model_is_refused_before_it_is_built(done):
    config = json.loads((done / "model.json").read_text()) | {"depth": 10**9}
    (done / "model.json").write_text(json.dumps(config))
    rewrite(done / "result.json", lambda r: r["files"].update({"model.json": sha256_of(done / "model.json")}))
    with pytest.raises(UserError, match="does not fit the model"):
        load_exported(done)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "[" * 100_000, '{"status": "done"}'])
def test_a_damaged_result_is_an_error(text, done, data):
    (done / "result.json").write_text(text)
    with pytest.raises(UserError, match=r"result\.json"):
        resume(data, done)


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("name", ["result.json", "run.json", "model.json", "model.safetensors"])
def test_what_is_no_file_is_refused_at_once(name, kind, done, data):
    plant(done / name, kind)
    with within(), pytest.raises(UserError, match=name):
        resume(data, done)
    if name != "run.json":
        with within(), pytest.raises(UserError, match=name):
            load_exported(done)


def test_without_its_run_a_folder_is_not_done(done, data):
    (done / "run.json").unlink()
    with pytest.raises(UserError, match=r"but no run\.json"):
        resume(data, done)


def test_an_edited_run_is_not_done(done, data):
    path = done / "run.json"
    rewrite(path, lambda run: run.update(seed=7))
    run = read_run(path)
    with pytest.raises(UserError, match="belongs to another run"):
        train(run, done, EVERY_STEP)


def test_identical_runs_have_identical_weights(whole, data, tmp_path):
    """Several keys of metadata would be written in any order."""
    train(small_run(data), tmp_path / "again", EVERY_STEP)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_damaged_metrics_are_told(cut, data):
    text = (cut / "metrics.jsonl").read_text()
    (cut / "metrics.jsonl").write_text(text.replace('"step": 3,', '"step": 2,'))
    assert "metrics.jsonl is damaged" in resume(data, cut)[0]


# -- where the data is -----------------------------------------------------------------------------------------


def test_a_run_names_its_data_relative_to_itself(tmp_path):
    home = tmp_path / "home"
    train(small_run(small_data(home)), home / "runs" / "a", EVERY_STEP)
    assert str(home) not in "".join(p.read_text() for p in home.glob("runs/a/**/*.json"))
    shutil.move(home, tmp_path / "moved")
    folder = tmp_path / "moved" / "runs" / "a"
    assert main(["train", str(folder / "run.json"), "--out", str(folder)]) == 0


def test_an_own_run_file_may_name_data_from_here(data, tmp_path, monkeypatch):
    monkeypatch.chdir(data.parent)
    (tmp_path / "run.json").write_text(to_json(small_run(Path("data"))))
    assert read_run(tmp_path / "run.json").data.source == "data"


# -- flags and places ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--log-every 0", "log_every=0"), ("--micro-batch -1", "micro_batch=-1"), ("--keep 0", "keep=0"),
        ("--keep -1", "keep=-1"), ("--checkpoint-every -5", "checkpoint_every=-5"), ("--replicas 0", "replicas=0"),
        ("--out {}/file", "file is a file"), ("--out {}/file/deeper", "deeper"), ("--out /proc/no", "/proc/no"),
    ],
)  # fmt: skip
def test_bad_flags_are_errors(words, message, data, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "run.json").write_text(to_json(small_run(data)))
    out = [] if "--out" in words else ["--out", str(tmp_path / "out")]
    assert main(["train", str(tmp_path / "run.json"), *out, *words.format(tmp_path).split()]) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == ""


def test_a_link_beside_a_run_file_is_followed_only_if_it_is_named(data, tmp_path, capsys):
    (tmp_path / "victim").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "victim")
    (tmp_path / "run.json").write_text(to_json(small_run(data)))
    words = ["train", str(tmp_path / "run.json"), "--peak", "1e11"]
    assert main(words) == 2
    assert f"give --out {tmp_path / 'run'}" in capsys.readouterr().err
    assert not any((tmp_path / "victim").iterdir())
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "victim" / "result.json").exists()


def test_empty_tokens_are_refused(data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        main(["train", "--width", "32", "--depth", "2", "--head-size", "16", "--tokens", "", "--data", str(data)]) == 2
    )
    assert "tokens=''" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["[]", "3", "null", '"run"', "[" * 100_000, '{"seed": 1' + "0" * 5000 + "}", '{"model": []}', "\0"]
)
def test_a_run_that_is_no_run(text, tmp_path, capsys):
    (tmp_path / "run.json").write_text(text)
    assert main(["train", str(tmp_path / "run.json")]) == 2
    assert "run.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"width": 16 * 10**7}}, {"model": {"depth": 10**9}}, {"model": {"vocabulary": 2**40}},
        {"batch": 2**31 - 1}, {"seed": 10**30}, {"schedule": {"steps": 10**4000, "warmup": 0}},
        {"evaluation": {"every": -1}}, {"clip": 1e400}, {"hyperparameters": {"lr": 10**400, "std": 0.1}},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_huge_numbers_are_errors(changes, data, tmp_path, capsys):
    content = json.loads(to_json(small_run(data)))
    for name, value in changes.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) else value
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert main(["train", str(tmp_path / "run.json"), "--out", str(tmp_path / "out")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_folder_with_a_name_that_is_not_utf8(data, tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff"))
    with pytest.raises(UserError, match="is not UTF-8"):  # safetensors could not read what it holds
        resume(data, folder)


# -- kills and flips -------------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.train.runs import EVERY_STEP, small_run
from completep.train.loop import train

def told(record):
    print(record.step, flush=True)

train(small_run(Path(sys.argv[1]), steps=60), Path(sys.argv[2]), EVERY_STEP, on_record=told)
"""


@pytest.mark.slow
def test_killed_again_and_again(data, tmp_path):
    """kill -9 at random moments (COMPLETEP_KILLS of them): weights and records equal those of an undisturbed run."""
    dice = random.Random(15)
    command = [sys.executable, "-c", CHILD, str(data), str(tmp_path / "run")]
    reached = 0
    for _ in range(KILLS):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            target = min(55, reached // 5 * 5 + 1 + dice.randrange(6))
            for line in child.stdout:
                reached = int(line)
                if reached >= target:
                    break
            for _ in range(dice.randrange(2000)):  # a moment within a step, not at its end
                pass
            child.kill()
    assert not (tmp_path / "run" / "result.json").exists()
    for folder in ("run", "straight"):
        train(small_run(data, steps=60), tmp_path / folder, EVERY_STEP)
    assert records(tmp_path / "run") == records(tmp_path / "straight")
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("run", "straight")]
    assert weights[0] == weights[1]


def same_outcome(folder, whole):
    return records(folder) == records(whole) and all(
        (folder / name).read_bytes() == (whole / name).read_bytes() for name in ("model.safetensors", "model.json")
    )


@pytest.mark.slow
def test_flipped_bits_are_never_used_in_silence(whole, data, tmp_path):
    """Bits (COMPLETEP_FLIPS of them) over all files of a folder, finished or resumable: refused, told, or harmless.

    Harmless means that the run ends with the same weights and records, bit for bit.
    """
    dice = random.Random(15)
    outcomes = {"refused": 0, "told": 0, "harmless": 0}
    for trial in range(FLIPS):
        folder = tmp_path / f"run-{trial}"
        shutil.copytree(whole, folder)
        if trial % 2:
            for name in OURS:
                (folder / name).unlink()
        files = sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size)
        path = dice.choice(files)
        flip(path, dice.randrange(path.stat().st_size), dice.randrange(8))
        messages = []
        try:
            train(read_run(folder / "run.json"), folder, EVERY_STEP, tell=messages.append)
            load_exported(folder)
        except UserError:
            outcomes["refused"] += 1
        else:
            if any("damaged" in message for message in messages):
                outcomes["told"] += 1
            else:
                assert same_outcome(folder, whole), (trial, path)
                outcomes["harmless"] += 1
        shutil.rmtree(folder)
    assert sum(outcomes.values()) == FLIPS
    assert min(outcomes["refused"], outcomes["told"]) > 0, outcomes


def test_the_flip_test_can_fail(done, whole, data, monkeypatch):
    """Without the hashes a flipped weight would pass."""
    monkeypatch.setattr("completep.train.export.check_files", lambda *_: None)
    monkeypatch.setattr("completep.train.folder.check_files", lambda *_: None)
    flip(done / "model.safetensors", -3)
    resume(data, done)
    load_exported(done)
    assert not same_outcome(done, whole)


@pytest.mark.parametrize("flag", ["--out", "--data", "--tokenizer"])
@pytest.mark.parametrize("joined", [False, True])
def test_an_empty_flag_does_not_count_as_not_given(flag, joined, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [f"{flag}="] if joined else [flag, ""]
    assert main(["train", "--width", "32", "--depth", "2", "--head-size", "8", "--tokens", "1000", *given]) == 2
    assert f"{flag}='' is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -5),
        ("seconds", -1.0),
        ("train_loss", float("inf")),
        ("tokens", 10**400),
        ("validation_loss", -3.0),
        ("status", "stopped"),
    ],
)
def test_a_forged_result_is_not_shown(name, value, done, data, capsys):
    content = {**unsealed((done / "result.json").read_text()), name: value}
    (done / "result.json").write_text(sealed(content))
    with pytest.raises(UserError, match=f"is damaged: its {name} is"):
        train(small_run(data), done, EVERY_STEP)


def test_weights_that_are_not_finite_are_refused(done):
    weights = load_file(done / "model.safetensors")
    weights["final_norm.weight"][0] = float("nan")
    save_file(weights, done / "model.safetensors", metadata={"format": "pt"})
    content = unsealed((done / "result.json").read_text())
    content["files"]["model.safetensors"] = sha256_of(done / "model.safetensors")
    (done / "result.json").write_text(sealed(content))
    with pytest.raises(UserError, match=r"weights that are not finite: final_norm\.weight"):
        load_exported(done)


def test_a_damaged_last_record_is_not_replaced_by_that_of_another_step(data, tmp_path, whole):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for name in OURS:
        (folder / name).unlink()
    curve = folder / "metrics.jsonl"
    *before, last = [line for line in curve.read_text().splitlines() if '"step"' in line.partition("kind")[2]]
    curve.write_text("\n".join([*before, last[:20]]) + "\n")
    assert train(small_run(data), folder, EVERY_STEP).train_loss is None


def test_a_dead_link_to_a_result_is_refused_before_the_run_starts(data, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="is a link to a file that does not exist"):
        train(small_run(data), tmp_path / "run", EVERY_STEP)
    assert not (tmp_path / "run" / "run.json").exists()


def test_an_empty_run_file_in_a_folder_is_to_be_restored(done, data):
    (done / "run.json").write_text("")
    with pytest.raises(UserError) as caught:
        train(small_run(data), done, EVERY_STEP)
    assert caught.value.fix == f"restore {done / 'run.json'}, or remove the folder {done}"
