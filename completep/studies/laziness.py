"""Laziness over depth: does a block still learn nonlinearly in a deep network?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from completep import paper
from completep.measure.figures import laziness_figure, terms_figure
from completep.measure.words import Progress, Word, worst
from completep.report.document import Figure
from completep.rules.table import display_name, rules_named
from completep.stats import Slope
from completep.studies.design import UNSEEN, Agreement, Experiment, Measurement, Outcome, listed

if TYPE_CHECKING:
    from completep.measure.linearization import LazyVerdict, TermVerdict

RULES = ("mup", "alpha=0.5", "alpha=0.75", "completep")
TERM_DEPTH, TERM_SEEDS, TERM_WIDTH = 128, 6, 32  # of the Taylor series in the decoder: at most


@dataclass(frozen=True)
class Measured:
    ratios: pl.DataFrame  # a row per rules, depth, seed and place
    terms: pl.DataFrame  # a row per rules, depth, seed and order


@dataclass(frozen=True)
class Verdicts:
    places: "list[LazyVerdict]"
    orders: "list[TermVerdict]"


def measure(experiment: Experiment, workers: int | None, progress: Progress) -> Measured:
    from completep.measure.linearization import measure_laziness, measure_terms

    axes = experiment.axes
    rules, depths = [rules_named(str(r)) for r in axes["rules"]], [int(d) for d in axes["depth"]]
    seeds = [int(s) for s in axes["seed"]]
    ratios = measure_laziness(rules, depths, width=paper.LAZY_WIDTH, seeds=seeds, workers=workers, progress=progress)
    stable = [r for r in rules if r.key != "mup"]  # what is derived holds for alpha from 1/2 up
    terms = measure_terms(
        stable, [d for d in depths if d <= TERM_DEPTH], width=TERM_WIDTH, seeds=seeds[:TERM_SEEDS],
        workers=workers, progress=progress,
    )  # fmt: skip
    return Measured(ratios, terms)


def find(experiment: Experiment, measured: Measured) -> Outcome[Verdicts]:
    from completep.measure.linearization import judge_laziness, judge_terms

    return conclude(Verdicts(judge_laziness(measured.ratios), judge_terms(measured.terms)))


def conclude(verdicts: Verdicts) -> Outcome[Verdicts]:
    words = {r: worst(v.word for v in verdicts.places if v.rules == r) for r in {v.rules for v in verdicts.places}}
    # At these depths muP's forward pass need not overflow yet, and its ratio stays flat, as the derivation says.
    lazy = [v.word for v in verdicts.places if v.rules not in ("completep", "mup")]
    series = worst(v.word for v in verdicts.orders)
    agreement: Agreement = UNSEEN
    if "FAIL" in (words.get("completep"), series) or "PASS" in lazy:
        agreement = "does not agree"
    elif words.get("completep") == "PASS" and set(lazy) == {"FAIL"}:
        agreement = "agrees" if series == "PASS" else "agrees in part"
    at_output = ", ".join(
        f"{display_name(v.rules)} L^{v.slope.value:+.2f}" for v in verdicts.places if v.place == "output" and v.slope
    )
    terms = ", ".join(f"{v.slope.value:+.2f} ({v.derived:+.2f})" for v in verdicts.orders if v.slope)
    sentence = (
        f"the nonlinear share of the output's movement: {at_output}; slopes of the Taylor terms over depth, derived "
        f"ones in brackets: {terms}"
    )
    shares = [_row(v.rules, f"share at the {v.place}", v.word, v.slope) for v in verdicts.places]
    orders = [_row(v.rules, f"term of order {v.order}", v.word, v.slope, v.derived) for v in verdicts.orders]
    return Outcome(agreement, sentence, pl.DataFrame(shares + orders, infer_schema_length=None), verdicts)


def _row(
    rules: str, what: str, word: Word, slope: Slope | None, derived: float | None = None
) -> dict[str, str | float | None]:
    ends = (None,) * 3 if slope is None else (slope.value, slope.low, slope.high)
    return {"rules": rules, "what": what, "verdict": word} | dict(
        zip(("slope", "low", "high", "derived"), (*ends, derived), strict=True)
    )


def draw(experiment: Experiment, measured: Measured, outcome: Outcome[Verdicts]) -> list[Figure]:
    return [
        laziness_figure(measured.ratios, outcome.detail.places),
        terms_figure(measured.terms, outcome.detail.orders),
    ]


def frames(measured: Measured) -> Mapping[str, pl.DataFrame]:
    return {"runs": measured.ratios, "terms": measured.terms}


STUDY = listed(
    Measurement(
        name="laziness",
        question="Does a block still learn nonlinearly in a deep network?",
        claim=(
            "Only under alpha=1; under alpha=0.5 learning approaches its linearization as 1/sqrt(L). The k-th term of "
            "a block's Taylor series is of order L^(-alpha + k (alpha - 1))."
        ),
        decision=(
            "The slope over log L of |Δh - Δh_lin| / |Δh_lin| for an Adam-like step of both matrices of the middle "
            "block: after that block, after the last one and at the output. PASS if its 90 % interval is within 0.15 "
            "of 0. And the slopes of the first three terms of the Taylor series of a block of the decoder (width 32, "
            "depths up to 128, 6 seeds): PASS if the interval is within 0.15 of the derived slope. Agrees if CompleteP "
            "PASSes at all places, alpha=0.5 and 0.75 FAIL at all, and all terms PASS; in part if a term is "
            "INCONCLUSIVE."
        ),
        axes={
            "laptop": {"rules": RULES, "depth": (16, 32, 64, 128, 256), "seed": tuple(range(20))},
            "desk": {"rules": RULES, "depth": (16, 32, 64, 128, 256, 512), "seed": tuple(range(paper.LAZY_SEEDS))},
            "paper": {"rules": RULES, "depth": paper.LAZY_DEPTHS, "seed": tuple(range(paper.LAZY_SEEDS))},
        },
        measure=measure,
        find=find,
        draw=draw,
        frames=frames,
    )
)
