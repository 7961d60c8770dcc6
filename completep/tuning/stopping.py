"""An engine that stops hopeless runs early. It gives every run the curve of the best finished run.

Every other engine does a stopped run to its end (`is_enough` in sweep/task.py), so no verdict uses a stopped run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from completep.sweep.engine import More, nothing_more
from completep.sweep.search import Runner
from completep.sweep.store import Store
from completep.sweep.task import Task
from completep.tuning.decoder import Decoder
from completep.tuning.tasks import Call, Command


@dataclass
class StopsEarly:
    """An engine whose runs compare themselves with the best finished run of their shape and seed."""

    engine: Runner
    finished: dict[str, Task] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        return self.engine.store

    def run(self, tasks: Sequence[Task], more: More = nothing_more) -> list[Task]:
        def following(task: Task) -> list[Task]:
            self.finished[task.id] = task
            return [self.with_bar(new) for new in more(task)]

        return self.engine.run([self.with_bar(task) for task in tasks], following)

    def with_bar(self, task: Task) -> Task:
        if not isinstance(task, (Command, Call, Decoder)):
            return task
        rivals = [t for t in self.finished.values() if isinstance(t, type(task)) and t.group == task.group]
        results = self.store.results(rivals)
        losses = {t.id: t.loss(r) for t in rivals if (r := results.get(t.id)) and r["status"] == "done"}
        known = {name: loss for name, loss in losses.items() if loss is not None}
        if not known:
            return task
        best = next(t for t in rivals if t.id == min(known, key=lambda name: known[name]))
        return replace(task, bar=tuple(best.readings(self.store.folder(best))))
