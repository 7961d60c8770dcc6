"""Coordinate check: how large the residual stream is, and how far training moves it, as the model deepens."""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from completep.model.gpt import gpt
from completep.rules.parametrize import parametrize
from completep.rules.table import Rules

STABLE = 0.2  # growth exponents up to here count as flat over the few octaves of depth that a small check spans


@dataclass(frozen=True)
class Setting:
    """The paper's coordinate-check settings (experiment table, Figure "Coordinate check"), at a laptop's width."""

    width: int = 64
    base_depth: int = 2
    head_size: int = 16
    std: float = 0.06
    lr: float = 2e-3
    batch: int = 4
    time: int = 64
    steps: int = 10
    seed: int = 0


def python_bytes(count: int) -> Tensor:
    """Real text that every machine has: the first bytes of Python's own standard library, file by file in name order."""
    data = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += path.read_bytes()
        if len(data) >= count:
            break
    return torch.frombuffer(bytearray(data[:count]), dtype=torch.uint8).long()


def measure(rules: Rules, depth: int, setting: Setting) -> Iterator[tuple[int, float, float]]:
    """(step, RMS of the last stream, RMS of its change since step 0), on one fixed probe batch, over real AdamW steps."""
    s = setting

    def model(depth: int) -> torch.nn.Module:
        return gpt(s.width, depth, 256, head_size=s.head_size)

    body = model(depth)
    scaling = parametrize(body, base=lambda: model(s.base_depth), rules=rules)
    scaling.init_(s.std, seed=s.seed)
    optimizer = torch.optim.AdamW(scaling.param_groups(s.lr, eps=1e-16), betas=(0.9, 0.95))
    tokens = python_bytes((s.steps + 1) * s.batch * (s.time + 1)).view(s.steps + 1, s.batch, s.time + 1)
    probe = tokens[-1, :, :-1]
    first = _stream(body, probe)
    for step in range(s.steps + 1):
        now = _stream(body, probe)
        yield step, rms(now), rms(now - first)
        if step < s.steps:
            loss = F.cross_entropy(body(tokens[step, :, :-1]).flatten(0, 1), tokens[step, :, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def _stream(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.stream(tokens)  # type: ignore[operator, no-any-return]


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def coordinate_check(
    rules: Sequence[Rules], depths: Sequence[int], setting: Setting, progress: Callable[[str], None] = lambda _: None
) -> pl.DataFrame:
    """One row per rules, depth and step."""
    rows = []
    for r in rules:
        for depth in depths:
            progress(f"{r.name}, depth {depth}")
            rows += [
                {"rules": r.name, "depth": depth, "step": t, "stream": x, "change": dx}
                for t, x, dx in measure(r, depth, setting)
            ]
    return pl.DataFrame(rows)


def growth(frame: pl.DataFrame, quantity: str = "stream") -> pl.DataFrame:
    """The exponent p of quantity ∝ L^p after the last step, and whether the stream stays bounded."""
    last = frame.filter(pl.col("step") == pl.col("step").max())
    x, y = pl.col("depth").log(), pl.col(quantity).log()
    slopes = last.group_by("rules", maintain_order=True).agg(slope=pl.cov(x, y) / x.var())
    return slopes.with_columns(
        verdict=pl.when(pl.col("slope") <= STABLE).then(pl.lit("PASS")).otherwise(pl.lit("FAIL"))
    )
