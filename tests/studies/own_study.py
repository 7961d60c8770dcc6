"""A study in one file, as CONTRIBUTING describes it: do more steps lower the loss?"""

import altair as alt
import polars as pl

from completep.config import GPTConfig, Hyperparameters, Run, Schedule
from completep.report import charts
from completep.report.document import Figure
from completep.studies.design import UNSEEN, Agreement, Experiment, Outcome, Sweep, listed
from completep.studies.judging import by_seed, finished, gap
from completep.studies.scale import Scale
from completep.sweep.task import Point


def run(scale: Scale, point: Point) -> Run:
    model = GPTConfig(32, 2, scale.vocabulary, head_size=8)
    schedule = Schedule(point.whole("steps"), 1)
    return Run(model, Hyperparameters(2**-7, 0.1), schedule, 4, 16, seed=point.whole("seed"), data=scale.data)


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[None]:
    runs = finished(frame)
    table = runs.group_by("steps").agg(loss=pl.col("loss").mean()).sort("steps")
    fewest, most = (by_seed(runs.filter(pl.col("steps") == table["steps"][i])) for i in (0, -1))
    fall = gap(most, fewest)  # log of the ratio, with an interval over seeds
    agreement: Agreement = "agrees" if fall.low > 0 else "does not agree" if fall.high < 0 else UNSEEN
    return Outcome(agreement, f"the loss ends at {table['loss'][-1]:.3f}", table, None)


def draw(experiment: Experiment, frame: pl.DataFrame, outcome: Outcome[None]) -> list[Figure]:
    points = alt.Chart(outcome.table).mark_point().encode(x="steps:Q", y=charts.y_axis("loss", "loss"))
    return [Figure(experiment.name, experiment.study.question, (charts.panel(points, title="loss over steps"),))]


STUDY = listed(
    Sweep(
        name="own-steps",
        question="Do more steps lower the loss?",
        claim="They do.",
        decision="The fall of the loss from fewest to most steps, paired by seed; agrees if its interval is above 0.",
        axes={"laptop": {"steps": (2, 20), "seed": (0, 1)}, "paper": {"steps": (2, 20), "seed": (0, 1)}},
        run=run,
        find=find,
        draw=draw,
    )
)
