"""What a study leaves behind in a folder of its own: a page (HTML, Markdown), figures (SVG, PNG, PDF), numbers (CSV)."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import polars as pl

from completep import __version__
from completep.config import Run
from completep.files import fresh_folder, write_new
from completep.report import figures
from completep.report.markdown import markdown
from completep.report.page import page
from completep.report.study_figures import figures as draw
from completep.study.design import Outcome, Study

KINDS: tuple[Literal["svg", "png", "pdf"], ...] = ("svg", "png", "pdf")


def settings(runs: Sequence[Run]) -> dict[str, str]:
    """What all runs have in common, and what varies, in words."""

    def of(values: "set[Any] | list[Any]") -> str:
        found = sorted(set(values), key=lambda v: (isinstance(v, str), v))
        shown = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in found]
        return ", ".join(shown) if len(shown) <= 8 else f"{shown[0]} … {shown[-1]} ({len(shown)} values)"

    models = [r.model for r in runs]
    return {
        "base (width × depth)": of({f"{r.base.width} × {r.base.depth}" for r in runs}),
        "widths": of({m.width for m in models}),
        "depths": of({m.depth for m in models}),
        "head size, vocabulary": of({f"{m.head_size}, {m.vocabulary}" for m in models}),
        "sequence × batch": of({f"{r.sequence} × {r.batch}" for r in runs}),
        "steps": of({r.schedule.steps for r in runs}),
        "tokens": of({r.tokens for r in runs}),
        "base η": of({r.hyperparameters.lr for r in runs}),
        "base σ": of({r.hyperparameters.std for r in runs}),
        "base λ": of({r.hyperparameters.weight_decay for r in runs}),
        "base ε": of({r.hyperparameters.eps for r in runs}),
        "seeds": of({r.seed for r in runs}),
        "data": of({_data(r) for r in runs}),
    }


def _data(run: Run) -> str:
    name = (
        "Python's own source, as " + run.data.tokenizer
        if run.data.source == "python"
        else run.data.source or "not given"
    )
    return f"{name}, sha256 {(run.data.sha256 or '?')[:16]}"


def versions() -> dict[str, str]:
    import torch

    return {"versions": f"completep {__version__}, torch {torch.__version__}, Python {platform.python_version()}"}


def write_study(study: Study, data: Any, outcome: Outcome, said: dict[str, str], command: str, out: Path) -> list[Path]:
    """The report's files, the page first."""
    drawn = draw(study, data, outcome)
    axes = {
        f"axis {name}": ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)
        for name, values in study.axes.items()
    }
    frames = {"runs": data} if isinstance(data, pl.DataFrame) else {"stream": data.stream, "roles": data.roles}
    listed = data if isinstance(data, pl.DataFrame) and data.height <= 2000 else None
    facts = {**(said or axes), **versions()}
    text = page(study, outcome, drawn, facts, command, listed)
    folder = fresh_folder(out, study.name)
    written = [write_new(folder / "report.html", text)]
    tables = [f"{name}.csv" for name in frames]
    written.append(write_new(folder / "report.md", markdown(study, outcome, drawn, facts, command, tables)))
    for figure in drawn:
        written += [write_new(folder / f"{figure.name}.{kind}", figures.render(figure.chart(), kind)) for kind in KINDS]
    written.append(write_new(folder / "outcome.csv", outcome.table.write_csv()))
    return [*written, *(write_new(folder / f"{name}.csv", frame.write_csv()) for name, frame in frames.items())]
