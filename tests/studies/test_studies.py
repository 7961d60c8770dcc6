"""The studies: the paper's settings to the digit, axes that can be narrowed, errors that suggest the nearest word."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from completep import paper, studies
from completep.compute import flops
from completep.errors import UserError
from completep.rules.table import rules_named
from completep.studies.design import Measurement, Sweep, listed, read_value, read_words
from completep.studies.run import known_studies, study_named
from completep.studies.scale import LAPTOP, PAPER, SCALES
from completep.sweep.training import Training, canonical
from tests.studies import own_study

NAMES = tuple(name for name, study in known_studies().items() if study is not own_study.STUDY)


def runs(name, scale=PAPER, **values):
    """(point, run) of every point."""
    study = study_named(name)
    return [(point, study.run(scale, point)) for point in study.at(scale).narrowed(values).points()]


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_study_has_runs_for_every_point(name, scale):
    study = study_named(name)
    assert study.name == name
    if isinstance(study, Measurement):
        assert all(study.axes[scale.name].values())
        return
    found = runs(name, scale)
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

    ours, flat = (rules_named(r) for r in study_named("eps-transfer").axes["paper"]["rules"][::-1])
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
    """With the 45 GFLOP/s per core that models 64 wide reach here, every laptop study fits."""
    for name in NAMES:
        if isinstance(study_named(name), Sweep):
            tasks = {Training(canonical(run)) for _, run in runs(name, LAPTOP)}
            assert sum(task.cost for task in tasks) / 2 / 45e9 < 30 * 60, name


def test_narrowing():
    study = study_named("lr-transfer")
    few = study.at(LAPTOP).narrowed(read_words(["depth=2,8", "lr=2^-8,0.01", "seed=0"]))
    assert few.axes["depth"] == (2, 8)
    assert few.axes["lr"] == (2**-8, 0.01)
    assert few.axes["seed"] == (0,)
    assert len(study.trials(few)) == 3 * 2 * 2
    plain = study.at(LAPTOP).narrowed({"depth": [2, 8], "lr": [2**-8, 0.01], "seed": [0]})
    assert plain.axes == few.axes  # Python values and words are the same
    assert runs("shape", LAPTOP, shape=["32x4"])[0][1].model.width == 32


@pytest.mark.parametrize(
    ("name", "word", "said", "fix"),
    [
        ("lr-transfer", "dept=2", "no axis 'dept'", "did you mean depth?"),
        ("lr-transfer", "depth", "no value", "AXIS=VALUE"),
        ("lr-transfer", "dept=2", "no axis", "rules, depth, lr, seed"),
        ("lr-transfer", "depth=2.5", "'2.5' is not a whole number", "2"),
        ("lr-transfer", "lr=fast", "'fast' is not a number", "write values like"),
        ("lr-transfer", "lr=2^", "'2^' is not a number", "write values like"),
        ("lr-transfer", "lr=nan", "'nan' is not a number", "write values like"),
        ("shape", "shape=", "an empty value", "write values like"),
    ],
)
def test_bad_axes_are_errors(name, word, said, fix):
    with pytest.raises(UserError) as error:
        study_named(name).at(LAPTOP).narrowed(read_words([word]))
    assert said in error.value.what
    assert fix in error.value.fix


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("lr-transfer", {"depth": [0]}),
        ("shape", {"shape": ["33x4"]}),
        ("shape", {"shape": ["wide"]}),
        ("lr-transfer", {"rules": ["best"]}),
    ],
)
def test_impossible_points_are_errors_before_anything_runs(name, values):
    study = study_named(name)
    with pytest.raises(UserError):
        study.trials(study.at(LAPTOP).narrowed(values))


def test_an_unknown_study_suggests_the_nearest():
    with pytest.raises(UserError) as error:
        study_named("lr-transfr")
    assert "did you mean lr-transfer?" in error.value.fix
    assert all(name in error.value.fix for name in NAMES)


def test_values_keep_their_axis_type():
    assert read_value("8", 2, "depth") == 8
    assert isinstance(read_value("8", 2, "depth"), int)
    assert isinstance(read_value("1", 0.5, "lr"), float)
    assert paper.TRANSFER_TOKENS // (paper.TRANSFER_BATCH * paper.SEQUENCE) == 1144


def test_coordinates_at_the_papers_scale_are_the_papers(monkeypatch):
    """Experiment table: σ 0.06, η 2e-3, λ 0, B 4, 10 steps, 82K tokens, so T = 2048."""
    from completep.measure import grid
    from completep.studies import coordinates

    asked = {}
    monkeypatch.setattr(grid, "coordinate_check", lambda source, rules, shapes, setting, **_: asked.update(locals()))
    monkeypatch.setattr(coordinates, "measure_growth", lambda rules, depths, **_: asked.update(limits=depths))
    coordinates.STUDY.measure(coordinates.STUDY.at(PAPER), 1, None)
    s = asked["setting"]
    assert (s.std, s.lr, s.weight_decay, s.batch, s.steps) == (0.06, 2e-3, 0, 4, 10)
    assert s.batch * s.time * s.steps == 81920
    assert asked["source"].base == PAPER.base
    assert asked["source"].arguments == {"vocabulary": 50257, "head_size": 64}
    assert asked["limits"] == list(paper.TRANSFER_DEPTHS)


def test_every_module_with_a_study_is_known():
    """A file that lists a study is named like it."""
    files = [p.stem for p in Path(studies.__file__).parent.glob("*.py") if "STUDY = listed(" in p.read_text()]
    assert sorted(name.replace("_", "-") for name in files) == list(NAMES)
    assert len(NAMES) >= 15


def test_two_studies_of_one_name_are_refused():
    with pytest.raises(UserError, match="two studies named 'shape'"):
        listed(replace(own_study.STUDY, name="shape"))
    assert listed(study_named("shape")) is study_named("shape")  # its own file may be loaded again


@pytest.mark.parametrize("name", ["../evil", "Two Words", "", "a/b"])
def test_a_name_is_a_plain_word(name):
    with pytest.raises(UserError, match="a study named"):
        replace(own_study.STUDY, name=name)


def test_rules_are_normalised_on_the_axis():
    few = study_named("lr-transfer").at(LAPTOP).narrowed({"rules": ["CompleteP", "alpha=1", "completep", "muP"]})
    assert few.axes["rules"] == ("completep", "mup")
    assert study_named("lr-transfer").at(LAPTOP).narrowed({"rules": "SP", "depth": 2}).axes["depth"] == (2,)


def test_a_scale_that_a_study_lacks_is_an_error():
    small = replace(own_study.STUDY, axes={"laptop": own_study.STUDY.axes["laptop"]})
    with pytest.raises(UserError, match="own-steps has no paper scale"):
        small.at(PAPER)


def test_a_study_without_a_figure_cannot_be_constructed():
    shape = study_named("shape")
    parts = {f: getattr(shape, f) for f in ("name", "question", "claim", "decision", "axes", "run", "find")}
    with pytest.raises(TypeError, match="draw"):
        Sweep(**parts)
    assert Sweep(**parts, draw=shape.draw).name == "shape"
