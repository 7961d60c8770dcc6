"""`completep tune`, `completep tune status`: your own training, tuned small and verified larger."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from completep.cli.shared import EXIT, RulesKey, Words, console, print_json, show
from completep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from completep.sweep.task import Trial
    from completep.tuning.result import TunePlan
    from completep.tuning.run import Given

Ranges = Annotated[tuple[str, ...], arg(metavar="NAME=LOW..HIGH …")]
Shapes = Annotated[tuple[str, ...], arg(metavar="WIDTHxDEPTH …")]
# `--x` and `--no-x` are two flags: if neither is given, a TOML file decides.
Flag = Annotated[bool, FlagCreatePairsOff]


def tune(
    train: Annotated[Positional[str], arg(metavar="COMMAND|FILE.py:FUNCTION|FILE.toml")] = "",
    /,
    space: Ranges = (),
    loss: str | None = None,
    base_shape: tuple[int, int] | None = None,
    proxies: Shapes = (),
    seeds: int | None = None,
    most_seeds: int | None = None,
    rules: RulesKey | None = None,
    model: Literal["gpt"] | None = None,
    run: Path | None = None,
    set: Words = (),
    take: Literal["last", "min"] | None = None,
    search: Literal["auto", "bracket", "tpe", "gp", "random"] | None = None,
    trials: int | None = None,
    stop_early: Flag = False,
    no_stop_early: Flag = False,
    sources: tuple[str, ...] = (),
    resumes: Flag = False,
    no_resumes: Flag = False,
    ranks: int | None = None,
    factory: str | None = None,
    engine: Literal["local", "ray", "slurm"] = "local",
    workers: int | None = None,
    per_gpu: int = 1,
    address: str | None = None,
    slurm: Words = (),
    accept_changes: bool = False,
    out: Path = Path("runs"),
    dry_run: bool = False,
    init: Path | None = None,
    json: bool = False,
) -> int:
    """Tune your own training script at a small base, and verify that the optimum holds at larger proxies.

    Every run is done once: after an interruption, the same command continues. Exit code: 0 PASS, 1 FAIL or failed runs,
    3 INCONCLUSIVE. See also: completep tune status.

    Example: completep tune 'python train.py --width {width} --depth {depth} --lr {lr} --seed {seed} --out {folder}'
    --loss '{folder}/metrics.jsonl:val_loss' --space lr=2^-10..2^-5 --base-shape 64 2 --proxies 64x8

    Args:
        train: a command with placeholders, a function train(trial) -> loss, or a TOML file with all settings.
        space: what to search, as lr=2^-10..2^-5 (octaves), x=0..0.3:linear:0.1 or x=a,b. Each dimension is verified.
        loss: where the loss of a command is: FILE:KEY (JSON, JSONL, CSV), output:REGEX, or tensorboard:FOLDER:TAG.
        base_shape: width and depth to tune at; by default 64 2.
        proxies: larger shapes at which the optimum is verified; by default four times the depth.
        seeds: number of seeds near the optimum; by default 3. One seed never gives a PASS.
        most_seeds: largest number of seeds, if the noise requires more; by default 8.
        rules: the parameterization that your script applies; {rules} passes it on. By default completep.
        model: gpt tunes the reference decoder, instead of a command or a function.
        run: with --model: a run.json to vary, instead of a small built-in one.
        set: constants of all runs, as steps=1000.
        take: which of several losses counts, the last or the smallest; by default the last.
        search: how to search several dimensions; by default tpe, or random for more than 12. One is bracketed.
        trials: number of runs in a search over several dimensions; by default ten per dimension.
        stop_early: stop hopeless runs of the first search, if the loss is reported during training; the default.
        no_stop_early: let every run finish.
        sources: further files that a run depends on. Your script and what it imports count already.
        resumes: your script continues from {folder} after an interruption. Otherwise each attempt gets an empty folder.
        no_resumes: the default, to override a TOML file.
        ranks: number of GPUs per run.
        factory: file.py:model, which takes width and depth, to measure whether the base is fit to tune at.
        engine: this machine, a Ray cluster or a SLURM cluster, whose nodes share the folder.
        workers: runs at a time; by default one per core or GPU, and 4 with SLURM.
        per_gpu: number of runs that share a GPU.
        address: address of a Ray cluster; by default a cluster is started on this machine.
        slurm: options of the array job, as partition=gpu time=2:00:00: partition, account, qos, gres, time, constraint,
            nodes, mem, cpus, idle, and setup (shell lines that run before the worker).
        accept_changes: let runs count that were done before a script changed.
        out: folder for tuned.json, for the runs (in `store`) and for the report (in a new folder).
        dry_run: only show what would run.
        init: write a commented TOML file with all settings, and do nothing else.
        json: print JSON.
    """
    from completep import tune as run_tuning
    from completep.cli.board import Watch
    from completep.files import write_new
    from completep.load import parse_arguments
    from completep.studies.scale import read_shape
    from completep.tuning.run import changes_of, tune_plan, tuning_of
    from completep.tuning.settings import INIT

    if init is not None:
        write_new(init, INIT)
        print_json({"file": str(init)}) if json else console().print(
            f"wrote {init}; edit it, then: completep tune {init}"
        )
        return 0
    given: Given = {
        "space": space or None, "loss": loss, "base": base_shape,
        "proxies": [read_shape(proxy) for proxy in proxies] or None, "seeds": seeds, "most_seeds": most_seeds,
        "rules": rules, "run": run, "constants": parse_arguments(set) or None, "take": take, "search": search,
        "trials": trials, "stop_early": either("stop-early", stop_early, no_stop_early), "sources": sources or None,
        "resumes": either("resumes", resumes, no_resumes), "ranks": ranks, "factory": factory,
    }  # fmt: skip
    options = {name: str(value) for name, value in parse_arguments(slurm).items()}
    if dry_run:
        plan = tune_plan(
            train, model=model, workers=workers, accept_changes=accept_changes, out=out, engine=engine,
            per_gpu=per_gpu, address=address, slurm=options, **given,
        )  # fmt: skip
        show(plan, json)
        return 0
    swept = tuning_of(train, changes_of(**given), model or "").dimensions[0].name
    plans: list[TunePlan] = []

    def say(plan: "TunePlan") -> None:
        plans.append(plan)
        console(stderr=True).print(plan)

    def expected(trials: "Sequence[Trial]") -> int:
        return plans[-1].expected.runs if trials else plans[-1].search  # several dimensions are searched first

    result = run_tuning(
        train, model=model, engine=engine, workers=workers, per_gpu=per_gpu, address=address, slurm=options,
        accept_changes=accept_changes, out=out, watch=Watch("tune", swept, expected), on_plan=say,
        tell=lambda line: console(stderr=True).print(line), **given,
    )  # fmt: skip
    show(result, json, out)
    return 1 if result.failed else EXIT[result.verdict]


def either(name: str, yes: bool, no: bool) -> bool | None:
    """The value of a pair of flags; None if neither is given."""
    if yes and no:
        raise UserError(f"--{name} and --no-{name} are both given", fix="give one of them")
    return yes if yes or no else None


def tune_status(out: Path = Path("runs"), json: bool = False) -> int:
    """Show the progress of every tuning: runs done, diverged, running and missing.

    Example: completep tune status

    Args:
        out: where the runs are.
        json: print JSON.
    """
    from completep.tuning.run import tune_status as run

    show(run(out=out), json)
    return 0
