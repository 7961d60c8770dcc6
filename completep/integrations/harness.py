"""Zero-shot accuracies by the lm-evaluation-harness: its tasks, prompts and metrics, with our log-likelihoods.

`evaluate` evaluates a model. `evaluate_run` evaluates a run and stores the result in the run's folder.
"""

import difflib
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import polars as pl

from completep.config import sealed, structure, unsealed
from completep.data.tokenizer import Tokenizer, load_tokenizer
from completep.errors import UserError, some
from completep.files import read_text, sha256_of, write_new
from completep.integrations.runs import accelerator, load_run
from completep.integrations.scoring import Pair, Score, continue_greedily, score
from completep.model.gpt import GPT
from completep.stats import error_of_mean

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager


@dataclass(frozen=True)
class Task:
    """One of the paper's tasks (App. "Downstream evaluation details"), and its file in the harness."""

    metric: str
    chance: float  # accuracy of guessing, in %
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


def harness() -> ModuleType:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        import lm_eval
    except ImportError as error:
        raise UserError("the lm-evaluation-harness is not installed", fix="pip install 'completep[eval]'") from error
    return lm_eval  # type: ignore[no-any-return]


def as_lm(model: GPT, tokenizer: Tokenizer, longest: int) -> "TemplateLM":
    """The model behind the harness's interface. Texts longer than `longest` tokens lose their start."""
    harness()
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class Decoder(TemplateLM):  # type: ignore[misc]
        eot_token_id = tokenizer.end

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return [int(i) for i in tokenizer.encode(string)]

        def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            # Blank text may have no tokens. An empty beginning is replaced by the prefix token that starts every text.
            # An empty ending is certain.
            pairs: list[Pair] = [(tuple(begin) or (self.prefix_token_id,), tuple(end)) for _, begin, end in requests]
            scores = iter(score(model, [pair for pair in pairs if pair[1]], longest=longest))
            in_order = [next(scores) if end else Score(0.0, True) for _, end in pairs]
            refuse_no_numbers(s.log_likelihood for s in in_order)
            return [(s.log_likelihood, s.greedy) for s in in_order]

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
            for owner, scored in zip(owners, score(model, pairs, longest=longest), strict=True):
                totals[owner] += scored.log_likelihood
            refuse_no_numbers(totals)
            return totals

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return [self._generate(*request.args) for request in requests]

        def _generate(self, text: str, options: Mapping[str, Any]) -> str:
            if options.get("do_sample") or options.get("temperature", 0):
                raise UserError("sampling is not supported, only greedy decoding", fix="use do_sample: false")
            until = [options["until"]] if isinstance(options.get("until"), str) else list(options.get("until") or [])
            begin = self.tok_encode(text) or [self.prefix_token_id]
            most = int(options.get("max_gen_toks", 256))
            tokens: list[int] = []
            generated = ""
            for token in continue_greedily(model, begin, most=most, longest=longest, stop=[tokenizer.end]):
                tokens.append(token)
                generated = tokenizer.decode(tokens)
                if any(end in generated for end in until):
                    return min((generated.split(end)[0] for end in until), key=len)
            return generated

    return Decoder()


def refuse_no_numbers(likelihoods: Iterable[float]) -> None:
    """The harness would take the first of several NaNs for the most likely choice."""
    if not all(map(math.isfinite, likelihoods)):
        what = "the model's log-likelihoods are not finite numbers, so there is nothing to score"
        raise UserError(what, fix="evaluate a run that did not diverge")


@dataclass(frozen=True)
class Evaluation:
    """The scores of one model, in %."""

    name: str
    tasks: Mapping[str, tuple[float, float]]  # task → accuracy, standard error
    metrics: Mapping[str, str]
    items: Mapping[str, int]

    @property
    def average(self) -> tuple[float, float]:
        """The mean over tasks, and its standard error from those of the tasks."""
        scores = list(self.tasks.values())
        return sum(s for s, _ in scores) / len(scores), error_of_mean([e for _, e in scores])

    def to_json(self) -> str:
        tasks = {
            task: StoredTask(accuracy, None if math.isnan(error) else error, self.metrics[task], self.items[task])
            for task, (accuracy, error) in self.tasks.items()
        }
        return sealed(json.loads(json.dumps(asdict(Stored(self.name, tasks)), allow_nan=False)))


@dataclass(frozen=True)
class StoredTask:
    accuracy: float
    stderr: float | None  # None: a single item has no standard error
    metric: str
    items: int


@dataclass(frozen=True)
class Stored:
    """The JSON form of an evaluation."""

    name: str
    tasks: dict[str, StoredTask]


def evaluation_from_json(text: str, name: str = "evaluation.json") -> Evaluation:
    """Read what `Evaluation.to_json` wrote. `name` is what error messages call it."""
    fix = f"delete {name} and evaluate again"

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not a number")

    try:
        json.loads(text, parse_constant=refuse)
        content = unsealed(text, or_plain=True)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is damaged: {error}", fix=fix) from error
    stored = structure(content, Stored, name, fix)
    if not stored.tasks:
        raise UserError(f"{name} has no tasks", fix=fix)
    for task, s in stored.tasks.items():
        if not (0 <= s.accuracy <= 100 and 0 <= (s.stderr or 0) <= 100 and 0 <= s.items < 2**63):
            raise UserError(f"{name}: the scores of {task!r:.80} are out of range", fix=fix)
    return Evaluation(
        stored.name,
        {task: (s.accuracy, math.nan if s.stderr is None else s.stderr) for task, s in stored.tasks.items()},
        {task: s.metric for task, s in stored.tasks.items()},
        {task: s.items for task, s in stored.tasks.items()},
    )


@dataclass(frozen=True)
class Request:
    """What to evaluate a run on."""

    tasks: tuple[str, ...]
    data: Path | None  # a folder of local items; None means the hub
    limit: int | None  # items per task; None means all
    longest: int  # tokens that are read at most
    tokenizer: str | None = None  # None means the tokenizer of the run's data

    @property
    def key(self) -> str:
        """A short hash of everything that determines the scores of a run. Local items count by their content."""
        items = "hub" if self.data is None else [sha256_of(local_file(self.data, task)) for task in self.tasks]
        tokenizer = None if self.tokenizer is None else load_tokenizer(self.tokenizer).fingerprint
        content = [self.tasks, self.limit, self.longest, items, tokenizer]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]

    def path(self, folder: Path) -> Path:
        return folder / "evaluations" / f"{self.key}.json"


def evaluate_run(folder: Path, request: Request) -> Evaluation:
    """Evaluate a run once. The result is stored in `folder/evaluations`, and a second call reads it from there."""
    if request.path(folder).parent.is_symlink():  # what it leads to is not ours to write to
        what = f"{request.path(folder).parent} is a symbolic link"
        raise UserError(what, fix="put the folder itself there, or link the whole folder of the run")
    if (stored := stored_evaluation(folder, request)) is not None:
        return stored
    model, tokenizer = load_run(folder, request.tokenizer, accelerator())
    evaluation = evaluate(
        folder.name, model, tokenizer, request.tasks, data=request.data, limit=request.limit, longest=request.longest
    )
    path = request.path(folder)
    try:
        write_new(path, evaluation.to_json())
    except UserError:
        if not path.exists():  # else another process was faster, with the same result
            raise
    return evaluation


def stored_evaluation(folder: Path, request: Request) -> Evaluation | None:
    """What `evaluate_run` stored in the folder, or None. It may come from somebody else, so it must fit the request."""
    path = request.path(folder)
    if not path.exists():
        return None
    stored = evaluation_from_json(read_text(path), str(path))
    expected = {task: TASKS[task].metric if task in TASKS else stored.metrics.get(task) for task in request.tasks}
    if dict(stored.metrics) != expected:
        tasks = some([f"{task} ({metric})" for task, metric in stored.metrics.items()])
        what = f"{path} is not the evaluation that was asked for: it has {tasks}"
        raise UserError(what, fix=f"delete {path} and evaluate again")
    return stored


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
    """Zero-shot accuracies on the harness's tasks: on the local items in `data`, or on data sets of the hub."""
    lm_eval = harness()
    with local_tasks(tasks, data) as manager:
        lm, loaded = as_lm(model, tokenizer, longest), load(manager, tasks)
        # These tasks are zero-shot by default. Bootstrapping is used only for perplexities, which are not reported.
        options = {"limit": limit, "bootstrap_iters": 10, "log_samples": False, "verbosity": "ERROR"}
        metrics = {task: metric_of(task, loaded["tasks"][task]) for task in tasks}
        for task in tasks if data is not None else ():
            refuse_answers(task, loaded["tasks"][task], limit)
        with quietly():
            answer = lm_eval.evaluate(lm=lm, task_dict=loaded, **options)
    scores, items = {}, {}
    for task, metric in metrics.items():
        result = answer["results"][task]
        error = result.get(f"{metric}_stderr,none")  # the harness gives none for a single item
        stderr = 100 * float(error) if isinstance(error, float) else math.nan
        scores[task] = (100 * float(result[f"{metric},none"]), stderr)
        items[task] = int(answer["n-samples"][task]["effective"])
    return Evaluation(name, scores, metrics, items)


def refuse_answers(name: str, task: Any, limit: int | None) -> None:
    """Refuse an item whose right answer is none of its choices: the harness would count from the last choice."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return
    for i, item in enumerate(islice(task.eval_docs, limit)):
        answer, choices = task.doc_to_target(item), task.doc_to_choice(item)
        if isinstance(answer, int) and not 0 <= answer < len(choices):
            what = f"item {i + 1} of {name} has the answer {answer}, but choices 0 to {len(choices) - 1}"
            raise UserError(what, fix="correct the item or leave it out")


def metric_of(name: str, task: Any) -> str:
    """The paper's metric for its tasks. For other tasks, the normalised accuracy if there is one, else the accuracy."""
    if name in TASKS:
        return TASKS[name].metric
    known = set(task.aggregation())
    for metric in ("acc_norm", "acc"):
        if metric in known:
            return metric
    raise UserError(
        f"the task {name!r} has no accuracy, only {', '.join(sorted(known)) or 'nothing'}",
        fix="use tasks with acc or acc_norm, or pass completep.integrations.harness.as_lm(…) to lm_eval yourself",
    )


def load(manager: "TaskManager", tasks: Sequence[str]) -> dict[str, Any]:
    """The tasks with their data. Every failure here comes from a name, a file or the network, so it is a UserError."""
    if not tasks or len(set(tasks)) < len(tasks):
        raise UserError(f"tasks: {', '.join(tasks) or 'none'}", fix="name each task once, such as arc_easy piqa")
    known = set(manager.all_tasks)
    for task in tasks:
        if task not in known:
            close = difflib.get_close_matches(task, known, 3)
            fix = f"did you mean {', '.join(close)}?" if close else "list the tasks with `lm-eval ls tasks`"
            raise UserError(f"no task {task!r}", fix=fix)
    try:
        with quietly():
            loaded: dict[str, Any] = manager.load(list(tasks))
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"the data of {', '.join(tasks)} cannot be loaded: {first}",
            fix="check the files in the data folder; without a data folder, check that the hub can be reached",
        ) from error
    for task in tasks:
        if task not in loaded["tasks"]:
            fix = f"name the tasks themselves, such as {some(list(loaded['tasks']))}"
            raise UserError(f"{task!r} is a group of tasks", fix=fix)
    return loaded


@contextmanager
def local_tasks(tasks: Sequence[str], data: Path | None) -> "Iterator[TaskManager]":
    """The official tasks on local files: their YAML is included, and only the place of the data is overridden."""
    root = Path(str(harness().__file__)).parent / "tasks"
    from lm_eval.tasks import TaskManager

    if data is None:
        yield TaskManager(verbosity="ERROR")
        return
    with tempfile.TemporaryDirectory() as folder, offline():
        for task in tasks:
            file, split = local_file(data, task), TASKS[task].split
            settings = {
                "include": str(root / TASKS[task].file),
                "task": task,
                "dataset_path": SUFFIXES[file.suffix],
                "dataset_name": None,
                "dataset_kwargs": {"data_files": {split: str(file.absolute())}},
                "training_split": None,
                "fewshot_split": split,
                "validation_split": split if split == "validation" else None,
            }
            (Path(folder) / f"{task}.yaml").write_text(json.dumps(settings))  # JSON is YAML
        yield TaskManager(verbosity="ERROR", include_path=folder, include_defaults=False)


def tasks_at(data: Path | None) -> list[str]:
    """The paper's tasks. With a folder, only those whose items are in it."""
    tasks = [task for task in TASKS if data is None or local_files(data, task)]
    if not tasks:
        fix = "put files there such as " + ", ".join(f"{task}.jsonl" for task in TASKS)
        raise UserError(f"{data} has no items", fix=fix)
    return tasks


def local_files(data: Path, task: str) -> list[Path]:
    return [data / f"{task}{suffix}" for suffix in SUFFIXES if (data / f"{task}{suffix}").is_file()]


def local_file(data: Path, task: str) -> Path:
    if task not in TASKS:
        raise UserError(f"the task {task!r} cannot use local items", fix="use one of " + ", ".join(TASKS))
    files = local_files(data, task)
    if not files:
        fix = "put the items of the task there, with the fields of the official data set"
        raise UserError(f"{data} has no {task}.jsonl", fix=fix)
    return files[0]


@contextmanager
def quietly() -> Iterator[None]:
    """Hide the progress bars and notices of the harness, which would also mix with JSON output."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def offline() -> Iterator[None]:
    """Download nothing."""
    changed = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def table(evaluations: Sequence[Evaluation]) -> pl.DataFrame:
    """The paper's layout: one row per task and one for the average; the accuracy of guessing, then one model each."""
    first = evaluations[0]
    rows: list[dict[str, Any]] = []
    for task, metric in first.metrics.items():
        chance = TASKS[task].chance if task in TASKS else None
        row: dict[str, Any] = {"task": task, "metric": metric, "items": first.items[task], "random": chance}
        for e in evaluations:
            row |= {e.name: e.tasks[task][0], f"{e.name} ±": e.tasks[task][1]}
        rows.append(row)
    chances = [row["random"] for row in rows]
    mean = None if None in chances else sum(chances) / len(chances)
    average: dict[str, Any] = {"task": "average", "metric": "", "items": sum(first.items.values()), "random": mean}
    for e in evaluations:
        average |= {e.name: e.average[0], f"{e.name} ±": e.average[1]}
    return pl.DataFrame([*rows, average], infer_schema_length=None)
