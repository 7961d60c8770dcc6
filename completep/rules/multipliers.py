"""Multipliers in the forward pass of a model, without changes to its source or parameter names.

They are plain forward hooks, which survive deepcopy, pickle, DDP and FSDP2, and which torch.compile can trace.
A model that has its own multipliers (`set_multipliers`, like the reference decoder) is given the factors instead.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast, runtime_checkable

from torch import nn

from completep.anatomy.calls import replace_first
from completep.anatomy.names import plain
from completep.errors import UserError, some
from completep.rules.weights import mark, unmark

Style = Literal["multiplier", "folded"]
Kind = Literal["branch", "logits", "attention", "embedding"]


# Where a multiplier can have no parameter to fold into.
WHY: Mapping[Kind, str] = {
    "logits": "the embeddings are tied, and there is no final norm with a gain that only matrices read",
    "attention": "the norm of the queries has no gain",
}
WAY_OUT: Mapping[Kind, str] = {
    "logits": "keep style='multiplier', untie the embeddings, or add a final norm",
    "attention": "keep style='multiplier', or keep the head size of the base",
}


@dataclass(frozen=True)
class Multiplier:
    """One factor of the forward pass: where it acts, and which parameters hold it in the folded form."""

    kind: Kind
    factor: float
    modules: tuple[str, ...]  # whose output it scales; for the logits, whose input (the bias stays outside)
    parameters: tuple[str, ...]


@runtime_checkable
class KnowsMultipliers(Protocol):
    """A model with its own multipliers, which are 1 after construction."""

    def set_multipliers(self, *, branch: float, logits: float) -> None: ...
    def get_multipliers(self) -> tuple[float, float]: ...


class ScaleOutput:
    """Forward hook: multiplies the module's output, or the first tensor of several outputs, by a constant."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: object, output: object) -> object:
        return replace_first(output, lambda first: first * self.factor)


class ScaleInput:
    """Forward pre-hook: multiplies the first tensor that the module is given by a constant."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return cast(tuple[Any, Any], replace_first((args, kwargs), lambda first: first * self.factor))


def install(model: nn.Module, multipliers: tuple[Multiplier, ...]) -> None:
    by_model: tuple[Multiplier, ...] = ()
    if isinstance(model, KnowsMultipliers):
        by_model = tuple(next(m for m in multipliers if m.kind == kind) for kind in ("branch", "logits"))
        model.set_multipliers(branch=by_model[0].factor, logits=by_model[1].factor)
    modules = {plain(name): module for name, module in model.named_modules()}
    for m in multipliers:
        if m in by_model or m.factor == 1.0:
            continue
        for name in m.modules:
            if m.kind == "logits":
                modules[name].register_forward_pre_hook(ScaleInput(m.factor), with_kwargs=True)
            else:
                modules[name].register_forward_hook(ScaleOutput(m.factor))
    if any(m.factor != 1.0 for m in multipliers):
        mark(model, {m.kind: m.factor for m in multipliers})


def remove(model: nn.Module) -> None:
    """Remove all multipliers, from this model or from a copy of it."""
    if isinstance(model, KnowsMultipliers):
        model.set_multipliers(branch=1.0, logits=1.0)
    for hooks, key, kwargs in list(_hooks(model)):
        del hooks[key]
        kwargs.pop(key, None)
    unmark(model)


def installed(model: nn.Module) -> bool:
    by_model = isinstance(model, KnowsMultipliers) and model.get_multipliers() != (1.0, 1.0)
    return by_model or any(True for _ in _hooks(model))


def _hooks(model: nn.Module) -> Iterator[tuple[dict[int, Any], int, dict[int, bool]]]:
    for module in model.modules():
        registries = (
            (module._forward_hooks, module._forward_hooks_with_kwargs),
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        )
        for hooks, kwargs in registries:
            for key, hook in hooks.items():
                if isinstance(hook, (ScaleOutput, ScaleInput)):
                    yield hooks, key, kwargs


def possible_style(model: nn.Module, multipliers: tuple[Multiplier, ...]) -> Style:
    """Folded, if a multiplier has no module to act on."""
    homeless = any(m.factor != 1.0 and not m.modules for m in multipliers)
    return "folded" if homeless and not isinstance(model, KnowsMultipliers) else "multiplier"


def refuse_style(style: Style, model: nn.Module, multipliers: tuple[Multiplier, ...]) -> None:
    """The multiplier style needs a module for every multiplier, the folded style a parameter."""
    for m in multipliers:
        if m.factor == 1.0:
            continue
        if style == "folded" and not m.parameters:
            raise UserError(f"the {m.kind} multiplier cannot be folded: {WHY[m.kind]}", fix=WAY_OUT[m.kind])
        if style == "multiplier" and not m.modules and not isinstance(model, KnowsMultipliers):
            what = f"the {m.kind} multiplier has no module to act on: {some(m.parameters)} are used as bare parameters"
            raise UserError(what, fix="use style='folded', which only changes parameters, or use an nn.Linear")
