"""`completep study`, end to end on real (tiny) runs, and what it says to what cannot be."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from completep.cli import main

FEW = ["--set", "depth=2", "lr=2^-7,2^-6,2^-5", "seed=0", "rules=completep"]


def told(capsys, *words):
    code = main([str(w) for w in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A store with three real runs in it."""
    folder = tmp_path_factory.mktemp("studies")
    assert main(["study", "lr-transfer", *FEW, "--out", str(folder)]) == 0
    return folder


def test_a_study_leaves_a_report_and_is_not_run_twice(out, capsys):
    code, said, progress = told(capsys, "study", "lr-transfer", *FEW, "--out", out, "--json")
    assert code == 0
    assert "3 of 3 runs were there already" in progress
    answer = json.loads(said)
    assert answer["agreement"] == "cannot be seen at this scale"  # one seed, one shape
    assert answer["table"][0]["depth"] == 2
    names = {Path(f).name for f in answer["files"]}
    assert {"report.html", "lr-transfer.svg", "lr-transfer.png", "lr-transfer.pdf", "runs.csv", "outcome.csv"} <= names
    page = Path(answer["files"][0]).read_text()
    assert "completep study lr-transfer --scale laptop --set depth=2" in page
    code, said, _ = told(capsys, "report", "lr-transfer", *FEW, "--out", out, "--json")
    assert json.loads(said)["table"] == answer["table"]


def test_runs_that_two_studies_share_are_there_for_both(out, capsys):
    code, said, _ = told(capsys, "study", "status", "--out", out, "--json")
    assert code == 0
    done = {row["study"]: row["done"] for row in json.loads(said)}
    assert done["lr-transfer"] == 3
    assert done["dynamics"] == 1  # η = 2^-6 at depth 2
    assert done["init-transfer"] == 1
    assert done["shape"] == 0


def test_curves_of_dynamics_come_from_what_is_there(out, capsys):
    words = ["--set", "depth=2", "lr=2^-6", "seed=0", "rules=completep", "--out", out]
    _, said, _ = told(capsys, "study", "dynamics", "--dry-run", "--json", *words)
    assert [r["status"] for r in json.loads(said)["runs"]] == ["done"]


def test_dry_run_says_runs_flops_and_time(tmp_path, capsys):
    code, said, _ = told(capsys, "study", "lr-transfer", "--dry-run", "--json", "--out", tmp_path)
    plan = json.loads(said)
    assert code == 0
    assert plan["points"] == 3 * 3 * 7 * 3
    assert len(plan["runs"]) == 147  # the base's runs are shared
    assert plan["flops"] == pytest.approx(sum(r["flops"] for r in plan["runs"]))
    assert plan["seconds_left"] == pytest.approx(plan["flops_left"] / plan["flops_per_second"] / plan["workers"])
    code, said, _ = told(capsys, "study", "shape", "--scale", "paper", "--dry-run", "--out", tmp_path)
    assert "9.37e+21 FLOPs" in said  # 25 shapes, three parameterizations, shared where they are one
    assert not any(tmp_path.glob("store/*/run.json"))


def test_the_list_names_every_study(capsys):
    code, said, _ = told(capsys, "study")
    assert code == 0
    assert "lr-transfer-compute-optimal" in said
    assert "lr-wd-grid" in said


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (("study", "lr-tranfer"), "no study named 'lr-tranfer'", "did you mean lr-transfer?"),
        (("study", "shape", "--set", "shap=1"), "no axis 'shap'", "did you mean shape?"),
        (("study", "lr-transfer", "--scale", "paper"), "needs the paper's amount of text", "--data FOLDER"),
        (("study", "shape", "--search", "bracket"), "no curve with a minimum", "leave out --search"),
        (("study", "lr-transfer", "--workers", "0"), "--workers 0", "leave out --workers"),
        (("study", "lr-transfer", "--micro-batch", "0"), "--micro-batch 0", "leave out --micro-batch"),
        (("study", "tau", "--set", "tau=0"), "tau=0", "positive"),
        (("study", "lr-transfer-compute-optimal", "--set", "lr=0"), "lr=0", "positive"),
        (("study", "lr-transfer", "--address", "x:1"), "--address x:1 is for Ray", "--engine ray"),
        (("study", "lr-transfer", "--data", "/nowhere"), "/nowhere", ""),
        (("study", "lr-transfer", "--set", "depth=-1"), "depth=-1", ""),
        (("report", "laziness"), "keeps no runs", "completep study laziness"),
        (("report", "lr-transfer"), "no run of this study is done yet", "run the study"),
    ],
)
def test_what_cannot_be_is_told(words, what, fix, tmp_path, capsys):
    code, _, said = told(capsys, *words, "--out", tmp_path)
    assert code == 2
    assert what in said.replace("\n", " ")
    assert fix in said.replace("\n", " ")
    assert "Traceback" not in said


def test_a_store_of_another_version_or_of_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text('{"format": 99}')
    code, _, said = told(capsys, "study", "lr-transfer", *FEW, "--out", tmp_path)
    assert code == 2
    assert "format 99, by another version" in said
    (tmp_path / "store" / "store.json").unlink()
    (tmp_path / "store" / "thesis.tex").write_text("precious")
    code, _, said = told(capsys, "study", "lr-transfer", *FEW, "--out", tmp_path)
    assert code == 2
    assert "no run store, and not empty" in said


def test_a_half_written_result_is_told(out, capsys):
    path = next(out.glob("store/*/result.json"))
    whole = path.read_text()
    path.write_text(whole[:20])
    try:
        code, _, said = told(capsys, "report", "lr-transfer", *FEW, "--out", out)
    finally:
        path.write_text(whole)
    assert code == 2
    assert "is not a whole result" in said
    assert "remove the folder" in said


def start(*words, **options):
    command = [sys.executable, "-m", "completep", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("most", [20_000, 400_000])
def test_a_full_disk_is_told_and_with_space_the_same_command_goes_on(tmp_path, most):
    """Files may not grow past so much, as on a full disk: the log of a run that fails, or its weights."""
    words = ("study", "lr-transfer", "--set", "depth=2", "lr=2^-6", "seed=0", "rules=completep", "--out", tmp_path)
    full = start(*words, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)))
    said = full.communicate(timeout=120)[1].replace("\n", " ")
    assert full.returncode == 2
    assert "all 1 runs failed" in said
    assert "space" in said
    again = start(*words, "--json")
    out, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert len(list(tmp_path.glob("store/*/result.json"))) == 1
    assert len(list(tmp_path.glob("store/*/model.safetensors"))) == 1
    assert json.loads(out)["table"][0]["depth"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "kill"])
def test_a_stop_saves_and_the_same_command_goes_on(tmp_path, number):
    words = (
        "study",
        "lr-transfer",
        "--set",
        "depth=4",
        "lr=2^-7,2^-6,2^-5",
        "seed=0",
        "rules=completep",
        "--out",
        tmp_path,
    )
    study = start(*words)
    deadline = time.time() + 60
    while not list(tmp_path.glob("store/*/metrics.jsonl")) and time.time() < deadline:
        time.sleep(0.2)
    study.send_signal(number)
    _, said = study.communicate(timeout=60)
    assert study.returncode == 130
    assert "the same command goes on" in said
    assert "Traceback" not in said
    left = list(tmp_path.glob("store/*/checkpoints/*"))
    assert left  # what was begun was saved
    again = start(*words, "--json")
    out, said = again.communicate(timeout=180)
    assert again.returncode == 0, said
    assert len(list(tmp_path.glob("store/*/result.json"))) == 3
    assert os.path.exists(json.loads(out)["files"][0])


def test_nothing_is_concluded_from_half_a_study(out, capsys):
    words = ["--set", "depth=2", "lr=2^-7,2^-6,2^-5", "seed=0,1,2", "rules=completep", "--out", str(out), "--json"]
    assert told(capsys, "report", "lr-transfer", *words)[0] == 0
    _, said, _ = told(capsys, "report", "lr-transfer", *words)
    answer = json.loads(said)
    assert answer["agreement"] == "cannot be seen at this scale"
    assert answer["sentence"].startswith("6 of 9 runs are not done. So far:")


def test_brackets_in_a_failed_runs_words_are_only_brackets(tmp_path, capsys):
    from completep.cli.board import make_board
    from completep.study.engine import Event
    from completep.study.named import study_named
    from completep.study.scale import LAPTOP
    from completep.study.store import Store

    study = study_named("lr-transfer", LAPTOP)
    runs = study.runs()[:1]
    board = make_board(study, Store(tmp_path), runs, searching=False)
    board.on_event(Event("failed", runs[0][1], "[rank0]: cannot open [/home/u/x] [/]"))
    assert "[rank0]: cannot open [/home/u/x] [/]" in capsys.readouterr().err.replace("\n", "")
