"""Speed: process settings for the CPU, compilation per block, and the peak FLOP/s of a device."""

import ctypes
import gc
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def tune_process() -> None:
    """Make steps on a CPU faster without changing results. Call it before the first tensor is made."""
    # Put large tensors on huge pages, which makes their allocation, repeated in every step, nearly free.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    keep_blocks()
    # ALiBi's weights on distant keys fall below 1e-38. Such denormals slow a CPU down: attention at 512 tokens by 1.7×.
    torch.set_flush_denormal(True)


def keep_blocks() -> None:
    """Make glibc keep freed blocks of up to 32 MB, since every step frees and allocates the same blocks."""
    if sys.platform != "linux":
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
    except (OSError, AttributeError):  # another libc: only slower
        return


@contextmanager
def settled_objects() -> Iterator[None]:
    """Leave all objects that exist now out of garbage collections, which would look at them again every few steps."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def compile_blocks(model: nn.Module, tell: Callable[[str], None]) -> None:
    """Compile per block: blocks share their code, so the time does not grow with depth. Eager without a compiler."""
    if next(model.parameters()).device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        tell("no C++ compiler found: training without compilation")
        return
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(dynamic=False)


def total_memory() -> float:
    """Bytes of this machine, with swap; infinite where that cannot be read, so that nothing is refused."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return sum(float(lines[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal"))
    except (OSError, KeyError, ValueError):
        return float("inf")


def measure_peak(device: torch.device, size: int = 768) -> float:
    """FLOP/s of a float32 matrix product, best of five. Utilisation is a share of this."""
    a = torch.randn(size, size, device=device)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
