"""`completep worker`: does what a store's queue asks for, on any machine that sees the store."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from completep.cli.shared import console, print_json
from completep.errors import UserError


def worker(store: Annotated[Positional[Path], arg(metavar="STORE")], /, idle: float = 60.0, json: bool = False) -> int:
    """Take runs from a store until there are none for a while. Start as many as you like, on any machines.

    `completep tune --engine slurm` starts these as one array job. On Kubernetes, SkyPilot or anything else, start them
    yourself on the folder `store` under --out.

    Example: completep worker runs/store --idle 0

    Args:
        store: the folder `store` of a tuning, which all machines share.
        idle: seconds without a run, after which the worker ends.
        json: print JSON.
    """
    from completep.sweep.store import Store
    from completep.sweep.worker import Worker

    place = Store(store)
    place.look()
    if not store.is_dir():
        raise UserError(f"there is no store at {store}", fix="give the folder `store` under --out of a tuning")
    if not idle >= 0:
        raise UserError(f"idle={idle}: must be at least 0", fix="give a number of seconds")
    done = Worker(place, idle, lambda line: console(stderr=True).print(line)).run()
    print_json({"done": done}) if json else console().print(f"{done} runs done here")
    return 0
