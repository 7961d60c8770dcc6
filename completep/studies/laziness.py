"""Laziness over depth: does a block still learn nonlinearly in a deep network?"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from completep import paper
from completep.measure.figures import laziness_figure
from completep.measure.words import Progress
from completep.report.document import Figure
from completep.rules.table import display_name, rules_named
from completep.studies.design import UNSEEN, Agreement, Experiment, Measurement, Outcome, listed

if TYPE_CHECKING:
    from completep.measure.linearization import LazyVerdict

RULES = ("mup", "alpha=0.5", "alpha=0.75", "completep")


def measure(experiment: Experiment, workers: int | None, progress: Progress) -> pl.DataFrame:
    from completep.measure.linearization import measure_laziness

    axes = experiment.axes
    rules, depths = [rules_named(str(r)) for r in axes["rules"]], [int(d) for d in axes["depth"]]
    seeds, width = [int(s) for s in axes["seed"]], experiment.scale.base.width
    return measure_laziness(rules, depths, width=width, seeds=seeds, workers=workers, progress=progress)


def find(experiment: Experiment, frame: pl.DataFrame) -> "Outcome[list[LazyVerdict]]":
    from completep.measure.linearization import judge_laziness

    verdicts = judge_laziness(frame)
    words = {v.rules: v.word for v in verdicts}
    # At these depths muP's forward pass need not overflow yet, and its ratio stays flat, as the derivation says.
    lazy = {word for rules, word in words.items() if rules not in ("completep", "mup")}
    ours = words.get("completep")
    agreement: Agreement = UNSEEN
    if ours == "FAIL":
        agreement = "does not agree"
    elif ours == "PASS" and lazy == {"FAIL"}:
        agreement = "agrees"
    slopes = {v.rules: f" (slope {v.slope.value:+.2f})" if v.slope else "" for v in verdicts}
    sentence = ", ".join(f"{display_name(v.rules)} {v.word}{slopes[v.rules]}" for v in verdicts)
    rows = [
        {"rules": v.rules, "verdict": v.word, "slope": v.slope.value if v.slope else None, "why": v.why}
        for v in verdicts
    ]
    return Outcome(agreement, sentence, pl.DataFrame(rows, infer_schema_length=None), verdicts)


def draw(experiment: Experiment, frame: pl.DataFrame, outcome: "Outcome[list[LazyVerdict]]") -> list[Figure]:
    return [laziness_figure(frame, outcome.detail)]


def frames(frame: pl.DataFrame) -> Mapping[str, pl.DataFrame]:
    return {"runs": frame}


STUDY = listed(
    Measurement(
        name="laziness",
        question="Does a block still learn nonlinearly in a deep network?",
        claim="Only under alpha=1; under alpha=0.5 learning approaches its linearization as 1/sqrt(L).",
        decision=(
            "The slope over log L of |Δh - Δh_lin| / |Δh_lin| of a block for an Adam-like step of both its "
            "matrices. PASS if it is within 0.15 of 0. Agrees if CompleteP PASSes and alpha=0.5 and 0.75 FAIL."
        ),
        axes={
            "laptop": {"rules": RULES, "depth": (16, 32, 64, 128), "seed": tuple(range(20))},
            "desk": {"rules": RULES, "depth": (16, 32, 64, 128, 256), "seed": tuple(range(paper.LAZY_SEEDS))},
            "paper": {"rules": RULES, "depth": paper.LAZY_DEPTHS, "seed": tuple(range(paper.LAZY_SEEDS))},
        },
        measure=measure,
        find=find,
        draw=draw,
        frames=frames,
    )
)
