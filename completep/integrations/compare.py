"""`evaluate`: trained runs side by side, on the lm-evaluation-harness's own tasks and metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from completep.config import whole
from completep.errors import UserError, some
from completep.integrations.harness import Evaluation, Request, evaluate_run, table, tasks_at
from completep.integrations.runs import load_run, longest_text
from completep.report.document import Cell, Document, Json, Strong, Table, Text
from completep.report.result import Result

COLUMNS = ("task", "metric", "items", "random")  # of the table, before the runs


@dataclass(frozen=True, eq=False, repr=False)
class Evaluations(Result):
    """The scores of several runs, in the paper's layout."""

    evaluations: tuple[Evaluation, ...]

    slug = "evaluation"

    @property
    def table(self) -> pl.DataFrame:
        return table(self.evaluations)

    @property
    def best(self) -> Evaluation:
        return max(self.evaluations, key=lambda e: e.average[0])

    def document(self) -> Document:
        names = [e.name for e in self.evaluations]
        rows = []
        for row in self.table.iter_rows(named=True):
            facts = {"task": row["task"], "metric": row["metric"], "items": row["items"], "random": row["random"]}
            rows.append({**facts, **_scores(row, names)})
        title = "Zero-shot accuracy, % ± standard error"
        best = f"best average: {self.best.name} at {self.best.average[0]:.1f} ± {self.best.average[1]:.1f} %"
        note = "Bold: the best of a row, and every score within its standard error."
        return Document(title, (Table.of(title, rows, (note,)), Text(best)), "completep evaluate")

    def frames(self) -> dict[str, pl.DataFrame]:
        return {"scores": self.table}

    def _fields(self) -> Json:
        averages = {e.name: {"score": e.average[0], "stderr": e.average[1]} for e in self.evaluations}
        return {"table": self.table.to_dicts(), "average": averages}


def _scores(row: dict[str, float], names: Sequence[str]) -> dict[str, Cell]:
    """As the paper prints it: bold within the standard error of the row's best."""
    best = max(names, key=lambda name: row[name])
    cells: dict[str, Cell] = {}
    for name in names:
        text = f"{row[name]:.1f} ± {row[f'{name} ±']:.1f}"
        near = not row[best] - row[name] > max(row[f"{best} ±"], row[f"{name} ±"])
        cells[name] = Strong(text) if near else text
    return cells


def _refuse_names(names: Sequence[str]) -> None:
    """Refuse names of runs that would be columns of the table already: each run has two."""
    for name in names:
        if name in COLUMNS or name.removesuffix(" ±") in {*names} - {name}:
            what = f"the run {name!r} has the name of another column of the table"
            raise UserError(what, fix=f"give its whole path: {Path(name).absolute()}")


def evaluate(
    runs: Sequence[Path | str],
    *,
    tasks: Sequence[str] = (),
    data: Path | None = None,
    limit: int | None = None,
    max_length: int | None = None,
    tokenizer: str | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Evaluations:
    """Zero-shot accuracy of trained runs. Each evaluation is stored in the folder of its run and read from there later.

    Args:
        runs: folders of runs that are done.
        tasks: names of tasks; by default the paper's six.
        data: a folder of local items, instead of data sets from the hub.
        limit: number of items per task, from the first; by default all.
        max_length: largest number of tokens per text; by default the length that the run was trained on, and with ALiBi
            at least 2048.
        tokenizer: bytes, gpt2 or a tokenizer.json, if the run's own data is gone.
        progress: called with (runs done, all runs, the next run).
    """
    names = [str(run) for run in runs]
    if not names:
        raise UserError("no run to evaluate", fix="give the folders of runs that are done")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UserError(f"{some(twice)} is given more than once", fix="give each run once")
    _refuse_names(names)
    for what, number, least in (("limit", limit, 1), ("max_length", max_length, 2)):
        if number is not None:
            whole(what, number, least)
    wanted = tuple(tasks) or tuple(tasks_at(data))
    for name in names:  # an error in the last run comes before the first is evaluated
        load_run(Path(name), tokenizer)
    evaluations = []
    for i, name in enumerate(names):
        progress(i, len(names), name)
        request = Request(wanted, data, limit, longest_text(Path(name), max_length), tokenizer)
        evaluations.append(replace(evaluate_run(Path(name), request), name=name))
    return Evaluations(tuple(evaluations))
