"""One call of a module in a forward pass, kept so that it can be repeated on another input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.autograd.graph import Node

from completep.errors import UserError


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module. A module without parameters may be called several times in one forward pass."""

    site: str  # name of the module
    module: nn.Module
    args: Sequence[object]
    kwargs: Mapping[str, object]
    given: Tensor | None  # the first floating-point tensor among its arguments
    made: Tensor  # the first tensor that it returned

    def again(self, x: Tensor) -> Tensor:
        """The module's output for another first tensor, with all other arguments as they were."""
        args = [x if value is self.given else value for value in self.args]
        kwargs = {key: x if value is self.given else value for key, value in self.kwargs.items()}
        made = self.module(*args, **kwargs)
        several = made.values() if isinstance(made, Mapping) else made
        return made if isinstance(made, Tensor) else next(v for v in several if isinstance(v, Tensor))

    def node_before(self) -> Node:
        """The node that made its input."""
        node = None if self.given is None else self.given.grad_fn
        if node is None:
            what = f"the input of '{self.site}' depends on no parameter"
            raise UserError(what, fix="use a model that embeds its inputs first")
        return node
