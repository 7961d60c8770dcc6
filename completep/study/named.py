"""The paper's results, each a study by name: a function from a scale to axes, runs and the analysis to do."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from completep import paper
from completep.config import Run, Shape
from completep.errors import UserError
from completep.measure.grid import Coordinates, Progress, coordinate_check
from completep.measure.laziness import laziness
from completep.measure.subject import Setting, Source
from completep.rules.table import rules_named
from completep.study import findings
from completep.study.design import Measurement, Point, Study, Sweep
from completep.study.scale import Scale
from completep.study.store import Store

RULES = ("mup", "alpha=0.5", "completep")


def lr_transfer(s: Scale) -> Sweep:
    return Sweep(
        "lr-transfer",
        f"Does the learning rate that is best at depth {s.base.depth} stay the best?",
        "Only under CompleteP: the optimum stays and deeper models are better; SP, muP and alpha=0.5 drift.",
        {"rules": RULES, "depth": s.depths, "lr": s.lrs, "seed": s.seeds},
        run=lambda rules, depth, lr, seed: s.fixed_tokens(rules, depth, seed, lr=lr, std=s.std),
        find=findings.find_transfer("lr", s.base),
        swept="lr",
    )


def small_transfer(s: Scale, seed: int) -> Sweep:
    """The demo: one seed of it and four fifths of its tokens, to be done in four minutes on two cores."""
    s = replace(s, tokens=0.8 * s.tokens)
    whole = lr_transfer(s)
    claim = (
        "Under CompleteP the η tuned at the base stays the best and deeper is better; under SP and muP neither holds."
    )
    axes = {**whole.axes, "seed": (seed,)}
    return replace(whole, name="demo", claim=claim, axes=axes, find=findings.find_transfer_once(s.base))


def init_transfer(s: Scale) -> Sweep:
    return Sweep(
        "init-transfer",
        f"Does the init standard deviation that is best at depth {s.base.depth} stay the best?",
        "Only under CompleteP: the optimum stays and deeper models are better; SP, muP and alpha=0.5 drift.",
        {"rules": RULES, "depth": s.few_depths, "std": s.stds, "seed": s.seeds},
        run=lambda rules, depth, std, seed: s.fixed_tokens(rules, depth, seed, lr=s.lr, std=std),
        find=findings.find_transfer("std", s.base),
        swept="std",
    )


def lr_transfer_compute_optimal(s: Scale) -> Sweep:
    return Sweep(
        "lr-transfer-compute-optimal",
        "Does the learning rate transfer when every model is trained for 20 tokens a parameter?",
        "Less hangs on it, and without tuning CompleteP still has the lowest loss in deep models.",
        {"rules": RULES, "depth": s.optimal_depths, "lr": s.optimal_lrs, "seed": s.seeds[:1]},
        run=lambda rules, depth, lr, seed: s.compute_optimal(rules, f"{s.optimal_width}x{depth}", seed, lr=lr),
        find=findings.find_optimal_transfer(s.base.depth),
        swept="lr",
    )


def eps_transfer(s: Scale) -> Sweep:
    return Sweep(
        "eps-transfer",
        "What does the depth rule for AdamW's ε buy?",
        "A wider range of ε with competitive loss.",
        {"rules": ("flat-eps=1", "completep"), "depth": s.few_depths, "eps": s.epses, "seed": s.seeds},
        run=lambda rules, depth, eps, seed: s.fixed_tokens(rules, depth, seed, lr=s.lr, std=s.std, eps=eps),
        find=findings.find_eps,
    )


def dynamics(s: Scale) -> Sweep:
    return Sweep(
        "dynamics",
        "How do the loss curves of different depths lie during training?",
        "CompleteP: deeper is lower throughout. alpha=0.5: deeper models start behind and cross later, at a larger η.",
        {"rules": RULES, "depth": s.depths, "lr": (s.lr, s.crossing_lr), "seed": s.seeds},
        run=lambda rules, depth, lr, seed: s.fixed_tokens(rules, depth, seed, lr=lr, std=s.std),
        find=findings.find_dynamics,
        history=True,
    )


def shape(s: Scale) -> Sweep:
    return Sweep(
        "shape",
        "Which N:L is compute-optimal, and what does CompleteP save?",
        "The deeper the model, the more FLOPs CompleteP saves over muP; deep and narrow models stay near the optimum.",
        {"rules": RULES, "shape": s.shapes, "seed": s.seeds[:1]},
        run=lambda rules, shape, seed: s.compute_optimal(rules, shape, seed),
        find=findings.find_shapes(s.base),
    )


def tau(s: Scale) -> Sweep:
    return Sweep(
        "tau",
        "Which timescale of weight decay is best, and is it the same for all?",
        "τ = 0.1407 lies in the bowl of every parameterization.",
        {"rules": RULES, "shape": s.tau_shapes, "tau": s.taus, "seed": s.seeds[:1]},
        run=lambda rules, shape, tau, seed: s.compute_optimal(rules, shape, seed, tau=tau),
        find=findings.find_tau,
    )


def lr_wd_grid(s: Scale) -> Sweep:
    return Sweep(
        "lr-wd-grid",
        "Is it η·λ·steps, and not λ, that has an optimum?",
        "The optimal τ stays the same over learning rates and weight decays, under SP and muP.",
        {
            "rules": ("sp", "mup"), "width": s.grid_widths, "lr": s.grid_lrs, "weight_decay": s.grid_decays, "seed": s.seeds[:1],
        },
        run=lambda rules, width, lr, weight_decay, seed: s.compute_optimal(
            rules, f"{width}x{paper.GRID_DEPTH}", seed, lr=lr, std=s.grid_std, weight_decay=weight_decay
        ),
        find=findings.find_grid,
    )  # fmt: skip


def horizon(s: Scale) -> Sweep:
    return Sweep(
        "horizon",
        "And when models are trained for 200 tokens a parameter?",
        "CompleteP has the lowest loss at every shape.",
        {"rules": RULES, "shape": s.horizon_shapes, "seed": s.seeds[:1]},
        run=lambda rules, shape, seed: s.compute_optimal(rules, shape, seed, tpp=paper.HORIZON_TPP),
        find=findings.find_horizon,
    )


def downstream(s: Scale) -> Sweep:
    def prepare() -> None:
        from completep.integrations import harness

        tasks = harness.tasks_at(s.items)
        with harness.local_tasks(tasks, s.items) as manager:
            harness.load(manager, tasks)

    def examine(store: Store, runs: Sequence[tuple[Point, Run]]) -> pl.DataFrame:
        from completep.integrations import harness
        from completep.integrations.runs import accelerator, load_run

        found: dict[Path, harness.Evaluation] = {}
        rows: list[dict[str, Any]] = []
        for point, run in runs:
            folder = store.folder(run)
            if (store.result(run) or {}).get("status") != "done":
                continue  # what diverged has no weights
            if folder not in found:
                model, tokenizer = load_run(folder, device=accelerator())
                found[folder] = harness.evaluate(
                    folder.name,
                    model,
                    tokenizer,
                    harness.tasks_at(s.items),
                    data=s.items,
                    limit=s.item_limit,
                    longest=paper.SEQUENCE,
                )
            for task, (score, error) in found[folder].tasks.items():
                of = {"task": task, "metric": found[folder].metrics[task], "items": found[folder].items[task]}
                rows.append({**point, "run": folder.name, **of, "score": score, "stderr": error})
        return pl.DataFrame(rows, infer_schema_length=None)

    return Sweep(
        "downstream",
        "Do lower losses become better answers?",
        "Yes: at the best and at the deepest shape CompleteP has the highest average over six tasks.",
        {"rules": RULES, "shape": s.downstream_shapes, "seed": s.seeds[:1]},
        run=lambda rules, shape, seed: s.compute_optimal(rules, shape, seed),
        find=findings.find_downstream,
        prepare=prepare,
        examine=examine,
    )


def coordinates(s: Scale) -> Measurement:
    def measure(
        rules: Sequence[str], depth: Sequence[int], seed: Sequence[int], workers: int | None, progress: Progress
    ) -> Coordinates:
        source = Source(
            "completep.model.gpt:gpt",
            Shape(s.check_widths, min(depth)),
            {"vocabulary": s.vocabulary, "head_size": s.head_size},
        )
        shapes = [Shape(s.check_widths, d) for d in depth]
        setting, named = Setting(time=s.check_sequence), [rules_named(r) for r in rules]
        return coordinate_check(source, named, shapes, setting, seeds=seed, workers=workers, progress=progress)

    return Measurement(
        "coordinates",
        "Do ten steps move models of every depth alike?",
        "Under alpha=0.5 and CompleteP, yes; SP/muP and the earlier literature's alpha=0.5 are unstable.",
        {"rules": ("mup", "literature=0.5", "alpha=0.5", "completep"), "depth": s.check_depths, "seed": (0, 1, 2)},
        measure=measure,
        find=findings.find_coordinates,
    )


def lazy(s: Scale) -> Measurement:
    def measure(
        rules: Sequence[str], depth: Sequence[int], seed: Sequence[int], workers: int | None, progress: Progress
    ) -> pl.DataFrame:
        named = [rules_named(r) for r in rules]
        return laziness(named, depth, width=s.base.width, seeds=seed, workers=workers, progress=progress)

    return Measurement(
        "laziness",
        "Does a block still learn nonlinearly in a deep network?",
        "Only under alpha=1; under alpha=0.5 learning nears its linearization as 1/sqrt(L).",
        {"rules": (*RULES[:2], "alpha=0.75", RULES[2]), "depth": s.lazy_depths, "seed": tuple(range(s.lazy_seeds))},
        measure=measure,
        find=findings.find_laziness,
    )


STUDIES: dict[str, Callable[[Scale], Any]] = {
    "lr-transfer": lr_transfer,
    "init-transfer": init_transfer,
    "lr-transfer-compute-optimal": lr_transfer_compute_optimal,
    "eps-transfer": eps_transfer,
    "dynamics": dynamics,
    "coordinates": coordinates,
    "laziness": lazy,
    "shape": shape,
    "tau": tau,
    "lr-wd-grid": lr_wd_grid,
    "horizon": horizon,
    "downstream": downstream,
}


def study_named(name: str, scale: Scale) -> Study:
    if name not in STUDIES:
        close = difflib.get_close_matches(name, STUDIES, 1)
        raise UserError(
            f"no study named {name!r}",
            fix=(f"did you mean {close[0]}? " if close else "") + "the studies are " + ", ".join(STUDIES),
        )
    found: Study = STUDIES[name](scale)
    return found
