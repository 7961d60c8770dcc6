"""`completep evaluate` and `completep export`: what becomes of trained runs."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from completep.cli.shared import console, print_json
from completep.errors import UserError


def evaluate(
    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN …")],
    /,
    tasks: tuple[str, ...] = ("hellaswag", "arc_easy", "lambada_openai", "race", "piqa", "boolq"),
    data: Path | None = None,
    limit: int | None = None,
    max_length: int = 2048,
    tokenizer: str | None = None,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Zero-shot accuracy of trained runs, side by side, by the lm-evaluation-harness's own tasks and metrics.

    Needs `pip install 'completep[eval]'`. With --data nothing is fetched: the folder holds a file a task, as hellaswag.jsonl, in the
    fields of the official data set.

    Example: completep evaluate runs/first runs/second --tasks arc_easy piqa --limit 200

    Args:
        runs: folders of runs that are done.
        tasks: names of tasks; the paper's six by default.
        data: a folder of local items instead of the hub's data sets.
        limit: only the first so many items of each task.
        max_length: tokens that are read at most; longer texts lose their start.
        tokenizer: if the run's own data is not there any more: bytes, gpt2 or a tokenizer.json.
        out: write the table as CSV here too.
        json: print JSON.
    """
    from rich.markup import escape

    from completep.files import write_new
    from completep.integrations import harness
    from completep.integrations.runs import load_run
    from completep.report.study_view import to_rich

    if not runs:
        raise UserError("no run to evaluate", fix="name the folder of a run that is done")
    if (limit is not None and limit < 1) or max_length < 2:
        raise UserError(f"--limit {limit} --max-length {max_length}: too small", fix="leave them out for the defaults")
    names = [str(path) for path in dict.fromkeys(runs)]
    if len(names) < len(runs):
        raise UserError("a run is named twice", fix="name each run once")
    found = []
    for i, name in enumerate(names):
        console(stderr=True).print(escape(f"evaluating {name} ({i + 1} of {len(names)})"))
        model, words = load_run(Path(name), tokenizer)
        longest = min(max_length, model.config.context) if model.config.positions == "learned" else max_length
        found.append(harness.evaluate(name, model, words, tasks, data=data, limit=limit, longest=longest))
    table = harness.table(found)
    if out is not None:
        write_new(out, table.write_csv())
    if json:
        print_json(
            {
                "table": table.to_dicts(),
                "average": {e.name: {"score": e.average[0], "stderr": e.average[1]} for e in found},
            }
        )
        return 0
    console().print(to_rich(table, "zero-shot accuracy, % ± standard error"))
    best = max(found, key=lambda e: e.average[0])
    close = [
        e.name for e in found if e is not best and best.average[0] - e.average[0] <= max(best.average[1], e.average[1])
    ]
    told = f"best average: {best.name} at {best.average[0]:.1f} ± {best.average[1]:.1f} %"
    console().print(escape(told + (f"; within its standard error: {', '.join(close)}" if close else "")))
    return 0


def export(
    run: Annotated[Positional[Path], arg(metavar="RUN")],
    /,
    out: Path,
    tokenizer: str | None = None,
    json: bool = False,
) -> int:
    """A trained run as a Hugging Face folder: config.json, safetensors, tokenizer.

    As an architecture that transformers has where one fits exactly (Llama, Qwen3, Nemotron, GPT-2), else with the decoder's own source
    beside the weights, for trust_remote_code=True. Needs `pip install 'completep[hf]'`.

    Example: completep export runs/first --out exported

    Args:
        run: the folder of a run that is done.
        out: a new folder.
        tokenizer: if the run's own data is not there any more: bytes, gpt2 or a tokenizer.json.
        json: print JSON.
    """
    from completep.integrations import huggingface
    from completep.integrations.runs import load_run

    model, words = load_run(run, tokenizer)
    name = huggingface.export(model, words, out)
    own = name == "CompletePForCausalLM"
    if json:
        print_json({"folder": str(out), "architecture": name, "trust_remote_code": own})
    else:
        told = "its own source: load it with trust_remote_code=True" if own else "an architecture of transformers"
        console().print(f"{out}: {name}, {told}")
    return 0
