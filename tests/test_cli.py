"""The command line as a user types it: exit codes, JSON, files, and errors without a traceback."""

import json
import subprocess
import sys
import types
from inspect import Parameter, signature
from pathlib import Path

import pytest

import completep as cp
from completep.__main__ import main as started
from completep.cli import COMMANDS, main
from completep.cli.shared import console
from completep.rules.table import Rules

MODEL = """
import torch
from completep import COMPLETEP, parametrize
from completep.model.gpt import gpt

def model(width=32, depth=2):
    return gpt(width, depth, 61, head_size=16)

def plain(width=32, depth=2):
    m = model(width, depth)
    return m, torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.1)

def right(width=32, depth=2):
    m = model(width, depth)
    scaling = parametrize(m, base=model).init_(0.02)
    return m, torch.optim.AdamW(scaling.param_groups(1e-3, weight_decay=0.1))

def explodes(width=32, depth=2):
    raise RuntimeError("no GPU for you")

def large():
    return model(16384, 2)

NUMBER = 3
"""
SIZES = ["--args", "width=64", "depth=6", "--base", "width=32", "depth=2"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "theirs.py"
    path.write_text(MODEL)
    return path


def test_explain_prints_a_table(file, capsys):
    assert main(["explain", f"{file}:model", *SIZES, "--lr", "0.01"]) == 0
    out = capsys.readouterr().out
    assert "blocks.*.mlp.down.weight" in out
    assert "hidden weight" in out
    assert "0.005" in out


def test_explain_json_and_page(file, capsys, tmp_path):
    page = tmp_path / "new" / "page.html"
    options = ["--json", "--rules", "alpha=0.5", "--style", "folded", "--html", str(page)]
    assert main(["explain", f"{file}:model", *SIZES, *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rules"] == "alpha=0.5"
    assert data["style"] == "folded"
    assert len(data["parameters"]) == 6 * 12 + 4
    assert page.read_text().startswith("<!doctype html>")
    assert main(["explain", f"{file}:model", *SIZES, "--html", str(page)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_explain_with_a_base_shape(file, capsys):
    assert main(["explain", f"{file}:model", "--args", "width=64", "depth=6", "--base-shape", "32", "2", "--json"]) == 0
    by_shape = json.loads(capsys.readouterr().out)
    [line] = by_shape.pop("unchecked")
    assert "how large the heads of the base are" in line
    assert main(["explain", f"{file}:model", *SIZES, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == by_shape | {"unchecked": []}


@pytest.mark.slow
def test_audit_exit_codes(file, capsys):
    assert main(["audit", f"{file}:right", *SIZES]) == 0
    assert "PASS" in capsys.readouterr().out
    assert main(["audit", f"{file}:plain", *SIZES]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert "one global eps" in out
    assert main(["audit", f"{file}:plain", *SIZES, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] is False
    assert {"name", "role", "quantity", "expected", "found", "factor", "cause"} <= data["departures"][0].keys()


@pytest.mark.slow
def test_the_check_blames_what_is_wrong(tmp_path, capsys):
    words = [
        "check",
        *["--depths", "2", "4", "8", "--widths", "64", "--args", "head_size=16", "--seeds", "2", "--workers", "1"],
    ]
    words += ["--rules", "mup", "literature=0.5", "alpha=0.5", "completep", "--out", str(tmp_path), "--json"]
    assert main(words) == 1
    first = json.loads(capsys.readouterr().out)
    assert main(words) == 1
    second = json.loads(capsys.readouterr().out)
    assert first["verdicts"]["mup"] == first["verdicts"]["literature=0.5"] == "FAIL"
    blamed = [line for line in first["culprits"]["literature=0.5"] if "learning rate" in line]
    assert {line.split(":")[0].rpartition(".")[2] for line in blamed} == {"weight", "bias"}  # of norms, and biases
    assert all("norm" in line or "bias" in line for line in blamed)
    assert not first["culprits"]["completep"]
    assert first["findings"] == second["findings"]
    assert not {*first["files"]} & {*second["files"]}


@pytest.mark.slow
def test_the_demo_tunes_at_the_base_and_reports(tmp_path, capsys, monkeypatch):
    """The real thing with shallow models and few steps: another seed gives other losses."""
    from dataclasses import replace

    from completep.studies import demo

    monkeypatch.setattr(demo, "SCALE", replace(demo.SCALE, tokens=30 * 1024, validation=8192))
    answers = []
    for seed in (0, 1):
        assert main(["demo", "--depths", "1", "2", "--seed", str(seed), "--out", str(tmp_path), "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    first, second = ([row["loss_at_base_best"] for row in a["table"]] for a in answers)
    assert all(2 < loss < 4 for loss in first + second)
    assert not set(first) & set(second)
    assert answers[0]["table"][0]["best_lr"] == pytest.approx(answers[1]["table"][0]["best_lr"], rel=1.0)
    assert "tuned at depth 1" in answers[0]["sentence"]
    assert "completep demo --seed 0" in Path(answers[0]["files"][0]).read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explain", "nocolon", *SIZES], "'nocolon' does not name a factory"),
        (["explain", "no.such.module:f", *SIZES], "cannot import no.such.module"),
        (["explain", "missing.py:f", *SIZES], "there is no file missing.py"),
        (["explain", "{file}:nothing", *SIZES], "has no callable 'nothing'"),
        (["explain", "{file}:NUMBER", *SIZES], "has no callable 'NUMBER'"),
        (["explain", "{file}:model"], "no base given"),
        (["explain", "{file}:model", "--base", "width"], "'width' is not an argument"),
        (["explain", "{file}:model", "--base", "widht=3"], "unexpected keyword argument 'widht'"),
        (["explain", "{file}:model", *SIZES, "--rules", "mu-p"], "no rules named 'mu-p'"),
        (["explain", "{file}:model", *SIZES, "--rules", "alpha=2"], "alpha must lie in"),
        (["explain", "{file}:explodes", *SIZES], "RuntimeError: no GPU for you"),
        (["explain", "{file}:plain", *SIZES], "returned tuple, not an nn.Module"),
        (["explain", "[/red]:{file}", *SIZES], "[/red]"),
        (["explain", "{file}:large", "--base-shape", "64", "2"], "more than 300,000,000"),
        (["audit", "{file}:model", *SIZES], "let it return (model, optimizer)"),
        (["check", "--depths", "2", "--widths", "64"], "one shape has no slope"),
        (["check", "--depths", "0", "2"], "of at least 1"),
        (["demo", "--depths", "2"], "one depth has nothing to transfer to"),
        (["demo", "--depths", "0", "2"], "of at least 1"),
        (["demo", "--depths", "2", "4", "--out", "/proc/nowhere"], "cannot create the folder /proc/nowhere/store"),
    ],
)
def test_mistakes_are_errors_without_a_traceback(file, capsys, words, message):
    assert main([w.replace("{file}", str(file)) for w in words]) == 2
    printed = capsys.readouterr()
    error = " ".join(printed.err.split())
    assert message in error
    assert "fix:" in error
    assert "Traceback" not in error
    assert not printed.out


def test_the_overview_has_a_line_per_command(capsys):
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert main([]) == 2
    assert capsys.readouterr().out == overview
    lines = overview.splitlines()
    for name in COMMANDS:
        assert sum(line.startswith(f"  {name}  ") for line in lines) == 1
    assert len(lines) < len(COMMANDS) + 10


@pytest.mark.parametrize(
    ("words", "message"),
    [(["pln"], "did you mean completep plan?"), (["check-transfer"], "did you mean completep check transfer?")],
)
def test_an_unknown_command_is_named_with_the_nearest_one(words, message, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"no command '{words[0]}'" in said
    assert message in said


def test_help_fits_80_columns_and_leaves_out_what_says_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([*name.split(), "--help"])
        said = capsys.readouterr().out
        usage, _, rest = said.partition("\n")
        assert usage.startswith(f"usage: completep {name}")
        assert not [line for line in rest.splitlines() if len(line) > 80]
        assert not [noise for noise in ("{None}", "default: None", "default: )", "[INT [INT") if noise in said]


@pytest.mark.slow
def test_help_shows_an_example_for_every_command():
    for name, command in COMMANDS.items():
        assert f"Example: completep {name}" in command.__doc__
        done = subprocess.run(
            [sys.executable, "-m", "completep", *name.split(), "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0
        assert "Example:" in done.stdout


def test_an_error_of_ours_has_its_own_code_and_keeps_its_traceback(tmp_path, capsys, monkeypatch):
    from completep import cli

    def broken(words):
        raise ZeroDivisionError("[/] \x1b[31m")

    monkeypatch.setattr(cli, "_run", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["plan"]) == 70  # not 1, which is FAIL
    said = capsys.readouterr().err
    assert "internal error: ZeroDivisionError: [/] \\x1b[31m" in said
    assert "Traceback" not in said
    assert "open an issue in the project's repository" in said
    (kept,) = tmp_path.glob("completep-error-*.txt")
    assert str(kept) in said.replace("\n", "")
    assert "Traceback (most recent call last)" in kept.read_text()
    monkeypatch.setenv("COMPLETEP_DEBUG", "1")
    assert main(["plan"]) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PermissionError(13, "Permission denied", "there"), 2),
        (OSError(28, "No space left on device"), 2),
        (OSError(9, "Bad file descriptor"), 70),
        (MemoryError(), 2),
        (KeyboardInterrupt(), 130),
        (RuntimeError("Could not determine home directory."), 2),
        (RuntimeError("something else"), 70),
        (RecursionError(), 70),
        (BaseException("a compiled library panicked"), 70),
    ],
    ids=repr,
)
def test_what_the_machine_refuses_is_no_error_of_ours(error, code, capsys, monkeypatch, tmp_path):
    from completep import cli

    def refused(words):
        raise error

    monkeypatch.setattr(cli, "_run", refused)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["plan"]) == code
    assert "Traceback" not in capsys.readouterr().err


def test_ctrl_c_while_modules_are_imported(monkeypatch):
    class BeingImported(types.ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "completep.cli", BeingImported("completep.cli"))
    assert started() == 130


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_verdict(tmp_path):
    """`completep … | head` must not end with 1."""
    command = f"{sys.executable} -m completep study; echo $? > {tmp_path / 'code'}"
    subprocess.run(f"({command}) | true", shell=True, check=True)
    assert (tmp_path / "code").read_text().strip() == "141"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "streams", "code"),
    [
        ("plan --width 64 --depth 2", ">&-", 0),
        ("plan --width 64 --depth 2 --json", "<&- >&- 2>&-", 0),
        ("--version", ">&-", 0),
        ("plan --params x", ">&-", 2),
        ("plan --params x", ">&- 2>&-", 2),
        ("plan --params x", "2> /dev/full", 2),
        ("plan --params x", "2>&1 | true", 2),
        ("plan --width 64 --depth 2", "> /dev/full", 2),
    ],
)
def test_a_stream_that_is_closed_or_full_is_no_verdict(words, streams, code, tmp_path):
    """Python itself would end with 1, which is FAIL, or with 120."""
    redirected, _, reader = streams.partition("|")
    command = f"{sys.executable} -m completep {words} {redirected}; echo $? > {tmp_path / 'code'}"
    done = subprocess.run(f"({command}) | true" if reader else command, shell=True, capture_output=True, text=True)
    assert (tmp_path / "code").read_text().strip() == str(code)
    assert "Traceback" not in done.stdout + done.stderr


CLOSED = """
import os, sys
from completep.cli import main
os.close(1)
assert main(["--version"]) == 0
with open(sys.argv[1], "w") as file:
    os.write(1, b"from a library")
    file.write("precious")
"""


def test_a_closed_stream_leaves_its_number_to_no_file(tmp_path):
    """What a library prints must not get into a file of ours."""
    subprocess.run([sys.executable, "-c", CLOSED, str(tmp_path / "file")], check=True, capture_output=True)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.slow
def test_names_that_are_not_utf8_are_errors(tmp_path, capsys):
    assert main(["explain", "latin\udcff.py:model", *SIZES]) == 2
    assert "latin\\udcff" in capsys.readouterr().err.replace("\\xff", "\\udcff")
    done = subprocess.run(
        [sys.executable, "-m", "completep", "train", b"\xff[/].json"], capture_output=True, env={"LC_ALL": "C"}
    )  # fmt: skip
    assert done.returncode == 2
    assert b"\\xff[/].json" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["study", "status"], ["study", "lr-transfer", "--dry-run"], ["report", "lr-transfer"]]
)
def test_looking_writes_nothing_and_needs_no_torch(words, tmp_path):
    look = f"main({[*words, '--out', 'runs']!r}); print('torch' in sys.modules)"
    code = f"import sys; from completep.cli import main; {look}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", [["study", "unpack", "\ud800"], ["plan", "--from", "\ud800"], ["prepare", "\ud800", "--out", "x"]]
)
def test_a_name_that_no_file_can_have_is_a_mistake(words, capsys):
    assert main(words) == 2
    assert "fix:" in capsys.readouterr().err


def test_version():
    done = subprocess.run([sys.executable, "-m", "completep", "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("completep 0.")


def plain(default):
    """A default as a word of the command line would give it."""
    if isinstance(default, Rules):
        return default.key
    if isinstance(default, tuple):
        return plain(default[0]) if len(default) == 1 else default or None
    return str(default) if isinstance(default, Path) else default


@pytest.mark.parametrize(
    "name", ["check", "check laziness", "check transfer", "derive", "plan", "explain", "audit", "study"]
)
def test_a_command_has_the_defaults_of_its_function(name):
    command, function = (signature(f).parameters for f in (COMMANDS[name], getattr(cp, name.split()[-1])))
    both = [p for p in command if p in function and function[p].default is not Parameter.empty]
    assert len(both) >= 5
    assert {p: plain(command[p].default) for p in both} == {p: plain(function[p].default) for p in both}


def test_each_console_is_as_wide_as_its_own_stream(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for terminal, other in (("stderr", "stdout"), ("stdout", "stderr")):
        monkeypatch.setattr(f"sys.{terminal}.isatty", lambda: True)
        monkeypatch.setattr(f"sys.{other}.isatty", lambda: False)
        assert console(stderr=terminal == "stderr").width == 80
        assert console(stderr=terminal != "stderr").width == 200
