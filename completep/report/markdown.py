"""A study's report as Markdown, for a repository or a pull request: the same words and numbers as the page."""

import re

import polars as pl

from completep.report.page import TONES
from completep.report.study_figures import Figure
from completep.report.study_view import number
from completep.study.design import Outcome, Study

TEXT = """# {title}

`{command}`

**{headline}.** Here: {sentence}.

The paper: {claim}

{figures}
## Numbers

{table}

All runs: {files}.

## Settings

{settings}
"""


def markdown(
    study: Study, outcome: Outcome, figures: list[Figure], settings: dict[str, str], command: str, files: list[str]
) -> str:
    pictures = "\n".join(f"![{plain(f.title)}]({f.name}.svg)\n" for f in figures)
    return TEXT.format(
        title=plain(study.question), command=command.replace("`", "'"), headline=TONES[outcome.agreement][1],
        sentence=plain(outcome.sentence), claim=plain(study.claim), figures=pictures,
        table=table(outcome.table), files=", ".join(f"[{name}]({name})" for name in files),
        settings="\n".join(f"- {plain(name)}: {plain(value)}" for name, value in settings.items()),
    )  # fmt: skip


def plain(text: str) -> str:
    """Text in which no character means anything to Markdown."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))


def table(frame: pl.DataFrame) -> str:
    heads = [plain(name.replace("_", " ")) for name in frame.columns]
    sides = ["---:" if kind.is_numeric() else "---" for kind in frame.schema.values()]
    lines = [heads, sides, *([plain(number(v)) for v in row] for row in frame.rows())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
