"""Documents as HTML: a fragment for a notebook, and a page that needs no network.

Text is escaped by jinja's autoescape and by escape.py. A page also forbids every script but its own, so a script in the
data would not run.
"""

import base64
import hashlib
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.resources import files

import jinja2
from markupsafe import Markup

from completep.errors import UserError
from completep.files import cache_folder, write_new
from completep.report.document import Document, Figure, Strong, Table, number, tone
from completep.report.escape import harmless, in_script


def page(document: Document) -> str:
    """A whole page, with interactive figures."""
    scripts = {"javascript": _javascript(), "script": _text("page.js")} if document.figures() else {"javascript": ""}
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in scripts.values() if text) or "'none'"
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; script-src {hashes}"
    return _template("page.html").render(document=harmless(document), policy=policy, **scripts)


def fragment(document: Document) -> str:
    """What a notebook shows: text and tables, figures as SVG."""
    return _template("fragment.html").render(document=harmless(document))


def _text(file: str) -> str:
    return (files("completep.report") / file).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.FunctionLoader(_text)
    )
    environment.globals |= {"table": table, "specs": specs, "svg": svg, "kind_of": kind_of}
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
    """The panels as Vega-Lite."""
    return [{"id": f"{figure.name}-{i}", "json": in_script(content)} for i, content in enumerate(figure.specs)]


def svg(figure: Figure) -> Markup:
    from completep.report.charts import render

    return Markup(render(figure, "svg").decode())


@cache
def _javascript() -> str:
    """Vega and its embedder, for one page. Bundling them takes seconds, so the result is cached."""
    import vl_convert

    name = f"vega-{version('vl-convert-python')}.js"
    with suppress(UserError, OSError, UnicodeDecodeError):  # no cache, or one that cannot be read
        kept = cache_folder() / name
        digest, _, script = kept.read_text(encoding="utf-8").partition("\n")
        if digest == f"// {_digest(script)}":
            return script
        kept.unlink()  # damaged
    script = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")
    with suppress(UserError, OSError):  # a cache that cannot be written
        write_new(cache_folder() / name, f"// {_digest(script)}\n{script}")
    return script
