"""`completep tune` from the command to tuned.json: verdicts, resuming, bad input, and what takes its result."""

import hashlib
import inspect
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import pytest

import completep as cp
from completep.cli import main
from completep.errors import UserError
from completep.tuned import TunedValue, TunedValues, read_tuned
from completep.tuning.again import command_of, engine_words
from completep.tuning.record import record_path
from completep.tuning.run import Given, changes_of, tune_plan, tune_status, tuning_of
from completep.tuning.settings import Tuning
from tests.hostile import within
from tests.tuning.commands import BOWL, LOSS, SPACE, WORDS, WRITE, bowl, script, tuned
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_script_is_tuned_verified_and_reported(tmp_path):
    log = tmp_path / "log"
    plans = []
    result = tuned(tmp_path, f"--log {log}", on_plan=plans.append)
    assert result.verdict == "PASS"
    assert abs(result.values["lr"] / 2**-7.3 - 1) < 0.1
    assert result.best["lr"].low < 2**-7.3 < result.best["lr"].high
    assert result.conducted.needed == len(log.read_text().splitlines()) == 18
    assert (plans[0].runs, plans[0].expected.most) == (19, 80)
    assert "For a PASS: 3 seeds" in str(plans[0])
    files = {p.name for p in result.write(tmp_path)}
    assert {"report.html", "report.md", "runs.csv", "tune.svg", "tuned.json"} <= files
    assert read_tuned(tmp_path / "tuned.json") == result.tuned()
    again = tuned(tmp_path, f"--log {log}")  # nothing runs twice
    assert again.to_json() == result.to_json()
    assert len(log.read_text().splitlines()) == 18
    more = tuned(tmp_path, f"--log {log}", seeds=4)
    assert len(log.read_text().splitlines()) == more.conducted.needed == 24
    status = tune_status(out=tmp_path).tunings
    assert [(counts.runs, counts.done) for _, counts in status] == [(24, 24)]


@pytest.mark.slow
def test_a_drift_fails_and_says_what_to_do(tmp_path, capsys):
    words = ["tune", bowl("--drift -0.9"), "--loss", LOSS, "--space", "lr=2^-11..2^-5", "--proxies", "64x8"]
    assert main([*words, "--out", str(tmp_path)]) == 1
    seen = capsys.readouterr()
    assert "FAIL" in seen.out
    assert "check that your script applies the rules" in " ".join(seen.out.split())
    assert "This needs about 20 runs" in seen.err
    assert "of about 20 done" in seen.err
    assert (tmp_path / "tuned.json").exists()


@pytest.mark.slow
def test_one_seed_is_announced_and_stays_open(tmp_path):
    plans = []
    result = tuned(tmp_path, seeds=1, on_plan=plans.append)
    assert result.verdict == "INCONCLUSIVE"
    assert "One seed never gives a PASS: use 3 seeds" in str(plans[0])


@pytest.mark.slow
def test_values_that_diverge_are_results(tmp_path):
    result = tuned(tmp_path, f"--diverges {2**-7.5}", seeds=2)
    assert "diverged" in result.runs["status"].to_list()
    assert result.failed == 0


@pytest.mark.slow
def test_a_changed_script_is_another_run_unless_it_is_accepted(tmp_path):
    script, log = tmp_path / "bowl.py", tmp_path / "log"
    script.write_text(BOWL.read_text())

    def run(**changes):
        settings = {"space": SPACE, "loss": LOSS, "proxies": [(64, 8)], "seeds": 1, "out": tmp_path / "runs"}
        return cp.tune(f"python {script} {WORDS} --log {log}", **settings, **changes)

    first = run()
    count = len(log.read_text().splitlines())
    script.write_text(BOWL.read_text() + "\n# another comment\n")
    accepted = run(accept_changes=True)
    assert len(log.read_text().splitlines()) == count
    assert accepted.values == first.values
    assert "Those runs still count" in accepted.notes[0]
    changed = run()
    assert len(log.read_text().splitlines()) == 2 * count
    assert "bowl.py changed since" in changed.notes[0]
    assert "accept_changes" in changed.notes[0]


@pytest.mark.slow
def test_accepted_changes_survive_an_interrupted_attempt_without_them(tmp_path):
    """The script is changed and started without the flag, which stops soon. The old runs can still be accepted."""
    script, log = tmp_path / "bowl.py", tmp_path / "log"
    script.write_text(BOWL.read_text())

    def run(**changes):
        settings = {"space": SPACE, "loss": LOSS, "proxies": [(64, 8)], "seeds": 1, "out": tmp_path / "runs"}
        return cp.tune(f"python {script} {WORDS} --log {log}", **{**settings, **changes})

    def count():
        return len(log.read_text().splitlines())

    run()
    first = count()
    script.write_text(BOWL.read_text() + "\n# another comment\n")

    with pytest.raises(KeyboardInterrupt):
        run(watch=interrupting)
    assert first < count() < first + 3
    accepted = run(accept_changes=True)
    assert count() < first + 3
    assert f"changed since {first} runs were done" in accepted.notes[0]
    wider = run(accept_changes=True, space={"lr": "2^-12..2^-5"}, base=(128, 2), proxies=[(128, 8)])
    digests = {json.loads(p.read_text())["scripts"][0][1] for p in (tmp_path / "runs").glob("store/*/run.json")}
    assert len(digests) == 2
    made = json.loads((tmp_path / "runs" / "store" / wider.runs["run"][0] / "run.json").read_text())
    assert made["scripts"][0][1] == hashlib.sha256(script.read_bytes()).hexdigest()  # what is new is as it is now


@contextmanager
def interrupting(trials, store, at_most):
    """Ctrl-C when the first run has ended."""

    def on_event(event):
        if event.kind == "done":
            raise KeyboardInterrupt

    yield on_event


def test_rules_that_the_command_does_not_pass_on_are_said_to_be_the_scripts_own(tmp_path):
    notes = tune_plan(bowl(), settings={"space": SPACE, "loss": LOSS, "rules": "mup"}, out=tmp_path).notes
    assert notes == ("The command never uses {rules}: your script must apply mup by itself.",)
    assert tune_plan(bowl(), settings={"space": SPACE, "loss": LOSS}, out=tmp_path).notes == ()


def settings_of(arguments):
    """Those arguments of `tune` that are settings, as keys of a TOML file."""
    return changes_of(**{name: arguments[name] for name in Given.__annotations__})


def test_every_setting_is_an_argument(tmp_path):
    """Of `tune` and of `tune_plan`; the same as in `settings`."""
    settings = {f.name for f in fields(Tuning)} - {"command", "function", "model", "set"} | {"constants"}
    assert settings == set(Given.__annotations__)
    assert settings < set(inspect.signature(cp.tune).parameters)
    common = {"space": SPACE, "loss": LOSS, "out": tmp_path}
    plans = [
        tune_plan(bowl(), **common, take="min", trials=7, ranks=2, resumes=True, stop_early=False),
        tune_plan(
            bowl(), **common,
            settings={"take": "min", "trials": 7, "ranks": 2, "resumes": True, "stop_early": False},
        ),
    ]  # fmt: skip
    assert plans[0].tuning == plans[1].tuning
    assert (plans[0].tuning.take, plans[0].tuning.trials, plans[0].tuning.stop_early) == ("min", 7, False)


def test_flags_win_over_booleans_of_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = f'command = "{bowl()}"\nloss = "{LOSS}"\nspace = {{lr = "2^-9..2^-5"}}\n'
    Path("tune.toml").write_text(text + "stop_early = false\nresumes = true\n")
    asked = []
    monkeypatch.setattr("completep.tune", lambda *a, **k: asked.append(settings_of(k)) or sys.exit(0))
    for words, found in (
        ([], (None, None)),
        (["--stop-early", "--no-resumes"], (True, False)),
        (["--no-stop-early", "--resumes"], (False, True)),
    ):
        with pytest.raises(SystemExit):
            main(["tune", "tune.toml", *words])
        assert (asked[-1]["stop_early"], asked[-1]["resumes"]) == found
        tuning = tuning_of("tune.toml", asked[-1], "")
        given = tuple(b if a is None else a for a, b in zip(found, (False, True), strict=True))
        assert (tuning.stop_early, tuning.resumes) == given
    assert main(["tune", "tune.toml", "--resumes", "--no-resumes"]) == 2
    assert "--resumes and --no-resumes are both given" in capsys.readouterr().err


@pytest.mark.parametrize("of_file", [False, True])
def test_run_it_again_has_every_setting(tmp_path, monkeypatch, of_file):
    """The words of the report, parsed again, are the same tuning on the same engine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.txt").write_text("")
    settings = {
        "space": {"lr": "2^-9..2^-5:0.5", "wd": [0.1, 0.2], "act": "gelu,relu"}, "loss": LOSS, "take": "min",
        "set": {"steps": 7}, "base": [32, 2], "proxies": [[32, 8], [64, 2]], "seeds": 2, "most_seeds": 5,
        "rules": "mup", "search": "random", "trials": 9, "stop_early": False, "sources": ["more.txt"], "resumes": True,
        "ranks": 2, "factory": "a.py:b",
    }  # fmt: skip
    command = bowl("{wd} {act} {steps}")
    engine = {"engine": "slurm", "workers": 3, "slurm": {"partition": "gpu", "setup": "module load cuda"},
              "accept_changes": True, "out": tmp_path / "else where"}  # fmt: skip
    if of_file:
        train = "tune.toml"
        Path(train).write_text(f'command = "{command}"\nseeds = 4\nranks = 4\n')
    else:
        train = command
    tuning = tuning_of(train, settings, "")
    words = command_of(train, tuning, settings)
    words += engine_words(engine["engine"], 3, 1, None, engine["slurm"], accept_changes=True, out=engine["out"])
    asked = []
    monkeypatch.setattr("completep.tune", lambda *a, **k: asked.append((a, k)) or sys.exit(0))
    with pytest.raises(SystemExit):
        main(shlex.split(shlex.join(words))[1:])
    ((given,), k) = asked[0]
    again = tuning_of(given, settings_of(k), k["model"] or "")
    assert again.dimensions == tuning.dimensions
    assert replace(again, space={}) == replace(tuning, space={})
    assert {name: k[name] for name in engine} == engine


def test_a_command_may_end_in_a_toml_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = f"{bowl()} --config conf.toml"
    assert tuning_of(command, {"space": SPACE, "loss": LOSS}, "").command == command
    with pytest.raises(UserError, match=r"absent\.toml"):
        tuning_of("absent.toml", {}, "")
    Path("my tuning.toml").write_text(f'command = "{bowl()}"\nloss = "{LOSS}"\n')
    assert tuning_of("my tuning.toml", {}, "").command == bowl()


FUNCTION = """
import math

def train(trial):
    place = math.log2(trial.lr) + 7.3
    for step in range(3):
        trial.report(step, 4 - step / 2)
    return 2 + 0.03 * place**2 + 0.01 * trial.seed + 0.0005 * math.sin(9 * place * trial.seed) - 0.05 * trial.m_L
"""


@pytest.mark.slow
def test_a_python_function(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    result = cp.tune("mine.py:train", space=SPACE, out=tmp_path / "runs")
    assert result.verdict == "PASS"
    assert result.tuning.shapes[1:] == (cp.Shape(64, 8),)  # four times the depth, where nothing is said
    from completep.load import load_factory

    same = cp.tune(load_factory("mine.py:train"), space=SPACE, out=tmp_path / "runs")
    assert same.runs["run"].to_list() == result.runs["run"].to_list()
    with pytest.raises(UserError, match="cannot be loaded by another process"):
        cp.tune(lambda trial: 1.0, space=SPACE, out=tmp_path / "runs")


@pytest.mark.slow
def test_the_decoder_is_tuned_and_planned_from(tmp_path, capsys):
    words = ["tune", "--model", "gpt", "--space", "lr=2^-6..2^-4", "--set", "steps=10", "--base-shape", "32", "2"]
    words += ["--proxies", "32x4", "--seeds", "1", "--out", str(tmp_path), "--json"]
    assert main(words) in (0, 3)
    answer = json.loads(capsys.readouterr().out)
    assert answer["fitness"].startswith("Is the base fit to tune at? ρ = ")
    plan = cp.plan(width=64, depth=8, tuned=tmp_path / "tuned.json")
    assert plan.run.rules == "completep"
    assert plan.run.base == cp.Shape(32, 2)
    assert plan.run.hyperparameters.lr == answer["values"]["lr"]["value"]
    assert plan.laws["learning rate"].startswith("tuned at 32 × 2")


@pytest.mark.slow
def test_a_multiplier_of_one_role_is_tuned_planned_and_parametrized_with(tmp_path, capsys):
    from completep.model.gpt import GPT

    (tmp_path / "tune.toml").write_text(
        'model = "gpt"\nbase = [32, 2]\nproxies = [[32, 4]]\nseeds = 1\n'
        '[space]\nlr_of_embedding = "2^-3..2^3:3"\n[set]\nsteps = 10\nlr_of_hidden_weight = 0.5\n'
    )
    assert main(["tune", str(tmp_path / "tune.toml"), "--out", str(tmp_path), "--json"]) in (0, 3)
    answer = json.loads(capsys.readouterr().out)
    best = answer["values"]["lr_of_embedding"]["value"]
    found = read_tuned(tmp_path / "tuned.json")
    assert found.values["lr_of_embedding"].value == best
    assert found.run.hyperparameters.lr_of == {"embedding": best, "hidden weight": 0.5}
    runs = [json.loads(p.read_text()) for p in (tmp_path / "store").glob("*/run.json")]
    tried = {r["hyperparameters"]["lr_of"].get("embedding", 1.0) for r in runs}
    assert tried == {0.125, 1.0, 8.0}
    assert {r["hyperparameters"]["lr_of"]["hidden weight"] for r in runs} == {0.5}
    losses = {json.loads(p.read_text())["validation_loss"] for p in (tmp_path / "store").glob("*/result.json")}
    assert len(losses) == len(runs) == 6

    plan = cp.plan(width=64, depth=8, tuned=tmp_path / "tuned.json")
    assert plan.run.hyperparameters.lr_of == {"embedding": best, "hidden weight": 0.5}
    assert plan.laws["learning rate by role"].startswith("tuned at 32 × 2")
    base = replace(plan.run.model, width=32, depth=2)
    with pytest.warns(UserWarning, match="INCONCLUSIVE"):  # one seed
        scaling = cp.parametrize(GPT(plan.run.model), base=lambda: GPT(base), tuned=found).init_()
    rates = {role: g["lr"] for g in scaling.param_groups(0.01) for role in g["roles"]}
    plain = {role: g["lr"] for g in scaling.param_groups(0.01, lr_of={}) for role in g["roles"]}
    times = {"embedding": best, "hidden weight": 0.5}
    assert rates == {role: lr * times.get(role, 1.0) for role, lr in plain.items()}


def test_multipliers_of_a_tuned_script_are_planned_with(tmp_path):
    values = {"lr": TunedValue(0.01), "lr_of_embedding": TunedValue(3.0), "lr_of_QK": TunedValue(2.0)}
    found = TunedValues(values, cp.Shape(32, 2), "completep", "PASS", "", [], "x", constants={"lr_of_qk_norm": 5.0})
    plan = cp.plan(width=64, depth=8, head_size=16, tuned=found)
    assert plan.run.hyperparameters.lr_of == {"embedding": 3.0}
    assert [note for note in plan.notes if "QK norm × 5" in note]
    rates = {str(s.role): s.lr for s in plan.roles()}
    assert rates["embedding"] == 3 * rates["unembedding"] == 0.03


@pytest.mark.slow
def test_tuned_values_are_planned_and_parametrized_with(tmp_path):
    import torch

    from completep.model.gpt import gpt
    from completep.tuned import TunedValue, TunedValues, write_tuned

    values = {
        "lr": TunedValue(0.01),
        "std": TunedValue(0.05),
        "eps": TunedValue(1e-12),
        "weight_decay": TunedValue(0.2),
    }
    found = TunedValues(values, cp.Shape(32, 2), "completep", "PASS", "", [], "x", constants={"steps": 100})
    path = write_tuned(tmp_path / "tuned.json", found)
    plan = cp.plan(width=64, depth=8, head_size=16, tuned=path)
    hyper = plan.run.hyperparameters
    assert (hyper.lr, hyper.std, hyper.eps, plan.run.base) == (0.01, 0.05, 1e-12, cp.Shape(32, 2))
    assert 1 / (hyper.lr * hyper.weight_decay * plan.run.schedule.steps) == pytest.approx(1 / (0.01 * 0.2 * 100))
    assert cp.plan(width=64, depth=8, head_size=16, tuned=path, lr=0.02).run.hyperparameters.lr == 0.02

    def model(width=64, depth=4):
        return gpt(width, depth, 61, head_size=16)

    given, taken = model(), model()
    plain = cp.parametrize(given, base=lambda: model(32, 2)).init_(0.05)
    scaling = cp.parametrize(taken, base=lambda: model(32, 2), tuned=path).init_()
    assert all(torch.equal(a, b) for a, b in zip(given.parameters(), taken.parameters(), strict=True))
    groups = scaling.param_groups()
    own = plain.param_groups(0.01, weight_decay=0.2, eps=1e-12)
    for a, b in zip(groups, own, strict=True):
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}
    assert scaling.param_groups(0.5)[0]["lr"] != groups[0]["lr"]
    with pytest.raises(UserError, match="tuned at 32 × 2 under completep; this model's base is 16 × 2"):
        cp.parametrize(model(), base=lambda: model(16, 2), tuned=path)
    with pytest.raises(UserError, match="its rules are mup"):
        cp.parametrize(model(), base=lambda: model(32, 2), rules="mup", tuned=path)
    with pytest.raises(UserError, match="no learning rate is given, and none was tuned"):
        cp.parametrize(model(), base=lambda: model(32, 2)).init_().param_groups()
    bad = TunedValues(values, cp.Shape(32, 2), "completep", "FAIL", "it drifts", [], "x")
    with pytest.warns(UserWarning, match="transfer of the tuned values is FAIL"):
        cp.parametrize(model(), base=lambda: model(32, 2), tuned=bad)
    path.write_text(path.read_text().replace("0.01", "0.02"))
    with pytest.raises(UserError, match="damaged"):
        cp.parametrize(model(), base=lambda: model(32, 2), tuned=path)
    with pytest.raises(UserError, match="damaged"):
        cp.plan(width=64, depth=8, tuned=path)


@pytest.mark.slow
def test_a_toml_file_holds_all_of_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "--init", "tune.toml"]) == 0
    assert main(["tune", "--init", "tune.toml"]) == 2
    (tmp_path / "train.py").write_text(BOWL.read_text())
    assert main(["tune", "tune.toml", "--dry-run"]) == 0
    assert "about 20 runs" in capsys.readouterr().out
    text = (tmp_path / "tune.toml").read_text()
    text = text.replace("--n_embd {width} --n_layer {depth}", "--width {width} --depth {depth}")
    (tmp_path / "tune.toml").write_text(text.replace("--out_dir", "--out"))
    assert main(["tune", "tune.toml", "--seeds", "1", "--json"]) == 3  # a flag wins over the file
    assert json.loads(capsys.readouterr().out)["base"] == {"width": 64, "depth": 2}
    (tmp_path / "tune.toml").write_text(text + "\n[setz]\nx = 1\n")
    assert main(["tune", "tune.toml"]) == 2
    assert "did you mean set" in capsys.readouterr().err
    (tmp_path / "tune.toml").write_text("command = ")
    assert main(["tune", "tune.toml"]) == 2
    assert "is not TOML" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# steps = 1000", f"steps = {'9' * 5000}", "tune.toml is not TOML: Exceeds the limit"),
        ("# steps = 1000", f"steps = 0x{'f' * 5000}", "tune.toml: set: steps is too large a number"),
        ("seeds = 3", f"seeds = 0x{'f' * 5000}", "tune.toml: seeds is too large a number"),
        ("seeds = 3", "seeds = 1979-05-27", "datetime.date(1979, 5, 27) is not of type int"),
        ("# steps = 1000", "steps = 10\ntau = 1e-305", "tau=1e-305 with lr="),
        ("# steps = 1000", "steps = 10\ntau = 1e-3", ""),
    ],
    ids=["digits", "hexadecimal", "seeds", "date", "decay", "control"],
)
def test_absurd_numbers_in_a_toml_file_are_errors(old, new, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "--init", "tune.toml"]) == 0
    (tmp_path / "train.py").write_text(BOWL.read_text())
    text = (tmp_path / "tune.toml").read_text()
    assert old in text
    (tmp_path / "tune.toml").write_text(text.replace(old, new))
    assert main(["tune", "tune.toml", "--dry-run"]) == (2 if message else 0)
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_dry_run_writes_nothing_and_shows_a_run(tmp_path, capsys):
    words = ["tune", bowl(), "--loss", LOSS, "--space", "lr=2^-9..2^-5", "--out", str(tmp_path / "runs"), "--dry-run"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "about 20 runs" in out or "about 19 runs" in out
    assert "--lr 0.001953125 --seed 0 --out FOLDER" in " ".join(out.split())
    assert not (tmp_path / "runs").exists()
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["at_most"] == 80


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"more": "{learning_rate}"}, r"unknown name \{learning_rate\}"),
        ({"space": {"lr": "2^-9..2^-5", "wd": "0.1..0.4"}}, r"never uses \{wd\}"),
        ({"constants": {"seed": 3}}, "'seed' is a reserved name"),
        ({"constants": {"note": "a\0b"}, "more": "{note}"}, "note='a"),
        ({"more": "a\0b"}, "has a NUL character"),
        ({"loss": "{folder}/a\0.json:loss"}, "has a NUL character"),
        ({"constants": {"lr": 0.1}}, "lr is a constant and searched too"),
        ({"constants": {"steps": 3}}, r"never uses \{steps\}"),
        ({"space": {"lr": "2^-9..2^-9"}}, "only one value"),
        ({"loss": "metrics.jsonl:val_loss"}, "the same for every run"),
        ({"loss": "{folder}/metrics.txt"}, "does not say where the loss is"),
        ({"loss": ""}, "loss is not given"),
        ({"proxies": [(32, 8)]}, "is not larger than the base"),
        ({"proxies": [(64, 2)]}, "is not larger than the base"),
        ({"seeds": 0}, "seeds=0"),
        ({"rules": "mupp"}, "mupp"),
        ({"base": (64,)}, r"base=\[64\] is not \(width, depth\)"),
        ({"engine": "kubernetes"}, "engine='kubernetes'"),
        ({"workers": 0}, "workers=0"),
        ({"per_gpu": 0}, "per_gpu=0"),
        ({"settings": {"tyme": 1}}, "no setting 'tyme'"),
        ({"settings": {"take": "best"}}, "take='best'"),
        ({"settings": {"sources": ["absent.py"]}}, "no file 'absent.py'"),
        ({"model": "gpt", "loss": None}, "given"),
        ({"space": {"act": "gelu,relu"}, "more": "{act}"}, "values have no order"),
        ({"space": {"lr": [0.1, math.nan]}}, "is not a range"),
        ({"space": {"lr": [0.1, 10**400]}}, "is not a range"),
        ({"space": {"lr": f"0.1,{10**400}"}}, "not a finite number"),
        ({"constants": {"steps": math.inf}, "more": "{steps}"}, "steps=inf"),
        ({"most_seeds": 0}, "most_seeds=0"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(tmp_path, change, said):
    arguments = {"space": SPACE, "loss": LOSS, "base": (64, 2), "proxies": [(64, 8)], "out": tmp_path, **change}
    command = bowl(arguments.pop("more", ""))
    if arguments.get("model"):
        arguments["settings"] = {"model": arguments.pop("model")}
    with pytest.raises(UserError, match=said):
        cp.tune(command, **arguments)
    assert not list(tmp_path.rglob("result.json"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "fix: give one of a command, a function (file.py:train) and model=gpt"),
        (["python x.py"], "fix: as loss, write '{folder}/metrics.jsonl:val_loss'"),
        (["--model", "gpt", "--loss", LOSS], "fix: leave loss out"),
        (["--model", "gpt", "--space", "lr"], "space: 'lr' is not a range"),
        (["--model", "gpt", "--space", "lr=1..2", "lr=1..4"], "space: lr is given twice"),
        (["--model", "gpt", "--space", "lr=1..4", "--rules", "foo"], "fix: use sp"),
        (["--model", "gpt", "--space", "lr=1..4", "--ranks", "0"], "fix: give a positive ranks"),
        (["--model", "gpt", "--space", "warmup=0.5..4"], "warmup=2 is not a share of the steps"),
        (["--model", "gpt", "--space", "lr=1..4", "std=0.1,b"], "std='b': must be a number fix: give a number for std"),
        (["--model", "gpt", "--space", "lr=1..4", "--set", "tau=b"], "tau='b': must be a number"),
        (["--model", "gpt", "--space", "lr_of_router=1..4"], "fix: use one of lr_of_embedding, lr_of_hidden"),
        (["--model", "gpt", "--space", "lr.embedding=1..4"], "fix: use letters, digits and underscores"),
        (["--model", "gpt", "--space", "lr_of_embedding=0..4:linear"], "multiplier 0.0: must be a finite number above"),
        (
            ["--model", "gpt", "--space", "rate=1..4"],
            "fix: use one of lr, std, weight_decay, eps, beta1, beta2, tau,",
        ),
        (["--model", "gpt", "--space", "lr=1..4", "--slurm", "partition=x"], "partition is only for engine=slurm"),
        (
            ["--model", "gpt", "--space", "lr=1..4", "--per-gpu", "2", "--engine", "ray"],
            "per_gpu=2 is only for engine=local",
        ),
        (["--model", "gpt", "--space", "lr=1..4", "--out", __file__], "is a file, not a folder"),
        (["--model", "gpt", "--space", "lr=1..4:0"], "such as lr=1..4:0.5"),
        (["status", "--out", __file__], "is a file, not a folder"),
    ],
)
def test_the_way_out_is_that_of_the_mistake(words, said, capsys, tmp_path):
    """Before anything runs, by a dry run too."""
    out = [] if "--out" in words else ["--out", str(tmp_path)]
    assert main(["tune", *words, *out, *([] if words[:1] == ["status"] else ["--dry-run"])]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lr {lr} --width {width} --depth {depth} --out {folder}", r"never uses \{seed\}"),
        ("--lr {lr} --seed {seed} --width {width} --out {folder}", r"never uses \{depth\}"),
        ("--lr {lr} --seed {seed} --width {width} --depth {depth}", r"never uses \{folder\}"),
        ("--seed {seed} --width {width} --depth {depth} --out {folder}", r"never uses \{lr\}"),
    ],
)
def test_a_template_without_a_name_that_the_search_needs_is_refused(tmp_path, words, said):
    with pytest.raises(UserError, match=said):
        cp.tune(f"python x.py {words}", space=SPACE, loss=LOSS, out=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('CUDA is not available')", "the first run failed.*CUDA is not available"),
        ("pass", "the first run failed.*left no loss: there is no"),
        (WRITE % "'low'", "the first run failed.*the text 'low', not a number"),
        (WRITE % "float('nan')", "every run at the base diverged"),
        (WRITE % "2.5", r"ignore lr: with lr = 2\^-8 and 2\^-7"),
        (WRITE % "float(lr)", "ignore the seed"),
        (WRITE % "-float(lr)", "the first run failed.*must be above 0"),
    ],
)
def test_a_script_that_cannot_be_tuned_is_noticed_at_once(tmp_path, code, said):
    """After the first run or the first round, not after the last."""
    events = []

    def watch(trials, store, at_most):
        from contextlib import contextmanager

        @contextmanager
        def context():
            yield events.append

        return context()

    with pytest.raises(UserError) as error:
        cp.tune(script(tmp_path, code), space={"lr": "2^-12..2^-2"}, loss="{folder}/m.json:loss", out=tmp_path / "runs",
                watch=watch, workers=1)  # fmt: skip
    assert re.search(said, str(error.value), re.S)
    assert len([e for e in events if e.kind == "started"]) <= 13
    if "first run" in said:
        assert {e.task.id for e in events if e.kind == "started"} <= {events[0].task.id}


@pytest.mark.slow
def test_what_a_failure_leaves_over_is_not_taken_for_a_script_that_ignores_its_value(tmp_path):
    loss = "2.5 if float(lr) <= 2**-7 else exit('out of memory')"
    result = cp.tune(script(tmp_path, WRITE % loss), space=SPACE, loss="{folder}/m.json:loss", seeds=1,
                     out=tmp_path / "runs", workers=1)  # fmt: skip
    assert result.failed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_planted_in_the_place_of_a_run_is_said(tmp_path, kind, capfd):
    words = {"space": SPACE, "loss": "{folder}/m.json:loss", "out": tmp_path / "runs", "workers": 1}
    code = script(tmp_path, WRITE % "1 + float(lr) + int(seed) + int(depth)")
    plans = []
    cp.tune(code, on_plan=plans.append, **words)
    store = tmp_path / "runs" / "store"
    victim = tmp_path / "victim"
    victim.mkdir()
    for run in [p for p in store.iterdir() if p.is_dir() and not p.name.startswith(".")]:
        shutil.rmtree(run)
        run.write_text("") if kind == "file" else run.symlink_to(victim)
    (store / ".index").unlink(missing_ok=True)
    with pytest.raises(UserError, match="is not a folder that a run can write to"):
        cp.tune(code, **words)
    assert not list(victim.iterdir())
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_script_that_ignores_its_shape_is_refused(tmp_path):
    loss = "2 + 0.03 * (__import__('math').log2(float(lr)) + 7.3)**2 + 0.01 * int(seed)"
    with pytest.raises(UserError, match="ignore its shape: 64 × 2 and 64 × 8 give the same loss"):
        cp.tune(script(tmp_path, WRITE % loss), space=SPACE, loss="{folder}/m.json:loss", seeds=2,
                out=tmp_path / "runs", workers=2)  # fmt: skip


@pytest.mark.slow
def test_a_run_that_fails_later_is_retried_shown_and_left_out(tmp_path):
    bad = "if float(lr) <= 2**-8 and seed == '1': raise SystemExit('flaky node')\n"
    loss = "2 + 0.03 * (__import__('math').log2(float(lr)) + 7.3)**2 + 0.01 * int(seed) - 0.01 * int(depth)"
    result = cp.tune(script(tmp_path, bad + WRITE % loss), space=SPACE, loss="{folder}/m.json:loss", seeds=2,
                     out=tmp_path / "runs", workers=2)  # fmt: skip
    assert result.failed
    assert "runs failed and are left out" in result.notes[-1]


def test_a_store_of_another_version_is_refused(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="has format 99"):
        tuned(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        "", "{", "[]", '{"title": "x"}', '{"title": "x", "versions": []}', '{"title": "x", "versions": [1]}',
        '{"title": 3, "versions": [{"scripts": [["a"]], "runs": ["b"]}]}',
        '{"title": "x", "versions": [{"scripts": [["a"]], "runs": ["b"]}]}',
        '{"title": "x", "versions": [{"scripts": [["a", "b", "c"]], "runs": []}]}',
        '{"title": "x", "versions": [{"scripts": [], "runs": ["\\u0000", "../.."]}]}',
        '{"title": "x", "versions": [{"scripts": [], "runs": [1]}]}', "[" * 100000, "\x00\xff",
    ],
)  # fmt: skip
def test_a_damaged_record_is_as_good_as_none(tmp_path, damage):
    record = record_path(tuning_of(bowl(), {"space": SPACE, "loss": LOSS}, ""), tmp_path)
    record.parent.mkdir()
    record.write_bytes(damage.encode("latin-1"))
    assert main(["tune", "status", "--out", str(tmp_path)]) == 0
    words = ["tune", bowl(), "--loss", LOSS, "--space", "lr=2^-9..2^-5", "--dry-run", "--out", str(tmp_path)]
    assert main(words) == 0
    assert main([*words, "--accept-changes"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "result", ["", "{", '{"status": "done", "loss": "low", "seconds": "x"}', '{"status": 3}', "[1]"]
)
def test_a_damaged_result_is_an_error_of_input_or_is_left_out(tmp_path, capsys, result):
    words = ["tune", bowl(), "--loss", LOSS, "--space", "lr=2^-9..2^-5", "--seeds", "1", "--out", str(tmp_path)]
    assert main(words) == 3
    first = next((tmp_path / "store").glob("*/result.json"))
    first.write_text(result)
    capsys.readouterr()
    for more in ([], ["--dry-run"]):
        assert main([*words, *more]) in (0, 2, 3)
    assert main(["tune", "status", "--out", str(tmp_path)]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proxies", "place"),
    [([1] * 100, "@ $.proxies[7]; … (100 in all)"), ([1] * 10**6, "tuned.json"), ("x" * 10**6, "tuned.json")],
)
def test_a_list_of_wrong_entries_is_a_short_error_at_once(tmp_path, proxies, place):
    from completep.config import sealed
    from completep.tuned import TunedValue, TunedValues, write_tuned

    values = TunedValues({"lr": TunedValue(0.5)}, cp.Shape(64, 2), "completep", "PASS", "", [], "x")
    path = write_tuned(tmp_path / "tuned.json", values)
    assert read_tuned(path).proxies == []
    plain = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("sealed", "digest")}
    path.write_text(sealed({**plain, "proxies": proxies}))
    with within(10), pytest.raises(UserError, match=re.escape(place)) as caught:
        read_tuned(path)
    assert len(caught.value.what) < 1000


@pytest.mark.parametrize("value", ["1" + "0" * 400, "1e400", "NaN", "-Infinity", "true", "[1]", "{}", '"abc"'])
def test_a_tuned_value_that_is_no_number_is_refused(tmp_path, value, capsys):
    from completep.config import sealed
    from completep.tuned import TunedValue, TunedValues, write_tuned

    path = write_tuned(
        tmp_path / "tuned.json",
        TunedValues({"lr": TunedValue(0.5)}, cp.Shape(64, 2), "completep", "PASS", "", [], "x", constants={"steps": 7}),
    )
    content = json.loads(path.read_text())
    for place, key in ((content["values"]["lr"], "value"), (content["constants"], "steps")):
        before, place[key] = place[key], json.loads(value)
        plain = {k: v for k, v in content.items() if k not in ("sealed", "digest")}
        path.write_text(sealed(plain))
        place[key] = before
        assert main(["plan", "--from", str(path), "--width", "128", "--depth", "4"]) == 2
        assert ("lr is" if key == "value" else "steps is") in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path):
    """Where runs cannot be written: a limit on the size of files stands for a full disk."""
    code = (
        "import resource, sys\nfrom completep.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))\nsys.exit(main(sys.argv[1:]))"
    )
    words = [
        "tune",
        bowl(),
        "--loss",
        LOSS,
        "--space",
        "lr=2^-9..2^-5",
        "--seeds",
        "1",
        "--out",
        str(tmp_path / "runs"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    full = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment, check=False
    )
    assert full.returncode == 2, full.stderr
    assert "cannot write" in full.stderr
    assert "Traceback" not in full.stderr
    assert not list((tmp_path / "runs").rglob("result.json"))
    assert main(words) == 3


def test_no_ray_cluster_is_an_error(tmp_path):
    pytest.importorskip("ray", reason="needs the extra `ray`")
    with pytest.raises(UserError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        tuned(tmp_path, engine="ray", address="127.0.0.1:1")


# -- through kills ---------------------------------------------------------------------------------

SLOW = """
import time
time.sleep(0.15)
"""


@pytest.mark.slow
def test_killed_ten_times_the_answer_is_the_same_and_no_finished_run_is_repeated(tmp_path):
    script = tmp_path / "bowl.py"
    script.write_text(SLOW + BOWL.read_text())
    words = [
        "tune",
        f"python {script} {WORDS}",
        "--loss",
        LOSS,
        "--space",
        "lr=2^-12..2^-2",
        "--proxies",
        "64x8",
        "128x2",
    ]
    command = [sys.executable, "-m", "completep", *words, "--json"]
    environment, store = {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path / "stormy" / "store"
    written, dice = {}, random.Random(0)
    for _ in range(10):
        with subprocess.Popen(
            [*command, "--out", str(tmp_path / "stormy")], env=environment, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            more = len(written) + dice.randrange(2)
            wait_until(
                lambda more=more: at_work(store) and len(list(store.glob("*/result.json"))) >= more, process=process
            )
            os.killpg(process.pid, signal.SIGKILL)
        now = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in store.glob("*/result.json")}
        assert written.items() <= now.items()
        written = now
    answers = []
    for out in ("stormy", "calm"):
        ended = subprocess.run(
            [*command, "--out", str(tmp_path / out)], env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        answers.append({k: v for k, v in json.loads(ended.stdout).items() if k != "files"})
    assert answers[0] == answers[1]
    now = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in store.glob("*/result.json")}
    assert written.items() <= now.items()
    assert len(now) == answers[0]["runs"]


def at_work(store):
    """Is a script running now?"""
    return any(not (p.parent / "result.json").exists() for p in store.glob("*/work"))


@pytest.mark.slow
def test_ctrl_c_is_clean_and_the_same_command_continues(tmp_path):
    script = tmp_path / "bowl.py"
    script.write_text(SLOW.replace("0.15", "0.5") + BOWL.read_text())
    words = [
        "tune",
        f"python {script} {WORDS}",
        "--loss",
        LOSS,
        "--space",
        "lr=2^-9..2^-5",
        "--out",
        str(tmp_path / "out"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "completep", *words], env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    wait_until(lambda: list((tmp_path / "out" / "store").glob("*/work")), process=process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues" in said
    assert "Traceback" not in said
    assert main(words) == 0
