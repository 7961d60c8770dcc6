"""`completep tune`, `completep tune status`: your own training, tuned small and verified larger."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from completep.cli.shared import EXIT, RulesName, Words, console, print_json, show
from completep.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from completep.sweep.task import Trial
    from completep.tuning.result import TunePlan

Ranges = Annotated[tuple[str, ...], arg(metavar="NAME=LOW..HIGH …")]
Shapes = Annotated[tuple[str, ...], arg(metavar="WIDTHxDEPTH …")]
# Both ways are flags of their own, so that neither is given where a file decides.
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
    rules: RulesName | None = None,
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

    Every run is made once. After an interruption the same command continues. The exit code is that of the verdict: 0
    PASS, 1 FAIL, 3 INCONCLUSIVE. See also: completep tune status.

    Example: completep tune 'python train.py --width {width} --depth {depth} --lr {lr} --seed {seed} --out {folder}'
    --loss '{folder}/metrics.jsonl:val_loss' --space lr=2^-10..2^-5 --base-shape 64 2 --proxies 64x8

    Args:
        train: a command with placeholders, a function train(trial) -> loss, or a TOML file with all settings.
        space: what to search, as lr=2^-10..2^-5 (octaves), x=0..0.3:linear:0.1 or x=a,b. Each one is verified.
        loss: where the loss of a command is: FILE:KEY (JSON, JSONL, CSV), output:REGEX, or tensorboard:FOLDER:TAG.
        base_shape: width and depth to tune at; by default 64 2.
        proxies: larger shapes at which the optimum is verified; by default four times the depth.
        seeds: seeds near the optimum; by default 3. One never gives a PASS.
        most_seeds: how many there may be if the noise asks for more; by default 8.
        rules: what your script applies; {rules} passes it on.
        model: gpt tunes the reference decoder.
        run: with --model: a run.json to vary, instead of a small built-in one.
        set: constants, as steps=1000.
        take: of several losses, the last or the smallest.
        search: how to search several dimensions; one dimension is bracketed.
        trials: runs of a search over several dimensions.
        stop_early: end hopeless runs of the search with one seed, where the loss is there on the way; the default.
        no_stop_early: let them end by themselves.
        sources: more files whose change makes another run. Your script and what it imports count already.
        resumes: your script continues from {folder}; without it every attempt gets an empty folder.
        no_resumes: the default; for a TOML file that says otherwise.
        ranks: GPUs of each run.
        factory: file.py:model, which takes width and depth, to measure whether the base is fit to tune at.
        engine: this machine, a Ray cluster or a SLURM cluster, whose nodes share the folder.
        workers: runs at a time; by default one per core, or one per GPU; with SLURM 4.
        per_gpu: runs that share a GPU.
        address: of a Ray cluster; by default one is started here.
        slurm: options of the array job: partition, account, qos, gres, time, constraint, nodes, mem, cpus, idle, and
            setup (a snippet before the worker), as partition=gpu time=2:00:00.
        accept_changes: runs that were made before a script changed still count.
        out: runs are kept in the folder `store` here, tuned.json here, and the report in a new folder beside them.
        dry_run: only say what would run.
        init: write a commented TOML file with all settings, and do nothing else.
        json: print JSON.
    """
    from completep import tune as run_tuning
    from completep.cli.board import Watch
    from completep.files import write_new
    from completep.load import parse_arguments
    from completep.studies.scale import read_shape
    from completep.tuning.run import as_space, tune_plan, tuning_of
    from completep.tuning.settings import INIT

    if init is not None:
        write_new(init, INIT)
        print_json({"file": str(init)}) if json else console().print(
            f"wrote {init}; edit it, then: completep tune {init}"
        )
        return 0
    given: dict[str, object] = {
        "space": as_space(space) or None, "loss": loss, "base": None if base_shape is None else list(base_shape),
        "proxies": [[s.width, s.depth] for s in map(read_shape, proxies)] or None, "seeds": seeds,
        "most_seeds": most_seeds, "rules": rules,
        "run": None if run is None else str(run), "set": parse_arguments(set) or None, "take": take, "search": search,
        "trials": trials, "stop_early": either("stop-early", stop_early, no_stop_early),
        "sources": list(sources) or None, "resumes": either("resumes", resumes, no_resumes), "ranks": ranks,
        "factory": factory,
    }  # fmt: skip
    options = {name: str(value) for name, value in parse_arguments(slurm).items()}
    if dry_run:
        plan = tune_plan(
            train, settings=given, model=model or "", workers=workers, accept_changes=accept_changes, out=out,
            engine=engine, per_gpu=per_gpu, address=address, slurm=options,
        )  # fmt: skip
        show(plan, json)
        return 0
    swept = tuning_of(train, given, model or "").dimensions[0].name
    plans: list[TunePlan] = []

    def say(plan: "TunePlan") -> None:
        plans.append(plan)
        console(stderr=True).print(plan)

    def expected(trials: "Sequence[Trial]") -> int:
        return plans[-1].expected.runs if trials else plans[-1].search  # several dimensions are searched first

    result = run_tuning(
        train, model=model, settings=given, engine=engine, workers=workers, per_gpu=per_gpu, address=address,
        slurm=options, accept_changes=accept_changes, out=out, watch=Watch("tune", swept, expected), on_plan=say,
        tell=lambda line: console(stderr=True).print(line),
    )  # fmt: skip
    show(result, json, out)
    return 1 if result.failed else EXIT[result.verdict]


def either(name: str, yes: bool, no: bool) -> bool | None:
    """What two flags say; None if neither is given."""
    if yes and no:
        raise UserError(f"--{name} and --no-{name} are both given", fix="give one of them")
    return yes if yes or no else None


def tune_status(out: Path = Path("runs"), json: bool = False) -> int:
    """How far every tuning is: runs done, diverged, running and missing.

    Example: completep tune status

    Args:
        out: where the runs are.
        json: print JSON.
    """
    from completep.tuning.run import tune_status as run

    show(run(out=out), json)
    return 0
