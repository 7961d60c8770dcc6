"""The path of a new user, from an empty directory: install with an extra, train a Llama with Trainer, fold, use it without this package.

The environment is new and holds what the extra brings and nothing else: each package that it asks for, and those that they ask for,
is linked in from where the tests run, and pip checks the sum. So nothing is downloaded, and what an extra forgets to name is missing.
"""

import importlib.metadata as metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def brought_by(requirement):
    """The names of all distributions that pip would install for a requirement."""
    from packaging.requirements import Requirement

    found, left = set(), [(Requirement(requirement), "")]
    seen = set()
    while left:
        wanted, extra = left.pop()
        if (wanted.marker and not wanted.marker.evaluate({"extra": extra})) or (str(wanted), extra) in seen:
            continue
        seen.add((str(wanted), extra))
        found.add(wanted.name)
        for text in metadata.requires(wanted.name) or []:
            left += [(Requirement(text), e) for e in ("", *wanted.extras)]
    return found


def new_environment(folder, requirement):
    """A fresh venv with all that the requirement brings, except this package itself."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for name in brought_by(requirement) - {"completep"}:
        distribution = metadata.distribution(name)
        tops = {f.parts[0] for f in distribution.files or [] if f.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """An empty directory with a new environment in it."""
    pytest.importorskip("hatchling", reason="needs the extra `test`")
    pytest.importorskip("accelerate", reason="needs the extra `test`")
    folder = tmp_path_factory.mktemp("home")
    python = new_environment(folder / "venv", "completep[hf]")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    wheel = next((folder / "dist").glob("*.whl"))
    run(python, folder, "-m", "pip", "install", "--quiet", "--no-index", f"completep[hf] @ {wheel.as_uri()}")
    return folder


def run(python, folder, *words):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [str(python), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


def test_from_install_to_generated_text(home):
    python = home / "venv" / "bin" / "python"
    assert run(home / "venv" / "bin" / "completep", home, "--version").startswith("completep 0.")
    shutil.copy(ROOT / "examples" / "hf_trainer.py", home)
    said = run(python, home, "hf_trainer.py", "trained")
    first, last = map(float, re.search(r"loss ([\d.]+) → ([\d.]+)", said).groups())
    assert last < first - 1

    use = (
        "import sys; sys.modules['completep'] = None\n"
        "import torch\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('trained')\n"
        "said = model.generate(torch.tensor([list(b'def ')]), max_new_tokens=16, do_sample=False, pad_token_id=0)\n"
        "print(type(model).__name__, repr(bytes(said[0].tolist()).decode(errors='replace')))"
    )
    name, text = run(python, home, "-c", use).split(maxsplit=1)
    assert name == "LlamaForCausalLM"
    assert text.strip() in said


def test_the_environment_holds_nothing_else(home):
    """The negative control: what the extra does not bring is not there, and the tool names what is missing."""
    python = home / "venv" / "bin" / "python"
    look = "import importlib.util as u; print([n for n in ('ray', 'lm_eval', 'pytest', 'wandb') if u.find_spec(n)])"
    assert run(python, home, "-c", look).strip() == "[]"
    refused = subprocess.run(
        [str(python), "-m", "completep", "study", "lr-transfer", "--engine", "ray", "--set", "depth=2"],
        cwd=home, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "completep[ray]" in refused.stderr
