"""What figures are made of: colours, axes and the common kinds of panel. Frames in, panels out.

In every panel a click on the legend hides a series. Colours stay distinguishable with colour blindness, and ordered
ones in greyscale too.
"""

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import altair as alt
import polars as pl

from completep.report.document import Figure, Json
from completep.report.escape import harmless
from completep.rules.table import display_name

if TYPE_CHECKING:
    from completep.report.document import Panel

WIDTH, HEIGHT = 250, 230
# Okabe & Ito's colours.
OKABE_ITO = ["#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#000000", "#999999", "#F0E442"]
# More, as far from these and from each other as these are, for as many series as there are roles.
MANY_COLOURS = [*OKABE_ITO, "#882255", "#332288", "#663300", "#8F6BE8", "#A6E8B0", "#FFC0B0", "#5F7020"]
# A parameterization has the same colour in every figure.
RULES_COLOURS = dict(zip(("mup", "alpha=0.5", "completep", "sp", "flat-eps=1"), OKABE_ITO, strict=False))
# Viridis without its palest end.
SHADES = ("#440154", "#3b528b", "#21918c", "#5ec962", "#c2b32a")
SYMBOLS = {
    "lr": "base learning rate η",
    "std": "base init std σ",
    "eps": "base ε",
    "tau": "τ = 1 / (η λ steps)",
    "weight_decay": "base weight decay λ",
}
MOST_TICKS = 20
BAND = 0.18  # opacity
EDGE = 6  # pixels from the upper edge to the marks there, so panels align
MOST_POINTS = 30  # a line with more values has no points, since they would touch
LOSS = "validation loss (nats per token)"
Kind = Literal["svg", "png", "pdf"]
# Vega reads `\x1b` in a title as an escape again, and an SVG with a control character in it cannot be read.
NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
SHARED = ("$schema", "config", "datasets", "params")
SCHEMA = "_".join(alt.SCHEMA_VERSION.split(".")[:2])  # of Vega-Lite: v6_1


def chart(figure: Figure) -> Json:
    """All panels in one picture, as Vega-Lite. What the panels share is at the top level."""
    panels = [_own_names(panel, f"_{i}") for i, panel in enumerate(figure.specs)]
    return harmless(
        {
            "$schema": panels[0]["$schema"],
            "config": panels[0]["config"],
            "datasets": {name: rows for panel in figure.specs for name, rows in cast(Json, panel["datasets"]).items()},
            "params": [param for panel in panels for param in cast(list[Json], panel.get("params", []))],
            "concat": [{k: v for k, v in panel.items() if k not in SHARED} for panel in panels],
            "columns": figure.columns,
            "spacing": 22,
            "resolve": {"scale": dict.fromkeys(("color", "shape", "opacity"), "independent")},
            "title": {"text": figure.title, "anchor": "start", "fontSize": 15},
        }
    )


def _own_names(panel: Json, suffix: str) -> Json:
    """The panel with a suffix on the names of its parameters and views, so they differ between panels."""
    params = cast(list[dict[str, list[str]]], panel.get("params", []))
    names = {*(str(p["name"]) for p in params), *(view for p in params for view in p.get("views", []))}

    def renamed(value: object, key: str = "") -> object:
        if isinstance(value, dict):
            return {k: renamed(v, k) for k, v in value.items() if k != "datasets"}
        if isinstance(value, list):
            return [renamed(v, key) for v in value]
        return f"{value}{suffix}" if key in ("name", "param", "views") and value in names else value

    return cast(Json, renamed(panel))


def render(figure: Figure, kind: Kind) -> bytes:
    """The figure as the bytes of a file."""
    return pictures(figure, (kind,))[kind]


def pictures(figure: Figure, kinds: Sequence[Kind]) -> dict[Kind, bytes]:
    """The figure as the bytes of several files. It is drawn once as SVG; the others are made from that."""
    import vl_convert

    svg = NO_XML.sub("\ufffd", vl_convert.vegalite_to_svg(chart(figure), vl_version=SCHEMA))
    made: dict[Kind, Callable[[], bytes]] = {
        "svg": svg.encode,
        "png": lambda: bytes(vl_convert.svg_to_png(svg, scale=2)),
        "pdf": lambda: bytes(vl_convert.svg_to_pdf(svg)),
    }
    return {kind: made[kind]() for kind in kinds}


def hiding(field: str, title: str) -> alt.Parameter:
    """A click on the legend hides a series, and a second click shows it again. The title makes the name unique."""
    name = f"hide_{field}_{hashlib.sha256(title.encode()).hexdigest()[:8]}"
    hidden: alt.Parameter = alt.selection_point(name=name, fields=[field], bind="legend", toggle="true", empty=False)
    return hidden


def shown(hidden: alt.Parameter, opacity: float = 1) -> alt.Opacity:
    return alt.Opacity(condition=alt.condition(hidden, alt.value(0), alt.value(opacity))["condition"], value=opacity)


def tips(*fields: str, **formats: str) -> list[alt.Tooltip]:
    """The tooltip of a mark: fields as they are, and numbers with a format."""
    plain = [alt.Tooltip(field) for field in fields]
    return [*plain, *(alt.Tooltip(f"{field}:Q", format=form) for field, form in formats.items())]


def labelled(frame: pl.DataFrame) -> pl.DataFrame:
    """With the display name of each row's rules in the column `label`."""
    return frame.with_columns(label=pl.col("rules").map_elements(display_name, return_dtype=pl.String))


def by_order(field: str, title: str, values: Sequence[object]) -> alt.Color:
    """Colours for an ordered quantity such as depth."""
    last = max(1, len(values) - 1)
    colours = [SHADES[round(i * (len(SHADES) - 1) / last)] for i in range(len(values))]
    few = len(values) <= len(SHADES)
    ramp = {"range": colours} if few else {"scheme": "viridis"}
    scale = alt.Scale(domain=list(values), **ramp)  # type: ignore[arg-type]
    return alt.Color(
        f"{field}:O", title=title, scale=scale, legend=alt.Legend(orient="bottom", symbolStrokeWidth=3, symbolOpacity=1)
    )


def rules_colours(rules: Sequence[str]) -> list[str]:
    """The colour of each parameterization, the same in every figure; others take what is left."""
    rest = iter([c for c in OKABE_ITO if c not in RULES_COLOURS.values()] * len(rules))
    return [RULES_COLOURS.get(r) or next(rest) for r in rules]


def by_rules(rules: Sequence[str]) -> alt.Color:
    """Colours for parameterizations, by the column that `labelled` adds."""
    scale = alt.Scale(domain=[display_name(r) for r in rules], range=rules_colours(rules))
    legend = alt.Legend(orient="bottom", labelLimit=200, symbolStrokeWidth=3, symbolOpacity=1)
    return alt.Color("label:N", title=None, scale=scale, legend=legend)


def log2_x(field: str, values: Sequence[float], title: str) -> alt.X:
    """A logarithmic axis with a tick for each value, or each second or third of many; in powers of two if they are."""
    values = sorted(values)
    ticks = values[:: -(-len(values) // MOST_TICKS)]
    exact = all(abs(math.log2(v) - round(math.log2(v))) < 1e-9 for v in values)
    label = "'2^' + format(log(datum.value) / LN2, '.3~g')" if exact else "format(datum.value, '.2~g')"
    scale = alt.Scale(type="log", base=2, domain=[min(values) / 1.15, max(values) * 1.15])
    axis = alt.Axis(values=ticks, labelExpr=label, labelOverlap="greedy", grid=False)
    return alt.X(f"{field}:Q", title=title, scale=scale, axis=axis)


def size_x(field: str, sizes: Sequence[int], title: str = "depth L (layers)") -> alt.X:
    scale = alt.Scale(type="log", base=2, domain=[min(sizes) / 1.08, max(sizes) * 1.08])
    ticks = sorted(sizes)[:: -(-len(sizes) // MOST_TICKS)]
    axis = alt.Axis(values=ticks, format="d", labelOverlap="greedy", grid=False)
    return alt.X(f"{field}:Q", title=title, scale=scale, axis=axis)


def y_axis(
    field: str, title: str | None, *, log: bool = False, domain: Sequence[float] | None = None, form: str | None = None
) -> alt.Y:
    """An axis that need not start at zero."""
    kind = {"type": "log"} if log else {}
    room = {"domain": list(domain)} if domain is not None else {"padding": 12} | ({} if log else {"zero": False})
    scale = alt.Scale(nice=False, **kind, **room)  # type: ignore[arg-type]
    number = form or ("~g" if log else alt.Undefined)
    return alt.Y(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(tickCount=5, format=number))


def span_of(losses: pl.Series, outliers: float = 0.05) -> tuple[float, float]:
    """The range to show. The largest twentieth of the values may lie above it; they are drawn on the upper edge."""
    kept = losses.drop_nulls().filter(losses.drop_nulls().is_finite())
    if kept.is_empty():
        return 0.0, 1.0
    low, high = float(kept.min()), float(kept.quantile(1 - outliers, "higher"))  # type: ignore[arg-type]
    room = max(high - low, 0.01 * abs(low))
    return low - 0.05 * room, high + 0.1 * room


def positive_span(values: pl.Series) -> tuple[float, float]:
    """The range of the positive finite values, for a logarithmic axis."""
    kept = values.filter(values.is_finite() & (values > 0)).to_numpy()
    return (float(kept.min()), float(kept.max())) if len(kept) else (0.1, 1.0)


def loss_curves(
    frame: pl.DataFrame, x: alt.X, field: str, colour: alt.Color, line: str, title: str, *,
    why: str | None = None, span: tuple[float, float], mark: float | None = None, first: bool = True,
) -> "Panel":  # fmt: skip
    """Mean loss over a hyperparameter, a line per series, from a frame that `mean_and_range` made.

    A band reaches from the lowest seed to the highest. A diamond marks the best value. Triangles on the upper edge are
    filled where a run diverged, and hollow where the loss lies above the picture. `mark` draws a dashed line, such as
    the base's best value.
    """
    finite = frame.filter(pl.col("loss").is_finite())
    diverged = frame.filter(~pl.col("loss").is_finite()).with_columns(loss=pl.lit(span[1]))
    inside = (pl.col(name).clip(upper_bound=span[1]) for name in ("loss", "lowest", "highest"))
    drawn = finite.with_columns(actual=pl.col("loss")).with_columns(*inside)
    above = drawn.filter(pl.col("actual") > span[1])
    best = finite.sort("loss").group_by(line, maintain_order=True).first()
    y_title = LOSS if first else None
    hidden, y = hiding(line, title), y_axis("loss", y_title, domain=span)
    tooltip = [*tips(f"{line}:N", **{field: ".4~g"}), alt.Tooltip("actual:Q", title="loss", format=".4f")]
    look = {"x": x, "y": y, "color": colour, "opacity": shown(hidden)}
    layers = []
    if mark is not None:
        layers.append(alt.Chart(pl.DataFrame({field: [mark]})).mark_rule(strokeDash=[4, 4], color="#888").encode(x=x))
    if (drawn["highest"] > drawn["lowest"]).any():
        band = look | {"y": y_axis("lowest", y_title, domain=span), "y2": "highest:Q", "opacity": shown(hidden, BAND)}
        layers.append(alt.Chart(drawn).mark_area().encode(**band))
    points = alt.OverlayMarkDef(size=24) if drawn[field].n_unique() <= MOST_POINTS else False
    lines = alt.Chart(drawn).mark_line(point=points).encode(**look, tooltip=tooltip)
    layers.append(lines.add_params(hidden))
    layers.append(alt.Chart(best).mark_point(shape="diamond", filled=True, size=120).encode(**look))
    for lost, filled in ((diverged, True), (above, False)):
        if not lost.is_empty():
            marks = alt.Chart(lost).mark_point(shape="triangle-up", filled=filled, size=70, yOffset=EDGE)
            layers.append(marks.encode(**look, **({} if filled else {"tooltip": tooltip})))
    return panel(*layers, title=title, why=why)


def lines(
    frame: pl.DataFrame, x: alt.X, y: alt.Y, colour: alt.Color, line: str, title: str, tooltip: list[alt.Tooltip], *,
    why: str | None = None, points: bool = True, detail: str | None = None,
) -> "Panel":  # fmt: skip
    """A line per series, or per value of `detail`; values that are not finite are triangles on the upper edge."""
    value = str(y.shorthand).split(":")[0]
    hidden = hiding(line, title)
    look = {"x": x, "y": y, "color": colour, "opacity": shown(hidden)} | ({"detail": detail} if detail else {})
    finite = frame.filter(pl.col(value).is_finite())
    plain = alt.Chart(finite).mark_line(clip=True, point=alt.OverlayMarkDef(size=45) if points else False)
    layers = [plain.encode(**look, tooltip=tooltip).add_params(hidden)]
    lost = frame.filter(~pl.col(value).is_finite()).with_columns(pl.lit(finite[value].max()).alias(value))
    if not lost.is_empty():
        marks = alt.Chart(lost).mark_point(shape="triangle-up", filled=True, size=80, yOffset=EDGE)
        layers.append(marks.encode(**look, tooltip=tooltip[:-1]))
    return panel(*layers, title=title, why=why)


def panel(*layers: alt.Chart, title: str, why: str | None = None, width: int = WIDTH) -> "Panel":
    drawn: Panel = alt.layer(*layers).properties(width=width, height=HEIGHT, title=heading(title, why))
    return drawn


def heading(title: str, why: str | None = None) -> alt.Title:
    """A panel's title.

    Its subtitle is broken into lines that fit; an empty one keeps its place, so that panels align.
    """
    plain = partial(alt.Title, title, anchor="start", frame="group", fontSize=12)
    if why is None:
        return plain()
    rows: list[str] = []
    for word in why.split():
        if rows and len(rows[-1]) + len(word) < 42:
            rows[-1] += " " + word
        else:
            rows.append(word)
    rows += [" "] * (2 - len(rows))
    return plain(subtitle=rows, subtitleFontSize=10)
