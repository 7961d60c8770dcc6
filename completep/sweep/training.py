"""A training run of the reference decoder as a task.

If two parameterizations give the same numbers at a shape, they are one run. At the base this holds for all
parameterizations; in depth, for SP and muP.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import polars as pl

from completep.compute import flops
from completep.compute.memory import memory
from completep.config import Data, GPTConfig, Run, Shape, plain, run_id, structure, whole
from completep.rules.table import rules_named
from completep.sweep.devices import devices, torchrun
from completep.sweep.queue import register
from completep.sweep.store import Store
from completep.sweep.task import Value
from completep.train.folder import CHECKPOINTS, METRICS, check_files, claim, read_result
from completep.train.records import Record, read_metrics
from completep.train.settings import How, open_corpus
from completep.units import power

SIMPLEST = ("sp", "mup", "completep")
INTERPRETER = 0.4e9  # bytes that a process takes before its model
# Utilisation is not recorded: measuring the peak before each of thousands of small runs costs more than it is worth.
HOW = How(checkpoint_every=500, keep=1, peak=None)


def unseen(record: Record) -> None:
    """Ignore the record."""


@register
@dataclass(frozen=True)
class Training:
    """A run with the hash of its data, under the simplest rules and base that give the same numbers."""

    kind: ClassVar[str] = "training"
    run: Run
    how: How = HOW
    ranks: int = 1

    def to_json(self) -> dict[str, object]:
        return {"run": plain(self.run), "how": plain(self.how), "ranks": self.ranks}

    @staticmethod
    def from_json(content: dict[str, Any]) -> "Training":
        run = structure(content["run"], Run, "the task's run", "ask for it again")
        return Training(run, How(**content["how"]), int(content["ranks"]))

    @staticmethod
    def of(run: Run, how: How = HOW, ranks: int = 1) -> "Training":
        whole("ranks", ranks)
        return Training(canonical(with_data(run)), how, ranks)

    @cached_property
    def id(self) -> str:
        return run_id(self.run)

    @cached_property
    def cost(self) -> float:
        return self.run.tokens * _flops_per_token(self.run.model, self.run.sequence)

    @property
    def imports(self) -> tuple[str, ...]:
        return ("completep.sweep.training", "cattrs", "safetensors.torch", "torch._dynamo")

    def memory(self) -> float:
        """Bytes of main memory. With GPUs, the model is not in it."""
        if devices():
            return INTERPRETER * self.ranks
        micro = self.how.micro_batch or max(1, self.run.batch // self.ranks)
        model = memory(self.run.model, sequence=self.run.sequence, micro_batch=micro, ranks=1)
        return self.ranks * (INTERPRETER + model.per_rank)

    def describe(self) -> str:
        run, h = self.run, self.run.hyperparameters
        settings = f"lr {power(h.lr)}, std {h.std:g}, wd {h.weight_decay:.2g}, eps {h.eps:g}, seed {run.seed}"
        settings += "".join(f", {role} lr × {times:g}" for role, times in h.lr_of.items())
        return f"{run.rules} {run.model.width} × {run.model.depth}, {settings}"

    def carry_out(self, folder: Path, lock: int, on_record: "Callable[[Record], None]" = unseen) -> None:
        """Train with one thread, or under torchrun. A finished run keeps its weights; its checkpoints are deleted.

        `on_record` is called with every record of a run with one process.
        """
        import torch

        from completep.train.checkpoint import Checkpoints
        from completep.train.loop import train

        torch.set_num_threads(1)
        if self.ranks > 1:
            claim(folder, self.run)
            torchrun(self._command(folder), self.ranks, lock)
        else:
            train(self.run, folder, self.how, on_record=on_record)
        if (folder / "result.json").exists():
            Checkpoints(folder / CHECKPOINTS).clear()

    def _command(self, folder: Path) -> list[str]:
        """The words that train this run, executed as `how` says."""
        how = self.how
        words = ["completep", "train", str(folder / "run.json"), "--out", str(folder)]
        words += ["--parallel", how.parallel if how.parallel != "none" else "ddp", "--precision", how.precision]
        words += ["--checkpoint-every", str(how.checkpoint_every), "--keep", str(how.keep)]
        words += ["--replicas", str(how.replicas), "--log-every", str(how.log_every)]
        words += [] if how.peak == "measure" else ["--peak", "none" if how.peak is None else repr(how.peak)]
        words += ["--compile"] if how.compile else []
        return words + (["--micro-batch", str(how.micro_batch)] if how.micro_batch else [])

    def loss(self, result: Mapping[str, object]) -> float | None:
        value = result.get("validation_loss")
        return float(value) if isinstance(value, (int, float)) else None


def canonical(run: Run) -> Run:
    """The same run under the simplest rules and base, and with the fewest multipliers, that give the same numbers."""
    if 1 in (lr_of := run.hyperparameters.lr_of).values():
        kept = {role: times for role, times in lr_of.items() if times != 1}
        run = replace(run, hyperparameters=replace(run.hyperparameters, lr_of=kept))
    shape = Shape(run.model.width, run.model.depth)
    rules = _simplest(run.rules, shape.width != run.base.width, shape.depth != run.base.depth)
    # Rules without a factor along an axis do not depend on where the base was on it.
    width = run.base.width if _simplest(rules, True, False) != "sp" else shape.width
    depth = run.base.depth if _simplest(rules, False, True) != "sp" else shape.depth
    base = Shape(width, depth)
    return run if (rules, base) == (run.rules, run.base) else replace(run, rules=rules, base=base)


@cache
def _simplest(rules: str, wider: bool, deeper: bool) -> str:
    effect = rules_named(rules).effect(wider=wider, deeper=deeper)
    same = (key for key in SIMPLEST if rules_named(key).effect(wider=wider, deeper=deeper) == effect)
    return next(same, rules)


def with_data(run: Run) -> Run:
    """The run with the hash of its data, so other data is another run. A run without data stays as it is."""
    if run.data.sha256 or not run.data.source:
        return run
    return replace(run, data=_with_hash(run.data))


@cache
def _with_hash(data: Data) -> Data:
    return replace(data, sha256=open_corpus(data).sha256)


@cache
def _flops_per_token(model: GPTConfig, sequence: int) -> float:
    return flops.training_flops(model, sequence, 1)


def describe(run: Run) -> dict[str, Value]:
    """A run's settings, as columns of a frame."""
    h = run.hyperparameters
    return {
        "rules": run.rules,
        "width": run.model.width,
        "depth": run.model.depth,
        "lr": h.lr,
        "std": h.std,
        "eps": h.eps,
        "weight_decay": h.weight_decay,
        "seed": run.seed,
        "batch": run.batch,
        "steps": run.schedule.steps,
        "parameters": flops.non_embedding(run.model),
        "flops": flops.training_flops(run.model, run.sequence, run.tokens),
    }


def history(store: Store, trials: "Sequence[tuple[Mapping[str, Value], Training]]") -> pl.DataFrame:
    """A row per recorded training step: the labels, step, tokens and loss."""
    rows = [
        {
            **labels, "run": task.id, "step": record.step,
            "tokens": record.step * task.run.batch * task.run.sequence, "loss": record.loss,
        }
        for labels, task in trials
        for record in _records(store, task)
        if record.kind == "step"
    ]  # fmt: skip
    return pl.DataFrame(rows, infer_schema_length=None)


def _records(store: Store, task: Training) -> Iterator[Record]:
    """The records of a run. If the run is finished, they must be those that it ended with."""
    folder = store.folder(task)
    if not (folder / METRICS).exists():
        return iter(())
    if (store.result(task) or {}).get("status") in ("done", "diverged"):
        result = read_result(folder)
        assert result is not None
        check_files(folder, result, METRICS)
    return read_metrics(folder / METRICS)
