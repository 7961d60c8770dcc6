"""A study's report: one HTML page that carries all it needs. Everything that came from outside is escaped."""

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
import polars as pl
from markupsafe import Markup

from completep.report.study_figures import Figure
from completep.report.study_view import number
from completep.study.design import Outcome, Study

TONES = {
    "agrees": ("agrees", "Agrees with the paper"),
    "agrees in part": ("agrees", "Agrees with the paper in part"),
    "does not agree": ("differs", "Does not agree with the paper"),
    "cannot be seen at this scale": ("", "Cannot be seen at this scale"),
}


def page(
    study: Study,
    outcome: Outcome,
    figures: list[Figure],
    settings: dict[str, str],
    command: str,
    runs: pl.DataFrame | None,
) -> str:
    """The page as text."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.globals["table"] = table
    template = environment.from_string((files("completep.report") / "page.html").read_text(encoding="utf-8"))
    drawn = [{"title": f.title, "specs": [_spec(f.name, i, p) for i, p in enumerate(f.panels)]} for f in figures]
    tone, headline = TONES[outcome.agreement]
    return template.render(
        study=study, outcome=outcome, figures=drawn, settings=settings, command=command, runs=runs, tone=tone, headline=headline,
        javascript=_javascript(),
    )  # fmt: skip


def _spec(name: str, index: int, panel: Any) -> dict[str, str]:
    # In a script element nothing is escaped, so no "<" may be in it: "</script>" would end it.
    spec = json.dumps(finite(panel.to_dict()), allow_nan=False)
    return {"id": f"{name}-{index}", "json": spec.replace("<", "\\u003c")}


def finite(value: Any) -> Any:
    """What strict JSON can say: what is not a finite number is not drawn."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list) else value


@cache
def _javascript() -> str:
    """Vega and what embeds it, once a page."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")


def table(frame: pl.DataFrame) -> Markup:
    numeric = {name: kind.is_numeric() for name, kind in frame.schema.items()}
    heads = Markup("").join(Markup("<th>{}</th>").format(name.replace("_", " ")) for name in frame.columns)
    rows = Markup("").join(
        Markup("<tr>{}</tr>\n").format(
            Markup("").join(
                Markup('<td class="number">{}</td>' if numeric[n] else "<td>{}</td>").format(number(v))
                for n, v in row.items()
            )
        )
        for row in frame.iter_rows(named=True)
    )
    return Markup('<div class="scroll"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>').format(
        heads, rows
    )
