"""The real lm-evaluation-harness on a small model, offline: its prompts and metrics, our log-likelihoods."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch

from completep.cli import main
from completep.config import sealed, unsealed
from completep.errors import UserError
from completep.integrations import harness
from completep.integrations.runs import load_run, longest_text
from completep.integrations.scoring import Score, score
from completep.train.loop import How, train
from tests.integrations.items import ITEMS, write_items
from tests.train.runs import small_data, small_run

pytest.importorskip("lm_eval", reason="needs the extra `eval`")
pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's own
TASKS = list(harness.TASKS)


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    return write_items(tmp_path_factory.mktemp("items"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    data = small_data(folder)
    for name, seed in (("first", 0), ("second", 1)):
        train(small_run(data, seed=seed), folder / name, How(peak=1e11))
    return folder / "first", folder / "second"


def naive_choice(model, tokenizer, text, choices, normalised):
    """The best choice, each read on its own, by the definition of the harness."""
    scores = []
    for choice in choices:
        begin, whole = list(tokenizer.encode(text)), list(tokenizer.encode(text + " " + choice))
        with torch.no_grad():
            logits = model(torch.tensor([[int(t) for t in whole[:-1]]])).double().log_softmax(-1)[0]
        ending = range(len(begin) - 1, len(whole) - 1)
        total = sum(logits[i, int(whole[i + 1])].item() for i in ending)
        scores.append(total / (len(choice) if normalised else 1))
    return scores.index(max(scores))


@pytest.mark.slow
def test_all_six_tasks_with_their_prompts_and_metrics(items, runs):
    model, tokenizer = load_run(runs[0])
    evaluation = harness.evaluate("x", model, tokenizer, TASKS, data=items, limit=None, longest=2048)
    assert list(evaluation.tasks) == TASKS
    assert dict(evaluation.items) == {task: len(ITEMS[task]) for task in TASKS}
    # Three of them by hand, with the prompts in the files of the harness.
    arc = [
        naive_choice(model, tokenizer, f"Question: {d['question']}\nAnswer:", d["choices"]["text"], True)
        == "ABCD".index(d["answerKey"])
        for d in ITEMS["arc_easy"]
    ]
    assert evaluation.tasks["arc_easy"][0] == pytest.approx(100 * sum(arc) / len(arc))
    piqa = [
        naive_choice(model, tokenizer, f"Question: {d['goal']}\nAnswer:", [d["sol1"], d["sol2"]], True) == d["label"]
        for d in ITEMS["piqa"]
    ]
    assert evaluation.tasks["piqa"][0] == pytest.approx(100 * sum(piqa) / len(piqa))
    boolq = [
        naive_choice(model, tokenizer, f"{d['passage']}\nQuestion: {d['question']}?\nAnswer:", ["no", "yes"], False)
        == d["label"]
        for d in ITEMS["boolq"]
    ]
    assert evaluation.tasks["boolq"][0] == pytest.approx(100 * sum(boolq) / len(boolq))


@pytest.mark.slow
def test_a_model_that_knows_the_answers_scores_all(items, runs, monkeypatch):
    """The other end of the scale: the right ending is the most likely."""
    model, tokenizer = load_run(runs[0])
    right = {d["choices"]["text"]["ABCD".index(d["answerKey"])] for d in ITEMS["arc_easy"]}

    def knows(model, pairs, *, longest):
        texts = [tokenizer.decode(end).strip() for _, end in pairs]
        return [Score(0.0 if text in right else -1e3 * len(text), True) for text in texts]

    monkeypatch.setattr(harness, "score", knows)
    evaluation = harness.evaluate("x", model, tokenizer, ["arc_easy"], data=items, limit=None, longest=2048)
    assert evaluation.tasks["arc_easy"] == (100, 0)


@pytest.mark.slow
def test_each_task_by_the_papers_metric(items, runs, monkeypatch):
    """Short endings are more likely, long ones more likely per character: acc and acc_norm choose differently."""
    model, tokenizer = load_run(runs[0])
    monkeypatch.setattr(
        harness, "score", lambda model, pairs, *, longest: [Score(-(len(end) ** 0.5), True) for _, end in pairs]
    )
    evaluation = harness.evaluate("x", model, tokenizer, TASKS, data=items, limit=None, longest=2048)
    longest_wins = {"hellaswag": 40, "arc_easy": 0, "piqa": 0}  # acc would give 20, 33 and 100
    shortest_wins = {"race": 100, "boolq": 50}  # acc_norm would give 0 and 50
    assert {t: s for t, (s, _) in evaluation.tasks.items()} == {**longest_wins, **shortest_wins, "lambada_openai": 100}
    assert harness.table([evaluation])["random"].to_list()[:-1] == [25, 25, 0, 25, 50, 50]
    assert harness.table([evaluation])["random"][-1] == pytest.approx(29.2, abs=0.05)  # the paper's own average


@pytest.mark.slow
def test_texts_without_tokens(runs):
    """A blank context may have no tokens, and so may an ending."""
    model, tokenizer = load_run(runs[0])
    lm = harness.as_lm(model, tokenizer, 64)
    begin, end = (lm.prefix_token_id,), tuple(tokenizer.encode("fox"))
    expected = score(model, [(begin, tuple(map(int, end)))], longest=64)[0].log_likelihood
    scores = lm._loglikelihood_tokens([(None, [], list(map(int, end))), (None, [1, 2], [])])
    assert scores[0][0] == pytest.approx(expected)
    assert scores[1] == (0.0, True)


@pytest.mark.slow
def test_the_longest_text(runs):
    folder = runs[0]
    text = unsealed((folder / "run.json").read_text())
    assert longest_text(folder, None) == 2048  # ALiBi
    assert longest_text(folder, 100) == 100
    for positions, alone, asked in (("rotary", text["sequence"], 5000), ("learned", text["sequence"], 2048)):
        other = folder.parent / positions
        other.mkdir()
        (other / "run.json").write_text(json.dumps({**text, "model": {**text["model"], "positions": positions}}))
        assert longest_text(other, None) == alone
        assert longest_text(other, 5000) == asked


@pytest.mark.slow
def test_rolling_and_generation(runs):
    from lm_eval.api.instance import Instance

    model, tokenizer = load_run(runs[0])
    lm = harness.as_lm(model, tokenizer, 16)

    def request(kind, *arguments):
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    text = "the quick brown fox jumps over the lazy dog"
    rolling = lm.loglikelihood_rolling([request("loglikelihood_rolling", text)])[0]
    ids = [tokenizer.end, *(int(t) for t in tokenizer.encode(text))]
    whole = score(model, [((ids[0],), tuple(ids[1:]))], longest=10_000)[0].log_likelihood
    assert rolling != pytest.approx(whole)  # windows of 16 forget
    assert harness.as_lm(model, tokenizer, 512).loglikelihood_rolling([request("loglikelihood_rolling", text)])[
        0
    ] == pytest.approx(whole, abs=1e-4)
    generated = lm.generate_until([request("generate_until", "the qu", {"until": ["zzz"], "max_gen_toks": 8})])[0]
    assert 0 < len(generated) <= 8
    cut = lm.generate_until([request("generate_until", "the qu", {"until": [generated[2]], "max_gen_toks": 8})])[0]
    assert cut == generated.split(generated[2])[0]
    with pytest.raises(UserError, match="sampling"):
        lm.generate_until([request("generate_until", "x", {"do_sample": True})])


@pytest.mark.slow
def test_the_command_shows_runs_side_by_side(items, runs, capsys, tmp_path):
    words = ["evaluate", *map(str, runs), "--data", str(items), "--out", str(tmp_path / "table.csv")]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["task"] for row in answer["table"]] == [*TASKS, "average"]
    for run in map(str, runs):
        scores = [row[run] for row in answer["table"][:-1]]
        errors = [row[f"{run} ±"] for row in answer["table"][:-1]]
        assert answer["average"][run]["score"] == pytest.approx(sum(scores) / 6)
        assert answer["average"][run]["stderr"] == pytest.approx(sum(e * e for e in errors) ** 0.5 / 6)
    assert pl.read_csv(tmp_path / "table.csv").height == 7
    assert main(words[:-2]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"best average: .* ± .* %", printed)
    assert re.search(r"hellaswag .* acc_norm .* 5 .* 25 .* \d+\.\d ± \d+\.\d", printed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "--tasks", "helaswag", "--data", "{items}"], "the task 'helaswag' cannot use local items"),
        (["{run}", "--data", "/nowhere"], "/nowhere has no items"),
        (["{run}", "--tasks", "race", "--data", "{broken}"], "has no race.jsonl"),
        (["{run}", "--tasks", "piqa", "piqa", "--data", "{items}"], "name each task once"),
        (["{run}", "--data", "{items}", "--out", "{broken}/piqa.jsonl"], "piqa.jsonl"),
        (["{run}", "/nowhere", "--data", "{items}"], "/nowhere has no model.safetensors"),
        (["/nowhere", "--data", "{items}"], "/nowhere has no model.safetensors"),
        (["{run}", "{run}", "--data", "{items}"], "is given more than once"),
        (["{run}", "--limit", "0", "--data", "{items}"], "limit=0"),
        (["{run}", "--limit", "9" * 30, "--data", "{items}"], "limit=1.000e+30: is too large"),
        (["{run}", "--max-length", "1", "--data", "{items}"], "max_length=1"),
        (["items", "--data", "{items}"], "the run 'items' has the name of another column"),
        (["a", "a ±", "--data", "{items}"], "the run 'a ±' has the name of another column"),
        (["{run}", "--tokenizer", "gpt2", "--data", "{items}"], "50257 ids, the model of"),
        (["{run}", "--tasks", "piqa", "--data", "{broken}"], "the data of piqa cannot be loaded"),
    ],
)
def test_mistakes_are_errors(words, message, items, runs, capsys, tmp_path):
    (tmp_path / "piqa.jsonl").write_text("{not json\n")
    filled = [w.format(run=runs[0], items=items, broken=tmp_path) for w in words]
    assert main(["evaluate", *filled]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_only_tasks_with_an_accuracy(monkeypatch):
    """Before anything is evaluated."""

    class Words:
        def aggregation(self):
            return {"word_perplexity": None}

    with pytest.raises(UserError, match=r"'wikitext' has no accuracy, only word_perplexity"):
        harness.metric_of("wikitext", Words())

    class Manager:
        all_tasks = ("mmlu",)

        def load(self, names):
            return {"tasks": {"mmlu_anatomy": None, "mmlu_virology": None}, "groups": {"mmlu": None}}

    with pytest.raises(UserError, match=r"'mmlu' is a group of tasks.*") as refused:
        harness.load(Manager(), ["mmlu"])
    assert "mmlu_anatomy, mmlu_virology" in refused.value.fix


@pytest.mark.slow
def test_the_downstream_study_takes_the_runs_that_are_there(items, tmp_path, capsys, monkeypatch):
    axes = ["shape=32x1", "rules=completep,mup", "seed=0", "base_lr=2^-6", "base_std=0.1"]
    words = ["--set", *axes, "--items", str(items), "--out", str(tmp_path)]
    assert main(["study", "downstream", *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {row["task"] for row in answer["table"]} == {*TASKS, "average", "validation loss"}
    assert {row["rules"] for row in answer["table"]} == {"completep", "mup"}
    assert Path(answer["files"][0]).exists()
    assert "--items" in Path(answer["files"][0]).read_text()
    # The evaluations are files in the runs' folders: a report reads them, and never evaluates.
    monkeypatch.setattr(harness, "evaluate", lambda *a, **k: pytest.fail("evaluated again"))
    assert main(["report", "downstream", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["table"] == answer["table"]
    for path in tmp_path.glob("store/*/evaluations/*.json"):
        path.unlink()
        break
    assert main(["report", "downstream", *words, "--json"]) == 0
    partly = json.loads(capsys.readouterr().out)
    assert partly["agreement"] == "not finished"
    assert "runs are not evaluated" in partly["sentence"]
    for path in tmp_path.glob("store/*/evaluations/*.json"):
        path.unlink()
    assert main(["report", "downstream", *words, "--json"]) == 2
    assert "no run of this study is evaluated yet" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_with_some_tasks_is_those_tasks(items, tmp_path):
    assert harness.tasks_at(None) == harness.tasks_at(items) == TASKS
    (tmp_path / "piqa.jsonl").write_text((items / "piqa.jsonl").read_text())
    assert harness.tasks_at(tmp_path) == ["piqa"]
    (tmp_path / "piqa.jsonl").unlink()
    with pytest.raises(UserError, match="has no items"):
        harness.tasks_at(tmp_path)


# -- an evaluation is a file in the run's folder


@pytest.mark.slow
def test_an_evaluation_is_read_back_from_json():
    """Also without a standard error, which a single item has not."""
    whole = harness.Evaluation(
        "a run", {"piqa": (50.0, 35.5), "x": (100.0, 2.0)}, {"piqa": "acc_norm", "x": "acc"}, {"piqa": 2, "x": 9}
    )
    assert harness.evaluation_from_json(whole.to_json()) == whole
    single = harness.Evaluation("a run", {"piqa": (100.0, math.nan)}, {"piqa": "acc_norm"}, {"piqa": 1})
    assert "NaN" not in single.to_json()
    back = harness.evaluation_from_json(single.to_json())
    assert back.tasks["piqa"][0] == 100
    assert math.isnan(back.tasks["piqa"][1])


@pytest.fixture
def loads(monkeypatch):
    """The folders of the models that were loaded."""
    real, folders = harness.load_run, []
    monkeypatch.setattr(harness, "load_run", lambda folder, *more: folders.append(folder) or real(folder, *more))
    return folders


@pytest.fixture
def run(runs, tmp_path):
    """A run that nobody has evaluated, with its data beside it."""
    shutil.copytree(runs[0].parent / "data", tmp_path / "data")
    return Path(shutil.copytree(runs[0], tmp_path / "run", ignore=shutil.ignore_patterns("evaluations")))


@pytest.mark.slow
def test_a_run_is_evaluated_once(items, run, loads):
    request = harness.Request(("arc_easy", "piqa"), items, None, 512)
    assert harness.stored_evaluation(run, request) is None
    first = harness.evaluate_run(run, request)
    model, tokenizer = load_run(run)
    assert first == harness.evaluate("run", model, tokenizer, request.tasks, data=items, limit=None, longest=512)
    assert len(loads) == 1
    assert harness.evaluate_run(run, request) == harness.stored_evaluation(run, request) == first
    assert len(loads) == 1
    assert [*(run / "evaluations").iterdir()] == [request.path(run)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"limit": 1}, {"longest": 64}, {"tokenizer": "bytes"}, {"tasks": ("arc_easy",)}, {"data": "other"}]
)
def test_another_request_is_another_evaluation(change, items, run, loads, tmp_path):
    """In the last case the file has the same name and other items."""
    request = harness.Request(("piqa",), items, None, 512)
    harness.evaluate_run(run, request)
    if "data" in change:
        (tmp_path / "piqa.jsonl").write_text((items / "piqa.jsonl").read_text().replace('"label": 1', '"label": 0'))
        change = {"data": tmp_path}
    harness.evaluate_run(run, replace(request, **change))
    assert len(loads) == len([*(run / "evaluations").iterdir()]) == 2


@pytest.mark.slow
def test_the_same_items_elsewhere_are_the_same_evaluation(items, run, loads, tmp_path):
    copied = Path(shutil.copytree(items, tmp_path / "copied"))
    for data in (items, copied):
        harness.evaluate_run(run, harness.Request(("piqa",), data, None, 512))
    assert len(loads) == 1


DAMAGE = {
    "cut short": lambda text: text[:40],
    "another number": lambda text: re.sub(r'"items": \d', '"items": 9', text),
    "empty": lambda text: "",
    "a field too many": lambda text: text.replace('"name"', '"colour": 1, "name"'),
    "a field missing": lambda text: text.replace('"metric"', '"colour"'),
    "ill-typed": lambda text: re.sub(r'"accuracy": [\d.]+', '"accuracy": "high"', text),
    "not a number": lambda text: re.sub(r'"accuracy": [\d.]+', '"accuracy": NaN', text),
    "no tasks": lambda text: '{"name": "run", "tasks": {}}',
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_evaluation_is_named(damage, items, run):
    request = harness.Request(("piqa",), items, None, 512)
    harness.evaluate_run(run, request)
    path = request.path(run)
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError, match=re.escape(str(path))) as error:
        harness.evaluate_run(run, request)
    assert error.value.fix == f"delete {path} and evaluate again"


FORGED = {
    "another task": lambda tasks: {"boolq": {**tasks["piqa"], "metric": "acc"}},
    "a task too many": lambda tasks: {**tasks, "boolq": {**tasks["piqa"], "metric": "acc"}},
    "another metric": lambda tasks: {"piqa": {**tasks["piqa"], "metric": "acc"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED.keys())
def test_an_evaluation_of_something_else_is_refused(forge, items, run):
    """Whoever made the folder can seal any scores; those of other tasks must not stand in this table."""
    request = harness.Request(("piqa",), items, None, 512)
    harness.evaluate_run(run, request)
    path = request.path(run)
    content = unsealed(path.read_text())
    path.write_text(sealed({**content, "tasks": forge(content["tasks"])}))
    with pytest.raises(UserError, match="is not the evaluation that was asked for") as error:
        harness.evaluate_run(run, request)
    assert error.value.fix == f"delete {path} and evaluate again"
    path.unlink()
    assert [*harness.evaluate_run(run, request).tasks] == ["piqa"]


@pytest.mark.slow
def test_nothing_is_written_through_a_link(items, run, tmp_path):
    (tmp_path / "victim").mkdir()
    (run / "evaluations").symlink_to(tmp_path / "victim")
    with pytest.raises(UserError, match="evaluations is a symbolic link"):
        harness.evaluate_run(run, harness.Request(("piqa",), items, None, 512))
    assert not [*(tmp_path / "victim").iterdir()]


@pytest.mark.slow
def test_a_run_called_like_a_column_can_be_named_by_its_path(items, run, capsys):
    renamed = run.rename(run.with_name("task"))
    assert main(["evaluate", str(renamed), "--data", str(items), "--tasks", "piqa"]) == 0
    assert "piqa" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("answer", [-1, 2])
def test_an_answer_that_is_no_choice_is_refused(items, run, tmp_path, answer):
    (tmp_path / "items").mkdir()
    text = (items / "piqa.jsonl").read_text().replace('"label": 1', f'"label": {answer}')
    (tmp_path / "items" / "piqa.jsonl").write_text(text)
    request = harness.Request(("piqa",), tmp_path / "items", None, 64)
    with pytest.raises(UserError, match=f"of piqa has the answer {answer}, but choices 0 to 1"):
        harness.evaluate_run(run, request)


@pytest.mark.slow
def test_likelihoods_that_are_not_finite_are_no_scores(items, runs, monkeypatch):
    lm = harness.as_lm(*load_run(runs[0]), 64)
    monkeypatch.setattr(harness, "score", lambda model, pairs, longest: [Score(math.nan, False)] * len(pairs))
    with pytest.raises(UserError, match="not finite"):
        lm._loglikelihood_tokens([(None, [1], [2])])
