"""Kinds of modules: linear layers, convolutions, norms."""

from torch import nn


def is_linear(module: nn.Module) -> bool:
    """nn.Linear and its subclasses, and Hugging Face's Conv1D, a linear layer that is stored transposed."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def is_convolution(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def is_product(module: nn.Module) -> bool:
    """Modules whose output is linear in their parameters."""
    return is_linear(module) or is_convolution(module) or isinstance(module, (nn.Embedding, nn.MultiheadAttention))


def is_norm(module: nn.Module) -> bool:
    """By class or class name, with vectors as its only parameters. `roles.py` checks on numbers that it normalises."""
    called_norm = isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or "norm" in type(module).__name__.lower()
    single = not any(True for _ in module.children()) and not is_product(module)
    return called_norm and single and all(p.dim() == 1 for p in module.parameters())


def is_known(module: nn.Module) -> bool:
    return is_norm(module) or is_product(module)


def fan_in_axes(module: nn.Module, dimensions: int) -> tuple[int, ...]:
    """The axes of the module's matrix that its product sums over."""
    if type(module).__name__ == "Conv1D":  # Hugging Face's, stored transposed
        return (0,)
    return tuple(range(1, dimensions))
