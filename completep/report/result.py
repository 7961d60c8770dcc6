"""The base class of what public functions return: numbers as fields, and a `Document` that describes them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from completep.report.document import Document, Json, strict

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Group


class Result(ABC):
    """A result that shows itself in a terminal and in a notebook, and writes itself as JSON or as a folder of files."""

    slug: ClassVar[str] = "result"  # start of the name of its folder

    @abstractmethod
    def document(self) -> Document:
        """The description of this result, with the verdict first."""

    @cached_property
    def _shown(self) -> Document:
        """The document, made once, because figures take time."""
        return self.document()

    @abstractmethod
    def _fields(self) -> Json:
        """Its numbers by name, for `to_json`. They may hold NaN and infinity."""

    def to_json(self) -> Json:
        """Its numbers as strict JSON allows them: None stands for NaN and infinity."""
        return cast(Json, strict(self._fields()))

    def frames(self) -> "Mapping[str, pl.DataFrame]":
        """Name of a CSV file → the data in it."""
        return {}

    def write(self, out: Path | str) -> list[Path]:
        """Write page, Markdown, figures and data into a new folder under `out`. Returns the paths, the page first."""
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
