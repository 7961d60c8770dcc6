"""Learning-rate transfer of a mixture of experts, over depth and over the number of experts. Beyond the paper.

A quarter of the experts is active at every size, so a token passes the same share of the model as it grows.
The rules scale ε alone with the number of experts; here the base has as many experts as the model, and ε is negligible.
"""

from dataclasses import replace

import polars as pl

from completep import paper
from completep.config import Run, Shape
from completep.measure.curves import Transfer, judge_transfer
from completep.report.document import Figure
from completep.rules.table import display_name
from completep.stats import mean_and_range
from completep.studies.design import Experiment, Outcome, Sweep, Tuning, listed
from completep.studies.judging import answer, finished, transfer_frame
from completep.studies.scale import BASE_VALUES, Scale, octaves
from completep.sweep.task import Point

RULES = ("mup", "completep")
SHARE = 4  # experts per active expert
SIZES = pl.format("{} layers, {} experts", "depth", "experts")


def run(scale: Scale, point: Point) -> Run:
    dense = scale.fixed_tokens(point, lr=point.number("lr"), std=scale.std)
    experts = point.whole("experts")
    width = 2 * scale.base.width
    model = replace(dense.model, experts=experts, active_experts=max(1, experts // SHARE), expert_width=width)
    return replace(dense, model=model)


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[list[Transfer]]:
    """The base's best value at every depth and number of experts. The number of experts stands for the width here."""
    runs = finished(frame).with_columns(width=pl.col("experts"))
    smallest = Shape(*(int(runs[axis].to_numpy().min()) for axis in ("experts", "depth")))
    transfers = judge_transfer(runs, "lr", smallest)
    table = transfer_frame(transfers).rename({"width": "experts"})
    ours = next((t for t in transfers if t.rules == "completep"), None)
    return Outcome(answer(None if ours is None else ours.word), "; ".join(map(_sentence, transfers)), table, transfers)


def _sentence(t: Transfer) -> str:
    moves = [
        f"{s.drift:+.2f} octaves to {s.shape.depth} layers and {s.shape.width} experts (regret {s.regret:.2f} %)"
        for s in t.shapes
    ]
    what = f"the best lr moves by {', '.join(moves)}" if moves else "only one size was run"
    return f"{display_name(t.rules)} {t.word}: {what}"


def draw(experiment: Experiment, frame: pl.DataFrame, outcome: Outcome[list[Transfer]]) -> list[Figure]:
    from completep.report import charts

    points = ("rules", "depth", "experts", "lr")
    means = mean_and_range(frame, *points).sort(*points).with_columns(size=SIZES)
    sizes = means.sort("experts", "depth")["size"].unique(maintain_order=True).to_list()
    x = charts.log2_x("lr", sorted(means["lr"].unique().to_list()), charts.SYMBOLS["lr"])
    colour, span = charts.by_order("size", "size", sizes), charts.span_of(means["loss"])
    panels = [
        charts.loss_curves(
            means.filter(pl.col("rules") == t.rules), x, "lr", colour, "size", f"{display_name(t.rules)}: {t.word}",
            why=t.why, span=span, mark=t.best, first=i == 0,
        )
        for i, t in enumerate(outcome.detail)
    ]  # fmt: skip
    return [Figure(experiment.name, experiment.study.question, tuple(panels))]


STUDY = listed(
    Sweep(
        name="expert-transfer",
        question="Does the best learning rate of a mixture of experts stay the best with more layers or experts?",
        claim="Not in the paper. Jiang et al. (arXiv 2601.20205) find that it stays, over both.",
        decision=(
            "At every depth and number of experts, the regret of the base's best η under CompleteP: PASS if its whole "
            "90 % interval over seeds is below 0.5 % of the loss; FAIL if it is above, or open and the optimum "
            "has moved by more than half an octave (Holm). Agrees if CompleteP passes."
        ),
        axes={
            "laptop": {
                "rules": RULES, "depth": (2, 8), "experts": (4, 16), "lr": octaves(-9, -3), "seed": (0, 1, 2),
            },
            "desk": {
                "rules": RULES, "depth": (2, 8), "experts": (4, 16), "lr": octaves(-9, -3), "seed": (0, 1, 2, 3, 4),
            },
            "paper": {
                "rules": RULES, "depth": (2, 8), "experts": (8, 32), "lr": octaves(*paper.LR_OCTAVES),
                "seed": (0, 1, 2),
            },
        },
        beyond_paper=True,
        run=run,
        find=find,
        draw=draw,
        swept="lr",
        tuning=Tuning(lambda s: Point(rules="completep", depth=s.base.depth, experts=4, lr=s.lr), BASE_VALUES),
    )
)  # fmt: skip
