"""What several studies judge alike: finished runs, rankings of parameterizations, transfer over sizes."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from completep.config import Shape
from completep.errors import UserError
from completep.measure.curves import Transfer, judge_transfer
from completep.measure.figures import transfer_figure
from completep.measure.words import Word
from completep.report.document import Figure
from completep.rules.table import display_name
from completep.stats import LEVEL, Interval, mean_interval
from completep.studies.design import UNSEEN, Agreement, Experiment, Outcome

SEED_NOISE = 0.005  # of the loss, about what seeds differ by: with one seed, smaller differences are treated as noise
COMPETITIVE = 0.01  # of the loss: the paper's own margin for a good shape


def finished(frame: pl.DataFrame) -> pl.DataFrame:
    """The runs that ended; without any there is nothing to find."""
    ended = frame.filter(pl.col("loss").is_not_null()) if "loss" in frame.columns else frame.clear()
    if ended.is_empty():
        raise UserError("no run of this study is done yet", fix="run the study first")
    return ended


def log2_text(value: float) -> str:
    return f"2^{round(float(np.log2(value)), 1):g}"


def combined(agreements: Sequence[Agreement]) -> Agreement:
    """Disagrees if any place disagrees; agrees only if all agree."""
    if "does not agree" in agreements:
        return "does not agree"
    return "agrees" if set(agreements) == {"agrees"} else UNSEEN


Losses = Mapping[int, float]  # by seed; NaN or infinite where the run diverged


def by_seed(runs: pl.DataFrame) -> Losses:
    """Of the runs of one setting."""
    seeds = runs["seed"].to_list() if "seed" in runs.columns else range(runs.height)
    return dict(zip(seeds, runs["loss"].to_list(), strict=True))


def gap(ours: Losses, others: Losses, tests: int = 1) -> Interval:
    """log(others / ours), from the seeds that both have: Student's interval of the mean, corrected for the number of
    tests (Bonferroni). With one seed, the difference give or take `SEED_NOISE`.
    """
    lost, theirs = (not all(map(math.isfinite, x.values())) for x in (ours, others))
    if lost or theirs:
        end = math.nan if lost and theirs else -math.inf if lost else math.inf
        return Interval(end, end)
    changes = [math.log(others[seed] / ours[seed]) for seed in ours if seed in others]
    if len(changes) < 2:
        change = changes[0] if changes else math.log(mean(others) / mean(ours))
        return Interval(change - SEED_NOISE, change + SEED_NOISE)
    interval = mean_interval(changes, 1 - (1 - LEVEL) / tests)
    assert interval is not None
    return interval


def mean(losses: Losses) -> float:
    return float(np.mean(list(losses.values())))


def _shown(losses: Losses | None) -> str:
    if losses is None:
        return "unknown"
    return f"{mean(losses):.4f}" if np.isfinite(mean(losses)) else "diverged"


def ranking(losses: Mapping[str, Losses | None], where: str) -> tuple[Agreement, str]:
    """Is CompleteP's loss the lowest, by more than the noise? None means that the loss is unknown."""
    sentence = f"{where}: " + ", ".join(f"{display_name(r)} {_shown(x)}" for r, x in losses.items())
    ours = losses.get("completep")
    others = [x for r, x in losses.items() if r != "completep" and x is not None]
    if ours is None or not others or len(others) + 1 < len(losses):
        return UNSEEN, sentence
    gaps = [gap(ours, other, len(others)) for other in others]
    if any(g.high < 0 for g in gaps):
        return "does not agree", sentence
    return ("agrees" if all(g.low > 0 for g in gaps) else UNSEEN), sentence


def transfers_of(frame: pl.DataFrame, hyperparameter: str, base: Shape) -> list[Transfer]:
    """Against the base, or against the smallest shape where the base was left out."""
    ended = finished(frame)
    at_base = ended.filter((pl.col("width") == base.width) & (pl.col("depth") == base.depth))
    return judge_transfer(ended, hyperparameter, None if at_base.is_empty() else base)


def only_completep(words: Mapping[str, str]) -> Agreement:
    """The claim that CompleteP passes and every other parameterization fails."""
    others = [word for rules, word in words.items() if rules != "completep"]
    if words.get("completep") == "FAIL":
        return "does not agree"
    return "agrees" if words.get("completep") == "PASS" and others and set(others) == {"FAIL"} else UNSEEN


def answer(word: Word | None) -> Agreement:
    """The claim that something passes, from its verdict; None if it was not judged."""
    return "agrees" if word == "PASS" else "does not agree" if word == "FAIL" else UNSEEN


def with_depth(agreement: Agreement, transfers: Sequence[Transfer]) -> tuple[Agreement, str]:
    """The other half of the claim: with the base's best value, is each deeper model better under CompleteP?"""
    ours = next((t for t in transfers if t.rules == "completep"), None)
    if ours is None or ours.deeper in ("better", None):
        return agreement, ""
    losses = {ours.base.depth: ours.best_loss} | {s.shape.depth: s.loss for s in ours.shapes}
    ladder = ", ".join(f"{losses[depth]:.3f} at depth {depth}" for depth in sorted(losses))
    if ours.deeper == "not better":
        sentence = f". With it, deeper is not better throughout under CompleteP here: {ladder}"
    else:
        sentence = f". With it, whether deeper is better throughout cannot be told from the noise: {ladder}"
    return ("agrees in part" if agreement == "agrees" else agreement), sentence


Transfers = list[Transfer]
TRANSFER_DECISION = (
    "At every depth, the regret of the base's best value: PASS if its whole 90 % interval over seeds is below 0.5 % of "
    "the loss, FAIL if it is above, or if the regret is open and the optimum has moved by more than half an octave "
    "(Holm over depths and parameterizations). Agrees if CompleteP passes, all others fail, and with the base's best "
    "value each deeper model is better under CompleteP (paired by seed, 90 %)."
)
TRANSFER_CLAIM = "Only under CompleteP: the optimum stays and deeper models are better; SP, muP and alpha=0.5 drift."


def find_transfer(hyperparameter: str, experiment: Experiment, frame: pl.DataFrame) -> Outcome[Transfers]:
    """The base's best value at every depth: only CompleteP keeps it, and only there deeper is better."""
    transfers = transfers_of(frame, hyperparameter, experiment.scale.base)
    agreement, ladder = with_depth(only_completep({t.rules: t.word for t in transfers}), transfers)
    sentence = "; ".join(transfer_sentence(t) for t in transfers) + ladder
    return Outcome(agreement, sentence, transfer_frame(transfers), transfers)


def draw_transfer(experiment: Experiment, frame: pl.DataFrame, outcome: Outcome[Transfers]) -> list[Figure]:
    return [transfer_figure(frame, outcome.detail, experiment.name, experiment.study.question)]


def transfer_sentence(t: Transfer) -> str:
    if not t.shapes:
        return f"{display_name(t.rules)} has no larger shape to compare with"
    largest = max(t.shapes, key=lambda s: (s.shape.depth, s.shape.width))
    size = f"depth {largest.shape.depth}" if largest.shape.depth > t.base.depth else f"width {largest.shape.width}"
    return (
        f"{display_name(t.rules)} {t.word}: the best {t.hyperparameter} moves by {largest.drift:+.2f} octaves to "
        f"{size}, where the base's best costs {largest.regret:.2f} % of the loss"
    )


def transfer_frame(transfers: Sequence[Transfer]) -> pl.DataFrame:
    """A row per parameterization and shape, the base first."""
    rows: list[dict[str, object]] = []
    for t in transfers:
        base = {"rules": t.rules, "width": t.base.width, "depth": t.base.depth, f"best_{t.hyperparameter}": t.best}
        rows.append(base | {"verdict": "base", "loss_at_base_best": t.best_loss})
        for s in t.shapes:
            drift, regret = (i or Interval(math.nan, math.nan) for i in (s.drift_interval, s.regret_interval))
            rows.append(
                {
                    "rules": t.rules, "width": s.shape.width, "depth": s.shape.depth,
                    f"best_{t.hyperparameter}": s.optimum, "verdict": s.word, "loss_at_base_best": s.loss,
                    "drift_octaves": s.drift, "drift_low": drift.low, "drift_high": drift.high,
                    "regret_percent": s.regret, "regret_low": regret.low, "regret_high": regret.high,
                }
            )  # fmt: skip
    return pl.DataFrame(rows, infer_schema_length=None).fill_nan(None)
