"""The published results follow from the published runs: each study's outcome, again, from its CSV files."""

import json
import math

import polars as pl
import pytest

from benchmarks import publish
from completep.studies import laziness
from completep.studies.run import known_studies, study_named
from completep.studies.scale import LAPTOP, SCALES
from tests.studies.frames import RESULTS

INDEX = (RESULTS / "README.md").read_text()
PUBLISHED = sorted(p.parent.name for p in RESULTS.glob("*/outcome.csv"))
NEW = sorted(p.parent.name for p in RESULTS.glob("*/outcome.json"))  # of the present design
REPLACED = {"eps-transfer", "lr-transfer-compute-optimal", "downstream"}  # earlier, by a statistic of that time
RAW = {"coordinates"}  # its numbers are too many to publish
NAMES = [name for name in PUBLISHED if name not in RAW and (name in NEW or name not in REPLACED)]


def outcome(name):
    study = study_named(name)
    scale = SCALES[json.loads((RESULTS / name / "outcome.json").read_text())["scale"]] if name in NEW else LAPTOP
    frames = {p.stem: pl.read_csv(p, infer_schema_length=None) for p in (RESULTS / name).glob("*.csv")}
    measured = laziness.Measured(frames["runs"], frames["terms"]) if name == "laziness" else frames["runs"]
    return study.outcome(study.at(scale), measured)


def same(published, computed):
    if isinstance(published, float) and isinstance(computed, float):
        return math.isclose(published, computed, rel_tol=1e-6, abs_tol=1e-9)
    return (published in (None, "")) if computed in (None, "") else published == computed


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_outcome_follows_from_the_runs(name):
    found = outcome(name)
    published = pl.read_csv(RESULTS / name / "outcome.csv", infer_schema_length=None)
    assert published.columns == found.table.columns
    assert published.height == found.table.height
    for before, after in zip(published.iter_rows(), found.table.iter_rows(), strict=True):
        assert all(map(same, before, after)), (before, after)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_agreement_is_the_published_one(name):
    found = outcome(name)
    row = next(line for line in INDEX.splitlines() if f"({name}/" in line)
    word = "cannot be seen" if found.agreement.startswith("cannot") and name not in NEW else found.agreement
    assert f"**{word}" in row
    if name in NEW:
        said = json.loads((RESULTS / name / "outcome.json").read_text())
        assert (said["agreement"], said["sentence"]) == (found.agreement, found.sentence)
        assert said["decision"] == study_named(name).decision  # as it was written down before the run


@pytest.mark.parametrize("name", NEW)
def test_the_index_is_made_from_the_pages(name):
    _, _, rest = INDEX.partition(publish.BEGIN)
    table, _, earlier = rest.partition(publish.END)
    assert f"({name}/README.md)" in table
    assert f"({name}/README.md)" not in earlier


@pytest.mark.slow
def test_another_run_would_change_the_outcome():
    """The negative control: one loss moved, and the table is another."""
    study = study_named("lr-transfer")
    frame = pl.read_csv(RESULTS / "lr-transfer" / "runs.csv", infer_schema_length=None)
    moved = frame.with_columns(loss=pl.when(pl.int_range(pl.len()) == 3).then(pl.col("loss") - 0.3).otherwise("loss"))
    assert not study.find(study.at(LAPTOP), moved).table.equals(study.find(study.at(LAPTOP), frame).table)


def test_every_study_of_the_paper_has_a_page():
    of_the_paper = {name for name, study in known_studies().items() if not study.beyond_paper}
    assert of_the_paper - {"own-steps"} <= set(PUBLISHED) <= set(known_studies())
    for name in REPLACED - set(NEW):
        assert f"`{name}`" in INDEX.partition("statistic that has been replaced")[0]
