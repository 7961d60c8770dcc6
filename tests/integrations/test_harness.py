"""The real lm-evaluation-harness on a small model: its prompts, its metrics, our log-likelihoods; nothing fetched."""

import json
import re
from pathlib import Path

import polars as pl
import pytest

from completep.cli import main
from completep.errors import UserError
from completep.integrations import harness
from completep.integrations.runs import load_run
from completep.integrations.scoring import Score, score
from completep.study.engine import with_data
from completep.train.loop import How, train
from tests.integrations.items import ITEMS, write_items
from tests.train.runs import small_data, small_run

pytest.importorskip("lm_eval", reason="needs the extra `eval`")
pytestmark = pytest.mark.filterwarnings("ignore")  # the harness's own
TASKS = list(harness.METRICS)


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    return write_items(tmp_path_factory.mktemp("items"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    data = small_data(folder)
    for name, seed in (("first", 0), ("second", 1)):
        train(with_data(small_run(data, seed=seed)), folder / name, How(peak=1e11))
    return folder / "first", folder / "second"


def naive_choice(model, tokenizer, text, choices, normalised):
    """The best of some endings, each read on its own, as the harness's definition says."""
    import torch

    scores = []
    for choice in choices:
        begin, whole = list(tokenizer.encode(text)), list(tokenizer.encode(text + " " + choice))
        with torch.no_grad():
            logits = model(torch.tensor([[int(t) for t in whole[:-1]]])).double().log_softmax(-1)[0]
        ending = range(len(begin) - 1, len(whole) - 1)
        total = sum(logits[i, int(whole[i + 1])].item() for i in ending)
        scores.append(total / (len(choice) if normalised else 1))
    return scores.index(max(scores))


def test_all_six_tasks_with_their_prompts_and_metrics(items, runs):
    model, tokenizer = load_run(runs[0])
    found = harness.evaluate("x", model, tokenizer, TASKS, data=items, limit=None, longest=2048)
    assert list(found.tasks) == TASKS
    assert dict(found.items) == {task: len(ITEMS[task]) for task in TASKS}
    # Three of them again, by hand: the prompts as the harness's files give them.
    arc = [
        naive_choice(model, tokenizer, f"Question: {d['question']}\nAnswer:", d["choices"]["text"], True)
        == "ABCD".index(d["answerKey"])
        for d in ITEMS["arc_easy"]
    ]
    assert found.tasks["arc_easy"][0] == pytest.approx(100 * sum(arc) / len(arc))
    piqa = [
        naive_choice(model, tokenizer, f"Question: {d['goal']}\nAnswer:", [d["sol1"], d["sol2"]], True) == d["label"]
        for d in ITEMS["piqa"]
    ]
    assert found.tasks["piqa"][0] == pytest.approx(100 * sum(piqa) / len(piqa))
    boolq = [
        naive_choice(model, tokenizer, f"{d['passage']}\nQuestion: {d['question']}?\nAnswer:", ["no", "yes"], False)
        == d["label"]
        for d in ITEMS["boolq"]
    ]
    assert found.tasks["boolq"][0] == pytest.approx(100 * sum(boolq) / len(boolq))


def test_a_model_that_knows_the_answers_scores_all(items, runs, monkeypatch):
    """The other end of the scale: if the right ending is likeliest, every task gives 100 %."""
    model, tokenizer = load_run(runs[0])
    right = {d["choices"]["text"]["ABCD".index(d["answerKey"])] for d in ITEMS["arc_easy"]}

    def knows(model, pairs, *, longest):
        told = [tokenizer.decode(end).strip() for _, end in pairs]
        return [Score(0.0 if t in right else -1e3 * len(t), True) for t in told]

    monkeypatch.setattr(harness, "score", knows)
    found = harness.evaluate("x", model, tokenizer, ["arc_easy"], data=items, limit=None, longest=2048)
    assert found.tasks["arc_easy"] == (100, 0)


def test_rolling_and_generation(runs):
    from lm_eval.api.instance import Instance

    model, tokenizer = load_run(runs[0])
    lm = harness.as_lm(model, tokenizer, 16)

    def asked(kind, *arguments):
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    text = "the quick brown fox jumps over the lazy dog"
    rolling = lm.loglikelihood_rolling([asked("loglikelihood_rolling", text)])[0]
    ids = [tokenizer.end, *(int(t) for t in tokenizer.encode(text))]
    whole = score(model, [((ids[0],), tuple(ids[1:]))], longest=10_000)[0].log_likelihood
    assert rolling != pytest.approx(whole)  # windows of 16 forget
    assert harness.as_lm(model, tokenizer, 512).loglikelihood_rolling([asked("loglikelihood_rolling", text)])[
        0
    ] == pytest.approx(whole, abs=1e-4)
    said = lm.generate_until([asked("generate_until", "the qu", {"until": ["zzz"], "max_gen_toks": 8})])[0]
    assert 0 < len(said) <= 8
    cut = lm.generate_until([asked("generate_until", "the qu", {"until": [said[2]], "max_gen_toks": 8})])[0]
    assert cut == said.split(said[2])[0]
    with pytest.raises(UserError, match="sampling"):
        lm.generate_until([asked("generate_until", "x", {"do_sample": True})])


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
    assert re.search(r"best average: .* ± .* %", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{run}", "--tasks", "helaswag", "--data", "{items}"], "no local form of the task 'helaswag'"),
        (["{run}", "--data", "/nowhere"], "/nowhere has no hellaswag.jsonl"),
        (["/nowhere", "--data", "{items}"], "/nowhere has no model.safetensors"),
        (["{run}", "{run}", "--data", "{items}"], "named twice"),
        (["{run}", "--limit", "0", "--data", "{items}"], "--limit 0"),
        (["{run}", "--tokenizer", "gpt2", "--data", "{items}"], "50257 ids, the model of"),
        (["{run}", "--tasks", "piqa", "--data", "{broken}"], "the data of piqa cannot be loaded"),
    ],
)
def test_mistakes_are_told(words, told, items, runs, capsys, tmp_path):
    (tmp_path / "piqa.jsonl").write_text("{not json\n")
    filled = [w.format(run=runs[0], items=items, broken=tmp_path) for w in words]
    assert main(["evaluate", *filled]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert told in said
    assert "Traceback" not in said


def test_the_downstream_study_takes_the_runs_that_are_there(items, tmp_path, capsys):
    words = ["--set", "shape=16x1", "rules=completep,mup", "seed=0", "--items", str(items), "--out", str(tmp_path)]
    assert main(["study", "downstream", *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {row["task"] for row in answer["table"]} == {*TASKS, "average"}
    assert {row["rules"] for row in answer["table"]} == {"completep", "mup"}
    assert Path(answer["files"][0]).exists()
    assert "--items" in Path(answer["files"][0]).read_text()


def test_a_folder_with_some_tasks_is_those_tasks(items, tmp_path):
    assert harness.tasks_at(None) == harness.tasks_at(items) == TASKS
    (tmp_path / "piqa.jsonl").write_text((items / "piqa.jsonl").read_text())
    assert harness.tasks_at(tmp_path) == ["piqa"]
    (tmp_path / "piqa.jsonl").unlink()
    with pytest.raises(UserError, match="has no items"):
        harness.tasks_at(tmp_path)
