"""The local engine: a process per run, one thread each, as many as there are cores; every run exactly once.

A run that dies is tried once more and then reported with its last lines; the others go on. Runs that another process is at
work on are waited for. Ctrl-C lets every run save its checkpoint and stops; the same call later goes on from there.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from completep.compute import flops
from completep.compute.memory import memory
from completep.config import Run
from completep.study.store import Store, canonical
from completep.train.loop import How, open_corpus, train

ELSEWHERE, STOPPED = 3, 4  # exit codes of a run's process: another process has it; it was asked to stop
TRIES = 2
POLL = 0.5  # seconds
SHARE = 0.8  # of the memory that is free may be planned for
INTERPRETER = 0.4e9  # bytes that a process takes before its model
Kind = Literal["started", "done", "diverged", "failed", "retry", "elsewhere"]


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
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    how: How = How(checkpoint_every=500, keep=1, peak=1e11)  # noqa: RUF009  (frozen)
    on_event: Callable[[Event], None] = lambda event: None

    def run(self, runs: Sequence[Run]) -> list[Run]:
        """Do what is not done yet, the largest first; the runs that failed."""
        distinct = {self.store.folder(r): canonical(r) for r in map(with_data, runs)}
        todo = sorted((r for r in distinct.values() if self.store.result(r) is None), key=cost, reverse=True)
        tries: dict[Path, int] = {}
        failed: list[Run] = []
        running: dict[BaseProcess, Run] = {}
        context = multiprocessing.get_context("forkserver")  # forks of a server that has torch imported start at once
        context.set_forkserver_preload(["completep.study.engine"])
        free = available_memory()
        try:
            while todo or running:
                while todo and len(running) < self.workers and self._fits(todo[0], running.values(), free):
                    run = todo.pop(0)
                    process: BaseProcess = context.Process(target=work, args=(self.store, run, self.how))
                    process.start()
                    running[process] = run
                    self.on_event(Event("started", run))
                for process in [p for p in running if p.sentinel in wait([p.sentinel for p in running], POLL)]:
                    run = running.pop(process)
                    process.join()
                    event = self._ended(run, process.exitcode or 0, tries)
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
        planned = [needed(r) for r in running]
        return not planned or sum(planned) + needed(run) <= SHARE * free

    def _ended(self, run: Run, code: int, tries: dict[Path, int]) -> Event:
        folder = self.store.folder(run)
        result = self.store.result(run)
        if result is not None:
            return Event(result["status"], run)
        if code == ELSEWHERE:
            return Event("elsewhere", run)
        tries[folder] = tries.get(folder, 0) + 1
        return Event("retry" if tries[folder] < TRIES else "failed", run, last_lines(folder / "log.txt"))


def work(store: Store, run: Run, how: How) -> None:
    """The process of one run: quiet, alone on its core, holding the run's lock."""
    import torch

    torch.set_num_threads(1)
    folder = store.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with store.holding(run) as mine:
        if not mine:
            sys.exit(ELSEWHERE)
        result = train(run, folder, how)
    sys.exit(STOPPED if result.status == "stopped" else 0)


def with_data(run: Run) -> Run:
    """The run with its data's hash in it: other data is another run."""
    return run if run.data.sha256 else replace(run, data=replace(run.data, sha256=open_corpus(run.data).sha256))


def cost(run: Run) -> float:
    return flops.training_flops(run.model, run.sequence, run.tokens)


def needed(run: Run) -> float:
    return INTERPRETER + memory(run.model, sequence=run.sequence, micro_batch=run.batch, ranks=1).per_rank


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
