"""From a size or a budget to a shape: the one whose N:L is nearest the paper's optimum."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from completep import paper
from completep.compute import flops
from completep.config import LEAST_HEADS, GPTConfig
from completep.errors import UserError
from completep.stats import line
from completep.units import parse_quantity

# Dense peaks in FLOP/s of the formats people train in (bf16), from the vendors' data sheets.
DEVICES = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12, "mi300x": 1307e12, "tpu-v5p": 459e12}
Quantity = str | float  # as people write it: 1.5B, 4e20
BY_RATIO = "N:L nearest the paper's optimum for this size"


@dataclass(frozen=True)
class Limits:
    """The largest shape that your hardware allows: depth costs latency, width costs memory per layer."""

    max_width: int = 65536
    max_depth: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_width", "max_depth"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"{name}={getattr(self, name)}: must be at least 1", fix=f"raise {name}, or leave it out"
                )


@dataclass(frozen=True)
class Target:
    """The size of a model, given in exactly one way."""

    params: Quantity | None = None  # non-embedding
    flops: Quantity | None = None
    gpu_hours: Quantity | None = None  # with device and mfu
    width: int | None = None  # with depth
    depth: int | None = None
    device: str = "h100"
    mfu: float = 0.4

    def __post_init__(self) -> None:
        ways = {"params": self.params, "flops": self.flops, "gpu_hours": self.gpu_hours}
        ways["width and depth"] = self.width if self.width is not None else self.depth
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            what = "no size is given" if not given else "the size is given by " + " and ".join(given)
            raise UserError(what, fix="give one of params (1.5B), flops (4e20), gpu_hours (1000), or width and depth")
        if (self.width is None) != (self.depth is None):
            raise UserError(f"width={self.width}, depth={self.depth}: a shape has both", fix="give width and depth")


def choose_shape(target: Target, like: GPTConfig, limits: Limits, tpp: float, sequence: int) -> tuple[GPTConfig, str]:
    """(the model, the law that chose it)."""
    if target.width is not None and target.depth is not None:
        return replace(like, width=target.width, depth=target.depth), "given"
    if target.params is not None:
        size = parse_quantity(str(target.params), "params")
        candidates = shapes_for_parameters(size, like, limits)
        return nearest_ratio(candidates, f"{target.params} parameters", limits), BY_RATIO
    if target.flops is not None:
        budget, words = parse_quantity(str(target.flops), "flops"), f"{target.flops} FLOPs"
    else:
        hours = parse_quantity(str(target.gpu_hours), "gpu_hours")
        budget = gpu_flops(hours, device_peak(target.device), target.mfu)
        words = f"{target.gpu_hours} hours of {target.device} at {target.mfu:g} of its peak, {budget:.3g} FLOPs"
    candidates = shapes_for_flops(budget, like, limits, tpp, sequence)
    return nearest_ratio(candidates, words, limits), f"{BY_RATIO}, within {words}"


def best_ratio(parameters: float) -> float:
    """The compute-optimal N:L at a non-embedding size: a power law through the paper's three best shapes."""
    exponent, intercept = _ratio_law()
    return math.exp(intercept + exponent * math.log(parameters))


@cache
def _ratio_law() -> tuple[float, float]:
    return line(np.log(list(paper.BEST_RATIO)), np.log(list(paper.BEST_RATIO.values())))


def nearest_ratio(candidates: Iterator[GPTConfig], what: str, limits: Limits) -> GPTConfig:
    """Among shapes of one size or cost, the one whose N:L is nearest the paper's optimum."""
    shapes = list(candidates)
    if not shapes:
        raise UserError(
            f"no shape has {what} with width ≤ {limits.max_width} and depth ≤ {limits.max_depth}",
            fix="raise max_depth or max_width, change head_size, or give another size",
        )
    return min(shapes, key=lambda m: abs(math.log(m.width / m.depth / best_ratio(flops.non_embedding(m)))))


def shapes_for_parameters(size: float, like: GPTConfig, limits: Limits) -> Iterator[GPTConfig]:
    """For every width, the depth that is closest to this many non-embedding parameters."""
    for width in _widths(like, limits):
        one = flops.non_embedding(replace(like, width=width, depth=1))
        depth = round(size / one)
        if 1 <= depth <= limits.max_depth and abs(depth * one / size - 1) <= 0.06:
            yield replace(like, width=width, depth=depth)


def shapes_for_flops(budget: float, like: GPTConfig, limits: Limits, tpp: float, sequence: int) -> Iterator[GPTConfig]:
    """For every width, the deepest model whose whole training fits the budget and uses nearly all of it."""

    def share(width: int, depth: int) -> float:
        model = replace(like, width=width, depth=depth)
        return flops.training_flops(model, sequence, tpp * flops.active(model)) / budget

    used: dict[tuple[int, int], float] = {}
    for width in _widths(like, limits):
        if share(width, 1) > 1:
            break
        low, high = 1, limits.max_depth
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if share(width, middle) <= 1 else (low, middle - 1)
        used[width, low] = share(width, low)
    enough = min(0.95, max(used.values(), default=0.0))
    if enough < 0.5:
        return  # the limits are too tight: no shape uses half of the budget
    for (width, depth), part in used.items():
        if part >= enough:
            yield replace(like, width=width, depth=depth)


def _widths(like: GPTConfig, limits: Limits) -> range:
    least = LEAST_HEADS * like.head_size
    if limits.max_width < least:
        raise UserError(
            f"max_width={limits.max_width} is less than {LEAST_HEADS} heads of {like.head_size}",
            fix="raise max_width or lower head_size",
        )
    return range(least, limits.max_width + 1, like.head_size)


def gpu_flops(hours: float, peak: float, mfu: float) -> float:
    if not 0 < mfu <= 1:
        raise UserError(f"mfu={mfu}: model FLOPs utilisation lies in (0, 1]", fix="use a value in (0, 1], such as 0.4")
    return hours * 3600 * peak * mfu


def device_peak(device: str) -> float:
    device = str(device)
    if device.lower() in DEVICES:
        return DEVICES[device.lower()]
    try:
        return parse_quantity(device, "device")
    except UserError:
        known = ", ".join(DEVICES)
        raise UserError(
            f"device={device!r} is not known", fix=f"use one of {known}, or a peak in FLOP/s such as 989e12"
        ) from None
