"""Loss curves during training: is the deeper model lower throughout, and if not, when do the curves cross?"""

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl

from completep import paper
from completep.config import Run
from completep.errors import UserError
from completep.report.document import Figure
from completep.rules.table import display_name
from completep.stats import mean_interval, mean_loss
from completep.studies.design import UNSEEN, Agreement, Experiment, Outcome, Sweep, Tuning, listed
from completep.studies.judging import Losses, finished, gap, log2_text, mean
from completep.studies.scale import BASE_VALUES, RULES, Scale
from completep.sweep.task import Point

if TYPE_CHECKING:
    from completep.report.document import Panel


def run(scale: Scale, point: Point) -> Run:
    return scale.fixed_tokens(point, lr=scale.lr * point.number("lr_factor"), std=scale.std)


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[pl.DataFrame]:
    """Which depth ends below which, and when do the loss curves of two depths cross for the last time?"""
    frame = finished(frame)
    keys = ["rules", "lr", "depth"]
    ends = final_losses(frame)
    means = mean_loss(frame, *keys, "step").sort("step")
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
    agreement, sentence = ordering(table)
    earlier, crossing_sentence = crossing(frame, float(table["lr"].min()))  # type: ignore[arg-type]
    if agreement == "agrees" and earlier != "earlier":
        agreement = "agrees in part" if earlier == "open" else "does not agree"
    return Outcome(agreement, sentence + crossing_sentence, table, smooth)


Crossing = Literal["earlier", "open", "later"]


def crossing(frame: pl.DataFrame, lr: float) -> tuple[Crossing, str]:
    """Does the deepest model pass the shallowest one earlier in training under CompleteP than under alpha=0.5?

    The share of the steps at which it is behind, seed by seed, from losses averaged over three records.
    """
    shares = {rules: behind_shares(frame, lr, rules) for rules in ("completep", "alpha=0.5")}
    ours, others = shares.values()
    common = sorted(ours.keys() & others.keys())
    if not common:
        return "open", ""
    means = [100 * float(np.mean([x[seed] for seed in common])) for x in (ours, others)]
    sentence = f"; the deepest model is behind the shallowest for {means[0]:.0f} % of the steps under CompleteP"
    sentence += f" and {means[1]:.0f} % under alpha=0.5"
    interval = mean_interval([others[seed] - ours[seed] for seed in common]) if len(common) > 1 else None
    if interval is None or interval.low <= 0 <= interval.high:
        return "open", sentence
    return ("earlier" if interval.low > 0 else "later"), sentence


def behind_shares(frame: pl.DataFrame, lr: float, rules: str) -> dict[int, float]:
    """By seed: the share of records at which the deepest model's loss is above the shallowest one's."""
    runs = frame.filter((pl.col("rules") == rules) & (pl.col("lr") == lr)).sort("step")
    smooth = runs.with_columns(loss=pl.col("loss").rolling_mean(3, min_samples=1).over("depth", "seed"))
    shallow, deep = (smooth.filter(pl.col("depth") == getattr(pl.col("depth"), end)()) for end in ("min", "max"))
    both = shallow.join(deep, on=["seed", "step"], suffix="_deep")
    behind = both.group_by("seed").agg(share=(pl.col("loss") <= pl.col("loss_deep")).mean())
    return {int(seed): float(share) for seed, share in behind.select("seed", "share").iter_rows()}


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
            of_rules = part.filter(pl.col("rules") == rules)
            panels.append(charts.lines(of_rules, x, y, colour, "depth", display_name(rules), tips, points=False))
        title = f"Training loss at η = 2^{math.log2(lr):g}"
        figures.append(Figure(f"{experiment.name}-{i + 1}", title, tuple(panels)))
    return figures


STUDY = listed(
    Sweep(
        name="dynamics",
        question="How do the loss curves of different depths compare during training?",
        claim="CompleteP: deeper is lower throughout. alpha=0.5: deeper starts behind and crosses later, at larger η.",
        decision=(
            "Final training losses of neighbouring depths at the base's best η, paired by seed (90 %, "
            "Bonferroni); and the share of the steps at which the deepest model is behind the shallowest. Agrees "
            "if each deeper model ends lower under CompleteP, but not under SP/muP and alpha=0.5, and if the "
            "deepest model is behind for a smaller share under CompleteP than under alpha=0.5; in part if only "
            "the last is open."
        ),
        axes={
            "laptop": {"rules": RULES, "depth": (2, 8, 32), "lr_factor": (1.0, 4.0), "seed": (0, 1, 2)},
            "desk": {"rules": RULES, "depth": (2, 8, 32, 64), "lr_factor": (1.0, 4.0), "seed": (0, 1, 2)},
            "paper": {
                "rules": RULES,
                "depth": paper.TRANSFER_DEPTHS,
                "lr_factor": (1.0, paper.CROSSING_LR / paper.LR),
                "seed": (0, 1, 2),
            },
        },
        tuning=Tuning(lambda s: Point(rules="completep", depth=s.base.depth, lr_factor=1.0), BASE_VALUES),
        run=run,
        find=find,
        draw=draw,
        history=True,
    )
)
