"""The live view of a sweep: what runs, what is done, how long it will take, and the curves as they fill in."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from completep.cli.shared import console
from completep.sweep.engine import Event
from completep.sweep.store import Store, distinct
from completep.sweep.task import Task, Trial
from completep.units import duration, power

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

MOST_ROWS = 24
TO_BRACKET = 3.5  # runs that bracket a minimum, on average
TOO_EARLY = 0.05  # share of the cost; the first and smallest runs are mostly start-up, which says little about the rest


@dataclass
class Board:
    """Counts, curves and an estimate, from the engine's events."""

    name: str
    swept: str | None
    trials: Sequence[Trial]
    store: Store
    terminal: "Console"
    at_most: str = ""  # "at most " where a search may need fewer runs
    expected: int | None = None  # runs that a search is likely to need
    began: float = field(default_factory=time.monotonic)
    running: dict[str, tuple[Task, float]] = field(default_factory=dict)
    ended: dict[str, tuple[str, float | None]] = field(default_factory=dict)  # by id: how it ended, and its loss
    spent: float = 0.0  # cost of the tasks that ended since the start

    def __post_init__(self) -> None:
        self.tasks = distinct(self.trials)
        self.known = {task.id for task in self.tasks}
        results = self.store.results(self.tasks)
        for task in self.tasks:
            if task.id in results:
                self.ended[task.id] = (str(results[task.id]["status"]), task.loss(results[task.id]))
        self.present = len(self.ended)

    def _end(self, task: Task, kind: str | None = None) -> None:
        result = self.store.result(task) or {}
        self.ended[task.id] = (kind or str(result["status"]), task.loss(result))

    def on_event(self, event: Event) -> None:
        from rich.text import Text

        task = event.task
        if task.id not in self.known:  # a search that makes its own trials
            self.known.add(task.id)
            self.tasks.append(task)
        if event.kind == "started":
            self.running[task.id] = (task, time.monotonic())
            return
        self.running.pop(task.id, None)
        if event.kind in ("done", "diverged", "hopeless", "failed"):
            self._end(task, event.kind)
            self.spent += task.cost
        if event.kind in ("retry", "failed"):
            what = f": {task.describe()} ({self.store.folder(task)})\n{event.detail}"
            self.terminal.print(Text(event.kind, "red"), what, sep="")
        elif event.kind != "elsewhere" and not self.terminal.is_terminal:
            loss = self.ended[task.id][1]
            suffix = f", loss {loss:.4f}" if loss is not None else ""
            self.terminal.print(f"{self.counts()}: {event.kind} {task.describe()}{suffix}")

    def counts(self) -> str:
        kinds = [kind for kind, _ in self.ended.values()]
        every = f"{self.at_most}{len(self.tasks)}"
        if self.as_expected:
            every = f"about {self.expected}"
        parts = [f"{kinds.count('done')} of {every} done", f"{len(self.running)} running"]
        parts += [f"{kinds.count(k)} {k}" for k in ("diverged", "hopeless", "failed") if k in kinds]
        left = self.seconds_left()
        return ", ".join(parts) + (f", about {duration(left)} left" if left is not None else "")

    @property
    def as_expected(self) -> bool:
        """Has the search not needed more runs than it was likely to?"""
        return self.expected is not None and len(self.ended) <= self.expected

    def seconds_left(self) -> float | None:
        """From the cost that is left and the pace so far."""
        if not self.spent:
            return None
        left = sum(task.cost for task in self.tasks if task.id not in self.ended)
        if self.expected is not None and self.as_expected:
            mean = sum(task.cost for task in self.tasks) / len(self.tasks)
            left = max(0, self.expected - len(self.ended)) * mean
        elif self.at_most and self.swept is not None:
            left = self.likely_left(self.swept)
        if self.spent < TOO_EARLY * (self.spent + left):
            return None
        begun = sum(task.cost for task, _ in self.running.values()) / 2  # on average they are half done
        return max(0.0, left - begun) * (time.monotonic() - self.began) / (self.spent + begun)

    def likely_left(self, swept: str) -> float:
        """The cost of bracketing every curve that is not bracketed yet. Curves that share their tasks count once."""
        curves: dict[tuple[tuple[str, object], ...], dict[str, float]] = {}
        for trial in self.trials:
            key = tuple((name, value) for name, value in trial.point.items() if name != swept)
            curves.setdefault(key, {})[trial.task.id] = trial.task.cost
        left = 0.0
        for costs in {frozenset(costs): costs for costs in curves.values()}.values():
            ended = sum(name in self.ended for name in costs)
            left += max(0.0, min(TO_BRACKET, len(costs)) - ended) * sum(costs.values()) / len(costs)
        return left

    def __rich__(self) -> "Group":
        from rich.console import Group
        from rich.text import Text

        now = time.monotonic()
        lines = [f"  {t.describe()}, {now - since:.0f} s" for t, since in list(self.running.values())[:8]]
        head = Text.assemble((self.name, "bold"), f": {self.counts()}")
        return Group(head, *lines, *([self.curves(self.swept)] if self.swept and self.trials else []))

    def curves(self, swept: str) -> "Table":
        """A row for each combination of the other axes; a column for each swept value."""
        from rich.table import Table

        table = Table(title=f"validation loss by {swept}", title_justify="left")
        axes = {name: {t.point[name] for t in self.trials} for name in self.trials[0].point}
        keys = [name for name, values in axes.items() if name not in (swept, "seed") and len(values) > 1]
        values = sorted(float(v) for v in axes[swept])
        for key in keys:
            table.add_column(key)
        for value in values:
            table.add_column(power(value), justify="right")
        rows: dict[tuple[object, ...], dict[float, list[Task]]] = {}
        for t in self.trials:
            row = rows.setdefault(tuple(t.point[k] for k in keys), {})
            row.setdefault(t.point.number(swept), []).append(t.task)
        for labels, cells in list(rows.items())[:MOST_ROWS]:
            means = {value: self._mean(tasks) for value, tasks in cells.items()}
            best = min((m for m in means.values() if m is not None), default=None)
            table.add_row(*map(str, labels), *(self._cell(cells.get(v, []), means.get(v), best) for v in values))
        return table

    def _mean(self, tasks: Sequence[Task]) -> float | None:
        losses = [loss for task in tasks if (loss := self.ended.get(task.id, ("", None))[1]) is not None]
        return sum(losses) / len(losses) if losses else None

    def _cell(self, tasks: Sequence[Task], mean: float | None, best: float | None) -> "Text":
        from rich.text import Text

        if any(self.ended.get(task.id, ("", None))[0] == "diverged" for task in tasks):
            return Text("▲", "red")
        if mean is None:
            return Text("…" if any(task.id in self.running for task in tasks) else "", "dim")
        return Text(f"{mean:.3f}", "bold green" if mean == best else "")


@dataclass(frozen=True)
class Watch:
    """A `Watcher`: redraws a board twice a second on a terminal; elsewhere prints a line per run."""

    name: str
    swept: str | None
    expected: Callable[[Sequence[Trial]], int | None] = lambda trials: None  # runs that a search is likely to need

    @contextmanager
    def __call__(self, trials: Sequence[Trial], store: Store, at_most: bool) -> "Iterator[Callable[[Event], None]]":
        from rich.live import Live
        from rich.text import Text

        terminal = console(stderr=True)
        board = Board(
            self.name, self.swept, trials, store, terminal, "at most " if at_most else "", self.expected(trials)
        )
        try:
            if terminal.is_terminal:
                with Live(board, console=terminal, refresh_per_second=2, transient=True):
                    yield board.on_event
            else:
                yield board.on_event
        except KeyboardInterrupt:
            terminal.print(f"stopped: {board.counts()}; the same command continues")
            raise
        if board.present:
            terminal.print(f"{board.present} of {len(board.tasks)} runs were done already")
        failed = [kind for kind, _ in board.ended.values()].count("failed")
        if failed:
            share = Text(f"{failed} of {len(board.tasks)} runs failed", "red")
            terminal.print(share, "; their folders hold log.txt; the same command tries again", sep="")
