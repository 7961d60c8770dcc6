"""The coordinate check over depth: do ten training steps change models of every depth by the same amount?"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import polars as pl

from completep import paper
from completep.config import Shape
from completep.errors import UserError
from completep.measure.figures import coordinate_figures, growth_figure
from completep.measure.stream_limit import Growth, limit_words, measure_growth
from completep.measure.verdict import Finding, judge_coordinates, overall
from completep.measure.words import Progress, worst
from completep.report.document import Figure
from completep.rules.table import display_name, rules_named
from completep.studies.design import UNSEEN, Agreement, Experiment, Measurement, Outcome, listed

if TYPE_CHECKING:
    from completep.measure.grid import Coordinates

LIMIT_SEEDS = range(8)  # of the stream at init; its noise is larger than that of slopes
EXPECTED = {"mup": "FAIL", "literature=0.5": "FAIL", "alpha=0.5": "PASS", "completep": "PASS"}


@dataclass(frozen=True)
class Streams:
    """The stream while the decoder trains, and the stream of an untrained ReLU network, whose limit is known."""

    trained: "Coordinates"
    untrained: list[Growth]


def measure(experiment: Experiment, workers: int | None, progress: Progress) -> Streams:
    from completep.measure.grid import coordinate_check
    from completep.measure.subject import Setting, Source

    scale, axes = experiment.scale, experiment.axes
    depths = [int(d) for d in axes["depth"]]
    if len(depths) < 2:
        raise UserError("one depth has no slope", fix="give several, for instance depth=2,4,8")
    options = {"vocabulary": scale.vocabulary, "head_size": scale.head_size}
    source = Source("completep.model.gpt:gpt", Shape(scale.base.width, min(depths)), options)
    rules, seeds = [rules_named(str(r)) for r in axes["rules"]], [int(s) for s in axes["seed"]]
    shapes, setting = [Shape(scale.base.width, d) for d in depths], Setting(time=scale.sequence)
    trained = coordinate_check(source, rules, shapes, setting, seeds=seeds, workers=workers, progress=progress)
    # The literature's alpha=0.5 differs from the paper's only in learning rates, so untrained they are the same.
    known = [r for r in rules if not r.key.startswith("literature")]
    return Streams(trained, measure_growth(known, depths, seeds=LIMIT_SEEDS, workers=workers, progress=progress))


def find(experiment: Experiment, streams: Streams) -> Outcome[list[Finding]]:
    return with_limit(conclude(judge_coordinates(streams.trained)), streams.untrained)


def with_limit(outcome: Outcome[list[Finding]], untrained: Sequence[Growth]) -> Outcome[list[Finding]]:
    """Agrees only if the untrained stream grows as derived too."""
    word = worst(g.word for g in untrained)
    sentence = f"{outcome.sentence}; the stream of an untrained ReLU network: {limit_words(untrained)}"
    if word == "FAIL":
        return replace(outcome, agreement="does not agree", sentence=f"{sentence}, which is not as derived")
    agreement: Agreement = UNSEEN if outcome.agreement == "agrees" and word != "PASS" else outcome.agreement
    return replace(outcome, agreement=agreement, sentence=sentence)


def conclude(findings: list[Finding]) -> Outcome[list[Finding]]:
    words = {r: overall(f for f in findings if f.rules == r) for r in dict.fromkeys(f.rules for f in findings)}
    wrong = [r for r, word in words.items() if r in EXPECTED and word not in (EXPECTED[r], "INCONCLUSIVE")]
    seen = all(words.get(r) == word for r, word in EXPECTED.items())
    table = pl.DataFrame([row_of(f) for f in findings], infer_schema_length=None)
    sentence = ", ".join(f"{display_name(r)} {word}" for r, word in words.items())
    return Outcome("does not agree" if wrong else "agrees" if seen else UNSEEN, sentence, table, findings)


def row_of(f: Finding) -> dict[str, object]:
    row = asdict(f)
    slope = row.pop("slope") or {}
    row.pop("role")  # the quantity names it
    return row | {f"slope_{k}": v for k, v in slope.items()}


def draw(experiment: Experiment, streams: Streams, outcome: Outcome[list[Finding]]) -> list[Figure]:
    return [*coordinate_figures(streams.trained, outcome.detail, "depth"), growth_figure(streams.untrained)]


def frames(streams: Streams) -> Mapping[str, pl.DataFrame]:
    limits = [
        {"rules": g.rules, "depth": g.depth, "growth": g.measured, "low": g.interval.low, "high": g.interval.high,
         "derived": g.derived, "verdict": g.word}
        for g in streams.untrained
    ]  # fmt: skip
    return {"stream": streams.trained.stream, "roles": streams.trained.roles, "limit": pl.DataFrame(limits)}


STUDY = listed(
    Measurement(
        name="coordinates",
        question="Do ten training steps change models of every depth by the same amount?",
        claim=(
            "Under alpha=0.5 and CompleteP, yes; SP/muP and the earlier literature's alpha=0.5 are unstable. At "
            "init, the stream of a ReLU network keeps its size for alpha > 1/2, grows by exp(σ²/2) for alpha = 0.5, "
            "and grows without bound for smaller alpha."
        ),
        decision=(
            "Slopes over log L of how far ten steps move the stream, the logits and the effect of each role's "
            "update. PASS if they lie from -0.5 to +0.2. Agrees if SP/muP and the literature's alpha=0.5 FAIL, "
            "and alpha=0.5 and CompleteP PASS, and if a ReLU network of width 512 at init (8 seeds) has the derived "
            "H^L / H^0 to 5 % at every depth (to 5 % of its logarithm where that is more than 1)."
        ),
        axes={
            "laptop": {"rules": tuple(EXPECTED), "depth": (2, 4, 8, 16, 32), "seed": (0, 1, 2)},
            "desk": {"rules": tuple(EXPECTED), "depth": (2, 4, 8, 16, 32, 64, 128), "seed": (0, 1, 2)},
            "paper": {"rules": tuple(EXPECTED), "depth": paper.TRANSFER_DEPTHS, "seed": (0, 1, 2)},
        },
        measure=measure,
        find=find,
        draw=draw,
        frames=frames,
    )
)
