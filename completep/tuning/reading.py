"""Where a run's loss is: in a JSON, JSONL or CSV file, in its output, or in TensorBoard's files.

    {folder}/metrics.jsonl:val_loss         the key in every record
    {folder}/result.json:eval.loss          a dot separates nested keys
    {folder}/log.csv:val_loss
    output:val loss (\\S+)                   a regular expression on what the run prints; one group is the loss
    tensorboard:{folder}:val/loss           a scalar's tag

A loss of NaN or infinity means that the run diverged. A loss that is missing or not a number is an error.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from completep.errors import UserError, some
from completep.files import open_regular
from completep.sweep.task import TaskError, Value
from completep.tuning.template import fill, placeholders, refuse_unknown

Kind = Literal["json", "jsonl", "csv", "output", "tensorboard"]
Take = Literal["last", "min"]
FILE = re.compile(r"(?P<place>.+?\.(?P<kind>jsonl|ndjson|json|csv)):(?P<key>.+)", re.S)
STEP_KEYS = ("step", "iter", "iteration", "global_step", "_step", "steps", "epoch")
EXAMPLE = "write '{folder}/metrics.jsonl:val_loss', 'output:val loss (\\S+)' or 'tensorboard:{folder}:val/loss'"
STDOUT, STDERR = "stdout.txt", "stderr.txt"  # in a run's folder
MOST_BYTES = 2**28  # of a file or an output that is read for losses


@dataclass(frozen=True)
class Reading:
    """A loss, and at which step."""

    step: float
    loss: float


@dataclass(frozen=True)
class Source:
    """Where the loss is; `place` may hold placeholders."""

    kind: Kind
    place: str
    key: str

    @staticmethod
    def parse(text: str) -> "Source":
        if "\0" in text:
            raise UserError(f"loss={text!r} has a NUL character", fix=EXAMPLE)
        if match := FILE.fullmatch(text):
            kind: Kind = "json" if match["kind"] == "json" else "csv" if match["kind"] == "csv" else "jsonl"
            return Source(kind, match["place"], match["key"])
        word, _, rest = text.partition(":")
        if word == "output" and rest:
            return Source("output", "", _pattern(rest).pattern)
        place, colon, tag = rest.partition(":")
        if word == "tensorboard" and place and colon and tag:
            return Source("tensorboard", place, tag)
        raise UserError(f"loss={text!r} does not say where the loss is", fix=EXAMPLE)

    def check(self, known: Mapping[str, Value] | frozenset[str]) -> None:
        """Refuse unknown names, and a file that all runs would share."""
        names = placeholders(self.place)
        for name in names:
            if name not in known:
                refuse_unknown(name, known, f"the place of the loss {self.place!r}")
        if self.kind != "output" and "folder" not in names:
            raise UserError(
                f"the loss is read from {self.place!r}, which is the same for every run",
                fix="let the script write into its own folder, and write {folder} in the loss and in the command",
            )

    def at(self, values: Mapping[str, Value]) -> "Source":
        return self if self.kind == "output" else Source(self.kind, fill(self.place, values), self.key)

    def read(self, output: Path, *, final: bool) -> list[Reading]:
        """The losses so far. `output` is the folder with what the run printed.

        With `final`, the run has ended without an error, so a missing loss is an error.
        """
        try:
            entries = list(READERS[self.kind](self, output, final))
            readings = [Reading(step, _number(self, raw)) for step, raw in entries if raw is not None]
            if final and entries and entries[-1][1] is None:  # many loggers write NaN as null
                what = (
                    f"the last {self.key!r} in {self.place} is null: the run diverged, or did not evaluate at its end"
                )
                raise TaskError(f"{what}; write NaN if it diverged, and leave out records without a loss")
        except FileNotFoundError:
            readings = []
        except OSError as error:
            raise TaskError(f"the loss cannot be read from {self.place}: {error.strerror}") from error
        if final and not readings:
            raise TaskError(f"the run ended without an error, but left no loss: {self._absent(output)}")
        return readings

    def _absent(self, output: Path) -> str:
        if self.kind == "output":
            return f"its output has nothing like {self.key!r} ({output})"
        if not Path(self.place).exists():
            return f"there is no {self.place}"
        keys = known_keys(self)
        return f"{self.place} has no {self.key!r}" + (f"; it has {some(keys)}" if keys else "")


def final_loss(readings: list[Reading], take: Take) -> float:
    """The last loss, or the smallest. NaN if the last one is not finite: the run diverged."""
    last = readings[-1].loss
    finite = [r.loss for r in readings if math.isfinite(r.loss)]
    return min(finite) if take == "min" and math.isfinite(last) else last


def _pattern(text: str) -> "re.Pattern[str]":
    try:
        pattern = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"{text!r} is not a regular expression: {error}", fix=EXAMPLE) from error
    if not pattern.groups or (pattern.groups > 1 and "loss" not in pattern.groupindex):
        raise UserError(
            f"{text!r} has {pattern.groups} groups: which is the loss?",
            fix="put the number in one pair of brackets, or name it: (?P<loss>\\S+)",
        )
    return pattern


def _number(source: Source, raw: object) -> float:
    if isinstance(raw, (int, float)) and not isinstance(raw, bool):
        return as_float(raw)
    try:
        if isinstance(raw, str) and (source.kind in ("csv", "output") or not math.isfinite(float(raw))):
            return float(raw)
    except ValueError:
        pass
    kind = "the text " if isinstance(raw, str) else ""
    raise TaskError(f"the loss {source.key!r} is {kind}{str(raw)[:40]!r}, not a number ({source.place or 'output'})")


def as_float(value: float) -> float:
    """A whole number may be larger than every float: a run with such a loss has diverged."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _text(path: str | Path) -> str:
    with open_regular(path) as file:
        return file.read(MOST_BYTES).decode("utf-8", errors="replace")


Found = Iterator[tuple[float, object]]


def _json(source: Source, output: Path, final: bool) -> Found:
    try:
        content = json.loads(_text(source.place))
    except (ValueError, RecursionError) as error:
        if final:
            raise TaskError(f"{source.place} is not JSON: {error}") from error
        return
    for i, (step, value) in enumerate(inside(content, source.key)):
        yield (i if step is None else step), value


def _jsonl(source: Source, output: Path, final: bool) -> Found:
    text = _text(source.place)
    lines = text.splitlines() if final else text[: text.rfind("\n") + 1].splitlines()  # the last may be half written
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{source.place}, line {i + 1} is not JSON: {error}") from error
        for step, value in inside(record, source.key):
            yield (i if step is None else step), value


def inside(content: object, key: str) -> Iterator[tuple[float | None, object]]:
    """(step, value) of every record that has the key. A dot separates nested keys; lists are searched too."""
    if isinstance(content, list):
        for item in content:
            yield from inside(item, key)
    elif isinstance(content, dict):
        if key in content:
            if isinstance(content[key], list):
                yield from ((float(i), value) for i, value in enumerate(content[key]))
            else:
                yield step_of(content), content[key]
        elif "." in key:
            head, _, rest = key.partition(".")
            yield from inside(content.get(head), rest)


def step_of(record: Mapping[str, object]) -> float | None:
    for key in STEP_KEYS:
        try:
            return float(str(record[key]))
        except (KeyError, ValueError):
            continue
    return None


def _csv(source: Source, output: Path, final: bool) -> Found:
    text = _text(source.place)
    whole = text if final else text[: text.rfind("\n") + 1]
    for i, row in enumerate(_rows(whole, source.place)):
        value = row.get(source.key)
        if value is not None and value.strip():
            step = step_of({k: v for k, v in row.items() if isinstance(k, str)})
            yield (i if step is None else step), value.strip()


def _rows(text: str, place: str) -> Iterator[dict[str, str]]:
    try:
        yield from csv.DictReader(io.StringIO(text))
    except csv.Error as error:  # a field that is too long, for instance
        raise TaskError(f"{place} cannot be read as CSV: {error}") from error


def _output(source: Source, output: Path, final: bool) -> Found:
    pattern = re.compile(source.key)
    group: str | int = "loss" if "loss" in pattern.groupindex else 1
    texts = [_text(output / name) for name in (STDOUT, STDERR) if (output / name).exists()]
    matches = next((in_text for text in texts if (in_text := list(pattern.finditer(text)))), [])
    for i, match in enumerate(matches):
        step = step_of(match.groupdict())
        if match[group] is None:
            continue
        after = match.string[match.end(group) : match.end(group) + 1]
        if match[group][-1:].isdigit() and (after.isdigit() or after in ("e", "E")):
            raise TaskError(f"{source.key!r} stops inside a number ({match[0]}{after}…): write (\\S+) for the loss")
        yield (i if step is None else step), match[group].rstrip(".,;:)]}")


def _tensorboard(source: Source, output: Path, final: bool) -> Found:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise TaskError("TensorBoard's files need tensorboard: pip install 'completep[track]'") from error
    if not Path(source.place).exists():
        return
    events = EventAccumulator(source.place, size_guidance={"scalars": 0})
    events.Reload()
    if source.key in events.Tags()["scalars"]:
        yield from ((float(e.step), float(e.value)) for e in events.Scalars(source.key))


READERS = {"json": _json, "jsonl": _jsonl, "csv": _csv, "output": _output, "tensorboard": _tensorboard}


def known_keys(source: Source) -> list[str]:
    """The keys that the file has, for an error message."""
    try:
        if source.kind == "csv":
            return list(csv.DictReader(io.StringIO(_text(source.place))).fieldnames or ())
        if source.kind == "jsonl":
            records = [json.loads(line) for line in _text(source.place).splitlines() if line.strip()]
            return list(dict.fromkeys(key for r in records if isinstance(r, dict) for key in r))
        content = json.loads(_text(source.place)) if source.kind == "json" else {}
        return list(content) if isinstance(content, dict) else []
    except (OSError, ValueError, RecursionError, csv.Error):
        return []
