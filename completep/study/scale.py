"""The two sizes a study comes in: the paper's own settings, and the same axes with shapes that a laptop trains in minutes."""

from dataclasses import dataclass, replace
from pathlib import Path

from completep import paper
from completep.compute.plan import plan
from completep.config import Data, GPTConfig, Hyperparameters, Run, Schedule, Shape
from completep.errors import UserError
from completep.rules.table import rules_named
from completep.study.design import octaves


@dataclass(frozen=True)
class Scale:
    """What all studies of one size have in common, and what each of them varies."""

    name: str
    base: Shape
    head_size: int
    vocabulary: int
    data: Data
    sequence: int
    lr: float  # the best at the base, for studies that vary something else
    std: float
    # Transfer at a fixed number of tokens.
    tokens: float
    batch: int
    warmup: float  # share of the steps
    depths: tuple[int, ...]
    few_depths: tuple[int, ...]  # where three curves tell as much as seven
    lrs: tuple[float, ...]
    stds: tuple[float, ...]
    epses: tuple[float, ...]
    crossing_lr: float
    seeds: tuple[int, ...]
    # Compute-optimal runs.
    optimal_width: int
    optimal_depths: tuple[int, ...]
    optimal_lrs: tuple[float, ...]
    shapes: tuple[str, ...]  # N x L at a few sizes
    taus: tuple[float, ...]
    tau_shapes: tuple[str, ...]
    grid_widths: tuple[int, ...]
    grid_std: float
    grid_lrs: tuple[float, ...]
    grid_decays: tuple[float, ...]
    horizon_shapes: tuple[str, ...]
    downstream_shapes: tuple[str, ...]
    items: Path | None  # of downstream tasks; None is the hub's data sets
    item_limit: int | None  # of each task
    # Measurements without training runs.
    check_widths: int
    check_depths: tuple[int, ...]
    check_sequence: int
    lazy_depths: tuple[int, ...]
    lazy_seeds: int

    def model(self, width: int, depth: int) -> GPTConfig:
        return GPTConfig(width, depth, self.vocabulary, self.head_size)

    def fixed_tokens(self, rules: str, depth: int, seed: int, *, lr: float, std: float, eps: float = paper.EPS) -> Run:
        """The traditional setting: the same tokens for every depth, no weight decay."""
        steps = int(self.tokens // (self.batch * self.sequence))
        return Run(
            self.model(self.base.width, depth),
            Hyperparameters(lr, std, 0.0, eps, *paper.BETAS),
            Schedule(steps, int(self.warmup * steps)),
            self.batch,
            self.sequence,
            rules,
            self.base,
            seed=seed,
            data=self.data,
        )

    def compute_optimal(
        self, rules: str, shape: str, seed: int, *, lr: float | None = None, std: float | None = None,
        tau: float = paper.TAU, tpp: float = paper.TOKENS_PER_PARAMETER, weight_decay: float | None = None,
    ) -> Run:  # fmt: skip
        """Tokens by parameters, batch by FLOPs, weight decay by its timescale (or as given)."""
        planned = plan(
            self.model(*read_shape(shape)), rules=rules_named(rules), rules_name=rules, base=self.base, tpp=tpp,
            sequence=self.sequence, lr=self.lr if lr is None else lr, std=self.std if std is None else std, tau=tau, seed=seed,
        )  # fmt: skip
        run = replace(planned.run, data=self.data)
        if weight_decay is None:
            return run
        return replace(run, hyperparameters=replace(run.hyperparameters, weight_decay=weight_decay))


def read_shape(text: str) -> tuple[int, int]:
    width, _, depth = text.partition("x")
    try:
        return int(width), int(depth)
    except ValueError:
        raise UserError(f"the shape {text!r} is not WIDTHxDEPTH", fix="write it like 64x8") from None


def words(shapes: "tuple[tuple[int, int], ...]") -> tuple[str, ...]:
    return tuple(f"{width}x{depth}" for width, depth in shapes)


PAPER = Scale(
    name="paper",
    base=paper.BASE,
    head_size=paper.HEAD_SIZE,
    vocabulary=paper.VOCABULARY,
    data=Data("", "gpt2"),  # SlimPajama, which the user prepares
    sequence=paper.SEQUENCE,
    lr=paper.LR,
    std=paper.STD,
    tokens=paper.TRANSFER_TOKENS,
    batch=paper.TRANSFER_BATCH,
    warmup=paper.WARMUP_SHARE,
    depths=paper.TRANSFER_DEPTHS,
    few_depths=paper.TRANSFER_DEPTHS,
    lrs=octaves(-12, -4),
    stds=tuple(paper.STD * 2.0**e for e in range(-4, 4)),
    epses=tuple(10.0**e for e in range(-16, -2)),
    crossing_lr=paper.CROSSING_LR,
    seeds=(0,),
    optimal_width=paper.BASE.width,
    optimal_depths=paper.TRANSFER_DEPTHS,
    optimal_lrs=octaves(-12, -4),
    shapes=words(sum(paper.SHAPES.values(), ())),
    taus=tuple(paper.TAU * 2.0**e for e in range(-3, 4)),
    tau_shapes=words(paper.HORIZON_SHAPES[:2]),
    grid_widths=(256, 512),
    grid_std=paper.GRID_STD,
    grid_lrs=octaves(-11, -5),
    grid_decays=octaves(-4, 3),
    horizon_shapes=words(paper.HORIZON_SHAPES),
    downstream_shapes=words(paper.DOWNSTREAM_SHAPES),
    items=None,
    item_limit=None,
    check_widths=256,
    check_depths=(2, 4, 8, 16, 32, 64, 128),
    check_sequence=paper.SEQUENCE,
    lazy_depths=(16, 32, 64, 128, 256, 512),
    lazy_seeds=50,
)

LAPTOP = Scale(
    name="laptop",
    base=Shape(64, 2),
    head_size=16,
    vocabulary=256,
    data=Data("python", "bytes"),
    sequence=64,
    lr=2**-6,
    std=1 / 8,
    tokens=150 * 16 * 64,
    batch=16,
    warmup=1 / 3,  # a tenth would be 15 steps, too few for the largest learning rates
    depths=(2, 8, 32),
    few_depths=(2, 4, 16),
    lrs=octaves(-9, -3),
    stds=octaves(-6, 0),
    epses=tuple(10.0**e for e in range(-7, -1)),
    crossing_lr=2**-4,
    seeds=(0, 1, 2),
    optimal_width=32,
    optimal_depths=(2, 4, 8),
    optimal_lrs=octaves(-8, -4),
    shapes=words(
        (
            *((16, 16), (32, 4), (48, 2), (64, 1)),
            *((16, 32), (32, 8), (48, 4), (64, 2), (96, 1)),
            *((16, 48), (32, 12), (48, 5), (64, 3), (80, 2), (112, 1)),
        )
    ),
    taus=tuple(paper.TAU * 2.0**e for e in range(-2, 4)),
    tau_shapes=("32x4", "16x16"),
    grid_widths=(32,),
    grid_std=1 / 8,
    grid_lrs=octaves(-7, -5),
    grid_decays=octaves(-3, 1),
    horizon_shapes=("32x1", "16x4", "32x2", "16x8"),
    downstream_shapes=("64x3", "16x48"),
    items=None,
    item_limit=200,
    check_widths=64,
    check_depths=(2, 4, 8, 16, 32),
    check_sequence=64,
    lazy_depths=(16, 32, 64, 128),
    lazy_seeds=20,
)
SCALES = {"laptop": LAPTOP, "paper": PAPER}
