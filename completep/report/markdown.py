"""Documents as Markdown, for a repository or a pull request. Figures are links to SVG files beside the text."""

from collections.abc import Sequence

from completep.report.document import Code, Document, Facts, Part, Strong, Table, Text, Verdict, number
from completep.report.escape import code_in_markdown, harmless
from completep.report.escape import in_markdown as plain


def markdown(document: Document, files: Sequence[str] = ()) -> str:
    document = harmless(document)
    parts = [_part(part) for part in document.parts]
    links = ", ".join(f"[{name}]({name})" for name in files)
    return "\n\n".join([f"# {plain(document.title)}", *filter(None, parts), *([f"Data: {links}"] * bool(links))]) + "\n"


def _part(part: Part) -> str:
    if isinstance(part, Verdict):
        return f"**{plain(part.headline or part.word)}.** {plain(part.sentence)}"
    if isinstance(part, Text):
        return plain(part.text)
    if isinstance(part, Code):
        heading = f"## {plain(part.title)}\n\n" if part.title else ""
        return f"{heading}{code_in_markdown(part.text)}"
    if isinstance(part, Facts):
        return f"## {plain(part.title)}\n\n" + "\n".join(f"- {plain(k)}: {plain(v)}" for k, v in part.rows.items())
    if isinstance(part, Table):
        return "" if part.collapsed else _table(part)
    return f"![{plain(part.title)}]({part.name}.svg)"


def _cell(value: object) -> str:
    text = plain(number(value))
    return f"**{text}**" if isinstance(value, Strong) else text


def _table(table: Table) -> str:
    sides = ["---:" if table.numeric(i) else "---" for i in range(len(table.columns))]
    lines = [[plain(c) for c in table.columns], sides, *(map(_cell, row) for row in table.rows)]
    notes = "".join(f"\n\n{plain(note)}" for note in table.notes)
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (f"## {plain(table.title)}\n\n" if table.title else "") + rows + notes
