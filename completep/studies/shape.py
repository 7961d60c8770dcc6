"""The N:L study: which shape is compute-optimal at each size, and how many FLOPs does CompleteP save over muP?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from completep import paper
from completep.compute.laws import (
    PowerLaw,
    ShapeRange,
    fit_power_law,
    flop_savings,
    frontier,
    loss_increase,
    savings_interval,
    shape_range,
)
from completep.config import Run
from completep.errors import UserError
from completep.report.document import Figure
from completep.rules.table import display_name
from completep.stats import slope
from completep.studies.design import UNSEEN, Agreement, Experiment, Outcome, Sweep, Tuning, listed
from completep.studies.judging import COMPETITIVE, SEED_NOISE, combined, finished
from completep.studies.scale import BASE_VALUES, RULES, Scale, base_shape, read_shape, shape_words
from completep.sweep.task import Point
from completep.units import human

if TYPE_CHECKING:
    import altair as alt

    from completep.report.document import Panel

SAME_SIZE = 1.35  # non-embedding parameters within this ratio count as one size
# Each size from its widest shape at the base's depth to deep and narrow ones; no width below the base's.
LAPTOP_SHAPES = (*((32, 4), (48, 2)), *((32, 8), (48, 4), (64, 2)), *((32, 16), (48, 7), (64, 4), (88, 2)))
DESK_SHAPES = (
    *((32, 8), (40, 5), (48, 4), (64, 2)),
    *((32, 16), (40, 10), (64, 4), (88, 2)),
    *((32, 32), (48, 14), (64, 8), (128, 2)),
)


@dataclass(frozen=True)
class Shapes:
    """What the figures need."""

    law: PowerLaw
    points: pl.DataFrame  # a row per rules and shape: size, ratio, loss, increase over the law, savings over muP
    ranges: dict[tuple[str, str], ShapeRange]  # (rules, size) → shapes within 1 %


def run(scale: Scale, point: Point) -> Run:
    return scale.compute_optimal(point, read_shape(point.text("shape")))


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[Shapes]:
    """Losses against the frontier of CompleteP, savings over muP by depth, and the range of good shapes."""
    keys = ["rules", "width", "depth", "parameters", "flops"]
    means = finished(frame).group_by(keys, maintain_order=True).agg(loss=pl.col("loss").mean())  # NaN: one diverged
    label = size_names(means["parameters"].to_list())
    means = means.with_columns(size=pl.col("parameters").replace_strict(label), ratio=pl.col("width") / pl.col("depth"))
    ours = means.filter((pl.col("rules") == "completep") & pl.col("loss").is_finite())
    if ours["size"].n_unique() < 2:
        raise UserError("a scaling law needs two sizes under completep", fix="leave rules and shape as they are")
    best = frontier(ours)
    law = fit_power_law(best["flops"].to_numpy(), best["loss"].to_numpy())
    sure = savings_frame(finished(frame), law)
    means = means.with_columns(increase=pl.Series(loss_increase(means["loss"], law.loss(means["flops"].to_numpy()))))
    reference = means.filter(pl.col("rules") == "mup").select("width", "depth", reference="increase")
    means = means.join(reference, on=["width", "depth"], how="left")
    saved = flop_savings(means["reference"].to_numpy(), means["increase"].to_numpy(), law.b)
    means = means.with_columns(savings=pl.Series(saved), gap=pl.col("reference") - pl.col("increase")).drop("reference")
    means = means.join(sure, on=["rules", "width", "depth"], how="left")
    ranges = good_ranges(means.filter(pl.col("loss").is_finite()))
    agreement, sentence = savings_grow(means, experiment.scale.base.depth)
    narrow, words = narrow_shapes(ranges)
    agreement = "agrees in part" if agreement == "agrees" and narrow != "agrees" else agreement
    sentence += words
    sentence += f"; the frontier is (F/{law.a:.3g})^-{law.b:.3f}"
    if law.b_interval is not None:
        sentence += f" (b from {law.b_interval.low:.3f} to {law.b_interval.high:.3f})"
    table = means.join(range_frame(ranges), on=["rules", "size"], how="left").sort("rules", "parameters", "ratio")
    return Outcome(agreement, sentence, table, Shapes(law, means, ranges))


def savings_frame(runs: pl.DataFrame, law: PowerLaw) -> pl.DataFrame:
    """An interval of the savings over muP for every rules and shape, where several seeds were run under both."""
    rows = []
    if "seed" in runs.columns:
        reference = runs.filter(pl.col("rules") == "mup").select("width", "depth", "seed", reference="loss")
        both = runs.join(reference, on=["width", "depth", "seed"])
        for (rules, width, depth), part in both.partition_by("rules", "width", "depth", as_dict=True).items():
            interval = None
            if rules != "mup" and part["loss"].is_finite().all() and part["reference"].is_finite().all():
                interval = savings_interval(part["reference"], part["loss"], float(part["flops"][0]), law)
            if interval is not None:
                rows.append((rules, width, depth, interval.low, interval.high))
    kinds = {"rules": pl.String, "width": pl.Int64, "depth": pl.Int64}
    return pl.DataFrame(rows, schema=kinds | {"savings_low": pl.Float64, "savings_high": pl.Float64}, orient="row")


def size_names(parameters: Sequence[int]) -> dict[int, str]:
    """Parameters → a name for all models of about that size."""
    first_of: dict[int, int] = {}
    first = 0
    for count in sorted(set(parameters)):
        first = first if first and count / first <= SAME_SIZE else count
        first_of[count] = first
    groups = {f: [c for c, other in first_of.items() if other == f] for f in first_of.values()}
    return {count: human(float(np.mean(groups[first]))) for count, first in first_of.items()}


def good_ranges(means: pl.DataFrame) -> dict[tuple[str, str], ShapeRange]:
    """The paper compares every parameterization with CompleteP's best of the size."""
    ranges = {}
    for (rules, size), part in means.partition_by("rules", "size", as_dict=True).items():
        best = means.filter((pl.col("rules") == "completep") & (pl.col("size") == size))["increase"].min()
        if part["ratio"].n_unique() >= 4 and isinstance(best, float):
            within = shape_range(part["ratio"], part["increase"], tolerance=COMPETITIVE, best=best)
            ranges[str(rules), str(size)] = within
    return ranges


def range_frame(ranges: Mapping[tuple[str, str], ShapeRange]) -> pl.DataFrame:
    """An open end is the last shape tried: the curve may stay below the limit beyond it."""
    rows = [(r, size, w.low, w.high, w.open_low, w.open_high) for (r, size), w in ranges.items()]
    kinds = {"rules": pl.String, "size": pl.String, "good_from": pl.Float64, "good_to": pl.Float64}
    return pl.DataFrame(rows, schema=kinds | {"open_low": pl.Boolean, "open_high": pl.Boolean}, orient="row")


def savings_grow(means: pl.DataFrame, base_depth: int) -> tuple[Agreement, str]:
    """The paper's main claim: the deeper the model, the more CompleteP saves over muP.

    Judged at shapes deeper than the base. At its depth both are one run, so there is nothing to save.
    """
    ours = means.filter(pl.col("rules") == "completep")
    lost = ours.filter(~pl.col("loss").is_finite())
    if not lost.is_empty():
        return "does not agree", f"CompleteP diverged at {lost['width'][0]} × {lost['depth'][0]}"
    both = ours.filter(pl.col("savings").is_finite() & (pl.col("depth") > base_depth)).sort("depth")
    if both["depth"].n_unique() < 3:
        return UNSEEN, "too few shapes deeper than the base were run to an end under both muP and CompleteP"
    saved = both["savings"].to_numpy()
    trend = slope(both["depth"].log(2).to_numpy(), saved)  # its sign does not depend on b
    sentence = (
        f"at the shapes deeper than the base CompleteP saves {100 * saved.min():.0f} to {100 * saved.max():.0f} % "
        f"of muP's FLOPs, {100 * saved[-1]:.0f} % at depth {both['depth'][-1]}; per doubling of depth that changes by "
        f"{100 * trend.value:+.1f} ± {100 * (trend.high - trend.value):.1f} points"
    )
    if trend.low > 0 and both["gap"][-1] > SEED_NOISE:
        return "agrees", sentence
    if trend.high < 0 or both["gap"][-1] < -SEED_NOISE:
        return "does not agree", sentence
    return ("agrees in part" if all(both["gap"] > SEED_NOISE) else UNSEEN), sentence


def narrow_shapes(ranges: Mapping[tuple[str, str], ShapeRange]) -> tuple[Agreement, str]:
    """Finding 6: is the narrowest shape within 1 % of the best narrower under CompleteP than under muP?

    If both reach the narrowest shape that was tried, this is open.
    """
    sizes = [size for rules, size in ranges if rules == "completep" and ("mup", size) in ranges]
    if not sizes:
        return UNSEEN, ""
    agreements: list[Agreement] = []
    words = []
    for size in sizes:
        ours, theirs = ranges["completep", size], ranges["mup", size]
        both_open = ours.open_low and theirs.open_low
        wider = not math.isfinite(theirs.low) or ours.low < theirs.low
        agreements.append(UNSEEN if both_open else "agrees" if wider else "does not agree")
        words.append(f"{size} from {_end(ours)} (muP from {_end(theirs)}), best at {ours.best:.3g}")
    return combined(agreements), "; N:L within 1 % of the best: " + ", ".join(words)


def _end(within: ShapeRange) -> str:
    if not math.isfinite(within.low):
        return "none"
    return f"{within.low:.3g} or less" if within.open_low else f"{within.low:.3g}"


def draw(experiment: Experiment, frame: pl.DataFrame, outcome: Outcome[Shapes]) -> list[Figure]:
    """Loss increase over N:L for each size; then the law, the savings by depth, and the shapes within 1 %."""
    import altair as alt

    from completep.report import charts

    shapes = outcome.detail
    points = charts.labelled(shapes.points).with_columns(percent=100 * pl.col("increase"))
    rules = [str(r) for r in experiment.axes["rules"] if r in points["rules"]]
    sizes = points.sort("parameters")["size"].unique(maintain_order=True).to_list()
    axis = alt.Axis(tickCount=3, format="~g", grid=False)
    x = alt.X("ratio:Q", title="N:L", scale=alt.Scale(type="log", nice=False, padding=10), axis=axis)
    tips = charts.tips("label:N", "width:Q", "depth:Q", percent=".2f")
    colour = charts.by_rules(rules)
    panels: list[Panel] = []
    for size in sizes:
        y = charts.y_axis("percent", None if panels else "loss above CompleteP's law (%)")
        of_size = points.filter(pl.col("size") == size).sort("ratio")
        panels.append(charts.lines(of_size, x, y, colour, "label", f"{size} parameters", tips))
    summary = (_law(points, shapes.law, colour), _savings(points, sizes), _ranges(shapes, sizes, rules, colour))
    return [
        Figure(f"{experiment.name}-1", "Which N:L is best?", tuple(panels)),
        Figure(f"{experiment.name}-2", "What CompleteP's shapes save", summary),
    ]


def _law(points: pl.DataFrame, law: PowerLaw, colour: "alt.Color") -> "Panel":
    import altair as alt

    from completep.report import charts

    hidden = charts.hiding("label", "Scaling law")
    axis = alt.Axis(tickCount=3, format="~e", grid=False)
    scale = alt.Scale(type="log", nice=False, padding=12)
    x = alt.X("flops:Q", title="training FLOPs", scale=scale, axis=axis)
    y = charts.y_axis("loss", charts.LOSS, log=True)
    ends = [float(points["flops"].min()), float(points["flops"].max())]  # type: ignore[arg-type]
    fitted = pl.DataFrame({"flops": ends, "loss": law.loss(ends)})
    line = alt.Chart(fitted).mark_line(strokeDash=[5, 3], color="#888").encode(x=x, y=y)
    marks = alt.Chart(points).mark_point(filled=True, size=45)
    tips = ["label:N", "width:Q", "depth:Q", "loss:Q"]
    drawn = marks.encode(x=x, y=y, color=colour, opacity=charts.shown(hidden), tooltip=tips).add_params(hidden)
    why = f"dashed: CompleteP's best, loss = (F/{law.a:.3g})^-{law.b:.3f}"
    return charts.panel(line, drawn, title="Scaling law", why=why)


def _savings(points: pl.DataFrame, sizes: list[str]) -> "Panel":
    from completep.report import charts

    ours = points.filter((pl.col("rules") == "completep") & pl.col("savings").is_finite())
    ours = ours.with_columns(percent=100 * pl.col("savings")).sort("depth")
    x = charts.size_x("depth", ours["depth"].unique().to_list() or [1, 2])
    y = charts.y_axis("percent", "FLOPs saved over muP (%)")
    colour = charts.by_order("size", "size", sizes)
    tips = charts.tips("size:N", "depth:Q", percent=".1f")
    return charts.lines(ours, x, y, colour, "size", "What CompleteP saves", tips, why="")


def _ranges(shapes: Shapes, sizes: list[str], rules: list[str], colour: "alt.Color") -> "Panel":
    import altair as alt

    from completep.report import charts

    rows = [
        (display_name(r), size, w.low, w.high, w.best) for (r, size), w in shapes.ranges.items() if math.isfinite(w.low)
    ]
    kinds = {"label": pl.String, "size": pl.String, "low": pl.Float64, "high": pl.Float64, "best": pl.Float64}
    frame = pl.DataFrame(rows, schema=kinds, orient="row")
    title = "Shapes within 1 % of the best"
    hidden = charts.hiding("label", title)
    look = {
        "x": alt.X("size:N", title="parameters", sort=sizes, axis=alt.Axis(labelAngle=0)),
        "xOffset": alt.XOffset("label:N", sort=[display_name(r) for r in rules]),
        "opacity": charts.shown(hidden),
    }
    y = charts.y_axis("low", "N:L", log=True)
    bars = alt.Chart(frame).mark_bar(size=14, opacity=0.6)
    drawn = bars.encode(**look, y=y, y2="high:Q", color=colour, tooltip=["label:N", "size:N", "low:Q", "high:Q"])
    ticks = alt.Chart(frame).mark_tick(thickness=3, size=14, color="#222").encode(**look, y="best:Q")
    why = "cubic through each size, cut at the shapes tried; the tick is its minimum"
    return charts.panel(drawn.add_params(hidden), ticks, title=title, why=why)


STUDY = listed(
    Sweep(
        name="shape",
        question="Which N:L is compute-optimal, and what does CompleteP save?",
        claim="The deeper the model, the more FLOPs CompleteP saves over muP; deep narrow models stay near optimal.",
        decision=(
            "FLOPs saved over muP at every shape deeper than the base, from paired seeds, and their slope over "
            "log2 L. Agrees if the slope is above 0 with its whole 90 % interval, and the deepest shape saves "
            "more than the noise, and if, at every size with at least four shapes, the narrowest shape within 1 % of "
            "the best is narrower under CompleteP than under muP. Agrees in part if the savings agree, or if every "
            "such shape saves, but the rest is open."
        ),
        axes={
            "laptop": {"rules": ("mup", "completep"), "shape": shape_words(*LAPTOP_SHAPES), "seed": (0, 1)},
            "desk": {"rules": RULES, "shape": shape_words(*DESK_SHAPES), "seed": (0, 1, 2)},
            "paper": {"rules": RULES, "shape": shape_words(*sum(paper.SHAPES.values(), ())), "seed": (0, 1, 2)},
        },
        tuning=Tuning(base_shape, BASE_VALUES),
        run=run,
        find=find,
        draw=draw,
    )
)
