"""The conductor: runs trials with a search and an engine, and reports progress to a watcher."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass

from completep.errors import UserError
from completep.sweep.engine import Backend, Engine, Event, unwatched
from completep.sweep.search import Bracketing, Search, Strategy, swept_values
from completep.sweep.store import Store, distinct
from completep.sweep.task import Task, Trial

# From the trials, the store and whether a search may need fewer trials, to a context that takes events.
Watcher = Callable[[Sequence[Trial], Store, bool], AbstractContextManager[Callable[[Event], None]]]


@contextmanager
def nobody(trials: Sequence[Trial], store: Store, at_most: bool) -> Iterator[Callable[[Event], None]]:
    """No progress report."""
    yield unwatched


@dataclass(frozen=True)
class Conducted:
    """What a search ran."""

    trials: tuple[Trial, ...]
    failed: tuple[Task, ...]
    planned: int  # tasks of the whole grid
    present: int  # tasks that were done before

    @property
    def needed(self) -> int:
        """Tasks that the search asked for, done before or now."""
        return len(distinct(self.trials))


def conduct(
    trials: Sequence[Trial],
    store: Store,
    backend: Backend,
    *,
    search: Search | Strategy = "grid",
    swept: str | None = None,
    watch: Watcher = nobody,
    fail_fast: bool = False,
) -> Conducted:
    """Run the tasks that are not done. On SIGTERM or Ctrl-C every task saves, and the same call continues later."""
    if search == "bracket" and swept is None:
        raise UserError("search='bracket' needs a swept axis, and there is none", fix="use search='grid'")
    tasks = distinct(trials)
    store.write_index(tasks)
    present = len(store.results(tasks))
    with watch(trials, store, search != "grid") as on_event, interruptible() as stop, closing(backend):

        def note(event: Event) -> None:
            on_event(event)
            stop.again()

        engine = Engine(store, backend, note, fail_fast)
        if not isinstance(search, str):
            ran, failed = search(engine, trials)
        elif search == "grid":
            ran, failed = list(trials), engine.run(tasks)
        else:
            assert swept is not None
            ran, failed = Bracketing(engine, swept, swept_values(trials, swept)).run(trials)
    store.write_index(distinct(ran))
    if failed and not store.results(trial.task for trial in ran):
        folders = ", ".join(str(store.folder(task)) for task in failed[:2])
        raise UserError(
            f"all {len(failed)} runs failed", fix=f"read log.txt in {folders}, if there is one, and run the same again"
        )
    return Conducted(tuple(ran), tuple(failed), len(tasks), present)


@dataclass
class Stop:
    """Remembers that a signal asked to stop: Python drops an exception that is raised while an object is finalised."""

    asked: bool = False

    def again(self) -> None:
        """Raise again, if a stop was asked for and the exception was lost."""
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Stop]:
    """SIGTERM and SIGINT raise KeyboardInterrupt."""
    stop = Stop()

    def interrupt(number: int, frame: object) -> None:
        stop.asked = True
        raise KeyboardInterrupt

    try:
        old = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: its owner handles signals
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
