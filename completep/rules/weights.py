"""Where the weights of a model come from: its constructor, `init_`, or a checkpoint; and how they are saved.

Torch counts in-place changes of a tensor. If a parameter has more of them in every block than a fresh base has, it was
loaded. transformers also marks what it loads. Copies, assigned tensors and
whole models from a file have no such count. There the gains of norms tell: constructors make them one number, and
training does not leave them so.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from completep.anatomy.names import named_parameters

Versions = Mapping[str, int]


@dataclass
class Origin:
    """What is known about the weights of a parametrized model."""

    fresh: dict[str, int] = field(default_factory=dict)  # changes in place of the parameters that nobody has changed
    loaded: bool = False  # before the model was parametrized
    initialised: bool = False  # by `init_`
    gains: tuple[str, ...] = ()  # norm gains, which a constructor fills with one number


class CountLoads:
    """Hook of load_state_dict. It survives deepcopy and pickle, as the multipliers do."""

    def __init__(self) -> None:
        self.loads = 0

    def __call__(self, module: nn.Module, incompatible: object) -> None:
        self.loads += 1


def version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def find_origin(model: nn.Module, base: Versions | None, templates: Mapping[str, str], gains: Iterable[str]) -> Origin:
    """`base` are the changes in place of a fresh base, by template. `templates` are those of all parameters."""
    real = {name: p for name, p in named_parameters(model) if not p.is_meta}
    known = tuple(name for name in gains if name in real)
    pretrained = bool(real) and all(getattr(p, "_is_hf_initialized", False) for p in real.values())
    if base is None or not real or not any(base.values()):  # a copy of a model has no changes in place
        return Origin(loaded=pretrained, gains=known)
    changes = {name: version_of(p) - base.get(templates[name], -1) for name, p in real.items()}
    fresh = {name: version_of(real[name]) for name, change in changes.items() if change == 0}
    least: dict[str, int] = {}
    for name, change in changes.items():
        least[templates[name]] = min(change, least.get(templates[name], change))
    return Origin(fresh, loaded=pretrained or any(change > 0 for change in least.values()), gains=known)


def watch_loads(model: nn.Module) -> None:
    """Count what is loaded into the model and into each of its modules."""
    for module in model.modules():
        if not any(isinstance(hook, CountLoads) for hook in module._load_state_dict_post_hooks.values()):
            module.register_load_state_dict_post_hook(CountLoads())  # type: ignore[no-untyped-call]


def _counters(model: nn.Module) -> list[CountLoads]:
    hooks = [hook for module in model.modules() for hook in module._load_state_dict_post_hooks.values()]
    return [hook for hook in hooks if isinstance(hook, CountLoads)]


def is_loaded(model: nn.Module, origin: Origin) -> bool:
    return origin.loaded or any(counter.loads for counter in _counters(model)) or _is_trained(model, origin)


def _is_trained(model: nn.Module, origin: Origin) -> bool:
    """True if the gains of a norm are not one number, before `init_` has filled them."""
    if origin.initialised:
        return False
    gains = [p for name, p in named_parameters(model) if name in origin.gains and not p.is_meta and not is_sharded(p)]
    return any(bool((p != p.flatten()[0]).any()) for p in gains if p.numel())


def mark_initialised(model: nn.Module, origin: Origin) -> None:
    origin.initialised, origin.loaded = True, False
    for counter in _counters(model):
        counter.loads = 0


def as_constructed(tensors: Mapping[str, Tensor], origin: Origin, names: Iterable[str]) -> bool:
    """True if none of these parameters has changed since the constructor."""
    names = list(names)
    return bool(names) and all(origin.fresh.get(name, -1) == version_of(tensors[name]) for name in names)


class SaveWithMultipliers:
    """Stands before `save_pretrained` of a model with multipliers: the plain class would not have them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        what = f"{type(self.model).__name__} is saved without the multipliers of its forward pass"
        fix = "to load it as a plain model, save it like this: with scaling.folded(): model.save_pretrained(…)"
        warnings.warn(f"{what}; {fix}", stacklevel=2)
        save: Callable[..., object] = type(self.model).save_pretrained  # type: ignore[attr-defined]
        return save(self.model, *args, **kwargs)


def is_sharded(tensor: Tensor) -> bool:
    """Is it a DTensor? Asked without importing torch.distributed.tensor, which takes as long as all of completep."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered from all ranks if it is sharded. Every rank must call this."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full


class MarkState:
    """Hook of state_dict: notes the multipliers that the weights need in the metadata, which loaders ignore."""

    def __init__(self, factors: Mapping[str, float]) -> None:
        self.factors = dict(factors)

    def __call__(self, module: nn.Module, state: object, prefix: str, metadata: dict[str, Any]) -> None:
        metadata["completep"] = {"style": "multiplier", "multipliers": dict(self.factors)}


def mark(model: nn.Module, factors: Mapping[str, float]) -> None:
    """Mark a model whose forward pass has multipliers."""
    model.register_state_dict_post_hook(MarkState(factors))  # type: ignore[no-untyped-call]
    if hasattr(type(model), "save_pretrained"):
        model.save_pretrained = SaveWithMultipliers(model)  # type: ignore[assignment]


def unmark(model: nn.Module) -> None:
    for key, hook in list(model._state_dict_hooks.items()):
        if isinstance(hook, MarkState):
            del model._state_dict_hooks[key]
    if isinstance(model.__dict__.get("save_pretrained"), SaveWithMultipliers):
        del model.__dict__["save_pretrained"]
