"""completep: tune a transformer small, train it large.

import completep as cp

model = MyModel(width=1024, depth=48)
scaling = cp.parametrize(model, base=lambda: MyModel(width=256, depth=2), rules=cp.COMPLETEP)
scaling.init_(std=0.02, seed=0)
optimizer = torch.optim.AdamW(scaling.param_groups(lr=2**-8, weight_decay=0.1, eps=1e-16), betas=(0.9, 0.95))

Further functions: `explain`, `audit`, `check`, `derive`, `laziness`, `transfer`, `plan`, `tune` and `study`
(`list_studies` lists the studies). Each returns a result with its numbers as fields, `.verdict` if there is one,
`to_json()`, `write(folder)`, and a form for terminals and notebooks. `import completep` is fast: modules that need
torch are imported when they are first used.
"""

from typing import TYPE_CHECKING

from completep.config import Shape
from completep.errors import UserError
from completep.rules.table import COMPLETEP, MUP, SP, Role, Rules, alpha

if TYPE_CHECKING:
    from completep.compute.plan import plan
    from completep.compute.planned import Plan
    from completep.measure.check import Check, check
    from completep.measure.derive import Derivation, derive
    from completep.measure.laziness import Laziness, laziness
    from completep.measure.transfer import TransferCheck, transfer
    from completep.rules.audit import Audit, audit
    from completep.rules.explain import Explanation
    from completep.rules.measured import load_rules
    from completep.rules.parametrize import explain, parametrize
    from completep.rules.scaling import Scaling
    from completep.studies.result import StudyResult
    from completep.studies.run import list_studies, study
    from completep.tuning.result import Tuned
    from completep.tuning.run import tune
    from completep.tuning.trial import Trial

__version__ = "0.1.0"
__all__ = [
    "COMPLETEP", "MUP", "SP", "Audit", "Check", "Derivation", "Explanation", "Laziness", "Plan", "Role", "Rules",
    "Scaling", "Shape", "StudyResult", "TransferCheck", "Trial", "Tuned", "UserError", "alpha", "audit", "check",
    "derive", "explain", "laziness", "list_studies", "load_rules", "parametrize", "plan", "study", "transfer", "tune",
]  # fmt: skip

_HOMES = {
    "completep.compute.plan": ("plan",),
    "completep.compute.planned": ("Plan",),
    "completep.measure.check": ("Check", "check"),
    "completep.measure.derive": ("Derivation", "derive"),
    "completep.measure.laziness": ("Laziness", "laziness"),
    "completep.measure.transfer": ("TransferCheck", "transfer"),
    "completep.rules.audit": ("Audit", "audit"),
    "completep.rules.explain": ("Explanation",),
    "completep.rules.measured": ("load_rules",),
    "completep.rules.parametrize": ("explain", "parametrize"),
    "completep.rules.scaling": ("Scaling",),
    "completep.studies.result": ("StudyResult",),
    "completep.studies.run": ("list_studies", "study"),
    "completep.tuning.result": ("Tuned",),
    "completep.tuning.run": ("tune",),
    "completep.tuning.trial": ("Trial",),
}


def __getattr__(name: str) -> object:
    """Import a public name from its home when it is first used."""
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'completep' has no attribute {name!r}")
