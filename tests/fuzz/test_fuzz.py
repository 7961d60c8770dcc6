"""Hostile command lines, configurations, CSVs, corpora, run folders, stores and packs: never a traceback or a hang.

`COMPLETEP_FUZZ` is the number of cases, 2 000 by default; `make fuzz` runs 20 000. Every case is seeded.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz import cases
from tests.fuzz.harness import Fuzz, problem, run_command

pytestmark = pytest.mark.slow
CASES = int(os.environ.get("COMPLETEP_FUZZ", "2000"))
PARTS = 8  # of every kind, for as many processes as there are


@pytest.fixture(scope="module")
def world(tmp_path_factory, request):
    return cases.prepare_world(tmp_path_factory.mktemp("fuzz") / "world")


@pytest.fixture(autouse=True)
def _show_tracebacks(monkeypatch):
    monkeypatch.setenv("COMPLETEP_DEBUG", "1")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def drawn(monkeypatch):
    """The figures of a test. A picture takes most of a case's time, so that most of them stop at its description."""
    from completep.report import charts

    figures, pictures = [], charts.pictures

    def some(figure, kinds):
        figures.append(figure)
        return pictures(figure, kinds) if len(figures) % 50 == 1 else {"svg": charts.chart(figure) and b""}

    monkeypatch.setattr(charts, "pictures", some)
    return figures


def fuzz(share: float, part: int, one: "Callable[[Fuzz, Random], None]") -> Fuzz:
    """`share` of all cases in this part; every failure is kept, one of each kind."""
    record = Fuzz()

    @seed(part)
    @settings(
        max_examples=max(1, round(CASES * share / PARTS)), database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.randoms(use_true_random=True))
    def run(dice):
        one(record, dice)

    run()
    return record


def fresh(world: Path) -> Path:
    """An empty folder beside the world, for one case."""
    place = world.parent / "case"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    return place


@pytest.mark.parametrize("part", range(PARTS))
def test_command_lines(world, part, drawn):
    place = fresh(world) / "world"
    shutil.copytree(world, place, symlinks=True)

    def one(record, dice):
        record.run(cases.command_line(dice), place)

    record = fuzz(0.35, part, one)
    assert record.ends[0]
    assert record.ends[2]
    assert not record.failures, record.report()


@pytest.mark.parametrize("part", range(PARTS))
def test_run_files(world, part):
    plan, train = ["plan", "--params", "1M", "--from", "run.json"], ["train", "run.json", "--data", "../world/corpus"]

    def one(record, dice):
        content, words = cases.run_file(dice), dice.choice([plan, train])
        place = fresh(world)
        (place / "run.json").write_bytes(content)
        record.run([*words, "--json"], place, repr(content[:300]))

    record = fuzz(0.15, part, one)
    assert not record.failures, record.report()


@pytest.mark.parametrize("part", range(PARTS))
def test_sweeps(world, part, drawn):
    def one(record, dice):
        content, words = cases.sweep(dice)
        place = fresh(world)
        (place / "runs.csv").write_bytes(content)
        record.run(["check", "transfer", "runs.csv", *words], place, repr(content[:1500]))

    record = fuzz(0.2, part, one)
    assert drawn or CASES < 2000
    assert not record.failures, record.report()


@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_corpora(world, part):
    plan = ["study", "lr-transfer", "--set", "seed=0", "--dry-run", "--data", "corpus"]
    train = ["train", *cases.TINY, "--out", "run"]

    def one(record, dice):
        damage, place = cases.damages(dice, world / "corpus"), fresh(world)
        cases.damaged_copy(world / "corpus", place / "corpus", damage)
        record.run(dice.choice([plan, train]), place, repr(damage))

    record = fuzz(0.05, part, one)
    assert not record.failures, record.report()


@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_run_folders(world, part):
    train = ["train", "run/run.json", "--out", "run", "--data", "corpus"]
    export, plan = ["export", "run", "--out", "exported"], ["plan", "--params", "1M", "--from", "run/run.json"]

    def one(record, dice):
        damage, place = cases.damages(dice, world / "finished"), fresh(world)
        (place / "corpus").symlink_to(world / "corpus")
        cases.damaged_copy(world / "finished", place / "run", damage)
        record.run(dice.choice([train, train, export, plan]), place, repr(damage))

    record = fuzz(0.1, part, one)
    assert not record.failures, record.report()


@pytest.mark.parametrize("part", range(PARTS))
def test_files_that_people_pass_on(world, part, drawn):
    def one(record, dice):
        damage, words = cases.shared_file(dice, world / "shared")
        place = fresh(world)
        cases.damaged_copy(world / "shared", place / "shared", [damage])
        shutil.copy(world / "model.py", place / "shared")
        takes_out = words[0] not in ("plan", "explain", "worker") and "--out" not in words
        out = ["--out", "runs" if words[0] != "prepare" else "corpus"] if takes_out else []
        record.run([*words, *out], place / "shared", repr(damage)[:1500])

    record = fuzz(0.15, part, one)
    assert not record.failures, record.report()


def test_a_traceback_is_seen(tmp_path, monkeypatch):
    """The negative control: the harness fails where a command does."""
    from completep import cli

    def broken(words):
        raise ZeroDivisionError("[/]")

    monkeypatch.setattr(cli, "_run", broken)
    code, said, seconds = run_command(["plan"], tmp_path)
    assert code == 70
    assert "ZeroDivisionError: [/]" in said
    assert problem(code, said, seconds).startswith("traceback")
    assert problem(0, "", 11)
    assert problem(4, "", 0)
    assert not problem(3, "", 1)
