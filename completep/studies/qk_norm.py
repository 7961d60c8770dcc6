"""Does QK norm give learning-rate transfer over depth for free? An objection to rules for depth, put to the test.

`lr-transfer` again, with a norm on queries and keys in every model.
"""

from dataclasses import replace

import polars as pl

from completep.config import Run
from completep.studies.design import Experiment, Outcome, Sweep, listed
from completep.studies.judging import Transfers, answer, draw_transfer, transfer_frame, transfer_sentence, transfers_of
from completep.studies.lr_transfer import STUDY as PLAIN
from completep.studies.scale import Scale
from completep.sweep.task import Point

RULES = ("mup", "completep")


def run(scale: Scale, point: Point) -> Run:
    plain = PLAIN.run(scale, point)
    return replace(plain, model=replace(plain.model, qk_norm=True))


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[Transfers]:
    transfers = transfers_of(frame, "lr", experiment.scale.base)
    words = {t.rules: t.word for t in transfers}
    sentence = "; ".join(transfer_sentence(t) for t in transfers)
    return Outcome(answer(words.get("mup")), sentence, transfer_frame(transfers), transfers)


STUDY = listed(
    Sweep(
        name="qk-norm",
        question="With QK norm, does the best learning rate transfer over depth without any rule for depth?",
        claim="It does, in one report (depth 4 to 256 under SP). The paper has no QK norm.",
        decision=(
            "At every depth, the regret of the base's best learning rate, judged as in lr-transfer. Agrees if SP/muP "
            "passes at all depths; does not agree if it fails at one."
        ),
        axes={scale: {**axes, "rules": RULES} for scale, axes in PLAIN.axes.items()},
        tuning=PLAIN.tuning,
        beyond_paper=True,
        run=run,
        find=find,
        draw=draw_transfer,
        swept="lr",
    )
)
