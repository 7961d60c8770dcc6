"""`completep worker`: does the runs in the queue of a store, on any machine that shares the store."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from completep.cli.shared import console, print_json
from completep.errors import UserError


def worker(store: Annotated[Positional[Path], arg(metavar="STORE")], /, idle: float = 60.0, json: bool = False) -> int:
    """Do the runs in the queue of a store, until it has been empty for a while.

    Start as many workers as you like, on any machines that share the store. `completep tune --engine slurm` starts them
    as one array job. On Kubernetes, SkyPilot or anything else, start them yourself.

    Example: completep worker runs/store --idle 0

    Args:
        store: the folder `store` under --out of the tuning.
        idle: seconds without a run after which the worker ends.
        json: print JSON.
    """
    from completep.sweep import training  # noqa: F401  these modules register the kinds of task
    from completep.sweep.store import Store
    from completep.sweep.worker import Worker
    from completep.tuning import decoder, tasks  # noqa: F401

    place = Store(store)
    place.look()
    if not store.is_dir():
        raise UserError(f"there is no store at {store}", fix="give the folder `store` under --out of a tuning")
    if not idle >= 0:
        raise UserError(f"idle={idle}: must be at least 0", fix="give a number of seconds")
    done = Worker(place, idle, lambda line: console(stderr=True).print(line)).run()
    print_json({"done": done}) if json else console().print(f"this worker did {done} runs")
    return 0
