"""`completep evaluate` and `completep export`: what becomes of trained runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from completep.cli.shared import console, print_json
from completep.errors import UserError

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table


def evaluate(
    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN …")],
    /,
    tasks: tuple[str, ...] = (),
    data: Path | None = None,
    limit: int | None = None,
    max_length: int | None = None,
    tokenizer: str | None = None,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Zero-shot accuracy of trained runs, side by side, by the lm-evaluation-harness's own tasks and metrics.

    Needs `pip install 'completep[eval]'`. With --data nothing is fetched: the folder holds a file a task, as hellaswag.jsonl, in the
    fields of the official data set; tasks that it has no items of are left out.

    Example: completep evaluate runs/first runs/second --tasks arc_easy piqa --limit 200

    Args:
        runs: folders of runs that are done.
        tasks: names of tasks; by default the paper's six: hellaswag arc_easy lambada_openai race piqa boolq.
        data: a folder of local items instead of the hub's data sets.
        limit: only the first so many items of each task.
        max_length: tokens that are read at most; longer texts lose their start. By default what the run was trained on, and 2048 with
            ALiBi.
        tokenizer: if the run's own data is not there any more: bytes, gpt2 or a tokenizer.json.
        out: write the table as CSV here too.
        json: print JSON.
    """
    from rich.markup import escape

    from completep.files import write_new
    from completep.integrations import harness
    from completep.integrations.runs import accelerator, load_run, longest_text

    if not runs:
        raise UserError("no run to evaluate", fix="name the folder of a run that is done")
    if (limit is not None and limit < 1) or (max_length is not None and max_length < 2):
        raise UserError(f"--limit {limit} --max-length {max_length}: too small", fix="leave them out for the defaults")
    if out is not None and out.exists():
        raise UserError(f"{out} is there already", fix="give --out another name")
    names = [str(path) for path in dict.fromkeys(runs)]
    if len(names) < len(runs):
        raise UserError("a run is named twice", fix="name each run once")
    tasks = tasks or tuple(harness.tasks_at(data))
    for name in names:  # a mistake in the last is told before the first is evaluated
        load_run(Path(name), tokenizer)
    found = []
    for i, name in enumerate(names):
        console(stderr=True).print(escape(f"evaluating {name} ({i + 1} of {len(names)})"))
        model, words = load_run(Path(name), tokenizer, accelerator())
        longest = longest_text(Path(name), max_length)
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
    console().print(side_by_side(table, names))
    best = max(found, key=lambda e: e.average[0])
    console().print(escape(f"best average: {best.name} at {best.average[0]:.1f} ± {best.average[1]:.1f} %"))
    return 0


def side_by_side(frame: "pl.DataFrame", names: list[str]) -> "Table":
    """As the paper prints it: what lies within the standard error of a row's best is bold."""
    from rich.markup import escape
    from rich.table import Table

    shown = Table(
        title="zero-shot accuracy, % ± standard error; bold: the best, and what its error does not tell from it"
    )
    shown.title_justify = "left"
    for heading in ("task", "metric", "items", "random"):
        shown.add_column(heading, justify="right" if heading in ("items", "random") else "left")
    for name in names:
        shown.add_column(escape(name), justify="right")
    for row in frame.iter_rows(named=True):
        best = max(names, key=lambda name: row[name])
        cells = []
        for name in names:
            cell = f"{row[name]:.1f} ± {row[f'{name} ±']:.1f}"
            near = not row[best] - row[name] > max(row[f"{best} ±"], row[f"{name} ±"])
            cells.append(f"[bold]{cell}[/]" if near else cell)
        chance = "–" if row["random"] is None else f"{row['random']:.1f}"
        shown.add_row(escape(row["task"]), row["metric"], str(row["items"]), chance, *cells)
    return shown


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
