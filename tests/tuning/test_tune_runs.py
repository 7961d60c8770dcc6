"""One run of a script as a task: its identity, its output, how it fails, and how it is stopped."""

import json
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from completep.cli import main
from completep.sweep.store import Store, parse_result
from completep.sweep.task import TaskError
from completep.tuning.reading import Source
from completep.tuning.record import write_record
from completep.tuning.scripts import find_scripts
from completep.tuning.tasks import Call, derived
from tests.hostile import PLANTED, plant, within
from tests.tuning.commands import SETTING, carry_out, command
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
WRITES = (
    "import sys, json, pathlib\n"
    "pathlib.Path(sys.argv[1], 'm.json').write_text(json.dumps({'loss': float(sys.argv[2])}))"
)


def test_a_run_keeps_its_loss_output_and_words(tmp_path):
    task = command(tmp_path, WRITES + "\nprint('hello'); print('oops', file=sys.stderr)")
    result = carry_out(task, tmp_path / "run")
    assert (result["status"], result["loss"]) == ("done", 0.25)
    assert (tmp_path / "run" / "stdout.txt").read_text() == "hello\n"
    assert (tmp_path / "run" / "stderr.txt").read_text() == "oops\n"
    words = json.loads((tmp_path / "run" / "run.json").read_text())["words"]
    assert words == ["python", "script.py", str(tmp_path / "run" / "work"), "0.25"]


def test_the_identity_is_words_values_seed_and_scripts(tmp_path):
    task = command(tmp_path, WRITES)
    other_values = replace(task, setting=replace(SETTING, values=(("lr", 0.5),)))
    other_seed = replace(task, setting=replace(SETTING, seed=1))
    other_loss = replace(task, source=Source.parse("{folder}/m.json:other"))
    (tmp_path / "script.py").write_text(WRITES + "\n# changed")
    changed = replace(task, scripts=find_scripts(["python", "script.py"], tmp_path))
    other_rules = replace(task, setting=replace(SETTING, rules="mup"))  # said of the script, although no word changes
    words = replace(task, template="python x {lr}")
    assert len({t.id for t in (task, other_values, other_seed, other_loss, changed, words, other_rules)}) == 7
    assert replace(task, folder="/elsewhere").id == task.id  # where it runs is no part of it


def test_a_script_is_its_imports_too(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from . import inner")
    (tmp_path / "package" / "inner.py").write_text("")
    (tmp_path / "helper.py").write_text("import json")
    (tmp_path / "script.py").write_text("import helper, os\nfrom package import inner\n")
    names = [name for name, _ in find_scripts(["python", "script.py", "{lr}"], tmp_path)]
    assert names == ["helper.py", "package/__init__.py", "package/inner.py", "script.py"]
    before = find_scripts(["python", "-m", "script"], tmp_path)
    (tmp_path / "package" / "inner.py").write_text("x = 1")
    assert dict(find_scripts(["python", "-m", "script"], tmp_path)) != dict(before)
    assert find_scripts(["train"], tmp_path) == ()


def test_modules_import_from_the_working_directory(tmp_path):
    """`python -m pkg.train` finds `helper` beside pkg, not inside of it."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "train.py").write_text("import helper\nfrom pkg.model import Model\nfrom . import other")
    for name in ("pkg/model.py", "pkg/other.py", "helper.py", "pkg/helper.py", "unrelated.py"):
        (tmp_path / name).write_text("")
    names = [name for name, _ in find_scripts(["python", "-m", "pkg.train", "{lr}"], tmp_path)]
    assert names == ["helper.py", "pkg/__init__.py", "pkg/model.py", "pkg/other.py", "pkg/train.py"]
    names = [name for name, _ in find_scripts(["python", "pkg/train.py", "{lr}"], tmp_path)]
    assert "pkg/helper.py" in names
    assert "helper.py" not in names


def test_pythonpath_inside_of_the_working_directory_counts(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "mine.py").write_text("")
    (tmp_path / "train.py").write_text("import mine")
    assert [name for name, _ in find_scripts(["python", "train.py"], tmp_path)] == ["train.py"]
    monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}/somewhere/else")
    assert [name for name, _ in find_scripts(["python", "train.py"], tmp_path)] == ["src/mine.py", "train.py"]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("--config=conf.yaml", ["conf.yaml"]),
        ("config=conf.yaml", ["conf.yaml"]),
        ("conf.yaml", ["conf.yaml"]),
        ("configs/{width}.yaml", ["configs/64.yaml", "configs/a [b].yaml"]),
        ("--config=configs/{width}.yaml", ["configs/64.yaml", "configs/a [b].yaml"]),
        ("--out={folder}/conf.yaml", []),
        ("./run", ["run"]),
        ("x" * 300, []),
        ("data.bin", []),
    ],
)
def test_configurations_among_the_words_count(tmp_path, word, found):
    (tmp_path / "configs").mkdir()
    for name in ("conf.yaml", "configs/64.yaml", "configs/a [b].yaml", "data.bin"):
        (tmp_path / name).write_text("lr: 1")
    (tmp_path / "run").write_text("#!/bin/sh")
    (tmp_path / "run").chmod(0o755)
    assert [name for name, _ in find_scripts(["python", word], tmp_path)] == found
    assert [name for name, _ in find_scripts([word], tmp_path)] == (found if word == "./run" or "/" in word else [])


def test_a_loss_that_is_not_above_zero_fails_the_run_at_once(tmp_path):
    for loss in ("0.0", "-0.5"):
        with pytest.raises(TaskError, match="must be above 0"):
            carry_out(command(tmp_path, WRITES.replace("float(sys.argv[2])", loss)), tmp_path / loss)


@pytest.mark.parametrize("loss", ["1e308", "10**400"])
def test_a_loss_that_a_store_does_not_take_counts_as_diverged(tmp_path, loss):
    result = carry_out(command(tmp_path, WRITES.replace("float(sys.argv[2])", loss)), tmp_path / "run")
    assert (result["status"], result["loss"]) == ("diverged", None)
    assert parse_result((tmp_path / "run" / "result.json").read_text(), tmp_path)["status"] == "diverged"


@pytest.mark.parametrize("resumes", [False, True])
def test_a_planted_link_is_not_written_through(tmp_path, resumes):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()
    (victim / "keep").write_text("precious")
    run.mkdir()
    (run / "work").symlink_to(victim)
    task = command(tmp_path, WRITES, resumes=resumes)
    if resumes:
        with pytest.raises(TaskError, match="is a symbolic link"):
            carry_out(task, run)
    else:
        assert carry_out(task, run)["status"] == "done"
    assert [p.name for p in victim.iterdir()] == ["keep"]


def test_a_failing_script_says_its_last_lines(tmp_path):
    task = command(tmp_path, "raise SystemExit('no data here')")
    with pytest.raises(TaskError, match="exit code 1\nno data here"):
        carry_out(task, tmp_path / "run")
    with pytest.raises(TaskError, match="cannot start 'absent-program'"):
        carry_out(replace(task, template="absent-program {lr}"), tmp_path / "other")
    with pytest.raises(TaskError, match=r"left no loss: there is no .*m\.json"):
        carry_out(command(tmp_path, "pass"), tmp_path / "third")


def test_a_loss_that_is_not_finite_is_a_result_even_if_the_script_ends_with_an_error(tmp_path):
    code = WRITES.replace("float(sys.argv[2])", "float('nan')")
    assert carry_out(command(tmp_path, code), tmp_path / "a")["status"] == "diverged"
    result = carry_out(command(tmp_path, code + "\nraise SystemExit('the loss is NaN')"), tmp_path / "b")
    assert (result["status"], result["loss"]) == ("diverged", None)


def test_every_attempt_starts_in_an_empty_folder_unless_the_script_resumes(tmp_path):
    code = (
        "import sys, json, pathlib\nfolder = pathlib.Path(sys.argv[1])\nold = len(list(folder.iterdir()))\n"
        "(folder / f'{old}.txt').write_text('')\n(folder / 'm.json').write_text(json.dumps({'loss': old + 1.0}))\n"
        "if not pathlib.Path('go').exists(): sys.exit(1)"
    )
    for resumes, loss in ((False, 1.0), (True, 3.0)):
        (tmp_path / "go").unlink(missing_ok=True)
        task = command(tmp_path, code, resumes=resumes)
        with pytest.raises(TaskError):
            carry_out(task, tmp_path / str(resumes))
        (tmp_path / "go").write_text("")
        assert carry_out(task, tmp_path / str(resumes))["loss"] == loss


def test_no_shell_sees_a_value(tmp_path):
    setting = replace(SETTING, values=(("lr", f"0.5; touch {tmp_path}/hacked"),))
    with pytest.raises(TaskError):
        carry_out(command(tmp_path, WRITES, setting=setting), tmp_path / "run")
    assert not (tmp_path / "hacked").exists()


@pytest.mark.slow
def test_a_stopped_run_stops_its_script_and_leaves_no_result(tmp_path):
    """SIGTERM to the process of a task reaches the script, which may save. A killed process takes its script along."""
    code = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path('saved').write_text(''), sys.exit(0)))\n"
        "pathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)"
    )
    task = command(tmp_path, code)
    starter = (
        "import pickle, sys, pathlib\nfrom completep.sweep.engine import attempt\n"
        "from completep.sweep.store import Store\n"
        "print(attempt(Store(pathlib.Path(sys.argv[1])), pickle.loads(bytes.fromhex(sys.argv[2]))))"
    )
    for number, said in ((signal.SIGTERM, "stopped\n"), (signal.SIGKILL, "")):
        (tmp_path / "pid").unlink(missing_ok=True)
        words = [sys.executable, "-c", starter, str(tmp_path / "store"), pickle.dumps(task).hex()]
        worker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        pid = int((tmp_path / "pid").read_text())
        worker.send_signal(number)
        assert worker.communicate(timeout=60)[0] == said
        wait_until(lambda pid=pid: not alive(pid))
        assert Store(tmp_path / "store").result(task) is None
    assert (tmp_path / "saved").exists()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


TRAIN = """
import completep as cp

def train(trial: cp.Trial) -> float:
    trial.report(1, 9.0)
    (trial.folder / "note").write_text(f"{trial.shape} {trial.base} {trial.m_L}")
    return trial.lr * trial.width

def nothing(trial):
    pass

def reports(trial):
    trial.report(1, 3.0)

def wrong(trial):
    return "low"

def asks(trial):
    return trial.warmup
"""


@pytest.fixture
def call(tmp_path):
    (tmp_path / "mine.py").write_text(TRAIN)
    return lambda name: Call(f"{tmp_path / 'mine.py'}:{name}", SETTING, find_scripts(["python", "mine.py"], tmp_path))


def test_a_function_is_called_with_its_trial(tmp_path, call):
    assert carry_out(call("train"), tmp_path / "a")["loss"] == 16.0
    assert (tmp_path / "a" / "work" / "note").read_text() == "Shape(width=64, depth=2) Shape(width=64, depth=2) 1.0"
    assert carry_out(call("reports"), tmp_path / "b")["loss"] == 3.0
    with pytest.raises(TaskError, match="returned None and reported nothing"):
        carry_out(call("nothing"), tmp_path / "c")
    with pytest.raises(TaskError, match="returned 'low', not a number"):
        carry_out(call("wrong"), tmp_path / "d")
    with pytest.raises(AttributeError, match="no 'warmup'; it has lr, width"):
        carry_out(call("asks"), tmp_path / "e")
    assert len({call(name).id for name in ("train", "nothing")}) == 2


def test_weight_decay_follows_from_its_timescale():
    assert derived({"tau": 0.1, "lr": 0.01, "steps": 1000}) == {"weight_decay": pytest.approx(1.0)}
    assert derived({"tau": 0.1, "lr": 0.01}) == {}
    assert derived({"tau": 0.1, "lr": 0.01, "steps": 1000, "weight_decay": 0.5}) == {}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_record_that_is_no_file_is_as_good_as_none(tmp_path, kind, capsys):
    Store(tmp_path / "store").open()
    for name in ("a", "b"):
        write_record(tmp_path / "tunings" / f"{name}.json", f"tuning {name}", (), ["0" * 12])
    plant(tmp_path / "tunings" / "a.json", kind)
    with within():
        assert main(["tune", "status", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "tuning b" in said
    assert "tuning a" not in said
