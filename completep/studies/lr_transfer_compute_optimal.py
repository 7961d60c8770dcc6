"""Learning-rate transfer when every model is trained for 20 tokens per parameter."""

from collections.abc import Mapping

import polars as pl

from completep import paper
from completep.config import Run, Shape
from completep.measure.curves import Transfer
from completep.studies.design import Experiment, Outcome, Sweep, listed
from completep.studies.judging import Transfers, draw_transfer, finished, ranking, transfer_frame, transfers_of
from completep.studies.scale import RULES, Scale, ScaleName, octaves
from completep.sweep.task import Point

WIDTH: Mapping[ScaleName, int] = {"laptop": 32, "paper": paper.BASE.width}


def run(scale: Scale, point: Point) -> Run:
    return scale.compute_optimal(point, Shape(WIDTH[scale.name], point.whole("depth")), lr=point.number("lr"))


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[Transfers]:
    """At the base's best η the deepest CompleteP model has the lowest loss."""
    base_depth = experiment.scale.base.depth
    transfers = transfers_of(frame, "lr", Shape(int(frame["width"][0]), base_depth))
    deepest = max((s.shape.depth for t in transfers for s in t.shapes), default=base_depth)
    losses = {t.rules: known_loss(t, frame, deepest) for t in transfers}
    agreement, sentence = ranking(losses, f"with the base's best η at depth {deepest}")
    return Outcome(agreement, sentence, transfer_frame(transfers), transfers)


def known_loss(t: Transfer, frame: pl.DataFrame, depth: int) -> float | None:
    """The loss at the base's best value; None where no value near it was tried at this depth."""
    shape = next((s for s in t.shapes if s.shape.depth == depth), None)
    tried = finished(frame).filter((pl.col("rules") == t.rules) & (pl.col("depth") == depth))["lr"].to_list()
    return shape.loss if shape is not None and tried and min(tried) <= t.best <= max(tried) else None


STUDY = listed(
    Sweep(
        name="lr-transfer-compute-optimal",
        question="Does the learning rate transfer when every model is trained for 20 tokens per parameter?",
        claim="It matters less, and without tuning CompleteP still has the lowest loss in deep models.",
        axes={
            "laptop": {"rules": RULES, "depth": (2, 4, 8), "lr": octaves(-8, -4), "seed": (0,)},
            "paper": {"rules": RULES, "depth": paper.TRANSFER_DEPTHS, "lr": octaves(*paper.LR_OCTAVES), "seed": (0,)},
        },
        run=run,
        find=find,
        draw=draw_transfer,
        swept="lr",
    )
)
