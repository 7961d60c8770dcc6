"""An engine that stops hopeless runs early: it gives every run the curve of the best finished one."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from completep.sweep.search import Runner
from completep.sweep.store import Store
from completep.sweep.task import Task
from completep.tuning.runs import Call, Command


@dataclass
class StopsEarly:
    """An engine whose runs compare themselves with the best finished run of their shape and seed."""

    engine: Runner
    finished: dict[str, Task] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        return self.engine.store

    def run(self, tasks: Sequence[Task]) -> list[Task]:
        failed = self.engine.run([self.with_bar(task) for task in tasks])
        self.finished |= {task.id: task for task in tasks}
        return failed

    def with_bar(self, task: Task) -> Task:
        if not isinstance(task, (Command, Call)):
            return task
        rivals = [t for t in self.finished.values() if isinstance(t, type(task)) and _alike(t, task)]
        results = self.store.results(rivals)
        losses = {t.id: t.loss(r) for t in rivals if (r := results.get(t.id)) and r["status"] == "done"}
        known = {name: loss for name, loss in losses.items() if loss is not None}
        if not known:
            return task
        best = next(t for t in rivals if t.id == min(known, key=lambda name: known[name]))
        return replace(task, bar=tuple(best.readings(self.store.folder(best))))


@dataclass(frozen=True)
class FinishesStopped:
    """An engine that does stopped runs again, to their end: a verdict must not rest on runs that a search stopped."""

    engine: Runner

    @property
    def store(self) -> Store:
        return self.engine.store

    def run(self, tasks: Sequence[Task]) -> list[Task]:
        for task in tasks:
            self.store.reopen(task)
        return self.engine.run(tasks)


def _alike(one: Command | Call, two: Command | Call) -> bool:
    return (one.setting.shape, one.setting.seed) == (two.setting.shape, two.setting.seed)
