"""The transfer verdict on curves whose optimum is known: what passes, what fails, and what cannot be told."""

import gzip
import json
import math
import re
import zlib
from contextlib import nullcontext

import numpy as np
import polars as pl
import pytest
import torch

from completep import transfer
from completep.cli import main
from completep.config import Shape
from completep.errors import UserError
from completep.measure.curves import Curve, compare, curve, judge_transfer
from completep.measure.sweeps import find_hyperparameter, read_sweep, suggestion
from completep.stats import fit_bowl
from tests.hostile import within


def sweep(
    drift=0.0,
    *,
    values=range(-12, -3),
    depths=(2, 8, 32),
    seeds=3,
    noise=0.002,
    name="lr",
    rules="x",
    deeper=0.05,
    curvature=0.02,
):
    """Parabolas in log2; the optimum moves by `drift` octaves per doubling of depth."""
    rng = np.random.default_rng(0)
    rows = []
    for depth in depths:
        octaves = math.log2(depth / depths[0])
        for value in values:
            for seed in range(seeds):
                loss = (
                    2.5
                    - deeper * octaves
                    + curvature * (value + 8 - drift * octaves) ** 2
                    + noise * rng.standard_normal()
                )
                rows.append({"rules": rules, "width": 64, "depth": depth, name: 2.0**value, "seed": seed, "loss": loss})
    return pl.DataFrame(rows)


def only(frame, **options):
    (only_one,) = judge_transfer(frame, **options)
    return only_one


def test_no_drift_passes():
    found = only(sweep())
    assert found.word == "PASS"
    assert found.best == pytest.approx(2**-8, rel=0.1)
    assert found.best in found.best_interval
    assert found.deeper == "better"
    for s in found.shapes:
        assert s.interior
        assert abs(s.drift) < 0.1
        assert s.drift in s.drift_interval


@pytest.mark.slow
@pytest.mark.parametrize("drift", [-0.5, -0.25, 0.25, 0.5])
def test_drift_is_measured_in_octaves_and_fails(drift):
    found = only(sweep(drift))
    assert found.word == "FAIL"
    assert [s.drift for s in found.shapes] == pytest.approx([2 * drift, 4 * drift], abs=0.1)
    assert "octaves" in found.why


@pytest.mark.slow
def test_regret_is_what_the_bases_value_costs():
    found = only(sweep(0.5, noise=0))
    far = found.shapes[-1]
    assert far.regret == pytest.approx(100 * 0.02 * 4 / (2.5 - 0.05 * 4), rel=1e-6)
    assert far.loss == pytest.approx(2.5 - 0.05 * 4 + 0.02 * 4)
    sharp = only(sweep(0.12, curvature=0.4, noise=0))
    assert abs(sharp.shapes[-1].drift) < 0.5
    assert sharp.word == "FAIL"
    assert "costs" in sharp.why
    assert only(sweep(0.1, curvature=0.02, noise=0)).word == "PASS"


def test_deeper_is_not_better_is_said():
    assert only(sweep(deeper=-0.05)).deeper == "not better"
    assert only(sweep().rename({"width": "depth", "depth": "width"})).deeper is None


def test_deeper_is_better_only_by_more_than_the_noise():
    assert only(sweep(deeper=0.002, noise=0.002, seeds=3)).deeper == "unclear"
    assert only(sweep(deeper=0.002, noise=0.0002, seeds=3)).deeper == "better"
    assert only(sweep(deeper=0.05, seeds=1, noise=0)).deeper == "unclear"  # one seed has no noise to compare with


def test_an_edge_is_not_an_optimum():
    base_edge = only(sweep(values=range(-8, -3)))
    assert base_edge.word == "INCONCLUSIVE"
    assert "extend the range" in base_edge.why
    near = only(sweep(0.3, values=(-10, -9, -8, -7.9), noise=0, depths=(2, 4)))
    assert near.word == "INCONCLUSIVE"
    elsewhere = pl.concat([sweep(depths=(2,)), sweep(values=range(-6, 0), depths=(8,))])
    assert only(elsewhere).word == "INCONCLUSIVE"
    assert "outside the values tried" in only(elsewhere).why
    far = only(sweep(-1.0, values=range(-9, -3), noise=0))
    assert far.word == "FAIL"
    assert "at least" in far.shapes[-1].why


def test_diverged_runs_count_as_infinite():
    frame = sweep(noise=0).with_columns(loss=pl.when(pl.col("lr") > 2**-7).then(float("nan")).otherwise("loss"))
    assert only(frame).word == "PASS"
    everything = frame.with_columns(loss=pl.when(pl.col("depth") == 32).then(float("nan")).otherwise("loss"))
    found = only(everything)
    assert found.word == "INCONCLUSIVE"
    assert "every run diverged" in found.why


def test_runs_that_are_missing_count_for_nothing():
    frame = sweep(noise=0.001, seeds=4).filter(~((pl.col("seed") == 3) & (pl.col("lr") == 2**-8)))
    assert only(frame).word == "PASS"


def test_noise_without_seeds_enough_is_inconclusive():
    for drift in (0.0, 0.5):
        found = only(sweep(drift, seeds=1, noise=0.0))
        assert found.word == "INCONCLUSIVE"
        assert "add seeds" in found.why
        assert found.shapes[0].regret_interval is None
    assert only(sweep(seeds=2)).word == "PASS"  # two have: levels of their own, and a common residual
    assert only(sweep(seeds=3, noise=0.1)).word != "PASS"
    assert only(sweep(depths=(2,))).word == "INCONCLUSIVE"


@pytest.mark.slow
def test_the_regret_is_judged_before_the_drift():
    """An octave of drift: in a flat bowl it costs 0.08 %, in a sharp one 0.8 %."""
    flat = only(sweep(0.25, curvature=0.002, noise=1e-4))
    assert flat.shapes[-1].drift_interval.low > 0.5
    assert flat.word == "PASS"
    assert "so flat" in flat.why
    assert only(sweep(0.25, curvature=0.02, noise=1e-4)).word == "FAIL"
    between = only(sweep(0.3, curvature=0.0085, noise=3e-3, depths=(2, 32)))  # a regret of about half a percent
    assert between.shapes[-1].regret_interval.low < 0.5 < between.shapes[-1].regret_interval.high
    assert between.word == "FAIL"
    assert "drifts" in between.why
    assert "costs" not in between.why


@pytest.mark.slow
def test_many_shapes_need_more_to_fail():
    """Holm: what fails alone is not enough where forty others were tested and are right."""
    alone = sweep(0.15, curvature=0.05, noise=0.008, depths=(2, 8, 32)).filter(pl.col("depth") != 8)
    assert only(alone).word == "FAIL"
    curves = {d: curve(alone.filter(pl.col("depth") == d), "lr") for d in (2, 32)}
    p = compare(*[Curve(Shape(64, d), *both, fit_bowl(*both)) for d, both in curves.items()]).p_values
    assert 0.05 / 40 < min(p) < 0.05 / 4
    others = [sweep(depths=(2, 4, 8), rules=f"right {i}", noise=0.008, curvature=0.05) for i in range(20)]
    many = {t.rules: t.word for t in judge_transfer(pl.concat([alone, *others]))}
    assert many["x"] == "INCONCLUSIVE"
    assert "FAIL" not in many.values()


def test_a_base_optimum_that_diverges_fails():
    lost = (pl.col("depth") == 32) & (pl.col("lr") > 2**-9)
    found = only(sweep().with_columns(loss=pl.when(lost).then(float("nan")).otherwise("loss")))
    assert found.word == "FAIL"
    assert "diverges" in found.why


def test_unbounded_intervals_are_shown_and_json_stays_strict():
    edge = transfer(sweep(-0.3, values=range(-9, -3)))
    text = str(edge)
    assert "∞" in text
    assert "inf" not in text
    assert "nan" not in text
    assert json.dumps(edge.to_json(), allow_nan=False)


def test_seeds_may_differ_from_value_to_value():
    """Levels per seed: a lucky seed that was run at one value only moves nothing."""
    frame = sweep(noise=0.001, seeds=4)
    lucky = frame.filter((pl.col("seed") < 3) | (pl.col("lr") == 2.0**-11))
    lucky = lucky.with_columns(loss=pl.when(pl.col("seed") == 3).then(pl.col("loss") * 0.8).otherwise("loss"))
    found = only(lucky)
    assert found.best == pytest.approx(2**-8, rel=0.1)
    assert found.word == "PASS"


NAMES = {"loss": "val_loss", "width": "n_embd", "depth": "n_layer", "lr": "learning_rate", "seed": "run_seed"}


@pytest.mark.slow
def test_columns_by_other_peoples_names(tmp_path, capsys):
    theirs = sweep(0.5).rename(NAMES)
    result = transfer(theirs, **NAMES)
    assert result.verdict == "FAIL"
    assert result.transfers == transfer(sweep(0.5)).transfers
    path = tmp_path / "sweep.csv"
    path.write_text(theirs.with_columns(loss=pl.lit(1.0)).write_csv())  # a column that is not meant
    assert transfer(path, **NAMES).transfers == result.transfers
    words = [word for role, name in NAMES.items() for word in (f"--{role}", name.upper())]
    assert main(["check", "transfer", str(path), *words, "--out", str(tmp_path / "o"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdicts"][0]["hyperparameter"] == "lr"


def test_a_suggested_column_works():
    """Errors name the columns there are, and one that serves; following them leads to a verdict."""
    theirs, given = sweep(0.5).rename(NAMES), {}
    while given != NAMES:
        with pytest.raises(UserError, match=r"n_embd|several runs") as error:
            transfer(theirs, **given)
        hints = dict(re.findall(r"(\w+)='(\w+)'", error.value.fix))
        assert hints.items() <= NAMES.items()
        assert hints.keys() - given.keys()
        given |= hints
    assert transfer(theirs, **given).verdict == "FAIL"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"loss": "vall_loss"}, "no column 'vall_loss' for loss; the columns are .*\n.*loss='val_loss'"),
        ({"loss": "nothing"}, "the columns are .*\n.*loss='val_loss'"),
        ({"width": "n_embd", "depth": "n_embd"}, "width and depth cannot both be the column 'n_embd'"),
    ],
)
def test_columns_that_are_not_there(names, message):
    with pytest.raises(UserError, match=message):
        transfer(sweep().rename(NAMES), **names)


@pytest.mark.slow
def test_columns_whose_names_are_swapped():
    """A column that is named for one thing may be called what another is."""
    swapped = sweep(0.5).rename({"lr": "loss", "loss": "lr"})
    assert transfer(swapped, lr="loss", loss="lr").transfers == transfer(sweep(0.5)).transfers
    with pytest.raises(UserError, match="the sweep lacks loss"):
        transfer(swapped, lr="loss")


def test_columns_of_trackers():
    assert suggestion("loss", ["epoch", "eval/val_loss", "lr"]) == "loss='eval/val_loss'"
    assert suggestion("width", ["config.n_embd"]) == "width='config.n_embd'"
    assert suggestion("depth", ["epoch"]) == "depth='COLUMN'"


@pytest.mark.parametrize("name", ["lr", "std", "eps", "weight_decay"])
def test_every_hyperparameter(name):
    frame = sweep(name=name)
    assert find_hyperparameter(frame, None) == name
    assert only(frame, hyperparameter=name).word == "PASS"


@pytest.mark.slow
def test_several_parameterizations_and_another_base():
    both = pl.concat([sweep(rules="a"), sweep(0.5, rules="b")])
    assert {t.rules: t.word for t in judge_transfer(both)} == {"a": "PASS", "b": "FAIL"}
    assert only(sweep(), base=Shape(64, 8)).base == Shape(64, 8)
    with pytest.raises(UserError, match="no runs at the base 64 × 3"):
        judge_transfer(sweep(), base=Shape(64, 3))


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (sweep().drop("loss"), "lacks loss"),
        (sweep().drop("width", "depth"), "lacks width and depth"),
        (sweep().with_columns(lr=pl.col("lr") - 2.0**-12), "no place on a logarithmic axis"),
        (pl.concat([sweep(), sweep()]), "several runs have the same"),
        (sweep().with_columns(loss=pl.col("loss") - 3), "not above 0"),
    ],
)
def test_bad_frames(frame, message):
    with pytest.raises(UserError, match=message):
        judge_transfer(frame)


@pytest.mark.slow
def test_the_public_function_takes_frames_files_and_tuples(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(sweep(0.5).write_csv())
    for result in (transfer(sweep(0.5)), transfer(path, base=(64, 2)), transfer(str(path), hyperparameter="lr")):
        assert result.verdict == "FAIL"
        assert result.transfers[0].shapes[-1].drift == pytest.approx(2, abs=0.1)
        assert str(result).startswith("FAIL")
        assert "<svg" in result._repr_html_()
        assert result.to_json()["verdicts"][0]["word"] == "FAIL"


def test_a_curve_of_two_values_is_inconclusive():
    """Between two values the curve is a straight line."""
    two = pl.concat([sweep(depths=(2,)), sweep(depths=(8,), values=(-9, -7))])
    assert only(two).word == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.with_columns(loss=pl.lit(None, pl.Float64)), "no run of the sweep has a loss"),
        (lambda f: f.with_columns(loss=pl.lit("2.0")), "'loss' does not hold numbers"),
        (lambda f: f.rename({"lr": "x"}).with_columns(x=pl.lit("a")), "'x' does not hold numbers"),
    ],
)
def test_strange_frames_are_errors(change, message):
    frame = change(sweep())
    with pytest.raises(UserError, match=message):
        transfer(frame, hyperparameter="lr" if "lr" in frame.columns else "x")


@pytest.mark.parametrize("name", ["width", "seed", "loss", "rules"])
def test_a_reserved_column_is_no_hyperparameter(name):
    with pytest.raises(UserError, match=f"'{name}' is not a hyperparameter"):
        transfer(sweep(), hyperparameter=name)


@pytest.mark.parametrize("base", [(1, 2, 3), 32, "64x2"])
def test_a_base_that_is_no_shape(base):
    with pytest.raises(UserError, match="is not \\(width, depth\\)"):
        transfer(sweep(), base=base)


def test_odd_labels_are_fine():
    assert transfer(sweep().with_columns(seed=pl.lit("lr") + pl.col("seed").cast(pl.String))).verdict == "PASS"
    assert transfer(sweep().with_columns(rules=pl.lit(7))).transfers[0].rules == "7"
    assert transfer(sweep().with_columns(rules=pl.lit(None, pl.String))).transfers[0].rules == "none"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt.lr", "a[0]", "a'b", "a:b", "a b"])
def test_any_column_name_can_be_drawn(name):
    result = transfer(sweep().rename({"lr": name}), hyperparameter=name)
    (figure,) = result.document().figures()
    spec = json.dumps(figure.panels[0].to_dict())
    assert '"field": "value"' in spec
    assert '"value": 0.00390625' in spec
    assert name.replace("'", "&#39;") in result._repr_html_()


def test_which_hyperparameter():
    with pytest.raises(UserError, match="several vary: lr, std"):
        find_hyperparameter(sweep().with_columns(std=pl.int_range(pl.len())), None)
    with pytest.raises(UserError, match="no column 'eta'"):
        find_hyperparameter(sweep(), "eta")
    with pytest.raises(UserError, match="none of"):
        find_hyperparameter(sweep().drop("lr"), None)


@pytest.mark.slow
def test_anybodys_csv(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    text = sweep(0.5).write_csv().replace("lr", " LR ", 1)
    path.write_text(text + "x,64,32,0.5,0,diverged\nx,64,32,0.5,1,\n")
    frame = read_sweep(path)
    assert frame["loss"].is_nan().sum() >= 1
    assert main(["check", "transfer", str(path), "--out", str(tmp_path / "o"), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdicts"][0]["word"] == "FAIL"
    assert sorted(f.rsplit(".", 1)[1] for f in printed["files"]) == ["csv", "html", "md", "pdf", "png", "svg"]
    path.write_text(sweep().write_csv())
    assert main(["check", "transfer", str(path), "--out", str(tmp_path / "o")]) == 0
    assert "PASS" in capsys.readouterr().out
    for text, message in (
        ("width,lr,loss\n64.5,1,2\n", "line 2: width is '64.5', not a whole number"),
        ("width,lr,loss,Loss\n64,1,2,3\n", "several columns called 'loss'"),
        ("width,lr,loss\n", "no rows"),
        ("width,learning_rate,loss\n64,1,2\n64,2,2\n", "the columns are width, learning_rate, loss"),
        ("width,lr,loss\n64,2^-8,2\n64,1,2\n", "some values of lr are not numbers"),
        ("width,lr,loss\n64,1,nan\n64,2,nan\n64,4,nan\n128,1,nan\n", None),
    ):
        path.write_text(text)
        assert main(["check", "transfer", str(path), "--out", str(tmp_path / "o")]) == (2 if message else 3)
        assert message is None or message in capsys.readouterr().err
    path.write_text("")
    assert main(["check", "transfer", str(path)]) == 2
    assert main(["check", "transfer", str(tmp_path / "none.csv")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("column", ["width", "depth", "seed"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e19", "1e300", "1.5", "", "[/]"])
def test_a_size_that_is_no_whole_number_is_refused_with_its_line(column, value, tmp_path, capsys):
    frame = sweep().cast(pl.String)
    frame[3, column] = value
    frame.write_csv(tmp_path / "runs.csv")
    assert main(["check", "transfer", str(tmp_path / "runs.csv"), "--out", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"line 5: {column} is {value or None!r}, not a whole number" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["width", "depth", "seed", "rules", "loss"])
def test_no_other_column_is_a_hyperparameter(name, tmp_path, capsys):
    sweep().write_csv(tmp_path / "runs.csv")
    words = ["check", "transfer", str(tmp_path / "runs.csv"), "--out", str(tmp_path)]
    assert main([*words, "--hyperparameter", name]) == 2
    assert "is not a hyperparameter" in capsys.readouterr().err
    assert main([*words, "--hyperparameter", "lr", "--json"]) in (0, 1, 3)


def test_a_sweep_without_a_loss_is_refused(tmp_path, capsys):
    sweep().cast(pl.String).with_columns(loss=pl.lit("")).write_csv(tmp_path / "runs.csv")
    assert main(["check", "transfer", str(tmp_path / "runs.csv"), "--out", str(tmp_path)]) == 2
    assert "no run of the sweep has a loss" in capsys.readouterr().err


PACKERS = {"gzip": gzip.compress, "zlib": zlib.compress, "zlib-1": lambda data: zlib.compress(data, 1)}


@pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS.keys())
def test_a_packed_sweep_is_not_unpacked(pack, tmp_path, capsys):
    """A megabyte may unpack to any size, and polars would do it without being asked."""
    sweep().write_csv(tmp_path / "plain.csv")
    (tmp_path / "runs.csv").write_bytes(pack((tmp_path / "plain.csv").read_bytes()))
    assert main(["check", "transfer", str(tmp_path / "runs.csv")]) == 2
    assert "runs.csv is compressed" in capsys.readouterr().err
    assert not read_sweep(tmp_path / "plain.csv").is_empty()  # what the error says to do


def test_an_enormous_sweep_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "runs.csv"
    sweep().write_csv(path)
    monkeypatch.setattr("completep.measure.sweeps.MOST_BYTES", path.stat().st_size)
    assert not read_sweep(path).is_empty()
    monkeypatch.setattr("completep.measure.sweeps.MOST_BYTES", path.stat().st_size - 1)
    with pytest.raises(UserError, match=r"runs\.csv has more than"):
        read_sweep(path)


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "most"), [(10_000, True), (100_000, False)])
def test_a_sweep_with_endless_columns_is_refused_at_once(columns, most, tmp_path):
    names = ["lr", "width", "loss", *(f"c{i}" for i in range(columns - 3))]
    (tmp_path / "runs.csv").write_text(f"{','.join(names)}\n{','.join('1' for _ in names)}\n")
    with within(), nullcontext() if most else pytest.raises(UserError, match="has 100000 columns"):
        assert read_sweep(tmp_path / "runs.csv").width == columns


@pytest.mark.slow
def test_a_report_onto_a_file_is_refused(tmp_path, capsys):
    sweep().write_csv(tmp_path / "runs.csv")
    assert main(["check", "transfer", str(tmp_path / "runs.csv"), "--out", str(tmp_path / "runs.csv")]) == 2
    assert "cannot create" in capsys.readouterr().err


def test_levels_of_seeds_are_taken_off_exactly():
    """The fast fit against the plain one, with seeds that lack values."""
    from completep.stats import _contrasts, _without_levels, _without_seeds

    rng = np.random.default_rng(1)
    u, seed = np.tile(np.linspace(-2, 2, 9), 7), np.repeat(np.arange(7), 9)
    kept = rng.random(len(u)) > 0.3
    u, seed = u[kept], seed[kept]
    y = 0.05 * u**2 - 0.01 * u**3 + 0.1 * seed + 0.01 * rng.standard_normal(len(u))
    residual, bend = _without_levels(u, y, seed, 4)
    plain = np.concatenate([u[:, None] ** np.arange(5), _contrasts(seed)], 1)
    expected = np.linalg.lstsq(plain, y, rcond=None)[0]
    assert bend == pytest.approx(expected[2], rel=1e-9)
    assert residual == pytest.approx(y - plain @ expected, abs=1e-12)
    powers = u[:, None] ** np.arange(5)
    fitted = np.linalg.lstsq(_contrasts(seed), powers, rcond=None)[0]
    assert _without_seeds(powers, seed) == pytest.approx(powers - _contrasts(seed) @ fitted, abs=1e-12)


def grid(rules=1, widths=2, values=3):
    """Losses of a bowl for every parameterization, width and value."""
    return pl.DataFrame(
        [
            {"rules": f"r{r}", "width": 64 + w, "depth": 2, "lr": 2.0 ** (k / values), "loss": 3 + (k / values) ** 2}
            for r in range(rules)
            for w in range(widths)
            for k in range(-values // 2, values // 2 + 1)
        ]
    )


def test_more_points_than_altair_draws_by_default():
    checked = transfer(grid(widths=2, values=2600))
    assert (
        sum(len(rows) for panel in checked.document().figures()[0].specs for rows in panel["datasets"].values()) > 5000
    )


@pytest.mark.parametrize(
    ("size", "what"), [({"rules": 60}, "60 different rules"), ({"widths": 1200}, "1200 different shapes and rules")]
)
def test_too_many_panels_and_lines_are_refused_at_once(size, what, tmp_path, capsys):
    grid(**size).write_csv(tmp_path / "sweep.csv")
    with within(10):
        assert main(["check", "transfer", str(tmp_path / "sweep.csv")]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("place", ["header", "width", "rules", "loss"])
def test_a_field_of_megabytes_is_cut_in_messages(place, tmp_path, capsys):
    endless = "x" * 5_000_000
    row = {"rules": "sp", "width": "64", "lr": "0.1", "loss": "3"} | ({} if place == "header" else {place: endless})
    header = ",".join(row) + (f",{endless}" if place == "header" else "")
    (tmp_path / "sweep.csv").write_text(f"{header}\n{','.join(row.values())}{',1' if place == 'header' else ''}\n")
    with within(10):
        main(["check", "transfer", str(tmp_path / "sweep.csv"), "--out", str(tmp_path)])
    shown = capsys.readouterr()
    assert len(shown.out + shown.err) < 5000


def test_the_swept_column_by_its_name_in_the_file(tmp_path, capsys):
    sweep().rename({"lr": "MyLR"}).write_csv(tmp_path / "sweep.csv")
    words = ["check", "transfer", str(tmp_path / "sweep.csv"), "--hyperparameter", "MyLR", "--out", str(tmp_path)]
    assert main(words) == 0


def test_losses_too_small_for_a_share_of_them_are_refused():
    with pytest.raises(UserError, match="below 1e-100"):
        transfer(sweep().with_columns(loss=pl.lit(1e-300)))


def test_a_sweep_is_judged_in_a_process_that_has_trained():
    """Training flushes the smallest numbers to 0, the tolerance of a bisection among them."""
    before = transfer(sweep()).to_json()
    torch.set_flush_denormal(True)
    try:
        assert transfer(sweep()).to_json() == before
    finally:
        torch.set_flush_denormal(False)
