"""The depth rule for AdamW's ε: how far ε may rise before the loss does."""

import numpy as np
import polars as pl

from completep import paper
from completep.config import Run
from completep.report.document import Figure
from completep.rules.table import display_name
from completep.studies.design import UNSEEN, Agreement, Experiment, Outcome, Sweep, listed
from completep.studies.judging import COMPETITIVE, by_seed, finished, gap
from completep.studies.scale import Scale, decades
from completep.sweep.task import Point

RULES = ("flat-eps=1", "completep")


def run(scale: Scale, point: Point) -> Run:
    return scale.fixed_tokens(point, lr=scale.lr, std=scale.std, eps=point.number("eps"))


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[None]:
    """The largest ε that is within 1 % of the best loss. With the depth rule it is the same at every depth."""
    frame = finished(frame)
    means = frame.group_by("rules", "depth", "eps").agg(loss=pl.col("loss").mean()).sort("rules", "depth", "eps")
    best = means.group_by("depth").agg(best=pl.col("loss").min())
    rows = []
    for (rules, depth), part in means.join(best, on="depth").partition_by("rules", "depth", as_dict=True).items():
        good = part.filter(pl.col("loss") <= pl.col("best") * (1 + COMPETITIVE))["eps"].to_list()
        low, high = (min(good), max(good)) if good else (np.nan, np.nan)
        decades_ = float(np.log10(high / low))
        rows.append({"rules": rules, "depth": depth, "lowest_good": low, "largest_good": high, "decades": decades_})
    table = pl.DataFrame(rows, infer_schema_length=None).sort("rules", "depth")
    deepest = table.filter(pl.col("depth") == pl.col("depth").max())
    reach = {r: x if np.isfinite(x) else 0.0 for r, x in deepest.select("rules", "largest_good").iter_rows()}
    with_rule, without = reach.get("completep"), reach.get("flat-eps=1")
    limits = " and ".join(
        (f"{x:.0e}" if x else "no value that was tried") + f" {word} the depth rule"
        for x, word in ((with_rule, "with"), (without, "without"))
        if x is not None
    )
    agreement: Agreement = UNSEEN
    if with_rule is not None and without is not None and with_rule != without:
        # Where one of them is still good and the other is not: is the difference more than noise?
        at_limit = frame.filter((pl.col("depth") == deepest["depth"][0]) & (pl.col("eps") == max(with_rule, without)))
        runs = {str(r): by_seed(part) for (r,), part in at_limit.partition_by("rules", as_dict=True).items()}
        better = gap(runs["completep"], runs["flat-eps=1"])
        agreement = "agrees" if better.low > 0 else "does not agree" if better.high < 0 else UNSEEN
    sentence = f"at depth {deepest['depth'][0]} the loss stays within 1 % of the best up to ε = {limits}"
    return Outcome(agreement, sentence, table, None)


def draw(experiment: Experiment, frame: pl.DataFrame, outcome: Outcome[None]) -> list[Figure]:
    import altair as alt

    from completep.report import charts

    means = charts.mean_loss(frame, "rules", "depth", "eps")
    depths, values = (sorted(means[c].unique().to_list()) for c in ("depth", "eps"))
    axis = alt.Axis(values=values, format="~e", grid=False)
    x = alt.X("eps:Q", title=charts.SYMBOLS["eps"], scale=alt.Scale(type="log"), axis=axis)
    titles = {"completep": "CompleteP, with the depth rule for ε", "flat-eps=1": "Without the depth rule for ε"}
    colour, span = charts.by_order("depth", "depth L", depths), charts.span_of(means["loss"])
    panels = [
        charts.loss_curves(
            means.filter(pl.col("rules") == r), x, "eps", colour, "depth", titles.get(r, display_name(r)),
            span=span, first=i == 0,
        )
        for i, r in enumerate(map(str, experiment.axes["rules"]))
    ]  # fmt: skip
    return [Figure(experiment.name, experiment.study.question, tuple(panels))]


STUDY = listed(
    Sweep(
        name="eps-transfer",
        question="Does the depth rule for AdamW's ε allow a larger ε?",
        claim="A wider range of ε with competitive loss.",
        axes={
            "laptop": {"rules": RULES, "depth": (2, 4, 16), "eps": decades(-7, -2), "seed": (0, 1, 2)},
            "paper": {"rules": RULES, "depth": paper.TRANSFER_DEPTHS, "eps": decades(*paper.EPS_DECADES), "seed": (0,)},
        },
        run=run,
        find=find,
        draw=draw,
    )
)
