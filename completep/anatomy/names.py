"""Names of parameters and modules, the same with and without wrappers such as DDP and torch.compile."""

from collections.abc import Iterator

from torch import nn


def plain(name: str) -> str:
    """The name of a parameter or module without the prefixes that wrappers add."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Like `model.named_parameters()`, with plain names."""
    return ((plain(name), parameter) for name, parameter in model.named_parameters())


def unwrap(model: nn.Module) -> nn.Module:
    """Your own module inside DDP, DataParallel or torch.compile."""
    ddp = isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel))
    inner = model.module if ddp else getattr(model, "_orig_mod", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model
