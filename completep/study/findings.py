"""From a study's losses to its outcome, beside the paper's claim. Frames in, `Outcome` out.

Losses closer than `TELL` are not told apart: seeds at this size differ by about as much.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from completep import paper
from completep.config import Shape
from completep.errors import UserError
from completep.measure import laziness, transfer, verdict
from completep.measure.grid import Coordinates
from completep.measure.optimum import Interval, average, curve, height_at, vertex
from completep.study.design import Agreement, Outcome
from completep.study.laws import PowerLaw, ShapeRange, fit_power_law, flop_savings, frontier, loss_increase, shape_range
from completep.units import human

TELL = 0.005  # of the loss
COMPETITIVE = 0.01  # of the loss: the paper's own margin for a good shape, here for a good ε too
SAME_SIZE = 1.35  # non-embedding parameters within this ratio are one size
UNSEEN: Agreement = "cannot be seen at this scale"
NAMES = {"mup": "muP", "completep": "CompleteP", "sp": "SP", "flat-eps=1": "without the depth rule"}


def named(rules: str) -> str:
    return NAMES.get(rules, rules)


def done(frame: pl.DataFrame) -> pl.DataFrame:
    """The runs that came to an end; without any there is nothing to find."""
    ended = frame.filter(pl.col("loss").is_not_null()) if "loss" in frame.columns else frame.clear()
    if ended.is_empty():
        raise UserError("no run of this study is done yet", fix="run the study; --dry-run shows its runs")
    return ended


def power(value: float) -> str:
    return f"2^{np.log2(value):.1f}"


# Transfer ---------------------------------------------------------------------------------------------------------------------


def find_transfer(hyperparameter: str, base: Shape) -> Callable[[pl.DataFrame], Outcome]:
    """The base's best value at every depth: only CompleteP keeps it, and only there deeper is better."""

    def find(frame: pl.DataFrame) -> Outcome:
        verdicts = judged(frame, hyperparameter, base)
        agreement = _only_completep({t.rules: t.word for t in verdicts})
        agreement, more = _with_depth(agreement, verdicts)
        return Outcome(agreement, "; ".join(_told(t) for t in verdicts) + more, transfer_table(verdicts), verdicts)

    return find


def _with_depth(agreement: Agreement, verdicts: Sequence[transfer.Transfer]) -> tuple[Agreement, str]:
    """The other half of the claim: with the base's best, is deeper better under CompleteP, step by step?"""
    ours = next((t for t in verdicts if t.rules == "completep"), None)
    if ours is None or ours.deeper_is_better is not False:
        return agreement, ""
    losses = {ours.base.depth: ours.best_loss} | {s.shape.depth: s.loss for s in ours.shapes}
    ladder = ", ".join(f"{losses[depth]:.3f} at depth {depth}" for depth in sorted(losses))
    told = f". With it, deeper is not better throughout under CompleteP here: {ladder}"
    return ("agrees in part" if agreement == "agrees" else agreement), told


def judged(frame: pl.DataFrame, hyperparameter: str, base: Shape) -> list[transfer.Transfer]:
    """Against the base; against the smallest shape where the base was left out."""
    ended = done(frame)
    there = ended.filter((pl.col("width") == base.width) & (pl.col("depth") == base.depth)).height
    return transfer.judge(ended, hyperparameter, base if there else None)


def find_transfer_once(base: Shape) -> Callable[[pl.DataFrame], Outcome]:
    """From one seed, without intervals: what becomes of the base's best η in the deepest model?

    FAIL is what one seed can tell: more than 1 % lost to a better η there, or a loss above the base's own. Between CompleteP and
    muP that is plain; alpha=0.5 lies between them and is told, not judged.
    """

    def find(frame: pl.DataFrame) -> Outcome:
        verdicts = judged(frame, "lr", base)
        depth = max((s.shape.depth for t in verdicts for s in t.shapes), default=base.depth)
        deepest = {t.rules: s for t in verdicts for s in t.shapes if s.shape.depth == depth}
        words = {t.rules: _once(t, deepest[t.rules]) for t in verdicts if t.rules in deepest}
        told = f"the η tuned at depth {base.depth} ({power(verdicts[0].best)}) gives at depth {depth} a loss of "
        told += ", ".join(
            f"{at.loss:.2f} under {named(r)} ({at.regret:.1f} % above the best there)" for r, at in deepest.items()
        )
        told += f"; at depth {base.depth} it is {verdicts[0].best_loss:.2f}"
        table = transfer_table(verdicts).drop("verdict", "drift_low", "drift_high", "regret_low", "regret_high")
        said = [replace(t, word=words.get(t.rules, t.word), why=_where(deepest.get(t.rules))) for t in verdicts]
        agreement = _only_completep({r: w for r, w in words.items() if r in ("completep", "mup")})
        agreement, more = _with_depth(agreement, verdicts)
        return Outcome(agreement, told + more, table, said)

    return find


def _once(t: transfer.Transfer, at: transfer.AtShape) -> verdict.Word:
    return "FAIL" if at.regret > 100 * COMPETITIVE or at.loss > t.best_loss * (1 + TELL) else "PASS"


def _where(at: "transfer.AtShape | None") -> str:
    return "" if at is None else f"at depth {at.shape.depth} the base's best is {at.regret:.1f} % above the best"


def _only_completep(words: Mapping[str, str]) -> Agreement:
    others = [word for rules, word in words.items() if rules != "completep"]
    if words.get("completep") == "FAIL":
        return "does not agree"
    return "agrees" if words.get("completep") == "PASS" and others and set(others) == {"FAIL"} else UNSEEN


def _told(t: transfer.Transfer) -> str:
    if not t.shapes:
        return f"{named(t.rules)}: nothing to transfer to"
    deepest = max(t.shapes, key=lambda s: (s.shape.depth, s.shape.width))
    return (
        f"{named(t.rules)} {t.word}: the best {t.hyperparameter} moves by {deepest.drift:+.2f} octaves to depth {deepest.shape.depth}, "
        f"where the base's costs {deepest.regret:.2f} % of the loss"
    )


def transfer_table(verdicts: Sequence[transfer.Transfer]) -> pl.DataFrame:
    """A row per parameterization and shape, the base's first."""
    rows: list[dict[str, Any]] = []
    for t in verdicts:
        base = {"rules": t.rules, "width": t.base.width, "depth": t.base.depth, f"best_{t.hyperparameter}": t.best}
        rows.append(base | {"verdict": "base", "loss_at_base_best": t.best_loss})
        for s in t.shapes:
            drift, regret = (i or Interval(math.nan, math.nan) for i in (s.drift_interval, s.regret_interval))
            rows.append(
                {
                    "rules": t.rules, "width": s.shape.width, "depth": s.shape.depth, f"best_{t.hyperparameter}": s.optimum,
                    "verdict": s.word, "loss_at_base_best": s.loss, "drift_octaves": s.drift, "drift_low": drift.low,
                    "drift_high": drift.high, "regret_percent": s.regret, "regret_low": regret.low, "regret_high": regret.high,
                }
            )  # fmt: skip
    return pl.DataFrame(rows, infer_schema_length=None).fill_nan(None)


def find_optimal_transfer(base_depth: int) -> Callable[[pl.DataFrame], Outcome]:
    """Compute-optimal runs are less sensitive; at the base's best η the deepest CompleteP has the lowest loss."""

    def find(frame: pl.DataFrame) -> Outcome:
        verdicts = judged(frame, "lr", Shape(int(frame["width"][0]), base_depth))
        deepest = max((s.shape.depth for t in verdicts for s in t.shapes), default=base_depth)
        losses = {t.rules: _known_loss(t, frame, deepest) for t in verdicts}
        agreement, told = ranking(losses, f"with the base's best η at depth {deepest}")
        return Outcome(agreement, told, transfer_table(verdicts), verdicts)

    return find


def _known_loss(t: transfer.Transfer, frame: pl.DataFrame, depth: int) -> float | None:
    """The loss at the base's best value; None where nothing near it was tried at this depth."""
    at = next((s for s in t.shapes if s.shape.depth == depth), None)
    tried = done(frame).filter((pl.col("rules") == t.rules) & (pl.col("depth") == depth))["lr"]
    if at is None or tried.is_empty() or not tried.min() <= t.best <= tried.max():  # type: ignore[operator]
        return None
    return at.loss


def ranking(losses: Mapping[str, float | None], where: str) -> tuple[Agreement, str]:
    """Is CompleteP's the lowest loss, by more than can be told apart? NaN or infinite is diverged, None is not known."""
    shown = {r: "unknown" if x is None else f"{x:.4f}" if np.isfinite(x) else "diverged" for r, x in losses.items()}
    told = f"{where}: " + ", ".join(f"{named(r)} {x}" for r, x in shown.items())
    known = {r: x if np.isfinite(x) else np.inf for r, x in losses.items() if x is not None}
    if "completep" not in losses or len(losses) < 2 or len(known) < len(losses):
        return UNSEEN, told
    mine = known.pop("completep")
    best = min(known.values())
    if not np.isfinite(mine):
        return ("does not agree" if np.isfinite(best) else UNSEEN), told
    gap = best / mine - 1
    return ("agrees" if gap > TELL else "does not agree" if gap < -TELL else UNSEEN), told


# Epsilon ----------------------------------------------------------------------------------------------------------------------


def find_eps(frame: pl.DataFrame) -> Outcome:
    """How far up may ε go before the loss rises? The depth rule makes that the same at every depth."""
    frame = done(frame)
    means = frame.group_by("rules", "depth", "eps").agg(loss=pl.col("loss").mean()).sort("rules", "depth", "eps")
    best = means.group_by("depth").agg(best=pl.col("loss").min())
    rows = []
    for (rules, depth), part in means.join(best, on="depth").partition_by("rules", "depth", as_dict=True).items():
        good = part.filter(pl.col("loss") <= pl.col("best") * (1 + COMPETITIVE))["eps"].to_list()
        low, high = (min(good), max(good)) if good else (np.nan, np.nan)
        decades = float(np.log10(high / low))
        rows.append({"rules": rules, "depth": depth, "lowest_good": low, "largest_good": high, "decades": decades})
    table = pl.DataFrame(rows, infer_schema_length=None).sort("rules", "depth")
    deepest = table.filter(pl.col("depth") == pl.col("depth").max())
    reach = {r: x if np.isfinite(x) else 0.0 for r, x in deepest.select("rules", "largest_good").iter_rows()}
    with_rule, without = reach.get("completep"), reach.get("flat-eps=1")
    told = f"at depth {deepest['depth'][0]}, before 1 % of the loss is lost, ε may rise to " + " and to ".join(
        (f"{x:.0e}" if x else "nothing that was tried") + f" {word} the depth rule"
        for x, word in ((with_rule, "with"), (without, "without"))
        if x is not None
    )
    agreement: Agreement = UNSEEN
    if with_rule is not None and without is not None:
        agreement = "agrees" if with_rule > without else "does not agree" if with_rule < without else UNSEEN
    return Outcome(agreement, told, table)


# Dynamics ---------------------------------------------------------------------------------------------------------------------


def find_dynamics(frame: pl.DataFrame) -> Outcome:
    """Who ends below whom, and when do the loss curves of two depths cross for the last time?"""
    frame = done(frame)
    keys = ["rules", "lr", "depth"]
    ends = frame.group_by(*keys, "seed").agg(last=pl.col("step").max())
    whole = int(ends["last"].max())  # type: ignore[arg-type]
    lost = ends.filter(pl.col("last") < whole).select(keys).unique()  # a curve that stops early has diverged
    means = frame.group_by(*keys, "step").agg(loss=pl.col("loss").mean()).sort("step")
    smooth = means.with_columns(loss=pl.col("loss").rolling_mean(3, min_samples=1).over(keys))
    rows = []
    for (rules, lr), part in smooth.partition_by("rules", "lr", as_dict=True).items():
        dead = {d for r, x, d in lost.iter_rows() if (r, x) == (rules, lr)}
        curves = {d: p for (d,), p in part.partition_by("depth", as_dict=True).items()}
        final = {d: math.inf if d in dead else p["loss"][-1] for d, p in curves.items()}
        for low, high in pairwise(sorted(curves)):
            pair = curves[low].join(curves[high], on="step", suffix="_deep")
            behind = pair.filter(pl.col("loss") <= pl.col("loss_deep"))["step"].max()
            better = final[high] < final[low] * (1 - TELL)
            worse = final[high] > final[low] * (1 + TELL)
            rows.append(
                {
                    "rules": rules, "lr": lr, "shallow": low, "deep": high, "shallow_loss": final[low], "deep_loss": final[high],
                    "deeper_is": "better" if better else "worse" if worse else "alike", "last_step_behind": behind,
                }
            )  # fmt: skip
    if not rows:
        raise UserError("one depth has nothing to compare with", fix="give at least two: --set depth=2,8")
    table = pl.DataFrame(rows, infer_schema_length=None).sort("lr", "rules", "shallow")
    return Outcome(*_ordering(table), table, smooth)


def _ordering(table: pl.DataFrame) -> tuple[Agreement, str]:
    """At the tuned η (the lower of the two): deeper is better throughout under CompleteP, and only there."""
    told, found = [], {}
    for (rules, lr), part in table.partition_by("rules", "lr", as_dict=True, maintain_order=True).items():
        steps = [f"{low} → {high} {how}" for low, high, how in part.select("shallow", "deep", "deeper_is").iter_rows()]
        told.append(f"{named(str(rules))} at η = {power(float(str(lr)))}: {', '.join(steps)}")
        found[rules, lr] = set(part["deeper_is"])
    tuned = table["lr"].min()
    ours = found.get(("completep", tuned), set())
    others = [words for (rules, lr), words in found.items() if rules != "completep" and lr == tuned]
    agreement: Agreement = UNSEEN
    if ours:
        only = bool(others) and not any(words == {"better"} for words in others)
        agreement = "does not agree" if "worse" in ours else "agrees" if ours == {"better"} and only else UNSEEN
    return agreement, "; ".join(told)


# Shapes -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shapes:
    """All that the N:L study yields."""

    law: PowerLaw
    points: pl.DataFrame  # a row per rules and shape: size, ratio, loss, increase over the law, savings over muP
    ranges: dict[tuple[str, str], ShapeRange]  # (rules, size) → shapes within 1 %


def sizes(parameters: Sequence[int]) -> dict[int, str]:
    """Parameters → a name for all models of about that size."""
    names: dict[int, str] = {}
    first = 0
    for count in sorted(set(parameters)):
        first = first if first and count / first <= SAME_SIZE else count
        names[count] = f"{first}"
    groups = {name: [c for c, n in names.items() if n == name] for name in names.values()}
    label = {name: human(float(np.mean(counts))) for name, counts in groups.items()}
    return {count: label[name] for count, name in names.items()}


def find_shapes(base: Shape) -> Callable[[pl.DataFrame], Outcome]:
    return partial(_shapes, base.depth)


def _shapes(base_depth: int, frame: pl.DataFrame) -> Outcome:
    """Losses against the frontier of CompleteP, savings over muP by depth, and the range of good shapes."""
    keys = ["rules", "width", "depth", "parameters", "flops"]
    means = done(frame).group_by(keys, maintain_order=True).agg(loss=pl.col("loss").mean())  # NaN where one diverged
    label = sizes(means["parameters"].to_list())
    means = means.with_columns(size=pl.col("parameters").replace_strict(label), ratio=pl.col("width") / pl.col("depth"))
    ours = means.filter((pl.col("rules") == "completep") & pl.col("loss").is_finite())
    if ours["size"].n_unique() < 2:
        raise UserError("a scaling law needs two sizes under completep", fix="leave rules and shape as they are")
    best = frontier(ours)
    law = fit_power_law(best["flops"].to_numpy(), best["loss"].to_numpy())
    means = means.with_columns(increase=pl.Series(loss_increase(means["loss"], law.loss(means["flops"].to_numpy()))))
    reference = means.filter(pl.col("rules") == "mup").select("width", "depth", reference="increase")
    means = means.join(reference, on=["width", "depth"], how="left")
    saved = flop_savings(means["reference"].to_numpy(), means["increase"].to_numpy(), law.b)
    means = means.with_columns(savings=pl.Series(saved), gap=pl.col("reference") - pl.col("increase")).drop("reference")
    ranges = _ranges(means.filter(pl.col("loss").is_finite()))
    agreement, told = _shape_agreement(means, base_depth)
    told += f"; the frontier is (F/{law.a:.3g})^-{law.b:.3f}"
    table = means.join(_range_table(ranges), on=["rules", "size"], how="left").sort("rules", "parameters", "ratio")
    return Outcome(agreement, told, table, Shapes(law, means, ranges))


def _range_table(ranges: Mapping[tuple[str, str], ShapeRange]) -> pl.DataFrame:
    """Where the range ends at a shape that was tried, it is open: the curve may stay below the limit beyond it."""
    rows = [
        {
            "rules": r,
            "size": size,
            "good_from": at.low,
            "good_to": at.high,
            "open_low": at.open_low,
            "open_high": at.open_high,
        }
        for (r, size), at in ranges.items()
    ]
    kinds = {"rules": pl.String, "size": pl.String, "good_from": pl.Float64, "good_to": pl.Float64}
    return pl.DataFrame(rows, schema=kinds | {"open_low": pl.Boolean, "open_high": pl.Boolean})


def _ranges(means: pl.DataFrame) -> dict[tuple[str, str], ShapeRange]:
    """The paper compares every parameterization with CompleteP's best of the size."""
    found = {}
    for (rules, size), part in means.partition_by("rules", "size", as_dict=True).items():
        best = means.filter((pl.col("rules") == "completep") & (pl.col("size") == size))["increase"].min()
        if part["ratio"].n_unique() >= 4 and isinstance(best, float):
            found[str(rules), str(size)] = shape_range(
                part["ratio"], part["increase"], tolerance=COMPETITIVE, best=best
            )
    return found


def _shape_agreement(means: pl.DataFrame, base_depth: int) -> tuple[Agreement, str]:
    """The paper's main claim: the deeper, the more CompleteP saves over muP.

    Asked of shapes deeper than the base: there is nothing to save at its depth, where both are one run, and less below it.
    """
    ours = means.filter(pl.col("rules") == "completep")
    lost = ours.filter(~pl.col("loss").is_finite())
    if not lost.is_empty():
        return "does not agree", f"CompleteP diverged at {lost['width'][0]} × {lost['depth'][0]}"
    both = ours.filter(pl.col("savings").is_finite() & (pl.col("depth") > base_depth)).sort("depth")
    if both["depth"].n_unique() < 3:
        return UNSEEN, "too few shapes deeper than the base were run to an end under both muP and CompleteP"
    x, y = both["depth"].log(2).to_numpy(), both["savings"].to_numpy()
    slope, offset = (float(v) for v in np.polyfit(x, y, 1))
    freedom = len(x) - 2
    spread = x - x.mean()
    error = float(np.sqrt(((y - offset - slope * x) ** 2).sum() / max(freedom, 1) / (spread @ spread)))
    margin = verdict.student(max(freedom, 1), 0.9) * error
    told = (
        f"at the shapes deeper than the base CompleteP saves {100 * y.min():.0f} to {100 * y.max():.0f} % of muP's FLOPs, "
        f"{100 * y[-1]:.0f} % at depth {both['depth'][-1]}; "
        f"that changes by {100 * slope:+.1f} ± {100 * margin:.1f} points a doubling of depth"
    )
    if slope - margin > 0 and both["gap"][-1] > TELL:
        return "agrees", told
    if slope + margin < 0 or both["gap"][-1] < -TELL:
        return "does not agree", told
    return ("agrees in part" if all(both["gap"] > TELL) else UNSEEN), told


# Weight decay -----------------------------------------------------------------------------------------------------------------


def find_tau(frame: pl.DataFrame) -> Outcome:
    """Does one timescale of weight decay suit every parameterization?"""
    frame = done(frame)
    rows = [_bowl(part, at) for at, part in sorted(frame.partition_by("rules", "width", "depth", as_dict=True).items())]
    worst, best = max(row["cost_of_paper_tau_percent"] for row in rows), [row["best_tau"] for row in rows]
    told = f"the paper's τ = {paper.TAU:g} costs at most {worst:.2f} % of the loss; the best lie from {min(best):.2g} to {max(best):.2g}"
    table = pl.DataFrame(rows, infer_schema_length=None)
    values = frame["tau"].to_list()
    if not min(values) <= paper.TAU <= max(values):
        return Outcome(UNSEEN, told + "; it lies outside the values tried", table)
    if worst <= 100 * COMPETITIVE:
        flat = all(row["spread_percent"] <= 100 * COMPETITIVE for row in rows)
        return Outcome(UNSEEN if flat else "agrees", told + ("; but any would do here" if flat else ""), table)
    return Outcome("does not agree", told, table)


def _bowl(part: pl.DataFrame, at: Sequence[Any]) -> dict[str, Any]:
    """One curve over τ: its minimum, what the paper's τ costs there, and how much hangs on τ at all."""
    x, losses = curve(part, "tau")
    heights = average(losses)
    place, lowest, interior = vertex(x, heights)
    row = {"rules": at[0], "width": at[1], "depth": at[2], "best_tau": 2**place, "interior": interior}
    if not np.isfinite(lowest):
        return row | {"cost_of_paper_tau_percent": math.inf, "spread_percent": math.inf}
    cost = height_at(x, heights, float(np.log2(paper.TAU))) / lowest - 1
    spread = float(heights[np.isfinite(heights)].max()) / lowest - 1
    return row | {"cost_of_paper_tau_percent": 100 * cost, "spread_percent": 100 * spread}


def find_grid(frame: pl.DataFrame) -> Outcome:
    """If τ = 1/(η λ steps) is what matters, the best λ halves where η doubles."""
    rows = []
    for (rules, width, lr), part in sorted(done(frame).partition_by("rules", "width", "lr", as_dict=True).items()):
        if part["loss"].is_finite().sum() < 3:
            continue
        x, losses = curve(part, "weight_decay")
        place, lowest, interior = vertex(x, average(losses))
        tau = 1 / (lr * 2**place * part["steps"][0])
        at = {"rules": rules, "width": width, "lr": lr}
        rows.append(at | {"best_weight_decay": 2**place, "best_tau": tau, "interior": interior, "loss": lowest})
    table = pl.DataFrame(rows, infer_schema_length=None)
    inner = table.filter("interior") if rows else table
    if inner.height < 3:
        return Outcome(UNSEEN, "too few learning rates have their best weight decay inside the grid", table)
    x, y = (
        inner.select(pl.col(c).log(2) - pl.col(c).log(2).mean().over("rules", "width")).to_series().to_numpy()
        for c in ("lr", "best_weight_decay")
    )
    if not x @ x:
        return Outcome(UNSEEN, "no two learning rates of one model have their best weight decay inside the grid", table)
    slope = float(x @ y / (x @ x))
    told = f"log₂ of the best λ goes as {slope:+.2f} log₂ η where the minimum is inside the grid; constant τ means -1, constant λ means 0"
    return Outcome("agrees" if slope < -0.5 else "does not agree", told, table)


# Long runs, downstream ----------------------------------------------------------------------------------------------------------


def find_horizon(frame: pl.DataFrame) -> Outcome:
    """200 tokens a parameter: CompleteP has the lowest loss at every shape."""
    frame = done(frame)
    table = frame.group_by("width", "depth", "rules", maintain_order=True).agg(loss=pl.col("loss").mean())
    told, found = [], []
    for (width, depth), part in table.partition_by("width", "depth", as_dict=True).items():
        agreement, sentence = ranking(dict(part.select("rules", "loss").iter_rows()), f"{width} × {depth}")
        found.append(agreement)
        told.append(sentence)
    return Outcome(_all(found), "; ".join(told), table)


def find_downstream(frame: pl.DataFrame) -> Outcome:
    """The average over tasks with its standard error: is CompleteP's the highest at every shape?"""
    if frame.is_empty():
        raise UserError("no run of this study is done yet", fix="run the study; --dry-run shows its runs")
    error = (pl.col("stderr").pow(2).sum().sqrt() / pl.len()).alias("stderr")
    average = frame.group_by("shape", "rules", maintain_order=True).agg(score=pl.col("score").mean(), stderr=error)
    found: list[Agreement] = []
    told = []
    for (shape,), part in average.partition_by("shape", as_dict=True).items():
        scores = {r: (x, e) for r, x, e in part.select("rules", "score", "stderr").iter_rows()}
        ours = scores.get("completep", (math.nan, math.nan))
        gaps = [(ours[0] - x, max(e, ours[1])) for r, (x, e) in scores.items() if r != "completep"]
        above, below = all(gap > noise for gap, noise in gaps), any(gap < -noise for gap, noise in gaps)
        found.append("agrees" if gaps and above else "does not agree" if below else UNSEEN)
        told.append(f"{shape}: " + ", ".join(f"{named(r)} {x:.1f} ± {e:.1f} %" for r, (x, e) in scores.items()))
    each = frame.select("shape", "rules", "task", "metric", "items", "score", "stderr")
    rest = average.with_columns(task=pl.lit("average"), metric=pl.lit(""), items=pl.lit(None, pl.Int64)).select(
        each.columns
    )
    over = "average of " + ", ".join(frame["task"].unique(maintain_order=True).to_list())
    return Outcome(_all(found), f"{over}. " + "; ".join(told), pl.concat([each, rest], how="vertical_relaxed"))


def _all(found: Sequence[Agreement]) -> Agreement:
    """Of several places: one that contradicts is enough, and all must agree."""
    return "does not agree" if "does not agree" in found else "agrees" if set(found) == {"agrees"} else UNSEEN


# Measurements -----------------------------------------------------------------------------------------------------------------


def find_coordinates(found: Coordinates) -> Outcome:
    findings = verdict.judge(found)
    words = {
        r: verdict.overall([f for f in findings if f.rules == r]) for r in dict.fromkeys(f.rules for f in findings)
    }
    expected = {"muP": "FAIL", "literature alpha=0.5": "FAIL", "alpha=0.5": "PASS", "CompleteP": "PASS"}
    wrong = [r for r, word in words.items() if r in expected and word not in (expected[r], "INCONCLUSIVE")]
    seen = all(words.get(r) == word for r, word in expected.items())
    table = pl.DataFrame([_flat(f) for f in findings], infer_schema_length=None)
    told = ", ".join(f"{r} {word}" for r, word in words.items())
    return Outcome("does not agree" if wrong else "agrees" if seen else UNSEEN, told, table, findings)


def _flat(f: verdict.Finding) -> dict[str, Any]:
    row = asdict(f)
    slope = row.pop("slope") or {}
    return row | {f"slope_{k}": v for k, v in slope.items() if k in ("value", "low", "high")}


def find_laziness(frame: pl.DataFrame) -> Outcome:
    verdicts = laziness.judge(frame)
    words = {v.rules: v.word for v in verdicts}
    # At these depths muP's forward pass need not overflow yet: its ratio stays flat, as the derivation says.
    lazy = [w for r, w in words.items() if r not in ("CompleteP", "muP")]
    ours = words.get("CompleteP")
    agreement: Agreement = (
        "does not agree"
        if ours == "FAIL"
        else "agrees"
        if ours == "PASS" and lazy and set(lazy) == {"FAIL"}
        else UNSEEN
    )
    told = ", ".join(f"{v.rules} {v.word}" + (f" (slope {v.slope.value:+.2f})" if v.slope else "") for v in verdicts)
    rows = [
        {"rules": v.rules, "verdict": v.word, "slope": v.slope.value if v.slope else None, "why": v.why}
        for v in verdicts
    ]
    return Outcome(agreement, told, pl.DataFrame(rows, infer_schema_length=None), verdicts)
