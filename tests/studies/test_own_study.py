"""CONTRIBUTING's recipe for a study: one file, and it is listed, run, judged, drawn and reported."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from completep import study
from completep.cli import main
from completep.errors import UserError
from completep.studies.design import LISTED, listed
from completep.studies.run import place_of, rerun_words, study_named
from tests.studies import own_study

FILE = Path(__file__).parent / "own_study.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own():
    """The study is known here, and nowhere else."""
    yield listed(own_study.STUDY)
    del LISTED[own_study.STUDY.name]


@pytest.mark.slow
def test_it_is_listed_run_judged_drawn_and_reported(tmp_path, capsys):
    assert main(["study"]) == 0
    assert "own-steps" in capsys.readouterr().out
    assert main(["study", "own-steps", "--out", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["agreement"] == "agrees"
    names = {Path(f).name for f in answer["files"]}
    assert {"report.html", "report.md", "own-steps.svg", "outcome.csv", "runs.csv"} <= names
    assert "Do more steps lower the loss?" in Path(answer["files"][0]).read_text()
    assert main(["report", "own-steps", "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["table"] == answer["table"]


@pytest.mark.slow
def test_from_python(tmp_path):
    result = study("own-steps", values={"steps": [2, 10]}, out=tmp_path, workers=1)
    assert result.verdict == "agrees"
    assert result.table["steps"].to_list() == [2, 10]
    assert result.failed == 0
    assert str(result).startswith("Agrees with the paper. Here: the loss ends at")
    beyond = replace(result.experiment, study=replace(own_study.STUDY, beyond_paper=True))
    assert str(replace(result, experiment=beyond)).startswith("Agrees with the claim. Here: the loss ends at")
    assert "<svg" in result._repr_html_()
    assert result.to_json()["study"] == "own-steps"
    again = study(own_study.STUDY, values={"steps": [2, 10]}, out=str(tmp_path))
    assert again.conducted.present == 4  # nothing is done twice
    assert again.to_json() == result.to_json()
    assert repr(result) == "<StudyResult: agrees>"
    one = study("own-steps", values={"steps": [2, 10], "seed": [0]}, out=tmp_path)
    assert (one.verdict, one.conducted.present) == ("one seed cannot tell", 2)
    assert str(one).startswith("One seed cannot tell. Here: the loss ends at")
    assert pickle.loads(pickle.dumps(result)).to_json() == result.to_json()
    for wrong in ({"search": "nope"}, {"engine": "nope"}, {"scale": "nope"}):
        with pytest.raises(UserError, match="'nope'"):
            study("own-steps", out=tmp_path, **wrong)


@pytest.mark.slow
def test_a_file_of_ones_own_without_touching_the_package(tmp_path):
    words = ["study", f"{FILE}:STUDY", "--set", "steps=2,6", "--out", str(tmp_path), "--json"]
    command = [sys.executable, "-m", "completep", *words]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["study"] == "own-steps"


@pytest.mark.slow
def test_a_plain_script_needs_no_main_guard(tmp_path):
    """Workers do not import the script, which would start the study again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import completep as cp\nfrom tests.studies.own_study import STUDY\n"
        f"print(cp.study(STUDY, values={{'steps': [2, 10]}}, out={str(tmp_path / 'runs')!r}).verdict)\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=ROOT, check=False,
                         env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["agrees"]


def test_what_is_no_study_is_an_error(capsys):
    assert main(["study", f"{FILE}:run"]) == 2
    assert "is a function, not a study" in capsys.readouterr().err.replace("\n", " ")


def test_the_command_of_an_own_study_names_its_file(own):
    """Another process does not know its name."""
    assert place_of(own, own) == place_of(own.name, own) == f"{FILE}:STUDY"
    assert place_of("mine.py:STUDY", own) == "mine.py:STUDY"
    made_here = replace(own, claim="It depends.")
    assert place_of(made_here, made_here) is None
    papers = study_named("lr-transfer")
    assert place_of("lr-transfer", papers) == place_of(papers, papers) == "lr-transfer"
    assert rerun_words(None, "laptop", {}, "grid", None, None, "runs") == ()
    assert rerun_words("a.py:B", "laptop", {}, "grid", None, None, "runs") == ("study", "a.py:B", "--scale", "laptop")


def test_a_study_knows_its_file_also_if_its_run_is_a_partial():
    own = replace(own_study.STUDY, run=partial(partial(own_study.run)))
    assert Path(own.home) == FILE
