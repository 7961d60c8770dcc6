"""The report in a real browser: charts drawn without an error, legends that hide, nothing cut off, nothing injected."""

import json
import math
import re
from dataclasses import replace

import polars as pl
import pytest

from completep.report.html import page
from completep.studies.demo import DEMO
from completep.studies.design import Measurement
from completep.studies.result import StudyResult, run_settings
from completep.studies.run import known_studies, study_named
from completep.studies.scale import LAPTOP
from tests.report.pages import opened
from tests.studies.frames import (
    dynamics_frame,
    eps_frame,
    expert_frame,
    grid_frame,
    optimal_frame,
    shape_frame,
    tau_frame,
    transfer_frame,
    width_frame,
)

pytestmark = pytest.mark.slow
DRIFT = {"mup": -0.5, "alpha=0.5": 0.5, "completep": 0.0}
SHAPES = study_named("downstream").axes["laptop"]["shape"]


def made(name, change=lambda frame: frame, **values) -> StudyResult:
    """A result from made-up losses; measurements are real, and so small that they take seconds."""
    study = DEMO if name == "demo" else study_named(name)
    experiment = study.at(LAPTOP).narrowed(values)
    if isinstance(study, Measurement):
        depths = [2, 4, 8] if name == "coordinates" else [16, 32, 64]
        experiment = experiment.narrowed({"depth": depths, "seed": [0, 1]})
        conclusion, frames = study.conclude(experiment, 1, lambda *_: None)
        return StudyResult(experiment, conclusion, frames, {"data": "digits"}, ("study", name))
    frame = change(losses(name))
    conclusion = study.conclude(experiment, frame)
    return StudyResult(experiment, conclusion, {"runs": frame}, {"data": "python"}, ("study", name))


def losses(name):
    frames = {
        "eps-transfer": lambda: eps_frame({"completep": {2: 1e-4, 16: 1e-4}, "flat-eps=1": {2: 1e-4, 16: 1e-5}}),
        "dynamics": lambda: dynamics_frame(
            {r: {2: 2.0, 8: 1.9, 32: x} for r, x in zip(DRIFT, (2.3, 2.1, 1.8), strict=True)}
        ),
        "shape": lambda: shape_frame({"mup": 0.004, "alpha=0.5": 0.002, "completep": 0.0}),
        "tau": lambda: tau_frame({"mup": 0.5, "alpha=0.5": 0.2, "completep": -0.4}).with_columns(shape=pl.lit("32x4")),
        "lr-wd-grid": lambda: grid_frame(-1.0),
        "horizon": lambda: shape_frame(dict.fromkeys(DRIFT, 0.0)),
        "downstream": scores,
        "init-transfer": lambda: transfer_frame(DRIFT).rename({"lr": "std"}),
        "lr-transfer-compute-optimal": lambda: optimal_frame(DRIFT, 3, 2.0),
        "expert-transfer": lambda: expert_frame({"mup": 2.0}),
        "embedding-lr": lambda: width_frame({"sp": 0.05, "sp-embedding": 0.02, "mup": 0.0}, {"sp": -2}),
    }
    return frames.get(name, lambda: with_divergence(transfer_frame(DRIFT)))()


def scores():
    tasks = {"hellaswag": "acc_norm", "boolq": "acc"}
    return pl.DataFrame(
        [
            {
                "rules": r,
                "shape": s,
                "task": t,
                "metric": m,
                "items": 200,
                "score": 40.0 + i,
                "stderr": 2.0,
                "run": r + s,
                "loss": 2.0 - 0.1 * i,
            }
            for i, r in enumerate(DRIFT)
            for s in SHAPES
            for t, m in tasks.items()
        ]
    )


def with_divergence(frame):
    lost = (pl.col("rules") == "mup") & (pl.col("lr") > 2**-4)
    return frame.with_columns(loss=pl.when(lost).then(math.nan).otherwise("loss"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.mark.parametrize("name", ["demo", *(name for name in known_studies() if not name.startswith("own-"))])
def test_every_study_is_drawn_whole(name, browser, folder):
    result = made(name)
    files = result.write(folder)
    assert files[0].name == "report.html"
    assert {f.suffix for f in files} == {".html", ".md", ".svg", ".png", ".pdf", ".csv"}
    panels = sum(len(f.panels) for f in result.conclusion.figures)
    for width in (390, 1440):
        tab, said = opened(browser, files[0], width)
        assert said == []
        assert tab.locator(".panel svg.marks").count() == panels
        assert tab.evaluate("document.documentElement.scrollWidth") <= width  # nothing reaches past the window
        # and whatever scrolls inside of it is a figure or a table; all else is seen whole
        cut = tab.evaluate(
            """() => [...document.querySelectorAll("h1, h2, p, dt, dd, pre, summary, .verdict")]
                .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"""
        )
        assert cut == []
        assert result.conclusion.sentence in tab.locator(".verdict").inner_text().replace("\n", " ")
        tab.close()


def test_panels_fit_a_phone(browser, folder):
    files = made("lr-transfer").write(folder)
    tab, _ = opened(browser, files[0], 390)
    wide = tab.evaluate(
        "[...document.querySelectorAll('.panel')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
    )
    assert wide == 0


def test_a_click_on_the_legend_hides_a_series_and_another_brings_it_back(browser, folder):
    files = made("lr-transfer").write(folder)
    tab, said = opened(browser, files[0], 1440)
    panel = tab.locator(".panel").first

    def visible():
        """Lines by their colours, where they are seen."""
        return panel.evaluate(
            """p => [...p.querySelectorAll(".mark-line path")]
                .filter(e => e.getAttribute("d") && getComputedStyle(e).opacity > 0.5)
                .map(e => e.getAttribute("stroke"))"""
        )

    before = visible()
    assert len(before) == 3
    entry = panel.locator(".role-legend-label text", has_text=re.compile("^8$"))
    entry.click()
    wait_until(tab, lambda: len(visible()) == 2)
    assert set(visible()) < set(before)
    entry.click()
    wait_until(tab, lambda: visible() == before)
    assert said == []


def wait_until(tab, condition):
    for _ in range(300):
        if condition():
            return
        tab.wait_for_timeout(50)
    raise AssertionError("this never happened")


def test_dark_and_print(browser, folder):
    files = made("lr-transfer").write(folder)
    colours = {}
    for scheme in ("light", "dark"):
        tab, _ = opened(browser, files[0], 1440, color_scheme=scheme)
        colours[scheme] = tab.evaluate(
            """() => [getComputedStyle(document.body).backgroundColor,
                getComputedStyle(document.querySelector(".panel .role-axis-label text")).fill]"""
        )
    assert colours["light"] == ["rgb(255, 255, 255)", "rgb(28, 29, 32)"]
    assert colours["dark"] == ["rgb(22, 24, 28)", "rgb(232, 234, 237)"]
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    ink = "getComputedStyle(document.querySelector('.panel .role-axis-label text')).fill"
    wait_until(tab, lambda: tab.evaluate(ink) == "rgb(28, 29, 32)")  # dark ink on paper, also from a dark screen


EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def test_nothing_from_outside_is_executed(browser, tmp_path):
    def poison(frame):
        return frame.with_columns(note=pl.lit(EVIL), rules=pl.col("rules").replace({"mup": EVIL}))

    result = made("lr-transfer", poison)
    table = result.table.with_columns(note=pl.lit(EVIL))
    conclusion = replace(result.conclusion, sentence=EVIL, table=table)
    study = replace(result.experiment.study, question=EVIL)
    result = replace(
        result, experiment=replace(result.experiment, study=study), conclusion=conclusion, settings={EVIL: EVIL},
        command=("study", EVIL),
    )  # fmt: skip
    path = tmp_path / "evil.html"
    path.write_text(page(result.document()))
    tab, said = opened(browser, path, 1440)
    assert tab.title() == f"{EVIL} · completep"
    assert said == []
    assert EVIL in tab.locator(".verdict").inner_text()  # shown as text
    fragment = tmp_path / "fragment.html"
    fragment.write_text(f"<body data-drawn=yes><title>fragment</title>{result._repr_html_()}")
    tab, said = opened(browser, fragment, 1440)
    assert tab.title() == "fragment"
    assert said == []


def test_numbers_in_the_files_are_those_of_the_frame(folder):
    result = made("lr-transfer")
    files, data = result.write(folder), result.data["runs"]
    runs = pl.read_csv(next(f for f in files if f.name == "runs.csv"))
    assert runs["lr"].to_list() == data["lr"].to_list()
    assert runs.height == data.height
    assert pl.read_csv(next(f for f in files if f.name == "outcome.csv")).height == result.table.height


def test_settings_name_what_varies_and_what_does_not():
    study = study_named("lr-transfer")
    settings = run_settings([study.run(LAPTOP, point) for point in study.at(LAPTOP).points()])
    assert settings["depths"] == "2, 8, 32"
    assert settings["base (width × depth)"] == "32 × 2"
    assert settings["steps"] == "400"
    assert settings["data"].startswith("the sources of Python, as bytes")
    assert json.dumps(settings)


def test_markdown_says_the_same_and_stays_text(folder):
    result = made("lr-transfer")
    conclusion = replace(result.conclusion, sentence=EVIL + " | `x` *y*")
    files = replace(result, conclusion=conclusion, settings={"data": "a|b"}).write(folder)
    text = next(f for f in files if f.name == "report.md").read_text()
    assert "<script>" not in text
    assert r"a\|b" in text
    assert f"![{result.experiment.study.question}](lr-transfer.svg)" in text
    assert text.count("\n| ") == result.table.height + 2
    for name in re.findall(r"\]\(([^)]+)\)", text):
        assert (files[0].parent / name).exists()


def test_diverged_runs_do_not_stop_the_page(browser, folder):
    def diverge(frame):
        lost = (pl.col("rules") == "mup") & (pl.col("depth") >= 16)
        return frame.with_columns(loss=pl.when(lost).then(math.nan).otherwise("loss"))

    tab, said = opened(browser, made("shape", diverge).write(folder)[0], 1440)
    assert said == []
    assert tab.locator(".panel svg.marks").count() == 5


def test_every_line_is_seen_on_a_dark_page(browser, folder):
    """Contrast of each series with its background, as WCAG defines it: at least 3 for what is drawn."""
    files = made("lr-transfer").write(folder)

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    tab, _ = opened(browser, files[0], 1440, color_scheme="dark")
    strokes = tab.evaluate(
        """() => [...document.querySelectorAll(".mark-line path")].map(e => e.getAttribute("stroke")).filter(Boolean)"""
    )
    assert len(set(strokes)) >= 5
    for colour in set(strokes):
        assert (luminance(colour) + 0.05) / (luminance("#16181c") + 0.05) >= 3, colour
