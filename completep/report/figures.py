"""Frame in, chart out; and a chart as the bytes of a file."""

import io
from itertools import count
from typing import Any, Literal

import altair as alt
import polars as pl


def render(chart: alt.TopLevelMixin, kind: Literal["html", "svg", "png", "pdf"]) -> bytes:
    """The chart as the bytes of a file of this kind; html carries all it needs to be interactive offline."""
    if kind in ("png", "pdf"):
        binary = io.BytesIO()
        chart.save(binary, format=kind, scale_factor=2 if kind == "png" else 1)
        return binary.getvalue()
    text = io.StringIO()
    chart.save(text, format=kind, inline=kind == "html")
    return text.getvalue().encode()


COUNTER = count()


def hiding(field: str) -> alt.Parameter:
    """A click on the legend hides that series, another brings it back."""
    name = f"hide_{field}_{next(COUNTER)}"  # altair would make one of two that look alike
    hidden: alt.Parameter = alt.selection_point(name=name, fields=[field], bind="legend", toggle="true", empty=False)
    return hidden


def seen(hidden: alt.Parameter, opacity: float = 1) -> Any:
    return alt.condition(hidden, alt.value(0), alt.value(opacity))


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
