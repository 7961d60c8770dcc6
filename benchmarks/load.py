"""What the commands cost on large inputs: thousands of finished runs, a large CSV, a deep model.

Each command runs as a process of its own. Its time is CPU time (user and system), which other work on the machine
changes little; the peak is its resident memory.

    python -m benchmarks.load
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from completep.studies.run import study_at
from completep.sweep.store import Store
from completep.train.folder import claim, write_result
from completep.train.records import Result

RESULTS = Path(__file__).parent / "results" / "load.json"
RUNS, ROWS = 5000, 200_000
WANTED = {  # seconds, MB
    "study status": (1.0, None), "study --dry-run": (1.0, None), "report": (4.0, 300),
    "check transfer": (3.0, None), "explain, 400 layers": (3.0, None),
}  # fmt: skip


def fill(store: Store, words: list[str]) -> int:
    """A store with a finished run at every point."""
    axes = dict(word.split("=") for word in words)
    experiment = study_at("lr-transfer", "laptop", {k: v.split(",") for k, v in axes.items()}, None, None)
    tasks = {trial.task.id: trial.task for trial in experiment.study.trials(experiment)}
    rng = random.Random(0)
    store.open()
    for task in tasks.values():
        folder = store.folder(task)
        folder.mkdir()
        claim(folder, task.run)
        loss = 2 + rng.random()
        steps = task.run.schedule.steps
        result = Result("done", steps, loss, loss, task.run.tokens, 1.0, 1e5, task.run.data.sha256, task.id)
        write_result(folder, result)
    store.write_index(tasks.values())
    return len(tasks)


def measured(*words: str) -> tuple[float, float]:
    """(CPU seconds, MB) of a command."""
    code = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=False, stdout=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)"
    )
    command = [sys.executable, "-c", code, sys.executable, "-m", "completep", *words]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=one_thread).stdout
    seconds, memory = map(float, printed.split())
    return seconds, memory


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        # The base's runs are shared by all parameterizations, so that there are somewhat fewer runs than points.
        seeds = ",".join(map(str, range(RUNS // 7 // 7)))
        words = [f"seed={seeds}"]
        runs = fill(Store(out / "store"), words)
        csv = out / "runs.csv"
        rng = random.Random(0)
        lines = [
            f"{rules},64,{depth},{2.0**e},{seed},{2 + 0.01 * e * e + rng.random() / 100}"
            for seed in range(ROWS // 3 // 4 // 10)
            for rules in ("sp", "mup", "completep")
            for depth in (2, 4, 8, 16)
            for e in range(-5, 5)
        ]
        csv.write_text("rules,width,depth,lr,seed,loss\n" + "\n".join(lines) + "\n")
        sizes = ("--args", "width=64", "depth=400", "--base", "width=64", "depth=2")
        commands = {
            "study status": ("study", "status", "--out", str(out)),
            "study --dry-run": ("study", "lr-transfer", "--dry-run", "--set", *words, "--out", str(out), "--json"),
            "report": ("report", "lr-transfer", "--set", *words, "--out", str(out)),
            "check transfer": ("check", "transfer", str(csv), "--out", str(out / "checks")),
            "explain, 400 layers": ("explain", "examples/own_model.py:model", *sizes),
        }
        table = []
        for name, command in commands.items():
            measured(*command)  # compiles modules and fills caches
            seconds, memory = measured(*command)
            wanted, most = WANTED[name]
            met = seconds <= wanted and (most is None or memory <= most)
            row = {"command": name, "seconds": round(seconds, 2), "MB": round(memory), "wanted": wanted, "met": met}
            table.append(row)
            print(row, flush=True)
    content = {"date": date.today().isoformat(), "runs": runs, "rows": len(lines), "table": table}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
