"""Downstream tasks: do lower losses become better answers? Scored by the lm-evaluation-harness, zero-shot."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from completep import paper
from completep.config import Run
from completep.errors import UserError
from completep.report.document import Figure
from completep.rules.table import display_name
from completep.stats import error_of_mean, mean_estimate
from completep.studies.design import UNSEEN, Agreement, Experiment, Outcome, Sweep, Trained, Tuning, listed
from completep.studies.judging import by_seed, combined, ranking
from completep.studies.scale import BASE_VALUES, RULES, Scale, ScaleName, base_shape, read_shape, shape_words
from completep.sweep.store import Store
from completep.sweep.task import Point

if TYPE_CHECKING:
    from completep.integrations import harness
    from completep.report.document import Panel

LOSS = "validation loss"  # a row of the table beside the tasks
ITEM_LIMIT: Mapping[ScaleName, int | None] = {"laptop": 200, "desk": 500, "paper": None}  # of each task


def run(scale: Scale, point: Point) -> Run:
    return scale.compute_optimal(point, read_shape(point.text("shape")))


def request(experiment: Experiment) -> "harness.Request":
    from completep.integrations import harness

    tasks, limit = harness.tasks_at(experiment.items), ITEM_LIMIT[experiment.scale.name]
    return harness.Request(tuple(tasks), experiment.items, limit, paper.SEQUENCE)


def prepare(experiment: Experiment) -> None:
    """The tasks' items must be there before the first run."""
    from completep.integrations import harness

    wanted = request(experiment)
    with harness.local_tasks(wanted.tasks, wanted.data) as manager:
        harness.load(manager, wanted.tasks)


def evaluate(experiment: Experiment, folder: Path) -> None:
    """Leaves the evaluation in the run's folder."""
    from completep.integrations import harness

    harness.evaluate_run(folder, request(experiment))


def read(experiment: Experiment, store: Store, trained: Trained) -> pl.DataFrame:
    """A row per run and task, from the evaluations in the runs' folders. Nothing is evaluated here."""
    from completep.integrations import harness

    wanted = request(experiment)
    rows = []
    for labels, task in trained:
        evaluation = harness.stored_evaluation(store.folder(task), wanted)
        if evaluation is None:
            continue  # not trained, diverged, or not evaluated
        point = {name: labels[name] for name in experiment.axes}
        loss = task.loss(store.result(task) or {})
        for name, (score, error) in evaluation.tasks.items():
            facts = {"task": name, "metric": evaluation.metrics[name], "items": evaluation.items[name]}
            rows.append({**point, "run": task.id, **facts, "score": score, "stderr": error, "loss": loss})
    return pl.DataFrame(rows, infer_schema_length=None)


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[None]:
    """The average over tasks with its standard error: is CompleteP's the highest at every shape?"""
    if frame.is_empty():
        raise UserError("no run of this study is evaluated yet", fix="run the study first")
    average = frame.group_by("shape", "rules", maintain_order=True).agg(pl.col("score").mean(), pl.col("stderr"))
    errors = [error_of_mean(of_tasks) for of_tasks in average["stderr"]]
    average = average.with_columns(pl.Series("stderr", errors, dtype=pl.Float64))
    agreements: list[Agreement] = []
    sentences = []
    for (shape,), part in average.partition_by("shape", as_dict=True).items():
        scores = {r: (x, e) for r, x, e in part.select("rules", "score", "stderr").iter_rows()}
        ours = scores.get("completep", (math.nan, math.nan))
        gaps = [(ours[0] - x, max(e, ours[1])) for r, (x, e) in scores.items() if r != "completep"]
        above, below = all(gap > noise for gap, noise in gaps), any(gap < -noise for gap, noise in gaps)
        agreements.append("agrees" if gaps and above else "does not agree" if below else UNSEEN)
        shown = ", ".join(f"{display_name(r)} {x:.1f} ± {e:.1f} %" for r, (x, e) in scores.items())
        sentences.append(f"{shape}: {shown}")
    losses, ranked = loss_rows(frame)
    agreements += [agreement for agreement, _ in ranked]
    sentences += [sentence for _, sentence in ranked]
    tasks = frame.select("shape", "rules", "task", "metric", "items", "score", "stderr")
    labels = {"task": pl.lit("average"), "metric": pl.lit(""), "items": pl.lit(None, pl.Int64)}
    rows = [tasks, average.with_columns(**labels).select(tasks.columns), losses]
    table = pl.concat(rows, how="vertical_relaxed")
    names = ", ".join(frame["task"].unique(maintain_order=True).to_list())
    return Outcome(combined(agreements), f"average of {names}. " + "; ".join(sentences), table, None)


def loss_rows(frame: pl.DataFrame) -> tuple[pl.DataFrame, list[tuple[Agreement, str]]]:
    """The validation losses as rows like those of the tasks, and CompleteP's rank in them at every shape."""
    runs = frame.unique("run", maintain_order=True)
    rows, ranked = [], []
    for (shape,), of_shape in runs.partition_by("shape", as_dict=True).items():
        losses = {str(rules): by_seed(part) for (rules,), part in of_shape.partition_by("rules", as_dict=True).items()}
        ranked.append(ranking(losses, f"validation loss at {shape}"))
        for rules, of_seeds in losses.items():
            estimate = mean_estimate(list(of_seeds.values()))
            error = estimate.error if estimate.freedom else None
            rows.append((shape, rules, LOSS, "cross-entropy", None, estimate.value, error))
    kinds = {"shape": pl.String, "rules": pl.String, "task": pl.String, "metric": pl.String, "items": pl.Int64}
    schema = kinds | {"score": pl.Float64, "stderr": pl.Float64}
    return pl.DataFrame(rows, schema=schema, orient="row"), ranked


def draw(experiment: Experiment, frame: pl.DataFrame, outcome: Outcome[None]) -> list[Figure]:
    """A panel per shape: a dot with its standard error for every task and parameterization."""
    import altair as alt

    from completep.report import charts

    points = charts.labelled(outcome.table.filter(pl.col("task") != LOSS)).with_columns(
        low=pl.col("score") - pl.col("stderr"), high=pl.col("score") + pl.col("stderr")
    )
    colour = charts.by_rules([str(r) for r in experiment.axes["rules"]])
    panels: list[Panel] = []
    for shape in map(str, experiment.axes["shape"]):
        title = f"N × L = {shape.replace('x', ' × ')}"
        hidden, of_shape = charts.hiding("label", title), points.filter(pl.col("shape") == shape)
        y = alt.Y("task:N", title=None, sort=of_shape["task"].unique(maintain_order=True).to_list())
        base = alt.Chart(of_shape).encode(y=y, yOffset="label:N", color=colour, opacity=charts.shown(hidden))
        x = alt.X("score:Q", title="accuracy (%)", scale=alt.Scale(zero=False))
        dots = base.mark_point(filled=True, size=60).encode(x=x, tooltip=["label:N", "task:N", "score:Q", "stderr:Q"])
        bars = base.mark_rule().encode(x="low:Q", x2="high:Q")
        head = charts.heading(title, "bars: one standard error")
        panel = alt.layer(bars, dots.add_params(hidden))
        panels.append(panel.properties(width=charts.WIDTH, height=alt.Step(12), title=head))
    return [Figure(experiment.name, experiment.study.question, tuple(panels))]


STUDY = listed(
    Sweep(
        name="downstream",
        question="Do lower losses become better answers?",
        claim=(
            "Yes: at the best and at the deepest shape CompleteP has the lowest validation loss and the highest "
            "average over six tasks."
        ),
        decision=(
            "The average accuracy over tasks, and the validation loss, at every shape. Agrees if CompleteP's accuracy "
            "is above every other's by more than the larger standard error of the two, and its loss is below (paired "
            "by seed, 90 %, Bonferroni), at all shapes; does not agree if one is worse by as much anywhere."
        ),
        axes={
            "laptop": {"rules": RULES, "shape": ("64x4", "32x16"), "seed": (0, 1)},
            "desk": {"rules": RULES, "shape": ("128x4", "32x64"), "seed": (0, 1, 2)},
            "paper": {"rules": RULES, "shape": shape_words(*paper.DOWNSTREAM_SHAPES), "seed": (0, 1, 2)},
        },
        tuning=Tuning(base_shape, BASE_VALUES),
        run=run,
        find=find,
        draw=draw,
        prepare=prepare,
        after=evaluate,
        read=read,
    )
)
