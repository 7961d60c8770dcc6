"""The lm-evaluation-harness on our models: its tasks, prompts and metrics, our log-likelihoods."""

import difflib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from completep.data.tokenizer import Tokenizer
from completep.errors import UserError
from completep.integrations.scoring import Pair, Score, continue_greedily, score
from completep.model.gpt import GPT

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


@dataclass(frozen=True)
class Task:
    """One of the paper's tasks (App. "Downstream evaluation details"), and where the harness keeps it."""

    metric: str
    chance: float  # what guessing gives, in %
    file: str
    split: str


TASKS = {
    "hellaswag": Task("acc_norm", 25, "hellaswag/hellaswag.yaml", "validation"),
    "arc_easy": Task("acc_norm", 25, "arc/arc_easy.yaml", "test"),
    "lambada_openai": Task("acc", 0, "lambada/lambada_openai.yaml", "test"),
    "race": Task("acc", 25, "race/race.yaml", "test"),
    "piqa": Task("acc_norm", 50, "piqa/piqa.yaml", "validation"),
    "boolq": Task("acc", 50, "super_glue/boolq/default.yaml", "validation"),
}
SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def harness() -> Any:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        import lm_eval
    except ImportError as error:
        raise UserError("the lm-evaluation-harness is not installed", fix="pip install 'completep[eval]'") from error
    return lm_eval


def as_lm(model: GPT, tokenizer: Tokenizer, longest: int) -> Any:
    """Our model as the harness wants one."""
    harness()
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class Decoder(TemplateLM):  # type: ignore[misc]
        eot_token_id = tokenizer.end

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return [int(i) for i in tokenizer.encode(string)]

        def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            # A text of blanks may have no tokens: it begins where all texts do. An ending of none is sure.
            pairs: list[Pair] = [(tuple(begin) or (self.prefix_token_id,), tuple(end)) for _, begin, end in requests]
            found = iter(score(model, [pair for pair in pairs if pair[1]], longest=longest))
            each = [next(found) if end else Score(0.0, True) for _, end in pairs]
            return [(s.log_likelihood, s.greedy) for s in each]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            pairs: list[Pair] = []
            owners: list[int] = []
            for i, request in enumerate(requests):
                windows = get_rolling_token_windows(self.tok_encode(request.args[0]), self.prefix_token_id, longest, 1)
                for window in windows:
                    begin, end = make_disjoint_window(window)
                    pairs.append((tuple(begin), tuple(end)))
                    owners.append(i)
            totals = [0.0] * len(requests)
            for owner, found in zip(owners, score(model, pairs, longest=longest), strict=True):
                totals[owner] += found.log_likelihood
            return totals

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return [self._generate(*request.args) for request in requests]

        def _generate(self, text: str, options: Mapping[str, Any]) -> str:
            if options.get("do_sample") or options.get("temperature", 0):
                raise UserError("sampling is not supported: only the likeliest text", fix="use do_sample: false")
            until = [options["until"]] if isinstance(options.get("until"), str) else list(options.get("until") or [])
            begin = self.tok_encode(text) or [self.prefix_token_id]
            written: list[int] = []
            said = ""
            for token in continue_greedily(
                model, begin, most=int(options.get("max_gen_toks", 256)), longest=longest, stop=[tokenizer.end]
            ):
                written.append(token)
                said = tokenizer.decode(written)
                if any(end in said for end in until):
                    return min((said.split(end)[0] for end in until), key=len)
            return said

    return Decoder()


@dataclass(frozen=True)
class Evaluation:
    """One model's scores, in %."""

    name: str
    tasks: Mapping[str, tuple[float, float]]  # task → accuracy, standard error
    metrics: Mapping[str, str]
    items: Mapping[str, int]

    @property
    def average(self) -> tuple[float, float]:
        """Mean over tasks, and its standard error from theirs."""
        scores = list(self.tasks.values())
        return sum(s for s, _ in scores) / len(scores), sum(e * e for _, e in scores) ** 0.5 / len(scores)


def evaluate(
    name: str,
    model: GPT,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    data: Path | None,
    limit: int | None,
    longest: int,
) -> Evaluation:
    """Zero-shot accuracies by the harness's own tasks; on local files where a folder is given."""
    lm_eval = harness()
    with local_tasks(tasks, data) as manager:
        lm, loaded = as_lm(model, tokenizer, longest), load(manager, tasks)
        # Zero-shot is what these tasks are by default; bootstrap is for perplexities only, which are not reported.
        options = {"limit": limit, "bootstrap_iters": 10, "log_samples": False, "verbosity": "ERROR"}
        metrics = {task: metric_of(task, loaded["tasks"][task]) for task in tasks}
        with quietly():
            found = lm_eval.evaluate(lm=lm, task_dict=loaded, **options)
    scores, items = {}, {}
    for task, metric in metrics.items():
        result = found["results"][task]
        error = result.get(f"{metric}_stderr,none")
        # The standard error of a share, as the harness computes it; it gives none for a single item.
        scores[task] = (
            100 * float(result[f"{metric},none"]),
            100 * float(error) if isinstance(error, float) else float("nan"),
        )
        items[task] = int(found["n-samples"][task]["effective"])
    return Evaluation(name, scores, metrics, items)


def metric_of(name: str, task: Any) -> str:
    """The paper's for its tasks; for others the normalised accuracy where there is one."""
    if name in TASKS:
        return TASKS[name].metric
    known = set(task.aggregation())
    found = next((m for m in ("acc_norm", "acc") if m in known), None)
    if found is None:
        raise UserError(
            f"the task {name!r} has no accuracy, but {', '.join(sorted(known)) or 'nothing'}",
            fix="use tasks with acc or acc_norm; for others give completep.integrations.harness.as_lm(…) to lm_eval itself",
        )
    return found


def load(manager: "TaskManager", tasks: Sequence[str]) -> Any:
    """The tasks with their data; whatever goes wrong there is about the user's names, files or network."""
    if not tasks or len(set(tasks)) < len(tasks):
        raise UserError(f"tasks: {', '.join(tasks) or 'none'}", fix="name each task once, such as arc_easy piqa")
    known = set(manager.all_tasks)
    for task in tasks:
        if task not in known:
            close = difflib.get_close_matches(task, known, 3)
            raise UserError(
                f"no task {task!r}", fix="did you mean " + ", ".join(close) if close else "see lm-eval's list of tasks"
            )
    try:
        with quietly():
            loaded = manager.load(list(tasks))
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"the data of {', '.join(tasks)} cannot be loaded: {first}",
            fix="check the files in --data, or without --data that the hub can be reached",
        ) from error
    for task in tasks:
        if task not in loaded["tasks"]:
            some = ", ".join(list(loaded["tasks"])[:5])
            raise UserError(f"{task!r} is a group of tasks", fix=f"name the tasks themselves, such as {some}")
    return loaded


@contextmanager
def local_tasks(tasks: Sequence[str], data: Path | None) -> "Iterator[TaskManager]":
    """The official tasks on the user's own files: their YAML is included, and only says another place for the data."""
    root = Path(str(harness().__file__)).parent / "tasks"
    from lm_eval.tasks import TaskManager

    if data is None:
        yield TaskManager(verbosity="ERROR")
        return
    with tempfile.TemporaryDirectory() as folder, offline():
        for task in tasks:
            if task not in TASKS:
                raise UserError(f"no local form of the task {task!r}", fix="use one of " + ", ".join(TASKS))
            file, split = local_file(data, task), TASKS[task].split
            lines = {
                "include": str(root / TASKS[task].file), "task": task, "dataset_path": SUFFIXES[file.suffix], "dataset_name": None,
                "dataset_kwargs": {"data_files": {split: str(file.absolute())}}, "training_split": None, "fewshot_split": split,
                "validation_split": split if split == "validation" else None,
            }  # fmt: skip
            (Path(folder) / f"{task}.yaml").write_text(json.dumps(lines))  # JSON is YAML
        yield TaskManager(verbosity="ERROR", include_path=folder, include_defaults=False)


def tasks_at(data: Path | None) -> list[str]:
    """The paper's tasks; with a folder, those of them whose items it holds."""
    found = [task for task in TASKS if data is None or local_files(data, task)]
    if not found:
        raise UserError(
            f"{data} has no items", fix="put files there such as " + ", ".join(f"{task}.jsonl" for task in TASKS)
        )
    return found


def local_files(data: Path, task: str) -> list[Path]:
    return [data / f"{task}{suffix}" for suffix in SUFFIXES if (data / f"{task}{suffix}").is_file()]


def local_file(data: Path, task: str) -> Path:
    found = local_files(data, task)
    if not found:
        raise UserError(
            f"{data} has no {task}.jsonl", fix="put the task's items there, in the fields of the official data set"
        )
    return found[0]


@contextmanager
def quietly() -> Iterator[None]:
    """The harness's own bars and notices would fill the screen, and come between JSON's lines."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def offline() -> Iterator[None]:
    """Nothing is fetched while local files are used."""
    wanted = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def table(found: Sequence[Evaluation]) -> pl.DataFrame:
    """The paper's layout: a row a task and one for the average; what guessing gives, then a column a model."""
    rows: list[dict[str, Any]] = []
    for task, metric in found[0].metrics.items():
        chance = TASKS[task].chance if task in TASKS else None
        row: dict[str, Any] = {"task": task, "metric": metric, "items": found[0].items[task], "random": chance}
        for e in found:
            row |= {e.name: e.tasks[task][0], f"{e.name} ±": e.tasks[task][1]}
        rows.append(row)
    chances = [row["random"] for row in rows]
    mean = None if None in chances else sum(chances) / len(chances)
    last: dict[str, Any] = {"task": "average", "metric": "", "items": sum(found[0].items.values()), "random": mean}
    for e in found:
        last |= {e.name: e.average[0], f"{e.name} ±": e.average[1]}
    return pl.DataFrame([*rows, last], infer_schema_length=None)
