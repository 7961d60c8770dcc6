"""What a result says, as data: verdicts, sentences, tables, facts and figures. The renderers beside this file show it.

terminal.py, html.py and markdown.py render a `Document`; result.py has `Result`, the base class of what public
functions return.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    import altair as alt
    import polars as pl

    Panel = alt.Chart | alt.LayerChart | alt.FacetChart

Cell = str | int | float | bool | None


class Strong(str):
    """Text in a cell that is shown in bold."""


Json = dict[str, object]


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
Tone = Literal["good", "bad", "open"]
TONES: Mapping[str, Tone] = {"PASS": "good", "FAIL": "bad", "INCONCLUSIVE": "open"}


@dataclass(frozen=True)
class Verdict:
    """The answer as a word and a sentence. A word other than PASS, FAIL and INCONCLUSIVE needs a `tone`."""

    word: str
    sentence: str = ""
    tone: Tone | None = None
    headline: str = ""  # shown instead of the word

    @property
    def colour(self) -> Tone:
        return self.tone or TONES.get(self.word, "open")


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Code:
    """Text to copy: a command, a file."""

    text: str
    title: str = ""
    page_only: bool = False  # not for the terminal


@dataclass(frozen=True)
class Facts:
    """Names with values, such as the settings of a study."""

    title: str
    rows: Mapping[str, str]
    page_only: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    collapsed: bool = False  # for long lists: folded on a page, and not shown in a terminal

    @staticmethod
    def of(title: str, rows: Sequence[Mapping[str, Cell]], notes: tuple[str, ...] = ()) -> "Table":
        """A table from records, with every column that any of them has."""
        columns = tuple(dict.fromkeys(name for row in rows for name in row))
        return Table(title, columns, tuple(tuple(row.get(c) for c in columns) for row in rows), notes)

    @staticmethod
    def of_frame(title: str, frame: "pl.DataFrame", *, collapsed: bool = False) -> "Table":
        columns = tuple(name.replace("_", " ") for name in frame.columns)
        return Table(title, columns, tuple(frame.rows()), collapsed=collapsed)

    def numeric(self, column: int) -> bool:
        """Are all values of this column numbers? Then it is right-aligned."""
        values = [row[column] for row in self.rows if row[column] is not None]
        return bool(values) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)


@dataclass(frozen=True)
class Figure:
    """Panels that belong together. A page shows them as wide as the screen allows, a file in one picture."""

    name: str
    title: str
    panels: "tuple[Panel, ...]"
    columns: int = 4

    @cached_property
    def specs(self) -> list[Json]:
        """The panels as Vega-Lite with visible text only, made once for the page and the pictures.

        Vega draws text as text. altair has validated the panels as they were made.
        """
        import altair as alt

        from completep.report.escape import harmless

        with alt.data_transformers.disable_max_rows():  # altair would refuse a panel with more than 5000 points
            return [harmless(cast(Json, strict(panel.to_dict(validate=False)))) for panel in self.panels]


Part = Verdict | Text | Code | Facts | Table | Figure


@dataclass(frozen=True)
class Document:
    title: str
    parts: tuple[Part, ...]
    kind: str = ""  # what made it, above the title: `completep study shape`

    def figures(self) -> list[Figure]:
        return [part for part in self.parts if isinstance(part, Figure)]


def tone(text: str) -> Tone | None:
    """The tone of a cell that is or starts with a verdict; None for other text."""
    return TONES.get(text) or TONES.get(text.split(":")[0])


def number(value: object) -> str:
    """A cell as text: four significant digits at most, and 2.38×10¹⁹ for 2.38e+19."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "-∞"
    digits, e, exponent = f"{value:.4g}".partition("e")
    if not e:
        return digits
    times = {"1": "", "-1": "-"}.get(digits, f"{digits}×")
    return f"{times}10{str(int(exponent)).translate(SUPERSCRIPTS)}"


def setting(value: float) -> str:
    """A hyperparameter as text: 2⁻⁸ for a power of two that four digits would cut, and otherwise as in a cell."""
    if value > 0 and math.frexp(value)[0] == 0.5 and float(f"{value:.4g}") != value:
        return f"2{str(math.frexp(value)[1] - 1).translate(SUPERSCRIPTS)}"
    return number(float(value))


def strict(value: object) -> object:
    """The value as strict JSON allows it: without NaN and infinity, with lists and string keys."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        return value
    return [strict(v) for v in value]
