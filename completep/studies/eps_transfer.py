"""The depth rule for AdamW's ε: with it, the curve of loss over ε stays where it is at the base."""

import math

import numpy as np
import polars as pl

from completep import paper
from completep.config import Run
from completep.errors import UserError
from completep.report.document import Figure
from completep.rules.table import display_name
from completep.stats import mean_and_range, mean_interval, sideways
from completep.studies.design import UNSEEN, Agreement, Experiment, Outcome, Sweep, Tuning, listed
from completep.studies.judging import finished
from completep.studies.scale import BASE_VALUES, Scale, decades
from completep.sweep.task import Point

RULES = ("flat-eps=1", "completep")
EPS = tuple(10.0 ** (e / 2) for e in range(-12, -4))  # half decades from 1e-6 to 10^-2.5
LEAST_VALUES = 4
ONE_SEED_ERROR = 0.3  # decades: with one seed, a closer shift is not told from another


def run(scale: Scale, point: Point) -> Run:
    return scale.fixed_tokens(point, lr=scale.lr, std=scale.std, eps=point.number("eps"))


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[None]:
    """How far does the curve of loss over ε move sideways with depth? Without the depth rule, by -log10 m_L decades."""
    frame = finished(frame)
    base_depth = int(frame["depth"].min())  # type: ignore[arg-type]
    rows = [
        {"rules": rules, "depth": depth, **moved(frame, rules, base_depth, depth)}
        for rules, depth in frame.select("rules", "depth").unique().sort("rules", "depth").iter_rows()
        if depth > base_depth
    ]
    if not rows:
        raise UserError("one depth has nothing to compare with", fix="give at least two, for instance depth=2,16")
    table = pl.DataFrame(rows, infer_schema_length=None)
    deep = max(int(row["depth"]) for row in rows)
    deepest = {row["rules"]: row for row in rows if row["depth"] == deep}
    half = math.log10(deep / base_depth) / 2
    shifts = [
        f"by {row['decades']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f}) decades {word}"
        for key, word in (("completep", "with the depth rule"), ("flat-eps=1", "without it"))
        if (row := deepest.get(key)) is not None
    ]
    expected = f"without the rule -log10 m_L = {-2 * half:.2f} is expected"
    sentence = f"at depth {deep} the curve over ε is shifted {' and '.join(shifts)}; {expected}"
    ours, others = deepest.get("completep"), deepest.get("flat-eps=1")
    agreement: Agreement = UNSEEN
    if ours is not None and others is not None:
        if float(ours["high"]) < -half or float(others["low"]) > -half:
            agreement = "does not agree"
        elif float(ours["low"]) > -half and float(others["high"]) < -half:
            agreement = "agrees"
    return Outcome(agreement, sentence, table, None)


def moved(frame: pl.DataFrame, rules: str, base_depth: int, depth: int) -> dict[str, float | int]:
    """The shift from the base, in decades, seed by seed; its mean with Student's interval."""
    shifts = []
    for seed in frame["seed"].unique().sort() if "seed" in frame.columns else [None]:
        of_seed = frame if seed is None else frame.filter(pl.col("seed") == seed)
        pair = [
            of_seed.filter((pl.col("rules") == rules) & (pl.col("depth") == d)).sort("eps") for d in (base_depth, depth)
        ]
        both = (
            pair[0]
            .join(pair[1], on="eps", suffix="_deep")
            .filter(pl.col("loss").is_finite() & pl.col("loss_deep").is_finite())
        )
        if both.height >= LEAST_VALUES:
            x = np.log10(both["eps"].to_numpy())
            shifts.append(sideways(x, np.log(both["loss"].to_numpy()), np.log(both["loss_deep"].to_numpy())))
    mean = float(np.mean(shifts)) if shifts else math.nan
    interval = mean_interval(shifts) if len(shifts) > 1 else None
    low, high = (interval.low, interval.high) if interval else (mean - ONE_SEED_ERROR, mean + ONE_SEED_ERROR)
    return {"decades": mean, "low": low, "high": high, "seeds": len(shifts)}


def draw(experiment: Experiment, frame: pl.DataFrame, outcome: Outcome[None]) -> list[Figure]:
    import altair as alt

    from completep.report import charts

    means = mean_and_range(frame, "rules", "depth", "eps").sort("rules", "depth", "eps")
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
        decision=(
            "The sideways shift of the curve of log loss over log10 ε from the base to the deepest model, by "
            "least squares with a free level, seed by seed. Agrees if, with the whole 90 % interval, it is nearer "
            "to 0 than to -log10 m_L with the rule, and nearer to -log10 m_L without it."
        ),
        axes={
            "laptop": {"rules": RULES, "depth": (2, 16), "eps": EPS, "seed": (0, 1, 2)},
            "desk": {"rules": RULES, "depth": (2, 8, 32), "eps": EPS, "seed": (0, 1, 2, 3, 4)},
            "paper": {
                "rules": RULES,
                "depth": paper.TRANSFER_DEPTHS,
                "eps": decades(*paper.EPS_DECADES),
                "seed": (0, 1, 2),
            },
        },
        tuning=Tuning(lambda s: Point(rules="completep", depth=s.base.depth, eps=paper.EPS), BASE_VALUES),
        run=run,
        find=find,
        draw=draw,
    )
)
