"""Documents in a terminal, a notebook, on a page and as Markdown: the same content, whatever shows it."""

import io
import typing

import altair as alt
import polars as pl
import pytest
from rich.console import Console

from completep.report import document
from completep.report.charts import panel
from completep.report.document import Code, Document, Facts, Figure, Table, Text, Verdict, number, setting, strict
from completep.report.html import fragment, page
from completep.report.markdown import markdown
from completep.report.terminal import as_rich, as_text


def drawing():
    points = alt.Chart(pl.DataFrame({"x": [1, 2], "y": [3, 4]})).mark_point().encode(x="x:Q", y="y:Q")
    return panel(points, title="panel title")


PARTS = {
    "Verdict": Verdict("FAIL", "the verdict sentence"),
    "Text": Text("the text sentence"),
    "Code": Code("the code text", "the code title"),
    "Facts": Facts("the facts title", {"fact name": "fact value"}),
    "Table": Table("the table title", ("name", "value"), (("row", 0.123456),), ("the table note",)),
    "Figure": Figure("figure-name", "the figure title", (drawing(),)),
}
SEEN = {
    "Verdict": ("the verdict sentence",),
    "Text": ("the text sentence",),
    "Code": ("the code text",),
    "Facts": ("fact name", "fact value"),
    "Table": ("row", "0.1235", "the table note"),
    "Figure": (),  # a picture
}


@pytest.mark.parametrize("kind", [t.__name__ for t in typing.get_args(document.Part)])
@pytest.mark.parametrize("show", [as_text, fragment, page, markdown], ids=lambda f: f.__name__)
def test_every_kind_of_part_is_shown_everywhere(kind, show):
    shown = show(Document("title", (PARTS[kind],)))
    for text in SEEN[kind]:
        assert text in shown
    if kind == "Figure":
        mark = {"fragment": "<svg", "page": "figure-name-0", "markdown": "(figure-name.svg)", "as_text": ""}
        assert mark[show.__name__] in shown


def test_numbers_have_four_digits_and_no_nan():
    values = (None, float("nan"), float("inf"), 1 / 3, 12345.678, 3, True, "x")
    assert [number(v) for v in values] == ["–", "–", "∞", "0.3333", "1.235×10⁴", "3", "True", "x"]
    assert [number(v) for v in (2.38e19, 1e-16, -1e-16, 0.0001)] == ["2.38×10¹⁹", "10⁻¹⁶", "-10⁻¹⁶", "0.0001"]
    assert [setting(v) for v in (2**-8, 0.25, 0.187594, 1e-16, 3)] == ["2⁻⁸", "0.25", "0.1876", "10⁻¹⁶", "3"]
    assert strict({"a": (float("nan"), 1.5), 2: {"b": float("inf")}}) == {"a": [None, 1.5], "2": {"b": None}}


WIDE = Table(
    "a wide table",
    tuple(f"column{i}" for i in range(9)),
    tuple(tuple(f"{r}-{c}-0.123456" for c in range(9)) for r in range(3)),
)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_number_is_cut_in_a_narrow_terminal(width):
    text = as_text(Document("t", (WIDE,)), width)
    assert all(f"{r}-{c}-0.123456" in text for r in range(3) for c in range(9))
    assert max(map(len, text.splitlines())) <= width
    assert ("┃" in text) == (width == 200)  # a table where it fits, else one record per row


@pytest.mark.parametrize("width", [40, 200])
def test_a_table_that_is_too_wide_loses_columns_of_zeros_first(width):
    table = Table(
        "counts", ("name", "runs", "diverged", "interrupted", "loss"), (("a", 3, 0, 0, 0.0), ("b", 4, 0, 0, 0.0))
    )
    text = as_text(Document("t", (table,)), width)
    assert "┃ name" in text
    assert ("All 0, and left out: diverged, interrupted." in " ".join(text.split())) == (width == 40)
    assert "loss" in text  # a measured zero is a result


def test_markup_in_content_is_text():
    evil = "[red]x[/] [/bold]"
    content = Document(
        "t", (Verdict("PASS", evil), Text(evil), Facts(evil, {evil: evil}), Table(evil, (evil,), ((evil,),)))
    )
    console = Console(width=120, color_system=None, record=True, file=io.StringIO())
    console.print(as_rich(content))
    assert console.export_text().count(evil) >= 5


def test_long_tables_say_what_they_leave_out():
    text = as_text(Document("t", (Table("", ("n",), tuple((i,) for i in range(100))),)))
    assert "and 40 more rows" in text


def test_verdict_words_are_coloured():
    console = Console(width=120, force_terminal=True, color_system="standard", record=True, file=io.StringIO())
    console.print(as_rich(Document("t", (Verdict("FAIL", "x"), Table("", ("verdict",), (("PASS",), ("FAIL: why",)))))))
    html = console.export_html()
    assert html.count("800000") + html.count("008000") >= 2 or "color" in html
    assert 'class="bad"' in fragment(Document("t", (Table("", ("verdict",), (("FAIL: why",),)),)))


def test_a_verdict_brings_its_own_tone_and_headline():
    """A study's words, which the report does not know: at the head of a page, in the terminal and in Markdown."""
    mine = Document("t", (Verdict("fits", "the sentence", "good", "Fits the paper"),))
    assert "<strong>Fits the paper</strong>" in page(mine)
    assert 'class="verdict good"' in page(mine)
    assert '<strong class="good">fits</strong>: the sentence' in fragment(mine)
    assert as_text(mine) == "Fits the paper. the sentence"
    assert "**Fits the paper.** the sentence" in markdown(mine)
    plain = Document("t", (Verdict("fits", "the sentence"),))
    assert 'class="verdict open"' in page(plain)
    assert as_text(plain) == "fits: the sentence"
    assert [Verdict(word).colour for word in ("PASS", "FAIL", "INCONCLUSIVE")] == ["good", "bad", "open"]
