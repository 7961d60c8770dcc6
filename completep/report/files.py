"""A document as a folder of files: a page, Markdown, figures as SVG, PNG and PDF, numbers as CSV."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from completep.files import fresh_folder, write_new
from completep.report.document import Document
from completep.report.html import page
from completep.report.markdown import markdown

if TYPE_CHECKING:
    import polars as pl

    from completep.report.charts import Kind

KINDS: "tuple[Kind, ...]" = ("svg", "png", "pdf")


def write_report(document: Document, out: Path, name: str, frames: "Mapping[str, pl.DataFrame]") -> list[Path]:
    """Write a document into a new folder under `out`. Returns the paths, the page first."""
    from completep.report.charts import pictures

    texts: dict[str, str | bytes] = {"report.html": page(document)}
    texts["report.md"] = markdown(document, [f"{frame}.csv" for frame in frames])
    for figure in document.figures():
        texts |= {f"{figure.name}.{kind}": content for kind, content in pictures(figure, KINDS).items()}
    texts |= {f"{frame}.csv": content.write_csv() for frame, content in frames.items()}
    folder = fresh_folder(out, name)
    return [write_new(folder / file, content) for file, content in texts.items()]
