"""The conductor: runs trials with a search and an engine, and reports progress to a watcher."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass

from completep.errors import UserError
from completep.sweep.engine import Backend, Engine, Event, unwatched
from completep.sweep.search import Bracketing, Search, Strategy
from completep.sweep.store import Store, distinct
from completep.sweep.task import Task, Trial

# Given the trials, the store and whether a search may need fewer of them: a context that takes events.
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
    """Run what is missing. SIGTERM works like Ctrl-C: every task saves first, and the same call continues later."""
    if search in ("bracket", "beside") and swept is None:
        raise UserError("there is no curve with a minimum to search for", fix="use search='grid'")
    tasks = distinct(trials)
    store.write_index(tasks)
    present = len(store.results(tasks))
    with watch(trials, store, search != "grid") as on_event, sigterm_interrupts(), closing(backend):
        engine = Engine(store, backend, on_event, fail_fast)
        if not isinstance(search, str):
            ran, failed = search(engine, trials)
        elif search == "grid":
            ran, failed = list(trials), engine.run(tasks)
        else:
            assert swept is not None
            values = sorted({trial.point.number(swept) for trial in trials})
            ran, failed = Bracketing(engine, swept, values).run(trials, walk_all=search == "bracket")
    store.write_index(distinct(ran))
    if failed and not store.results(trial.task for trial in ran):
        folders = ", ".join(str(store.folder(task)) for task in failed[:2])
        raise UserError(
            f"all {len(failed)} runs failed", fix=f"see log.txt in {folders}, if it exists; then run the same again"
        )
    return Conducted(tuple(ran), tuple(failed), len(tasks), present)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        old = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: its owner handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
