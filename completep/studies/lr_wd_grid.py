"""The grid of η and λ: is it η·λ·steps that has an optimum, rather than λ?"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from completep import paper
from completep.config import Run, Shape
from completep.measure.curves import curve
from completep.report.document import Figure
from completep.rules.table import display_name
from completep.stats import mean_and_range, mean_over_seeds, minimum, slope
from completep.studies.design import UNSEEN, Agreement, Experiment, Outcome, Sweep, listed
from completep.studies.judging import finished
from completep.studies.scale import Scale, ScaleName, octaves
from completep.sweep.task import Point

if TYPE_CHECKING:
    from completep.report.document import Panel

STD: Mapping[ScaleName, float] = {"laptop": 0.1, "desk": 0.1, "paper": paper.GRID_STD}
RULES = ("sp", "mup")


def run(scale: Scale, point: Point) -> Run:
    shape = Shape(point.whole("width"), paper.GRID_DEPTH)
    lr, weight_decay = point.number("lr"), point.number("weight_decay")
    return scale.compute_optimal(point, shape, lr=lr, std=STD[scale.name], weight_decay=weight_decay)


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[None]:
    """If τ = 1/(η λ steps) is what matters, the best λ halves where η doubles."""
    rows = []
    for (rules, width, lr), part in sorted(finished(frame).partition_by("rules", "width", "lr", as_dict=True).items()):
        if part["loss"].is_finite().sum() < 3:
            continue
        x, losses = curve(part, "weight_decay")
        best = minimum(x, mean_over_seeds(losses))
        tau = 1 / (lr * 2**best.place * part["steps"][0])
        rows.append(
            {
                "rules": rules, "width": width, "lr": lr, "best_weight_decay": 2**best.place, "best_tau": tau,
                "interior": best.interior, "loss": best.height,
            }
        )  # fmt: skip
    table = pl.DataFrame(rows, infer_schema_length=None)
    inner = table.filter("interior") if rows else table
    if inner.height < 3:
        why = "too few learning rates have their best weight decay inside the grid"
        return Outcome(UNSEEN, why, table, None)
    models = inner.select(pl.format("{} {}", "rules", "width")).to_series()
    if inner.group_by("rules", "width").len()["len"].max() == 1:
        why = "no two learning rates of one model have their best weight decay inside the grid"
        return Outcome(UNSEEN, why, table, None)
    fit = slope(np.log2(inner["lr"].to_numpy()), np.log2(inner["best_weight_decay"].to_numpy()), models.to_numpy())
    sentence = (
        f"log₂ of the best λ goes as {fit.value:+.2f} ({fit.low:+.2f} … {fit.high:+.2f}) log₂ η where the minimum is "
        "inside the grid; constant τ means -1, constant λ means 0"
    )
    # Nearer to one than to the other, with the whole interval.
    agreement: Agreement = "agrees" if fit.high < -0.5 else "does not agree" if fit.low > -0.5 else UNSEEN
    return Outcome(agreement, sentence, table, None)


def draw(experiment: Experiment, frame: pl.DataFrame, outcome: Outcome[None]) -> list[Figure]:
    """Loss over λ, a line per η; and over τ, where the minima should coincide."""
    import altair as alt

    from completep.report import charts

    ended = frame.filter(pl.col("loss").is_not_null())
    lrs = sorted(ended["lr"].unique().to_list())
    names = [f"2^{math.log2(v):g}" for v in lrs]
    ended = ended.with_columns(
        tau=1 / (pl.col("lr") * pl.col("weight_decay") * pl.col("steps")),
        eta=pl.col("lr").replace_strict(dict(zip(lrs, names, strict=True)), return_dtype=pl.String),
    )
    points = ("rules", "width", "eta", "weight_decay", "tau")
    means = mean_and_range(ended, *points).sort(*points).sort("tau")
    panels: list[Panel] = []
    for (rules, width), part in means.partition_by("rules", "width", as_dict=True, maintain_order=True).items():
        for field, symbol in (("weight_decay", "λ"), ("tau", "τ")):
            values = part[field].unique().to_list()
            scale = alt.Scale(type="log", base=2, domain=[min(values) / 1.2, max(values) * 1.2])
            axis = alt.Axis(format=".2~g", tickCount=5, grid=False)
            x = alt.X(f"{field}:Q", title=charts.SYMBOLS[field], scale=scale, axis=axis)
            title = f"{display_name(str(rules))}, N = {width}, by {symbol}"
            colour, span = charts.by_order("eta", "η", names), charts.span_of(part["loss"])
            panels.append(
                charts.loss_curves(part.sort(field), x, field, colour, "eta", title, span=span, first=not panels)
            )
    return [Figure(experiment.name, experiment.study.question, tuple(panels))]


STUDY = listed(
    Sweep(
        name="lr-wd-grid",
        question="Is it η·λ·steps, rather than λ, that has an optimum?",
        claim="The optimal τ stays the same over learning rates and weight decays, under SP and muP.",
        decision=(
            "The slope of log2 of the best λ over log2 η, where the minimum over λ is inside the grid. The best λ "
            "is that of mean losses over seeds. Constant τ means -1, constant λ means 0. Agrees if the whole 90 % "
            "interval is nearer to -1."
        ),
        axes={
            "laptop": {
                "rules": RULES, "width": (32,), "lr": octaves(-8, -5), "weight_decay": octaves(-4, 2), "seed": (0, 1),
            },
            "desk": {
                "rules": RULES, "width": (32, 64), "lr": octaves(-8, -5), "weight_decay": octaves(-4, 2),
                "seed": (0, 1, 2),
            },
            "paper": {
                "rules": RULES, "width": paper.GRID_WIDTHS, "lr": octaves(*paper.GRID_LR_OCTAVES),
                "weight_decay": octaves(*paper.GRID_DECAY_OCTAVES), "seed": (0, 1, 2),
            },
        },
        run=run,
        find=find,
        draw=draw,
    )
)  # fmt: skip
