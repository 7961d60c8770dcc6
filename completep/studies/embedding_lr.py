"""Is muP's gain under AdamW only the embedding's learning rate? An objection to it (arXiv 2605.21486), put to the test.

Models of the base's depth grow in width. Each parameterization is given its own best learning rate at every width.
"""

import math
from dataclasses import replace

import polars as pl

from completep import paper
from completep.config import Run
from completep.rules.table import display_name
from completep.studies.design import UNSEEN, Agreement, Experiment, Outcome, Sweep, Tuning, listed
from completep.studies.judging import (
    SEED_NOISE,
    Losses,
    Transfers,
    by_seed,
    draw_transfer,
    finished,
    gap,
    log2_text,
    mean,
    transfer_frame,
    transfer_sentence,
    transfers_of,
)
from completep.studies.scale import BASE_VALUES, Scale, octaves
from completep.sweep.task import Point

RULES = ("sp", "sp-embedding", "mup")


def run(scale: Scale, point: Point) -> Run:
    base = scale.fixed_tokens(Point(point, depth=scale.base.depth), lr=point.number("lr"), std=scale.std)
    return replace(base, model=replace(base.model, width=point.whole("width")))


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[Transfers]:
    ended = finished(frame)
    transfers = transfers_of(frame, "lr", experiment.scale.base)
    widest = ended.filter(pl.col("width") == pl.col("width").max())
    best = {str(rules): best_of(of_rules) for (rules,), of_rules in widest.partition_by("rules", as_dict=True).items()}
    agreement: Agreement = UNSEEN
    sentence = f"at width {widest['width'][0]}, each with its own best lr: " + ", ".join(
        f"{display_name(r)} {mean(losses):.4f} at {log2_text(lr)}" for r, (lr, losses) in best.items()
    )
    if {"sp-embedding", "mup"} <= best.keys():
        behind = gap(best["mup"][1], best["sp-embedding"][1])
        sentence += f"; the raised embedding is behind muP by {100 * behind.low:+.2f} to {100 * behind.high:+.2f} %"
        agreement = "agrees" if behind.high < SEED_NOISE else "does not agree" if behind.low > SEED_NOISE else UNSEEN
    sentence += ". " + "; ".join(transfer_sentence(t) for t in transfers)
    return Outcome(agreement, sentence, transfer_frame(transfers), transfers)


def best_of(runs: pl.DataFrame) -> tuple[float, Losses]:
    """The lr with the lowest mean loss, and its losses by seed."""
    losses = {float(str(lr)): by_seed(part) for (lr,), part in runs.partition_by("lr", as_dict=True).items()}
    sound = {lr: of_seeds for lr, of_seeds in losses.items() if math.isfinite(mean(of_seeds))} or losses
    lr = min(sound, key=lambda value: mean(sound[value]))
    return lr, losses[lr]


STUDY = listed(
    Sweep(
        name="embedding-lr",
        question="Is what muP gains over SP under AdamW only the embedding's learning rate?",
        claim="It is, in one report: SP with only the embedding's learning rate raised is as good as muP.",
        decision=(
            "At the largest width, each parameterization at its own best lr: how far SP with the embedding's lr × m_N "
            "is behind muP in % of the loss, paired by seed. Agrees if the 90 % interval is below 0.5 %, does not "
            "agree if it is above. Whether each keeps the base's best lr is reported beside it."
        ),
        axes={
            "laptop": {"rules": RULES, "width": (32, 128), "lr": octaves(-9, -3), "seed": (0, 1, 2)},
            "desk": {"rules": RULES, "width": (32, 64, 128, 256), "lr": octaves(-10, -3), "seed": (0, 1, 2)},
            "paper": {"rules": RULES, "width": (256, 1024, 4096), "lr": octaves(*paper.LR_OCTAVES), "seed": (0, 1, 2)},
        },
        tuning=Tuning(lambda s: Point(rules="completep", width=s.base.width, lr=s.lr), BASE_VALUES),
        beyond_paper=True,
        run=run,
        find=find,
        draw=draw_transfer,
        swept="lr",
    )
)
