"""A backend by its name."""

from collections.abc import Mapping
from typing import Literal

from completep.errors import UserError
from completep.sweep.engine import Backend
from completep.sweep.local import Local
from completep.sweep.on_ray import OnRay
from completep.sweep.slurm import Slurm

EngineName = Literal["local", "ray", "slurm"]
WORKERS = 4  # of a SLURM array, if no number is given


def make_backend(
    engine: EngineName,
    workers: int | None,
    address: str | None,
    per_gpu: int = 1,
    slurm: Mapping[str, str] | None = None,
) -> Backend:
    if workers is not None and workers < 1:
        raise UserError(f"workers={workers}: must be at least 1", fix="leave workers out for the default")
    if per_gpu != 1 and engine != "local":
        raise UserError(f"per_gpu={per_gpu} is only for engine=local, not {engine}", fix="leave per_gpu out")
    if slurm and engine != "slurm":
        what = f"the slurm option {next(iter(slurm))} is only for engine=slurm, not {engine}"
        raise UserError(what, fix="use engine=slurm, or leave the slurm options out")
    if address is not None and engine != "ray":
        raise UserError(
            f"address={address!r} is only for engine=ray, not {engine}", fix="use engine=ray, or leave it out"
        )
    if engine == "ray":
        return OnRay(address, workers)
    if engine == "slurm":
        return Slurm(workers or WORKERS, dict(slurm or {}))
    return Local(workers, per_gpu)
