"""`completep study`, end to end on real (tiny) runs, and its errors."""

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from completep.cli import main
from completep.report.document import Table
from completep.report.terminal import as_text
from completep.studies.design import read_words
from completep.studies.run import settled, study_at, study_named, study_plan, study_report
from completep.studies.scale import LAPTOP, SCALES
from completep.sweep.store import Store
from tests.waiting import wait_until
from tests.walks import calls_of, departures, left_out_of, steps

pytestmark = pytest.mark.slow
TUNED = ("base_lr=2^-6", "base_std=0.1")  # given, so that nothing is tuned at the base first
FEW = ["--set", "depth=2", "lr=2^-7,2^-6,2^-5", "seed=0", "rules=completep", *TUNED]


def store(folder):
    return Store(folder / "store")


def run(capsys, *words):
    code = main([str(w) for w in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """(a store with three real runs in it, what the command called on the way)."""
    folder = tmp_path_factory.mktemp("studies")

    def run_it():
        assert main(["study", "lr-transfer", "--search", "bracket", *FEW, "--out", str(folder)]) == 0

    return folder, calls_of(run_it)


@pytest.fixture(scope="module")
def out(walked):
    return walked[0]


def test_the_walk_in_contributing_is_what_happens(walked):
    """But for a constant, and for training, which happens in another process."""
    elsewhere = ("STUDY", "train")
    heading = "From `completep study lr-transfer --search bracket` to its page"
    walk = [step for step in steps(heading) if step[1] not in elsewhere]
    left_out = {f"{file} is not in the walk" for file in [*left_out_of(heading), "studies/lr_transfer.py"]}
    assert set(departures(walk, walked[1])) <= left_out  # some are entered only once in a process
    assert departures([*walk, ("rules/fold.py", "fold")], walked[1])[-1] == "rules/fold.py:fold is not called"


def test_a_study_leaves_a_report_and_is_not_run_twice(out, capsys):
    code, said, progress = run(capsys, "study", "lr-transfer", *FEW, "--out", out, "--json")
    assert code == 0
    assert "3 of 3 runs were done already" in progress
    answer = json.loads(said)
    assert answer["agreement"] == "cannot be seen at this scale"  # one seed, one shape
    assert answer["table"][0]["depth"] == 2
    names = {Path(f).name for f in answer["files"]}
    assert {"report.html", "lr-transfer.svg", "lr-transfer.png", "lr-transfer.pdf", "runs.csv", "outcome.csv"} <= names
    page = Path(answer["files"][0]).read_text()
    assert "completep study lr-transfer --scale laptop --set depth=2" in page
    code, said, _ = run(capsys, "report", "lr-transfer", *FEW, "--out", out, "--json")
    assert json.loads(said)["table"] == answer["table"]


def test_a_report_names_the_base_of_the_study(out):
    """A task holds its run under the simplest base that gives the same numbers; the report does not."""
    few = read_words(FEW[1:]) | {"rules": ["completep", "mup"], "depth": [2, 8]}
    settings = study_report("lr-transfer", values=few, out=out).settings
    assert settings["base (width × depth)"] == "32 × 2"
    assert settings["depths"] == "2, 8"
    assert "sha256 ?" not in settings["data"]


def test_runs_that_two_studies_share_are_there_for_both(out, capsys):
    code, said, _ = run(capsys, "study", "status", "--out", out, "--json")
    assert code == 0
    done = {row["study"]: row["done"] for row in json.loads(said)["studies"]}
    assert done["lr-transfer"] == 3
    assert done["dynamics"] == done["init-transfer"] == 3  # all three tune at the base
    assert done["shape"] == 0


def test_curves_of_dynamics_come_from_what_is_there(out, capsys):
    words = ["--set", "depth=2", "lr_factor=1", "seed=0", "rules=completep", *TUNED, "--out", out]
    _, said, _ = run(capsys, "study", "dynamics", "--dry-run", "--json", *words)
    assert [r["status"] for r in json.loads(said)["runs"]] == ["done"]


def test_dry_run_says_runs_flops_and_time(tmp_path, capsys):
    code, said, _ = run(capsys, "study", "lr-transfer", "--dry-run", "--json", "--out", tmp_path)
    plan = json.loads(said)
    assert code == 0
    assert plan["points"] == 3 * 3 * 7 * 3
    assert len(plan["runs"]) == 147 + 30  # the base's runs are shared; 30 more tune it
    assert plan["flops"] == pytest.approx(sum(r["flops"] for r in plan["runs"]))
    assert plan["seconds_left"] == pytest.approx(plan["flops_left"] / plan["flops_per_second"] / plan["workers"])
    code, said, _ = run(capsys, "study", "shape", "--scale", "paper", "--dry-run", "--out", tmp_path)
    assert "2.81e+22 FLOPs" in said  # 25 shapes, three parameterizations, shared where they are one, three seeds
    assert not any(tmp_path.glob("store/*/run.json"))


def test_a_dry_run_is_short_on_a_narrow_terminal(tmp_path):
    """177 runs are seven rows: the summary comes first, and runs of the same size share a row."""
    text = as_text(study_plan("lr-transfer", out=tmp_path).document(), width=80)
    assert text.startswith("189 points, 177 different runs, 177 of them to do")
    assert len(text.splitlines()) < 40
    assert max(map(len, text.splitlines())) <= 80
    table = next(part for part in study_plan("lr-transfer", out=tmp_path).document().parts if isinstance(part, Table))
    assert sum(row[table.columns.index("runs")] for row in table.rows) == 177
    assert any("depth 32" in row[0] and "lr 7 values" in row[0] for row in table.rows)


def test_a_study_tunes_at_its_base_first(tmp_path, monkeypatch, capsys):
    """Two values at the base; the better one is used by the study's own run, and by the report."""
    monkeypatch.setitem(SCALES, "laptop", replace(LAPTOP, tokens=30 * 1024, validation=8192))
    axes = ["--set", "depth=2", "lr_factor=2", "seed=0", "rules=completep", "base_lr=2^-12,2^-6", "base_std=0.1"]
    code, said, _ = run(capsys, "report", "dynamics", *axes, "--out", tmp_path)
    assert code == 2
    code, _, said = run(capsys, "study", "dynamics", *axes, "--out", tmp_path)
    assert code == 2  # trained, and then one depth has nothing to compare with
    assert "one depth has nothing to compare with" in said
    lrs = sorted(json.loads(p.read_text())["hyperparameters"]["lr"] for p in tmp_path.glob("store/*/run.json"))
    assert lrs == [2**-12, 2**-6, 2 * 2**-6]
    study = study_named("dynamics")
    experiment, losses = settled(
        study, study_at("dynamics", "laptop", read_words(axes[1:]), None, None), store(tmp_path)
    )
    assert experiment.scale.lr == 2**-6
    assert losses.sort("loss")["base_lr"].to_list() == [2**-6, 2**-12]
    code, _, said = run(capsys, "study", "dynamics", "--set", "base_lr=fast")
    assert code == 2
    assert "base_lr=fast" in said


def test_the_list_names_every_study(capsys):
    code, said, _ = run(capsys, "study")
    assert code == 0
    assert "lr-transfer-compute-optimal" in said
    assert "lr-wd-grid" in said


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (("study", "lr-tranfer"), "no study named 'lr-tranfer'", "did you mean lr-transfer?"),
        (("study", "shape", "--set", "shap=1"), "no axis 'shap'", "did you mean shape?"),
        (("study", "lr-transfer", "--scale", "paper"), "needs the paper's amount of text", "as data"),
        (("study", "shape", "--search", "bracket"), "no curve with a minimum to search for", "search='grid'"),
        (("report", "shape", "--search", "bracket"), "no curve with a minimum to search for", "search='grid'"),
        (("study", "lr-transfer", "--workers", "0"), "workers=0", "leave workers out"),
        (("study", "lr-transfer", "--micro-batch", "0"), "micro_batch=0", "give a positive micro_batch"),
        (("study", "tau", "--set", "tau=0"), "tau=0", "positive"),
        (("study", "lr-transfer-compute-optimal", "--set", "lr=0"), "lr=0", "positive"),
        (("study", "lr-transfer", "--address", "x:1"), "address='x:1' is only for engine=ray", "engine=ray"),
        (("study", "lr-transfer", "--data", "/nowhere"), "/nowhere", ""),
        (("study", "lr-transfer", "--set", "depth=-1"), "depth=-1", ""),
        (("study", "lr-transfer", "--dry-run", "--workers", "-2"), "workers=-2", "leave workers out"),
        (("study", "laziness", "--set", "depth=0"), "must be at least 1", "depths 16 32 64"),
        (("study", "coordinates", "--set", "depth=2"), "one depth has no slope", "depth=2,4,8"),
        (("study", "lr-transfer", "--set", "rules=best"), "no rules named 'best'", "completep"),
        (("report", "laziness"), "keeps no runs", "completep study laziness"),
        (("report", "lr-transfer"), "no run of this study is done yet", "run the study"),
    ],
)
def test_mistakes_are_errors(words, what, fix, tmp_path, capsys):
    code, _, said = run(capsys, *words, "--out", tmp_path)
    assert code == 2
    assert what in said.replace("\n", " ")
    assert fix in said.replace("\n", " ")
    assert "Traceback" not in said


def test_a_store_of_another_version_or_of_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text('{"format": 99}')
    code, _, said = run(capsys, "study", "lr-transfer", *FEW, "--out", tmp_path)
    assert code == 2
    assert "has format 99" in said
    (tmp_path / "store" / "store.json").unlink()
    (tmp_path / "store" / "thesis.tex").write_text("precious")
    code, _, said = run(capsys, "study", "lr-transfer", *FEW, "--out", tmp_path)
    assert code == 2
    assert "has files, but is not a store of runs" in said


def test_a_damaged_result_is_an_error(out, capsys):
    path = next(out.glob("store/*/result.json"))
    whole = path.read_text()
    path.write_text(whole[:20])
    try:
        code, _, said = run(capsys, "report", "lr-transfer", *FEW, "--out", out)
    finally:
        path.write_text(whole)
    assert code == 2
    assert "is damaged" in said
    assert "remove the folder" in said


def start(*words, **options):
    command = [sys.executable, "-m", "completep", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("most", [20_000, 400_000])
def test_a_full_disk_is_reported_and_with_space_the_same_command_continues(tmp_path, most):
    """Files may not grow past so much, as on a full disk: the log of a run that fails, or its weights."""
    words = (
        "study",
        "lr-transfer",
        "--set",
        "depth=2",
        "lr=2^-6",
        "seed=0",
        "rules=completep",
        *TUNED,
        "--out",
        tmp_path,
    )
    full = start(*words, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)))
    said = full.communicate(timeout=300)[1].replace("\n", " ")
    assert full.returncode == 2
    assert "all 1 runs failed" in said
    assert "space" in said
    again = start(*words, "--json")
    out, said = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert len(list(tmp_path.glob("store/*/result.json"))) == 1
    assert len(list(tmp_path.glob("store/*/model.safetensors"))) == 1
    assert json.loads(out)["table"][0]["depth"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "kill"])
def test_a_stop_saves_and_the_same_command_continues(tmp_path, number):
    axes = ("depth=2", "lr=2^-7,2^-6,2^-5", "seed=0", "rules=completep", *TUNED)
    words = ("study", "lr-transfer", "--set", *axes, "--out", tmp_path)
    study = start(*words)
    wait_until(lambda: list(tmp_path.glob("store/*/metrics.jsonl")), process=study)
    study.send_signal(number)
    _, said = study.communicate(timeout=300)
    assert study.returncode == 130
    assert "the same command continues" in said
    assert "Traceback" not in said
    left = list(tmp_path.glob("store/*/checkpoints/*"))
    assert left  # what was begun was saved
    again = start(*words, "--json")
    out, said = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert len(list(tmp_path.glob("store/*/result.json"))) == 3
    assert os.path.exists(json.loads(out)["files"][0])


def test_nothing_is_concluded_from_half_a_study(out, capsys):
    words = [
        "--set",
        "depth=2",
        "lr=2^-7,2^-6,2^-5",
        "seed=0,1,2",
        "rules=completep",
        *TUNED,
        "--out",
        str(out),
        "--json",
    ]
    assert run(capsys, "report", "lr-transfer", *words)[0] == 0
    _, said, _ = run(capsys, "report", "lr-transfer", *words)
    answer = json.loads(said)
    assert answer["agreement"] == "not finished"
    assert answer["sentence"].startswith("6 of 9 runs are not done. So far:")


def test_a_study_that_cannot_be_judged_yet_is_not_finished(out, capsys):
    """One depth of dynamics is done; two are needed for a verdict."""
    words = ["--set", "depth=2,8", "lr_factor=1", "seed=0", "rules=completep", *TUNED, "--out", str(out), "--json"]
    code, said, _ = run(capsys, "report", "dynamics", *words)
    assert code == 0
    assert json.loads(said)["agreement"] == "not finished"
    assert "1 of 2 runs are not done" in json.loads(said)["sentence"]


def test_a_folder_that_is_a_file_is_an_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, said = run(capsys, "study", "lr-transfer", *FEW, "--out", tmp_path / "file")
    assert code == 2
    assert "cannot create the folder" in said
    assert "Not a directory" in said


def test_brackets_in_a_failed_runs_output_stay_brackets(tmp_path, capsys):
    from completep.cli.board import Watch
    from completep.studies.lr_transfer import STUDY
    from completep.sweep.engine import Event

    trials = STUDY.trials(STUDY.at(LAPTOP))[:1]
    with Watch("lr-transfer", "lr")(trials, Store(tmp_path), False) as on_event:
        on_event(Event("failed", trials[0].task, "[rank0]: cannot open [/home/u/x] [/]"))
    assert "[rank0]: cannot open [/home/u/x] [/]" in capsys.readouterr().err.replace("\n", "")
