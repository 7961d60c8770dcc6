"""Frame in, chart out."""

import io
from typing import Literal

import altair as alt
import polars as pl

# Viridis reads in grey, in print and to colour-blind eyes, and steps are ordered.
STEP = alt.Color("step:O", title="training step", scale=alt.Scale(scheme="viridis"))


def coordinate_chart(frame: pl.DataFrame, verdicts: pl.DataFrame) -> alt.FacetChart:
    """The paper's figure: one panel per parameterization, the size of the last stream over depth, a line per step."""
    order = verdicts["rules"].to_list()
    titles = {
        r["rules"]: f"{r['rules']}  ∝  L^{r['slope']:.2f}   {r['verdict']}" for r in verdicts.iter_rows(named=True)
    }
    shown = frame.with_columns(panel=pl.col("rules").replace_strict(titles))
    depths = sorted(frame["depth"].unique().to_list())
    line = (
        alt.Chart(shown)
        .mark_line(point=True)
        .encode(
            x=alt.X(
                "depth:Q",
                title="depth L (layers)",
                scale=alt.Scale(type="log", base=2),
                axis=alt.Axis(values=depths, format="d"),
            ),
            y=alt.Y(
                "stream:Q",
                title="RMS of the last residual stream",
                scale=alt.Scale(type="log"),
                axis=alt.Axis(tickCount=5, format="~g"),
            ),
            color=STEP,
            tooltip=["rules:N", "depth:Q", "step:O", alt.Tooltip("stream:Q", format=".3g")],
        )
        .properties(width=220, height=220)
    )
    header = alt.Header(title=None, labelFontSize=13, labelFontWeight="bold")
    panels: alt.FacetChart = line.facet(
        column=alt.Column("panel:N", header=header, sort=[titles[r] for r in order])
    ).properties(title=alt.Title("Does the stream stay bounded as the model deepens?", anchor="start", fontSize=15))
    return panels


def render(chart: alt.FacetChart, kind: Literal["html", "svg", "png", "pdf"]) -> bytes:
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
