"""What all studies of one size share: base, data, sequence, tuned hyperparameters, and the two recipes for a run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from completep import paper
from completep.compute.flops import total, training_flops
from completep.compute.plan import batch_size, plan_shape
from completep.config import Data, Evaluation, GPTConfig, Hyperparameters, Run, Schedule, Shape
from completep.errors import UserError
from completep.sweep.task import Point

ScaleName = Literal["laptop", "desk", "paper"]
RULES = ("mup", "alpha=0.5", "completep")  # what most studies compare


@dataclass(frozen=True)
class Scale:
    name: ScaleName
    base: Shape
    head_size: int
    vocabulary: int
    data: Data
    sequence: int
    lr: float  # the best at the base, for studies that vary something else
    std: float
    tokens: float  # of runs with a fixed number of tokens
    batch: int
    warmup: float  # share of the steps
    validation: int  # tokens that every run is scored on

    def model(self, shape: Shape) -> GPTConfig:
        return GPTConfig(shape.width, shape.depth, self.vocabulary, self.head_size)

    def fixed_tokens(self, point: Point, *, lr: float, std: float, eps: float = paper.EPS) -> Run:
        """The traditional setting: the same tokens for every depth, no weight decay.

        Rules, depth and seed as in the point.
        """
        steps = int(self.tokens // (self.batch * self.sequence))
        return Run(
            self.model(Shape(self.base.width, point.whole("depth"))),
            Hyperparameters(lr, std, 0.0, eps, *paper.BETAS),
            Schedule(steps, int(self.warmup * steps)),
            self.batch,
            self.sequence,
            point.text("rules"),
            self.base,
            seed=point.whole("seed"),
            data=self.data,
            evaluation=Evaluation(tokens=self.validation),
        )

    def compute_optimal(
        self, point: Point, shape: Shape, *, lr: float | None = None, std: float | None = None,
        tau: float = paper.TAU, tpp: float = paper.TOKENS_PER_PARAMETER, weight_decay: float | None = None,
    ) -> Run:  # fmt: skip
        """Tokens from parameters, batch from FLOPs, weight decay from its timescale (or as given).

        The batch law counts sequences of 2048 tokens. Here it counts sequences of the scale's own length: at laptop
        scale the law's tokens per step would leave a handful of steps.
        """
        model = self.model(shape)
        cost = training_flops(model, self.sequence, tpp * total(model))
        planned = plan_shape(
            model, rules=point.text("rules"), base=self.base, tpp=tpp, batch=batch_size(cost), sequence=self.sequence,
            lr=self.lr if lr is None else lr, std=self.std if std is None else std, tau=tau, seed=point.whole("seed"),
        )  # fmt: skip
        run = replace(planned.run, data=self.data, evaluation=Evaluation(tokens=self.validation))
        if weight_decay is None:
            return run
        return replace(run, hyperparameters=replace(run.hyperparameters, weight_decay=weight_decay))


PAPER = Scale(
    name="paper",
    base=paper.BASE,
    head_size=paper.HEAD_SIZE,
    vocabulary=paper.VOCABULARY,
    data=Data("", "gpt2"),  # SlimPajama, which you prepare
    sequence=paper.SEQUENCE,
    lr=paper.LR,
    std=paper.STD,
    tokens=paper.TRANSFER_TOKENS,
    batch=paper.TRANSFER_BATCH,
    warmup=paper.WARMUP_SHARE,
    validation=2**22,
)
LAPTOP = Scale(
    name="laptop",
    base=Shape(32, 2),  # as deep as the paper's
    head_size=8,
    vocabulary=256,
    data=Data("python", "bytes"),
    sequence=64,
    lr=2**-6,  # both are tuned again by each study, at its own horizon
    std=0.1,
    tokens=400 * 16 * 64,
    batch=16,
    warmup=1 / 3,  # after a tenth, 40 steps, large learning rates still cost the base more than deeper models
    validation=2**18,
)
DESK = replace(LAPTOP, name="desk", tokens=1000 * 16 * 64, validation=2**20)
SCALES: dict[ScaleName, Scale] = {"laptop": LAPTOP, "desk": DESK, "paper": PAPER}


BASE_VALUES: Mapping[ScaleName, Mapping[str, tuple[float, ...]]] = {
    name: {"base_lr": tuple(2.0**e for e in range(-8, -3)), "base_std": (0.05, 0.1, 0.2)} for name in ("laptop", "desk")
}  # what studies try at the base, to tune η and σ there; at the paper's scale they are the paper's


def read_shape(text: str) -> Shape:
    """`64x8` as an axis value."""
    width, _, depth = text.partition("x")
    try:
        return Shape(int(width), int(depth))
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"the shape {text!r} is not WIDTHxDEPTH", fix="write it like 64x8") from None


def base_shape(scale: Scale) -> Point:
    """The base on the axes of studies of shapes."""
    return Point(rules="completep", shape=f"{scale.base.width}x{scale.base.depth}", tau=paper.TAU)


def shape_words(*shapes: tuple[int, int]) -> tuple[str, ...]:
    return tuple(f"{width}x{depth}" for width, depth in shapes)


def octaves(first: int, last: int) -> tuple[float, ...]:
    return tuple(2.0**e for e in range(first, last + 1))


def decades(first: int, last: int) -> tuple[float, ...]:
    return tuple(10.0**e for e in range(first, last + 1))
