"""Learning-rate transfer over depth at a fixed number of tokens: the paper's first figure."""

from functools import partial

from completep import paper
from completep.config import Run
from completep.studies.design import Sweep, Tuning, listed
from completep.studies.judging import TRANSFER_CLAIM, TRANSFER_DECISION, draw_transfer, find_transfer
from completep.studies.scale import BASE_VALUES, RULES, Scale, octaves
from completep.sweep.task import Point


def run(scale: Scale, point: Point) -> Run:
    return scale.fixed_tokens(point, lr=point.number("lr"), std=scale.std)


STUDY = listed(
    Sweep(
        name="lr-transfer",
        question="Does the learning rate that is best at the base stay the best in deeper models?",
        claim=TRANSFER_CLAIM,
        decision=TRANSFER_DECISION,
        axes={
            "laptop": {"rules": RULES, "depth": (2, 8, 32), "lr": octaves(-9, -3), "seed": (0, 1, 2)},
            "desk": {"rules": RULES, "depth": (2, 8, 32, 64), "lr": octaves(-9, -3), "seed": (0, 1, 2)},
            "paper": {
                "rules": RULES,
                "depth": paper.TRANSFER_DEPTHS,
                "lr": octaves(*paper.LR_OCTAVES),
                "seed": (0, 1, 2),
            },
        },
        tuning=Tuning(lambda s: Point(rules="completep", depth=s.base.depth, lr=s.lr), BASE_VALUES),
        run=run,
        find=partial(find_transfer, "lr"),
        draw=draw_transfer,
        swept="lr",
    )
)
