"""A store's results travel as one small file, and what was damaged or made up on the way is refused."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from completep.cli import main
from completep.config import sealed, unsealed
from completep.errors import UserError
from completep.sweep.packing import FORMAT, pack, unpack
from completep.sweep.store import Store
from completep.sweep.training import history
from tests.hostile import plant, within
from tests.sweep.tasks import engine, training
from tests.train.runs import small_data


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the store's folder, its two finished tasks, the packed file)."""
    folder = tmp_path_factory.mktemp("pack")
    data = small_data(folder)
    tasks = [training(data, seed=seed) for seed in (0, 1)]
    Store(folder / "runs" / "store").open()
    assert engine(folder / "runs" / "store").run(tasks) == []
    assert pack(Store(folder / "runs" / "store"), folder / "results.gz") == 2
    return folder / "runs" / "store", tasks, folder / "results.gz"


@pytest.mark.slow
def test_settings_losses_and_curves_arrive_and_weights_do_not(trained, tmp_path):
    root, tasks, file = trained
    elsewhere = Store(tmp_path / "store")
    assert vars(unpack(file, elsewhere)) == {"new": 2, "known": 0}
    assert elsewhere.results(tasks) == Store(root).results(tasks)
    labelled = [({"seed": task.run.seed}, task) for task in tasks]
    assert history(elsewhere, labelled).equals(history(Store(root), labelled))
    assert elsewhere.counts(tasks).done == 2
    names = {p.name for p in elsewhere.folder(tasks[0]).iterdir()}
    assert names == {"run.json", "metrics.jsonl", "result.json"}
    assert vars(unpack(file, elsewhere)) == {"new": 0, "known": 2}
    assert file.stat().st_size < 5000


@pytest.mark.slow
def test_no_run_is_done_again(trained, tmp_path):
    _, tasks, file = trained
    unpack(file, Store(tmp_path / "store"))
    events = []
    assert engine(tmp_path / "store", events).run(tasks) == []
    assert events == []


@pytest.mark.slow
def test_the_same_store_gives_the_same_file(trained, tmp_path):
    root, _, file = trained
    pack(Store(root), tmp_path / "again.gz")
    assert (tmp_path / "again.gz").read_bytes() == file.read_bytes()
    with pytest.raises(UserError, match="exists already"):
        pack(Store(root), file)


def entries(file):
    first, *lines = gzip.decompress(file.read_bytes()).decode().splitlines()
    assert first == FORMAT
    return [json.loads(line) for line in lines]


def write(path, *entries):
    path.write_bytes(gzip.compress("\n".join([FORMAT, *map(json.dumps, entries), ""]).encode()))
    return path


def changed_loss(entry):
    entry["files"]["result.json"] = entry["files"]["result.json"].replace('"validation_loss": ', '"validation_loss": 1')


def changed_settings(entry):
    entry["files"]["run.json"] = json.dumps({**json.loads(entry["files"]["run.json"]), "seed": 7})


def unsealed_settings(entry):
    run = {k: v for k, v in json.loads(entry["files"]["run.json"]).items() if k not in ("sealed", "digest")}
    entry["files"]["run.json"] = json.dumps({**run, "seed": 7})


def changed_curve(entry):
    entry["files"]["metrics.jsonl"] = entry["files"]["metrics.jsonl"].replace("1", "2", 1)


def no_curve(entry):
    del entry["files"]["metrics.jsonl"]


def outside(entry):
    entry["files"]["../../evil.json"] = "{}"


def other_name(entry):
    entry["id"] = "../../../evil"


def no_text(entry):
    entry["files"]["metrics.jsonl"] = {"a": 1}


def resealed(**changes):
    """Whoever forges a result can seal it again, and leave out the hash of the curve."""

    def damage(entry):
        content = {**unsealed(entry["files"]["result.json"]), "files": {}, **changes}
        entry["files"]["result.json"] = sealed(content)

    return damage


def garbage_curve(entry):
    resealed()(entry)
    entry["files"]["metrics.jsonl"] = "garbage\x00"


def garbage_evaluation(entry):
    entry["files"]["evaluations/x.json"] = "garbage"


def forged_evaluation(entry):
    scores = {"accuracy": 1e9, "stderr": None, "metric": "acc", "items": 1}
    entry["files"]["evaluations/x.json"] = sealed({"name": "x", "tasks": {"x": scores}})


FORGED = [resealed(status="lol"), resealed(validation_loss=10**400), resealed(lr=1.0), resealed(tokens=-1)]
FORGED += [garbage_curve, garbage_evaluation, forged_evaluation]


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [changed_loss, changed_settings, unsealed_settings, changed_curve, no_curve, outside, other_name, no_text, *FORGED],
)
def test_what_does_not_belong_together_is_refused(trained, tmp_path, damage):
    good, bad = entries(trained[2])
    damage(bad)
    store = Store(tmp_path / "store")
    with pytest.raises(UserError, match=r"run 1 is damaged.*; of the others, 1 are new"):
        unpack(write(tmp_path / "bad.gz", bad, good), store)
    assert [p.name for p in store.root.glob("[0-9a-f]*")] == [good["id"]]
    assert not list(tmp_path.rglob("evil*"))


@pytest.mark.parametrize(
    "content",
    [b"", b"text", gzip.compress(b"text"), gzip.compress(FORMAT.encode() + b"\n{}")[:-9]],
    ids=["empty", "text", "no format", "cut off"],
)
def test_what_is_no_pack_is_refused(tmp_path, content):
    (tmp_path / "file.gz").write_bytes(content)
    with pytest.raises(UserError, match="is not a file that `completep study pack` wrote"):
        unpack(tmp_path / "file.gz", Store(tmp_path / "store"))


def test_a_bomb_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("completep.sweep.packing.MOST", 2**16)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(FORMAT.encode() + b"\n" + b"0" * 2**24))
    with pytest.raises(UserError, match="is not a file"):
        unpack(tmp_path / "bomb.gz", Store(tmp_path / "store"))


def test_an_empty_store_has_nothing_to_pack(tmp_path):
    with pytest.raises(UserError, match="no finished training runs"):
        pack(Store(tmp_path / "store"), tmp_path / "file.gz")


@pytest.mark.slow
def test_the_commands(trained, tmp_path, capsys):
    root, _, _ = trained
    file = tmp_path / "file.gz"
    assert main(["study", "pack", str(file), "--out", str(root.parent)]) == 0
    assert "2 runs" in capsys.readouterr().out
    assert main(["study", "unpack", str(file), "--out", str(tmp_path / "runs"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"new": 2, "known": 0}
    assert main(["study", "unpack", str(tmp_path / "absent.gz"), "--out", str(tmp_path / "runs")]) == 2
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_planted_link_is_not_written_through(trained, tmp_path):
    _, tasks, file = trained
    store, victim = Store(tmp_path / "store"), tmp_path / "victim"
    store.open()
    victim.mkdir()
    (victim / "keep").write_text("precious")
    (store.root / f".unpacking-{tasks[0].id}").symlink_to(victim)
    assert unpack(file, store).new == 2
    assert [p.name for p in victim.iterdir()] == ["keep"]
    assert not store.folder(tasks[0]).is_symlink()


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pack_that_is_no_file_is_refused_at_once(tmp_path, kind):
    plant(tmp_path / "file.gz", kind)
    with within(), pytest.raises(UserError, match="is not a file that"):
        unpack(tmp_path / "file.gz", Store(tmp_path / "store"))


def copied(trained, folder):
    """(a copy of the store, the folder of its first run)."""
    root, tasks, _ = trained
    shutil.copytree(root, folder / "store")
    return Store(folder / "store"), folder / "store" / tasks[0].id


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "result.json", "evaluations/x.json"])
def test_a_link_in_somebody_elses_store_is_not_packed(trained, tmp_path, name):
    store, run = copied(trained, tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("password")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    with pytest.raises(UserError, match=f"{run.name} .*{Path(name).name} is a link"):
        pack(store, tmp_path / "file.gz")
    assert not (tmp_path / "file.gz").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "evaluations"])
def test_a_linked_folder_is_not_packed(trained, tmp_path, name):
    store, run = copied(trained, tmp_path)
    elsewhere = tmp_path / "elsewhere"
    if name:
        elsewhere.mkdir()
    else:
        run.rename(elsewhere)
    (run / name).symlink_to(elsewhere)
    with pytest.raises(UserError, match=f"{run.name} .*is a link"):
        pack(store, tmp_path / "file.gz")


@pytest.mark.slow
def test_a_damaged_run_is_named_when_it_is_packed(trained, tmp_path):
    store, run = copied(trained, tmp_path)
    curve = run / "metrics.jsonl"
    curve.write_text(curve.read_text().replace("1", "2", 1))
    with pytest.raises(UserError, match=f"{run.name} .*its loss curve has changed") as caught:
        pack(store, tmp_path / "file.gz")
    assert "move these folders" in caught.value.fix
    shutil.move(run, tmp_path / "away")  # as the fix says
    assert pack(store, tmp_path / "file.gz") == 1
