"""Documents in a terminal. Numbers are never cut: a table that is too wide is shown as one paragraph per row.

Text is never read as markup: styles are given separately.
"""

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import IO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text as RichText

from completep.report.document import (
    Code,
    Document,
    Facts,
    Figure,
    Part,
    Strong,
    Table,
    Text,
    Verdict,
    number,
    tone,
)
from completep.report.escape import harmless, visible

COLOURS = {"good": "green", "bad": "red", "open": "yellow"}
MOST_ROWS = 60
SENTENCE = 20  # characters per line that a wrapped sentence needs


class Terminal(Console):
    """A console that prints strings as they are: no markup, no emoji codes, no terminal commands."""

    def __init__(self, *, file: IO[str] | None = None, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(file=file, stderr=stderr, width=width, highlight=False, markup=False, emoji=False)
        if self.width < 1:  # with COLUMNS=0, nothing would be printed
            self.width = 80

    def render_str(self, text: str, **options: object) -> RichText:
        return super().render_str(visible(text), **options)  # type: ignore[arg-type]

    def on_broken_pipe(self) -> None:
        """Rich would exit with 1, which is a verdict. `main` handles this error."""
        raise BrokenPipeError


def as_rich(document: Document) -> Group:
    return Group(*(piece for part in harmless(document).parts for piece in _pieces(part)))


def as_text(document: Document, width: int = 120) -> str:
    """Plain text, without colours."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    console.print(as_rich(document))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def _pieces(part: Part) -> Iterator[RenderableType]:
    if isinstance(part, Verdict):
        sentence = f"{'.' if part.headline else ':'} {part.sentence}" if part.sentence else ""
        yield RichText.assemble((part.headline or part.word, f"bold {COLOURS[part.colour]}"), sentence)
    elif isinstance(part, Text):
        yield RichText(part.text)
    elif isinstance(part, (Code, Facts)) and part.page_only:
        return
    elif isinstance(part, Code):
        yield RichText(f"{part.title}: {part.text}" if part.title else part.text)
    elif isinstance(part, Facts):
        yield FittingTable(Table(part.title, ("", ""), tuple(part.rows.items())))
    elif isinstance(part, Table) and not part.collapsed:
        yield FittingTable(part)
    elif isinstance(part, Figure):
        return  # pictures are in the files


def without_zeros(table: Table) -> Table:
    """The table without columns of counts that are 0 in every row; a note names them."""
    zeros = [i for i in range(len(table.columns)) if all(type(row[i]) is int and row[i] == 0 for row in table.rows)]
    if not zeros:
        return table
    kept = [i for i in range(len(table.columns)) if i not in zeros]
    note = f"All 0, and left out: {', '.join(table.columns[i] for i in zeros)}."
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[i] for i in kept), rows=rows, notes=(*table.notes, note))


class FittingTable:
    """A table. If it does not fit the console, columns of zeros are left out; then it is one paragraph per row."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fitting = self if self._least_width() <= options.max_width else FittingTable(without_zeros(self.table))
        if fitting._least_width() <= options.max_width:
            yield fitting._table()
        else:
            yield from fitting._records(options.max_width)
        if (hidden := len(self.table.rows) - MOST_ROWS) > 0:
            yield RichText(f"… and {hidden} more rows; the JSON output has them all")

    def _least_width(self) -> int:
        """The width at which words and numbers stay whole, and sentences have twenty characters per line."""
        widths = []
        for i, column in enumerate(self.table.columns):
            cells = [number(row[i]) for row in self.table.rows[:MOST_ROWS]]
            words = [word for text in (column, *cells) for word in text.split()]
            longest = max((cell_len(text) for text in cells), default=0)
            widths.append(max([*map(cell_len, words), min(longest, SENTENCE)], default=0))
        return sum(widths) + 3 * len(widths) + 1

    def _table(self) -> RichTable:
        table = self.table
        shown = RichTable(
            title=RichText(table.title) if table.title else None, title_justify="left", header_style="bold"
        )
        shown.show_header = any(table.columns)
        for i, column in enumerate(table.columns):
            # Only sentences may wrap; a word or a number never does.
            wraps = any(" " in number(row[i]) for row in table.rows)
            shown.add_column(
                RichText(column), justify="right" if table.numeric(i) else "left", no_wrap=not wraps, overflow="fold"
            )
        for row in table.rows[:MOST_ROWS]:
            shown.add_row(*map(_cell, row))
        if table.notes:
            shown.caption, shown.caption_justify = RichText("\n".join(table.notes)), "left"
        return shown

    def _records(self, width: int) -> Iterator[RenderableType]:
        """The first column as a heading, the others below it as `column value · column value`, broken between pairs."""
        table = self.table
        yield RichText(table.title, style="italic")
        for row in table.rows[:MOST_ROWS]:
            yield RichText(number(row[0]), style="bold")
            line = RichText(" ")
            for column, value in zip(table.columns[1:], row[1:], strict=True):
                if value in (None, ""):
                    continue
                pair = RichText.assemble((f" {column} " if column else " ", "dim"), _cell(value))
                if len(line) > 1 and len(line) + 2 + len(pair) > width:
                    yield line
                    line = RichText(" ")
                line = RichText.assemble(line, " ·" if len(line) > 1 else "", pair)
            yield line
        for note in table.notes:
            yield RichText(note)


def _cell(value: object) -> RichText:
    text = number(value)
    return RichText(text, "bold" if isinstance(value, Strong) else COLOURS.get(tone(text) or "", ""))
