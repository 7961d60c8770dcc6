"""Loss curves during training: is the deeper model lower throughout, and if not, when do the curves cross?"""

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import polars as pl

from completep import paper
from completep.config import Run
from completep.errors import UserError
from completep.report.document import Figure
from completep.rules.table import display_name
from completep.studies.design import UNSEEN, Agreement, Experiment, Outcome, Sweep, listed
from completep.studies.judging import Losses, finished, gap, log2_text, mean
from completep.studies.scale import RULES, Scale
from completep.sweep.task import Point

if TYPE_CHECKING:
    from completep.report.document import Panel


def run(scale: Scale, point: Point) -> Run:
    return scale.fixed_tokens(point, lr=point.number("lr"), std=scale.std)


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[pl.DataFrame]:
    """Which depth ends below which, and when do the loss curves of two depths cross for the last time?"""
    frame = finished(frame)
    keys = ["rules", "lr", "depth"]
    ends = final_losses(frame)
    means = frame.group_by(*keys, "step").agg(loss=pl.col("loss").mean()).sort("step")
    smooth = means.with_columns(loss=pl.col("loss").rolling_mean(3, min_samples=1).over(keys))
    rows = []
    for (rules, lr), part in smooth.partition_by("rules", "lr", as_dict=True).items():
        curves = {d: p for (d,), p in part.partition_by("depth", as_dict=True).items()}
        final = {d: mean(ends[rules, lr, d]) for d in curves}
        for low, high in pairwise(sorted(curves)):
            pair = curves[low].join(curves[high], on="step", suffix="_deep")
            behind = pair.filter(pl.col("loss") <= pl.col("loss_deep"))["step"].max()
            change = gap(ends[rules, lr, low], ends[rules, lr, high], tests=len(curves) - 1)
            deeper_is = "better" if change.high < 0 else "worse" if change.low > 0 else "alike"
            rows.append(
                {
                    "rules": rules, "lr": lr, "shallow": low, "deep": high, "shallow_loss": final[low],
                    "deep_loss": final[high], "deeper_is": deeper_is, "last_step_behind": behind,
                }
            )  # fmt: skip
    if not rows:
        raise UserError("one depth has nothing to compare with", fix="give at least two, for instance depth=2,8")
    table = pl.DataFrame(rows, infer_schema_length=None).sort("lr", "rules", "shallow")
    return Outcome(*ordering(table), table, smooth)


def final_losses(frame: pl.DataFrame) -> dict[tuple[str, float, int], Losses]:
    """(rules, lr, depth) → by seed the mean of the last three losses; infinite where the curve stops early."""
    last = int(frame["step"].max())  # type: ignore[arg-type]
    ends: dict[tuple[str, float, int], dict[int, float]] = {}
    for (rules, lr, depth, seed), run in frame.partition_by("rules", "lr", "depth", "seed", as_dict=True).items():
        run = run.sort("step")
        whole = run["step"][-1] == last
        loss = float(run["loss"].tail(3).mean()) if whole else math.inf  # type: ignore[arg-type]
        ends.setdefault((str(rules), float(str(lr)), int(str(depth))), {})[int(str(seed))] = loss
    return dict(ends)


def ordering(table: pl.DataFrame) -> tuple[Agreement, str]:
    """At the tuned η (the lower of the two): deeper is better throughout under CompleteP, and only there."""
    sentences, words = [], {}
    for (rules, lr), part in table.partition_by("rules", "lr", as_dict=True, maintain_order=True).items():
        steps = [f"{low} → {high} {how}" for low, high, how in part.select("shallow", "deep", "deeper_is").iter_rows()]
        sentences.append(f"{display_name(str(rules))} at η = {log2_text(float(str(lr)))}: {', '.join(steps)}")
        words[rules, lr] = set(part["deeper_is"])
    tuned = table["lr"].min()
    ours = words.get(("completep", tuned), set())
    others = [steps for (rules, lr), steps in words.items() if rules != "completep" and lr == tuned]
    agreement: Agreement = UNSEEN
    if ours:
        only = bool(others) and not any(steps == {"better"} for steps in others)
        agreement = "does not agree" if "worse" in ours else "agrees" if ours == {"better"} and only else UNSEEN
    return agreement, "; ".join(sentences)


def draw(experiment: Experiment, frame: pl.DataFrame, outcome: Outcome[pl.DataFrame]) -> list[Figure]:
    """A figure per learning rate, a panel per parameterization: loss over steps."""
    import altair as alt

    from completep.report import charts

    smooth = outcome.detail
    depths = sorted(smooth["depth"].unique().to_list())
    x = alt.X("step:Q", title="training step", axis=alt.Axis(grid=False))
    tips = charts.tips("depth:O", "step:Q", loss=".4f")
    figures = []
    for i, lr in enumerate(sorted(smooth["lr"].unique().to_list())):
        part = smooth.filter((pl.col("lr") == lr) & (pl.col("step") > 0.1 * pl.col("step").max()))
        span, colour = charts.span_of(part["loss"], 0.02), charts.by_order("depth", "depth L", depths)
        panels: list[Panel] = []
        for rules in map(str, experiment.axes["rules"]):
            y = charts.y_axis("loss", None if panels else "training loss (nats per token)", domain=span)
            own = part.filter(pl.col("rules") == rules)
            panels.append(charts.lines(own, x, y, colour, "depth", display_name(rules), tips, points=False))
        title = f"Training loss at η = 2^{math.log2(lr):g}"
        figures.append(Figure(f"{experiment.name}-{i + 1}", title, tuple(panels)))
    return figures


STUDY = listed(
    Sweep(
        name="dynamics",
        question="How do the loss curves of different depths compare during training?",
        claim="CompleteP: deeper is lower throughout. alpha=0.5: deeper starts behind and crosses later, at larger η.",
        axes={
            "laptop": {"rules": RULES, "depth": (2, 8, 32), "lr": (2**-6, 2**-4), "seed": (0, 1, 2)},
            "paper": {
                "rules": RULES,
                "depth": paper.TRANSFER_DEPTHS,
                "lr": (paper.LR, paper.CROSSING_LR),
                "seed": (0,),
            },
        },
        run=run,
        find=find,
        draw=draw,
        history=True,
    )
)
