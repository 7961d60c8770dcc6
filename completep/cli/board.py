"""The live view of a sweep: what runs, what is done, how long it will take, and the curves as they fill in."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from completep.cli.shared import console
from completep.sweep.engine import Event
from completep.sweep.progress import Progress
from completep.sweep.store import Store
from completep.sweep.task import Task, Trial
from completep.units import power

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

MOST_ROWS = 24


@dataclass
class Board:
    """The progress of a sweep on a terminal."""

    name: str
    progress: Progress
    terminal: "Console"

    def on_event(self, event: Event) -> None:
        from rich.text import Text

        self.progress.note(event)
        task = event.task
        if event.kind in ("retry", "failed"):
            what = f": {task.describe()} ({self.progress.store.folder(task)})\n{event.detail}"
            self.terminal.print(Text(event.kind, "red"), what, sep="")
        elif event.kind not in ("started", "elsewhere") and not self.terminal.is_terminal:
            loss = self.progress.ended[task.id][1]
            suffix = f", loss {loss:.4f}" if loss is not None else ""
            self.terminal.print(f"{self.progress.counts()}: {event.kind} {task.describe()}{suffix}")

    def __rich__(self) -> "Group":
        from rich.console import Group
        from rich.text import Text

        now = time.monotonic()
        lines = [f"  {t.describe()}, {now - since:.0f} s" for t, since in list(self.progress.running.values())[:8]]
        head = Text.assemble((self.name, "bold"), f": {self.progress.counts()}")
        swept, trials = self.progress.swept, self.progress.trials
        return Group(head, *lines, *([self.curves(swept, trials)] if swept and trials else []))

    def curves(self, swept: str, trials: Sequence[Trial]) -> "Table":
        """A row for each combination of the other axes; a column for each swept value."""
        from rich.table import Table

        table = Table(title=f"validation loss by {swept}", title_justify="left")
        axes = {name: {t.point[name] for t in trials} for name in trials[0].point}
        keys = [name for name, values in axes.items() if name not in (swept, "seed") and len(values) > 1]
        values = sorted(float(v) for v in axes[swept])
        for key in keys:
            table.add_column(key)
        for value in values:
            table.add_column(power(value), justify="right")
        rows: dict[tuple[object, ...], dict[float, list[Task]]] = {}
        for t in trials:
            row = rows.setdefault(tuple(t.point[k] for k in keys), {})
            row.setdefault(t.point.number(swept), []).append(t.task)
        for labels, cells in list(rows.items())[:MOST_ROWS]:
            means = {value: self.progress.mean(tasks) for value, tasks in cells.items()}
            best = min((m for m in means.values() if m is not None), default=None)
            table.add_row(*map(str, labels), *(self._cell(cells.get(v, []), means.get(v), best) for v in values))
        return table

    def _cell(self, tasks: Sequence[Task], mean: float | None, best: float | None) -> "Text":
        from rich.text import Text

        if any(self.progress.ended.get(task.id, ("", None))[0] == "diverged" for task in tasks):
            return Text("▲", "red")
        if mean is None:
            return Text("…" if any(task.id in self.progress.running for task in tasks) else "", "dim")
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
        progress = Progress(self.swept, trials, store, "at most " if at_most else "", self.expected(trials))
        board = Board(self.name, progress, terminal)
        try:
            if terminal.is_terminal:
                with Live(board, console=terminal, refresh_per_second=2, transient=True):
                    yield board.on_event
            else:
                yield board.on_event
        except KeyboardInterrupt:
            terminal.print(f"stopped: {progress.counts()}; the same command continues")
            raise
        if progress.present:
            terminal.print(f"{progress.present} of {len(progress.tasks)} runs were done already")
        failed = [kind for kind, _ in progress.ended.values()].count("failed")
        if failed:
            share = Text(f"{failed} of {len(progress.tasks)} runs failed", "red")
            terminal.print(share, "; see log.txt in their folders; the same command tries them again", sep="")
