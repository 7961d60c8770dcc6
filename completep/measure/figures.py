"""The figures of the checks: coordinates, laziness, transfer. Frames and verdicts in, figures out."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import polars as pl

from completep.measure.curves import Transfer
from completep.measure.verdict import Finding, overall
from completep.measure.words import Axis, worst
from completep.report.document import Figure
from completep.rules.table import Role, display_name
from completep.stats import mean_and_range

if TYPE_CHECKING:
    from completep.measure import diagnosis
    from completep.measure.grid import Coordinates
    from completep.measure.linearization import LazyVerdict, Place, TermVerdict
    from completep.measure.stream_limit import Growth
    from completep.measure.survey import Survey
    from completep.report.document import Panel


def coordinate_figures(coordinates: "Coordinates", findings: Sequence[Finding], axis: Axis) -> list[Figure]:
    """The paper's figure (the last stream over size, a line per step), and how far each role's update alone moves
    it.
    """
    along = coordinates.along(axis)
    columns = along.stream["rules"].unique(maintain_order=True).to_list()
    top = (pl.col("quantity") == "stream") & (pl.col("layer") == pl.col("layer").max().over("rules", "width", "depth"))
    stream = _over_seeds(along.stream.filter(top), axis, pl.col("step"), "rms")
    on_logits = pl.col("role").is_in([str(r) for r in Role if r.trait.acts_on == "logits"])
    effects = along.roles.with_columns(
        value=pl.when(on_logits).then("logits").otherwise("stream"),
        role=pl.when(on_logits).then(pl.col("role") + " (logits)").otherwise("role"),
    )
    roles = _over_seeds(effects.filter(pl.col("value") > 0), axis, pl.col("role"), "value")
    above = [_size_panel(stream, r, axis, "step", _word(findings, r, axis), r == columns[0]) for r in columns]
    below = [_size_panel(roles, r, axis, "role", _blamed(findings, r, axis), r == columns[0]) for r in columns]
    return [
        Figure(f"{axis}-1", f"Does training behave the same as the model grows in {axis}?", tuple(above), columns=2),
        Figure(f"{axis}-2", "How far does each role's update alone move the stream or the logits?", tuple(below), 2),
    ]


def exponent_figure(measured: "Survey", findings: "Sequence[diagnosis.Finding]", axis: Axis) -> Figure:
    """What should not depend on the size, relative to the smallest: a line per tensor. Flat is right."""
    panels = [
        _tensor_panel(measured, findings, axis, rules, setting, value, divisor)
        for rules in measured.tensors["rules"].unique(maintain_order=True)
        for setting, value, divisor in FLAT
    ]
    return Figure(f"{axis}-tensors", f"What should be flat in {axis}, tensor by tensor", tuple(panels), columns=3)


FLAT = (  # setting, what shows it, what it is divided by
    ("learning rate", "pull", None),
    ("epsilon", "eps_ratio", None),
    ("init", "gain", "expected_gain"),
)


def _tensor_panel(
    measured: "Survey",
    findings: "Sequence[diagnosis.Finding]",
    axis: Axis,
    rules: str,
    setting: str,
    value: str,
    divisor: str | None,
) -> "Panel":
    import altair as alt

    from completep.report import charts

    rows = measured.along(measured.tensors, axis, rules)
    shown = pl.col(value) if divisor is None else pl.col(value) / pl.col(divisor)
    points = rows.with_columns(size=pl.col(axis), value=shown.log()).filter(pl.col("value").is_finite())
    points = points.group_by("template", "role", "size", maintain_order=True).agg(pl.col("value").mean()).sort("size")
    points = points.with_columns(value=(pl.col("value") - pl.col("value").first().over("template")).exp())
    low, high = charts.positive_span(points["value"])
    y = charts.y_axis("value", "relative to the smallest", log=True, domain=(min(low, 0.5) / 1.1, max(high, 2.0) * 1.1))
    x = charts.size_x(
        "size", sorted(rows[axis].unique().to_list()), "depth L (layers)" if axis == "depth" else "width N"
    )
    roles = [str(role) for role in Role if str(role) in set(measured.tensors["role"])]
    colour = alt.Color("role:N", title="role", scale=alt.Scale(domain=roles, range=charts.MANY_COLOURS))
    settings = ("init", "multiplier") if setting == "init" else (setting,)
    judged = [f for f in findings if (f.rules, f.axis) == (rules, axis) and f.setting in settings]
    names = {"init": "init, multipliers: gain", "learning rate": "learning rate: pull", "epsilon": "epsilon / gradient"}
    word = worst("PASS" if f.follows else f.word for f in judged)
    verdict = "follows from the gain" if word == "PASS" and any(f.follows for f in judged) else word
    title = f"{names[setting]}: {verdict}" if judged else names[setting]
    if measured.tensors["rules"].n_unique() > 1:
        title = f"{display_name(rules)}, {title}"
    tips = charts.tips("template:N", "role:N", "size:Q", value=".3g")
    return charts.lines(points, x, y, colour, "role", title, tips, detail="template")


def _over_seeds(frame: pl.DataFrame, axis: Axis, line: pl.Expr, value: str) -> pl.DataFrame:
    """Geometric means of the finite values."""
    points = frame.with_columns(size=pl.col(axis), line=line, value=pl.col(value)).filter(pl.col("value").is_finite())
    return points.group_by("rules", "size", "line", maintain_order=True).agg(pl.col("value").log().mean().exp())


def _size_panel(everything: pl.DataFrame, rules: str, axis: Axis, kind: str, word: str, first: bool) -> "Panel":
    """Log–log lines over size; the panels of a figure share their scales."""
    import altair as alt

    from completep.report import charts

    points = everything.filter(pl.col("rules") == rules)
    low, high = charts.positive_span(everything["value"])
    what = "RMS of the last stream" if kind == "step" else "moved by one role (RMS)"
    y = charts.y_axis("value", what if first else None, log=True, domain=(low / 1.15, high * 1.15))
    sizes = sorted(everything["size"].unique().to_list()) or [1, 2]
    x = charts.size_x("size", sizes, "depth L (layers)" if axis == "depth" else "width N")
    title = f"{display_name(rules)}: {word}"
    if kind == "step":
        colour = alt.Color("line:O", title="training step", scale=alt.Scale(scheme="viridis"))
    else:
        colour = alt.Color("line:N", title="role", scale=alt.Scale(range=charts.MANY_COLOURS))
    tips = charts.tips("line:N", "size:Q", value=".3g")
    return charts.lines(points, x, y, colour, "line", title, tips)


def _word(findings: Sequence[Finding], rules: str, axis: Axis) -> str:
    return overall(f for f in findings if (f.rules, f.axis) == (rules, axis))


def _blamed(findings: Sequence[Finding], rules: str, axis: Axis) -> str:
    roles = [f for f in findings if (f.rules, f.axis) == (rules, axis) and f.role]
    names = [str(f.role) for f in roles if f.word == "FAIL"]
    if names:
        return f"{' and '.join(names)} fail" if len(names) <= 2 else f"{len(names)} roles fail"
    return "all roles pass" if all(f.word == "PASS" for f in roles) else "no role fails, some are unclear"


LAZY_TITLES: "Mapping[Place, str]" = {
    "block": "After the block that moves",
    "last layer": "After the last layer",
    "output": "Output",
}


def laziness_figure(frame: pl.DataFrame, verdicts: "Sequence[LazyVerdict]", name: str = "laziness") -> Figure:
    """A panel per place: median and quartiles over seeds; triangles where float32 would have overflowed."""
    from completep.report import charts

    points = frame.group_by("rules", "place", "depth", maintain_order=True).agg(
        low=pl.col("ratio").quantile(0.25),
        middle=pl.col("ratio").median(),
        high=pl.col("ratio").quantile(0.75),
        overflows=pl.col("overflows").any(),
    )
    points = charts.labelled(points)
    span = charts.positive_span(pl.concat([points["low"], points["high"].rename("low")]))
    places = points["place"].unique(maintain_order=True).to_list()
    panels = [
        _lazy_panel(points.filter(pl.col("place") == place), [v for v in verdicts if v.place == place], span, i == 0)
        for i, place in enumerate(places)
    ]
    return Figure(name, "How nonlinearly does a block still learn?", tuple(panels))


def _lazy_panel(
    points: pl.DataFrame, verdicts: "Sequence[LazyVerdict]", span: tuple[float, float], first: bool
) -> "Panel":
    import altair as alt

    from completep.report import charts

    symbol = "|Δh - Δh_lin| / |Δh_lin|" if first else None
    x = charts.size_x("depth", sorted(points["depth"].unique().to_list()), "depth L (blocks)")
    y = charts.y_axis("middle", symbol, log=True, domain=(span[0] / 1.2, span[1] * 1.2), form="~e")
    colour = charts.by_rules([v.rules for v in verdicts])
    title = LAZY_TITLES[points["place"][0]]
    why = ", ".join(f"{display_name(v.rules)} L^{v.slope.value:+.2f}" for v in verdicts if v.slope)
    why += "; ▲ overflows float32" if points["overflows"].any() else ""
    hidden = charts.hiding("label", title)
    base = alt.Chart(points).encode(x=x, color=colour, opacity=charts.shown(hidden))
    band = base.mark_area().encode(opacity=charts.shown(hidden, 0.2), y=alt.Y("low:Q", title=symbol), y2="high:Q")
    line = base.mark_line().encode(y=y).add_params(hidden)
    shapes = alt.Scale(domain=[False, True], range=["circle", "triangle-up"])
    marks = base.mark_point(filled=True).encode(
        size=alt.condition("datum.overflows", alt.value(150), alt.value(45)),
        y=y, shape=alt.Shape("overflows:N", scale=shapes, legend=None), tooltip=["label:N", "depth:Q", "middle:Q"],
    )  # fmt: skip
    return charts.panel(band, line, marks, title=title, why=why)


def terms_figure(frame: pl.DataFrame, verdicts: "Sequence[TermVerdict]", name: str = "terms") -> Figure:
    """A panel per parameterization: the first terms of a block's Taylor series over depth, as geometric means."""
    from completep.report import charts

    points = frame.group_by("rules", "order", "depth", maintain_order=True).agg(size=pl.col("size").log().mean().exp())
    low, high = charts.positive_span(points["size"])
    orders = sorted(points["order"].unique().to_list())
    colour = charts.by_order("order", "order k", orders)
    x = charts.size_x("depth", sorted(points["depth"].unique().to_list()), "depth L (blocks)")
    panels: list[Panel] = []
    for rules in points["rules"].unique(maintain_order=True):
        judged = [v for v in verdicts if v.rules == rules]
        y = charts.y_axis(
            "size", None if panels else "size of the term", log=True, domain=(low / 2, high * 2), form="~e"
        )
        why = ", ".join(f"L^{v.slope.value:+.2f} (derived {v.derived:+.2f})" for v in judged if v.slope)
        title = f"{display_name(rules)}: {worst(v.word for v in judged)}"
        tips = charts.tips("order:O", "depth:Q", size=".3g")
        part = points.filter(pl.col("rules") == rules)
        panels.append(charts.lines(part, x, y, colour, "order", title, tips, why=why))
    return Figure(name, "How fast does each order of a block's learning fall with depth?", tuple(panels))


def growth_figure(growths: "Sequence[Growth]", name: str = "stream-limit") -> Figure:
    """How far the stream of an untrained ReLU network grows: measured with intervals, and the paper's formula."""
    import altair as alt

    from completep.report import charts

    rows = [
        {"rules": g.rules, "depth": g.depth, "measured": g.measured, "low": g.interval.low, "high": g.interval.high,
         "derived": g.derived}
        for g in growths if math.isfinite(g.measured)
    ]  # fmt: skip
    points = charts.labelled(pl.DataFrame(rows))
    low, high = charts.positive_span(points["measured"])
    x = charts.size_x("depth", sorted(points["depth"].unique().to_list()), "depth L (blocks)")
    domain = (low / 1.1, min(high, 100) * 1.1)
    growth = "H^L / H^0"
    y = charts.y_axis("measured", growth, log=True, domain=domain)
    colour = charts.by_rules(points["rules"].unique(maintain_order=True).to_list())
    title = "Points: measured, with 90 % intervals; lines: [1 + σ²/2 · L^(-2α)]^L"
    hidden = charts.hiding("label", title)
    base = alt.Chart(points).encode(x=x, color=colour, opacity=charts.shown(hidden))
    derived = charts.y_axis("derived", growth, log=True, domain=domain)
    line = base.mark_line(clip=True).encode(y=derived).add_params(hidden)
    bars = base.mark_rule(clip=True).encode(y=alt.Y("low:Q", title=growth), y2="high:Q")
    tips = charts.tips("label:N", "depth:Q", measured=".4g", derived=".4g")
    marks = base.mark_point(filled=True, size=45, clip=True).encode(y=y, tooltip=tips)
    return Figure(
        name, "Does the stream keep its size at init?", (charts.panel(line, bars, marks, title=title, width=460),)
    )


def transfer_figure(frame: pl.DataFrame, transfers: Sequence[Transfer], name: str, title: str) -> Figure:
    """A panel per parameterization, a line per size; and the paper's last panel: the loss with the base's best
    everywhere.
    """
    from completep.report import charts

    swept = transfers[0].hyperparameter
    size = "depth" if frame["depth"].n_unique() > 1 else "width"
    # Vega reads dots and brackets in a column's name as a path, so the swept column gets a plain one.
    means = mean_and_range(frame.rename({swept: "value"}), "rules", size, "value").sort("rules", size, "value")
    sizes, values = sorted(means[size].unique().to_list()), sorted(means["value"].unique().to_list())
    span, x = charts.span_of(means["loss"]), charts.log2_x("value", values, charts.SYMBOLS.get(swept, f"base {swept}"))
    colour = charts.by_order(size, "depth L" if size == "depth" else "width N", sizes)
    panels = [
        charts.loss_curves(
            means.filter(pl.col("rules") == t.rules), x, "value", colour, size, f"{display_name(t.rules)}: {t.word}",
            why=t.why, span=span, mark=t.best, first=i == 0,
        )
        for i, t in enumerate(transfers)
    ]  # fmt: skip
    if any(t.shapes for t in transfers):
        panels.append(_at_base_best(transfers, size))
    return Figure(name, title, tuple(panels))


def _at_base_best(transfers: Sequence[Transfer], size: str) -> "Panel":
    from completep.report import charts

    rows = []
    for t in transfers:
        rows.append({"rules": t.rules, size: getattr(t.base, size), "loss": t.best_loss})
        rows += [
            {"rules": t.rules, size: getattr(s.shape, size), "loss": s.loss} for s in t.shapes if math.isfinite(s.loss)
        ]
    points = charts.labelled(pl.DataFrame(rows, infer_schema_length=None))
    x = charts.size_x(size, points[size].unique().to_list(), "depth L" if size == "depth" else "width N")
    tips = charts.tips("label:N", f"{size}:Q", loss=".4f")
    why = f"loss with the base's best {transfers[0].hyperparameter} at every {size}"
    colour = charts.by_rules([t.rules for t in transfers])
    y = charts.y_axis("loss", None)
    return charts.lines(points, x, y, colour, "label", "Tuned at the base only", tips, why=why)
