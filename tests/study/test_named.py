"""The studies: the paper's settings to the digit, axes that can be narrowed, errors that name the nearest word."""

import csv
from pathlib import Path

import pytest

from completep import paper
from completep.compute import flops
from completep.errors import UserError
from completep.rules.table import rules_named
from completep.study.design import Measurement, Sweep, read_value
from completep.study.engine import cost
from completep.study.named import STUDIES, study_named
from completep.study.scale import LAPTOP, PAPER, SCALES
from completep.study.store import canonical

NAMES = (
    "lr-transfer", "init-transfer", "lr-transfer-compute-optimal", "eps-transfer", "dynamics", "coordinates", "laziness", "shape",
    "tau", "lr-wd-grid", "horizon", "downstream",
)  # fmt: skip


def runs(name, scale=PAPER, *words):
    return study_named(name, scale).narrowed(words).runs()


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_runs_for_every_point(name, scale):
    study = study_named(name, scale)
    assert study.name == name
    if isinstance(study, Measurement):
        assert all(study.axes.values())
        return
    found = study.runs()
    assert len(found) == len({tuple(p.items()) for p, _ in found}) > 3
    for point, run in found[:: max(1, len(found) // 20)]:
        assert run.rules == point["rules"]
        assert run.seed == point["seed"]
        assert run.base == scale.base
        for axis in ("lr", "std", "eps", "weight_decay"):
            if axis in point:
                assert getattr(run.hyperparameters, axis) == point[axis]
        if "depth" in point:
            assert run.model.depth == point["depth"]
        if "shape" in point:
            assert f"{run.model.width}x{run.model.depth}" == point["shape"]


def test_transfer_at_the_papers_scale_is_the_papers():
    """Experiment table: N 256, σ 0.02, λ 0, B 128, 1144 steps, 300M tokens; ε and β as in the text."""
    for name in ("lr-transfer", "init-transfer", "eps-transfer", "dynamics"):
        for _, run in runs(name)[::17]:
            assert (run.model.width, run.batch, run.schedule.steps, run.sequence) == (256, 128, 1144, 2048)
            assert run.schedule.warmup == 114
            assert run.hyperparameters.weight_decay == 0
            assert (run.hyperparameters.beta1, run.hyperparameters.beta2) == (0.9, 0.95)
            assert run.model.vocabulary == 50257
            assert run.model.head_size == 64
    assert {run.hyperparameters.std for _, run in runs("lr-transfer")} == {0.02}
    assert {run.hyperparameters.lr for _, run in runs("init-transfer")} == {2**-8}
    assert {run.hyperparameters.lr for _, run in runs("dynamics")} == {2**-8, 2**-6}
    assert sorted({run.model.depth for _, run in runs("lr-transfer")}) == [2, 4, 8, 16, 32, 64, 128]


def test_shapes_at_the_papers_scale_are_the_size_table():
    with (Path(__file__).parents[1] / "compute" / "size_table.csv").open() as f:
        table = {(int(r["width"]), int(r["depth"])): (int(r["batch"]), int(r["steps"])) for r in csv.DictReader(f)}
    found = {(r.model.width, r.model.depth): (r.batch, r.schedule.steps) for _, r in runs("shape")}
    assert found == table


def test_weight_decay_follows_its_timescale_at_the_papers_scale():
    for _, run in [*runs("shape"), *runs("lr-transfer-compute-optimal"), *runs("horizon")]:
        h = run.hyperparameters
        assert 1 / (h.lr * h.weight_decay * run.schedule.steps) == pytest.approx(0.1407)
    for point, run in runs("tau"):
        h = run.hyperparameters
        assert 1 / (h.lr * h.weight_decay * run.schedule.steps) == pytest.approx(point["tau"])
    for _, run in runs("horizon"):
        assert run.tokens == pytest.approx(200 * flops.total(run.model), rel=1e-3)
    for _, run in runs("lr-wd-grid"):
        assert (run.model.depth, run.hyperparameters.std) == (6, 0.09)


def test_the_eps_study_compares_with_the_same_rules_but_for_eps():
    from completep.rules.table import Role

    ours, flat = (rules_named(r) for r in study_named("eps-transfer", PAPER).axes["rules"][::-1])
    for role in Role:
        assert ours.rule(role).lr == flat.rule(role).lr
        assert flat.rule(role).eps(1, 64) == 1
    assert ours.rule(Role.HIDDEN).eps(1, 64) == 1 / 64
    assert ours.branch == flat.branch


def test_what_is_shared_is_run_once():
    transfer = {canonical(r) for _, r in runs("lr-transfer", LAPTOP)}
    assert len(transfer) < len(runs("lr-transfer", LAPTOP))  # the base's runs are the same under all rules
    dynamics = {canonical(r) for _, r in runs("dynamics", LAPTOP)}
    assert dynamics <= transfer  # and the curves of dynamics are those of lr-transfer


def test_half_an_hour_on_two_cores():
    """With the 45 GFLOP/s a core that models 64 wide reach here, every laptop study fits."""
    for name in NAMES:
        study = study_named(name, LAPTOP)
        if isinstance(study, Sweep):
            assert sum(cost(r) for r in {canonical(r) for _, r in study.runs()}) / 2 / 45e9 < 30 * 60, name


def test_narrowing():
    study = study_named("lr-transfer", LAPTOP).narrowed(["depth=2,8", "lr=2^-8,0.01", "seed=0"])
    assert study.axes["depth"] == (2, 8)
    assert study.axes["lr"] == (2**-8, 0.01)
    assert study.axes["seed"] == (0,)
    assert len(study.runs()) == 3 * 2 * 2
    assert study_named("shape", LAPTOP).narrowed(["shape=32x4"]).runs()[0][1].model.width == 32


@pytest.mark.parametrize(
    ("name", "word", "said", "fix"),
    [
        ("lr-transfer", "dept=2", "no axis 'dept'", "did you mean depth?"),
        ("lr-transfer", "depth", "no value", "rules, depth, lr, seed"),
        ("lr-transfer", "depth=2.5", "'2.5' is not a whole number", "2"),
        ("lr-transfer", "lr=fast", "'fast' is not a number", "write values like"),
        ("lr-transfer", "lr=2^", "'2^' is not a number", "write values like"),
        ("lr-transfer", "lr=nan", "'nan' is not a number", "write values like"),
        ("shape", "shape=", "an empty value", "write values like"),
    ],
)
def test_bad_axes_are_told(name, word, said, fix):
    with pytest.raises(UserError) as error:
        study_named(name, LAPTOP).narrowed([word])
    assert said in error.value.what
    assert fix in error.value.fix


def test_impossible_points_are_told_before_anything_runs():
    for name, word in (
        ("lr-transfer", "depth=0"),
        ("shape", "shape=33x4"),
        ("shape", "shape=wide"),
        ("lr-transfer", "rules=best"),
    ):
        with pytest.raises(UserError):
            canonical(runs(name, LAPTOP, word)[0][1])


def test_an_unknown_study_suggests_the_nearest():
    with pytest.raises(UserError) as error:
        study_named("lr-transfr", LAPTOP)
    assert "did you mean lr-transfer?" in error.value.fix
    assert all(name in error.value.fix for name in STUDIES)


def test_values_keep_their_axis_type():
    assert read_value("8", 2, "depth=8") == 8
    assert isinstance(read_value("8", 2, "depth=8"), int)
    assert isinstance(read_value("1", 0.5, "lr=1"), float)
    assert paper.TRANSFER_TOKENS // (paper.TRANSFER_BATCH * paper.SEQUENCE) == 1144


def test_coordinates_at_the_papers_scale_are_the_papers(monkeypatch):
    """Experiment table: σ 0.06, η 2e-3, λ 0, B 4, 10 steps, 82K tokens, so T = 2048."""
    from completep.study import named

    asked = {}
    monkeypatch.setattr(named, "coordinate_check", lambda source, rules, shapes, setting, **_: asked.update(locals()))
    study = study_named("coordinates", PAPER)
    study.measure(**study.axes, workers=1, progress=None)
    s = asked["setting"]
    assert (s.std, s.lr, s.weight_decay, s.batch, s.steps) == (0.06, 2e-3, 0, 4, 10)
    assert s.batch * s.time * s.steps == 81920
    assert asked["source"].base == PAPER.base
    assert asked["source"].arguments == {"vocabulary": 50257, "head_size": 64}
