"""Trackers get what metrics.jsonl gets. If one fails, training continues without it."""

import json
import sys
from pathlib import Path

import pytest

from completep.cli import main
from completep.config import to_json
from completep.errors import UserError
from completep.integrations import trackers
from completep.train.records import EvalRecord, StepRecord, read_metrics
from tests.train.runs import small_data, small_run

pytestmark = pytest.mark.filterwarnings("ignore")  # from the trackers


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(to_json(small_run(small_data(tmp_path / "d"))))
    return path


def expected(folder: Path):
    """(name, step) → value, from metrics.jsonl."""
    records = list(read_metrics(folder / "metrics.jsonl"))
    assert records
    return {(name, r.step): value for r in records for name, value in trackers.values_of(r).items()}


def train(run_file, kind, *more):
    out = run_file.parent / "out"
    options = ["--out", str(out), "--log-every", "3", "--peak", "1e11", "--track", kind, *more]
    assert main(["train", str(run_file), *options]) == 0
    return out


@pytest.mark.slow
def test_tensorboard_holds_every_record(run_file):
    pytest.importorskip("tensorboard", reason="needs the extra `track`")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = train(run_file, "tensorboard")
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    logged = {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    assert logged == pytest.approx(expected(out), rel=1e-5)


def log_entries(content):
    """The entries of a LevelDB log, the format of .wandb files: 32 kB blocks of (checksum, length, kind, data)."""
    offset, entry = 7, b""  # after the header of W&B
    while offset + 7 <= len(content):
        rest_of_block = 32768 - offset % 32768
        if rest_of_block < 7:
            offset += rest_of_block
            continue
        size, kind = int.from_bytes(content[offset + 4 : offset + 6], "little"), content[offset + 6]
        entry += content[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # a whole entry, or its last part
            yield entry
            entry = b""


@pytest.mark.slow
def test_wandb_offline_holds_every_record(run_file, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the extra `track`")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    out = train(run_file, "wandb")
    # run.finish() tells the service process to write its buffer but does not wait for it. teardown() waits for the end
    # of that process, as the interpreter does when it exits.
    wandb.teardown()
    logged = {}
    for data in log_entries(next(out.glob("wandb/offline-run-*/*.wandb")).read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            logged |= {(name, items["_step"]): value for name, value in items.items() if not name.startswith("_")}
    assert logged == pytest.approx(expected(out))


@pytest.mark.slow
def test_trackio_holds_every_record(run_file, monkeypatch, tmp_path):
    pytest.importorskip("trackio", reason="needs the extra `track`")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    out = train(run_file, "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs(trackers.PROJECT, "out")
    logged = {(k, row["step"]): v for row in logs for k, v in row.items() if "/" in k}
    assert logged == pytest.approx(expected(out))


def test_off_by_default(run_file):
    out = run_file.parent / "out"
    assert main(["train", str(run_file), "--out", str(out), "--peak", "1e11"]) == 0
    assert not list(out.glob("tensorboard*")) + list(out.glob("wandb*"))


def test_a_tracker_that_fails_is_not_used_again():
    class Broken:
        calls = 0

        def log(self, values, step):
            self.calls += 1
            raise ConnectionError("no network")

        def close(self):
            pass

    broken, messages = Broken(), []
    follow = trackers.following(broken, messages.append)
    for step in (1, 2, 3):
        follow(StepRecord(step, 2.0, 0.1, None, 1e3, None))
    assert broken.calls == 1
    assert len(messages) == 1
    assert "no network" in messages[0]


def test_a_missing_tracker_is_named(run_file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb is not installed"):
        trackers.open_tracker("wandb", small_run(run_file.parent), run_file.parent)
    assert main(["train", str(run_file), "--out", str(run_file.parent / "o"), "--track", "wandb"]) == 2
    assert "completep[track]" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["start", "end"])
def test_a_service_that_fails_costs_no_run(run_file, monkeypatch, capsys, where):
    """At the start it is an error before anything is trained. At the end the run is complete all the same."""

    class Service:
        def __init__(self, run, folder):
            if where == "start":
                raise RuntimeError("No API key configured")

        def log(self, values, step):
            pass

        def close(self):
            raise ConnectionError("gone")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", Service)
    out = run_file.parent / "out"
    code = main(["train", str(run_file), "--out", str(out), "--peak", "1e11", "--track", "wandb"])
    printed = " ".join(capsys.readouterr().err.split())
    if where == "start":
        assert (code, (out / "result.json").exists()) == (2, False)
        assert "No API key configured" in printed
        assert "WANDB_MODE=offline" in printed
    else:
        assert (code, (out / "result.json").exists()) == (0, True)
        assert "gone" in printed


def test_values():
    assert trackers.values_of(EvalRecord(3, 2.5)) == {"validation/loss": 2.5}
    assert "train/grad_norm" not in trackers.values_of(StepRecord(1, 2.0, 0.1, None, 1e3, None))
