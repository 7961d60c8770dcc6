"""Hopeless runs are stopped: the rule on recorded curves, and in a script and a function that report on the way."""

import json
import math
from pathlib import Path

import polars as pl
import pytest

import completep as cp
from completep.config import Shape, sealed
from completep.sweep.engine import Engine, nothing_more
from completep.sweep.local import Local
from completep.sweep.store import Store
from completep.tuning.hopeless import hopeless
from completep.tuning.reading import Reading
from completep.tuning.stopping import StopsEarly
from tests.tuning.commands import GRID, HELD_OUT, SETTING, carry_out, command


def curve(*losses):
    return [Reading(10 * (i + 1), loss) for i, loss in enumerate(losses)]


def test_the_rule():
    bar = curve(4, 3.5, 3, 2.8, 2.6, 2.5, 2.4, 2.3)
    assert hopeless(curve(9, 9, 9), bar)
    assert not hopeless(curve(9, 9, 3.1), bar)  # twice in a row
    assert not hopeless(
        curve(9, 9), curve(4, 3.5, 3, 2.8, 2.6, 2.5, 2.4, 2.3, 2.2, 2.1, 2.0, 1.9)
    )  # not before a quarter
    assert not hopeless(curve(4.3, 3.8, 3.3, 3.1), bar)  # within 12 %
    assert hopeless(curve(4, 3.5, 3.4, math.nan), bar)
    assert not hopeless(curve(*[9] * 3), [])
    assert hopeless([Reading(25, 9), Reading(35, 9)], bar)  # between the steps of the best


def recorded_curves(grid, seed):
    frame = pl.read_csv(grid).filter(pl.col("seed") == seed)
    for row in frame.iter_rows(named=True):
        readings = [Reading(s, math.nan if x is None else x) for s, x in json.loads(row["curve"])]
        yield (math.inf if row["loss"] is None else row["loss"]), readings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "seed", "least"), [(GRID, 0, 0.08), (GRID, 1, 0.04), (HELD_OUT, 0, 0.04), (HELD_OUT, 1, 0.1)]
)
def test_on_recorded_curves_no_run_near_the_best_is_stopped(grid, seed, least):
    """Whatever finished run is the best so far, beside every other one. The margin was chosen on seed 0 of one grid,
    where no run within 8 % is stopped; on its seed 1, and on another model's grid, the closest one ends 4 % above.
    """
    runs = list(recorded_curves(grid, seed))
    best = min(loss for loss, _ in runs)
    bars = [readings for loss, readings in runs if loss <= 1.05 * best]
    saved, stopped = 0.0, 0
    for loss, readings in runs:
        for bar in bars:
            ends = [i for i in range(len(readings)) if hopeless(readings[: i + 1], bar)]
            if ends:
                assert loss > (1 + least) * best
                stopped += 1
                saved += 1 - readings[ends[0]].step / bar[-1].step
    assert stopped / len(runs) / len(bars) > 0.1
    assert saved / len(runs) / len(bars) > 0.05


SCRIPT = """
import json, pathlib, sys, time
folder, lr = pathlib.Path(sys.argv[1]), float(sys.argv[2])
with (folder / "m.jsonl").open("w", buffering=1) as file:
    for step in range(10, 90, 10):
        file.write(json.dumps({"step": step, "loss": lr + 10 / step}) + "\\n")
        if lr > 3 and step > 40:
            time.sleep(600)
"""


@pytest.mark.slow
def test_a_hopeless_script_is_stopped_and_keeps_its_result(tmp_path):
    from dataclasses import replace

    from completep.tuning.reading import Source

    source = Source.parse("{folder}/m.jsonl:loss")
    good = command(tmp_path, SCRIPT, source=source, setting=setting(2.0))
    assert carry_out(good, tmp_path / "good")["status"] == "done"
    bar = tuple(good.readings(tmp_path / "good"))
    assert len(bar) == 8
    bad = command(tmp_path, SCRIPT, source=source, setting=setting(4.0))
    result = carry_out(replace(bad, bar=bar), tmp_path / "bad")
    assert (result["status"], result["loss"]) == ("hopeless", pytest.approx(4.2))
    assert replace(bad, bar=bar).id == bad.id
    near = command(tmp_path, SCRIPT, source=source, setting=setting(2.1), bar=bar)
    assert carry_out(near, tmp_path / "near")["status"] == "done"


def setting(lr):
    from dataclasses import replace

    return replace(SETTING, values=(("lr", lr),))


FUNCTION = """
def train(trial):
    for step in range(8):
        try:
            trial.report(step, trial.lr + 1 / (step + 1))
        except Exception:
            raise RuntimeError("my own handler took it")
    if trial.lr > 3:
        raise RuntimeError("this was hopeless")
    return trial.lr
"""


def test_the_engine_gives_the_best_finished_curve_of_the_same_shape(tmp_path):
    from completep.tuning.tasks import Call

    (tmp_path / "mine.py").write_text(FUNCTION)
    calls = {lr: Call(f"{tmp_path / 'mine.py'}:train", setting(lr), ()) for lr in (1.0, 2.0, 4.0)}

    class Here:
        """Runs tasks in this process."""

        store = Store(tmp_path / "store")

        def run(self, tasks, more=nothing_more):
            for task in tasks:
                carry_out(task, self.store.folder(task))
                assert list(more(task)) == []
            return []

    engine = StopsEarly(Here())
    engine.run([calls[1.0], calls[2.0]])
    assert engine.with_bar(calls[4.0]).bar[-1].loss == pytest.approx(1.125)  # of lr 1, the better one
    engine.run([calls[4.0]])
    assert Here.store.result(calls[4.0])["status"] == "hopeless"
    assert Here.store.counts(list(calls.values())).hopeless == 1
    assert Here.store.counts(list(calls.values())).unfinished == 0
    from dataclasses import replace

    other = replace(calls[4.0], setting=replace(calls[4.0].setting, seed=1))
    assert engine.with_bar(other).bar == ()


@pytest.mark.slow
def test_a_search_with_stopped_runs_ends_with_the_same_verdict(tmp_path):
    code = FUNCTION.replace("trial.lr + 1 /", "loss(trial) + 1 /").replace(
        '    if trial.lr > 3:\n        raise RuntimeError("this was hopeless")\n    return trial.lr\n',
        "    return loss(trial)\n",
    )
    more = (
        "import math\n\ndef loss(trial):\n    place = math.log2(trial.lr) + 7.3\n"
        "    noise = 0.0005 * math.sin(9 * place * trial.seed)\n"
        "    other = math.log2(trial.std) + 4\n"
        "    return 2 + 0.06 * (place**2 + other**2) + 0.01 * trial.seed + noise - 0.02 * trial.m_L\n"
    )
    (tmp_path / "mine.py").write_text(more + code)
    answers = []
    for stop_early in (True, False):
        result = cp.tune(
            f"{tmp_path / 'mine.py'}:train", space={"lr": "2^-12..2^2", "std": "2^-8..2^0"},
            out=tmp_path / str(stop_early), settings={"stop_early": stop_early, "search": "random", "trials": 25},
        )  # fmt: skip
        answers.append((result.verdict, result.values, result.runs["status"].to_list().count("hopeless")))
    (word, values, stopped), (other, whole, none) = answers
    assert word == other == "PASS"
    assert values["std"] == pytest.approx(whole["std"]) == pytest.approx(2**-4)
    assert values["lr"] == pytest.approx(whole["lr"], rel=0.02)
    assert stopped > none == 0


def test_a_status_that_is_none_is_refused(tmp_path):
    from completep.errors import UserError
    from completep.tuning.record import Known

    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "result.json").write_text(sealed({"status": "tired"}))
    with pytest.raises(UserError, match="its status is 'tired'"):
        Store(tmp_path).result(Known("x"))
    assert Path(GRID).exists()


def test_a_verdict_runs_stopped_runs_to_their_end(tmp_path):
    """A result that a search stopped serves a search that stops runs; a later stage does the run again."""
    from dataclasses import replace

    store = Store(tmp_path / "store")
    store.open()
    code = "import json, pathlib, sys; pathlib.Path(sys.argv[1], 'm.json').write_text(json.dumps({'loss': 3.0}))"
    stopped, done = (command(tmp_path, code, words=f"{{folder}} {{lr}} {name}") for name in ("stopped", "done"))
    for task, status in ((stopped, "hopeless"), (done, "done")):
        store.folder(task).mkdir()
        (store.folder(task) / "result.json").write_text(sealed({"status": status, "loss": 2.0, "seconds": 1.0}))
    bar = (Reading(1, 1.0),)
    Engine(store, Local(1)).run([replace(stopped, bar=bar), replace(done, bar=bar)])
    assert store.result(stopped)["status"] == "hopeless"
    Engine(store, Local(1)).run([stopped, done])
    assert (store.result(stopped)["status"], store.result(stopped)["loss"]) == ("done", 3.0)
    assert store.result(done)["loss"] == 2.0


def test_the_decoder_reads_its_file_once(tmp_path, monkeypatch):
    """Further records are those that it is given: reading the file at each of them takes quadratic time."""
    from dataclasses import replace

    from completep.train.records import StepRecord
    from completep.tuning import decoder
    from completep.tuning.settings import make_tuning

    subject = make_tuning({"model": "gpt", "base": [32, 2], "set": {"steps": 80}}).subject()
    task = replace(subject.task(Shape(32, 2), {"lr": 1.0}, 0), bar=tuple(Reading(i, 1.0) for i in range(81)))
    read, raised = [], []

    def readings(self, folder):
        read.append(folder)
        return [Reading(10, 1.0)]

    def carry_out(self, folder, lock, look):
        for step, loss in ((10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0), (50, 2.0)):
            look(StepRecord(step, loss, 1.0, None, 1.0, None))
            if raised:
                (folder / "result.json").write_text("{}")
                return

    monkeypatch.setattr(decoder.Decoder, "readings", readings)
    monkeypatch.setattr(decoder.Training, "carry_out", carry_out)
    monkeypatch.setattr(decoder.signal, "raise_signal", lambda number: raised.append(number))
    task.carry_out(tmp_path, 0)
    assert len(read) == 1
    assert len(raised) == 1


@pytest.mark.slow
def test_a_hopeless_run_of_the_decoder_is_stopped_and_continues_where_it_was(tmp_path):
    """By its training losses, beside the best run of the same seed. Continued, it ends as if it had never stopped."""
    from dataclasses import replace

    from completep.tuning.decoder import Decoder
    from completep.tuning.settings import make_tuning

    subject = make_tuning({"model": "gpt", "base": [32, 2], "set": {"steps": 80}}).subject()
    good, bad = (subject.task(Shape(32, 2), {"lr": lr}, 0) for lr in (2**-6, 2.0))
    other = subject.task(Shape(32, 2), {"lr": 2.0}, 1)
    assert isinstance(good, Decoder)
    stores = {name: Store(tmp_path / name) for name in ("early", "whole")}
    for store in stores.values():
        store.open()
    early = StopsEarly(Engine(stores["early"], Local(1)))
    early.run([good])
    assert [r.step for r in early.with_bar(bad).bar] == list(range(10, 81, 10))
    assert early.with_bar(other).bar == ()
    early.run([bad])
    result = stores["early"].result(bad)
    assert result["status"] == "hopeless"
    assert 20 <= result["step"] <= 40
    assert bad.loss(result) is None
    written = (stores["early"].folder(bad) / "result.json").stat().st_mtime_ns
    early.run([bad])  # it is known to be hopeless
    assert (stores["early"].folder(bad) / "result.json").stat().st_mtime_ns == written
    for store in stores.values():
        Engine(store, Local(1)).run([bad.training])  # a study asks for the same run
    ends = [store.result(bad) for store in stores.values()]
    assert ends[0]["status"] == ends[1]["status"] == "done"
    assert ends[0]["validation_loss"] == ends[1]["validation_loss"]
    read = Decoder.from_json(json.loads(json.dumps(early.with_bar(bad).to_json())))
    assert read == replace(bad, bar=early.with_bar(bad).bar)
