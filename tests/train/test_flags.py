"""`completep train` with flags: the paper's recipe, a folder named by the run, no flags next to a run.json."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from completep.cli import main
from completep.config import Data, run_from_json, to_json
from completep.errors import UserError
from completep.train.settings import make_run, open_corpus, with_data
from tests.train.runs import small_data, small_run

FLAGS = "--width 32 --depth 3 --head-size 8 --tokens 500 --batch 2 --sequence 16 --base-shape 16 2 --seed 3"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("data"))


@pytest.mark.slow
def test_flags_make_the_run_and_its_folder(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *FLAGS.split(), "--data", str(data), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "done"
    (folder,) = (tmp_path / "runs").iterdir()
    run = run_from_json((folder / "run.json").read_text())
    assert (run.model.width, run.model.depth, run.model.vocabulary, run.seed) == (32, 3, 256, 3)
    assert (run.schedule.steps, run.hyperparameters.eps, run.rules) == (15, 1e-16, "completep")
    assert main(["train", *FLAGS.split(), "--data", str(data), "--json"]) == 0  # the same command, the same folder
    assert [folder] == list((tmp_path / "runs").iterdir())
    assert main(["train", str(folder / "run.json"), "--out", str(folder)]) == 0
    assert "is done already" in capsys.readouterr().err


def test_the_run_of_a_file_or_of_a_shape_from_python(data, tmp_path):
    made = make_run(data=str(data), width=32, depth=3, head_size=8, tokens="1k", batch=4, sequence=16, seed=3)
    assert (made.model.width, made.model.depth, made.model.vocabulary, made.seed) == (32, 3, 256, 3)
    assert made.data == Data(str(data), "bytes")
    (tmp_path / "run.json").write_text(to_json(made))
    assert make_run(tmp_path / "run.json") == made
    assert make_run(tmp_path / "run.json", seed=4, data="python") == replace(made, seed=4, data=Data("python", "bytes"))
    with pytest.raises(UserError, match="lr beside"):
        make_run(tmp_path / "run.json", lr=0.1)


def test_a_run_on_other_data_forgets_the_hash_of_the_old(data):
    run = small_run(data)
    known = replace(run, data=replace(run.data, sha256="0" * 64))
    assert with_data(known) is known
    assert with_data(known, "python").data == Data("python", run.data.tokenizer)
    assert with_data(known, tokenizer="gpt2").data == Data(run.data.source, "gpt2")
    with pytest.raises(UserError, match="has changed"):  # with the old hash
        open_corpus(known.data)
    assert open_corpus(with_data(known, run.data.source).data).vocabulary == 256


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to train"),
        (["run.json", "--lr", "0.1"], "lr beside run.json"),
        (["run.json", "--base-shape", "64", "2"], "base beside run.json"),
        (["--width", "64"], "a shape has both"),
        (["--width", "64", "--depth", "2", "--rules", "mupp"], "mupp"),
    ],
)
def test_contradictions_are_errors(words, message, capsys):
    assert main(["train", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WORLD_SIZE", "x", "WORLD_SIZE is 'x', not a number"),
        ("RANK", "-1", "RANK is '-1', not a number"),
        ("RANK", "1", "RANK is 1, but there are 1 ranks"),
        ("LOCAL_RANK", "", "LOCAL_RANK is '', not a number"),
    ],
)
def test_variables_that_torchrun_did_not_set_are_named(name, value, message, data, tmp_path):
    command = [sys.executable, "-m", "completep", "train", *FLAGS.split(), "--data", str(data), "--out", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, name: value}, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert f"unset {name}" in done.stderr
