"""Transfer of the init standard deviation over depth."""

from functools import partial

from completep import paper
from completep.config import Run
from completep.studies.design import Sweep, Tuning, listed
from completep.studies.judging import TRANSFER_CLAIM, TRANSFER_DECISION, draw_transfer, find_transfer
from completep.studies.scale import BASE_VALUES, RULES, Scale
from completep.sweep.task import Point

STDS = tuple(0.1 * 2.0**e for e in (-2, -1, -0.5, 0, 0.5, 1, 2))


def run(scale: Scale, point: Point) -> Run:
    return scale.fixed_tokens(point, lr=scale.lr, std=point.number("std"))


STUDY = listed(
    Sweep(
        name="init-transfer",
        question="Does the init standard deviation that is best at the base stay the best in deeper models?",
        claim=TRANSFER_CLAIM,
        decision=TRANSFER_DECISION,
        axes={
            "laptop": {"rules": RULES, "depth": (2, 16), "std": STDS, "seed": (0, 1, 2, 3, 4)},
            "desk": {"rules": RULES, "depth": (2, 8, 32), "std": STDS, "seed": tuple(range(8))},
            "paper": {"rules": RULES, "depth": paper.TRANSFER_DEPTHS, "std": paper.STDS, "seed": (0, 1, 2)},
        },
        tuning=Tuning(lambda s: Point(rules="completep", depth=s.base.depth, std=s.std), BASE_VALUES),
        run=run,
        find=partial(find_transfer, "std"),
        draw=draw_transfer,
        swept="std",
    )
)
