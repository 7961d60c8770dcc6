"""kernels.c as autograd functions: attention for short sequences and small heads, relu², and whole narrow blocks.

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
from torch import Tensor

from completep.config import GPTConfig
from completep.errors import UserError
from completep.files import cache_folder, make_folder
from completep.model.gpt import GPT, MLP, Block, alibi_mask, alibi_slopes

FLAGS = ("-O3", "-march=native", "-fno-trapping-math", "-fno-math-errno", "-shared", "-fPIC")
MOST_TIME, ROWS = 128, 4  # as in kernels.c
HEAD_SIZES = (8, 16, 32)  # torch's kernel is as fast for larger ones
LONG, WIDEST = 8, 128  # a whole block: the time is a multiple, and up to this width it pays
TOLERANCE = 1e-5


def fuse(model: GPT, sequence: int) -> bool:
    """Let the decoder use kernels.c in training, where it fits. Its gradients cannot be differentiated again."""
    parameters = list(model.parameters())
    if any(p.device.type != "cpu" or p.dtype != torch.float32 for p in parameters) or not available():
        return False
    c = model.config
    small = sequence <= MOST_TIME and sequence % ROWS == 0 and c.head_size in HEAD_SIZES
    attention = Attention(alibi_slopes(c.heads)) if small and c.positions == "alibi" and not c.qk_norm else None
    papers = c.activation == "relu2" and c.norm == "layernorm" and c.bias and not c.experts
    narrow = c.width <= WIDEST and sequence % LONG == 0 and c.feed_forward == 4 * c.width
    whole = WholeBlock(attention.slopes_H) if attention is not None and papers and narrow else None
    for block in model.blocks:
        assert isinstance(block, Block)
        block.kernel = whole
        block.attention.kernel = attention
        block.mlp.kernel = relu2 if c.activation == "relu2" else None
    return attention is not None


@dataclass(frozen=True)
class Attention:
    """Causal attention with ALiBi, from a projection [B, T, 3, H, D] to [B, T, H, D]."""

    slopes_H: Tensor

    def __call__(self, qkv: Tensor, scale: float) -> Tensor:
        out: Tensor = _Attention.apply(qkv.contiguous(), self.slopes_H, scale)  # type: ignore[no-untyped-call]
        return out


@dataclass(frozen=True)
class WholeBlock:
    """A block of the paper's decoder, from its stream [B, T, N] to the next block's."""

    slopes_H: Tensor

    def __call__(self, block: Block, x_BTN: Tensor) -> Tensor:
        attention, mlp, first, second = block.attention, block.mlp, block.attention_norm, block.mlp_norm
        assert isinstance(mlp, MLP)
        modules = (first, attention.qkv, attention.out, second, mlp.up, mlp.down)
        weights = [parameter for module in modules for parameter in (module.weight, module.bias)]
        factors = (attention.scale, block.multiplier, first.eps)
        inputs = (x_BTN.contiguous(), self.slopes_H, attention.head_size, factors)
        out: Tensor = _Block.apply(*inputs, *weights)  # type: ignore[no-untyped-call]
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


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, slopes: Tensor, size: int, factors: tuple[float, float, float], *weights: Tensor
    ) -> Tensor:
        (batch, time, width), heads = x.shape, len(slopes)
        y, kept = torch.empty_like(x), x.new_empty(batch * time * (9 * width + 4))
        scratch = x.new_empty(width * (12 * width + 6 * time))
        weights = tuple(w.contiguous() for w in weights)
        _call("block_forward", (x, weights, slopes, kept, scratch, y), (batch, time, heads, size), *factors)
        ctx.save_for_backward(x, slopes, kept, *weights)
        ctx.size, ctx.factors = size, factors
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, slopes, kept, *weights = ctx.saved_tensors
        (batch, time, width), heads = x.shape, len(slopes)
        dx, dw = torch.empty_like(x), tuple(map(torch.zeros_like, weights))
        scratch = x.new_empty(11 * time * width)
        tensors = (x, tuple(weights), slopes, kept, gradient.contiguous(), scratch, dx, dw)
        scale, multiplier, _ = ctx.factors
        _call("block_backward", tensors, (batch, time, heads, ctx.size), scale, multiplier)
        return dx, None, None, None, *dw


def _call(name: str, tensors: tuple[Tensor | tuple[Tensor, ...], ...], sizes: tuple[int, ...], *factors: float) -> None:
    library = load()
    assert library is not None
    pointers = [
        _pointer(t) if isinstance(t, Tensor) else (ctypes.c_void_p * len(t))(*map(_address, t)) for t in tensors
    ]
    getattr(library, name)(*pointers, *map(ctypes.c_long, sizes), *map(ctypes.c_float, factors))


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


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
    """One small pass through a block, forward and backward, by parts and as a whole, compared with torch's."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = Block(GPTConfig(width=32, depth=1, vocabulary=2, head_size=8))
    x = torch.randn(2, 16, 32, generator=generator, requires_grad=True)
    weight, place = torch.randn(2, 16, 32, generator=generator), torch.arange(16)
    mask, slopes = alibi_mask(4, (place[:, None] - place)[None], torch.float32), alibi_slopes(4)
    passes = []
    for whole, attention, activation in (
        (None, None, None), (None, Attention(slopes), relu2), (WholeBlock(slopes), None, None),
    ):  # fmt: skip
        block.kernel, block.attention.kernel, block.mlp.kernel = whole, attention, activation
        y = block(x, mask, place[None])
        passes.append((y, *torch.autograd.grad((y * weight).sum(), [x, *block.parameters()])))
    return all(
        bool(((ours - torchs).abs() <= TOLERANCE * torchs.abs().max()).all())
        for one in passes[1:]
        for ours, torchs in zip(one, passes[0], strict=True)
    )
