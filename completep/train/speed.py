"""What makes a step fast and is no business of the loop's: the allocator, block-wise compilation, the device's peak."""

import ctypes
import os
import shutil
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def tune_process() -> None:
    """What a step on a CPU runs faster with, and no result could show. To be called before the first tensor is made."""
    # Large tensors on huge pages: asking for one, as every step does, then costs next to nothing.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    keep_blocks()
    # ALiBi's weights on distant keys fall below 1e-38, where a CPU computes many times slower: attention at 512 tokens 1.7×.
    torch.set_flush_denormal(True)


def keep_blocks() -> None:
    """Tell glibc to keep freed memory up to 32 MB a block: a step frees and asks for the same blocks over and over."""
    if sys.platform != "linux":
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(M_TRIM_THRESHOLD, -1)
    except (OSError, AttributeError):  # another libc; nothing is lost but speed
        return


def compile_blocks(model: nn.Module, tell: Callable[[str], None]) -> None:
    """Block by block: the cost does not grow with depth, since blocks share their code. Eager where nothing can compile."""
    if next(model.parameters()).device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        tell("no C++ compiler found: training uncompiled")
        return
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(dynamic=False)


def measure_peak(device: torch.device, size: int = 768) -> float:
    """FLOP/s of a plain float32 matrix product, the best of a few: what utilisation is measured against."""
    a = torch.randn(size, size, device=device)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        (a @ a).sum().item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
