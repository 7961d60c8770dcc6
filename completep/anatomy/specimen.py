"""Which model is examined and on which inputs: yours, the base, or a small model that you pass."""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from completep.anatomy.blocks import Stack
from completep.config import Shape
from completep.errors import UserError

LARGEST_SPECIMEN = 300_000_000  # parameters; 1.2 GB in float32
ROWS = 64  # of the tables in a reduced copy

Factory = Callable[[], nn.Module]
Known = TypeVar("Known")


class _NothingDrawn(TorchFunctionMode):
    """Nobody sees the random numbers of a meta tensor, but to draw them torch imports its compiler, for a second.

    Zeros are one change in place, as the draws are (`rules/weights.py` counts changes to tell new models from loaded).
    """

    DRAWS = frozenset({Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_})

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.DRAWS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                with torch.no_grad():
                    return tensor.zero_()
        return func(*args, **kwargs)


def build(factory: Factory, device: str) -> nn.Module:
    """Call a factory on a device. Your random state is not changed."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device), _NothingDrawn():
            model = factory()
    except UserError:
        raise
    except Exception as error:
        what = f"the factory failed on the {device} device: {type(error).__name__}: {error}"
        raise UserError(what, fix="call the factory separately to see the whole traceback") from error
    if not isinstance(model, nn.Module):
        what = f"the factory returned {type(model).__name__}, not an nn.Module"
        raise UserError(what, fix="base=lambda: MyModel(width=…, depth=…)")
    return model


def on_cpu() -> AbstractContextManager[object]:
    """Tensors are made on the CPU, also inside `with torch.device("meta")`. Every operation pays for that context."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def on_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def runnable(model: nn.Module) -> nn.Module:
    """The model on the CPU in float32, without dropout, with gradients for all parameters."""
    return model.to(device="cpu", dtype=torch.float32).eval().requires_grad_(True)


def copied(model: nn.Module, memo: Mapping[int, object] | None = None) -> nn.Module:
    """A deep copy. `memo` says what stands in the copy for an object, by its id."""
    return copy.deepcopy(model, {**_empty(model), **without_history(model), **(memo or {})})


def _empty(model: nn.Module) -> dict[int, object]:
    """A memo for deepcopy: copies of the empty dicts in every module, which take most of its time."""
    values = (value for module in model.modules() for value in vars(module).values())
    return {id(value): type(value)() for value in values if type(value) in (dict, OrderedDict) and not value}


def without_history(model: nn.Module) -> dict[int, object]:
    """A memo for deepcopy, which cannot copy what a forward pass has left in a model, such as an auxiliary loss."""
    kept = [tensor for module in model.modules() for tensor in _tensors(list(vars(module).values()))]
    return {id(tensor): tensor.detach().clone() for tensor in kept if not tensor.is_leaf}


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


class Base:
    """The tuned model, as a Shape or a factory.

    A factory is called at most once on the meta device and at most once for real. One call is not enough: the size must
    be known before memory is spent, and the meta device has no values of buffers and of constructors. What is learned
    from the base holds for models of every size, and is learned once.
    """

    def __init__(self, base: Factory | Shape) -> None:
        if not isinstance(base, Shape) and (not callable(base) or isinstance(base, nn.Module)):
            what = f"base is a {type(base).__name__}, neither a factory nor a Shape"
            raise UserError(what, fix="base=lambda: MyModel(width=256, depth=2), or base=Shape(256, 2)")
        self.shape = base if isinstance(base, Shape) else None
        self.factory = None if isinstance(base, Shape) else base
        self.versions: dict[str, int] | None = None  # of a real base's parameters: changes in place by its constructor
        self._known: dict[str, Any] = {}

    @cached_property
    def model(self) -> nn.Module | None:
        """The base on the meta device, or for real if its constructor cannot run there; None for a Shape."""
        if self.factory is None:
            return None
        try:
            return build(self.factory, "meta")
        except UserError:
            return self.real  # some constructors compute with their tensors

    @cached_property
    def real(self) -> nn.Module | None:
        """The base with real numbers, ready to run; None for a Shape."""
        if self.factory is None:
            return None
        model = build(self.factory, "cpu")
        self.versions = {name: p._version for name, p in model.named_parameters() if not p.is_inference()}
        return runnable(model)

    @property
    def is_small(self) -> bool:
        """True if there is a base model that can be run."""
        return self.model is not None and size(self.model) <= LARGEST_SPECIMEN

    def once(self, what: str, find: Callable[[], Known]) -> Known:
        """The result of `find`, computed once and cached under this name."""
        if what not in self._known:
            self._known[what] = find()
        known: Known = self._known[what]
        return known


def choose_specimen(model: nn.Module, base: Base, given: Factory | nn.Module | None) -> nn.Module:
    """A model of this class that can be run: the one that you pass, the base, or a copy of the model."""
    if isinstance(given, nn.Module):
        return runnable(copied(given))
    if given is not None:
        return runnable(_build_small(given))
    if base.is_small and base.real is not None:
        return base.real
    if not on_meta(model) and size(model) <= LARGEST_SPECIMEN:
        return runnable(copied(model))
    why = "is on the meta device" if on_meta(model) else f"has {size(model):,} parameters"
    kind = "too large as well" if base.factory else "only a Shape"
    what = f"nothing is small enough to examine: the model {why}, and the base is {kind}"
    raise UserError(what, fix="pass specimen=lambda: <the same class, small>; it is run to find and prove the roles")


def _build_small(factory: Factory) -> nn.Module:
    if not callable(factory):
        what = f"specimen={factory!r} is neither a model nor a factory"
        raise UserError(what, fix="specimen=lambda: <the same class, small>")
    try:
        parameters = size(build(factory, "meta"))
    except UserError:
        parameters = 0  # the size is unknown if it cannot be built on the meta device
    if parameters > LARGEST_SPECIMEN:
        what = f"the model to examine has {parameters:,} parameters, more than {LARGEST_SPECIMEN:,}"
        raise UserError(what, fix="pass base as a factory for a small base model, or a smaller specimen")
    return build(factory, "cpu")


def reduced(
    model: nn.Module, stacks: Sequence[Stack], rows: Collection[str], buffers: Mapping[str, Tensor]
) -> nn.Module | None:
    """A copy that runs on the CPU: one block of each kind, and the first of these rows. Nothing else is smaller.

    The model may be on the meta device: parameters of the copy hold no values yet, and buffers without values take
    those of `buffers`, by name. None if even this copy is too large.
    """
    repeated = _repeated(model, stacks)
    dropped = {id(module): nn.Identity() for name, module in model.named_modules() if name in repeated}
    cut = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in rows}
    shapes: dict[int, tuple[int, ...]] = {}
    for module in _outside(model, dropped):
        for p in module._parameters.values():
            if p is not None:
                shapes[id(p)] = (min(p.shape[0], ROWS), *p.shape[1:]) if id(p) in cut else tuple(p.shape)
    if sum(map(math.prod, shapes.values())) > LARGEST_SPECIMEN:
        return None
    memo: dict[int, object] = dropped | {key: nn.Parameter(torch.empty(shape)) for key, shape in shapes.items()}
    memo |= {id(b): _real_buffer(b, buffers.get(name)) for name, b in model.named_buffers() if b.is_meta}
    small = copied(model, memo)
    gone = {id(identity) for identity in dropped.values()}
    for module in small.modules():
        children = module._modules
        kept = {name: child for name, child in children.items() if id(child) not in gone}
        counted = all(name.isdecimal() for name in children)
        module._modules = {str(i): child for i, child in enumerate(kept.values())} if counted else kept
        if isinstance(module, nn.Embedding):
            module.num_embeddings = module.weight.shape[0]
    return runnable(small)


def _repeated(model: nn.Module, stacks: Sequence[Stack]) -> set[str]:
    """All blocks except the first of each kind: blocks of one kind have the same parameter names."""
    kinds: set[tuple[str, ...]] = set()
    repeated = set()
    for name, module in model.named_modules():
        for stack in stacks:
            if stack.pattern.fullmatch(name):
                kind = (stack.stem, *(n for n, _ in module.named_parameters()))
                repeated |= {name} if kind in kinds else set()
                kinds.add(kind)
    return repeated


def _outside(module: nn.Module, dropped: Collection[int]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if id(child) not in dropped:
            yield from _outside(child, dropped)


def _real_buffer(buffer: Tensor, known: Tensor | None) -> Tensor:
    if known is not None and known.shape == buffer.shape:
        return known.detach().clone()
    return torch.ones(buffer.shape, dtype=buffer.dtype, device="cpu")


def guess_example(model: nn.Module) -> Tensor:
    """Inputs for a model, if you gave none: token ids, or an image."""
    generator = torch.Generator().manual_seed(0)
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if tables:
        smallest = min(m.num_embeddings for m in tables)  # the ids are valid for every table
        return torch.randint(smallest, (2, 8), generator=generator)
    images = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    side = _image_side(model)
    if images and side:
        return torch.randn(2, images[0].in_channels, side, side, generator=generator)
    what = "completep cannot guess the inputs of this model"
    raise UserError(what, fix="pass example=<inputs>: a tensor, a tuple of arguments, or a dict")


def _image_side(model: nn.Module) -> int | None:
    holders = (model, getattr(model, "config", None), getattr(model, "patch_embed", None))
    values = [getattr(holder, name, None) for holder in holders for name in ("image_size", "img_size")]
    sides = [value[0] if isinstance(value, (tuple, list)) else value for value in values]
    return next((side for side in sides if isinstance(side, int)), None)
