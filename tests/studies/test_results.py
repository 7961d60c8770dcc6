"""The published results follow from the published runs: each study's outcome, again, from its CSV files."""

import math
from pathlib import Path

import polars as pl
import pytest

from completep.config import Shape
from completep.measure.grid import Coordinates
from completep.studies.design import Sweep
from completep.studies.run import study_named
from completep.studies.scale import LAPTOP

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PUBLISHED = sorted(p.parent.name for p in RESULTS.glob("*/outcome.csv"))
EARLIER = {"eps-transfer", "lr-transfer-compute-optimal"}  # judged by a statistic that has been replaced since
NAMES = [name for name in PUBLISHED if name not in EARLIER]


def outcome(name):
    study = study_named(name)
    if name == "coordinates":
        stream, roles = (pl.read_csv(RESULTS / name / f"{frame}.csv") for frame in ("stream", "roles"))
        return study, study.outcome(study.at(LAPTOP), Coordinates(Shape(64, 2), stream, roles))
    return study, study.outcome(study.at(LAPTOP), pl.read_csv(RESULTS / name / "runs.csv", infer_schema_length=None))


def same(published, computed):
    if isinstance(published, float) and isinstance(computed, float):
        return math.isclose(published, computed, rel_tol=1e-6, abs_tol=1e-9)
    return (published in (None, "")) if computed in (None, "") else published == computed


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_outcome_follows_from_the_runs(name):
    _, found = outcome(name)
    published = pl.read_csv(RESULTS / name / "outcome.csv", infer_schema_length=None)
    assert published.columns == found.table.columns
    assert published.height == found.table.height
    for before, after in zip(published.iter_rows(), found.table.iter_rows(), strict=True):
        assert all(map(same, before, after)), (before, after)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_agreement_is_the_published_one(name):
    _, found = outcome(name)
    row = next(line for line in (RESULTS / "README.md").read_text().splitlines() if f"({name}/" in line)
    word = "cannot be seen" if found.agreement.startswith("cannot") else found.agreement
    assert f"**{word}" in row


@pytest.mark.slow
def test_another_run_would_change_the_outcome():
    """The negative control: one loss moved, and the table is another."""
    study = study_named("lr-transfer")
    frame = pl.read_csv(RESULTS / "lr-transfer" / "runs.csv", infer_schema_length=None)
    moved = frame.with_columns(loss=pl.when(pl.int_range(pl.len()) == 3).then(pl.col("loss") - 0.3).otherwise("loss"))
    assert not study.find(study.at(LAPTOP), moved).table.equals(study.find(study.at(LAPTOP), frame).table)


def test_every_study_has_a_page():
    assert isinstance(study_named("shape"), Sweep)
    assert len(PUBLISHED) == 12
    index = (RESULTS / "README.md").read_text()
    assert "Earlier results" in index
    for name in EARLIER:
        assert f"`{name}`" in index.partition("by a statistic that has been replaced")[0]
