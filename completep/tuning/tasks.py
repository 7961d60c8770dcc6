"""A run of your training as a task: a command, or a Python function. Each run is done once.

The identity of a run is its words (or its function), its values, rules and seed, and the hashes of its scripts. The
machine is not part of it. The folder of a run has run.json, stdout.txt, stderr.txt, `work` (the {folder} of your
script) and result.json.
"""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from completep.config import Shape, sealed
from completep.errors import UserError
from completep.files import create, last_lines, make_folder, remove_folder, write_new, write_over
from completep.load import load_factory
from completep.sweep.child import run_child
from completep.sweep.queue import register
from completep.sweep.task import TaskError, Value
from completep.train.checked import LARGEST_LOSS, SMALLEST_LOSS
from completep.tuning.hopeless import hopeless
from completep.tuning.reading import STDERR, STDOUT, Reading, Source, Take, as_float, final_loss
from completep.tuning.scripts import Hashes
from completep.tuning.template import Template
from completep.tuning.trial import REPORTS, Hopeless, Trial, read_reports
from completep.units import power

INTERPRETER = 0.4e9  # bytes that a Python process with torch takes
LAST_LINES = 7
LOOK = 0.5  # seconds between two looks at the losses of a run
WORK, RUN, RESULT = "work", "run.json", "result.json"


@dataclass(frozen=True)
class Setting:
    """The shape, the values and the seed of a run."""

    shape: Shape
    base: Shape
    rules: str
    values: tuple[tuple[str, Value], ...]  # both searched and constant
    seed: int

    @property
    def names(self) -> dict[str, Value]:
        """All names that a template can use, except {folder}."""
        shape, base, values = self.shape, self.base, dict(self.values)
        ratios = {"m_N": shape.width / base.width, "m_L": shape.depth / base.depth}
        sizes = {"width": shape.width, "depth": shape.depth, "base_width": base.width, "base_depth": base.depth}
        return {**values, **derived(values), **sizes, **ratios, "seed": self.seed, "rules": self.rules}

    @property
    def cost(self) -> float:
        """The parameters in the blocks of a transformer, up to a constant factor."""
        return float(self.shape.width**2 * self.shape.depth)

    def describe(self) -> str:
        values = ", ".join(f"{k} {power(v) if isinstance(v, float) else v}" for k, v in self.values)
        return f"{self.shape.width} × {self.shape.depth}, {values}, seed {self.seed}"


def _common(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that commands and functions share, from plain data."""
    s = content["setting"]
    shapes = Shape(**s["shape"]), Shape(**s["base"])
    return {
        "setting": Setting(*shapes, s["rules"], tuple((name, value) for name, value in s["values"]), s["seed"]),
        "scripts": tuple((name, digest) for name, digest in content["scripts"]),
        "bar": tuple(Reading(float(r["step"]), float(r["loss"])) for r in content["bar"]),
    }


def derived(values: Mapping[str, Value]) -> dict[str, Value]:
    """Weight decay from its timescale, if τ, η and the steps are known."""
    from completep.compute.plan import weight_decay

    known = {name: values.get(name) for name in ("tau", "lr", "steps")}
    if "weight_decay" in values or not all(isinstance(v, (int, float)) and v > 0 for v in known.values()):
        return {}
    tau, lr, steps = (float(v) for v in known.values() if v is not None)
    return {"weight_decay": weight_decay(tau, lr, steps)}


def identity(kind: str, **content: object) -> str:
    text = json.dumps({"kind": kind, **content}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class UserRun:
    """What all runs of a user's own training have in common."""

    setting: Setting
    ranks: int

    @property
    def group(self) -> tuple[Shape, int]:
        """Runs of one group can be compared while they train."""
        return self.setting.shape, self.setting.seed

    @property
    def cost(self) -> float:
        return self.setting.cost

    def memory(self) -> float:
        return INTERPRETER * self.ranks

    def describe(self) -> str:
        return self.setting.describe()

    def loss(self, result: Mapping[str, object]) -> float | None:
        return loss_of(result)


@register
@dataclass(frozen=True)
class Command(UserRun):
    """One run of a command."""

    kind: ClassVar[str] = "command"
    template: str
    source: Source
    setting: Setting
    scripts: Hashes
    folder: str  # where the command is started
    take: Take = "last"
    resumes: bool = False  # the script continues from its own folder, which is then kept between attempts
    ranks: int = 1
    bar: tuple[Reading, ...] = ()  # the curve of the best run so far, to notice hopeless runs; not part of the id

    @cached_property
    def id(self) -> str:
        return identity(
            "command", words=self.words("{folder}"), loss=[self.source.kind, self.source.place, self.source.key],
            take=self.take, values=dict(self.setting.values), rules=self.setting.rules, seed=self.setting.seed,
            scripts=self.scripts,
        )  # fmt: skip

    @property
    def imports(self) -> tuple[str, ...]:
        return ("completep.tuning.tasks", "cattrs")

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> "Command":
        if not isinstance(content["folder"], str):
            raise TypeError("its folder is not a name")
        return Command(**{**content, "source": Source(**content["source"]), **_common(content)})

    def words(self, folder: str) -> list[str]:
        return list(Template(self.template).fill({**self.setting.names, "folder": folder}))

    def carry_out(self, folder: Path, lock: int) -> None:
        content = asdict(replace(self, bar=())) | {"words": self.words(str(folder / WORK))}
        work = start_folder(folder, content, keep=self.resumes)
        words = self.words(str(work))
        if words[0] in ("python", "python3"):
            words[0] = sys.executable  # the interpreter that completep is installed for
        environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ}
        began = time.monotonic()
        with create(folder / STDOUT) as out, create(folder / STDERR) as err:
            try:
                ended = run_child(
                    words, folder=Path(self.folder), environment=environment, lock=lock,
                    stdout=out.fileno(), stderr=err.fileno(), enough=Watching(self.now(folder), self.bar),
                )  # fmt: skip
            except (OSError, ValueError) as error:  # the second for characters that no command can have
                reason = error.strerror if isinstance(error, OSError) else error
                raise TaskError(f"cannot start {words[0]!r}: {reason}") from error
        source = self._source(folder)
        if ended.stopped:
            return
        if ended.ended_early:
            write_hopeless(folder, source.read(folder, final=False), time.monotonic() - began)
            return
        if ended.code and not diverged(source, folder):
            raise TaskError(f"exit code {ended.code}\n{last_words(folder)}")
        write_loss(folder, source.read(folder, final=True), self.take, time.monotonic() - began)

    def _source(self, folder: Path) -> Source:
        return self.source.at({**self.setting.names, "folder": str(folder / WORK)})

    def readings(self, folder: Path) -> list[Reading]:
        """The losses that the run has reported so far."""
        try:
            return self._source(folder).read(folder, final=False)
        except TaskError:  # said when the run ends
            return []

    def now(self, folder: Path) -> Callable[[], list[Reading]]:
        return lambda: self.readings(folder)


@dataclass
class Watching:
    """Called often during a run, and reads its losses now and then. True once the run is hopeless."""

    readings: Callable[[], list[Reading]]
    bar: tuple[Reading, ...]
    next_look: float = 0.0

    def __call__(self) -> bool:
        if not self.bar or time.monotonic() < self.next_look:
            return False
        began = time.monotonic()
        beyond = hopeless(self.readings(), self.bar)
        self.next_look = time.monotonic() + max(LOOK, 20 * (time.monotonic() - began))  # a long log is read less often
        return beyond


def diverged(source: Source, folder: Path) -> bool:
    """A script may end with an error when its loss is not finite: that is a result, not a failure."""
    try:
        readings = source.read(folder, final=False)
    except TaskError:
        return False
    return bool(readings) and not is_finite(readings[-1].loss)


def is_finite(loss: float) -> bool:
    """A larger loss is as good as infinite, and a store does not take it."""
    return math.isfinite(loss) and loss <= LARGEST_LOSS


def last_words(folder: Path) -> str:
    """The last lines that a run printed, errors first."""
    printed = (last_lines(folder / name, LAST_LINES) for name in (STDERR, STDOUT))
    return next(filter(None, printed), "it printed nothing")


def start_folder(folder: Path, content: Mapping[str, object], *, keep: bool) -> Path:
    """Write run.json, and make the folder that the script writes to. It is emptied, unless `keep` is true."""
    write_over(folder / RUN, json.dumps(content, indent=2) + "\n")
    work = folder / WORK
    if work.is_symlink() and keep:
        raise TaskError(f"{work} is a symbolic link, and the script would write through it: remove it")
    if not keep:
        remove_folder(work)
    make_folder(work)
    return work


def write_loss(folder: Path, readings: list[Reading], take: Take, seconds: float) -> None:
    loss = final_loss(readings, take)
    finite = is_finite(loss)
    if finite and loss < SMALLEST_LOSS:
        least = "" if loss <= 0 else f" (at least {SMALLEST_LOSS:g})"
        what = f"the loss is {loss:g}, but it must be above 0{least}, because regrets are in percent of it"
        raise TaskError(f"{what}: report a cross-entropy or an error instead")
    result = {
        "status": "done" if finite else "diverged", "loss": loss if finite else None, "step": readings[-1].step,
        "seconds": seconds,
    }  # fmt: skip
    write_new(folder / RESULT, sealed(result))


def write_hopeless(folder: Path, readings: list[Reading], seconds: float) -> None:
    """The result of a run that was stopped early."""
    last = readings[-1]
    loss = last.loss if is_finite(last.loss) else None
    result = {"status": "hopeless", "loss": loss, "step": last.step, "seconds": seconds}
    write_new(folder / RESULT, sealed(result))


def loss_of(result: Mapping[str, object]) -> float | None:
    value = result.get("loss")
    return float(value) if isinstance(value, (int, float)) else None


@register
@dataclass(frozen=True)
class Call(UserRun):
    """One call of a Python function `train(trial) -> loss`, in a process of its own."""

    kind: ClassVar[str] = "function"
    target: str  # file.py:function
    setting: Setting
    scripts: Hashes
    take: Take = "last"
    resumes: bool = False
    ranks: int = 1
    bar: tuple[Reading, ...] = ()

    @cached_property
    def id(self) -> str:
        name = self.target.rpartition(":")[2]
        return identity(
            "function", name=name, setting=asdict(self.setting), take=self.take, scripts=[h for _, h in self.scripts]
        )

    @property
    def imports(self) -> tuple[str, ...]:
        return ("completep.tuning.tasks", "cattrs", "torch")

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @staticmethod
    def from_json(content: dict[str, Any]) -> "Call":
        return Call(**{**content, **_common(content)})

    def carry_out(self, folder: Path, lock: int) -> None:
        work = start_folder(folder, asdict(replace(self, bar=())), keep=self.resumes)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if not self.resumes:
            (folder / REPORTS).unlink(missing_ok=True)
        began = time.monotonic()
        try:
            returned = load_factory(self.target)(Trial(self.setting.names, work, lambda r: hopeless(r, self.bar)))
        except Hopeless:
            write_hopeless(folder, self.readings(folder), time.monotonic() - began)
            return
        readings = read_reports(folder / REPORTS)
        if returned is not None:
            readings = [*readings, Reading(readings[-1].step + 1 if readings else 0, _as_number(returned, self.target))]
        if not readings:
            raise TaskError(f"{self.target} returned None and reported nothing: return the loss")
        write_loss(folder, readings, self.take, time.monotonic() - began)

    def readings(self, folder: Path) -> list[Reading]:
        """The losses that the run has reported so far; none if their file is damaged."""
        try:
            return read_reports(folder / REPORTS)
        except TaskError:
            return []


def _as_number(returned: object, target: str) -> float:
    value = returned.item() if hasattr(returned, "item") else returned
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TaskError(f"{target} returned {str(value)[:40]!r}, not a number: return the loss")
    return as_float(value)


def refuse_main(target: str) -> None:
    """Refuse a function that another process cannot load from a file."""
    place, _, name = target.rpartition(":")
    if not place.endswith(".py") or "<" in name:
        raise UserError(
            f"{name} cannot be loaded by another process", fix="define it at the top of a file, and pass it from there"
        )
