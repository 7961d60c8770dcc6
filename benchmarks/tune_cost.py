"""What the engine adds to a run of a script, and how long the status of many runs takes.

python benchmarks/tune_cost.py
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from completep.config import Shape
from completep.sweep.engine import Engine
from completep.sweep.local import Local
from completep.sweep.store import Store
from completep.tuning.reading import Source
from completep.tuning.record import Known, all_counts
from completep.tuning.tasks import Command, Setting

RUNS, MANY = 20, 2000
SCRIPT = "import sys, pathlib; pathlib.Path(sys.argv[1], 'm.json').write_text('{\"loss\": ' + sys.argv[2] + '}')"


def run(folder: Path, seed: int) -> Command:
    setting = Setting(Shape(64, 2), Shape(64, 2), "completep", (("lr", 1.0),), seed)
    return Command("python script.py {folder} {seed}", Source.parse("{folder}/m.json:loss"), setting, (), str(folder))


def seconds_per_run(folder: Path) -> tuple[float, float]:
    """(of the script alone, of the engine with it), one at a time."""
    (folder / "script.py").write_text(SCRIPT)
    began = time.monotonic()
    for seed in range(RUNS):
        subprocess.run([sys.executable, "script.py", str(folder), str(seed)], cwd=folder, check=True)
    alone = (time.monotonic() - began) / RUNS
    engine = Engine(Store(folder / "store"), Local(1))
    engine.run([run(folder, seed) for seed in range(2)])  # starts the server of processes
    began = time.monotonic()
    engine.run([run(folder, seed) for seed in range(2, RUNS + 2)])
    return alone, (time.monotonic() - began) / RUNS


def seconds_of_status(folder: Path) -> tuple[float, float]:
    """(the first look at many results, the next)."""
    store = Store(folder / "many")
    store.open()
    names = [f"{i:012x}" for i in range(MANY)]
    for name in names:
        (store.root / name).mkdir()
        (store.root / name / "result.json").write_text(json.dumps({"status": "done", "loss": 1.0, "seconds": 1.0}))
    (folder / "tunings").mkdir()
    (folder / "tunings" / "x.json").write_text(json.dumps({"title": "x", "versions": [{"scripts": [], "runs": names}]}))
    times = []
    for _ in range(2):
        began = time.monotonic()
        assert all_counts(folder, store)[0][1].done == MANY
        times.append(time.monotonic() - began)
        store.write_index([Known(name) for name in names])
    return times[0], times[1]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        alone, engine = seconds_per_run(Path(scratch))
        first, again = seconds_of_status(Path(scratch))
    print(f"a script that takes {alone:.3f} s: the engine adds {engine - alone:.3f} s per run")
    print(f"status of {MANY} finished runs: {first:.2f} s at first, {again:.2f} s with the index")


if __name__ == "__main__":
    main()
