"""The base class of what public functions return: numbers as fields, and one description for every way to show it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from completep.report.document import Document, Json

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Group


class Result(ABC):
    """Readable in a terminal (`print`, rich) and in a notebook, as JSON for programs, and as a folder of files."""

    slug: ClassVar[str] = "result"  # what its folder is called

    @abstractmethod
    def document(self) -> Document:
        """What it says, verdict first."""

    @cached_property
    def _shown(self) -> Document:
        """Made once: figures take time to draw."""
        return self.document()

    @abstractmethod
    def to_json(self) -> Json:
        """Its numbers as plain data. They may hold NaN or infinity; `document.strict` removes them."""

    def frames(self) -> "Mapping[str, pl.DataFrame]":
        """The data behind it, by the names of the CSV files."""
        return {}

    def write(self, out: Path | str) -> list[Path]:
        """Page, Markdown, figures and data, in a new folder under `out`; the page's path comes first."""
        from completep.report.files import write_report

        return write_report(self._shown, Path(out), self.slug, self.frames())

    def __repr__(self) -> str:
        verdict = getattr(self, "verdict", None)
        return f"<{type(self).__name__}{f': {verdict}' if verdict else ''}>"

    def __str__(self) -> str:
        from completep.report.terminal import as_text

        return as_text(self._shown)

    def __rich__(self) -> "Group":
        from completep.report.terminal import as_rich

        return as_rich(self._shown)

    def _repr_html_(self) -> str:
        from completep.report.html import fragment

        return fragment(self._shown)
