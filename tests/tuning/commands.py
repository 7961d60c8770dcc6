"""Commands to tune and to run, and recorded grids, for several tests."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import completep as cp
from completep.config import Shape
from completep.tuning.reading import Source
from completep.tuning.scripts import find_scripts
from completep.tuning.tasks import Command, Setting

BOWL = Path(__file__).parent / "bowl.py"
WORDS = "--width {width} --depth {depth} --lr {lr} --seed {seed} --out {folder}"
LOSS = "{folder}/metrics.jsonl:val_loss"
SPACE = {"lr": "2^-9..2^-5"}
WRITE = "pathlib.Path(folder, 'm.json').write_text(json.dumps({'loss': %s}))\n"
SETTING = Setting(Shape(64, 2), Shape(64, 2), "completep", (("lr", 0.25),), 0)
GRID = Path(__file__).parent / "grid.csv"  # lr × std × weight decay of the decoder, 32 × 2, 80 steps, two seeds
# lr × std × (1 - beta2) of the nanoGPT-style script, 32 × 2, 80 steps, two seeds. Nothing was chosen by it.
HELD_OUT = Path(__file__).parent / "held_out.csv"


def bowl(more=""):
    return f"python {shlex.quote(str(BOWL))} {WORDS} {more}"


def tuned(tmp_path, more="", **changes):
    settings = {"space": SPACE, "loss": LOSS, "base": (64, 2), "proxies": [(64, 8)], "out": tmp_path, **changes}
    return cp.tune(bowl(more), **settings)


def script(tmp_path, code):
    path = tmp_path / "script.py"
    path.write_text("import json, pathlib, sys\nlr, seed, depth, folder = sys.argv[1:]\n" + code)
    return f"python {path} {{lr}} {{seed}} {{depth}} {{folder}}"


def command(tmp_path, code, words="{folder} {lr}", **changes):
    """A run of a Python script with this code."""
    script = tmp_path / "script.py"
    script.write_text(code)
    own = Command(f"python script.py {words}", Source.parse("{folder}/m.json:loss"), SETTING, (), str(tmp_path))
    return replace(own, **{"scripts": find_scripts(["python", "script.py"], tmp_path), **changes})


def carry_out(task, folder):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        task.carry_out(folder, lock.fileno())
    result = folder / "result.json"
    return json.loads(result.read_text()) if result.exists() else None
