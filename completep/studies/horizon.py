"""Long runs, 200 tokens per parameter: does CompleteP still have the lowest loss?"""

from dataclasses import replace

import polars as pl

from completep import paper
from completep.config import Run
from completep.report.document import Figure
from completep.rules.table import display_name
from completep.stats import mean_loss
from completep.studies.design import Experiment, Outcome, Sweep, Tuning, listed
from completep.studies.judging import by_seed, combined, finished, ranking
from completep.studies.scale import BASE_VALUES, RULES, Scale, base_shape, octaves, read_shape, shape_words
from completep.sweep.task import Point


def run(scale: Scale, point: Point) -> Run:
    run = scale.compute_optimal(point, read_shape(point.text("shape")), tpp=paper.HORIZON_TPP)
    # The standard library has 11 MB. Torch's sources are enough for all shapes of a small scale.
    return replace(run, data=replace(run.data, source="torch")) if run.data.source == "python" else run


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[None]:
    ended = finished(frame)
    table = mean_loss(ended, "width", "depth", "rules")
    ranked = [
        ranking(
            {str(r): by_seed(runs) for (r,), runs in part.partition_by("rules", as_dict=True).items()}, f"{w} × {d}"
        )
        for (w, d), part in ended.partition_by("width", "depth", as_dict=True).items()
    ]
    return Outcome(combined([a for a, _ in ranked]), "; ".join(sentence for _, sentence in ranked), table, None)


def draw(experiment: Experiment, frame: pl.DataFrame, outcome: Outcome[None]) -> list[Figure]:
    """A dot per parameterization and shape; a triangle where the run diverged."""
    import altair as alt

    from completep.report import charts

    points = charts.labelled(outcome.table).with_columns(
        shape=pl.format("{} × {}", "width", "depth"),
        ended=pl.when(pl.col("loss").is_finite()).then(pl.lit("done")).otherwise(pl.lit("diverged")),
    )
    points = points.with_columns(pl.col("loss").fill_nan(pl.col("loss").filter(pl.col("loss").is_finite()).max()))
    rules = [str(r) for r in experiment.axes["rules"]]
    hidden = charts.hiding("label", "Loss by shape")
    x = alt.X("loss:Q", title=charts.LOSS, scale=alt.Scale(zero=False, padding=14), axis=alt.Axis(tickCount=6))
    kinds = alt.Scale(domain=["done", "diverged"], range=["circle", "triangle-up"])
    dots = (
        alt.Chart(points)
        .mark_point(filled=True, size=90)
        .encode(
            x=x,
            y=alt.Y("shape:N", title="N × L", sort=points["shape"].unique(maintain_order=True).to_list()),
            yOffset=alt.YOffset("label:N", sort=[display_name(r) for r in rules]),
            color=charts.by_rules(rules),
            opacity=charts.shown(hidden),
            shape=alt.Shape("ended:N", scale=kinds, legend=None),
            tooltip=["label:N", "shape:N", "ended:N", alt.Tooltip("loss:Q", format=".4f")],
        )
    )
    panel = alt.layer(dots.add_params(hidden)).properties(
        width=2 * charts.WIDTH, height=alt.Step(16), title=charts.heading("Loss by shape")
    )
    return [Figure(experiment.name, experiment.study.question, (panel,))]


STUDY = listed(
    Sweep(
        name="horizon",
        question="Does the result hold when models are trained for 200 tokens per parameter?",
        claim="CompleteP has the lowest loss at every shape.",
        decision=(
            "At every shape, all deeper than the base, the losses paired by seed: agrees if CompleteP's is below "
            "every other's with its whole 90 % interval (Bonferroni over parameterizations) at all shapes; does "
            "not agree if another's is below CompleteP's anywhere."
        ),
        axes={
            "laptop": {"rules": RULES, "shape": ("32x8",), "seed": (0, 1)},
            "desk": {"rules": RULES, "shape": ("32x8", "32x16"), "seed": (0, 1, 2)},
            "paper": {"rules": RULES, "shape": shape_words(*paper.HORIZON_SHAPES), "seed": (0, 1, 2)},
        },
        tuning=Tuning(base_shape, {name: {"base_lr": octaves(-8, -6)} for name in BASE_VALUES}),
        run=run,
        find=find,
        draw=draw,
    )
)
