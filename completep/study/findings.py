"""From a study's losses to its outcome, beside the paper's claim. Frames in, `Outcome` out.

Losses closer than `TELL` are not told apart: seeds at this size differ by about as much.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from completep import paper
from completep.config import Shape
from completep.errors import UserError
from completep.measure import laziness, transfer, verdict
from completep.measure.grid import Coordinates
from completep.measure.optimum import Interval, average, curve, vertex
from completep.study.design import Agreement, Outcome
from completep.study.laws import PowerLaw, ShapeRange, fit_power_law, flop_savings, frontier, loss_increase, shape_range
from completep.units import human

TELL = 0.005  # of the loss
COMPETITIVE = 0.01  # of the loss: the paper's own margin for a good shape, here for a good ε too
SAME_SIZE = 1.35  # non-embedding parameters within this ratio are one size
UNSEEN: Agreement = "cannot be seen at this scale"
NAMES = {"mup": "SP/muP", "completep": "CompleteP", "sp": "SP", "flat-eps=1": "without the depth rule"}


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
    """The base's best value at every depth: only CompleteP keeps it."""

    def find(frame: pl.DataFrame) -> Outcome:
        verdicts = judged(frame, hyperparameter, base)
        words = {t.rules: t.word for t in verdicts}
        sentence = "; ".join(_told(t) for t in verdicts)
        return Outcome(_only_completep(words), sentence, transfer_table(verdicts), verdicts)

    return find


def judged(frame: pl.DataFrame, hyperparameter: str, base: Shape) -> list[transfer.Transfer]:
    """Against the base; against the smallest shape where the base was left out."""
    ended = done(frame)
    there = ended.filter((pl.col("width") == base.width) & (pl.col("depth") == base.depth)).height
    return transfer.judge(ended, hyperparameter, base if there else None)


def find_transfer_once(base: Shape) -> Callable[[pl.DataFrame], Outcome]:
    """From one seed, without intervals: what does the base's best η cost in the deepest model?"""

    def find(frame: pl.DataFrame) -> Outcome:
        verdicts = judged(frame, "lr", base)
        deepest = {t.rules: max(t.shapes, key=lambda s: s.shape.depth) for t in verdicts if t.shapes}
        words: dict[str, verdict.Word] = {
            r: "PASS" if at.regret <= 100 * COMPETITIVE else "FAIL" for r, at in deepest.items()
        }
        depth = max((at.shape.depth for at in deepest.values()), default=base.depth)
        told = f"the η tuned at depth {base.depth} ({power(verdicts[0].best)}) costs at depth {depth} "
        told += ", ".join(f"{at.regret:.1f} % of the loss under {named(r)}" for r, at in deepest.items())
        table = transfer_table(verdicts).drop("verdict", "drift_low", "drift_high", "regret_low", "regret_high")
        said = [replace(t, word=words.get(t.rules, t.word), why=_once(deepest.get(t.rules))) for t in verdicts]
        return Outcome(_only_completep(words), told, table, said)

    return find


def _once(at: "transfer.AtShape | None") -> str:
    return (
        ""
        if at is None
        else f"moves {at.drift:+.1f} octaves to depth {at.shape.depth}, where the base's costs {at.regret:.1f} %"
    )


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
        deepest = (
            max(s.shape.depth for t in verdicts for s in t.shapes) if any(t.shapes for t in verdicts) else base_depth
        )
        losses = {t.rules: s.loss for t in verdicts for s in t.shapes if s.shape.depth == deepest}
        agreement, told = ranking(losses, f"with the base's best η at depth {deepest}")
        return Outcome(agreement, told, transfer_table(verdicts), verdicts)

    return find


def ranking(losses: dict[str, float], where: str) -> tuple[Agreement, str]:
    """Is CompleteP's the lowest loss, by more than can be told apart?"""
    told = f"{where}: " + ", ".join(f"{named(r)} {x:.4f}" for r, x in losses.items())
    mine, others = losses.get("completep"), [x for r, x in losses.items() if r != "completep"]
    if mine is None or not others:
        return UNSEEN, told
    gap = min(x if np.isfinite(x) else np.inf for x in others) / mine - 1
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
    reach = dict(deepest.select("rules", "largest_good").iter_rows())
    with_rule, without = reach.get("completep"), reach.get("flat-eps=1")
    told = (
        f"at depth {deepest['depth'][0]} ε may rise to {with_rule or 0:.0e} with the depth rule and to {without or 0:.0e} "
        "without it before 1 % of the loss is lost"
    )
    agreement: Agreement = UNSEEN
    if with_rule and without:  # where no ε is good it is no number, and neither above nor below
        agreement = "agrees" if with_rule > without else "does not agree" if with_rule < without else UNSEEN
    return Outcome(agreement, told, table)


# Dynamics ---------------------------------------------------------------------------------------------------------------------


def find_dynamics(frame: pl.DataFrame) -> Outcome:
    """Who ends below whom, and when do the loss curves of two depths cross for the last time?"""
    frame = done(frame)
    means = frame.group_by("rules", "lr", "depth", "step").agg(loss=pl.col("loss").mean()).sort("step")
    smooth = means.with_columns(loss=pl.col("loss").rolling_mean(3, min_samples=1).over("rules", "lr", "depth"))
    rows = []
    for (rules, lr), part in smooth.partition_by("rules", "lr", as_dict=True).items():
        depths = sorted(part["depth"].unique().to_list())
        for low, high in pairwise(depths):
            pair = part.filter(pl.col("depth") == low).join(
                part.filter(pl.col("depth") == high), on="step", suffix="_deep"
            )
            last, ahead = pair.tail(1), pair.filter(pl.col("loss") <= pl.col("loss_deep"))
            rows.append(
                {
                    "rules": rules, "lr": lr, "shallow": low, "deep": high, "shallow_loss": last["loss"].item(),
                    "deep_loss": last["loss_deep"].item(), "deeper_is_better": bool((last["loss_deep"] < last["loss"]).item()),
                    "last_step_behind": ahead["step"].max(),
                }
            )  # fmt: skip
    table = pl.DataFrame(rows, infer_schema_length=None).sort("lr", "rules", "shallow")
    ordered = table.group_by("rules", "lr").agg(ordered=pl.col("deeper_is_better").all())
    right = {
        r: sorted(power(lr) for lr in ordered.filter(pl.col("ordered") & (pl.col("rules") == r))["lr"])
        for r in frame["rules"].unique(maintain_order=True)
    }
    told = "every step deeper ends lower: " + "; ".join(
        f"{named(r)} " + (f"at η = {', '.join(at)}" if at else "at no η") for r, at in right.items()
    )
    tuned = power(min(table["lr"].to_list()))  # the lower of the two is CompleteP's best
    others = [tuned in at for r, at in right.items() if r != "completep"]
    agreement: Agreement = UNSEEN
    if "completep" in right:
        agreement = "does not agree" if tuned not in right["completep"] else "agrees" if not any(others) else UNSEEN
    return Outcome(agreement, told, table, smooth)


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


def find_shapes(frame: pl.DataFrame) -> Outcome:
    """Losses against the frontier of CompleteP, savings over muP by depth, and the range of good shapes."""
    frame = done(frame).filter(pl.col("loss").is_finite())
    keys = ["rules", "width", "depth", "parameters", "flops"]
    means = frame.group_by(keys, maintain_order=True).agg(loss=pl.col("loss").mean())
    label = sizes(means["parameters"].to_list())
    means = means.with_columns(size=pl.col("parameters").replace_strict(label), ratio=pl.col("width") / pl.col("depth"))
    ours = means.filter(pl.col("rules") == "completep")
    if ours["size"].n_unique() < 2:
        raise UserError("a scaling law needs two sizes under completep", fix="leave rules and shape as they are")
    best = frontier(ours)
    law = fit_power_law(best["flops"].to_numpy(), best["loss"].to_numpy())
    means = means.with_columns(increase=pl.Series(loss_increase(means["loss"], law.loss(means["flops"].to_numpy()))))
    reference = means.filter(pl.col("rules") == "mup").select("width", "depth", reference="increase")
    means = means.join(reference, on=["width", "depth"], how="left")
    means = means.with_columns(
        savings=pl.Series(flop_savings(means["reference"].to_numpy(), means["increase"].to_numpy(), law.b))
    ).drop("reference")
    ranges = _ranges(means)
    return Outcome(*_shape_agreement(means), means.sort("rules", "parameters", "ratio"), Shapes(law, means, ranges))


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


def _shape_agreement(means: pl.DataFrame) -> tuple[Agreement, str]:
    """The paper's main claim: the deeper, the more CompleteP saves over muP."""
    ours = means.filter(
        (pl.col("rules") == "completep") & pl.col("savings").is_not_nan() & pl.col("savings").is_not_null()
    )
    if ours["depth"].n_unique() < 3:
        return UNSEEN, "too few depths were run under both muP and CompleteP"
    x, y = ours["depth"].log(2).to_numpy(), ours["savings"].to_numpy()
    slope = float(np.polyfit(x, y, 1)[0])
    deepest = ours.sort("depth").tail(1)
    told = (
        f"CompleteP's FLOP savings over muP change by {100 * slope:+.1f} points a doubling of depth; at depth "
        f"{deepest['depth'].item()} they are {100 * deepest['savings'].item():.0f} %"
    )
    return ("agrees" if slope > 0 and deepest["savings"].item() > 0 else "does not agree"), told


# Weight decay -----------------------------------------------------------------------------------------------------------------


def find_tau(frame: pl.DataFrame) -> Outcome:
    """Does one timescale of weight decay suit every parameterization?"""
    rows = []
    for (rules, width, depth), part in sorted(
        done(frame).partition_by("rules", "width", "depth", as_dict=True).items()
    ):
        x, losses = curve(part, "tau")
        place, lowest, interior = vertex(x, average(losses))
        cost = 100 * (float(np.interp(np.log2(paper.TAU), x, average(losses))) / lowest - 1)
        at = {"rules": rules, "width": width, "depth": depth}
        rows.append(at | {"best_tau": 2**place, "interior": interior, "cost_of_paper_tau_percent": cost})
    table = pl.DataFrame(rows, infer_schema_length=None)
    worst, best = max(row["cost_of_paper_tau_percent"] for row in rows), [row["best_tau"] for row in rows]
    told = f"the paper's τ = {paper.TAU:g} costs at most {worst:.2f} % of the loss; the best lie from {min(best):.2g} to {max(best):.2g}"
    return Outcome("agrees" if worst <= 100 * COMPETITIVE else "does not agree", told, table)


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
    slope = float(x @ y / (x @ x)) if x @ x else float("nan")
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
    return Outcome(_all(found), "; ".join(told), pl.concat([each, rest], how="vertical_relaxed"))


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
    seen = all(words[r] == expected[r] for r in words if r in expected)
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
