"""A new user in an empty directory: install an extra, train a Llama with Trainer, fold, use it without this package.

The environment is new and has only the packages that the extra requires, and their requirements. They are linked from
the environment of the tests, and pip checks that they are complete. So nothing is downloaded, and a package that the
extra does not name is missing.
"""

import email
import importlib.metadata as metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def requirements_of_wheel(wheel):
    """What the wheel itself says, since an editable install may be older."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")


def distributions_for(requirements, extra):
    """The names of all distributions that pip would install for these requirements."""
    from packaging.requirements import Requirement

    left = [(Requirement(text), e) for text in requirements for e in ("", extra)]
    names, seen = set(), set()
    while left:
        wanted, extra = left.pop()
        if (wanted.marker and not wanted.marker.evaluate({"extra": extra})) or (str(wanted), extra) in seen:
            continue
        seen.add((str(wanted), extra))
        names.add(wanted.name)
        for text in metadata.requires(wanted.name) or []:
            left += [(Requirement(text), e) for e in ("", *wanted.extras)]
    return names


def new_environment(folder, distributions):
    """A new venv with these distributions."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for name in distributions:
        distribution = metadata.distribution(name)
        tops = {f.parts[0] for f in distribution.files or [] if f.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """An empty directory with a new environment."""
    pytest.importorskip("hatchling", reason="needs the extra `test`")
    pytest.importorskip("accelerate", reason="needs the extra `test`")
    folder = tmp_path_factory.mktemp("home")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    wheel = next((folder / "dist").glob("*.whl"))
    python = new_environment(folder / "venv", distributions_for(requirements_of_wheel(wheel), "hf"))
    run(python, folder, "-m", "pip", "install", "--quiet", "--no-index", f"completep[hf] @ {wheel.as_uri()}")
    return folder


def run(python, folder, *words):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    ended = subprocess.run(
        [str(python), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.mark.slow
def test_from_install_to_generated_text(home):
    python = home / "venv" / "bin" / "python"
    assert run(home / "venv" / "bin" / "completep", home, "--version").startswith("completep 0.")
    shutil.copy(ROOT / "examples" / "hf_trainer.py", home)
    printed = run(python, home, "hf_trainer.py", "trained")
    first, last = map(float, re.search(r"loss ([\d.]+) → ([\d.]+)", printed).groups())
    assert last < first - 1

    use = (
        "import sys; sys.modules['completep'] = None\n"
        "import torch\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('trained')\n"
        "tokens = model.generate(torch.tensor([list(b'def ')]), max_new_tokens=16, do_sample=False, pad_token_id=0)\n"
        "print(type(model).__name__, repr(bytes(tokens[0].tolist()).decode(errors='replace')))"
    )
    name, text = run(python, home, "-c", use).split(maxsplit=1)
    assert name == "LlamaForCausalLM"
    assert text.strip() in printed


@pytest.mark.slow
def test_the_environment_has_nothing_else(home):
    """The negative control: packages of other extras are absent, and the command names the missing extra."""
    python = home / "venv" / "bin" / "python"
    look = "import importlib.util as u; print([n for n in ('ray', 'lm_eval', 'pytest', 'wandb') if u.find_spec(n)])"
    assert run(python, home, "-c", look).strip() == "[]"
    refused = subprocess.run(
        [str(python), "-m", "completep", "study", "lr-transfer", "--engine", "ray", "--set", "depth=2"],
        cwd=home, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "completep[ray]" in refused.stderr
