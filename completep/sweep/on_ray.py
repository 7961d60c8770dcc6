"""Backend: a Ray cluster whose nodes share the store. Ray places and restarts tasks; the store does each one once.

Without an address, a cluster is started on this machine, and no other machine can reach it. If a node dies, its tasks
continue elsewhere from their last checkpoint.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType

from completep.errors import UserError
from completep.files import append
from completep.sweep.engine import Ended, attempt
from completep.sweep.store import Store
from completep.sweep.task import Task

GRACE = 60  # seconds that tasks have to save when they are stopped
LOSSES = 5  # how often a task may lose its node before it counts as failed


@dataclass
class OnRay:
    """Tasks on a cluster, `workers` at a time; by default as many as the cluster has room for."""

    address: str | None = None
    workers: int | None = None
    running: dict[object, Task] = field(default_factory=dict)  # by Ray's reference

    def open(self, store: Store, tasks: Sequence[Task]) -> None:
        if self.workers is not None and self.workers < 1:
            raise UserError(f"workers={self.workers}: must be at least 1", fix="leave workers out for the default")
        self.store, self.room = Store(store.root.absolute()), self.workers or len(tasks)
        self.ray = join_cluster(self.address)
        refuse_too_large(self.ray, tasks)

    def has_room(self, task: Task) -> bool:
        return len(self.running) < self.room

    def start(self, task: Task) -> None:
        gpus = task.ranks if self.ray.cluster_resources().get("GPU") else 0
        # Ray repeats a task whose node died. A task that fails by itself is judged by the engine.
        remote = self.ray.remote(num_cpus=task.ranks, num_gpus=gpus, memory=int(task.memory()), max_retries=LOSSES)(
            on_node
        )
        self.running[remote.options(name=f"completep {task.id}").remote(self.store, task)] = task

    def wait(self, seconds: float) -> list[Ended]:
        ended, _ = self.ray.wait(list(self.running), num_returns=1, timeout=seconds)
        return [Ended(self.running.pop(reference), *self._outcome(reference)) for reference in ended]

    def _outcome(self, reference: object) -> tuple[bool, str]:
        """(whether another process has the task, the last lines of an error)."""
        try:
            return self.ray.get(reference) == "elsewhere", ""
        except self.ray.exceptions.RayError as error:
            return False, "\n".join(str(error).splitlines()[-8:])

    def stop(self) -> None:
        for reference in self.running:
            self.ray.cancel(reference)  # an interrupt in the worker: a training run saves its checkpoint
        if self.running:
            self.ray.wait(list(self.running), num_returns=len(self.running), timeout=GRACE)
        self.running.clear()

    def close(self) -> None:
        """There is nothing to release."""


def refuse_too_large(ray: ModuleType, tasks: Sequence[Task]) -> None:
    """Ray would wait forever for a node that is large enough."""
    largest = max(tasks, key=lambda task: task.memory())
    wanted = {"memory": largest.memory(), "CPU": largest.ranks}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
        raise UserError(
            f"no node has {largest.ranks} CPUs and {wanted['memory'] / 1e9:.0f} GB for: {largest.describe()}",
            fix="use a smaller micro_batch, which needs less memory, or add a larger node",
        )


def on_node(store: Store, task: Task) -> str:
    """Do one task on a node."""
    if not store.root.exists():
        raise UserError(f"this node does not see {store.root}", fix="use a folder that all nodes of the cluster share")
    import ray

    folder = store.folder(task)
    folder.mkdir(parents=True, exist_ok=True)
    with os.fdopen(append(folder / "log.txt"), "w") as log:
        log.write(f"on node {ray.get_runtime_context().get_node_id()}\n")
    return attempt(store, task)


def join_cluster(address: str | None) -> ModuleType:
    try:
        import ray
    except ImportError as error:
        raise UserError("Ray is not installed", fix="pip install 'completep[ray]'") from error
    if not ray.is_initialized():
        # Ray lowers the priority of its workers, so runs would stall if a node has other work.
        os.environ.setdefault("RAY_worker_niceness", "0")
        if address is not None and address != "auto":
            require_answer(address)
        given = address is not None or "RAY_ADDRESS" in os.environ
        dashboard = None if given else False
        try:
            with own_sigterm(), nullcontext() if given else on_loopback():
                place = address if given else "local"  # None would join any cluster that runs on this machine
                ray.init(place, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=dashboard)
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise UserError(
                f"no Ray cluster at {address}: {first}", fix="start one (ray start --head), and give its address"
            ) from error
    module: ModuleType = ray
    return module


@contextmanager
def on_loopback() -> Iterator[None]:
    """Let a cluster that is started here listen only on 127.0.0.1.

    Ray has no argument for this: it replaces a loopback address by an outer one. But there is a setting that turns off
    clusters of several machines, as on macOS and Windows, and then Ray listens only on 127.0.0.1.
    """
    from ray._private import ray_constants

    variable, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    if before and variable in os.environ:  # whoever set it wants a cluster of several machines
        yield
        return
    os.environ[variable], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        del os.environ[variable]
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep our handler, which lets tasks save. Ray would install one that ends the process at once."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def require_answer(address: str) -> None:
    """Refuse an address that nobody listens on. Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=10):
            pass
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"no Ray cluster at {address}: {error}",
            fix="start one (ray start --head), and give its address as HOST:PORT",
        ) from error
