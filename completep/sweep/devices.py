"""The GPUs and the memory of this machine, and torchrun for a run over several processes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from completep.errors import UserError
from completep.sweep.child import passing_on

GPU_FILES = ("nvidiactl", "nvhost-ctrl", "nvgpu", "nvmap", "kfd", "dxg")  # a machine with a GPU has one of these


def devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if sys.platform == "linux" and not any(Path("/dev", name).exists() for name in GPU_FILES):
        return []  # without importing torch, which takes seconds
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def device_groups(ranks: int) -> list[list[str]]:
    """The GPUs, in groups of `ranks` for one run each; empty if there are none."""
    available = devices()
    if available and len(available) < ranks:
        raise UserError(
            f"ranks={ranks}, but there are {len(available)} GPUs", fix=f"use ranks={len(available)} or fewer"
        )
    return [available[i : i + ranks] for i in range(0, len(available) - ranks + 1, ranks)]


def device_count() -> int:
    """How many runs fit at a time: GPUs where there are any, otherwise cores."""
    return len(devices()) or os.cpu_count() or 1


def available_memory() -> float:
    """Free bytes on this machine; infinite if that is unknown, so nothing is limited."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return float("inf")


def torchrun(module: Sequence[str], ranks: int, lock: int) -> None:
    """Run a module over several processes of this machine, one per GPU where there are any, until it ends.

    torchrun inherits the lock, so the task stays locked if only this process is killed. SIGTERM and SIGINT are passed
    on: the ranks save their checkpoint and stop.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    started: list[subprocess.Popen[bytes]] = []

    def stop() -> None:
        for process in started:
            process.terminate()

    with passing_on(stop) as signals:
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen([*launcher, "-m", *module], env=one_thread, pass_fds=[lock]))
        if signals:  # the signal came before the process was in the list
            stop()
        started[0].wait()
