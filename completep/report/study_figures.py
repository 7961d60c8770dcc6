"""The studies' pictures, laid out as in the paper: frames in, panels out.

A figure is a row of panels. On paper they stand side by side; on a phone each has the full width. In every panel a click on
the legend hides a series.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import altair as alt
import polars as pl

from completep import paper
from completep.measure.transfer import Transfer
from completep.report import check_figures
from completep.report.check_figures import OKABE_ITO
from completep.report.figures import hiding, seen
from completep.study.design import Outcome, Study
from completep.study.findings import Shapes, named

Panel = Any  # altair's charts: a layer of marks, or several
WIDTH, HEIGHT = 250, 230
SYMBOL = {"lr": "base learning rate η", "std": "base init std σ", "eps": "base ε", "tau": "τ", "weight_decay": "base λ"}
ALWAYS = dict(
    zip(("mup", "alpha=0.5", "completep", "sp", "flat-eps=1"), OKABE_ITO, strict=False)
)  # a colour means the same everywhere


@dataclass(frozen=True)
class Figure:
    """Panels that belong together."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    columns: int = 4

    def chart(self) -> Panel:
        """All in one, for a file."""
        joined: Panel = (
            alt.concat(*self.panels, columns=self.columns, spacing=22)
            .resolve_scale(color="independent", shape="independent", opacity="independent")
            .properties(title=alt.Title(self.title, anchor="start", fontSize=15))
        )
        return joined


def figures(study: Study, data: Any, outcome: Outcome) -> list[Figure]:
    return DRAWN[study.name](study, data, outcome)


# What panels are made of --------------------------------------------------------------------------------------------------------


def ordered(field: str, title: str, values: Sequence[Any]) -> alt.Color:
    """An ordered quantity, as depth: viridis without its palest end reads in grey, in print and to every eye."""
    shades = ["#440154", "#3b528b", "#21918c", "#5ec962", "#c2b32a"]
    places = [round(i * (len(shades) - 1) / max(1, len(values) - 1)) for i in range(len(values))]
    colours = [shades[p] for p in places] if len(values) <= len(shades) else alt.Undefined
    scale = (
        alt.Scale(domain=list(values), range=colours)
        if len(values) <= len(shades)
        else alt.Scale(domain=list(values), scheme="viridis")
    )
    return alt.Color(f"{field}:O", title=title, scale=scale, legend=alt.Legend(orient="bottom", symbolStrokeWidth=3))


def by_rules(rules: Sequence[str], field: str = "label") -> alt.Color:
    scale = alt.Scale(
        domain=[named(r) for r in rules], range=[ALWAYS.get(r, OKABE_ITO[i]) for i, r in enumerate(rules)]
    )
    return alt.Color(
        f"{field}:N", title=None, scale=scale, legend=alt.Legend(orient="bottom", labelLimit=200, symbolStrokeWidth=3)
    )


def log2_axis(field: str, values: Sequence[float], title: str) -> alt.X:
    exact = all(abs(math.log2(v) - round(math.log2(v))) < 1e-9 for v in values)
    label = "'2^' + format(log(datum.value) / LN2, '.3~g')" if exact else "format(datum.value, '.2~g')"
    return alt.X(
        f"{field}:Q", title=title, scale=alt.Scale(type="log", base=2, domain=[min(values) / 1.15, max(values) * 1.15]),
        axis=alt.Axis(values=list(values), labelExpr=label, labelOverlap="greedy", grid=False),
    )  # fmt: skip


def loss_axis(span: tuple[float, float], title: str | None = "validation loss (nats per token)") -> alt.Y:
    return alt.Y("loss:Q", title=title, scale=alt.Scale(domain=list(span), nice=False), axis=alt.Axis(tickCount=5))


def span_of(losses: pl.Series, outliers: float = 0.05) -> tuple[float, float]:
    """What to show of the losses: one in twenty may stand out, and what diverged lies on the upper edge."""
    kept = losses.drop_nulls().filter(losses.drop_nulls().is_finite())
    if kept.is_empty():
        return 0.0, 1.0
    low, high = float(kept.min()), float(kept.quantile(1 - outliers, "higher"))  # type: ignore[arg-type]
    room = max(high - low, 0.01 * abs(low))
    return low - 0.05 * room, high + 0.1 * room


def curves(
    frame: pl.DataFrame, x: alt.X, field: str, colour: alt.Color, line: str, title: str, why: str | None,
    span: tuple[float, float], rule: float | None = None, first: bool = True,
) -> Panel:  # fmt: skip
    """Loss over a hyperparameter, a line per series: the best marked, what diverged as triangles on the upper edge."""
    top = span[1]
    finite = frame.filter(pl.col("loss").is_finite())
    lost = frame.filter(~pl.col("loss").is_finite()).with_columns(loss=pl.lit(top))
    shown = finite.with_columns(actual=pl.col("loss"), loss=pl.col("loss").clip(upper_bound=top))
    best = finite.sort("loss").group_by(line, maintain_order=True).first()
    y, hidden = loss_axis(span, "validation loss (nats per token)" if first else None), hiding(line)
    tips = [
        alt.Tooltip(f"{line}:N"),
        alt.Tooltip(f"{field}:Q", format=".4~g"),
        alt.Tooltip("actual:Q", title="loss", format=".4f"),
    ]
    layers = []
    if rule is not None:
        layers.append(alt.Chart(pl.DataFrame({field: [rule]})).mark_rule(strokeDash=[4, 4], color="#888").encode(x=x))
    layers.append(
        alt.Chart(shown)
        .mark_line(point=alt.OverlayMarkDef(size=24))
        .encode(x=x, y=y, color=colour, opacity=seen(hidden), tooltip=tips)
        .add_params(hidden)
    )
    layers.append(
        alt.Chart(best)
        .mark_point(shape="diamond", filled=True, size=120)
        .encode(x=x, y=y, color=colour, opacity=seen(hidden))
    )
    if not lost.is_empty():
        layers.append(
            alt.Chart(lost)
            .mark_point(shape="triangle-up", filled=True, size=70)
            .encode(x=x, y=y, color=colour, opacity=seen(hidden))
        )
    panel: Panel = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=heading(title, why))
    return panel


def heading(title: str, why: str | None = None) -> alt.Title:
    """A panel's title, its subtitle broken into lines that fit; an empty one keeps its place."""
    plain = partial(alt.Title, title, anchor="start", frame="group", fontSize=12)
    if why is None:
        return plain()
    lines: list[str] = []
    for word in why.split():
        if lines and len(lines[-1]) + len(word) < 42:
            lines[-1] += " " + word
        else:
            lines.append(word)
    lines += [" "] * (2 - len(lines))  # so that panels side by side stand level
    return plain(subtitle=lines, subtitleFontSize=10)


# The studies --------------------------------------------------------------------------------------------------------------------


def transfer(study: Study, frame: pl.DataFrame, outcome: Outcome) -> list[Figure]:
    """A column per parameterization, and the paper's last column: the loss when the base's best is used at every depth."""
    verdicts: list[Transfer] = outcome.detail
    name = verdicts[0].hyperparameter
    means = (
        frame.filter(pl.col("loss").is_not_null())
        .group_by("rules", "depth", name)
        .agg(loss=pl.col("loss").mean())
        .sort("rules", "depth", name)
    )
    depths, values = sorted(means["depth"].unique().to_list()), sorted(means[name].unique().to_list())
    span, x = span_of(means["loss"]), log2_axis(name, values, SYMBOL[name])
    panels: list[Panel] = [
        curves(means.filter(pl.col("rules") == t.rules), x, name, ordered("depth", "depth L", depths), "depth",
               f"{named(t.rules)}: {t.word}", t.why, span, t.best, i == 0)
        for i, t in enumerate(verdicts)
    ]  # fmt: skip
    return [Figure(study.name, study.question, (*panels, at_base_best(verdicts, name)))]


def at_base_best(verdicts: Sequence[Transfer], name: str) -> Panel:
    rows = []
    for t in verdicts:
        rows += [{"label": named(t.rules), "depth": t.base.depth, "loss": t.best_loss}]
        rows += [
            {"label": named(t.rules), "depth": s.shape.depth, "loss": s.loss} for s in t.shapes if math.isfinite(s.loss)
        ]
    points = pl.DataFrame(rows, infer_schema_length=None)
    hidden, depths = hiding("label"), sorted(points["depth"].unique().to_list())
    x = alt.X(
        "depth:Q",
        title="depth L (layers)",
        scale=alt.Scale(type="log", base=2),
        axis=alt.Axis(values=depths, format="d", grid=False),
    )
    y = alt.Y("loss:Q", title=None, scale=alt.Scale(zero=False, nice=False, padding=12), axis=alt.Axis(tickCount=5))
    colour = by_rules([t.rules for t in verdicts])
    lines = alt.Chart(points).mark_line(point=alt.OverlayMarkDef(size=50), strokeWidth=2.5)
    drawn = lines.encode(
        x=x,
        y=y,
        color=colour,
        opacity=seen(hidden),
        tooltip=["label:N", "depth:Q", alt.Tooltip("loss:Q", format=".4f")],
    )
    panel: Panel = alt.layer(drawn.add_params(hidden)).properties(
        width=WIDTH,
        height=HEIGHT,
        title=heading("Tuned at the base only", f"loss with the base's best {name} at every depth"),
    )
    return panel


def eps(study: Study, frame: pl.DataFrame, outcome: Outcome) -> list[Figure]:
    means = (
        frame.filter(pl.col("loss").is_not_null())
        .group_by("rules", "depth", "eps")
        .agg(loss=pl.col("loss").mean())
        .sort("rules", "depth", "eps")
    )
    depths, values, span = (
        sorted(means["depth"].unique().to_list()),
        sorted(means["eps"].unique().to_list()),
        span_of(means["loss"]),
    )
    x = alt.X(
        "eps:Q", title=SYMBOL["eps"], scale=alt.Scale(type="log"), axis=alt.Axis(values=values, format="~e", grid=False)
    )
    titles = {"completep": "CompleteP, with the depth rule for ε"}
    colour = ordered("depth", "depth L", depths)
    panels = [
        curves(
            means.filter(pl.col("rules") == r),
            x,
            "eps",
            colour,
            "depth",
            titles.get(r, named(r)),
            None,
            span,
            None,
            i == 0,
        )
        for i, r in enumerate(map(str, study.axes["rules"]))
    ]
    return [Figure(study.name, study.question, tuple(panels))]


def dynamics(study: Study, frame: pl.DataFrame, outcome: Outcome) -> list[Figure]:
    """A figure per learning rate, a column per parameterization: loss over steps."""
    smooth: pl.DataFrame = outcome.detail
    found = []
    depths = sorted(smooth["depth"].unique().to_list())
    for i, lr in enumerate(sorted(smooth["lr"].unique().to_list())):
        part = smooth.filter((pl.col("lr") == lr) & (pl.col("step") > 0.1 * pl.col("step").max()))
        span = span_of(part["loss"], 0.02)
        panels: list[Panel] = []
        for r in study.axes["rules"]:
            hidden, mine = hiding("depth"), part.filter(pl.col("rules") == r)
            x = alt.X("step:Q", title="training step", axis=alt.Axis(grid=False))
            line = alt.Chart(mine).mark_line(clip=True).encode(
                x=x, y=loss_axis(span, "training loss (nats per token)" if not panels else None), color=ordered("depth", "depth L", depths),
                opacity=seen(hidden), tooltip=["depth:O", "step:Q", alt.Tooltip("loss:Q", format=".4f")],
            )  # fmt: skip
            panels.append(
                alt.layer(line.add_params(hidden)).properties(width=WIDTH, height=HEIGHT, title=heading(named(str(r))))
            )
        found.append(Figure(f"{study.name}-{i + 1}", f"Training loss at η = 2^{math.log2(lr):g}", tuple(panels)))
    return found


def shape(study: Study, frame: pl.DataFrame, outcome: Outcome) -> list[Figure]:
    """(a-c) loss increase over N:L for each size, (d) the law, (e) savings by depth, (f) the shapes within 1 %."""
    found: Shapes = outcome.detail
    points = found.points.with_columns(
        label=pl.col("rules").map_elements(named, return_dtype=pl.String), percent=100 * pl.col("increase")
    )
    rules = [str(r) for r in study.axes["rules"] if r in points["rules"]]
    colour = by_rules(rules)
    panels: list[Panel] = []
    labels = points.sort("parameters")["size"].unique(maintain_order=True).to_list()
    for size in labels:
        mine = points.filter(pl.col("size") == size).sort("ratio")
        y = alt.Y(
            "percent:Q",
            title="loss above CompleteP's law (%)" if not panels else None,
            axis=alt.Axis(tickCount=5),
            scale=alt.Scale(nice=False, padding=10),
        )
        panels.append(
            _lines(
                mine,
                _ratio(),
                y,
                colour,
                f"{size} parameters",
                ["label:N", "width:Q", "depth:Q", alt.Tooltip("percent:Q", format=".2f")],
            )
        )
    return [
        Figure(f"{study.name}-1", "Which N:L is best?", tuple(panels)),
        Figure(
            f"{study.name}-2",
            "What CompleteP's shapes save",
            (_law(points, found, colour), _savings(points, labels), _range(found, labels, rules, colour)),
        ),
    ]


def _ratio() -> alt.X:
    return alt.X(
        "ratio:Q",
        title="N:L",
        scale=alt.Scale(type="log", nice=False, padding=10),
        axis=alt.Axis(tickCount=3, format="~g", grid=False),
    )


def _lines(
    frame: pl.DataFrame,
    x: alt.X,
    y: alt.Y,
    colour: alt.Color,
    title: str,
    tips: list[Any],
    field: str = "label",
    why: str | None = None,
) -> Panel:
    """Lines with their points; what diverged lies on the upper edge as triangles."""
    hidden, measured = hiding(field), "percent"
    finite = frame.filter(pl.col(measured).is_finite())
    lines = alt.Chart(finite).mark_line(point=alt.OverlayMarkDef(size=45)).add_params(hidden)
    layers = [lines.encode(x=x, y=y, color=colour, opacity=seen(hidden), tooltip=tips)]
    lost = frame.filter(~pl.col(measured).is_finite()).with_columns(pl.lit(finite[measured].max()).alias(measured))
    if not lost.is_empty():
        marks = alt.Chart(lost).mark_point(shape="triangle-up", filled=True, size=80)
        layers.append(marks.encode(x=x, y=y, color=colour, opacity=seen(hidden), tooltip=tips[:-1]))
    panel: Panel = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=heading(title, why))
    return panel


def _law(points: pl.DataFrame, found: Shapes, colour: alt.Color) -> Panel:
    hidden = hiding("label")
    x = alt.X(
        "flops:Q",
        title="training FLOPs",
        scale=alt.Scale(type="log", nice=False, padding=12),
        axis=alt.Axis(tickCount=3, format="~e", grid=False),
    )
    y = alt.Y(
        "loss:Q",
        title="validation loss (nats per token)",
        scale=alt.Scale(type="log", nice=False, padding=12),
        axis=alt.Axis(tickCount=5, format="~g"),
    )
    ends = [float(points["flops"].min()), float(points["flops"].max())]  # type: ignore[arg-type]
    law = pl.DataFrame({"flops": ends, "loss": found.law.loss(ends)})
    line = alt.Chart(law).mark_line(strokeDash=[5, 3], color="#888").encode(x=x, y=y)
    marks = (
        alt.Chart(points)
        .mark_point(filled=True, size=45)
        .encode(x=x, y=y, color=colour, opacity=seen(hidden), tooltip=["label:N", "width:Q", "depth:Q", "loss:Q"])
    )
    told = f"dashed: CompleteP's best, loss = (F/{found.law.a:.3g})^-{found.law.b:.3f}"
    panel: Panel = alt.layer(line, marks.add_params(hidden)).properties(
        width=WIDTH, height=HEIGHT, title=heading("Scaling law", told)
    )
    return panel


def _savings(points: pl.DataFrame, labels: list[str]) -> Panel:
    mine = (
        points.filter((pl.col("rules") == "completep") & pl.col("savings").is_finite())
        .with_columns(percent=100 * pl.col("savings"))
        .sort("depth")
    )
    x = alt.X(
        "depth:Q",
        title="depth L (layers)",
        scale=alt.Scale(type="log", base=2, padding=10),
        axis=alt.Axis(grid=False, format="d", values=sorted(set(mine["depth"])), labelOverlap="greedy"),
    )
    y = alt.Y(
        "percent:Q",
        title="FLOPs saved over muP (%)",
        axis=alt.Axis(tickCount=5),
        scale=alt.Scale(nice=False, padding=10),
    )
    return _lines(
        mine,
        x,
        y,
        ordered("size", "size", labels),
        "What CompleteP saves",
        ["size:N", "depth:Q", alt.Tooltip("percent:Q", format=".1f")],
        "size",
        "",
    )


def _range(found: Shapes, labels: list[str], rules: list[str], colour: alt.Color) -> Panel:
    rows = [
        {"label": named(r), "size": size, "low": at.low, "high": at.high, "best": at.best}
        for (r, size), at in found.ranges.items() if math.isfinite(at.low)
    ]  # fmt: skip
    hidden, beside = hiding("label"), alt.XOffset("label:N", sort=[named(r) for r in rules])
    frame = pl.DataFrame(
        rows, schema={"label": pl.String, "size": pl.String, "low": pl.Float64, "high": pl.Float64, "best": pl.Float64}
    )
    x = alt.X("size:N", title="parameters", sort=labels, axis=alt.Axis(labelAngle=0))
    y = alt.Y("low:Q", title="N:L", scale=alt.Scale(type="log", padding=10), axis=alt.Axis(format="~g", tickCount=5))
    bars = (
        alt.Chart(frame)
        .mark_bar(size=14, opacity=0.6)
        .encode(
            x=x,
            xOffset=beside,
            y=y,
            y2="high:Q",
            color=colour,
            opacity=seen(hidden),
            tooltip=["label:N", "size:N", "low:Q", "high:Q"],
        )
    )
    ticks = (
        alt.Chart(frame)
        .mark_tick(thickness=3, size=14, color="#222")
        .encode(x=x, xOffset=beside, y="best:Q", opacity=seen(hidden))
    )
    panel: Panel = alt.layer(bars.add_params(hidden), ticks).properties(
        width=WIDTH,
        height=HEIGHT,
        title=heading(
            "Shapes within 1 % of the best", "cubic through each size, cut at the shapes tried; the tick is its minimum"
        ),
    )
    return panel


def tau(study: Study, frame: pl.DataFrame, outcome: Outcome) -> list[Figure]:
    """A column per shape, a line per parameterization."""
    means = (
        frame.filter(pl.col("loss").is_not_null())
        .group_by("rules", "shape", "tau")
        .agg(loss=pl.col("loss").mean())
        .sort("rules", "tau")
    )
    means = means.with_columns(label=pl.col("rules").map_elements(named, return_dtype=pl.String))
    x = log2_axis("tau", sorted(means["tau"].unique().to_list()), "τ = 1 / (η λ steps)")
    colour = by_rules([str(r) for r in study.axes["rules"]])
    panels: list[Panel] = []
    for at in study.axes["shape"]:
        part = means.filter(pl.col("shape") == at)
        panels.append(
            curves(
                part,
                x,
                "tau",
                colour,
                "label",
                f"N × L = {str(at).replace('x', ' × ')}",
                "dashed: the paper's τ",
                span_of(part["loss"]),
                paper.TAU,
                not panels,
            )
        )
    return [Figure(study.name, study.question, tuple(panels))]


def grid(study: Study, frame: pl.DataFrame, outcome: Outcome) -> list[Figure]:
    """Loss over λ, a line per η; and over τ, where the minima should lie on one another."""
    means = frame.filter(pl.col("loss").is_not_null()).with_columns(
        tau=1 / (pl.col("lr") * pl.col("weight_decay") * pl.col("steps"))
    )
    lrs = sorted(means["lr"].unique().to_list())
    names = [f"2^{math.log2(v):g}" for v in lrs]
    means = means.with_columns(
        eta=pl.col("lr").replace_strict(dict(zip(lrs, names, strict=True)), return_dtype=pl.String)
    )
    means = means.group_by("rules", "width", "eta", "weight_decay", "tau").agg(loss=pl.col("loss").mean()).sort("tau")
    panels: list[Panel] = []
    for (rules, width), part in means.partition_by("rules", "width", as_dict=True, maintain_order=True).items():
        for field in ("weight_decay", "tau"):
            values = sorted(part[field].unique().to_list())
            title = "base weight decay λ" if field == "weight_decay" else "τ = 1 / (η λ steps)"
            x = alt.X(
                f"{field}:Q",
                title=title,
                scale=alt.Scale(type="log", base=2, domain=[values[0] / 1.2, values[-1] * 1.2]),
                axis=alt.Axis(format=".2~g", tickCount=5, grid=False),
            )
            panels.append(
                curves(
                    part.sort(field),
                    x,
                    field,
                    ordered("eta", "η", names),
                    "eta",
                    f"{named(str(rules))}, N = {width}, by {'λ' if field == 'weight_decay' else 'τ'}",
                    None,
                    span_of(part["loss"]),
                    None,
                    not panels,
                )
            )
    return [Figure(study.name, study.question, tuple(panels))]


def horizon(study: Study, frame: pl.DataFrame, outcome: Outcome) -> list[Figure]:
    """A dot per parameterization and shape."""
    points = outcome.table.with_columns(
        label=pl.col("rules").map_elements(named, return_dtype=pl.String),
        shape=pl.format("{} × {}", "width", "depth"),
        ended=pl.when(pl.col("loss").is_finite()).then(pl.lit("done")).otherwise(pl.lit("diverged")),
    )
    points = points.with_columns(pl.col("loss").fill_nan(pl.col("loss").filter(pl.col("loss").is_finite()).max()))
    hidden = hiding("label")
    x = alt.X(
        "loss:Q",
        title="validation loss (nats per token)",
        scale=alt.Scale(zero=False, padding=14),
        axis=alt.Axis(tickCount=6),
    )
    y = alt.Y("shape:N", title="N × L", sort=points["shape"].unique(maintain_order=True).to_list())
    dots = (
        alt.Chart(points)
        .mark_point(filled=True, size=90)
        .encode(
            x=x,
            y=y,
            yOffset=alt.YOffset("label:N", sort=[named(str(r)) for r in study.axes["rules"]]),
            color=by_rules([str(r) for r in study.axes["rules"]]),
            opacity=seen(hidden),
            shape=alt.Shape(
                "ended:N", scale=alt.Scale(domain=["done", "diverged"], range=["circle", "triangle-up"]), legend=None
            ),
            tooltip=["label:N", "shape:N", "ended:N", alt.Tooltip("loss:Q", format=".4f")],
        )
    )
    panel = alt.layer(dots.add_params(hidden)).properties(
        width=2 * WIDTH, height=alt.Step(16), title=heading("Loss by shape")
    )
    return [Figure(study.name, study.question, (panel,))]


def downstream(study: Study, frame: pl.DataFrame, outcome: Outcome) -> list[Figure]:
    """A panel per shape: a dot with its standard error for every task and parameterization."""
    points = outcome.table.with_columns(
        label=pl.col("rules").map_elements(named, return_dtype=pl.String),
        low=pl.col("score") - pl.col("stderr"),
        high=pl.col("score") + pl.col("stderr"),
    )
    panels: list[Panel] = []
    for at in study.axes["shape"]:
        hidden, mine = hiding("label"), points.filter(pl.col("shape") == at)
        y = alt.Y("task:N", title=None, sort=mine["task"].unique(maintain_order=True).to_list())
        colour = by_rules([str(r) for r in study.axes["rules"]])
        base = alt.Chart(mine).encode(y=y, yOffset="label:N", color=colour, opacity=seen(hidden))
        dots = base.mark_point(filled=True, size=60).encode(
            x=alt.X("score:Q", title="accuracy (%)", scale=alt.Scale(zero=False)),
            tooltip=["label:N", "task:N", "score:Q", "stderr:Q"],
        )
        bars = base.mark_rule().encode(x="low:Q", x2="high:Q")
        title = heading(f"N × L = {str(at).replace('x', ' × ')}", "bars: one standard error")
        panels.append(
            alt.layer(bars, dots.add_params(hidden)).properties(width=WIDTH, height=alt.Step(12), title=title)
        )
    return [Figure(study.name, study.question, tuple(panels))]


def coordinates(study: Study, found: Any, outcome: Outcome) -> list[Figure]:
    above, below = check_figures.coordinate_panels(found, outcome.detail, "depth")
    return [
        Figure(f"{study.name}-1", study.question, tuple(above), columns=2),
        Figure(
            f"{study.name}-2",
            "How far does each role's update alone move the stream or the logits?",
            tuple(below),
            columns=2,
        ),
    ]


def laziness(study: Study, frame: pl.DataFrame, outcome: Outcome) -> list[Figure]:
    told = heading("Median and quartiles over seeds; ▲ the forward pass overflows float32")
    chart = check_figures.laziness_chart(frame, outcome.detail).properties(title=told)
    return [Figure(study.name, study.question, (chart,))]


DRAWN: dict[str, Callable[[Study, Any, Outcome], list[Figure]]] = {
    "demo": transfer,
    "lr-transfer": transfer,
    "init-transfer": transfer,
    "lr-transfer-compute-optimal": transfer,
    "eps-transfer": eps,
    "dynamics": dynamics,
    "coordinates": coordinates,
    "laziness": laziness,
    "shape": shape,
    "tau": tau,
    "lr-wd-grid": grid,
    "horizon": horizon,
    "downstream": downstream,
}
