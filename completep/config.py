"""The configuration of a run, as frozen dataclasses, and its JSON form."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from completep.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """Width N (of the residual stream) and depth L (transformer layers, two residual branches each)."""

    width: int
    depth: int

    def __post_init__(self) -> None:
        for name, value in (("width", self.width), ("depth", self.depth)):
            if not isinstance(value, int) or value < 1:
                what = f"Shape({name}={value!r}): must be a whole number of at least 1"
                raise UserError(what, fix=f"give the {name} of the model")


def as_shape(value: "Shape | Sequence[int]", name: str = "base") -> Shape:
    """A Shape, or (width, depth)."""
    if isinstance(value, Shape):
        return value
    if isinstance(value, (tuple, list)) and len(value) == 2:
        return Shape(*value)
    raise UserError(f"{name}={value!r} is not (width, depth)", fix=f"{name}=Shape(256, 2), or {name}=(256, 2)")


@dataclass(frozen=True)
class GPTConfig:
    """The reference decoder. The defaults are the paper's model."""

    width: int = 256
    depth: int = 2
    vocabulary: int = 50257
    head_size: int = 64
    positions: Literal["alibi", "rotary", "learned", "none"] = "alibi"
    context: int = 2048  # the number of learned positions; the other kinds have no limit
    activation: Literal["relu2", "gelu", "swiglu"] = "relu2"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = True
    qk_norm: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "depth", "vocabulary", "head_size", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(
                    f"{name}={value!r}: must be a whole number of at least 1", fix=f"give a positive {name}"
                )
        if self.width % self.head_size:
            raise UserError(
                f"width {self.width} is not a multiple of the head size {self.head_size}",
                fix=f"use a width like {self.head_size * max(1, round(self.width / self.head_size))}",
            )
        choices = {
            "positions": ("alibi", "rotary", "learned", "none"),
            "activation": ("relu2", "gelu", "swiglu"),
            "norm": ("layernorm", "rmsnorm"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)!r}", fix="use one of " + ", ".join(allowed))

    @property
    def heads(self) -> int:
        return self.width // self.head_size

    @property
    def feed_forward(self) -> int:
        return 4 * self.width


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters tuned at the base. The rules scale them to other sizes."""

    lr: float
    std: float
    weight_decay: float = 0.0
    eps: float = 1e-16
    beta1: float = 0.9
    beta2: float = 0.95

    def __post_init__(self) -> None:
        for name in ("lr", "std", "weight_decay", "eps"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < float("inf")):
                raise UserError(f"{name}={value!r}: must be a number of at least 0", fix=f"give a finite {name}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise UserError(f"{name}={value!r}: must lie in [0, 1)", fix="the paper uses 0.9 and 0.95")


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then linear decay to zero at the last step."""

    steps: int
    warmup: int

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.warmup <= self.steps:
            what = f"steps={self.steps}, warmup={self.warmup}: not a schedule"
            raise UserError(what, fix="give at least one step, and a warm-up of 0 to that many steps")


@dataclass(frozen=True)
class Data:
    """The training data: `python` (the built-in corpus) or a folder that `completep prepare` wrote."""

    source: str = "python"
    tokenizer: str = "bytes"  # used for the built-in corpus only; a prepared folder names its own
    sha256: str | None = None  # of the corpus; if it is set, a corpus with another hash is refused


@dataclass(frozen=True)
class Evaluation:
    """How often the validation loss is computed, and on how many batches."""

    every: int = 0  # steps; 0 means only at the end
    batches: int = 20


@dataclass(frozen=True)
class Run:
    """Everything that determines the result of a training run."""

    model: GPTConfig
    hyperparameters: Hyperparameters
    schedule: Schedule
    batch: int  # sequences per step
    sequence: int  # tokens per sequence
    rules: str = "completep"
    base: Shape = Shape(256, 2)
    style: Literal["multiplier", "folded"] = "multiplier"
    seed: int = 0
    data: Data = Data()
    clip: float | None = None  # global gradient norm, in unfolded coordinates
    evaluation: Evaluation = Evaluation()

    def __post_init__(self) -> None:
        for name in ("batch", "sequence"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1", fix=f"give a positive {name}")
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip={self.clip}: must be above 0", fix="give a positive norm, or None for no clipping")

    @property
    def tokens(self) -> int:
        return self.schedule.steps * self.batch * self.sequence


def to_json(value: object) -> str:
    import cattrs

    return json.dumps(cattrs.unstructure(value), indent=2) + "\n"


def run_id(run: Run) -> str:
    """A short hash of everything that determines the result."""
    import cattrs

    return hashlib.sha256(json.dumps(cattrs.unstructure(run), sort_keys=True).encode()).hexdigest()[:12]


PLAN = "write it with `completep plan --run FILE`"


def run_from_json(text: str, name: str = "run.json") -> Run:
    """Read a run that `to_json` wrote. `name` is what error messages call it."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{name} is not JSON: {error}", fix=PLAN) from error
    return structure(content, Run, name, PLAN)


def structure(content: object, kind: type[T], name: str, fix: str) -> T:
    """Plain data → dataclass. An unknown, missing or wrongly typed field is an error that names it."""
    import cattrs

    converter = cattrs.Converter(forbid_extra_keys=True)
    for simple in (int, float, str, bool):
        converter.register_structure_hook(simple, _exactly)
    try:
        return converter.structure(content, kind)
    except (cattrs.BaseValidationError, cattrs.ForbiddenExtraKeysError) as error:
        problems = "; ".join(line.removesuffix(" @ $") for line in cattrs.transform_error(error, "$", _describe))
        raise UserError(f"{name}: {problems}", fix=fix) from error


def _describe(error: BaseException, kind: type | None) -> str:
    """The error of one field."""
    from cattrs.v import format_exception

    if isinstance(error, UserError):
        return error.what
    return str(error) if isinstance(error, ValueError) else format_exception(error, kind)


def _exactly(value: object, kind: type) -> object:
    """Without silent conversions: "3" is not 3, and True is not 1."""
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    return float(value) if kind is float else value  # type: ignore[arg-type]
