"""A few real steps of training, shared by the tests."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 61


def tokens(seed: int, batch: int = 2, time: int = 9, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (batch, time), generator=torch.Generator().manual_seed(seed))


def logits(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    return out.logits if hasattr(out, "logits") else out


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, clip=None, vocabulary: int = VOCABULARY
) -> float:
    batch = tokens(seed, vocabulary=vocabulary)
    loss = F.cross_entropy(logits(model, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        clip()
    optimizer.step()
    return loss.item()


def worst(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return ((a - b).abs().max() / b.abs().max()).item()


def slow(value):
    """A value of a parametrized test that `make check` leaves out."""
    return pytest.param(value, marks=pytest.mark.slow)
