"""Frame in, chart out."""

import io
from typing import Literal

import altair as alt
import polars as pl

from completep.measure.grid import Coordinates
from completep.measure.verdict import Axis, Finding, overall
from completep.rules.table import Role

# Viridis reads in grey, in print and to colour-blind eyes, and steps are ordered.
STEP = alt.Color("line:O", title="training step", scale=alt.Scale(scheme="viridis"))
# Okabe & Ito's colours, told apart by every kind of eye.
OKABE_ITO = ["#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#000000", "#999999", "#F0E442"]
ROLE = alt.Color("line:N", title="role", scale=alt.Scale(range=OKABE_ITO))


def coordinate_chart(found: Coordinates, findings: list[Finding], axis: Axis = "depth") -> alt.VConcatChart:
    """The paper's figure, and under it what the paper has not: one column per parameterization; above, the last stream over
    size, a line per step; below, how far each role's update alone moves it."""
    columns = found.stream["rules"].unique(maintain_order=True).to_list()
    words = {rules: overall([f for f in findings if (f.rules, f.axis) == (rules, axis)]) for rules in columns}
    stream, roles = _last_stream(found, axis), _role_effects(found, axis)
    above = [
        _panel(
            stream.filter(pl.col("rules") == r), axis, stream, STEP, f"{r}: {words[r]}", i == 0, "RMS of last stream"
        )
        for i, r in enumerate(columns)
    ]
    below = [
        _panel(
            roles.filter(pl.col("rules") == r),
            axis,
            roles,
            ROLE,
            _blamed(findings, r, axis),
            i == 0,
            "moved by one role",
        )
        for i, r in enumerate(columns)
    ]
    rows = [alt.hconcat(*row, spacing=18) for row in (above, below)]
    chart: alt.VConcatChart = (
        alt.vconcat(*rows, spacing=26)
        .resolve_scale(color="independent", shape="independent")
        .properties(
            title=alt.Title(f"Does training stay alike as the model grows in {axis}?", anchor="start", fontSize=15)
        )
    )
    return chart


def _panel(
    points: pl.DataFrame, axis: Axis, everything: pl.DataFrame, colour: alt.Color, title: str, first: bool, what: str
) -> alt.Chart:
    """Log–log lines; all panels of a row share their scales."""
    sizes = sorted(everything["size"].unique().to_list())
    low, high = (float(v) for v in everything.select(pl.col("value").min(), high=pl.col("value").max()).row(0))
    y = alt.Y(
        "value:Q",
        title=f"{what} (RMS)" if "RMS" not in what else what,
        scale=alt.Scale(type="log", domain=[low / 1.15, high * 1.15], nice=False),
        axis=alt.Axis(tickCount=5, format="~g", labels=first, title=None if not first else alt.Undefined),
    )
    x = alt.X(
        "size:Q",
        title="depth L (layers)" if axis == "depth" else "width N",
        scale=alt.Scale(type="log", base=2, domain=[sizes[0] / 1.08, sizes[-1] * 1.08]),
        axis=alt.Axis(values=sizes, format="d", labelOverlap="greedy"),
    )
    chart = alt.Chart(points).mark_line(point=alt.OverlayMarkDef(size=28))
    drawn: alt.Chart = chart.encode(
        x=x, y=y, color=colour, tooltip=["rules:N", "line:N", "size:Q", alt.Tooltip("value:Q", format=".3g")]
    ).properties(width=200, height=180, title=alt.Title(title, anchor="start", frame="group", fontSize=12))
    return drawn


def _blamed(findings: list[Finding], rules: str, axis: Axis) -> str:
    names = [
        f.quantity.split(" →")[0]
        for f in findings
        if (f.rules, f.axis, f.word) == (rules, axis, "FAIL") and "→" in f.quantity
    ]
    return (
        f"fails: {', '.join(names)}"
        if 0 < len(names) <= 2
        else f"{len(names)} roles fail"
        if names
        else "all roles pass"
    )


def _last_stream(found: Coordinates, axis: Axis) -> pl.DataFrame:
    top = (pl.col("quantity") == "stream") & (pl.col("layer") == pl.col("layer").max().over("rules", "width", "depth"))
    return _over_seeds(found.stream.filter(top), axis, pl.col("step"), "rms")


def _role_effects(found: Coordinates, axis: Axis) -> pl.DataFrame:
    on_logits = pl.col("role").is_in([str(r) for r in (Role.FINAL_NORM, Role.UNEMBEDDING, Role.UNEMBEDDING_BIAS)])
    frame = found.roles.with_columns(
        value=pl.when(on_logits).then("logits").otherwise("stream"),
        role=pl.when(on_logits).then(pl.col("role") + " (logits)").otherwise("role"),
    )
    return _over_seeds(frame.filter(pl.col("value") > 0), axis, pl.col("role"), "value")


def _over_seeds(frame: pl.DataFrame, axis: Axis, line: pl.Expr, value: str) -> pl.DataFrame:
    """Geometric means; what is not finite cannot be drawn on a logarithmic axis."""
    points = frame.with_columns(size=pl.col(axis), line=line, value=pl.col(value)).filter(pl.col("value").is_finite())
    return points.group_by("rules", "size", "line", maintain_order=True).agg(pl.col("value").log().mean().exp())


def render(chart: alt.TopLevelMixin, kind: Literal["html", "svg", "png", "pdf"]) -> bytes:
    """The chart as the bytes of a file of this kind; html carries all it needs to be interactive offline."""
    if kind in ("png", "pdf"):
        binary = io.BytesIO()
        chart.save(binary, format=kind, scale_factor=2 if kind == "png" else 1)
        return binary.getvalue()
    text = io.StringIO()
    chart.save(text, format=kind, inline=kind == "html")
    return text.getvalue().encode()


def depth_chart(frame: pl.DataFrame) -> alt.LayerChart:
    """Training loss over tokens, a line per depth, the final validation loss written at its end."""
    depths = sorted(frame["depth"].unique().to_list())
    colour = alt.Color("depth:O", title="depth L", scale=alt.Scale(scheme="viridis", domain=depths))
    steps = frame.filter(pl.col("kind") == "step")
    ends = frame.filter(pl.col("kind") == "eval").sort("step").group_by("depth", maintain_order=True).last()
    x = alt.X("tokens:Q", title="training tokens", axis=alt.Axis(format="~s"))
    y = alt.Y("loss:Q", title="loss (nats per byte)", scale=alt.Scale(zero=False))
    lines = alt.Chart(steps).mark_line().encode(x=x, y=y, color=colour, tooltip=["depth:O", "tokens:Q", "loss:Q"])
    final = alt.Chart(ends.with_columns(label=pl.format("L={}: {}", "depth", pl.col("loss").round(2))))
    marks = final.mark_point(filled=True, size=70).encode(x=x, y=y, color=colour)
    words = final.mark_text(align="left", dx=8, fontSize=12).encode(x=x, y=y, text="label:N")
    title = alt.Title(
        "One learning rate, three depths: deeper is better",
        subtitle="points: validation loss at the end",
        anchor="start",
    )
    chart: alt.LayerChart = (lines + marks + words).properties(width=520, height=320, title=title)
    return chart
