"""kernels.c as autograd functions: attention, two to three times as fast as torch's for short sequences and small
heads, and relu², in one pass each way.

It is compiled once per machine and kept in your cache folder. Without a C compiler, or where it does not fit, the
decoder uses torch's own functions, which give the same numbers up to rounding.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from completep.errors import UserError
from completep.files import cache_folder, make_folder
from completep.model.gpt import GPT, alibi_slopes

FLAGS = ("-O3", "-march=native", "-fno-trapping-math", "-fno-math-errno", "-shared", "-fPIC")
MOST_TIME, ROWS = 128, 4  # as in kernels.c
HEAD_SIZES = (8, 16, 32)  # torch's kernel is as fast for larger ones
TOLERANCE = 1e-5


def fuse(model: GPT, sequence: int) -> bool:
    """Let the decoder use kernels.c in training, where it fits. Its gradients cannot be differentiated again."""
    parameters = list(model.parameters())
    if any(p.device.type != "cpu" or p.dtype != torch.float32 for p in parameters) or not available():
        return False
    c = model.config
    small = sequence <= MOST_TIME and sequence % ROWS == 0 and c.head_size in HEAD_SIZES
    attention = Attention(alibi_slopes(c.heads)) if small and c.positions == "alibi" and not c.qk_norm else None
    for block in model.blocks:
        block.attention.kernel = attention  # type: ignore[union-attr]
        block.mlp.kernel = relu2 if c.activation == "relu2" else None  # type: ignore[union-attr]
    return attention is not None


@dataclass(frozen=True)
class Attention:
    """Causal attention with ALiBi, from a projection [B, T, 3, H, D] to [B, T, H, D]."""

    slopes_H: Tensor

    def __call__(self, qkv: Tensor, scale: float) -> Tensor:
        out: Tensor = _Attention.apply(qkv.contiguous(), self.slopes_H, scale)  # type: ignore[no-untyped-call]
        return out


def relu2(x: Tensor) -> Tensor:
    out: Tensor = _Relu2.apply(x.contiguous())  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, slopes: Tensor, scale: float) -> Tensor:
        batch, time, _, heads, size = qkv.shape
        out = qkv.new_empty(batch, time, heads, size)
        _call("attention_forward", (qkv, slopes, out), (batch, time, heads, size), scale)
        ctx.save_for_backward(qkv, slopes)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        qkv, slopes = ctx.saved_tensors
        batch, time, _, heads, size = qkv.shape
        out = torch.empty_like(qkv)
        _call("attention_backward", (qkv, slopes, gradient.contiguous(), out), (batch, time, heads, size), ctx.scale)
        return out, None, None


class _Relu2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        _call("relu2_forward", (x, out), (x.numel(),))
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        _call("relu2_backward", (x, gradient.contiguous(), out), (x.numel(),))
        return out


def _call(name: str, tensors: tuple[Tensor, ...], sizes: tuple[int, ...], *factors: float) -> None:
    library = load()
    assert library is not None
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    getattr(library, name)(*pointers, *map(ctypes.c_long, sizes), *map(ctypes.c_float, factors))


@cache
def load() -> ctypes.CDLL | None:
    """The compiled library; None if it cannot be made here, or gives other numbers than torch."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or sys.platform == "win32":
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, UserError, subprocess.SubprocessError):  # for instance, no cache that can be written
        return None


def available() -> bool:
    """Is the library there, and does it agree with torch on this machine?"""
    return load() is not None and _agrees()


def _compiled(compiler: str) -> Path:
    """The library's file, made if it is not there. Its name differs between sources, compilers and processors."""
    with resources.as_file(resources.files("completep.train") / "kernels.c") as source:
        made_of = (source.read_bytes(), compiler, FLAGS, platform.machine(), _processor())
        name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
        path = cache_folder() / "kernels" / f"kernels-{name}.so"
        if not path.exists():
            make_folder(path.parent)
            part = path.with_name(f".{path.name}.{os.getpid()}.part")
            try:
                subprocess.run([compiler, *FLAGS, "-o", str(part), str(source)], check=True, capture_output=True)
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
    return path


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


@cache
def _agrees() -> bool:
    """One small forward and backward pass against torch."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 12, 3, 3, 8, generator=generator, requires_grad=True)
    slopes, weight = torch.tensor([0.5, 0.1, 0.0]), torch.randn(2, 12, 3, 8, generator=generator)
    distance = torch.arange(12)[:, None] - torch.arange(12)
    mask = (-slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3).transpose(1, 2)
    ours = Attention(slopes)(qkv, 0.3)
    (expected,) = torch.autograd.grad((plain * weight).sum(), qkv)
    (actual,) = torch.autograd.grad((ours * weight).sum(), qkv)
    return all(bool(((a - b).abs() <= TOLERANCE).all()) for a, b in ((plain, ours), (expected, actual)))
