"""The configuration of a run, as frozen dataclasses, and its JSON form. Sealed JSON carries a digest of its content."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from completep.errors import UserError

if TYPE_CHECKING:
    from cattrs import Converter

T = TypeVar("T")
BUILTIN = ("python", "torch")  # corpora that need no preparation: source code that is on the machine already
LEAST_HEADS = 4  # of a model with ALiBi: a single head has the slope 1/256, so it hardly sees positions
LONGEST_NAME = 4096  # characters; no file system has longer paths
MOST = 2**31 - 1  # largest whole number in a run; a larger one would fail later, with a worse message

MOST_EXPLAINED = 20_000  # entries and characters of a file; of a larger one, only the first problem is reported
MOST_SHOWN = 8  # problems of one file in an error message


def whole(name: str, value: object, least: int = 1) -> None:
    """Refuse anything but a whole number from `least` to MOST."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        fix = f"give a positive {name}" if least == 1 else f"give a {name} of {least} or more"
        raise UserError(f"{name}={value!r:.40}: must be a whole number of at least {least}", fix=fix)
    if value > MOST:
        raise UserError(
            f"{name}={value:.3e}: is too large" if value < 1e300 else f"{name} is too large",
            fix=f"give a {name} of at most {MOST}",
        )


@dataclass(frozen=True)
class Shape:
    """Width N (of the residual stream) and depth L (transformer layers, two residual branches each)."""

    width: int
    depth: int

    def __post_init__(self) -> None:
        whole("width", self.width)
        whole("depth", self.depth)


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
    experts: int = 0  # number of experts per block; 0 means a single MLP
    active_experts: int = 1  # number of experts that a token is sent to
    expert_width: int | None = None  # inner width of an expert; by default that of the MLP
    shared_experts: int = 0  # number of experts that every token passes, in addition to its active ones

    def __post_init__(self) -> None:
        for name in ("width", "depth", "vocabulary", "head_size", "context"):
            whole(name, getattr(self, name))
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
                raise UserError(f"{name}={getattr(self, name)!r} is not known", fix="use one of " + ", ".join(allowed))
        self._check_experts()

    def _check_experts(self) -> None:
        for name in ("experts", "shared_experts"):
            whole(name, getattr(self, name), 0)
        whole("active_experts", self.active_experts)
        if self.expert_width is not None:
            whole("expert_width", self.expert_width)
        if self.experts == 1:
            raise UserError(
                "experts=1: a router needs at least two", fix="use experts=0 for a single MLP, or experts=2"
            )
        if self.active_experts > max(self.experts, 1):
            what = f"active_experts={self.active_experts}, but there are {self.experts} experts"
            raise UserError(what, fix=f"use active_experts={max(self.experts, 1)} or fewer, or more experts")
        if not self.experts and (self.shared_experts or self.expert_width is not None):
            given = "shared_experts" if self.shared_experts else "expert_width"
            raise UserError(f"{given}={getattr(self, given)} without experts", fix=f"give experts=8, or no {given}")

    @property
    def expert_size(self) -> int:
        """The inner width of an expert."""
        return self.feed_forward if self.expert_width is None else self.expert_width

    @property
    def heads(self) -> int:
        return self.width // self.head_size

    def require_heads(self) -> None:
        """Refuse to train with too few ALiBi heads. With 1 or 2 of them the loss is 8 to 10 % higher than with 4."""
        if self.positions == "alibi" and self.heads < LEAST_HEADS:
            what = f"width {self.width} with a head size of {self.head_size} has {self.heads} attention heads"
            sizes = (size for size in range(1, 1 + self.width // LEAST_HEADS) if self.width % size == 0)
            raise UserError(
                f"{what}: with ALiBi, fewer than {LEAST_HEADS} can hardly tell positions apart",
                fix=f"use a head size of {max(sizes, default=1)}, or positions='rotary'",
            )

    @property
    def feed_forward(self) -> int:
        return 4 * self.width


def default_head_size(width: int) -> int:
    """64 as in the paper, or less in a narrow model, to have at least four heads."""
    sizes = (size for size in (64, 32, 16, 8) if width % size == 0 and width // size >= LEAST_HEADS)
    return next(sizes, 64)


def check_multipliers(lr_of: Mapping[str, float]) -> None:
    """Refuse multipliers that are not positive numbers. `rules.table` checks the roles."""
    if not isinstance(lr_of, Mapping):
        raise UserError(f"lr_of={lr_of!r:.40} has no roles", fix="give multipliers by role: lr_of={'embedding': 4.0}")
    for role, times in lr_of.items():
        if isinstance(times, bool) or not (isinstance(times, (int, float)) and 0 < times < float("inf")):
            raise UserError(
                f"lr_of: {str(role)!r:.40} has the multiplier {times!r:.40}: must be a finite number above 0",
                fix="give a positive number; to freeze parameters, set their requires_grad to False",
            )


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters tuned at the base. The rules scale them to other sizes."""

    lr: float
    std: float
    weight_decay: float = 0.0
    eps: float = 1e-16
    beta1: float = 0.9
    beta2: float = 0.95
    # Multipliers of the learning rate by role, such as {"embedding": 4.0}; 1 for every other role.
    lr_of: dict[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_multipliers(self.lr_of)
        object.__setattr__(self, "lr_of", dict(self.lr_of))  # a copy, since the caller may change theirs
        for name in ("lr", "std", "weight_decay", "eps"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < float("inf")):
                raise UserError(f"{name}={value!r}: must be a number of at least 0", fix=f"give a finite {name}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise UserError(
                    f"{name}={value!r}: must lie in [0, 1)", fix="use beta1=0.9 and beta2=0.95, as in the paper"
                )


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then linear decay to zero at the last step."""

    steps: int
    warmup: int

    def __post_init__(self) -> None:
        whole("steps", self.steps)
        if not 0 <= self.warmup <= self.steps:
            what = f"warmup={self.warmup} with steps={self.steps}: the warm-up must lie within the steps"
            raise UserError(what, fix=f"give a warm-up from 0 to {self.steps}")


@dataclass(frozen=True)
class Data:
    """The training data: a built-in corpus (`python` or `torch`) or a folder that `completep prepare` wrote."""

    source: str = "python"
    tokenizer: str = "bytes"  # for a built-in corpus; a prepared folder has its own
    sha256: str | None = None  # hash of the corpus; if it is set, other data is refused

    def __post_init__(self) -> None:
        for name in ("source", "tokenizer", "sha256"):
            if len(getattr(self, name) or "") > LONGEST_NAME:
                raise UserError(
                    f"{name}={getattr(self, name)[:80]!r}… has {len(getattr(self, name))} characters",
                    fix="give the name of a built-in corpus, or a folder that `completep prepare` wrote",
                )


@dataclass(frozen=True)
class Evaluation:
    """How often the validation loss is computed, and on how many tokens. The batch does not matter."""

    every: int = 0  # steps; 0 means only at the end
    tokens: int = 2**20  # spread evenly over the validation split; a smaller split is used whole

    def __post_init__(self) -> None:
        whole("every", self.every, 0)
        whole("tokens", self.tokens)


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
    clip: float | None = None  # largest global norm of the gradients, in the multiplier style
    evaluation: Evaluation = Evaluation()

    def __post_init__(self) -> None:
        whole("batch", self.batch)
        whole("sequence", self.sequence)
        if not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed={self.seed!r:.40}: does not fit into 64 bits", fix="give a smaller seed")
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise UserError(f"clip={self.clip}: must be above 0", fix="give a positive norm, or None for no clipping")

    @property
    def tokens(self) -> int:
        return self.schedule.steps * self.batch * self.sequence


# Fields that were added later. They are left out if they are the defaults, so older runs keep their identity.
LATER: dict[type, tuple[str, ...]] = {
    GPTConfig: ("experts", "active_experts", "expert_width", "shared_experts"),
    Hyperparameters: ("lr_of",),
}


def plain(value: object) -> dict[str, Any]:
    """A dataclass as plain data."""
    content: dict[str, Any] = _writer().unstructure(value)
    return content


@cache
def _writer() -> "Converter":
    import cattrs

    converter = cattrs.Converter()
    for kind in LATER:
        converter.register_unstructure_hook(kind, _as_before)
    return converter


def _as_before(value: "GPTConfig | Hyperparameters") -> dict[str, object]:
    """All fields, except later ones with their defaults."""
    later = LATER[type(value)]
    kept = (f for f in fields(value) if f.name not in later or getattr(value, f.name) != _default(f))
    return {f.name: getattr(value, f.name) for f in kept}


def _default(f: "Field[Any]") -> object:
    return f.default if f.default_factory is MISSING else f.default_factory()


def to_json(value: object) -> str:
    return json.dumps(plain(value), indent=2) + "\n"


def run_id(run: Run) -> str:
    """A short hash of everything that determines the result. If the hash of the data is known, its path is left out."""
    content = plain(run)
    if run.data.sha256 and run.data.source not in BUILTIN:
        content["data"]["source"] = ""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def sealed(content: Mapping[str, object]) -> str:
    """JSON with a digest of its content, by which `unsealed` notices damage."""
    marked = {"sealed": True, **json.loads(json.dumps(content))}
    return json.dumps({**marked, "digest": _digest(marked)}, indent=2) + "\n"


def unsealed(text: "str | bytes", *, or_plain: bool = False) -> dict[str, Any]:
    """The content that was given to `sealed`, or a ValueError if it was changed. `or_plain` also allows plain JSON.

    Two keys mark sealed JSON. If one of them is damaged, the other still shows that it is not plain.
    """
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        if or_plain and not {"sealed", "digest"} & content.keys():
            return content
        if content.pop("digest", None) != _digest(content) or content.pop("sealed", None) is not True:
            raise ValueError("its content does not match its digest")
    except RecursionError as error:  # from reading it, or from writing it again for the digest
        raise ValueError("it is nested too deeply") from error
    return content


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


PLAN = "give the run of a plan, as `completep plan` writes it"


def run_from_json(text: str, name: str = "run.json") -> Run:
    """Read a run that `to_json` wrote, sealed or not. `name` is what error messages call it."""
    content = parse_json(text, name, PLAN)
    if isinstance(content, dict) and {"sealed", "digest"} & content.keys():
        try:
            content = unsealed(text)
        except ValueError as error:
            plain = "restore it; or, to train other settings, remove `sealed` and `digest` and use another folder"
            raise UserError(f"{name} is damaged or was edited: {error}", fix=plain) from error
    return structure(_in_tokens(content), Run, name, PLAN)


def _in_tokens(content: object) -> object:
    """Convert the evaluation of version 0.1, which counts batches, to tokens."""
    if isinstance(content, dict) and isinstance(content.get("evaluation"), dict):
        old, sizes = content["evaluation"], (content.get("batch"), content.get("sequence"))
        count = old.get("batches")
        if all(isinstance(n, int) for n in (count, *sizes)):
            others = {name: value for name, value in old.items() if name != "batches"}
            return {**content, "evaluation": {**others, "tokens": count * sizes[0] * sizes[1]}}
    return content


def parse_json(text: str, name: str, fix: str) -> object:
    """Parse JSON from outside. `name` is what error messages call it."""
    try:
        return json.loads(text)
    except ValueError as error:  # also a number with more digits than Python converts
        raise UserError(f"{name} is not JSON: {error}", fix=fix) from error
    except RecursionError as error:
        raise UserError(f"{name} is not JSON that can be read: it is nested too deeply", fix=fix) from error


def structure(content: object, kind: type[T], name: str, fix: str) -> T:
    """Plain data → dataclass. An unknown, missing or wrongly typed field is an error that names it."""
    if not isinstance(content, dict):
        raise UserError(f"{name} is not a JSON object: {str(content)[:40]!r}", fix=fix)
    try:
        return _reader(thorough=False).structure(content, kind)
    except Exception as error:  # the first problem; cattrs raises many kinds
        problems = (_problems(content, kind) if _is_small(content) else []) or [_describe(error, kind)]
        raise UserError(f"{name}: {'; '.join(problems)}", fix=fix) from error


def _is_small(content: object) -> bool:
    waiting, count = [content], 0
    while waiting and count <= MOST_EXPLAINED:
        value = waiting.pop()
        if isinstance(value, (dict, list, str)):
            count += len(value)
            waiting += [] if isinstance(value, str) else value.values() if isinstance(value, dict) else value
    return count <= MOST_EXPLAINED


def _problems(content: object, kind: type) -> list[str]:
    """Every problem, with its place in the file."""
    import cattrs

    try:
        _reader(thorough=True).structure(content, kind)
    except (cattrs.BaseValidationError, cattrs.ForbiddenExtraKeysError) as error:
        mistakes = [line.removesuffix(" @ $") for line in cattrs.transform_error(error, "$", _describe)]
        return mistakes if len(mistakes) <= MOST_SHOWN else [*mistakes[:MOST_SHOWN], f"… ({len(mistakes)} in all)"]
    return []


@cache
def _reader(*, thorough: bool) -> "Converter":
    """A strict converter. It is made once, because it generates and compiles code for every class that it reads.

    With `thorough` it collects all problems, which takes minutes for a list of a million wrong entries.
    """
    import cattrs

    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=thorough)
    for simple in (int, float, str, bool):
        converter.register_structure_hook(simple, _exactly)
    converter.register_structure_hook_func(lambda wanted: wanted is object, lambda value, _: value)
    return converter


def _describe(error: BaseException, kind: type | None) -> str:
    """The error of one field."""
    from cattrs.v import format_exception

    if isinstance(error, UserError):
        return error.what
    return str(error) if isinstance(error, ValueError) else format_exception(error, kind)


def _exactly(value: object, kind: type) -> object:
    """Refuse silent conversions: "3" is not 3, and True is not 1."""
    wanted = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{value!r:.60} is not of type {kind.__name__}")
    try:
        return float(value) if kind is float else value  # type: ignore[arg-type]
    except OverflowError:
        raise ValueError("the number is too large") from None
