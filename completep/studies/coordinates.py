"""The coordinate check over depth: do ten training steps change models of every depth by the same amount?"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import polars as pl

from completep import paper
from completep.config import Shape
from completep.errors import UserError
from completep.measure.figures import coordinate_figures
from completep.measure.verdict import Finding, judge_coordinates, overall
from completep.measure.words import Progress
from completep.report.document import Figure
from completep.rules.table import display_name, rules_named
from completep.studies.design import UNSEEN, Experiment, Measurement, Outcome, listed

if TYPE_CHECKING:
    from completep.measure.grid import Coordinates

EXPECTED = {"mup": "FAIL", "literature=0.5": "FAIL", "alpha=0.5": "PASS", "completep": "PASS"}


def measure(experiment: Experiment, workers: int | None, progress: Progress) -> "Coordinates":
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
    return coordinate_check(source, rules, shapes, setting, seeds=seeds, workers=workers, progress=progress)


def find(experiment: Experiment, coordinates: "Coordinates") -> Outcome[list[Finding]]:
    return conclude(judge_coordinates(coordinates))


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


def draw(experiment: Experiment, coordinates: "Coordinates", outcome: Outcome[list[Finding]]) -> list[Figure]:
    return coordinate_figures(coordinates, outcome.detail, "depth")


def frames(coordinates: "Coordinates") -> Mapping[str, pl.DataFrame]:
    return {"stream": coordinates.stream, "roles": coordinates.roles}


STUDY = listed(
    Measurement(
        name="coordinates",
        question="Do ten training steps change models of every depth by the same amount?",
        claim="Under alpha=0.5 and CompleteP, yes; SP/muP and the earlier literature's alpha=0.5 are unstable.",
        decision=(
            "Slopes over log L of how far ten steps move the stream, the logits and the effect of each role's "
            "update. PASS if they lie from -0.5 to +0.2. Agrees if SP/muP and the literature's alpha=0.5 FAIL, "
            "and alpha=0.5 and CompleteP PASS."
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
