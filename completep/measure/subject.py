"""What a check is done on: a model and its optimizer at one shape, with the places found where it is measured.

Either the user's factory gives a model, and the rules under check are put on it; or it gives (model, optimizer), and the pair
is checked as it is: somebody's own implementation of muP, say.
"""

import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from completep.config import Shape
from completep.errors import UserError
from completep.load import call_factory, load_factory
from completep.rules.anatomy import call, find_logits, logits_of
from completep.rules.examine import build, examine, guess_example
from completep.rules.measure_forward import own_factors
from completep.rules.parametrize import parametrize
from completep.rules.roles import Anatomy
from completep.rules.scaling import named_parameters
from completep.rules.table import Role, Rules

Batch = tuple[Any, Tensor]  # (inputs as forward takes them, target classes)
Batches = Callable[[int], Batch]


@dataclass(frozen=True)
class Setting:
    """The paper's coordinate-check settings (experiment table, Figure "Coordinate check")."""

    std: float = 0.06
    lr: float = 2e-3
    eps: float = 1e-16
    weight_decay: float = 0.0
    batch: int = 4
    time: int = 128
    steps: int = 10

    def __post_init__(self) -> None:
        for name in ("batch", "time", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1", fix=f"give a {name} of at least 1")


@dataclass(frozen=True)
class Source:
    """How to build what is checked at any width and depth."""

    factory: "str | Callable[..., Any]"
    base: Shape
    arguments: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, str] = ("width", "depth")  # what the factory calls them
    roles: "Mapping[str, Role] | None" = None  # as for parametrize, where a role cannot be found
    batches: "str | Batches | None" = None  # step → (inputs, targets); None is Python's own source, or noise for images

    def make(self, shape: Shape) -> Any:
        factory = load_factory(self.factory) if isinstance(self.factory, str) else self.factory
        sizes = dict(zip(self.names, (shape.width, shape.depth), strict=True))
        return call_factory(factory, {**self.arguments, **sizes})

    def model(self, shape: Shape) -> nn.Module:
        made = self.make(shape)
        model: nn.Module = made[0] if isinstance(made, tuple) else made
        return model


@dataclass
class Subject:
    """One shape of it, ready to train."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    anatomy: Anatomy
    branch_factors: dict[str, float]  # on its way from the module that made it into the stream, by that module

    def roles(self) -> dict[Role, list[nn.Parameter]]:
        """The parameters of each role that is trained."""
        found: dict[Role, list[nn.Parameter]] = {}
        for name, parameter in named_parameters(self.model):
            if parameter.requires_grad:
                found.setdefault(self.anatomy.parts[self.anatomy.template(name)].role, []).append(parameter)
        return found

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        logits = logits_of(call(self.model, inputs))
        if logits.shape[:-1] != targets.shape:
            raise UserError(
                f"logits of shape {tuple(logits.shape)} do not fit targets of shape {tuple(targets.shape)}",
                fix="let the batch factory give one target class for every vector of logits",
            )
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def make_subject(source: Source, shape: Shape, rules: Rules, setting: Setting, seed: int) -> Subject:
    torch.manual_seed(seed)  # for factories that draw their own starting weights
    made = source.make(shape)
    example = make_batches(source, setting, seed)[0](0)[0] if source.batches is not None else None
    if isinstance(made, tuple):
        model, optimizer = _pair(made)
        specimen = build(lambda: source.model(source.base), "cpu").float().eval().requires_grad_(True)
        _refuse_same(specimen, model, source, shape)
        anatomy = examine(specimen, example=example, patterns=source.roles)
        return Subject(model, optimizer, anatomy, own_factors(model, anatomy, example))
    if not isinstance(made, nn.Module):
        raise UserError(
            f"the factory returned {type(made).__name__}", fix="let it return a model, or (model, optimizer)"
        )
    _refuse_same(source.model(source.base), made, source, shape)
    scaling = parametrize(
        made, base=lambda: source.model(source.base), rules=rules, roles=source.roles, example=example
    )
    scaling.init_(setting.std, seed=seed)
    groups = scaling.param_groups(setting.lr, weight_decay=setting.weight_decay, eps=setting.eps)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    return Subject(made, optimizer, scaling.anatomy, own_factors(made, scaling.anatomy, example))


def _refuse_same(base: nn.Module, model: nn.Module, source: Source, shape: Shape) -> None:
    """A factory that swallows its arguments would pass every check."""
    here, there = ([tuple(p.shape) for p in m.parameters()] for m in (model, base))
    if shape != source.base and here == there:
        asked, name = (
            (shape.depth, source.names[1]) if shape.depth != source.base.depth else (shape.width, source.names[0])
        )
        raise UserError(
            f"the model with {name}={asked} is no larger than the base: the factory does not use {name}",
            fix="say what it calls width and depth: --names n_embd n_layer",
        )


def _pair(made: tuple[Any, ...]) -> tuple[nn.Module, torch.optim.Optimizer]:
    if len(made) != 2 or not isinstance(made[0], nn.Module) or not isinstance(made[1], torch.optim.Optimizer):
        kinds = ", ".join(type(m).__name__ for m in made)
        raise UserError(f"the factory returned ({kinds})", fix="let it return a model, or (model, optimizer)")
    return made


# -- batches ---------------------------------------------------------------------------------------


def make_batches(source: Source, setting: Setting, seed: int) -> tuple[Batches, Batch]:
    """(the batch of each step, the probe that everything is measured on)."""
    if source.batches is not None:
        given = load_factory(source.batches) if isinstance(source.batches, str) else source.batches
        return (lambda step: _checked(given, step)), _checked(given, setting.steps)
    model = build(lambda: source.model(source.base), "cpu")
    example = guess_example(model)
    if example.is_floating_point():
        with torch.no_grad():
            classes = find_logits(call(model, example)).shape[-1]  # type: ignore[union-attr]
        return (lambda step: _noise(example, classes, setting, step + 1)), _noise(example, classes, setting, 0)
    smallest = min(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    time = min(setting.time, smallest)  # the smallest table may be the positions'

    def batch(step: int) -> Batch:
        return _text(smallest, setting.batch, time, 1 + step + seed * setting.steps)

    inputs, targets = _text(smallest, setting.batch, time, 0)
    return batch, (inputs[:1], targets[:1])  # one sequence is numbers enough to average over, and cheap to pass


def _checked(factory: Callable[[int], Any], step: int) -> Batch:
    made = call_factory(factory, {"step": step})
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], Tensor):
        raise UserError(
            f"the batch factory returned {type(made).__name__}",
            fix="let it take step and return (inputs, targets), inputs as forward takes them: a tensor, a tuple or a dict",
        )
    return made


def _text(vocabulary: int, batch: int, time: int, number: int) -> Batch:
    size = batch * (time + 1)
    tokens = python_bytes((number + 1) * size)[number * size :].view(batch, time + 1) % vocabulary
    return tokens[:, :-1], tokens[:, 1:]


def _noise(like: Tensor, classes: int, setting: Setting, number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(setting.batch, *like.shape[1:], generator=generator)
    return images, torch.randint(classes, (setting.batch,), generator=generator)


@cache
def _library() -> Tensor:
    """Real text that every machine has: Python's own standard library, file by file in name order."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)


def python_bytes(count: int) -> Tensor:
    text = _library()
    return text[torch.arange(count) % len(text)].long()
