"""The demo: one seed of lr-transfer with four fifths of its tokens. A few minutes on two cores."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from completep.config import Shape
from completep.errors import UserError
from completep.measure.curves import AtShape, Transfer
from completep.rules.table import display_name
from completep.studies import lr_transfer
from completep.studies.design import Experiment, Outcome, Sweep
from completep.studies.judging import (
    COMPETITIVE,
    TELL,
    Transfers,
    log2_text,
    only_completep,
    transfer_frame,
    transfers_of,
    with_depth,
)
from completep.studies.result import StudyResult
from completep.studies.run import conclude_sweep
from completep.studies.scale import LAPTOP
from completep.sweep.conduct import Watcher, conduct, nobody
from completep.sweep.local import Local
from completep.sweep.store import Store

JUDGED = ("completep", "mup")  # alpha=0.5 lies between them: one seed cannot judge it


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[Transfers]:
    """From one seed, without intervals: how good is the base's best η in the deepest model?

    The agreement is what the losses of this seed say. Since it is one seed, the outcome is "one seed cannot tell".
    """
    base = experiment.scale.base
    transfers = transfers_of(frame, "lr", base)
    depth = max((s.shape.depth for t in transfers for s in t.shapes), default=base.depth)
    deepest = {t.rules: s for t in transfers for s in t.shapes if s.shape.depth == depth}
    failed = {t.rules: fails(t, deepest[t.rules]) for t in transfers if t.rules in deepest}
    losses = ", ".join(
        f"{s.loss:.2f} under {display_name(r)} ({s.regret:.1f} % above the best there)" for r, s in deepest.items()
    )
    words = {r: "FAIL" if failed[r] else "PASS" for r in failed if r in JUDGED}
    agreement, ladder = with_depth(only_completep(words), transfers)
    best = transfers[0]
    sentence = (
        f"the η tuned at depth {base.depth} ({log2_text(best.best)}) gives at depth {depth} a loss of {losses}; "
        f"at depth {base.depth} it is {best.best_loss:.2f}{ladder}"
    )
    table = transfer_frame(transfers).drop("verdict", "drift_low", "drift_high", "regret_low", "regret_high")
    judged = [
        replace(t, word="FAIL" if failed.get(t.rules) else "INCONCLUSIVE", why=explanation(deepest.get(t.rules)))
        for t in transfers
    ]
    return Outcome(agreement, sentence, table, judged)


def fails(t: Transfer, deepest: AtShape) -> bool:
    """What one seed can tell: over 1 % lost to a better η there, or a loss above the base's own."""
    return deepest.regret > 100 * COMPETITIVE or deepest.loss > t.best_loss * (1 + TELL)


def explanation(deepest: AtShape | None) -> str:
    if deepest is None:
        return ""
    return f"at depth {deepest.shape.depth} the base's best is {deepest.regret:.1f} % above the best"


DEMO: Sweep[Transfers] = replace(
    lr_transfer.STUDY,
    name="demo",
    claim="Under CompleteP the η tuned at the base stays the best and deeper is better; under SP and muP neither is.",
    find=find,
)


def demo(
    *,
    full: bool = False,
    depths: Sequence[int] = (2, 8, 32),
    seed: int = 0,
    workers: int | None = None,
    out: Path | str = "runs",
    watch: Watcher = nobody,
) -> StudyResult:
    """Tune the learning rate at the first depth, then use it at the others: does it stay the best?

    Args:
        full: the whole grid with three seeds, which gives intervals and a verdict: half an hour.
        depths: numbers of layers; the first is the base.
        seed: of the initial weights and the order of the data.
        workers: runs at a time; by default one per core.
        out: runs are kept in the folder `store` here.
        watch: sees the runs as they start and end.
    """
    if len(set(depths)) < 2:
        raise UserError(
            f"depths={tuple(depths)}: one depth has nothing to transfer to", fix="for instance depths 2 8 32"
        )
    study = lr_transfer.STUDY if full else DEMO
    scale = replace(LAPTOP, base=Shape(LAPTOP.base.width, depths[0]), tokens=(1.0 if full else 0.8) * LAPTOP.tokens)
    experiment = study.at(scale).narrowed({"depth": list(dict.fromkeys(depths))} | ({} if full else {"seed": [seed]}))
    store = Store(Path(out) / "store")
    store.open()
    trials = study.trials(experiment)
    conducted = conduct(
        trials, store, Local(workers), search="grid" if full else "beside", swept=study.swept, watch=watch
    )
    words = ["demo", *(["--full"] if full else ["--seed", str(seed)]), "--depths", *map(str, depths)]
    words += [] if Path(out) == Path("runs") else ["--out", str(out)]
    return conclude_sweep(study, experiment, store, conducted.trials, words, conducted)
