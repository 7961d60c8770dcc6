"""Rules with rows that were measured, as a file: exponents by parameter, and everything that they rest on.

The file seals itself: its name in the checkpoint of a run, and in `explain`, is the digest of its content.
"""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from completep.errors import UserError
from completep.files import read_text, write_new
from completep.rules.table import ONE, NamedRow, Power, Role, Rule, Rules, rules_named

FORMAT = 1
SETTINGS = ("init_std", "lr", "weight_decay", "eps")
LARGEST = 4.0  # of an exponent in a file
Json = dict[str, object]


@dataclass(frozen=True)
class MeasuredRow:
    """The rule of one parameter: exponents by setting and axis, and how sure they are."""

    parameter: str
    exponents: Mapping[str, Mapping[str, float]]  # setting → axis → exponent
    intervals: Mapping[str, Mapping[str, tuple[float, float, float]]]  # setting → axis → (measured, low, high)
    role: Role | None = None  # what it is taken for, if its role cannot be found

    def words(self) -> str:
        """The measured exponents of lr and ε, for `explain`."""
        return "; ".join(
            f"{setting} ∝ "
            + " ".join(f"{axis}^{value:+.2f}±{(high - low) / 2:.2f}" for axis, (value, low, high) in axes)
            for setting in ("lr", "eps")
            if (axes := list(self.intervals.get(setting, {}).items()))
        )


@dataclass(frozen=True)
class MeasuredRules:
    """Rows by parameter beside the rows of known rules."""

    family: str  # key of the rules that all other parameters follow
    rows: tuple[MeasuredRow, ...]
    axes: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # further axis → (parameter, dimension)
    source: Mapping[str, object] = field(default_factory=dict)  # grid, seeds, settings, versions

    def content(self) -> Json:
        rows = [
            {
                "parameter": row.parameter, "role": None if row.role is None else str(row.role),
                "exponents": {s: dict(axes) for s, axes in row.exponents.items()},
                "measured": {s: {a: list(v) for a, v in axes.items()} for s, axes in row.intervals.items()},
            }
            for row in self.rows
        ]  # fmt: skip
        axes = {axis: {"parameter": p, "dimension": d} for axis, (p, d) in self.axes.items()}
        return {"format": FORMAT, "family": self.family, "rows": rows, "axes": axes, "source": dict(self.source)}

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.content(), sort_keys=True).encode()).hexdigest()

    def rules(self) -> Rules:
        """What `parametrize` takes."""
        family, short = rules_named(self.family), self.digest[:12]
        named = tuple(
            NamedRow(
                row.parameter, self._rule(row, f"measured: {row.words()} (90 % intervals; file {short})"), row.role
            )
            for row in self.rows
        )
        axes = tuple((axis, parameter, dimension) for axis, (parameter, dimension) in self.axes.items())
        name = f"{family.name} with {len(named)} measured rows"
        return replace(family, key=f"{family.key}+measured:{short}", name=name, named=named, axes=axes)

    @staticmethod
    def _rule(row: MeasuredRow, source: str) -> Rule:
        powers = {setting: Power.of(row.exponents.get(setting, {})) for setting in SETTINGS}
        powers["weight_decay"] = ONE / powers["lr"]  # η·λ, the shrinkage per step, does not depend on the size
        return Rule(**powers, source=source, by_model=True)

    def save(self, path: Path | str) -> Path:
        """Write the file, which must not exist yet."""
        return write_new(Path(path), json.dumps(self.content() | {"sha256": self.digest}, indent=2) + "\n")


def load_rules(path: Path | str) -> Rules:
    """Rules from a file that `derive` wrote, for `parametrize(..., rules=load_rules("rules.json"))`.

    A file that was changed by hand is refused: its numbers would no longer be measured.
    """
    path = Path(path)
    again = "derive the rules again with `completep derive`"
    try:
        data = json.loads(read_text(path))
        measured = _read(data)
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        what = f"{path} is not a file of measured rules: {type(error).__name__}: {error}"
        raise UserError(what, fix=again) from error
    if data.get("sha256") != measured.digest:
        raise UserError(f"{path} was changed after it was measured: its digest does not fit its content", fix=again)
    return measured.rules()


def _read(data: Json) -> MeasuredRules:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}, expected {FORMAT}")
    rows = []
    for row in cast(list[Json], data["rows"]):
        exponents = {str(s): _numbers(axes) for s, axes in cast(dict[str, Json], row["exponents"]).items()}
        _refuse_unknown("setting", exponents, SETTINGS, row)
        for powers in exponents.values():
            _refuse_unknown("axis", powers, ("width", "depth", *cast(Json, data["axes"])), row)
        measured = {
            str(s): {a: _triple(v) for a, v in axes.items()}
            for s, axes in cast(dict[str, Json], row["measured"]).items()
        }
        role = None if row["role"] is None else Role(str(row["role"]))
        rows.append(MeasuredRow(str(row["parameter"]), exponents, measured, role))
    axes = {a: (str(v["parameter"]), int(str(v["dimension"]))) for a, v in cast(dict[str, Json], data["axes"]).items()}
    if not all(0 <= dimension < 10 for _, dimension in axes.values()):
        raise ValueError("an axis is along no dimension of a parameter")
    if not isinstance(data["source"], dict):
        raise ValueError(f"its source is {data['source']!r:.40}")
    return MeasuredRules(str(data["family"]), tuple(rows), axes, data["source"])


def _refuse_unknown(what: str, names: Iterable[str], known: Collection[str], row: Json) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"the row of {row['parameter']!r:.80} has an unknown {what}, {name!r:.40}")


def _numbers(axes: Json) -> dict[str, float]:
    values = {axis: float(cast(float, value)) for axis, value in axes.items()}
    if not all(math.isfinite(value) and abs(value) <= LARGEST for value in values.values()):
        raise ValueError(f"exponents {values}")
    return values


def _triple(values: object) -> tuple[float, float, float]:
    value, low, high = (float(v) for v in cast(list[float], values))
    return value, low, high
