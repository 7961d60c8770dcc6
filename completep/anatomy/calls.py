"""One call of a module in a forward pass, kept so that it can be repeated on another input; its first tensor."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.graph import Node

from completep.errors import UserError


def first_tensor(value: object) -> Tensor | None:
    """The first floating-point tensor among inputs or outputs, which by convention is the stream."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return next((t for v in value if (t := first_tensor(v)) is not None), None)
    return None


def given_tensor(args: object, kwargs: object) -> Tensor | None:
    """The first floating-point tensor that a module is called with."""
    tensor = first_tensor(args)
    return first_tensor(kwargs) if tensor is None else tensor


def replace_first(value: object, change: Callable[[Tensor], Tensor]) -> object:
    """The same inputs or outputs with another tensor in the place of `first_tensor`."""
    return _replaced(value, change)[0]


def _replaced(value: object, change: Callable[[Tensor], Tensor]) -> tuple[object, bool]:
    """(the value, whether there was a tensor to change). No tensor is compared: torch.compile traces this in hooks."""
    if isinstance(value, Tensor):
        return (change(value), True) if value.is_floating_point() else (value, False)
    if isinstance(value, Mapping):
        for key, part in value.items():
            changed, done = _replaced(part, change)
            if done:
                others: Any = copy(value)  # of the same type, as the output of a Hugging Face model
                others[key] = changed
                return others, True
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            changed, done = _replaced(part, change)
            if done:
                parts = [*value[:i], changed, *value[i + 1 :]]
                make: Any = getattr(type(value), "_make", type(value))  # of a named tuple
                return make(parts), True
    return value, False


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module. A module without parameters may be called several times in one forward pass."""

    site: str  # name of the module
    module: nn.Module
    args: Sequence[object]
    kwargs: Mapping[str, object]
    given: Tensor | None  # the first floating-point tensor among its arguments
    made: Tensor  # the first floating-point tensor that it returned

    def again(self, x: Tensor) -> Tensor:
        """The module's output for another first tensor, with all other arguments as they were."""
        args, kwargs = cast(Any, replace_first((self.args, self.kwargs), lambda given: x))
        made = first_tensor(self.module(*args, **kwargs))
        assert made is not None  # it returned one before
        return made

    def node_before(self) -> Node:
        """The node that made its input."""
        node = None if self.given is None else self.given.grad_fn
        if node is None:
            what = f"the input of '{self.site}' depends on no parameter"
            raise UserError(what, fix="use a model that embeds its inputs first")
        return node
