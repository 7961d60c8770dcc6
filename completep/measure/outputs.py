"""The outputs of a linear layer part by part, where the model splits them at once.

Mamba's `x_proj` makes time steps, whose number grows with the width, and two vectors of a fixed size. The gradient of
the whole matrix follows no single power of the width, but that of each part does.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SPLIT = "SplitWithSizesBackward0"  # into equal parts, all of them grow alike


@dataclass(frozen=True)
class PartRow:
    """One part of the outputs of a matrix, over all blocks."""

    template: str
    part: int
    size: int
    pull: float


class SplitOutputs:
    """Watches what linear layers return, and finds in the graph of the loss how that is split."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        """`modules` are by their weights."""
        self.modules = modules
        self.made: dict[str, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        def keep(name: str) -> Callable[[nn.Module, object, object], None]:
            def hook(module: nn.Module, args: object, output: object) -> None:
                if isinstance(output, Tensor) and output.grad_fn is not None:
                    self.made[name] = output

            return hook

        handles = [module.register_forward_hook(keep(name)) for name, module in self.modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def sizes(self, loss: Tensor) -> dict[str, list[int]]:
        """By weight: the number of outputs in each part."""
        makers = {output.grad_fn: name for name, output in self.made.items()}
        sizes_of: dict[str, list[int]] = {}
        seen, waiting = set(), [loss.grad_fn] if makers else []
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            inputs = [function for function, _ in node.next_functions]
            waiting += inputs
            name = makers.get(inputs[0]) if node.name() == SPLIT else None
            if name is not None and _along_the_last_axis(node, self.made[name]):
                sizes_of[name] = list(node._saved_split_sizes)  # type: ignore[attr-defined]
        return sizes_of


def _along_the_last_axis(node: torch.autograd.graph.Node, given: Tensor) -> bool:
    after = node._saved_dim + 1  # type: ignore[attr-defined]  # torch returns -1 as 2⁶⁴ - 1
    return after % 2**64 in (0, given.dim())
