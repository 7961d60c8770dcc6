"""Learning-rate transfer when every model is trained for 20 tokens per parameter."""

import math

import numpy as np
import polars as pl

from completep import paper
from completep.config import Run, Shape
from completep.measure.curves import Transfer, curve
from completep.report.document import Figure
from completep.stats import height_at, mean_interval
from completep.studies.design import UNSEEN, Agreement, Experiment, Outcome, Sweep, Tuning, listed
from completep.studies.judging import Losses, Transfers, draw_transfer, finished, ranking, transfer_frame, transfers_of
from completep.studies.scale import BASE_VALUES, RULES, Scale, octaves
from completep.sweep.task import Point

TPP = (4.0, float(paper.TOKENS_PER_PARAMETER))  # short runs, whose sensitivity to η is compared, and the paper's


def run(scale: Scale, point: Point) -> Run:
    shape = Shape(scale.base.width, point.whole("depth"))
    return scale.compute_optimal(point, shape, lr=point.number("lr"), tpp=point.number("tpp"))


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[Transfers]:
    """At the base's best η the deepest CompleteP model has the lowest loss; and longer runs are less sensitive to η."""
    base_depth = experiment.scale.base.depth
    longest = frame.filter(pl.col("tpp") == pl.col("tpp").max())
    transfers = transfers_of(longest, "lr", Shape(int(frame["width"][0]), base_depth))
    deepest = max((s.shape.depth for t in transfers for s in t.shapes), default=base_depth)
    losses = {t.rules: known_loss(t, longest, deepest) for t in transfers}
    agreement, sentence = ranking(losses, f"with the base's best η at depth {deepest}")
    flatter, sensitivity = less_sensitive(frame, transfers[0].base.depth)
    if agreement == "agrees" and flatter != "agrees":
        agreement = "agrees in part"
    return Outcome(agreement, sentence + sensitivity, transfer_frame(transfers), transfers)


def less_sensitive(frame: pl.DataFrame, depth: int) -> tuple[Agreement, str]:
    """Finding 3: at the base, what an octave away from the best η costs, after few and after many tokens."""
    costs = {}
    for (tpp,), part in finished(frame).partition_by("tpp", as_dict=True).items():
        at_base = part.filter((pl.col("depth") == depth) & (pl.col("rules") == "completep"))
        costs[float(str(tpp))] = {
            seed: octave_cost(at_base.filter(pl.col("seed") == seed)) for seed in at_base["seed"].unique()
        }
    if len(costs) < 2:
        return UNSEEN, ""
    short, long = costs[min(costs)], costs[max(costs)]
    seeds = [seed for seed in short if math.isfinite(short[seed] - long.get(seed, math.nan))]
    if not seeds:
        return UNSEEN, "; whether longer runs are less sensitive to η is open, since no minimum at the base is interior"
    interval = mean_interval([short[seed] - long[seed] for seed in seeds]) if len(seeds) > 1 else None
    means = [100 * float(np.mean([x[seed] for seed in seeds])) for x in (short, long)]
    sentence = f"; an octave away from the best η costs {means[0]:.2f} % at {min(costs):g} and {means[1]:.2f} % at "
    sentence += f"{max(costs):g} tokens per parameter"
    if interval is None or interval.low <= 0 <= interval.high:
        return UNSEEN, sentence
    return ("agrees" if interval.low > 0 else "does not agree"), sentence


def octave_cost(runs: pl.DataFrame) -> float:
    """The mean rise of log loss an octave to either side of the best of one curve."""
    runs = runs.sort("lr")
    y = np.log(runs["loss"].to_numpy())
    best = int(np.nanargmin(y)) if np.isfinite(y).any() else 0
    if not 0 < best < len(y) - 1:
        return math.nan
    return float((y[best - 1] + y[best + 1]) / 2 - y[best])


def known_loss(t: Transfer, frame: pl.DataFrame, depth: int) -> Losses | None:
    """The loss at the base's best value, by seed; None where no value near it was tried at this depth."""
    here = finished(frame).filter((pl.col("rules") == t.rules) & (pl.col("depth") == depth))
    if here.is_empty() or not here["lr"].min() <= t.best <= here["lr"].max():  # type: ignore[operator]
        return None
    seeds = here["seed"].unique().sort().to_list() if "seed" in here.columns else [0]
    x, losses = curve(here, "lr", seeds if "seed" in here.columns else None)
    return {seed: height_at(x, column, math.log2(t.best)) for seed, column in zip(seeds, losses.T, strict=True)}


def draw(experiment: Experiment, frame: pl.DataFrame, outcome: Outcome[Transfers]) -> list[Figure]:
    return draw_transfer(experiment, frame.filter(pl.col("tpp") == pl.col("tpp").max()), outcome)


STUDY = listed(
    Sweep(
        name="lr-transfer-compute-optimal",
        question="Does the learning rate transfer when every model is trained for 20 tokens per parameter?",
        claim="It matters less, and without tuning CompleteP still has the lowest loss in deep models.",
        decision=(
            "The losses at the base's best η in the deepest model, paired by seed. Agrees if CompleteP's is below "
            "every other's with the whole 90 % interval (Bonferroni), and if at the base an octave away from the "
            "best η costs less after 20 tokens per parameter than after 4 (Finding 3); in part if only the first "
            "holds."
        ),
        axes={
            "laptop": {"rules": RULES, "depth": (2, 8), "tpp": TPP, "lr": octaves(-8, -4), "seed": (0, 1, 2)},
            "desk": {"rules": RULES, "depth": (2, 4, 16), "tpp": TPP, "lr": octaves(-8, -4), "seed": (0, 1, 2)},
            "paper": {
                "rules": RULES,
                "depth": paper.TRANSFER_DEPTHS,
                "tpp": TPP,
                "lr": octaves(*paper.LR_OCTAVES),
                "seed": (0, 1, 2),
            },
        },
        tuning=Tuning(
            lambda s: Point(rules="completep", depth=s.base.depth, tpp=TPP[-1], lr=s.lr),
            {name: {"base_std": values["base_std"]} for name, values in BASE_VALUES.items()},
        ),
        run=run,
        find=find,
        draw=draw,
        swept="lr",
    )
)
