"""Learning-rate transfer when every model is trained for 20 tokens per parameter."""

import math
from collections.abc import Mapping

import polars as pl

from completep import paper
from completep.config import Run, Shape
from completep.measure.curves import Transfer, curve
from completep.stats import height_at
from completep.studies.design import Experiment, Outcome, Sweep, listed
from completep.studies.judging import Losses, Transfers, draw_transfer, finished, ranking, transfer_frame, transfers_of
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


def known_loss(t: Transfer, frame: pl.DataFrame, depth: int) -> Losses | None:
    """The loss at the base's best value, by seed; None where no value near it was tried at this depth."""
    here = finished(frame).filter((pl.col("rules") == t.rules) & (pl.col("depth") == depth))
    if here.is_empty() or not here["lr"].min() <= t.best <= here["lr"].max():  # type: ignore[operator]
        return None
    seeds = here["seed"].unique().sort().to_list() if "seed" in here.columns else [0]
    x, losses = curve(here, "lr", seeds if "seed" in here.columns else None)
    return {seed: height_at(x, column, math.log2(t.best)) for seed, column in zip(seeds, losses.T, strict=True)}


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
