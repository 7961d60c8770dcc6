"""Hostile names through every page, terminal table, figure and Markdown writer: always shown as the text they are."""

import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import polars as pl
import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from completep import transfer
from completep.cli.shared import progress_bar
from completep.report import html
from completep.report.charts import pictures, render
from completep.report.document import Code, Document, Facts, Strong, Table, Text, Verdict
from completep.report.escape import in_script, visible
from completep.report.html import fragment, page
from completep.report.markdown import markdown
from completep.report.terminal import Terminal, as_rich, as_text
from tests.fuzz.cases import NAMES
from tests.report.pages import opened

HARMFUL = "\x1b\x00\x07\x7f\x85\u202e\u2066\u2069\u200b\ufeff\ud800\udcff"
SHOWN = [name for name in NAMES if visible(name).strip()]


def document_of(name: str) -> Document:
    """The name in every place of every part."""
    table = Table(name, (name, "value"), ((name, 1.0), (Strong(name), None)), (name,))
    return Document(
        name, (Verdict(name, name), Text(name), Code(name, name), Facts(name, {name: name}), table), kind=name
    )  # fmt: skip


def sweep(names, column="lr"):
    rows = [
        {"rules": r, "width": 64, "depth": d, column: 2.0**e, "seed": s, "loss": 2 + 0.02 * (e + 6) ** 2 + s / 1000}
        for r in names for d in (2, 8) for e in range(-8, -3) for s in (0, 1)
    ]  # fmt: skip
    return pl.DataFrame(rows)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_terminal_shows_a_name_as_text(name):
    for console in (Terminal(file=io.StringIO(), width=400), Console(file=io.StringIO(), width=400)):
        console.print(as_rich(document_of(name)))
        said = console.file.getvalue()
        assert not set(said) & set(HARMFUL)
        if name.strip() and not set("\n\r\t") & set(name) and len(name) < 50:
            assert said.count(visible(name)) >= 6
    terminal = Terminal(file=io.StringIO(), width=400)
    terminal.print(name, f"[bold]{name}[/]")  # what any command prints
    assert not set(terminal.file.getvalue()) & set(HARMFUL)
    if name.isprintable():
        assert f"[bold]{name}[/]" in terminal.file.getvalue()
    assert not set(as_text(document_of(name))) & set(HARMFUL)


def test_a_progress_bar_shows_a_name_as_text(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    terminal = Terminal(file=io.StringIO(), width=400)
    monkeypatch.setattr("completep.cli.shared.console", lambda stderr: terminal)
    with progress_bar() as progress:
        progress(0, 2, "a\x1b]0;title\u202eb")
    said = terminal.file.getvalue()
    assert "a\\x1b]0;title\\u202eb" in said
    assert "\x1b]" not in said


def test_a_terminal_of_no_width_still_shows_something(monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    terminal = Terminal(file=io.StringIO())
    terminal.print("PASS")
    assert "PASS" in terminal.file.getvalue()


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_markdown_shows_a_name_as_text(name):
    text = markdown(document_of(name))
    assert not set(text) & set(HARMFUL)
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    allowed = {"h1", "h2", "p", "strong", "code", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"}
    assert {tag.lower() for tag in re.findall(r"</?([a-zA-Z][\w-]*)", html)} <= allowed
    assert html.count("<tr>") == 3
    assert html.count("<li>") == 1


@pytest.mark.parametrize("name", list(filter(None, NAMES)), ids=ascii)
def test_a_page_has_no_element_of_a_name(name):
    plain, hostile = page(document_of("name")), page(document_of(name))
    tags = [re.findall(r"<([a-zA-Z/!][\w-]*)", text) for text in (plain, hostile)]
    assert tags[0] == tags[1]
    assert not set(hostile) & set(HARMFUL)
    hostile.encode()
    assert re.findall(r"<([a-zA-Z/!][\w-]*)", fragment(document_of(name))).count("script") == 0


@pytest.mark.slow
def test_a_page_is_made_without_a_home(monkeypatch):
    """Where there is no cache, the scripts of a page are bundled again."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    document = transfer(sweep(["completep"])).document()
    expected = page(document)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    html._javascript.cache_clear()
    assert page(document) == expected


def test_a_script_element_cannot_be_left():
    assert "<" not in in_script({"a": "</script><!--<script>"})


@pytest.mark.slow
def test_figures_draw_names_as_text():
    figure = transfer(sweep(SHOWN[:20], SHOWN[0]), hyperparameter=SHOWN[0]).document().figures()[0]
    root = ET.fromstring(render(figure, "svg"))
    elements = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert not elements & {"script", "img", "image", "foreignObject", "a"}
    drawn = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert any("<img src=x" in (text or "") for text in drawn)
    assert pictures(figure, ("png", "pdf"))["png"].startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["\x1b[31mred", "a\x00b", "\x7f", "\x85"], ids=ascii)
def test_a_picture_is_drawn_whatever_characters_a_name_has(name):
    """An SVG with a control character in it is no XML, and nothing makes a PNG of it."""
    figure = transfer(sweep(["completep"], name), hyperparameter=name).document().figures()[0]
    assert pictures(figure, ("png",))["png"].startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    "column", ["lr", "a.b[0]", "a['b']", 'x"y', "</script><script>document.title='owned'</script>"]
)
def test_no_name_runs_or_empties_a_chart_in_a_browser(column, browser, tmp_path):
    names = [*SHOWN[:12], "</script><script>document.title='owned'</script>"]
    files = transfer(sweep(names, column), hyperparameter=column).write(tmp_path)
    tab, said = opened(browser, files[0], 1440)
    assert said == []
    assert tab.title() == f"Does the best {column} at the base stay the best? · completep"
    assert tab.locator(".panel svg.marks").count() == len(names) + 1
    assert tab.locator(".mark-line path").count() >= 2 * len(names)  # a line per depth: no chart is empty
    for mark in tab.locator(".mark-symbol path").all()[:2]:
        mark.hover(force=True)
    assert tab.title().startswith("Does the best")


@pytest.mark.slow
def test_even_an_unescaped_script_does_not_run(browser, tmp_path):
    """The second line: the page's own policy. Without it the script would run, which is the control."""
    text = transfer(sweep(["completep"])).document()
    whole = page(text).replace("<h1>", "<script>document.title='owned'</script><h1>")
    for kind, content in {"policy": whole, "none": re.sub(r"<meta http-equiv[^>]*>", "", whole)}.items():
        path = tmp_path / f"{kind}.html"
        path.write_text(content)
        tab, _ = opened(browser, path, 1440)
        assert (tab.title() == "owned") == (kind == "none")
