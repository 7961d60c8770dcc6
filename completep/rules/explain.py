"""The resolved table: what the rules did to each parameter of a model, and why."""

import html
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from completep.rules.table import RANDOM

if TYPE_CHECKING:
    from rich.table import Table

    from completep.rules.scaling import Scaling


@dataclass(frozen=True)
class Row:
    name: str
    role: str
    shape: tuple[int, ...]
    m_N: float
    m_L: float
    init: str  # "N(0, 0.01²)" or the constant it starts at
    lr: float
    weight_decay: float
    eps: float
    multiplier: float  # of the forward pass, on what this parameter makes; 1 in the folded style
    source: str
    template: str
    trained: bool


def explain(
    scaling: "Scaling", *, std: float = 1.0, lr: float = 1.0, weight_decay: float = 1.0, eps: float = 1.0
) -> list[Row]:
    """One row per parameter. With the base values left at 1, the numbers are the factors themselves."""
    forward = _forward_multipliers(scaling)
    rows = []
    for name, parameter in scaling._tensors():
        r = scaling.parameters[name]
        rule, f = scaling.rules.rule(r.role), scaling._factors(r)
        start = r.part.folded(r.part.start, scaling._c(r))
        rows.append(
            Row(
                name=name,
                role=str(r.role),
                shape=r.shape,
                m_N=r.m_N,
                m_L=r.m_L,
                init=f"N(0, {std * f.init_std:.4g}²)" if r.role in RANDOM else f"{start:g}",
                lr=lr * f.lr,
                weight_decay=weight_decay * f.weight_decay,
                eps=eps * f.eps,
                multiplier=forward.get(name, 1.0),
                source=rule.source,
                template=r.template,
                trained=parameter.requires_grad,
            )
        )
    return rows


def _forward_multipliers(scaling: "Scaling") -> dict[str, float]:
    """Per parameter, the factor on what it makes; the tied table makes embeddings, so the logits' factor is shown on the norm."""
    if scaling.style == "folded":
        return {}
    return {name: m.factor for m in scaling.multipliers for name in m.parameters}


def collapse(rows: Iterable[Row]) -> list[tuple[Row, int]]:
    """Rows that differ only in the block's number, as one with a count."""
    seen: dict[str, tuple[Row, int]] = {}
    for row in rows:
        first, count = seen.get(row.template, (row, 0))
        seen[row.template] = (first, count + 1)
    return list(seen.values())


HEADINGS = ("parameter", "×", "role", "shape", "m_N", "m_L", "init", "lr", "wd", "eps", "multiplier")


def cells(row: Row, count: int) -> tuple[str, ...]:
    shape = "×".join(map(str, row.shape))
    settings = (f"{row.lr:.4g}", f"{row.weight_decay:.4g}", f"{row.eps:.4g}") if row.trained else ("frozen", "", "")
    return (
        row.template,
        str(count),
        row.role,
        shape,
        f"{row.m_N:g}",
        f"{row.m_L:g}",
        row.init,
        *settings,
        f"{row.multiplier:.4g}",
    )


def to_table(rows: list[Row], title: str) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", row_styles=("", "dim"))
    for heading in HEADINGS:
        numeric = heading not in ("parameter", "role", "shape", "init")
        table.add_column(
            heading, justify="right" if numeric else "left", overflow="fold", no_wrap=heading != "parameter"
        )
    table.add_column("source", justify="right")
    sources: dict[str, int] = {}
    for row, count in collapse(rows):
        note = sources.setdefault(row.source, len(sources) + 1)
        table.add_row(*cells(row, count), str(note))
    table.caption = "\n".join(f"{note}  {source}" for source, note in sources.items())
    table.caption_justify = "left"
    return table


def to_json(scaling: "Scaling", rows: list[Row]) -> dict[str, Any]:
    return {
        "rules": scaling.rules.name,
        "style": scaling.style,
        "base": {"width": scaling.base.width, "depth": scaling.base.depth},
        "multipliers": scaling.factors(),
        "parameters": [{k: v for k, v in asdict(row).items() if k != "template"} for row in rows],
    }


def summary(scaling: "Scaling") -> str:
    factors = ", ".join(f"{kind} × {factor:.4g}" for kind, factor in scaling.factors().items())
    where = "in the forward pass" if scaling.style == "multiplier" else "folded into the weights"
    return f"{scaling.rules.name}, base width {scaling.base.width} depth {scaling.base.depth}; {factors} ({where})"


STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .25rem .6rem; text-align: left; white-space: nowrap; border-bottom: 1px solid #8884; }
td:last-child { white-space: normal; min-width: 18rem; }
"""


def to_html(scaling: "Scaling", rows: list[Row]) -> str:
    """One self-contained page."""
    head = "".join(f"<th>{html.escape(h)}</th>" for h in (*HEADINGS, "source"))
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in (*cells(row, count), row.source)) + "</tr>"
        for row, count in collapse(rows)
    )
    title = html.escape(f"completep explain: {type(scaling.model).__name__}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1><p>{html.escape(summary(scaling))}</p>"
        f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></html>\n"
    )
