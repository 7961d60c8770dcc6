"""Kinds of modules that are known by their class: linear layers, convolutions, tables, torch's attention."""

from torch import nn


def is_linear(module: nn.Module) -> bool:
    """nn.Linear and its subclasses, and Hugging Face's Conv1D, a linear layer that is stored transposed."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_convolution(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def is_product(module: nn.Module) -> bool:
    """Modules whose output is linear in their parameters."""
    return is_linear(module) or is_convolution(module) or isinstance(module, (nn.Embedding, nn.MultiheadAttention))


def fan_in_axes(module: nn.Module, dimensions: int) -> tuple[int, ...]:
    """The axes of the module's matrix that its product sums over."""
    if type(module).__name__ == "Conv1D":  # Hugging Face's, stored transposed
        return (0,)
    return tuple(range(1, dimensions))
