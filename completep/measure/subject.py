"""What is checked: a model with its optimizer at one shape, and the batches it is trained and measured on.

A factory that returns a model gets the rules under check. A factory that returns (model, optimizer), such as your own
implementation of muP, is checked as it is.
"""

import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from completep import paper
from completep.anatomy.examine import examine
from completep.anatomy.forward import measure_forward
from completep.anatomy.names import named_parameters
from completep.anatomy.roles import Anatomy
from completep.anatomy.specimen import build, guess_example
from completep.anatomy.trace import call, find_logits, logits_of
from completep.config import Shape
from completep.errors import UserError
from completep.load import call_factory, load_factory
from completep.rules.parametrize import parametrize
from completep.rules.table import Role, Rules

Inputs = Tensor | tuple[object, ...] | dict[str, object]  # as forward takes them
Batch = tuple[Inputs, Tensor]  # and the target classes
Batches = Callable[[int], Batch]


@dataclass(frozen=True)
class Setting:
    """The paper's coordinate-check settings (experiment table, Figure "Coordinate check"), with shorter sequences."""

    std: float = paper.CHECK_STD
    lr: float = paper.CHECK_LR
    eps: float = paper.EPS
    weight_decay: float = 0.0
    batch: int = paper.CHECK_BATCH
    time: int = 128
    steps: int = paper.CHECK_STEPS

    def __post_init__(self) -> None:
        for name in ("batch", "time", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1", fix=f"set {name} to 1 or more")


@dataclass(frozen=True)
class Source:
    """How to build what is checked at any width and depth."""

    factory: "str | Callable[..., object]"
    base: Shape
    arguments: Mapping[str, object] = field(default_factory=dict)
    names: tuple[str, str] = ("width", "depth")  # what the factory calls them
    roles: "Mapping[str, Role] | None" = None  # as for parametrize, where a role cannot be found
    batches: "str | Batches | None" = None  # step → (inputs, targets); None: Python's own source, or noise for images

    def make(self, shape: Shape) -> object:
        factory = load_factory(self.factory) if isinstance(self.factory, str) else self.factory
        sizes = dict(zip(self.names, (shape.width, shape.depth), strict=True))
        return call_factory(factory, {**self.arguments, **sizes})

    def base_model(self) -> nn.Module:
        """Built for real, in float32. Callers build it once and pass it on."""

        def model() -> nn.Module:
            made = self.make(self.base)
            return made[0] if isinstance(made, tuple) else made  # type: ignore[return-value]  # build() checks the type

        return build(model, "cpu").float()


@dataclass
class Subject:
    """One shape of it, ready to train."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    anatomy: Anatomy
    branch_factors: dict[str, float]  # from each module that writes a branch into the stream

    def roles(self) -> dict[Role, list[nn.Parameter]]:
        """The trained parameters of each role."""
        by_role: dict[Role, list[nn.Parameter]] = {}
        for name, parameter in named_parameters(self.model):
            if parameter.requires_grad:
                by_role.setdefault(self.anatomy.parts[self.anatomy.template(name)].role, []).append(parameter)
        return by_role

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        logits = logits_of(call(self.model, inputs))
        if logits.shape[:-1] != targets.shape:
            raise UserError(
                f"logits of shape {tuple(logits.shape)} do not fit targets of shape {tuple(targets.shape)}",
                fix="let the batch factory give one target class for every vector of logits",
            )
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def make_subject(
    source: Source, base: nn.Module, shape: Shape, rules: Rules, setting: Setting, seed: int, example: Inputs | None
) -> Subject:
    """`base` is used up: its weights are not the factory's afterwards."""
    torch.manual_seed(seed)  # for factories that draw their own starting weights
    made = source.make(shape)
    if isinstance(made, tuple):
        model, optimizer = _pair(made)
        _refuse_same(base, model, source, shape)
        anatomy = examine(base.eval().requires_grad_(True), example=example, patterns=source.roles)
    elif isinstance(made, nn.Module):
        model = made
        _refuse_same(base, model, source, shape)
        scaling = parametrize(model, base=lambda: base, rules=rules, roles=source.roles, example=example)
        scaling.init_(setting.std, seed=seed)
        groups = scaling.param_groups(setting.lr, weight_decay=setting.weight_decay, eps=setting.eps)
        optimizer, anatomy = torch.optim.AdamW(groups, betas=paper.BETAS, fused=True), scaling.anatomy
    else:
        raise UserError(
            f"the factory returned {type(made).__name__}", fix="let it return a model, or (model, optimizer)"
        )
    return Subject(model, optimizer, anatomy, measure_forward(model, anatomy, example).sites)


def _refuse_same(base: nn.Module, model: nn.Module, source: Source, shape: Shape) -> None:
    """A factory that ignores its arguments would pass every check."""
    here, there = ([tuple(p.shape) for p in m.parameters()] for m in (model, base))
    if shape != source.base and here == there:
        deeper = shape.depth != source.base.depth
        name, size = (source.names[1], shape.depth) if deeper else (source.names[0], shape.width)
        raise UserError(
            f"the model with {name}={size} is no larger than the base: the factory does not use {name}",
            fix="give the names it uses for width and depth as names, for instance n_embd and n_layer",
        )


def _pair(made: tuple[object, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    if len(made) == 2 and isinstance(made[0], nn.Module) and isinstance(made[1], torch.optim.Optimizer):
        return made[0], made[1]
    kinds = ", ".join(type(m).__name__ for m in made)
    raise UserError(f"the factory returned ({kinds})", fix="let it return a model, or (model, optimizer)")


# -- batches ---------------------------------------------------------------------------------------


def make_batches(source: Source, base: nn.Module, setting: Setting, seed: int) -> tuple[Batches, Batch]:
    """(the batch of each step, the probe that everything is measured on)."""
    if source.batches is not None:
        factory = load_factory(source.batches) if isinstance(source.batches, str) else source.batches
        return (lambda step: _checked(factory, step)), _checked(factory, setting.steps)
    example = guess_example(base)
    if example.is_floating_point():
        with torch.no_grad():
            logits = find_logits(call(base, example))
        assert logits is not None
        classes = logits.shape[-1]
        return (lambda step: _noise(example, classes, setting, step + 1)), _noise(example, classes, setting, 0)
    smallest = min(m.num_embeddings for m in base.modules() if isinstance(m, nn.Embedding))
    time = min(setting.time, smallest)  # the smallest table may hold the positions

    def batch(step: int) -> Batch:
        return _text(smallest, setting.batch, time, 1 + step + seed * setting.steps)

    inputs, targets = _text(smallest, setting.batch, time, 0)
    return batch, (inputs[:1], targets[:1])  # one sequence has enough numbers to average over


def _checked(factory: Callable[..., object], step: int) -> Batch:
    made = call_factory(factory, {"step": step})
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], Tensor):
        raise UserError(
            f"the batch factory returned {type(made).__name__}",
            fix="let it take step and return (inputs, targets), inputs as forward takes them",
        )
    return made


def _text(vocabulary: int, batch: int, time: int, number: int) -> tuple[Tensor, Tensor]:
    size = batch * (time + 1)
    tokens = python_bytes((number + 1) * size)[number * size :].view(batch, time + 1) % vocabulary
    return tokens[:, :-1], tokens[:, 1:]


def _noise(like: Tensor, classes: int, setting: Setting, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(setting.batch, *like.shape[1:], generator=generator)
    return images, torch.randint(classes, (setting.batch,), generator=generator)


@cache
def _library() -> Tensor:
    """Real text that every machine has: Python's standard library, in the order of its file names."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)


def python_bytes(count: int) -> Tensor:
    text = _library()
    return text[torch.arange(count) % len(text)].long()
