"""completep: tune a transformer small, train it large.

import completep as cp

model = MyModel(width=1024, depth=48)
scaling = cp.parametrize(model, base=lambda: MyModel(width=256, depth=2), rules=cp.COMPLETEP)
scaling.init_(std=0.02, seed=0)
optimizer = torch.optim.AdamW(scaling.param_groups(lr=2**-8, weight_decay=0.1, eps=1e-16), betas=(0.9, 0.95))
"""

from typing import TYPE_CHECKING, Any

from completep.config import Shape
from completep.errors import UserError
from completep.rules.table import COMPLETEP, MUP, SP, Role, Rules, alpha

if TYPE_CHECKING:
    from completep.rules.audit import audit
    from completep.rules.parametrize import parametrize
    from completep.rules.scaling import Scaling

__version__ = "0.1.0"
__all__ = ["COMPLETEP", "MUP", "SP", "Role", "Rules", "Scaling", "Shape", "UserError", "alpha", "audit", "parametrize"]

_NEEDS_TORCH = {
    "parametrize": "completep.rules.parametrize",
    "audit": "completep.rules.audit",
    "Scaling": "completep.rules.scaling",
}


def __getattr__(name: str) -> Any:
    """`import completep` stays light: what needs torch is imported when it is first asked for."""
    if name in _NEEDS_TORCH:
        from importlib import import_module

        return getattr(import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module 'completep' has no attribute {name!r}")
