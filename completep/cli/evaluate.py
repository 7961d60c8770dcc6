"""`completep evaluate` and `completep export`: trained runs, scored and converted."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from completep.cli.shared import console, print_json, progress_bar, show
from completep.errors import UserError


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
    """Compare the zero-shot accuracy of trained runs on tasks of the lm-evaluation-harness.

    Needs `pip install 'completep[eval]'`. With --data nothing is downloaded: the folder has one file per task, such as
    hellaswag.jsonl, with the fields of the official data set. Tasks without a file are left out.

    Example: completep evaluate runs/first runs/second --tasks arc_easy piqa --limit 200

    Args:
        runs: folders of runs that are done.
        tasks: names of tasks; by default the paper's six: hellaswag arc_easy lambada_openai race piqa boolq.
        data: a folder of local items, instead of data sets from the hub.
        limit: number of items per task, from the first; by default all.
        max_length: largest number of tokens per text; longer texts lose their start. By default the length that the run
            was trained on, and with ALiBi at least 2048.
        tokenizer: bytes, gpt2 or a tokenizer.json, if the run's own data is gone.
        out: also write the table as CSV to this file.
        json: print JSON.
    """
    from completep.files import write_new
    from completep.integrations.compare import evaluate as run

    if out is not None and out.exists():
        raise UserError(f"{out} exists already", fix="choose another name for --out")
    with progress_bar() as progress:
        result = run(
            runs, tasks=tasks, data=data, limit=limit, max_length=max_length, tokenizer=tokenizer, progress=progress
        )
    if out is not None:
        write_new(out, result.table.write_csv())
    show(result, json)
    return 0


def export(
    run: Annotated[Positional[Path], arg(metavar="RUN")],
    /,
    out: Path,
    tokenizer: str | None = None,
    json: bool = False,
) -> int:
    """Write a trained run as a Hugging Face folder: config.json, safetensors, tokenizer.

    Uses an architecture of transformers if one fits exactly (Llama, Qwen3, Nemotron, GPT-2). Otherwise it writes the
    decoder's own source beside the weights, for trust_remote_code=True. Needs `pip install 'completep[hf]'`.

    Example: completep export runs/first --out exported

    Args:
        run: the folder of a run that is done.
        out: a new folder.
        tokenizer: bytes, gpt2 or a tokenizer.json, if the run's own data is gone.
        json: print JSON.
    """
    from completep.integrations import huggingface
    from completep.integrations.runs import load_run

    name = huggingface.export(*load_run(run, tokenizer), out)
    our_class = name == "CompletePForCausalLM"
    if json:
        print_json({"folder": str(out), "architecture": name, "trust_remote_code": our_class})
    else:
        kind = "its own source: load it with trust_remote_code=True" if our_class else "an architecture of transformers"
        console().print(f"{out}: {name}, {kind}")
    return 0
