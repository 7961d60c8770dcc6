"""Runs on a Ray cluster whose nodes share the store's folder. Ray places and restarts; the store keeps every run single.

Without an address a cluster is started on this machine. A run whose node dies is taken up elsewhere, from its last checkpoint.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from completep.config import Run
from completep.errors import UserError
from completep.study.engine import HOW, POLL, Attempts, Event, carry_out, needed, undone
from completep.study.store import Store
from completep.train.loop import How

GRACE = 60  # seconds that runs have to save when they are stopped
LOSSES = 5  # how often a run may lose its node before it counts as failed


@dataclass
class OnRay:
    """Runs on a cluster."""

    store: Store
    address: str | None = None
    ranks: int = 1  # processes of one run, all on one node
    workers: int | None = None  # runs at a time; None is as many as the cluster has room for
    how: How = HOW
    on_event: Callable[[Event], None] = lambda event: None

    def run(self, runs: Sequence[Run]) -> list[Run]:
        """Do what is not done yet, the largest first; the runs that failed."""
        todo = undone(self.store, runs)
        if not todo:
            return []
        ray = join_cluster(self.address)
        self._see_that_they_fit(ray, todo)
        room = self.workers or len(todo)
        attempts = Attempts(self.store)
        failed: list[Run] = []
        running: dict[Any, Run] = {}
        try:
            while todo or running:
                while todo and len(running) < room:
                    run = todo.pop(0)
                    running[self._submit(ray, run)] = run
                    self.on_event(Event("started", run))
                ended, _ = ray.wait(list(running), num_returns=1, timeout=POLL)
                for task in ended:
                    run = running.pop(task)
                    event = attempts.ended(run, *outcome(ray, task))
                    if event.kind in ("retry", "elsewhere"):
                        todo.append(run)
                        time.sleep(POLL if event.kind == "elsewhere" else 0)
                    elif event.kind == "failed":
                        failed.append(run)
                    self.on_event(event)
        except BaseException:
            for task in running:
                ray.cancel(task)  # an interrupt in the worker: train() saves its checkpoint
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=GRACE)
            raise
        return failed

    def _see_that_they_fit(self, ray: Any, runs: Sequence[Run]) -> None:
        """Ray would wait for ever for a node that is large enough."""
        largest = max(runs, key=lambda run: needed(run, self.how, self.ranks))
        wanted = {"memory": needed(largest, self.how, self.ranks), "CPU": self.ranks}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
            size = f"{largest.model.width} × {largest.model.depth}"
            raise UserError(
                f"no node has {self.ranks} CPUs and {wanted['memory'] / 1e9:.0f} GB for the run of {size}",
                fix="--micro-batch lowers what a run needs; or add a larger node",
            )

    def _submit(self, ray: Any, run: Run) -> Any:
        gpus = self.ranks if ray.cluster_resources().get("GPU") else 0
        # Ray takes the run up again where a node dies; what fails on its own is ours to judge.
        remote = ray.remote(
            num_cpus=self.ranks, num_gpus=gpus, memory=int(needed(run, self.how, self.ranks)), max_retries=LOSSES
        )(on_node)
        root = Store(self.store.root.absolute())
        return remote.options(name=f"completep {self.store.folder(run).name}").remote(root, run, self.how, self.ranks)


def outcome(ray: Any, task: Any) -> tuple[bool, str]:
    """(another process has the run, what went wrong)."""
    try:
        return ray.get(task) == "elsewhere", ""
    except ray.exceptions.RayError as error:
        return False, "\n".join(str(error).splitlines()[-8:])


def on_node(store: Store, run: Run, how: How, ranks: int) -> str:
    """What a node does with one run."""
    if not store.root.exists():
        raise UserError(f"this node does not see {store.root}", fix="use an --out that all nodes of the cluster share")
    import ray

    folder = store.folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a") as log:
        log.write(f"on node {ray.get_runtime_context().get_node_id()}\n")
    return carry_out(store, run, how, ranks)


def join_cluster(address: str | None) -> Any:
    try:
        import ray
    except ImportError as error:
        raise UserError("Ray is not installed", fix="pip install 'completep[ray]'") from error
    if not ray.is_initialized():
        # Ray makes its workers polite, so that beside any other work on a node a run would stand still.
        os.environ.setdefault("RAY_worker_niceness", "0")
        if address is not None and address != "auto":
            see_that_it_answers(address)
        try:
            quiet: dict[str, Any] = {"include_dashboard": False} if address is None else {}
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise UserError(f"no Ray cluster at {address}: {first}", fix="ray start --head, and its address") from error
    return ray


def see_that_it_answers(address: str) -> None:
    """Ray itself would try for minutes before it says that nobody is there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=10):
            pass
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"no Ray cluster at {address}: {error}", fix="ray start --head, and its address as HOST:PORT"
        ) from error
