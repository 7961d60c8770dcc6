"""Where a loss is read from; and what is said if it is not there, is no number, or is not finite."""

import json
import math

import pytest

from completep.errors import UserError
from completep.sweep.task import TaskError
from completep.tuning.reading import Reading, Source, final_loss

RECORDS = [{"step": 10, "val_loss": 3.5, "a": {"b": 1.5}}, {"step": 20, "train": 1.0}, {"step": 30, "val_loss": 3.25}]


def source(folder, text):
    return Source.parse(text).at({"folder": str(folder)})


def read(folder, text, final=True):
    return source(folder, text).read(folder, final=final)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    (tmp_path / "m.json").write_text(json.dumps({"log_history": RECORDS, "eval": {"loss": 2.5}, "val_loss": 1.5}))
    (tmp_path / "m.csv").write_text("iter,val_loss\n1,3\n2,\n3,2.5\n")
    (tmp_path / "stdout.txt").write_text("step 5: val loss 4.125\nstep 9: val loss 3.875\n")
    (tmp_path / "stderr.txt").write_text("val loss 9\n")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "readings"),
    [
        ("{folder}/m.jsonl:val_loss", [(10, 3.5), (30, 3.25)]),
        ("{folder}/m.jsonl:a.b", [(None, 1.5)]),
        ("{folder}/m.json:val_loss", [(0, 1.5)]),
        ("{folder}/m.json:eval.loss", [(0, 2.5)]),
        ("{folder}/m.json:log_history.val_loss", [(10, 3.5), (30, 3.25)]),
        ("{folder}/m.csv:val_loss", [(1, 3.0), (3, 2.5)]),
        (r"output:val loss (\S+)", [(0, 4.125), (1, 3.875)]),
        (r"output:step (?P<step>\d+): val loss (?P<loss>[\d.]+)", [(5, 4.125), (9, 3.875)]),
    ],
)
def test_every_source(folder, text, readings):
    found = read(folder, text)
    assert [r.loss for r in found] == [loss for _, loss in readings]
    assert all(step is None or r.step == step for r, (step, _) in zip(found, readings, strict=True))


def test_errors_of_a_run_are_read_where_its_output_says_nothing(folder):
    (folder / "stdout.txt").write_text("quiet\n")
    assert read(folder, r"output:val loss (\S+)") == [Reading(0, 9.0)]


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra `track`")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for step, loss in ((1, 3.0), (2, 2.5)):
            writer.add_scalar("val/loss", loss, step)
    assert read(tmp_path, "tensorboard:{folder}/tb:val/loss") == [Reading(1, 3.0), Reading(2, 2.5)]
    with pytest.raises(TaskError, match="left no loss"):
        read(tmp_path, "tensorboard:{folder}/tb:other")


def test_the_last_or_the_smallest():
    readings = [Reading(1, 3.0), Reading(2, 2.0), Reading(3, 2.5)]
    assert final_loss(readings, "last") == 2.5
    assert final_loss(readings, "min") == 2.0
    assert math.isnan(final_loss([*readings, Reading(4, math.nan)], "min"))


@pytest.mark.parametrize("word", ["NaN", "Infinity", '"nan"', '"inf"', "9" * 400])
def test_a_loss_that_is_not_finite_is_read(tmp_path, word):
    (tmp_path / "m.json").write_text(f'{{"loss": {word}}}')
    assert not math.isfinite(read(tmp_path, "{folder}/m.json:loss")[0].loss)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"loss": "low"}', "the text 'low', not a number"),
        ('{"loss": "2.5"}', "the text '2.5', not a number"),
        ('{"loss": true}', "not a number"),
        ('{"loss": {"a": 1}}', "not a number"),
        ('{"other": 1}', "has no 'loss'; it has other"),
        ('{"loss": null}', "the last 'loss' in .* is null"),
        ("[]", "has no 'loss'"),
        ("{", "not JSON"),
        (None, "there is no"),
    ],
)
def test_a_loss_that_is_not_there_or_no_number_is_an_error(tmp_path, content, said):
    if content is not None:
        (tmp_path / "m.json").write_text(content)
    with pytest.raises(TaskError, match=said):
        read(tmp_path, "{folder}/m.json:loss")


def test_a_line_that_is_half_written_is_left_for_later(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"loss": 2}\n{"lo')
    assert read(tmp_path, "{folder}/m.jsonl:loss", final=False) == [Reading(0, 2.0)]
    assert read(tmp_path, "{folder}/absent.jsonl:loss", final=False) == []
    with pytest.raises(TaskError, match="line 2 is not JSON"):
        read(tmp_path, "{folder}/m.jsonl:loss")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("val_loss", "does not say where the loss is"),
        ("{folder}/x.txt:val", "does not say where the loss is"),
        ("output:loss", "0 groups"),
        ("output:(", "not a regular expression"),
        ("output:(a)(b)", "2 groups"),
        ("tensorboard:{folder}", "does not say where the loss is"),
        ("output:", "does not say where the loss is"),
    ],
)
def test_what_is_no_source_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        Source.parse(text)


def test_a_file_that_all_runs_would_share_is_refused():
    with pytest.raises(UserError, match="the same for every run"):
        Source.parse("out/m.jsonl:loss").check(frozenset({"folder"}))
    with pytest.raises(UserError, match=r"unknown name \{flder\}"):
        Source.parse("{flder}/m.jsonl:loss").check(frozenset({"folder"}))


def test_a_null_at_the_end_is_no_loss(tmp_path):
    """Many loggers write NaN as null: an earlier loss must not stand for a run that diverged."""
    (tmp_path / "m.jsonl").write_text('{"v": 2.0}\n{"v": null}\n')
    assert [r.loss for r in read(tmp_path, "{folder}/m.jsonl:v", final=False)] == [2.0]
    with pytest.raises(TaskError, match="is null"):
        read(tmp_path, "{folder}/m.jsonl:v")
    (tmp_path / "m.jsonl").write_text('{"v": null}\n{"v": 2.0}\n')  # not evaluated at the first step
    assert [r.loss for r in read(tmp_path, "{folder}/m.jsonl:v")] == [2.0]


@pytest.mark.parametrize(
    ("printed", "loss"), [("nan", math.nan), ("1.5e-3", 0.0015), ("2.03e+02,", 203.0), ("1.98.", 1.98)]
)
def test_the_pattern_of_the_docs_reads_every_number(tmp_path, printed, loss):
    (tmp_path / "stdout.txt").write_text(f"val loss 1.5\nval loss {printed}\n")
    assert read(tmp_path, r"output:val loss (\S+)")[-1].loss == pytest.approx(loss, nan_ok=True)


def test_a_pattern_that_cuts_a_number_is_refused(tmp_path):
    (tmp_path / "stdout.txt").write_text("val loss 1.980e-03\n")
    with pytest.raises(TaskError, match="stops inside a number"):
        read(tmp_path, "output:val loss ([0-9.]+)")


def test_the_smallest_loss_is_among_finite_ones():
    assert final_loss([Reading(0, math.nan), Reading(1, 3.0), Reading(2, 4.0)], "min") == 3.0
    assert math.isnan(final_loss([Reading(0, 3.0), Reading(1, math.nan)], "min"))


def test_a_field_past_the_limit_of_csv_fails_the_run(tmp_path):
    (tmp_path / "m.csv").write_text(f"note,val_loss\n{'x' * 200_000},2.5\n")
    with pytest.raises(TaskError, match="cannot be read as CSV"):
        read(tmp_path, "{folder}/m.csv:val_loss")
