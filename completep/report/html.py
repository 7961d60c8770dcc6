"""Documents as HTML: a fragment for a notebook, and a page that needs no network. All text is escaped here."""

import json
from functools import cache
from importlib.resources import files

import jinja2
from markupsafe import Markup

from completep.report.document import Document, Figure, Strong, Table, headline, number, strict, tone


def page(document: Document) -> str:
    """A whole page, with interactive figures."""
    return _template("page.html").render(document=document, javascript=_javascript() if document.figures() else "")


def fragment(document: Document) -> str:
    """What a notebook shows: text and tables, figures as SVG."""
    return _template("fragment.html").render(document=document)


def _template(name: str) -> jinja2.Template:
    loader = jinja2.FunctionLoader(lambda file: (files("completep.report") / file).read_text(encoding="utf-8"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=loader)
    environment.globals |= {"table": table, "specs": specs, "svg": svg, "kind_of": kind_of}
    environment.filters |= {
        "tone": lambda word: tone(word) or "open",
        "headline": headline,
    }
    return environment.get_template(name)


def kind_of(part: object) -> str:
    return type(part).__name__


def table(content: Table) -> Markup:
    numeric = [content.numeric(i) for i in range(len(content.columns))]
    heads = Markup("").join(Markup("<th>{}</th>").format(name) for name in content.columns)
    rows = Markup("").join(
        Markup("<tr>{}</tr>\n").format(
            Markup("").join(_cell(value, right) for value, right in zip(row, numeric, strict=True))
        )
        for row in content.rows
    )
    return Markup('<div class="scroll"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>').format(
        heads, rows
    )


def _cell(value: object, right: bool) -> Markup:
    text = number(value)
    kind = "number" if right else "strong" if isinstance(value, Strong) else tone(text)
    return Markup('<td class="{}">{}</td>').format(kind, text) if kind else Markup("<td>{}</td>").format(text)


def specs(figure: Figure) -> list[dict[str, str]]:
    """The panels as Vega-Lite. Nothing is escaped inside a script element, so no "<" may remain in it."""
    return [
        {
            "id": f"{figure.name}-{i}",
            "json": json.dumps(strict(panel.to_dict()), allow_nan=False).replace("<", "\\u003c"),
        }
        for i, panel in enumerate(figure.panels)
    ]


def svg(figure: Figure) -> Markup:
    from completep.report.charts import render

    return Markup(render(figure, "svg").decode())


@cache
def _javascript() -> str:
    """Vega and its embedder, once per page."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")
