"""The engines' common ground, and the local one: a process per run, one thread each, as many as there are cores (or GPUs).

Every run is done exactly once. One that dies is tried once more and then reported with its last lines; the others go on. Runs that another
process is at work on are waited for. Ctrl-C lets every run save its checkpoint and stops; the same call later goes on from there.
"""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, Protocol

from completep.compute import flops
from completep.compute.memory import memory
from completep.config import Data, Run
from completep.errors import UserError
from completep.study.store import Store, canonical
from completep.train.loop import How, claim, open_corpus, train

ELSEWHERE, STOPPED = 3, 4  # exit codes of a run's process: another process has it; it was asked to stop
TRIES = 2
PRELOADED = (
    "cattrs",
    "safetensors.torch",
    "torch._dynamo",
)  # what every run imports sooner or later: a second each time
POLL = 0.5  # seconds
SHARE = 0.8  # of the memory that is free may be planned for
INTERPRETER = 0.4e9  # bytes that a process takes before its model
Kind = Literal["started", "done", "diverged", "failed", "retry", "elsewhere"]


# A known peak saves measuring it for every run; nobody reads the utilisation of thousands of small ones.
HOW = How(checkpoint_every=500, keep=1, peak=1e11)


class Engine(Protocol):
    """Somewhere to carry out runs."""

    store: Store

    def run(self, runs: Sequence[Run]) -> list[Run]:
        """Do what is not done yet; the runs that failed."""
        ...


@dataclass(frozen=True)
class Event:
    """Something happened to a run."""

    kind: Kind
    run: Run
    detail: str = ""  # the last lines of a run that failed


@dataclass
class Local:
    """Runs on this machine."""

    store: Store
    workers: int = field(default_factory=lambda: device_count())
    how: How = HOW
    ranks: int = 1  # processes of one run, started by torchrun
    on_event: Callable[[Event], None] = lambda event: None

    def run(self, runs: Sequence[Run]) -> list[Run]:
        """Do what is not done yet, the largest first; the runs that failed."""
        todo = undone(self.store, runs)
        attempts = Attempts(self.store)
        failed: list[Run] = []
        running: dict[BaseProcess, Run] = {}
        groups: list[str | None] = [",".join(group) for group in device_groups(self.ranks)]
        seats = groups[: self.workers] or [None] * self.workers
        taken: dict[BaseProcess, str | None] = {}
        context = multiprocessing.get_context("forkserver")  # forks of a server that has torch imported start at once
        context.set_forkserver_preload(["completep.study.engine", *PRELOADED])
        free = available_memory()
        try:
            while todo or running:
                while todo and seats and self._fits(todo[0], running.values(), free):
                    run, seat = todo.pop(0), seats.pop()
                    process: BaseProcess = context.Process(
                        target=work, args=(self.store, run, self.how, self.ranks, seat)
                    )
                    process.start()
                    running[process], taken[process] = run, seat
                    self.on_event(Event("started", run))
                ended = wait([process.sentinel for process in running], POLL)
                for process in [p for p in running if p.sentinel in ended]:
                    run = running.pop(process)
                    process.join()
                    seats.append(taken.pop(process))
                    log = self.store.folder(run) / "log.txt"
                    event = attempts.ended(run, process.exitcode == ELSEWHERE, last_lines(log))
                    if event.kind in ("retry", "elsewhere"):
                        todo.append(run)
                        time.sleep(POLL if event.kind == "elsewhere" else 0)
                    elif event.kind == "failed":
                        failed.append(run)
                    self.on_event(event)
        except BaseException:
            for process in running:
                process.terminate()  # train() saves its checkpoint on SIGTERM
            raise
        finally:
            for process in running:
                process.join()
        return failed

    def _fits(self, run: Run, running: Iterable[Run], free: float) -> bool:
        planned = [needed(r, self.how, self.ranks) for r in running]
        return not planned or sum(planned) + needed(run, self.how, self.ranks) <= SHARE * free


@dataclass
class Attempts:
    """How often each run was tried, and so what its end means."""

    store: Store
    tries: dict[Path, int] = field(default_factory=dict)

    def ended(self, run: Run, elsewhere: bool, detail: str) -> Event:
        result = self.store.result(run)
        if result is not None:
            return Event(result["status"], run)
        if elsewhere:
            return Event("elsewhere", run)
        folder = self.store.folder(run)
        self.tries[folder] = self.tries.get(folder, 0) + 1
        return Event("retry" if self.tries[folder] < TRIES else "failed", run, detail)


def work(store: Store, run: Run, how: How, ranks: int = 1, devices: str | None = None) -> None:
    """The process of one run: quiet, and alone on its core or GPUs."""
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    folder = store.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.exit({"done": 0, "elsewhere": ELSEWHERE, "stopped": STOPPED}[carry_out(store, run, how, ranks)])


def carry_out(store: Store, run: Run, how: How, ranks: int = 1) -> Literal["done", "elsewhere", "stopped"]:
    """Do one run in this process (or under torchrun), holding its lock. What the weights need not is cleared away at the end."""
    import torch

    torch.set_num_threads(1)
    folder = store.folder(run)
    with store.holding(run) as lock:
        if lock is None:
            return "elsewhere"
        if ranks > 1:
            claim(folder, run)
            torchrun(folder, how, ranks, lock)
        else:
            train(run, folder, how)
        if store.result(run) is None:
            return "stopped"
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return "done"


def torchrun(folder: Path, how: How, ranks: int, lock: int) -> None:
    """One run over several processes of this machine, one a GPU where there are any.

    torchrun inherits the lock, so that the run stays held should this process alone be killed.
    """
    options = ["--parallel", how.parallel if how.parallel != "none" else "ddp", "--precision", how.precision]
    options += ["--checkpoint-every", str(how.checkpoint_every), "--keep", str(how.keep)]
    options += ["--compile"] if how.compile else []
    options += ["--micro-batch", str(how.micro_batch)] if how.micro_batch else []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = ["-m", "completep", "train", str(folder / "run.json"), "--out", str(folder), *options]
    asked: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def stop(number: int, frame: object) -> None:
        asked.append(number)
        for process in started:
            process.terminate()  # torchrun passes it on to its ranks, which save

    old = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        started.append(
            subprocess.Popen([*launcher, *words], env=os.environ | {"OMP_NUM_THREADS": "1"}, pass_fds=[lock])
        )
        if asked:  # between the two lines above
            started[0].terminate()
        started[0].wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def device_groups(ranks: int) -> list[list[str]]:
    """The GPUs in groups of one run's size; none where there are no GPUs."""
    found = devices()
    if found and len(found) < ranks:
        raise UserError(f"a run over {ranks} GPUs, but there are {len(found)}", fix=f"--ranks {len(found)}")
    return [found[i : i + ranks] for i in range(0, len(found) - ranks + 1, ranks)]


def device_count() -> int:
    return len(devices()) or os.cpu_count() or 1


def undone(store: Store, runs: Sequence[Run]) -> list[Run]:
    """What is left to do, each once, the largest first: a long run that starts last would leave the others idle."""
    distinct = {store.folder(r): canonical(r) for r in map(with_data, runs)}
    return sorted((r for r in distinct.values() if store.result(r) is None), key=cost, reverse=True)


def with_data(run: Run) -> Run:
    """The run with its data's hash in it: other data is another run."""
    return run if run.data.sha256 else replace(run, data=replace(run.data, sha256=_sha256(run.data)))


@cache
def _sha256(data: Data) -> str:
    return open_corpus(data).sha256


def cost(run: Run) -> float:
    return flops.training_flops(run.model, run.sequence, run.tokens)


def needed(run: Run, how: How, ranks: int = 1) -> float:
    """Bytes of this machine's memory; on GPUs the model lies elsewhere."""
    if devices():
        return INTERPRETER * ranks
    micro = how.micro_batch or max(1, run.batch // ranks)
    return ranks * (INTERPRETER + memory(run.model, sequence=run.sequence, micro_batch=micro, ranks=1).per_rank)


def available_memory() -> float:
    """Bytes that can still be had on this machine; where that cannot be read, nothing is limited."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return float("inf")


def last_lines(path: Path, count: int = 8) -> str:
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:])
