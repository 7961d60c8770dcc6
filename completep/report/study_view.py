"""A study's plan and its outcome, as tables for people and as data for programs."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
from rich.markup import escape
from rich.table import Table

from completep.config import Run
from completep.study.design import Outcome, Point, Study, Sweep
from completep.study.engine import cost
from completep.study.store import Store
from completep.units import duration, human

COLOURS = {
    "agrees": "green",
    "agrees in part": "green",
    "does not agree": "red",
    "cannot be seen at this scale": "yellow",
}
TYPICAL = 40e9  # FLOP/s of one core on small models, until runs of one's own say better
MOST_LINES = 60


def plan(sweep: Sweep, store: Store, runs: Sequence[tuple[Point, Run]], workers: int) -> dict[str, Any]:
    """Every run with its FLOPs, whether it is done, and what is left in all."""
    distinct = {store.folder(run): (point, run) for point, run in runs}
    results = {folder: store.result(run) for folder, (_, run) in distinct.items()}
    paces = [
        cost(distinct[f][1]) / r["seconds"] for f, r in results.items() if r and r["seconds"] and r["status"] == "done"
    ]
    pace = statistics.median(paces) if paces else TYPICAL
    left = sum(cost(run) for folder, (_, run) in distinct.items() if results[folder] is None)
    status = {folder: r["status"] if r else "missing" for folder, r in results.items()}
    lines = [
        {"run": folder.name, **point, "tokens": run.tokens, "flops": cost(run), "status": status[folder]}
        for folder, (point, run) in distinct.items()
    ]
    return {
        "study": sweep.name, "axes": {k: list(v) for k, v in sweep.axes.items()}, "points": len(runs), "runs": lines,
        "flops": sum(line["flops"] for line in lines), "flops_left": left, "flops_per_second": pace,
        "pace": "measured on the runs that are done" if paces else "a guess, until the first runs are done",
        "workers": workers, "seconds_left": left / pace / workers,
    }  # fmt: skip


def measured_plan(study: Study) -> dict[str, Any]:
    axes = {k: list(v) for k, v in study.axes.items()}
    return {"study": study.name, "axes": axes, "points": math.prod(map(len, axes.values())), "runs": []}


def plan_parts(plan: dict[str, Any]) -> Iterator[Any]:
    axes = Table(title=f"{plan['study']}: axes", title_justify="left")
    for heading in ("axis", "values"):
        axes.add_column(heading)
    for name, values in plan["axes"].items():
        axes.add_row(name, escape(", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)))
    yield axes
    if not plan["runs"]:
        yield f"{plan['points']} measurements, no training runs: minutes"
        return
    table = Table(title="runs, each done once", title_justify="left")
    for name in plan["runs"][0]:
        table.add_column(name, justify="left" if name in ("run", "rules", "status") else "right")
    for line in plan["runs"][:MOST_LINES]:
        table.add_row(*(_cell(name, value) for name, value in line.items()))
    yield table
    if len(plan["runs"]) > MOST_LINES:
        yield f"… and {len(plan['runs']) - MOST_LINES} more; --json has them all"
    missing = sum(line["status"] == "missing" for line in plan["runs"])
    yield (
        f"{plan['points']} points, {len(plan['runs'])} different runs, {missing} of them to do: {plan['flops_left']:.3g} FLOPs of "
        f"{plan['flops']:.3g}, about {duration(plan['seconds_left'])} with {plan['workers']} at a time ({plan['pace']}: "
        f"{plan['flops_per_second']:.2g} FLOP/s each)"
    )


def _cell(name: str, value: Any) -> str:
    if name == "tokens":
        return human(value)
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def outcome_parts(study: Study, outcome: Outcome) -> Iterator[Any]:
    yield to_rich(outcome.table, study.question)
    yield f"here: {escape(outcome.sentence)}"
    yield f"the paper: {escape(study.claim)}"
    yield f"[bold {COLOURS[outcome.agreement]}]{outcome.agreement}[/]"


def to_rich(frame: pl.DataFrame, title: str) -> Table:
    table = Table(title=escape(title), title_justify="left")
    for name, kind in frame.schema.items():
        table.add_column(escape(name.replace("_", " ")), justify="right" if kind.is_numeric() else "left")
    for row in frame.head(MOST_LINES).rows():
        table.add_row(*(escape(number(v)) for v in row))
    return table


def number(value: Any) -> str:
    """As few digits as tell values apart."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if math.isfinite(value) else "–" if math.isnan(value) else "∞"


def to_json(study: Study, outcome: Outcome) -> dict[str, Any]:
    return {
        "study": study.name, "question": study.question, "claim": study.claim, "agreement": outcome.agreement,
        "sentence": outcome.sentence, "table": outcome.table.to_dicts(),
    }  # fmt: skip
