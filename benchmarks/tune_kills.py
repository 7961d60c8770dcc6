"""The nanoGPT-style example tuned and verified in one command, killed with SIGKILL ten times on the way.

python benchmarks/tune_kills.py

Then the same once more without kills: the answer must be the same, and no finished run may be done twice. Takes a few
minutes on two quiet cores.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
KILLS = 10
TEMPLATE = "n_embd={width} n_layer={depth} learning_rate={lr} seed={seed} out_dir={folder}"
WORDS = [
    "tune", f"python {ROOT / 'examples' / 'tune_nanogpt.py'} {TEMPLATE}", "--loss", r"output:val loss (\S+)",
    "--space", "lr=2^-9..2^-4", "--proxies", "64x8", "--json",
]  # fmt: skip


def command(out: Path) -> list[str]:
    return [sys.executable, "-m", "completep", *WORDS, "--out", str(out)]


def results(store: Path) -> dict[Path, tuple[int, bytes]]:
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in store.glob("*/result.json")}


def at_work(store: Path) -> bool:
    return any(not (p.parent / "result.json").exists() for p in store.glob("*/work"))


def killed_once(out: Path, dice: random.Random) -> None:
    """Start it, let it do up to two runs and begin another, and kill all of its processes."""
    store, goal = out / "store", len(results(out / "store")) + dice.randrange(3)
    process = subprocess.Popen(
        command(out), cwd=out.parent, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len(results(store)) < goal or not at_work(store):
        if process.poll() is not None:
            raise SystemExit(f"it ended before it was killed, with exit code {process.returncode}")
        time.sleep(0.1)
    time.sleep(dice.uniform(0, 8))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answer(out: Path) -> dict[str, object]:
    ended = subprocess.run(command(out), cwd=out.parent, capture_output=True, text=True, check=False)
    if not ended.stdout:
        raise SystemExit(ended.stderr)
    found = json.loads(ended.stdout)
    return {key: value for key, value in found.items() if key != "files"}


def main() -> None:
    dice = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        stormy, calm = Path(scratch, "stormy"), Path(scratch, "calm")
        for kill in range(KILLS):
            before = results(stormy / "store")
            killed_once(stormy, dice)
            assert before.items() <= results(stormy / "store").items(), "a finished run was repeated"
            print(f"killed {kill + 1} times, {len(results(stormy / 'store'))} runs done", flush=True)
        before = results(stormy / "store")
        found = answer(stormy)
        assert before.items() <= results(stormy / "store").items(), "a finished run was repeated"
        assert len(results(stormy / "store")) == found["runs"]
        print(
            json.dumps({key: found[key] for key in ("verdict", "values", "runs", "why", "notes")}, indent=2), flush=True
        )
        assert answer(calm) == found, "another answer without kills"
    print("the same without kills")


if __name__ == "__main__":
    main()
