"""The timescale of weight decay, τ = 1 / (η λ steps): is one value good for all?"""

import math
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from completep import paper
from completep.config import Run
from completep.measure.curves import curve
from completep.report.document import Figure
from completep.stats import (
    LEVEL,
    Floats,
    Interval,
    Place,
    fit_bowl,
    height_at,
    mean_and_range,
    mean_over_seeds,
    minimum,
    regret_at,
)
from completep.studies.design import UNSEEN, Experiment, Outcome, Sweep, Tuning, listed
from completep.studies.judging import COMPETITIVE, finished
from completep.studies.scale import BASE_VALUES, RULES, Scale, base_shape, read_shape, shape_words
from completep.sweep.task import Point, Value

if TYPE_CHECKING:
    from completep.report.document import Panel


def run(scale: Scale, point: Point) -> Run:
    return scale.compute_optimal(point, read_shape(point.text("shape")), tau=point.number("tau"))


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[None]:
    """Does the paper's τ cost at most 1 % at every shape, with its whole interval?"""
    frame = finished(frame)
    shapes = sorted(frame.partition_by("rules", "width", "depth", as_dict=True).items())
    rows = [{"rules": r, "width": w, "depth": d, **bowl(part, len(shapes))} for (r, w, d), part in shapes]
    worst = max(float(row["cost_of_paper_tau_percent"]) for row in rows)
    best = [float(row["best_tau"]) for row in rows]
    sentence = (
        f"the paper's τ = {paper.TAU:g} costs at most {worst:.2f} % of the loss; "
        f"the best values lie from {min(best):.2g} to {max(best):.2g}"
    )
    table = pl.DataFrame(rows, infer_schema_length=None)
    values = frame["tau"].to_list()
    if not min(values) <= paper.TAU <= max(values):
        return Outcome(UNSEEN, sentence + "; it lies outside the values tried", table, None)
    if any(float(row["cost_low"]) > 100 * COMPETITIVE for row in rows):
        return Outcome("does not agree", sentence, table, None)
    if any(float(row["cost_high"]) > 100 * COMPETITIVE for row in rows):
        return Outcome(UNSEEN, sentence + "; the noise hides whether it costs more than 1 %", table, None)
    if all(float(row["spread_percent"]) <= 100 * COMPETITIVE for row in rows):
        return Outcome(UNSEEN, sentence + "; but every value tried is as good here", table, None)
    return Outcome("agrees", sentence, table, None)


def bowl(part: pl.DataFrame, tests: int) -> dict[str, Value]:
    """One curve over τ: its minimum, what the paper's τ costs there, and how much τ matters at all."""
    x, losses = curve(part, "tau")
    heights = mean_over_seeds(losses)
    best = minimum(x, heights)
    row: dict[str, Value] = {"best_tau": 2**best.place, "interior": best.interior}
    if not np.isfinite(best.height):
        lost = ("cost_of_paper_tau_percent", "cost_low", "cost_high", "spread_percent")
        return row | dict.fromkeys(lost, math.inf)
    cost = 100 * (height_at(x, heights, float(np.log2(paper.TAU))) / best.height - 1)
    limits = cost_interval(x, losses, tests) or Interval(cost, cost)
    spread = float(heights[np.isfinite(heights)].max()) / best.height - 1
    costs = {"cost_of_paper_tau_percent": cost, "cost_low": limits.low, "cost_high": limits.high}
    return row | costs | {"spread_percent": 100 * spread}


def cost_interval(x: Floats, losses: Floats, tests: int) -> Interval | None:
    """Of what the paper's τ costs, in %. Its lower end is corrected for the number of tests. None with one seed."""
    fitted = fit_bowl(x, losses)
    if fitted is None or fitted.seeds < 2:
        return None
    regret = regret_at(Place(float(np.log2(paper.TAU))), x, losses, fitted)
    if regret is None:
        return None
    low, high = regret.interval(1 - (1 - LEVEL) / tests).low, regret.interval().high
    return Interval(100 * math.expm1(low), 100 * math.expm1(high))


def draw(experiment: Experiment, frame: pl.DataFrame, outcome: Outcome[None]) -> list[Figure]:
    """A panel per shape, a line per parameterization."""
    from completep.report import charts

    means = charts.labelled(mean_and_range(frame, "rules", "shape", "tau").sort("rules", "shape", "tau"))
    x = charts.log2_x("tau", sorted(means["tau"].unique().to_list()), charts.SYMBOLS["tau"])
    colour = charts.by_rules([str(r) for r in experiment.axes["rules"]])
    panels: list[Panel] = []
    for shape in map(str, experiment.axes["shape"]):
        part, title = means.filter(pl.col("shape") == shape), f"N × L = {shape.replace('x', ' × ')}"
        panels.append(
            charts.loss_curves(
                part, x, "tau", colour, "label", title, why="dashed: the paper's τ",
                span=charts.span_of(part["loss"]), mark=paper.TAU, first=not panels,
            )
        )  # fmt: skip
    return [Figure(experiment.name, experiment.study.question, tuple(panels))]


def taus(first: int, last: int) -> tuple[float, ...]:
    return tuple(paper.TAU * 2.0**e for e in range(first, last + 1))


STUDY = listed(
    Sweep(
        name="tau",
        question="Which timescale of weight decay is best, and is it the same for all parameterizations?",
        claim="τ = 0.1407 is near the minimum for every parameterization.",
        decision=(
            "What τ = 0.1407 costs over the best τ of each curve, with 90 % intervals over seeds. Agrees if it "
            "costs at most 1 % everywhere with the whole interval, and τ matters at all (the worst value costs "
            "more than 1 %)."
        ),
        axes={
            "laptop": {"rules": RULES, "shape": ("32x4", "32x8"), "tau": taus(-2, 3), "seed": (0, 1)},
            "desk": {"rules": RULES, "shape": ("32x4", "32x16"), "tau": taus(-2, 3), "seed": (0, 1, 2)},
            "paper": {
                "rules": RULES,
                "shape": shape_words(*paper.HORIZON_SHAPES[:2]),
                "tau": taus(-3, 3),
                "seed": (0, 1, 2),
            },
        },
        tuning=Tuning(base_shape, BASE_VALUES),
        run=run,
        find=find,
        draw=draw,
    )
)
