"""Training mode without its randomness, so that the proof can compare it with evaluation mode."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DROPOUTS = {
    getattr(F, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
}


class NoDropout(TorchFunctionMode):
    """Dropout returns its input, also where a model calls the function instead of a module.

    Masks of stochastic depth hold their expected values.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is Tensor.bernoulli_:
            tensor, p = args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return tensor.copy_(p) if isinstance(p, Tensor) else tensor.fill_(p)
        if func is F.scaled_dot_product_attention:
            kwargs |= {"dropout_p": 0.0} if len(args) < 5 else {}
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args  # query, key, value, mask, dropout_p, …
        return func(*args, **kwargs)


@contextmanager
def training_without_dropout(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        with NoDropout():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
