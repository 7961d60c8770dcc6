"""A derived rule at the level of the loss: does the best multiple of these learning rates stay where it is?

The parameters in question train with their rule's learning rate times 2^k, all others as the rules say. If the rule is
right, the best k of a larger model is that of the base, within half an octave. Models are trained as they are, on
Python's own source or on your batches, with a learning rate that falls to zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import polars as pl
import torch

from completep import paper
from completep.anatomy.names import named_parameters
from completep.config import Shape
from completep.measure.curves import Transfer, judge_transfer
from completep.measure.kept import Kept
from completep.measure.optimizers import AdamW
from completep.measure.pool import each
from completep.measure.subject import Setting, Source, Subject, Subjects, make_batches, random_batch, speaking_of
from completep.measure.words import Progress, quiet
from completep.rules.table import Rules

OCTAVES = (-3, -2, -1, 0, 1, 2, 3)
SEEDS = (0, 1, 2)
STEPS = 100
PROBES = 8  # batches that the last loss is the mean of
WARM_UP = 0.1  # share of the steps
LEAST_EPS = 1e-12


@dataclass(frozen=True, eq=False)
class Trial:
    """One training run."""

    rules: Rules
    parameters: tuple[str, ...]  # templates
    shape: Shape
    octave: int
    seed: int

    @property
    def key(self) -> str:
        return repr((self.rules.key, self.parameters, self.shape, self.octave, self.seed))

    def __str__(self) -> str:
        return f"width {self.shape.width}, depth {self.shape.depth}, learning rate × 2^{self.octave}, seed {self.seed}"


def confirm(
    source: Source,
    rules: Rules,
    parameters: Sequence[str],
    larger: Shape,
    setting: Setting,
    *,
    steps: int = STEPS,
    workers: int | None = None,
    kept: Kept | None = None,
    progress: Progress = quiet,
) -> Transfer:
    """Train the base and a larger model with several multiples of these parameters' learning rates."""
    setting = replace(setting, steps=steps + PROBES)
    shapes = (source.base, larger)
    trials = [Trial(rules, tuple(parameters), s, k, seed) for s in shapes for k in OCTAVES for seed in SEEDS]
    losses = {trial: loss for trial in trials if kept and (loss := kept.loss(trial.key, steps)) is not None}
    missing = [trial for trial in trials if trial not in losses]
    for trial, loss in each(partial(last_loss, source, setting, steps), missing, workers) if missing else ():
        losses[trial] = loss
        if kept is not None:
            kept.put_loss(trial.key, steps, loss)
        progress(len(losses), len(trials), str(trial))
    rows = [
        {"rules": rules.key, "width": t.shape.width, "depth": t.shape.depth, "multiple": 2.0**t.octave, "seed": t.seed,
         "loss": losses[t]}
        for t in trials
    ]  # fmt: skip
    (judged,) = judge_transfer(pl.DataFrame(rows), "multiple", source.base)
    return judged


def last_loss(source: Source, setting: Setting, steps: int, trial: Trial) -> float:
    """The loss on batches that the run has not seen."""
    with speaking_of(str(trial)):
        base = source.base_model()
        example = random_batch(source, base, setting, 0)[0] if source.batches is not None else None
        batches = make_batches(source, base, setting, trial.seed)[0]
        subject = Subjects(source, base, trial.shape, trial.rules, setting, example).start(trial.seed)
        optimizer = _optimizer(subject, trial)
        starts = [group["lr"] for group in optimizer.param_groups]
        for step in range(steps):
            for group, lr in zip(optimizer.param_groups, starts, strict=True):
                group["lr"] = lr * min((step + 1) / max(1, WARM_UP * steps), (steps - step) / steps)
            optimizer.zero_grad()
            loss = subject.loss(batches(step))
            if not loss.isfinite():
                return float("inf")
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return sum(float(subject.loss(batches(steps + i)).detach()) for i in range(PROBES)) / PROBES


def _optimizer(subject: Subject, trial: Trial) -> torch.optim.AdamW:
    """As the rules say, but for the learning rate of the parameters in question."""
    groups = []
    for name, parameter in named_parameters(subject.model):
        if (trained := subject.settings.get(name)) is not None:
            times = 2.0**trial.octave if subject.anatomy.template(name) in trial.parameters else 1.0
            eps = LEAST_EPS if trained.eps is None else max(trained.eps, 1e-30)
            groups.append(
                {"params": [parameter], "lr": trained.lr * times, "weight_decay": trained.weight_decay, "eps": eps}
            )
    return AdamW(groups, betas=paper.BETAS)
