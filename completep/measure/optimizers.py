"""torch's optimizers without its compiler.

Every method of a torch optimizer says something to the compiler and imports it for that, which takes as long as the
check of a small family. Only compiled steps need it, and no step is compiled here.
"""

import inspect
from typing import TypeVar, cast

import torch

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def without_compiler(kind: type[Kind]) -> type[Kind]:
    """The same optimizer, with methods as they are before their decorators."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "zero_grad", "step")}
    methods["step"] = torch.no_grad()(methods["step"])
    return cast(type[Kind], type(kind.__name__, (kind,), methods))


AdamW = without_compiler(torch.optim.AdamW)
SGD = without_compiler(torch.optim.SGD)
Muon = without_compiler(torch.optim.Muon)
