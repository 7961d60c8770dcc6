"""The scripts of docs/tune.md: each runs by its command, at toy size, and its loss is found where the page says."""

import json
import re
from pathlib import Path

import pytest

import completep as cp
from completep.config import Shape
from completep.tuning.reading import Source
from completep.tuning.scripts import find_scripts
from completep.tuning.tasks import Command, Setting
from tests.tuning.commands import carry_out

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tune.md").read_text()
PLAIN = "--width {width} --depth {depth} --lr {lr} --seed {seed} --out {folder}"
SHORT = {"nanogpt": "max_iters=8 warmup_iters=2 eval_iters=2", "plain": "--steps 8", "trainer": "--steps 8"}
SHORT["lightning"] = "--steps 8"
SOURCES = {
    "nanogpt": r"output:val loss (\S+)",
    "plain": "{folder}/metrics.jsonl:val_loss",
    "trainer": "{folder}/trainer_state.json:log_history.eval_loss",
    "lightning": "{folder}/metrics.csv:val_loss",
}
NANO = "n_embd={width} n_layer={depth} learning_rate={lr} seed={seed} out_dir={folder}"
NEEDS = {"trainer": "transformers", "lightning": "lightning"}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SOURCES))
def test_the_script_runs_and_its_loss_is_read(tmp_path, name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="needs the extra `test`")
    words = NANO if name == "nanogpt" else PLAIN
    assert words in PAGE  # as the page says
    assert f"'{SOURCES[name]}'" in PAGE
    template = f"python examples/tune_{name}.py {words} {SHORT[name]}"
    scripts = find_scripts(template.split(), ROOT)
    setting = Setting(Shape(64, 4), Shape(64, 2), "completep", (("lr", 2**-6),), 0)
    task = Command(template, Source.parse(SOURCES[name]), setting, scripts, str(ROOT))
    result = carry_out(task, tmp_path / "run")
    assert result["status"] == "done"
    assert 2.0 < result["loss"] < 5.0  # of 256 bytes: ln 256 = 5.5 before training
    imported = {Path(file).name for file, _ in scripts}
    assert imported >= {f"tune_{name}.py", *({"own_model.py"} if name in ("plain", "lightning") else ())}


@pytest.mark.slow
def test_the_tutorial_at_toy_size(tmp_path, monkeypatch):
    """The page's own command, with few steps, one seed and a smaller proxy: from a script to a plan."""
    monkeypatch.chdir(ROOT)
    command = re.search(r"completep tune '(python examples/tune_plain.py [^']*)'", PAGE)[1]
    result = cp.tune(
        f"{command} --steps {{steps}}", loss=SOURCES["plain"], space={"lr": "2^-7..2^-5"}, proxies=[(64, 4)], seeds=1,
        constants={"steps": 6}, out=tmp_path,
    )  # fmt: skip
    assert result.verdict == "INCONCLUSIVE"  # one seed
    assert result.runs.filter(result.runs["depth"] == 4).height == 3
    assert result.runs["loss"].is_finite().all()
    result.write(tmp_path)
    assert json.loads((tmp_path / "tuned.json").read_text())["base"] == {"width": 64, "depth": 2}
    plan = cp.plan(width=128, depth=8, tuned=tmp_path / "tuned.json")
    assert plan.run.hyperparameters.lr == result.values["lr"]
