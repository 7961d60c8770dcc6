"""What the commands cost on large inputs: thousands of finished runs, a large CSV, a deep model.

Each command runs as a process of its own, with one thread, and must end well. Its time is CPU time (user and system),
and the peak is its resident memory. `at rest` is the time of the same command on almost no input: imports of torch,
scipy, altair and polars, and the start of the engine that draws pictures.

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
        "ended = subprocess.run(sys.argv[1:], check=False, stdout=subprocess.DEVNULL).returncode\n"
        "assert ended in (0, 1, 3), ended\n"  # a verdict is a good end, an error is not
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)"
    )
    command = [sys.executable, "-c", code, sys.executable, "-m", "completep", *words]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=one_thread).stdout
    seconds, memory = map(float, printed.split())
    return seconds, memory


def write_sweep(path: Path, seeds: int) -> int:
    """A CSV of a sweep; how many rows it has."""
    rng = random.Random(0)
    lines = [
        f"{rules},64,{depth},{2.0**e},{seed},{2 + 0.01 * e * e + rng.random() / 100}"
        for seed in range(seeds)
        for rules in ("sp", "mup", "completep")
        for depth in (2, 4, 8, 16)
        for e in range(-5, 5)
    ]
    path.write_text("rules,width,depth,lr,seed,loss\n" + "\n".join(lines) + "\n")
    return len(lines)


def commands(out: Path, seeds: int, depth: int) -> dict[str, tuple[str, ...]]:
    """Every command on one size of input."""
    words = ("--set", *axes(seeds), "--out", str(out))
    sizes = ("--args", "width=64", f"depth={depth}", "--base", "width=64", "depth=2")
    return {
        "study status": ("study", "status", "--out", str(out)),
        "study --dry-run": ("study", "lr-transfer", "--dry-run", *words, "--json"),
        "report": ("report", "lr-transfer", *words),
        "check transfer": ("check", "transfer", str(out / "runs.csv"), "--out", str(out / "checks")),
        "explain, 400 layers": ("explain", "examples/own_model.py:model", *sizes),
    }


def axes(seeds: int) -> list[str]:
    return [f"seed={','.join(map(str, range(seeds)))}", "base_lr=2^-6", "base_std=0.1"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        # The base's runs are shared by all parameterizations, so that there are somewhat fewer runs than points.
        many, few = RUNS // 7 // 7, 2
        fill(Store(small / "store"), axes(few))
        runs = fill(Store(large / "store"), axes(many))
        write_sweep(small / "runs.csv", few)
        rows = write_sweep(large / "runs.csv", ROWS // 3 // 4 // 10)
        table = []
        little = commands(small, few, 4)
        for name, command in commands(large, many, 400).items():
            measured(*little[name])  # compiles modules and fills caches
            rest, _ = measured(*little[name])
            seconds, memory = measured(*command)
            wanted, most = WANTED[name]
            met = seconds <= wanted and (most is None or memory <= most)
            row = {"command": name, "seconds": round(seconds, 2), "at rest": round(rest, 2), "MB": round(memory)}
            row |= {"wanted": wanted, "wanted MB": most, "met": met}
            table.append(row)
            print(row, flush=True)
    content = {"date": date.today().isoformat(), "runs": runs, "rows": rows, "table": table}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
