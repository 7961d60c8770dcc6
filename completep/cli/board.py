"""The live view of a study: what runs, what is done, when it will be over, and the curves as they fill in."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from completep.cli.shared import console
from completep.config import Run
from completep.study.design import Point, Sweep
from completep.study.engine import Event, cost
from completep.study.store import Store
from completep.units import duration, power

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

MOST_ROWS = 24


@dataclass
class Board:
    """Counts, curves and an estimate, from the engine's events."""

    sweep: Sweep
    store: Store
    runs: list[tuple[Point, Run]]
    talk: "Console"
    most: str = ""  # "at most " where a search may need fewer
    began: float = field(default_factory=time.monotonic)
    running: dict[Path, tuple[Run, float]] = field(default_factory=dict)
    ended: dict[Path, tuple[str, float | None]] = field(default_factory=dict)  # how, and with which loss
    spent: float = 0.0  # FLOPs of the runs that ended since the start

    def __post_init__(self) -> None:
        self.folders = {self.store.folder(run): run for _, run in self.runs}
        for folder, run in self.folders.items():
            if (result := self.store.result(run)) is not None:
                self.ended[folder] = (result["status"], result["validation_loss"])
        self.before = len(self.ended)

    def on_event(self, event: Event) -> None:
        from rich.markup import escape

        folder = self.store.folder(event.run)
        if event.kind == "started":
            self.running[folder] = (event.run, time.monotonic())
            return
        self.running.pop(folder, None)
        if event.kind in ("done", "diverged", "failed"):
            result = self.store.result(event.run) or {}
            self.ended[folder] = (event.kind, result.get("validation_loss"))
            self.spent += cost(event.run)
        if event.kind in ("retry", "failed"):
            self.talk.print(f"[red]{event.kind}[/]: {described(event.run)} ({folder})\n{escape(event.detail)}")
        elif event.kind != "elsewhere" and not self.talk.is_terminal:
            loss = self.ended[folder][1]
            told = f", loss {loss:.4f}" if loss is not None else ""
            self.talk.print(f"{self.counts()}: {event.kind} {described(event.run)}{told}")

    def counts(self) -> str:
        kinds = [kind for kind, _ in self.ended.values()]
        told = [f"{kinds.count('done')} of {self.most}{len(self.folders)} done", f"{len(self.running)} running"]
        told += [f"{kinds.count(k)} {k}" for k in ("diverged", "failed") if k in kinds]
        left = self.seconds_left()
        return ", ".join(told) + (f", {self.most or 'about '}{duration(left)} left" if left is not None else "")

    def seconds_left(self) -> float | None:
        """From the FLOPs that are left and the pace so far."""
        if not self.spent:
            return None
        left = sum(cost(run) for folder, run in self.folders.items() if folder not in self.ended)
        begun = sum(cost(run) for run, _ in self.running.values()) / 2  # on average they are half done
        return max(0.0, left - begun) * (time.monotonic() - self.began) / (self.spent + begun)

    def __rich__(self) -> "Group":
        from rich.console import Group

        now = time.monotonic()
        lines = [f"  {described(run)}, {now - since:.0f} s" for run, since in list(self.running.values())[:8]]
        head = f"[bold]{self.sweep.name}[/]: {self.counts()}"
        return Group(head, *lines, *([self.curves()] if self.sweep.swept else []))

    def curves(self) -> "Table":
        """Rows: all that differs but the swept hyperparameter; its values are the columns."""
        from rich.table import Table

        swept = str(self.sweep.swept)
        table = Table(title=f"validation loss by {swept}", title_justify="left")
        keys = [name for name in self.sweep.axes if name not in (swept, "seed") and len(self.sweep.axes[name]) > 1]
        for key in keys:
            table.add_column(key)
        for value in self.sweep.axes[swept]:
            table.add_column(power(float(value)), justify="right")
        rows: dict[tuple[object, ...], dict[object, list[Run]]] = {}
        for point, run in self.runs:
            rows.setdefault(tuple(point[k] for k in keys), {}).setdefault(point[swept], []).append(run)
        for labels, cells in list(rows.items())[:MOST_ROWS]:
            means = {value: self._mean(runs) for value, runs in cells.items()}
            best = min((m for m in means.values() if m is not None), default=None)
            shown = [self._cell(cells.get(value, []), means.get(value), best) for value in self.sweep.axes[swept]]
            table.add_row(*map(str, labels), *shown)
        return table

    def _mean(self, runs: list[Run]) -> float | None:
        losses = [loss for run in runs if (loss := self.ended.get(self.store.folder(run), ("", None))[1]) is not None]
        return sum(losses) / len(losses) if losses else None

    def _cell(self, runs: list[Run], mean: float | None, best: float | None) -> str:
        folders = [self.store.folder(run) for run in runs]
        if any(self.ended.get(folder, ("", None))[0] == "diverged" for folder in folders):
            return "[red]▲[/]"
        if mean is None:
            return "[dim]…[/]" if any(folder in self.running for folder in folders) else ""
        return f"[bold green]{mean:.3f}[/]" if mean == best else f"{mean:.3f}"


@contextmanager
def watching(board: Board) -> Iterator[None]:
    """Redrawn twice a second on a terminal; elsewhere a line per run is enough."""
    if not board.talk.is_terminal:
        yield
        return
    from rich.live import Live

    with Live(board, console=board.talk, refresh_per_second=2, transient=True):
        yield


def described(run: Run) -> str:
    h = run.hyperparameters
    settings = f"lr {power(h.lr)}, std {h.std:g}, wd {h.weight_decay:.2g}, eps {h.eps:g}, seed {run.seed}"
    return f"{run.rules} {run.model.width} × {run.model.depth}, {settings}"


def make_board(sweep: Sweep, store: Store, runs: list[tuple[Point, Run]], searching: bool) -> Board:
    return Board(sweep, store, runs, console(stderr=True), "at most " if searching else "")
