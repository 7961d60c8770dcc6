"""The demo: tune η at a shallow base, and use it in a deeper model. One seed; a few minutes on two cores."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from completep.config import Shape
from completep.errors import UserError
from completep.measure.curves import Transfer
from completep.measure.words import Word
from completep.rules.table import display_name
from completep.studies import lr_transfer
from completep.studies.design import UNSEEN, Agreement, Experiment, Outcome, Sweep
from completep.studies.judging import (
    COMPETITIVE,
    SEED_NOISE,
    Transfers,
    finished,
    log2_text,
    transfer_frame,
    transfers_of,
)
from completep.studies.result import StudyResult
from completep.studies.run import conclude_sweep
from completep.studies.scale import LAPTOP
from completep.sweep.conduct import Watcher, conduct, nobody
from completep.sweep.local import Local
from completep.sweep.search import Search
from completep.sweep.store import Store

DEPTHS = (2, 32)
# Cheaper runs than the studies': scoring takes a fifth of the time of a study's run.
SCALE = replace(LAPTOP, tokens=300 * 16 * 64, validation=2**16)


def find(experiment: Experiment, frame: pl.DataFrame) -> Outcome[Transfers]:
    """How good is the deepest model with the η that is best at the base? The tried value itself: nothing is fitted."""
    ended = finished(frame)
    transfers = transfers_of(frame, "lr", experiment.scale.base)
    base, deep = transfers[0].base.depth, int(ended["depth"].max())  # type: ignore[arg-type]
    tuned = best_tried(ended.filter(pl.col("depth") == base))
    judged = [at_tuned(t, ended, tuned) for t in transfers]
    deepest = {t.rules: s.loss / t.best_loss - 1 for t in judged for s in t.shapes if s.shape.depth == deep}
    changes = {rules: change for rules, change in deepest.items() if not math.isnan(change)}
    parts = [f"{display_name(r)} {percent(change)}" for r, change in changes.items()]
    sentence = (
        f"tuned at depth {base} (η = {log2_text(tuned)}, loss {judged[0].best_loss:.3f}): "
        f"at depth {deep} the same learning rate makes {', '.join(parts)}"
    )
    table = transfer_frame(judged).drop("drift_low", "drift_high", "regret_low", "regret_high")
    return Outcome(agreement(judged, changes), sentence, table, judged)


def best_tried(runs: pl.DataFrame) -> float:
    """The learning rate of the lowest loss."""
    finite = runs.filter(pl.col("loss").is_finite())
    return float((finite if not finite.is_empty() else runs).sort("loss")["lr"][0])


def at_tuned(t: Transfer, ended: pl.DataFrame, tuned: float) -> Transfer:
    """The same comparison at the tried value, with a verdict that one seed can support."""
    of_rules = ended.filter(pl.col("rules") == t.rules)

    def here(depth: int, lr: float) -> float:
        used = of_rules.filter((pl.col("depth") == depth) & (pl.col("lr") == lr))["loss"].fill_nan(math.inf)
        return float(used[0]) if len(used) else math.nan

    base_loss = here(t.base.depth, tuned)
    shapes = []
    for s in t.shapes:
        best = best_tried(of_rules.filter(pl.col("depth") == s.shape.depth))
        loss = here(s.shape.depth, tuned)
        regret = 100 * (loss / here(s.shape.depth, best) - 1)
        word, why = one_seed_word(loss / base_loss - 1, regret)
        drift = math.log2(best / tuned)
        shapes.append(replace(s, optimum=best, drift=drift, loss=loss, regret=regret, word=word, why=why))
    deepest = shapes[-1] if shapes else None
    word, why = (deepest.word, f"at depth {deepest.shape.depth}: {deepest.why}") if deepest else (t.word, t.why)
    return replace(t, best=tuned, best_loss=base_loss, shapes=tuple(shapes), word=word, why=why)


def one_seed_word(change: float, regret: float) -> tuple[Word, str]:
    """PASS if the deeper model is better than the base by more than seeds differ, and no tried η is much better."""
    best = f"the best η there is {regret:.1f} % better" if regret > 0 else "no other η is better there"
    why = f"{percent(change)} than the base; {best}"
    return ("PASS" if change < -SEED_NOISE and regret <= 100 * COMPETITIVE else "FAIL"), why


def percent(change: float) -> str:
    if not math.isfinite(change):
        return "diverge"
    return f"{100 * abs(change):.1f} % {'worse' if change > 0 else 'better'}"


def agreement(judged: Transfers, changes: dict[str, float]) -> Agreement:
    words = {t.rules: t.word for t in judged if t.rules in changes}
    if not {"completep", "mup"} <= words.keys():
        return UNSEEN
    return "agrees" if (words["completep"], words["mup"]) == ("PASS", "FAIL") else "does not agree"


DEMO: Sweep[Transfers] = replace(
    lr_transfer.STUDY,
    name="demo",
    question="Does a deeper model with the learning rate of the shallow one get better?",
    claim="Under CompleteP it does. Under SP and muP it does not.",
    decision=(
        "The losses of one seed at the tried η that is best at the base. PASS if the deepest model is more than "
        f"{100 * SEED_NOISE:g} % better than the base (seeds differ by about as much), and no tried η is more than "
        f"{100 * COMPETITIVE:g} % better there. Agrees if CompleteP passes and SP/muP does not."
    ),
    find=find,
    tuning=None,
    one_seed=True,
)


def demo(
    *,
    full: bool = False,
    depths: Sequence[int] = DEPTHS,
    seed: int = 0,
    workers: int | None = None,
    out: Path | str = "runs",
    watch: Watcher = nobody,
) -> StudyResult:
    """Tune the learning rate at the first depth, then use it at the others: do they get better?

    Args:
        full: the whole grid with three seeds, which gives intervals and a verdict on transfer: half an hour.
        depths: numbers of layers; the first is the base.
        seed: of the initial weights and the order of the data.
        workers: runs at a time; by default one per core.
        out: runs are kept in the folder `store` here.
        watch: sees the runs as they start and end.
    """
    if len(set(depths)) < 2:
        raise UserError(f"depths={tuple(depths)}: one depth has nothing to transfer to", fix="for instance depths 2 32")
    study = replace(lr_transfer.STUDY, tuning=None) if full else DEMO
    scale = replace(SCALE, base=Shape(SCALE.base.width, depths[0]))
    experiment = study.at(scale).narrowed({"depth": list(dict.fromkeys(depths))} | ({} if full else {"seed": [seed]}))
    store = Store(Path(out) / "store")
    store.open()
    trials = study.trials(experiment)
    search: Search = "grid" if full else "bracket"
    conducted = conduct(trials, store, Local(workers), search=search, swept=study.swept, watch=watch)
    words = ["demo", *(["--full"] if full else ["--seed", str(seed)]), "--depths", *map(str, depths)]
    words += [] if Path(out) == Path("runs") else ["--out", str(out)]
    return conclude_sweep(study, experiment, store, conducted.trials, words, conducted)
