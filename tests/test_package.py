"""The wheel and the sdist build, install and run on their own. A part that needs an extra names it."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("hatchling", reason="needs the extra `test`")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True, capture_output=True
    )
    return folder


@pytest.mark.slow
def test_the_wheel_has_everything_that_runs(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    templates = {"completep/report/page.html", "completep/report/fragment.html"}
    assert {"completep/py.typed", "completep/cli/__init__.py", *templates} <= set(names)
    assert any(n.startswith("completep/measure/") and n.endswith(".csv.gz") for n in names)
    assert not any(n.startswith(("tests/", "runs/")) for n in names)


def test_the_sdist_has_everything_that_builds_it(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = archive.getnames()
    tails = {n.split("/", 1)[1] for n in names if "/" in n}
    assert {"pyproject.toml", "LICENSE", "README.md", "Makefile", "constraints.txt", "completep/py.typed"} <= tails
    for_tests_and_docs = {"CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml", "docs/rules.md", "tests/test_docs.py"}
    assert for_tests_and_docs <= tails
    assert not any(t.startswith("runs/") for t in tails)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_installs_and_prints_its_version(built, tmp_path, kind):
    package = next(built.glob(kind))
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(tmp_path)]
    install = [sys.executable, "-m", "pip", "install", *options, str(package)]
    subprocess.run(install, check=True, capture_output=True)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    code = "import completep, sys; print(completep.__file__); print('torch' in sys.modules)"
    where = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert str(tmp_path) in where.stdout
    assert where.stdout.split()[-1] == "False"  # importing it is light
    version = subprocess.run(
        [sys.executable, "-m", "completep", "--version"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert version.stdout.startswith("completep 0.")


TRACKERS = ["tensorboard", "wandb", "trackio"]
OPTIONAL = ["ray", "optuna", "lm_eval", "transformers", "datasets", "tiktoken", "tokenizers", "lightning", *TRACKERS]


def without_extras(code):
    """Run code in a process that cannot import any optional package."""
    block = f"import sys\nfor name in {OPTIONAL!r}: sys.modules[name] = None\n"
    return subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.slow
def test_the_core_works_without_extras():
    code = (
        "import torch, completep as cp\nfrom examples.own_model import MyModel\n"
        "s = cp.parametrize(MyModel(64, 4), base=lambda: MyModel(32, 2)); s.init_(0.02)\n"
        "import completep.cli, completep.studies.run, completep.report.html, completep.train.loop\nprint('fine')"
    )
    ended = without_extras(code)
    assert ended.stdout.strip() == "fine", ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["train", "--width", "32", "--depth", "2", "--tokenizer", "gpt2"], "completep[gpt2]"),
        (["study", "lr-transfer", "--engine", "ray", "--set", "depth=2", "seed=0", "--out", "{out}"], "completep[ray]"),
        (["study", "downstream", "--out", "{out}"], "completep[eval]"),
        (["tune", "--model", "gpt", "--space", "lr=2^-9..2^-5", "std=0.1..0.4", "--out", "{out}"], "completep[tune]"),
    ],
)
def test_a_missing_extra_is_named_with_its_install_command(words, extra, tmp_path):
    filled = [w.format(out=tmp_path) for w in words]
    ended = without_extras(f"from completep.cli import main\nraise SystemExit(main({filled!r}))")
    assert ended.returncode == 2, ended.stderr
    assert extra in ended.stderr
    assert "pip install" in ended.stderr
