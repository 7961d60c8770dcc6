"""Transfer of the init standard deviation over depth."""

from functools import partial

from completep import paper
from completep.config import Run
from completep.studies.design import Sweep, listed
from completep.studies.judging import TRANSFER_CLAIM, draw_transfer, find_transfer
from completep.studies.scale import RULES, Scale, octaves
from completep.sweep.task import Point


def run(scale: Scale, point: Point) -> Run:
    return scale.fixed_tokens(point, lr=scale.lr, std=point.number("std"))


STUDY = listed(
    Sweep(
        name="init-transfer",
        question="Does the init standard deviation that is best at the base stay the best in deeper models?",
        claim=TRANSFER_CLAIM,
        axes={
            "laptop": {"rules": RULES, "depth": (2, 4, 16), "std": octaves(-6, 0), "seed": (0, 1, 2)},
            "paper": {"rules": RULES, "depth": paper.TRANSFER_DEPTHS, "std": paper.STDS, "seed": (0,)},
        },
        run=run,
        find=partial(find_transfer, "std"),
        draw=draw_transfer,
        swept="std",
    )
)
