"""All settings of a tuning, as one frozen dataclass. They come from the command line, from Python or from TOML."""

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, get_args

from completep.config import Shape, as_shape, run_from_json, structure, whole
from completep.errors import UserError, choice
from completep.files import read_text
from completep.rules.table import rules_named
from completep.studies.scale import LAPTOP
from completep.sweep.task import Point, Value
from completep.tuning.reading import EXAMPLE as LOSS_EXAMPLE
from completep.tuning.reading import Source, Take
from completep.tuning.space import LARGEST, Dimension, check_name, is_value, parse_space
from completep.tuning.subject import CommandSubject, Common, DecoderSubject, FunctionSubject, Subject
from completep.tuning.template import Template

GPT = "gpt"
ModelName = Literal["gpt"]
SearchName = Literal["auto", "bracket", "tpe", "gp", "random"]
MOST = {"seeds": 1000, "most_seeds": 1000, "trials": 100_000}  # more is a typing mistake
MOST_BYTES = 2**20  # of a TOML file
FIX = "start from the file with all settings that `completep tune` writes (its option init)"


@dataclass(frozen=True)
class Tuning:
    """What to tune, over which space, at which shapes. The fields are the keys of the TOML file."""

    command: str = ""  # a template
    function: str = ""  # file.py:train
    model: str = ""  # "gpt": the reference decoder
    run: str = ""  # with model: a run.json to vary
    loss: str = ""  # with command: where the loss is
    take: str = "last"  # of several losses: the last or the smallest
    space: dict[str, object] = field(default_factory=dict)
    set: dict[str, object] = field(default_factory=dict)  # constants
    base: list[int] = field(default_factory=lambda: [64, 2])
    proxies: list[list[int]] = field(default_factory=list)  # by default four times the base's depth
    seeds: int = 3
    most_seeds: int = 8  # if the noise requires more than `seeds`
    rules: str = "completep"
    search: str = "auto"
    trials: int = 0  # with several dimensions: runs of the search; 0: ten per dimension
    stop_early: bool = True  # stop hopeless runs of the first search, if the loss is reported during training
    sources: list[str] = field(default_factory=list)  # further files that a run depends on
    resumes: bool = False
    ranks: int = 1
    factory: str = ""  # file.py:model, to measure whether the base is fit to tune at

    def __post_init__(self) -> None:
        given = [name for name in ("command", "function", "model") if getattr(self, name)]
        if len(given) != 1:
            what = f"{' and '.join(given)} are given" if given else "there is nothing to tune"
            raise UserError(what, fix="give one of a command, a function (file.py:train) and model=gpt")
        if self.model and self.model != GPT:
            raise UserError(f"model={self.model!r} is not known", fix="use gpt; for your own model, give a command")
        if self.command and not self.loss:
            raise UserError("loss is not given: where does the command leave its loss?", fix=f"as loss, {LOSS_EXAMPLE}")
        if self.loss and not self.command:
            raise UserError(f"loss={self.loss!r} is only for commands", fix="leave loss out")
        if self.run and not self.model:
            raise UserError(f"run={self.run!r} is only for model=gpt", fix="leave run out")
        choice("take", self.take, get_args(Take))
        choice("search", self.search, get_args(SearchName))
        whole("seeds", self.seeds)
        whole("most_seeds", self.most_seeds)
        whole("ranks", self.ranks)
        whole("trials", self.trials, 0)
        for name, most in MOST.items():
            if (value := getattr(self, name)) > most:
                raise UserError(f"{name}={value} is too many", fix=f"give at most {most}")
        rules_named(self.rules)

    @property
    def base_shape(self) -> Shape:
        return as_shape(self.base)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The base, then the proxies."""
        base = self.base_shape
        proxies = [as_shape(p, "proxies") for p in self.proxies] or [Shape(base.width, 4 * base.depth)]
        for proxy in proxies:
            if proxy.width < base.width or proxy.depth < base.depth or proxy == base:
                raise UserError(
                    f"the proxy {proxy.width} × {proxy.depth} is not larger than the base {base.width} × {base.depth}",
                    fix=f"use a proxy like {base.width}x{4 * base.depth} or {2 * base.width}x{2 * base.depth}",
                )
        return (base, *dict.fromkeys(proxies))

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        return parse_space({name: _values(name, values) for name, values in self.space.items()})

    @property
    def constants(self) -> dict[str, Value]:
        for name, value in self.set.items():
            check_name(name)
            if not is_value(value) or name in self.space:
                twice = f"{name} is a constant and searched too" if name in self.space else f"{name}={value!r}"
                raise UserError(twice, fix="give a finite number or a word, once")
        return dict(self.set)  # type: ignore[arg-type]

    def subject(self) -> Subject:
        take: Take = "min" if self.take == "min" else "last"
        common = Common(self.base_shape, self.rules, self.constants, take, self.resumes, self.ranks)
        if self.command:
            source = Source.parse(self.loss)
            return CommandSubject(Template(self.command), source, common, tuple(self.sources))
        if self.function:
            target = FunctionSubject.target_of(self.function)
            return FunctionSubject(target, common, tuple(self.sources))
        return self._decoder()

    def _decoder(self) -> DecoderSubject:
        base = self.base_shape
        if self.run:
            run = run_from_json(read_text(Path(self.run)), self.run)
        else:
            point = Point(rules=self.rules, depth=base.depth, seed=0)
            run = LAPTOP.fixed_tokens(point, lr=LAPTOP.lr, std=LAPTOP.std)
        return DecoderSubject(replace(run, base=base, rules=rules_named(self.rules).key), self.constants, self.ranks)


def _values(name: str, values: object) -> "str | Sequence[Value]":
    if isinstance(values, str):
        return values
    if not isinstance(values, (list, tuple)) or not all(is_value(v) for v in values):
        raise UserError(
            f"space: {name}={values!r} is not a range",
            fix=f'write {name} = "2^-10..2^-5", or a list of words or finite numbers',
        )
    return list(values)


def read_tuning(path: Path, changes: Mapping[str, object] | None = None) -> Tuning:
    """The settings of a TOML file; `changes` override it."""
    try:
        content = tomllib.loads(read_text(path, MOST_BYTES))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:  # not TOML, or a number with more digits than Python converts
        raise UserError(f"{path} is not TOML: {error}", fix=FIX) from error
    _refuse_huge(content, str(path))
    known = [f.name for f in fields(Tuning)]
    for key in content:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            raise UserError(f"{path}: unknown key {key!r}", fix=f"did you mean {close[0]}?" if close else FIX)
    return make_tuning({**content, **(changes or {})}, str(path))


def _refuse_huge(value: object, place: str) -> None:
    """Refuse whole numbers that no message can show: 0xfff… may have thousands of digits."""
    if isinstance(value, int) and abs(value) > LARGEST:
        raise UserError(f"{place} is too large a number", fix=f"give a number of at most {LARGEST}")
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _refuse_huge(inner, f"{place}: {key}")


def make_tuning(content: Mapping[str, object], name: str = "tune") -> Tuning:
    try:
        return structure(dict(content), Tuning, name, FIX)
    except UserError as error:
        raise own_error(error) or error from None


def own_error(error: BaseException | None) -> UserError | None:
    """The error that a `Tuning` itself raised, which has the better fix, from the error of reading it."""
    if isinstance(error, UserError) and error.__cause__ is None:
        return error
    inner = getattr(error, "exceptions", ()) or (getattr(error, "__cause__", None),)
    return next((refusal for cause in inner if cause is not None and (refusal := own_error(cause)) is not None), None)


def names_toml(train: "str | Callable[..., object] | Path") -> bool:
    """Is this a TOML file, and not a command that ends in one?"""
    text = "" if callable(train) else str(train)
    one_word = not re.search(r"[\s{}]", text)
    return text.endswith(".toml") and (isinstance(train, Path) or one_word or Path(text).is_file())


def described(train: "str | Callable[..., object] | Path", model: str = "") -> dict[str, object]:
    """The first argument of `tune` as settings: a function, `file.py:function` or a command. TOML is read elsewhere."""
    if callable(train):
        return {"function": FunctionSubject.target_of(train)}
    text = str(train)
    if not text:
        return {"model": model} if model else {}
    place, colon, _ = text.rpartition(":")
    if colon and place.endswith(".py") and " " not in text:
        return {"function": text}
    return {"command": text}


INIT = """# completep tune FILE.toml runs this. Every key is optional, except for what to tune and the space.

# What to tune: a command, a function or the reference decoder. Give one of them.
# Names: {width} {depth} {base_width} {base_depth} {m_N} {m_L} {seed} {rules} {folder}, every name of [space] and
# [set], and whole-number arithmetic such as {width//16}. No shell runs: a value is always one argument.
command = "python train.py --n_embd {width} --n_layer {depth} --lr {lr} --seed {seed} --out_dir {folder}"
# function = "train.py:train"   # train(trial) -> loss; trial.width, trial.lr, trial.folder, trial.report(step, loss)
# model = "gpt"

# Where the loss of a run is: a JSON, JSONL or CSV file and its key, a regular expression on the output, or TensorBoard.
loss = "{folder}/metrics.jsonl:val_loss"
# loss = 'output:val loss (\\S+)'
# loss = "tensorboard:{folder}:val/loss"
take = "last"         # of several losses: "last" or "min"

base = [64, 2]        # width and depth to tune at
proxies = [[64, 8]]   # larger shapes at which the optimum is verified; by default four times the depth
seeds = 3             # one seed never gives a PASS
most_seeds = 8        # largest number of seeds, if the noise requires more than `seeds`
rules = "completep"   # what your script applies; {rules} passes it on

search = "auto"       # one dimension: bracket; several: tpe, gp or random (pip install 'completep[tune]')
trials = 0            # runs of a search over several dimensions; 0: ten per dimension
stop_early = true     # stop hopeless runs of the first search, if the loss is reported during training
sources = []          # further files that a run depends on (your script and what it imports count already)
resumes = false       # true: the script continues from {folder} after an interruption
ranks = 1             # number of GPUs per run
factory = ""          # "model.py:build": measure whether the base is fit to tune at (build takes width and depth)

[space]               # every dimension is verified; the first one must be a number
lr = "2^-10..2^-5"    # every octave; "2^-10..2^-5:0.5" every half one
# dropout = "0..0.3:linear:0.1"
# activation = ["gelu", "relu"]

[set]                 # constants
# steps = 1000
"""
