"""`derive` finds rules that it is not told, and says so where it cannot. Negative controls stand beside each claim."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from completep import COMPLETEP, Role, UserError, check, derive, explain, load_rules, parametrize
from completep.cli import main
from completep.measure.solving import Exponent, _agreed, _confirmed, nearest, snapped, undecided
from completep.model.gpt import gpt
from completep.rules.table import Column, NamedRow, Power, Rule
from completep.stats import Slope
from tests.anatomy.parts import Model, RoutedBlock
from tests.measure.families import Family, family, with_idle_gains

GRID = {"widths": (32, 64, 128), "depths": (2, 4, 8), "batch": 8, "workers": 1}
BARE = {"blocks.*.mixer.rise": Role.HIDDEN, "blocks.*.mixer.gain": Role.BLOCK_NORM}
# (init, learning rate, epsilon) in width and in depth, from Table 1: a hidden matrix and a gain inside a block
EXPECTED = {
    "blocks.*.mixer.rise": {"width": (-0.5, -1.0, -1.0), "depth": (0.0, 0.0, -1.0)},
    "blocks.*.mixer.gain": {"width": (0.0, 0.0, -1.0), "depth": (0.0, 0.0, -1.0)},
}


@pytest.fixture(scope="module")
def derived():
    return derive(family, **GRID, steps=8, parameters=["*.rise", "*.gain"])


def found(result):
    table = {}
    for e in result.exponents:
        table.setdefault(e.parameter, {}).setdefault(e.axis, []).append(e.value)
    return {name: {axis: tuple(values) for axis, values in axes.items()} for name, axes in table.items()}


@pytest.mark.slow
def test_what_has_no_role_is_measured_and_gets_the_rule_of_its_kind(derived):
    assert found(derived) == EXPECTED
    assert derived.verdict == "PASS"
    assert all(e.later is not None for e in derived.exponents if e.setting != "init")
    assert "blocks.*.mixer.rise" in str(derived)
    assert json.loads(json.dumps(derived.to_json()))["verdict"] == "PASS"


@pytest.mark.slow
def test_rules_that_are_hidden_are_found_again():
    """Control a. benchmarks/derive_power.py does it for whole tables of ten architectures."""
    hidden = ["embed.weight", "blocks.*.up.*", "blocks.*.norm.weight", "norm.weight", "head.weight"]
    result = derive(family, **GRID, steps=0, roles=BARE, parameters=hidden)
    assert found(result) == {
        "embed.weight": {"width": (0.0, 0.0, -1.0), "depth": (0.0, 0.0, 0.0)},
        "blocks.*.norm.weight": {"width": (0.0, 0.0, -1.0), "depth": (0.0, 0.0, -1.0)},
        "blocks.*.up.weight": {"width": (-0.5, -1.0, -1.0), "depth": (0.0, 0.0, -1.0)},
        "blocks.*.up.bias": {"width": (0.0, 0.0, -1.0), "depth": (0.0, 0.0, -1.0)},
        "norm.weight": {"width": (0.0, 0.0, -1.0), "depth": (0.0, 0.0, 0.0)},
        "head.weight": {"width": (0.0, 0.0, -1.0), "depth": (0.0, 0.0, 0.0)},
    }


def slopes(result, parameter):
    return {(e.setting, e.axis): e.measured.value for e in result.exponents if e.parameter == parameter}


@pytest.mark.slow
def test_a_factor_in_the_forward_pass_shifts_the_exponents_by_itself():
    """Control b. y = c·W x trains like y = W x with σ/c, η/c and ε·c, so c = N^0.3 · L^-0.2 must reappear."""
    name = "blocks.*.up.weight"
    plain, planted = (
        slopes(derive(family, **GRID, steps=0, parameters=name, roles=BARE, arguments={"power": power}), name)
        for power in ((0.0, 0.0), (0.3, -0.2))
    )
    for axis, power in (("width", 0.3), ("depth", -0.2)):
        shift = {setting: planted[setting, axis] - plain[setting, axis] for setting, a in plain if a == axis}
        assert shift == pytest.approx({"init": -power, "learning rate": -power, "epsilon": power}, abs=0.01)


@pytest.mark.slow
def test_an_exponent_that_is_no_multiple_of_a_half_is_not_rounded():
    result = derive(family, **GRID, steps=0, parameters="*.up.weight", roles=BARE, arguments={"power": (0.25, 0.0)})
    wide = [e for e in result.exponents if e.axis == "width"]
    assert [e.value for e in wide] == [None] * 3
    assert all("is no multiple of 1/2" in e.why for e in wide)
    assert result.verdict == "INCONCLUSIVE"
    with pytest.raises(UserError, match="exponents are open"):
        result.save("never.json")


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["lr", "eps"])
@pytest.mark.parametrize("axis", ["width", "depth"])
def test_the_neighbours_of_a_derived_rule_fail_the_check(derived, setting, axis):
    """Control c: the rule passes, and its exponents ± 1/2 do not."""
    sizes = {"widths": GRID["widths"], "depths": GRID["depths"], "workers": 1}
    verdicts = []
    for shift in (-0.5, 0.0, 0.5):
        row = derived.rules.named[0]
        power = getattr(row.rule, setting)
        moved = replace(
            row, rule=replace(row.rule, **{setting: replace(power, **{axis: getattr(power, axis) + shift})})
        )
        rules = replace(derived.rules, named=(moved, *derived.rules.named[1:]))
        result = check(family, **sizes, rules=rules)
        verdicts.append(result.verdict)
        assert all(f.tensor == row.template for f in result.culprits)
    assert verdicts == ["FAIL", "PASS", "FAIL"]


@pytest.mark.slow
def test_a_derived_rule_predicts_twice_the_largest_size():
    """Control d: Σ|g| and RMS(g) at a size that was not fitted; without the rule they are a factor 2 away."""
    names = ["blocks.*.mixer.rise", "blocks.*.mixer.gain"]
    fitted = derive(family, **GRID, steps=0, parameters=names)
    beyond = derive(family, parameters=names, widths=(32, 64, 256), depths=(2, 4, 16), batch=8, workers=1, steps=0)
    for axis, size in (("width", 256), ("depth", 16)):
        for name in names:
            for setting in ("learning rate", "epsilon"):
                (e,) = [e for e in fitted.exponents if (e.parameter, e.setting, e.axis) == (name, setting, axis)]
                (at_large,) = [e for e in beyond.exponents if (e.parameter, e.setting, e.axis) == (name, setting, axis)]
                base = {"width": 32, "depth": 2}[axis]
                predicted, seen = (size / base) ** e.value, (size / base) ** at_large.measured.value
                assert abs(np.log2(seen / predicted)) < 0.4, (name, setting, axis)


# -- the file ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rules_survive_their_file_and_parametrize_takes_them(derived, tmp_path):
    rules = load_rules(derived.save(tmp_path / "rules.json"))
    assert rules == derived.rules
    model, base = Family(128, 8), lambda: Family(32, 2)
    with pytest.raises(UserError, match="1 parameters have no role"):
        parametrize(model, base=base)
    scaling = parametrize(model, base=base, rules=rules)
    scaling.init_(0.02)
    lrs = {name: group["lr"] for group in scaling.param_groups(1.0, eps=1.0) for name in group["names"]}
    eps = {name: group["eps"] for group in scaling.param_groups(1.0, eps=1.0) for name in group["names"]}
    assert lrs["blocks.3.mixer.rise"] == 0.25
    assert lrs["blocks.3.mixer.gain"] == 1.0
    assert eps["blocks.3.mixer.rise"] == eps["blocks.3.mixer.gain"] == pytest.approx(1 / 16)
    assert model.blocks[0].mixer.rise.std().item() == pytest.approx(0.01, rel=0.05)
    assert (model.blocks[0].mixer.gain == 1).all()
    sgd = {n: g["lr"] for g in scaling.param_groups(1.0, optimizer="sgd") for n in g["names"]}
    assert sgd["blocks.3.mixer.rise"] == COMPLETEP.rule(Role.HIDDEN, Column.SGD).lr(4, 4)
    with pytest.raises(UserError, match="measured for the Adam family and SGD"):
        scaling.settings("blocks.3.mixer.rise", Column.MUON)
    saved = scaling.state_dict()
    scaling.load_state_dict(saved)
    with pytest.raises(UserError, match="made under other rules"):
        parametrize(Family(128, 8), base=base, roles=BARE).load_state_dict(saved)


@pytest.mark.slow
def test_explain_says_measured_with_the_interval(derived, tmp_path):
    rules = load_rules(derived.save(tmp_path / "rules.json"))
    rows = {row.template: row for row in explain(Family(64, 4), base=lambda: Family(32, 2), rules=rules)}
    source = rows["blocks.*.mixer.rise"].source
    assert source.startswith("measured: lr ∝ width^-")
    assert "±" in source
    assert not rows["blocks.*.up.weight"].source.startswith("measured")


@pytest.mark.slow
def test_a_file_that_was_changed_is_refused(derived, tmp_path):
    path = derived.save(tmp_path / "rules.json")
    path.write_text(path.read_text().replace('"width": -1.0', '"width": -0.5', 1))
    with pytest.raises(UserError, match="was changed after it was measured"):
        load_rules(path)
    for text in ("", "[]", "{}", '{"format": 1}', '{"format": 9, "rows": []}', "null", '{"format": 1, "rows": [3]}'):
        path.write_text(text)
        with pytest.raises(UserError, match="is not a file of measured rules"):
            load_rules(path)
    with pytest.raises(UserError, match="cannot read"):
        load_rules(tmp_path / "nothing.json")


def forged(path, row=None, **changes):
    """A file of rules with the digest of its content, as somebody who makes one up would write it."""
    rows = [{"parameter": "blocks.*.up.weight", "role": None, "exponents": {}, "measured": {}, **(row or {})}]
    content = {"format": 1, "family": "completep", "rows": rows, "axes": {}, "source": {}, **changes}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content | {"sha256": digest}))
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source": 5}, "source is 5"),
        ({"row": {"exponents": {"lrr": {"width": 1.0}}}}, "unknown setting, 'lrr'"),
        ({"row": {"exponents": {"lr": {"zzz": 1.0}}}}, "unknown axis, 'zzz'"),
        ({"row": {"exponents": {"lr": {"width": 10**400}}}}, "too large"),
        ({"axes": {"z": {"parameter": "x", "dimension": 10**30}}}, "along no dimension"),
    ],
)
def test_what_no_measurement_gives_is_refused(tmp_path, changes, said):
    load_rules(forged(tmp_path / "good.json"))
    with pytest.raises(UserError, match=said):
        load_rules(forged(tmp_path / "rules.json", **changes))


def test_a_row_for_no_parameter_is_refused(tmp_path):
    rules = load_rules(forged(tmp_path / "rules.json", {"parameter": "no.such.weight"}))
    with pytest.raises(UserError, match=r"parameters that the model does not have: no\.such\.weight"):
        parametrize(gpt(64, 2, 61, head_size=16), base=lambda: gpt(32, 2, 61, head_size=16), rules=rules)
    axes = {"z": {"parameter": "embedding.weight", "dimension": 9}}
    rules = load_rules(forged(tmp_path / "axes.json", {"parameter": "embedding.weight"}, axes=axes))
    with pytest.raises(UserError, match=r"dimension 9 of embedding\.weight"):
        parametrize(gpt(64, 2, 61, head_size=16), base=lambda: gpt(32, 2, 61, head_size=16), rules=rules)


# -- bad input ---------------------------------------------------------------------------------------


def test_two_sizes_are_too_few():
    with pytest.raises(UserError, match="width has 2 sizes"):
        derive(family, widths=(32, 64), depths=(2, 4, 8))
    with pytest.raises(UserError, match="no axis is varied"):
        derive(family, base=(32, 2))
    with pytest.raises(UserError, match="no base is given"):
        derive(family, widths=(32, 64, 128))


def test_an_axis_that_the_factory_ignores_is_an_error():
    with pytest.raises(UserError, match="does not use nothing"):
        derive(family, **GRID, axes={"nothing": (1, 2, 4)})
    with pytest.raises(UserError, match="unexpected keyword argument 'experts'"):
        derive(family, **GRID, axes={"experts": (1, 2, 4)})


@pytest.mark.slow
def test_dropout_is_refused():
    with pytest.raises(UserError, match=r"dropout|random"):
        derive(family, **GRID, arguments={"dropout": 0.1})


def test_nothing_to_measure_is_an_error():
    with pytest.raises(UserError, match="a rule for every parameter"):
        derive(family, **GRID, roles=BARE)
    with pytest.raises(UserError, match=r"nothing matches '\*\.router'"):
        derive(family, **GRID, parameters="*.router")


@pytest.mark.slow
def test_no_gradient_and_starts_that_grow_are_named():
    result = derive(with_idle_gains, **GRID, steps=0, parameters=["*.still", "*.steep"])
    open_ones = {(e.parameter, e.setting, e.axis): e.why for e in result.exponents if e.value is None}
    assert open_ones["blocks.*.mixer.still", "learning rate", "width"] == "no gradient reaches it"
    assert "constructor gives it change with the size" in open_ones["blocks.*.mixer.steep", "init", "width"]
    assert ("blocks.*.mixer.steep", "init", "depth") not in open_ones
    assert result.verdict == "INCONCLUSIVE"
    with pytest.raises(UserError, match="no rule could be derived"):
        _ = result.rules


def routed(width, depth):
    return Model(width, [RoutedBlock] * depth)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "open_settings"), [(1, {"learning rate", "epsilon"}), (8, set())])
def test_experts_without_tokens_are_named(batch, open_settings):
    grid = {"widths": (32, 64, 128), "base": (32, 2), "workers": 1, "steps": 0}
    result = derive(routed, **grid, batch=batch, time=2 * batch, parameters="*.experts.up")
    assert {e.setting for e in result.exponents if e.value is None} == open_settings
    assert all(
        "routing sends nothing to some experts at width 32" in e.why for e in result.exponents if e.word != "PASS"
    )


# -- decisions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "value"),
    [
        (-1.04, -0.97, -1.0),
        (-0.05, 0.05, 0.0),
        (0.4, 0.6, 0.5),
        (-0.8, -0.7, None),
        (-0.15, 0.14, None),
        (0.3, 0.7, None),
    ],
)
def test_an_interval_must_be_about_one_multiple_of_a_half(low, high, value):
    assert nearest(Slope((low + high) / 2, low, high)) == value


def later(at_init, low, high):
    e = snapped(Exponent("p", "learning rate", "width", Slope(at_init, at_init - 0.02, at_init + 0.02)))
    slope = Slope((low + high) / 2, low, high)
    return _confirmed(replace(e, later=slope), slope, 20)


def test_what_aligns_in_training_is_judged_after_it():
    assert later(-1.0, -1.1, -0.85).value == -1.0  # it stays
    assert later(-0.5, -0.6, -0.45).value is None  # a random sum, still
    aligned = later(-0.5, -1.05, -0.9)
    assert aligned.value == -1.0
    assert aligned.used == aligned.later
    assert later(-0.5, -0.8, -0.7).why.endswith("it has not settled; give more steps")
    assert later(-0.5, -0.8, -0.7).reason == "not settled"
    assert "too wide" in later(-0.5, -1.2, -0.5).why  # it could be -1/2 or -1
    assert undecided([later(-0.5, -1.2, -0.5)])
    assert not undecided([later(-0.5, -0.8, -0.7), later(-1.0, -1.1, -0.85)])
    assert later(-0.5, -1.2, -0.5).value is None


def test_learning_rate_and_epsilon_move_together():
    """A router: its learning rate is still on its way from -1/2 to -1, so its epsilon is not -1/2 either."""

    def pair(lr_later, eps_later, start=-0.5):
        lr = later(start, lr_later - 0.05, lr_later + 0.05)
        eps = replace(later(start, eps_later - 0.05, eps_later + 0.05), setting="epsilon")
        return [e.value for e in _agreed(lr, eps, 20)]

    assert pair(-0.5, -0.5) == [None, None]
    assert pair(-0.72, -0.31) == [None, None]
    assert pair(-1.0, 0.0) == [-1.0, 0.0]
    assert pair(-1.0, -0.35) == [-1.0, None]
    assert pair(-1.0, -1.0, start=-1.0) == [-1.0, -1.0]
    assert pair(-0.75, -1.1, start=-1.0) == [None, None]


def test_powers_divide():
    one, other = Power.of({"width": -1, "depth": 0.5, "experts": 1}), Power.of({"width": 1, "experts": -1})
    quotient = one / other
    assert quotient(2.0, 4.0, None, {"experts": 3.0}) == pytest.approx(2**-2 * 4**0.5 * 3**2)
    row = NamedRow("p", Rule(lr=one, eps=other))
    sgd = row.in_column(Column.SGD)
    assert sgd.lr == quotient
    assert sgd.lr(3, 5) * sgd.weight_decay(3, 5) == pytest.approx(1.0)


@pytest.mark.slow
def test_the_command_writes_rules_that_explain_and_check_take(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "tests.measure.families:family --widths 32 64 128 --depths 2 4 8 --steps 0 --workers 1 --json"
    assert main(["derive", *words.split(), "--save", "rules.json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "PASS"
    sizes = "--args width=64 depth=4 --base width=32 depth=2 --rules rules.json"
    assert main(["explain", "tests.measure.families:family", *sizes.split()]) == 0
    assert "measured" in capsys.readouterr().out
    assert main(["derive", "tests.measure.families:family", "--axis", "4", "8"]) == 2
    assert "'4' is not the name of an argument" in capsys.readouterr().err
