"""Multipliers in the forward pass, put on a model from outside: no source touched, no parameter renamed.

A plain forward hook survives deepcopy, pickle, DDP and FSDP2, and torch.compile traces straight through it.
A model that already has a place for them (`set_multipliers`, as the reference decoder) is told instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from completep.errors import UserError

Kind = Literal["branch", "logits", "attention", "embedding"]


def plain(name: str) -> str:
    """A parameter's or module's name as it was before any wrapper (torch.compile, activation checkpointing) added its own."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True)
class Multiplier:
    """One factor of the forward pass: where it acts, or into which parameters it folds instead."""

    kind: Kind
    factor: float
    modules: tuple[str, ...]  # whose output it scales; for the logits, whose input (a bias stays outside)
    parameters: tuple[str, ...]


@runtime_checkable
class KnowsMultipliers(Protocol):
    """A model with multipliers of its own, both 1 as built."""

    def set_multipliers(self, *, branch: float, logits: float) -> None: ...
    def get_multipliers(self) -> tuple[float, float]: ...


class ScaleOutput:
    """Forward hook: the module's output, or the first of several, times a constant."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return output * self.factor
        return (output[0] * self.factor, *output[1:])


class ScaleInput:
    """Forward pre-hook: the module's first input times a constant."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (args[0] * self.factor, *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, kwargs | {first: kwargs[first] * self.factor}


def install(model: nn.Module, multipliers: tuple[Multiplier, ...]) -> None:
    told: tuple[Kind, ...] = ()
    if isinstance(model, KnowsMultipliers):
        of = {m.kind: m.factor for m in multipliers}
        model.set_multipliers(branch=of.get("branch", 1.0), logits=of.get("logits", 1.0))
        told = ("branch", "logits")
    modules = {plain(name): module for name, module in model.named_modules()}
    for m in multipliers:
        if m.kind in told or m.factor == 1.0:
            continue
        for name in m.modules:
            if m.kind == "logits":
                modules[name].register_forward_pre_hook(ScaleInput(m.factor), with_kwargs=True)
            else:
                modules[name].register_forward_hook(ScaleOutput(m.factor))


def remove(model: nn.Module) -> None:
    """Take every multiplier off again, on this model or on a copy of it."""
    if isinstance(model, KnowsMultipliers):
        model.set_multipliers(branch=1.0, logits=1.0)
    for hooks, key, kwargs in list(_ours(model)):
        del hooks[key]
        kwargs.pop(key, None)


def installed(model: nn.Module) -> bool:
    own = isinstance(model, KnowsMultipliers) and model.get_multipliers() != (1.0, 1.0)
    return own or any(True for _ in _ours(model))


def _ours(model: nn.Module) -> Iterator[tuple[dict[int, Any], int, dict[int, bool]]]:
    for module in model.modules():
        registries = (
            (module._forward_hooks, module._forward_hooks_with_kwargs),
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        )
        for hooks, kwargs in registries:
            for key, hook in hooks.items():
                if isinstance(hook, (ScaleOutput, ScaleInput)):
                    yield hooks, key, kwargs


def needs_modules(multipliers: tuple[Multiplier, ...], model: nn.Module) -> None:
    """Refuse the multiplier style where a branch is bare arithmetic with no module to hook."""
    for m in multipliers:
        if m.factor != 1.0 and not m.modules and not isinstance(model, KnowsMultipliers):
            raise UserError(
                f"the {m.kind} multiplier has no module to act on: {', '.join(m.parameters[:4])} enter as bare parameters",
                fix="use style='folded', which only changes parameters, or wrap the last product in an nn.Linear",
            )
