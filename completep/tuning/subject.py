"""What is tuned: a command, a Python function, or the reference decoder. Each makes the task of a run."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from completep.compute.plan import weight_decay
from completep.config import Hyperparameters, Run, Schedule, Shape
from completep.errors import UserError
from completep.load import load_factory
from completep.rules.table import LR_NAMES, decoder_roles
from completep.sweep.task import Task, Value
from completep.sweep.training import Training
from completep.tuning.decoder import Decoder
from completep.tuning.reading import Source, Take
from completep.tuning.scripts import Hashes, find_scripts
from completep.tuning.space import SHAPE_NAMES, Dimension
from completep.tuning.tasks import Call, Command, Setting, derived, refuse_main
from completep.tuning.template import Template

ALWAYS = (*SHAPE_NAMES, "seed", "folder", "rules")


class Subject(Protocol):
    """What a search needs to know of the training that is tuned."""

    @property
    def scripts(self) -> Hashes: ...

    def describe(self) -> str:
        """The whole command, or the function."""

    def name(self) -> str:
        """A short name, for titles."""

    def check(self, dimensions: Sequence[Dimension], shapes: Sequence[Shape], seeds: int) -> None:
        """Refuse what cannot work, before anything runs."""

    def task(self, shape: Shape, values: Mapping[str, Value], seed: int) -> Task: ...


@dataclass(frozen=True)
class Common:
    """What commands and functions share."""

    base: Shape
    rules: str
    constants: Mapping[str, Value]
    take: Take = "last"
    resumes: bool = False
    ranks: int = 1

    def setting(self, shape: Shape, values: Mapping[str, Value], seed: int) -> Setting:
        return Setting(shape, self.base, self.rules, tuple({**self.constants, **values}.items()), seed)


@dataclass(frozen=True)
class CommandSubject:
    """A command template, and where its loss is."""

    template: Template
    source: Source
    common: Common
    sources: tuple[str, ...] = ()

    @cached_property
    def scripts(self) -> Hashes:
        return find_scripts(self.template.words, Path.cwd(), self.sources)

    def describe(self) -> str:
        return self.template.text

    def name(self) -> str:
        words = self.template.words
        return Path(next((w for w in words if w.endswith((".py", ".sh"))), words[0])).name

    def check(self, dimensions: Sequence[Dimension], shapes: Sequence[Shape], seeds: int) -> None:
        example = {d.name: d.values[0] for d in dimensions}
        values = {**self.common.constants, **example}
        known = {*ALWAYS, *values, *derived(values)}
        self.template.check(known)
        self.source.check(frozenset(known))
        used = (
            self.template.names | {"tau", "lr", "steps"} if "weight_decay" in derived(values) else self.template.names
        )
        for name in (*example, *self.common.constants):
            if name not in used:
                raise UserError(
                    f"the command never uses {{{name}}}, so its values would have no effect",
                    fix=f"add it, for instance --{name} {{{name}}}, or leave {name} out",
                )
        if seeds > 1 and "seed" not in used:
            raise UserError(
                "the command never uses {seed}, so all seeds would be the same run",
                fix="add it, for instance --seed {seed}, or use one seed (which never gives a PASS)",
            )
        for axis, ratio in (("width", "m_N"), ("depth", "m_L")):
            if len({getattr(s, axis) for s in shapes}) > 1 and not used & {axis, ratio}:
                raise UserError(
                    f"the command never uses {{{axis}}}, but the proxies differ in it",
                    fix=f"add it, for instance --{axis} {{{axis}}}, or give proxies of one {axis}",
                )
        if self.source.kind != "output" and "folder" not in used:
            raise UserError(
                f"the loss is read from {self.source.place!r}, but the command never uses {{folder}}",
                fix="add it, for instance --out_dir {folder}",
            )
        for shape in shapes:
            self.template.fill({**self.common.setting(shape, example, 0).names, "folder": "folder"})

    def task(self, shape: Shape, values: Mapping[str, Value], seed: int) -> Task:
        c = self.common
        return Command(
            self.template.text, self.source, c.setting(shape, values, seed), self.scripts, str(Path.cwd()), c.take,
            c.resumes, c.ranks,
        )  # fmt: skip


@dataclass(frozen=True)
class FunctionSubject:
    """A function `train(trial) -> loss`, as `file.py:function`."""

    target: str
    common: Common
    sources: tuple[str, ...] = ()

    @staticmethod
    def target_of(function: "Callable[..., object] | str") -> str:
        if isinstance(function, str):
            target = function
        else:
            try:
                file = inspect.getsourcefile(function) or "?"
            except TypeError:
                file = "?"
            target = f"{file}:{getattr(function, '__qualname__', repr(function))}"
        refuse_main(target)
        place, _, name = target.rpartition(":")
        return f"{Path(place).resolve()}:{name}"

    @cached_property
    def scripts(self) -> Hashes:
        file = Path(self.target.rpartition(":")[0])
        return find_scripts(["python", file.name], file.parent, self.sources)

    def describe(self) -> str:
        place, _, name = self.target.rpartition(":")
        return f"{Path(place).name}:{name}"

    def name(self) -> str:
        return self.describe()

    def check(self, dimensions: Sequence[Dimension], shapes: Sequence[Shape], seeds: int) -> None:
        load_factory(self.target)

    def task(self, shape: Shape, values: Mapping[str, Value], seed: int) -> Task:
        c = self.common
        return Call(self.target, c.setting(shape, values, seed), self.scripts, c.take, c.resumes, c.ranks)


@dataclass(frozen=True)
class DecoderSubject:
    """The reference decoder, as a run to vary. completep applies the rules."""

    run: Run
    constants: Mapping[str, Value]
    ranks: int = 1

    NUMBERS = tuple(f.name for f in fields(Hyperparameters) if f.name != "lr_of")

    @property
    def multipliers(self) -> dict[str, str]:
        """Name of the multiplier → role, for every role that the model has."""
        return {LR_NAMES[role]: str(role) for role in decoder_roles(self.run.model)}

    @property
    def scripts(self) -> Hashes:
        return ()

    def describe(self) -> str:
        return "the reference decoder"

    def name(self) -> str:
        return self.describe()

    def check(self, dimensions: Sequence[Dimension], shapes: Sequence[Shape], seeds: int) -> None:
        names, by_role = [*self.NUMBERS, "tau", "warmup", "steps", "batch"], list(self.multipliers)
        for name in (*(d.name for d in dimensions), *self.constants):
            if name not in (*names, *by_role):
                known = ", ".join(by_role if name.startswith("lr_of") else [*names, by_role[0], "…"])
                raise UserError(f"the decoder has no setting {name!r}", fix=f"use one of {known}")
        first = {d.name: d.values[0] for d in dimensions}
        for shape in shapes:
            for point in ({**first, d.name: value} for d in dimensions for value in d.values):
                self.at(shape, point, 0)

    def task(self, shape: Shape, values: Mapping[str, Value], seed: int) -> Task:
        return Decoder(Training.of(self.at(shape, values, seed), ranks=self.ranks))

    def at(self, shape: Shape, values: Mapping[str, Value], seed: int) -> Run:
        run, chosen = self.run, {**self.constants, **values}
        steps = _whole("steps", chosen.get("steps", run.schedule.steps))
        warmup = _number("warmup", chosen.get("warmup", run.schedule.warmup / run.schedule.steps))
        if not 0 <= warmup <= 1:
            raise UserError(f"warmup={warmup:g} is not a share of the steps", fix="give numbers from 0 to 1")
        lr_of = {role: _number(name, chosen[name]) for name, role in self.multipliers.items() if name in chosen}
        hyper = replace(
            run.hyperparameters,
            **{name: _number(name, chosen[name]) for name in self.NUMBERS if name in chosen},
            lr_of={**run.hyperparameters.lr_of, **lr_of},
        )
        if "tau" in chosen:
            if "weight_decay" in chosen:
                raise UserError("tau and weight_decay set the same thing", fix="give one of them")
            hyper = replace(hyper, weight_decay=weight_decay(_number("tau", chosen["tau"]), hyper.lr, steps))
        return replace(
            run,
            model=replace(run.model, width=shape.width, depth=shape.depth),
            hyperparameters=hyper,
            schedule=Schedule(steps, int(warmup * steps)),
            batch=_whole("batch", chosen.get("batch", run.batch)),
            seed=seed,
        )


def _number(name: str, value: Value) -> float:
    if not isinstance(value, (int, float)):
        raise UserError(f"{name}={value!r}: must be a number", fix=f"give a number for {name}")
    return float(value)


def _whole(name: str, value: Value) -> int:
    if not isinstance(value, (int, float)) or value != int(value):
        raise UserError(f"{name}={value!r}: must be a whole number", fix=f"give a whole {name}")
    return int(value)
