"""Gradients of what makes a condition, added up over the blocks without their signs.

A condition, such as the class and the time of a DiT, enters every block beside the stream. So the gradient of what
makes it is a sum over the blocks, each of which adds 1/L: a random sum at init, which falls as the root of the depth,
and an aligned one in training. As for gains and biases, the terms are added up without their signs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from completep.anatomy.trace import given_tensor


class ConditionGradients:
    """Watches what the blocks are given beside the stream. After the backward pass, `unsigned` has Σ |term|."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        self.streams: list[Tensor] = []  # what the blocks are given first
        self.given: list[Tensor] = []  # what they are given beside it
        self.terms: list[tuple[Tensor, Tensor]] = []  # (what one block was given, its gradient from this block)

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [block.register_forward_pre_hook(self._separate, with_kwargs=True) for block in self.blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _separate(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Give the block views of its own, whose gradients come from this block alone."""
        stream = given_tensor(args, kwargs)
        if stream is None:
            return args, kwargs
        self.streams.append(stream)

        def own(value: object) -> object:
            aside = isinstance(value, Tensor) and value is not stream and value.requires_grad
            return self._view(value) if aside and isinstance(value, Tensor) else value

        return tuple(map(own, args)), {key: own(value) for key, value in kwargs.items()}

    def _view(self, given: Tensor) -> Tensor:
        view = given.view_as(given)
        view.register_hook(lambda gradient: self.terms.append((given, gradient)))  # type: ignore[no-untyped-call]
        self.given.append(given)
        return view

    def unsigned(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """By name, for the parameters that reach the blocks beside the stream alone. The graph must be retained."""
        whole = {name: p.grad for name, p in parameters.items() if p.grad is not None} if self.terms else {}
        into_stream = _gradients(self.streams[0], [parameters[name] for name in whole]) if whole else []
        made = [name for name, gradient in zip(whole, into_stream, strict=True) if gradient is None]
        signed = {name: torch.zeros_like(whole[name]) for name in made}
        unsigned: dict[str, Tensor] = {}
        for given, gradient in self.terms:
            terms = _gradients(given, [parameters[name] for name in made], gradient)
            for name, term in zip(made, terms, strict=True):
                if term is not None:
                    signed[name] += term
                    unsigned[name] = unsigned.get(name, torch.zeros_like(term)) + term.abs()
        # What is left of the whole gradient reaches the loss past the blocks.
        return {name: total + (whole[name] - signed[name]).abs() for name, total in unsigned.items()}


def _gradients(result: Tensor, parameters: Sequence[Tensor], gradient: Tensor | None = None) -> Sequence[Tensor | None]:
    if not parameters or not result.requires_grad:
        return [None] * len(parameters)
    given = torch.ones_like(result) if gradient is None else gradient
    return torch.autograd.grad(result, parameters, given, retain_graph=True, allow_unused=True)
