"""The pictures of the checks: frames and verdicts in, chart out."""

import altair as alt
import polars as pl

from completep.measure.grid import Axis, Coordinates
from completep.measure.laziness import LazyVerdict
from completep.measure.transfer import Transfer
from completep.measure.verdict import Finding, overall
from completep.report.figures import hiding, seen
from completep.rules.table import Role

# Viridis reads in grey, in print and to colour-blind eyes, and steps are ordered.
STEP = alt.Color("line:O", title="training step", scale=alt.Scale(scheme="viridis"))
# Okabe & Ito's colours, told apart by every kind of eye.
OKABE_ITO = ["#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#000000", "#999999", "#F0E442"]
ROLE = alt.Color("line:N", title="role", scale=alt.Scale(range=OKABE_ITO))


def coordinate_chart(found: Coordinates, findings: list[Finding], axis: Axis = "depth") -> alt.VConcatChart:
    """The paper's figure, and under it what the paper has not: one column per parameterization; above, the last stream over
    size, a line per step; below, how far each role's update alone moves it."""
    rows = [alt.hconcat(*row, spacing=18) for row in coordinate_panels(found, findings, axis)]
    chart: alt.VConcatChart = (
        alt.vconcat(*rows, spacing=26)
        .resolve_scale(color="independent", shape="independent")
        .properties(
            title=alt.Title(f"Does training stay alike as the model grows in {axis}?", anchor="start", fontSize=15)
        )
    )
    return chart


def coordinate_panels(
    found: Coordinates, findings: list[Finding], axis: Axis = "depth"
) -> tuple[list[alt.Chart], list[alt.Chart]]:
    """(last stream over size, effects of the roles over size), a panel per parameterization in each."""
    found = found.along(axis)
    columns = found.stream["rules"].unique(maintain_order=True).to_list()
    words = {rules: overall([f for f in findings if (f.rules, f.axis) == (rules, axis)]) for rules in columns}
    stream, roles = _last_stream(found, axis), _role_effects(found, axis)

    def panel(frame: pl.DataFrame, rules: str, colour: alt.Color, title: str, what: str) -> alt.Chart:
        mine = frame.filter(pl.col("rules") == rules)
        return _panel(mine, axis, frame, colour, title, rules == columns[0], what)

    above = [panel(stream, r, STEP, f"{r}: {words[r]}", "RMS of last stream") for r in columns]
    return above, [panel(roles, r, ROLE, f"{r}: {_blamed(findings, r, axis)}", "moved by one role") for r in columns]


def _panel(
    points: pl.DataFrame, axis: Axis, everything: pl.DataFrame, colour: alt.Color, title: str, first: bool, what: str
) -> alt.Chart:
    """Log–log lines; all panels of a row share their scales."""
    sizes = sorted(everything["size"].unique().to_list()) or [1, 2]
    low, high = _span(everything["value"])
    y = alt.Y(
        "value:Q",
        title=f"{what} (RMS)" if "RMS" not in what else what,
        scale=alt.Scale(type="log", domain=[low / 1.15, high * 1.15], nice=False),
        axis=alt.Axis(tickCount=5, format="~g", title=None if not first else alt.Undefined),
    )
    x = alt.X(
        "size:Q",
        title="depth L (layers)" if axis == "depth" else "width N",
        scale=alt.Scale(type="log", base=2, domain=[sizes[0] / 1.08, sizes[-1] * 1.08]),
        axis=alt.Axis(values=sizes, format="d", labelOverlap="greedy"),
    )
    chart, hidden = alt.Chart(points).mark_line(point=alt.OverlayMarkDef(size=28)), hiding("line")
    tips = ["rules:N", "line:N", "size:Q", alt.Tooltip("value:Q", format=".3g")]
    encoded = chart.encode(x=x, y=y, color=colour, opacity=seen(hidden), tooltip=tips).add_params(hidden)
    drawn: alt.Chart = encoded.properties(
        width=200, height=180, title=alt.Title(title, anchor="start", frame="group", fontSize=12)
    )
    return drawn


def _span(values: pl.Series) -> tuple[float, float]:
    """The range to draw; any, where nothing can be drawn."""
    kept = values.filter(values.is_finite() & (values > 0)).to_numpy()
    return (float(kept.min()), float(kept.max())) if len(kept) else (0.1, 1.0)


def _blamed(findings: list[Finding], rules: str, axis: Axis) -> str:
    roles = [f for f in findings if (f.rules, f.axis) == (rules, axis) and "→" in f.quantity]
    names = [f.quantity.split(" →")[0] for f in roles if f.word == "FAIL"]
    if names:
        return f"{' and '.join(names)} fail" if len(names) <= 2 else f"{len(names)} roles fail"
    return "all roles pass" if all(f.word == "PASS" for f in roles) else "no role fails, some are unclear"


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


def laziness_chart(frame: pl.DataFrame, verdicts: list[LazyVerdict]) -> alt.LayerChart:
    """Median and quartiles over seeds; triangles where float32 would have overflowed."""
    labels = {
        v.rules: f"{v.rules}  L^{v.slope.value:+.2f} {v.word}" if v.slope else f"{v.rules} {v.word}" for v in verdicts
    }
    quartiles = frame.group_by("rules", "depth", maintain_order=True).agg(
        low=pl.col("ratio").quantile(0.25),
        middle=pl.col("ratio").median(),
        high=pl.col("ratio").quantile(0.75),
        overflows=pl.col("overflows").any(),
    )
    points = quartiles.with_columns(line=pl.col("rules").replace_strict(labels))
    depths = sorted(frame["depth"].unique().to_list())
    x = alt.X(
        "depth:Q",
        title="depth L (blocks)",
        scale=alt.Scale(type="log", base=2),
        axis=alt.Axis(values=depths, format="d"),
    )
    low, high = _span(pl.concat([points["low"], points["high"].rename("low")]))
    y = alt.Y(
        "middle:Q",
        title="|Δh - Δh_lin| / |Δh_lin|",
        scale=alt.Scale(type="log", domain=[low / 1.2, high * 1.2], nice=False),
        axis=alt.Axis(format="~e", tickCount=4),
    )
    colour = alt.Color(
        "line:N",
        title=None,
        sort=list(labels.values()),
        scale=alt.Scale(range=OKABE_ITO),
        legend=alt.Legend(labelLimit=320, symbolOpacity=1),
    )
    hidden = hiding("line")
    base = alt.Chart(points).encode(x=x, color=colour, opacity=seen(hidden))
    band = base.mark_area().encode(
        opacity=seen(hidden, 0.2), y=alt.Y("low:Q", title="|Δh - Δh_lin| / |Δh_lin|"), y2="high:Q"
    )
    line = base.mark_line().encode(y=y).add_params(hidden)
    shape = alt.Shape(
        "overflows:N",
        scale=alt.Scale(domain=[False, True], range=["circle", "triangle-up"]),
        legend=None,
    )
    marks = base.mark_point(filled=True).encode(
        size=alt.condition("datum.overflows", alt.value(150), alt.value(45)),
        y=y,
        shape=shape,
        tooltip=["rules:N", "depth:Q", "middle:Q"],
    )
    title = alt.Title(
        "How nonlinearly does a block still learn?",
        subtitle="median and quartiles over seeds; ▲ the forward pass overflows float32",
        anchor="start",
    )
    chart: alt.LayerChart = (band + line + marks).properties(width=460, height=300, title=title)
    return chart


def transfer_chart(frame: pl.DataFrame, found: list[Transfer]) -> alt.HConcatChart:
    """Loss over the hyperparameter: a column per parameterization, a line per shape, its best value marked, the base's drawn
    down; what diverged lies on top as triangles."""
    name = found[0].hyperparameter
    varied = "depth" if frame["depth"].n_unique() > 1 else "width"
    means = (
        frame.group_by("rules", varied, name, maintain_order=True)
        .agg(loss=pl.col("loss").mean())
        .rename({varied: "size"})
    )
    finite = means.filter(pl.col("loss").is_finite())
    low, high = _span(finite["loss"].sort().head(-(-finite.height * 19 // 20)))  # one run in twenty may stand out
    top = high + 0.08 * (high - low)
    shown = finite.with_columns(pl.col("loss").clip(upper_bound=top))
    lost = means.filter(~pl.col("loss").is_finite()).with_columns(loss=pl.lit(top))
    columns = [
        _transfer_panel(shown, lost, t, (low - 0.03 * (high - low), top), varied, i == 0) for i, t in enumerate(found)
    ]
    chart: alt.HConcatChart = alt.hconcat(*columns, spacing=18).properties(
        title=alt.Title(f"Does the best {name} at the base stay the best?", anchor="start", fontSize=15)
    )
    return chart


def _transfer_panel(
    shown: pl.DataFrame, lost: pl.DataFrame, t: Transfer, span: tuple[float, float], varied: str, first: bool
) -> alt.LayerChart:
    mine, dead = (f.filter(pl.col("rules") == t.rules) for f in (shown, lost))
    best = mine.sort("loss").group_by("size", maintain_order=True).first()
    sizes = sorted(shown["size"].unique().to_list())
    values = sorted(pl.concat([shown, lost])[t.hyperparameter].unique().to_list()) or [1, 2]
    x = alt.X(
        f"{t.hyperparameter}:Q",
        title=f"base {t.hyperparameter}",
        scale=alt.Scale(type="log", base=2, domain=[values[0] / 1.1, values[-1] * 1.1]),
        axis=alt.Axis(
            values=values,
            labelExpr="'2^' + format(log(datum.value) / LN2, '.3~g')",
            labelOverlap="greedy",
            labelFontSize=9,
        ),
    )
    y = alt.Y(
        "loss:Q",
        title="loss" if first else None,
        scale=alt.Scale(domain=list(span), nice=False),
        axis=alt.Axis(labels=first, tickCount=5),
    )
    colour = alt.Color("size:O", title=varied, scale=alt.Scale(scheme="viridis", domain=sizes))
    tips = [
        f"{varied}:Q" if varied in mine.columns else "size:O",
        f"{t.hyperparameter}:Q",
        alt.Tooltip("loss:Q", format=".4f"),
    ]
    rule = alt.Chart(pl.DataFrame({t.hyperparameter: [t.best]})).mark_rule(strokeDash=[4, 4], color="#777").encode(x=x)
    lines = alt.Chart(mine).mark_line(point=alt.OverlayMarkDef(size=22)).encode(x=x, y=y, color=colour, tooltip=tips)
    stars = alt.Chart(best).mark_point(shape="diamond", filled=True, size=110).encode(x=x, y=y, color=colour)
    triangles = alt.Chart(dead).mark_point(shape="triangle-up", filled=True, size=60).encode(x=x, y=y, color=colour)
    title = alt.Title(f"{t.rules}: {t.word}", subtitle=t.why or " ", anchor="start", frame="group", fontSize=12)
    panel: alt.LayerChart = (rule + lines + stars + triangles).properties(width=240, height=240, title=title)
    return panel
