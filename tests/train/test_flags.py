"""`completep train` with flags: the paper's recipe, a folder named by the run, no flags next to a run.json."""

import json

import pytest

from completep.cli import main
from completep.config import run_from_json
from tests.train.runs import small_data

FLAGS = "--width 32 --depth 3 --head-size 8 --tokens 500 --batch 2 --sequence 16 --base-shape 16 2 --seed 3"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("data"))


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to train"),
        (["run.json", "--lr", "0.1"], "--lr beside run.json"),
        (["run.json", "--base-shape", "64", "2"], "--base-shape beside run.json"),
        (["--width", "64"], "a shape has both"),
        (["--width", "64", "--depth", "2", "--rules", "mupp"], "mupp"),
    ],
)
def test_contradictions_are_errors(words, message, capsys):
    assert main(["train", *words]) == 2
    assert message in capsys.readouterr().err
