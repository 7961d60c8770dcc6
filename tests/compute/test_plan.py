"""From a budget to a run: the paper's own shapes come back, and impossible requests are errors."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from completep import MUP, Role, Shape, UserError, paper, parametrize
from completep.cli import main
from completep.compute import flops
from completep.compute.plan import batch_size, changes, plan, plan_shape, replan
from completep.compute.shapes import best_ratio
from completep.config import GPTConfig, Hyperparameters, Run, Schedule, run_from_json, to_json
from completep.model.gpt import GPT
from completep.report.document import Table
from completep.rules import table
from completep.rules.table import Horizon
from completep.tuned import TunedValue, TunedValues, write_tuned
from completep.units import human, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.5B", 1.5e9), ("300M", 3e8), ("4e20", 4e20), ("20T", 2e13), ("50k", 5e4), ("1,000", 1e3), ("7 b", 7e9),
        ("1.2E3", 1200), ("2", 2),
    ],
)  # fmt: skip
def test_quantities_as_people_write_them(text, value):
    assert parse_quantity(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["1.5X", "", "B", "-3M", "0", "nan", "inf", "1e999", "1.5.5B", "three", "1BB"])
def test_what_is_no_quantity(text):
    with pytest.raises(UserError, match=r"300M, 1\.5B"):
        parse_quantity(text, "params")


def test_human():
    assert [human(x) for x in (1.5e9, 3.42e10, 999, 2.5e13)] == ["1.5B", "34.2B", "999", "25T"]


@pytest.mark.parametrize(("size", "shape"), [("50M", (512, 16)), ("300M", (1024, 24)), ("1.5B", (1984, 32))])
def test_the_papers_best_shapes_come_back_within_a_step(size, shape):
    model = plan(params=size).run.model
    assert abs(math.log(model.width / model.depth / (shape[0] / shape[1]))) < math.log(1.35)
    assert flops.non_embedding(model) == pytest.approx(parse_quantity(size), rel=0.06)


def test_best_ratio_rises_with_size():
    assert best_ratio(50e6) == pytest.approx(32, rel=0.1)
    assert best_ratio(1.5e9) == pytest.approx(62, rel=0.1)
    assert best_ratio(1e10) > best_ratio(1e9)


@pytest.mark.parametrize("budget", ["1e18", "4e20", "3e22"])
def test_a_flop_budget_is_used_and_kept(budget):
    found = plan(flops=budget)
    assert 0.9 * float(budget) <= found.flops <= float(budget)
    assert 20 < found.run.model.width / found.run.model.depth < 120


def test_gpu_hours_are_flops():
    by_hours = plan(gpu_hours="100", device="h100", mfu=0.5)
    by_flops = plan(flops=str(100 * 3600 * 989e12 * 0.5))
    assert by_hours.run == by_flops.run
    assert plan(gpu_hours="100", device="989e12", mfu=0.5).run == by_hours.run


def test_limits_bind():
    assert plan(params="1.5B", max_depth=12).run.model.depth <= 12
    assert plan(params="1.5B", max_width=1024).run.model.width <= 1024
    assert plan(params="1.5B", head_size=128).run.model.width % 128 == 0


def test_the_recipe_is_the_papers():
    found = plan_shape(GPTConfig(1984, 32))
    run = found.run
    assert (run.batch, run.schedule.steps, run.sequence) == (792, 21106, 2048)
    assert run.schedule.warmup == int(375e6 / (792 * 2048))
    h = run.hyperparameters
    assert (h.lr, h.std, h.eps, h.beta1, h.beta2) == (2**-8, 0.02, 1e-16, 0.9, 0.95)
    assert 1 / (h.lr * h.weight_decay * run.schedule.steps) == pytest.approx(0.1407)
    short = plan_shape(GPTConfig(256, 2), tokens=100e6, batch=32).run
    assert short.schedule.warmup == int(0.1 * short.schedule.steps)


def test_roles_are_resolved():
    found = plan_shape(GPTConfig(1024, 16), base=Shape(256, 2))
    rows = {r.role: r for r in found.roles()}
    h = found.run.hyperparameters
    assert rows[Role.HIDDEN].lr == pytest.approx(h.lr / 4)
    assert rows[Role.HIDDEN].weight_decay == pytest.approx(h.weight_decay * 4)
    assert rows[Role.HIDDEN].eps == pytest.approx(h.eps / 4 / 8, abs=0)
    assert rows[Role.HIDDEN].init_std == pytest.approx(h.std / 2)
    assert rows[Role.BLOCK_NORM].weight_decay == 0
    assert Role.QK_NORM not in rows


@pytest.fixture
def tuned():
    return Run(GPTConfig(256, 2), Hyperparameters(0.004, 0.02, 0.1, 1e-12, 0.9, 0.95), Schedule(1000, 100), 64, 2048)


def test_replanning_keeps_the_timescale(tuned):
    found = replan(tuned, GPTConfig(1024, 24), law="paper", tpp=20, batch=None)
    h, old = found.run.hyperparameters, tuned.hyperparameters
    assert (h.lr, h.std, h.eps, h.beta1) == (old.lr, old.std, old.eps, old.beta1)
    assert h.lr * h.weight_decay * found.run.schedule.steps == pytest.approx(0.004 * 0.1 * 1000)
    assert {c.setting: c.before == c.after for c in found.changes}["base lr"]
    without = Run(tuned.model, Hyperparameters(0.004, 0.02), tuned.schedule, 64, 2048)
    assert replan(without, GPTConfig(1024, 24), law="paper", tpp=20, batch=None).run.hyperparameters.weight_decay == 0


def test_replanning_by_completed_p(tuned):
    found = replan(tuned, GPTConfig(1024, 24), law="completed", tpp=20, batch=None)
    m_S = found.run.schedule.steps / 1000
    h = found.run.hyperparameters
    assert h.lr == pytest.approx(0.004 * m_S**-0.5)
    assert h.weight_decay == pytest.approx(0.1 * m_S**-0.5)
    assert h.eps == pytest.approx(1e-12 * m_S**0.5, abs=0)
    assert 1 - h.beta1 == pytest.approx(0.1 / m_S)
    assert 1 - h.beta2 == pytest.approx(0.05 / m_S)
    assert "2512.22382" in found.laws["weight decay"]
    other = replan(tuned, GPTConfig(1024, 24), law="completed", exponent=0.28, tpp=20, batch=None)
    assert other.run.hyperparameters.lr == pytest.approx(0.004 * m_S**-0.28)


def timescale(run):
    return 1 / (run.hyperparameters.lr * run.hyperparameters.weight_decay * run.schedule.steps)


GIVEN = [
    ({"lr": 0.002}, lambda run: run.hyperparameters.lr, 0.002),
    ({"std": 0.05}, lambda run: run.hyperparameters.std, 0.05),
    ({"rules": "mup"}, lambda run: run.rules, "mup"),
    ({"vocabulary": 32000}, lambda run: run.model.vocabulary, 32000),
    ({"sequence": 1024}, lambda run: run.sequence, 1024),
    ({"head_size": 128}, lambda run: run.model.head_size, 128),
    ({"batch": 48}, lambda run: run.batch, 48),
    ({"tokens": "2B"}, lambda run: round(run.tokens / 2e9, 2), 1.0),
    ({"tau": 0.2}, lambda run: round(timescale(run), 6), 0.2),
]


@pytest.mark.parametrize(("options", "read", "value"), GIVEN, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_what_is_given_wins_over_the_tuned_run(tuned, options, read, value, tmp_path, capsys):
    assert read(plan(width=1024, depth=24, tuned=tuned).run) != value  # the negative control
    run = plan(width=1024, depth=24, tuned=tuned, **options).run
    assert read(run) == value
    path, target = tmp_path / "tuned.json", tmp_path / "run.json"
    path.write_text(to_json(tuned))
    flags = [word for name, x in options.items() for word in (f"--{name.replace('_', '-')}", str(x))]
    assert main(["plan", "--width", "1024", "--depth", "24", "--from", str(path), *flags, "--run", str(target)]) == 0
    assert run_from_json(target.read_text()) == run
    assert "given" in capsys.readouterr().out


def test_a_learning_rate_that_is_given_keeps_the_tuned_timescale(tuned):
    h = plan(width=1024, depth=24, tuned=tuned, lr=0.002)
    steps = h.run.schedule.steps
    assert h.run.hyperparameters.lr * h.run.hyperparameters.weight_decay * steps == pytest.approx(0.004 * 0.1 * 1000)
    assert {c.setting: c.why for c in h.changes}["base lr"] == "given"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"law": "completed", "lr": 0.002}, "lr=0.002 contradicts law='completed'"),
        ({"law": "completed", "tau": 0.2}, "tau=0.2 contradicts law='completed', which sets the weight decay"),
        ({"base": (128, 2)}, "the base 128 × 2 is not the tuned run's, 256 × 2"),
        ({"horizon_exponent": 0.3}, "horizon_exponent=0.3 has no effect"),
    ],
)
def test_what_contradicts_the_tuned_run_is_refused(tuned, options, message):
    with pytest.raises(UserError, match=message):
        plan(width=1024, depth=24, tuned=tuned, **options)


def test_the_tuned_runs_own_base_is_no_contradiction(tuned):
    assert plan(width=1024, depth=24, tuned=tuned, base=(256, 2)).run == plan(width=1024, depth=24, tuned=tuned).run
    with pytest.raises(UserError, match="none is given"):
        plan(width=1024, depth=24, law="completed")


def test_only_what_was_tuned_is_called_tuned(tuned):
    """Where every setting comes from: the paper, the caller, or the tuned run."""
    untouched = plan(params="300M")
    assert "tuned at the base" not in str(untouched)
    settings = ("learning rate", "init std", "epsilon", "betas")
    assert {untouched.laws[s] for s in settings} == {"the paper's default, not tuned on your model"}
    given = plan(params="300M", lr=0.01, tau=0.2)
    assert given.laws["learning rate"] == "given"
    assert given.laws["weight decay"].endswith("given")
    assert "not tuned" in given.laws["init std"]
    carried = plan(params="300M", tuned=tuned)
    assert {carried.laws[s] for s in settings} == {"transfers from the tuned run (CompleteP)"}
    assert "the tuned run's" in carried.laws["weight decay"]


@pytest.mark.parametrize("sequence", [128, 512, 1024, 4096, 8192])
def test_the_batch_law_counts_tokens(sequence):
    """The law is for sequences of 2048: other lengths get as many tokens per step, to the nearest 8 sequences."""
    found = plan(params="300M", tokens="10B", sequence=sequence)
    law = max(32, 0.7857 * found.flops**0.1527 - 306.8)  # sequences of 2048, as the paper prints it
    assert abs(found.run.batch * sequence - law * 2048) <= 4 * sequence
    assert found.run.batch % 8 == 0
    assert f"the same tokens in sequences of {sequence}" in found.laws["batch"]
    assert "the same tokens" not in plan(params="300M").laws["batch"]


def test_few_sequences_are_not_rounded_up_to_eight():
    assert batch_size(1e10, 2048) == 32
    assert batch_size(1e10, 65536) == 1
    assert batch_size(1e10, 16384) == 4
    assert batch_size(1e10, 10**6) == 1


def test_the_same_run_changes_nothing(tuned):
    laws = {"tokens": "", "batch": "", "per role": "", "weight decay": ""}
    assert all(c.before == c.after for c in changes(tuned, tuned, laws))
    assert Horizon().lr(1.0) == Horizon().eps(1.0) == 1
    assert Horizon.beta(0.9, 1.0) == pytest.approx(0.9)


def test_runs_survive_json(tuned):
    assert run_from_json(to_json(tuned)) == tuned


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d.pop("batch"), "batch"),
        (lambda d: d.update(batch="64"), "'64' is not of type int"),
        (lambda d: d["model"].update(width=True), "True is not of type int"),
        (lambda d: d["model"].update(width=100), "not a multiple of the head size"),
        (lambda d: d["hyperparameters"].update(lr=-1), "lr=-1"),
        (lambda d: d["schedule"].update(warmup=2000), "warmup=2000 with steps=1000: the warm-up must lie"),
        (lambda d: d.update(style="fold"), "style"),
    ],
)
def test_bad_runs_are_errors(tuned, change, message):
    data = json.loads(to_json(tuned))
    change(data)
    with pytest.raises(UserError, match=message):
        run_from_json(json.dumps(data))


def test_no_json_at_all():
    with pytest.raises(UserError, match="not JSON"):
        run_from_json("{")


BAD = [
    ([], "no size is given"),
    (["--params", "1.5B", "--flops", "1e20"], "given by params and flops"),
    (["--width", "1024"], "a shape has both"),
    (["--params", "1.5X"], "'1.5X' is not a quantity"),
    (["--params", "-3B"], "must be above 0"),
    (["--flops", "1e10"], "no shape has 1e10 FLOPs"),
    (["--params", "1.5B", "--max-depth", "1", "--max-width", "1024"], "no shape has 1.5B parameters"),
    (["--params", "10"], "no shape has 10 parameters"),
    (["--params", "1B", "--max-width", "10"], "less than 4 heads of 64"),
    (["--params", "1B", "--max-depth", "-1"], "max_depth=-1"),
    (["--gpu-hours", "10", "--device", "abacus"], "device='abacus'"),
    (["--gpu-hours", "10", "--mfu", "1.5"], "mfu=1.5"),
    (["--width", "100", "--depth", "2"], "not a multiple of the head size"),
    (["--width", "64", "--depth", "2", "--tokens", "10"], "less than one step"),
    (["--params", "1B", "--tpp", "0"], "tpp=0"),
    (["--params", "1B", "--rules", "magic"], "no rules named 'magic'"),
    (["--params", "1B", "--from", "nowhere.json"], "cannot read nowhere.json"),
    (["--params", "1B", "--base-shape", "0", "2"], "at least 1"),
    (["--params", "1B", "--ranks", "0"], "ranks=0"),
    (["--params", "1B", "--micro-batch", "-1"], "micro_batch=-1"),
    (["--params", "1B", "--micro-batch", "9" * 320], "must be at most 1,000,000,000"),
    (["--params", "1B", "--ranks", "9" * 320], "must be at most 1,000,000,000"),
    (["--width", "64", "--depth", "99999999"], "implausible"),
    (["--width", "64", "--depth", "2", "--tokens", "1e30"], "is implausible"),
    (["--width", "64", "--depth", "2", "--lr", "1e-305"], "with lr=1e-305 over "),
    (["--width", "64", "--depth", "2", "--tau", "1e-305"], "tau=1e-305 with lr="),
    (["--flops", "1e36"], "no shape has 1e36 FLOPs"),
    (["--flops", "4e20", "--max-depth", "1", "--max-width", "256"], "no shape has 4e20 FLOPs"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_impossible_requests_are_errors(words, message, capsys):
    assert main(["plan", *words]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert message in printed
    assert "fix:" in printed


@pytest.mark.parametrize(("lr", "decay", "code"), [(1e-9, 1e308, 2), (1e-200, 1e-200, 0), (0.01, 0.1, 0)])
def test_a_tuned_run_with_an_absurd_decay(lr, decay, code, tmp_path, capsys):
    """τ = 1 / (η λ steps) is too small there to divide by, or has no bound."""
    run = plan(width=64, depth=2).run
    hyper = replace(run.hyperparameters, lr=lr, weight_decay=decay)
    (tmp_path / "run.json").write_text(to_json(replace(run, hyperparameters=hyper)))
    assert main(["plan", "--width", "64", "--depth", "4", "--from", str(tmp_path / "run.json"), "--json"]) == code
    assert ("no weight decay is that strong" in capsys.readouterr().err) == bool(code)


def test_on_the_command_line(tmp_path, capsys):
    target = tmp_path / "run.json"
    assert main(["plan", "--params", "300M", "--run", str(target), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert run_from_json(target.read_text()).model.width == data["run"]["model"]["width"]
    assert data["parameters"]["total"] * 20 == pytest.approx(data["tokens"], rel=0.01)
    assert main(["plan", "--from", str(target), "--params", "1.5B", "--law", "completed"]) == 0
    out = capsys.readouterr().out
    assert "What transfers, what changes" in out
    assert "Complete(d)P" in out
    assert main(["plan", "--params", "1.5B", "--ranks", "8"]) == 0
    out = capsys.readouterr().out
    for law in ("Hoffmann", "0.7857", "Wang", "CompleteP"):
        assert law in out


def test_no_number_on_screen_has_more_than_four_digits_or_an_e(tuned):
    planned = plan(width=512, depth=16)
    shown = f"{planned}\n{plan(width=512, depth=16, tuned=tuned)}"
    assert re.findall(r"\d\.?\d*e[+-]\d+|0\.0*[1-9]\d{4,}", shown) == []
    assert "2⁻⁸" in shown
    assert "10⁻¹⁶" in shown
    assert planned.to_json()["run"]["hyperparameters"]["lr"] == 2**-8


def test_mup_and_its_deepest_shape():
    found = plan_shape(GPTConfig(832, 179), rules=MUP)
    assert any("more than 1 %" in note for note in found.notes)
    assert not any("more than 1 %" in note for note in plan_shape(GPTConfig(1984, 32)).notes)


@pytest.mark.slow
def test_planning_needs_no_torch():
    code = (
        "import sys; from completep.cli import main; main(['plan', '--params', '1.5B']); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip().endswith("False")


def test_paper_numbers_are_where_they_belong():
    assert paper.batch_law(1e10) == 32
    assert Shape(256, 2) == paper.BASE


def test_from_python():
    found = plan(params=300e6, rules="mup", base=(256, 2), ranks=8)
    assert found.run == plan(params="300M", rules=MUP, base=Shape(256, 2)).run
    assert found.memory.state == pytest.approx(plan(params="300M").memory.state / 8)
    assert found.to_json()["run"]["rules"] == "mup"
    assert "hidden weight" in str(found)
    assert "<table" in found._repr_html_()
    with pytest.raises(UserError, match="no size is given"):
        plan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": "1B", "law": "nope"}, "law='nope'"),
        ({"params": "1B", "base": (1, 2, 3)}, "is not \\(width, depth\\)"),
        ({"width": "64", "depth": 2}, "width='64'"),
        ({"gpu_hours": 10, "tokens": "1B"}, "tokens=1B with a budget"),
        ({"params": "1B", "tau": float("inf")}, "above 0 and finite"),
    ],
)
def test_mistakes_in_python(options, message):
    with pytest.raises(UserError, match=message):
        plan(**options)


def test_numbers_and_paths_are_taken_as_they_come(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(to_json(plan(params=50e6).run))
    assert plan(params="300M", tuned=str(path)).run == plan(params="300M", tuned=path).run
    assert plan(gpu_hours=100, device=989e12).run == plan(gpu_hours="100", device="h100").run


def test_a_role_starts_random_by_its_trait_not_by_its_decay():
    for row in plan_shape(GPTConfig(512, 4)).roles():
        assert (row.init_std is not None) == (row.role.trait.start == "random")
        assert (row.weight_decay > 0) == row.role.trait.decayed


def built_settings(model, base, h):
    """By role: (init std, lr, weight decay, ε) of the decoder itself, as `parametrize` resolves them."""
    scaling = parametrize(GPT(model), base=lambda: GPT(base)).init_(h.std)
    groups = scaling.param_groups(h.lr, weight_decay=h.weight_decay, eps=h.eps)
    stds = {name: h.std * scaling.settings(name).init_std for name in scaling.parameters}
    rows = {}
    for group in groups:
        for name in group["names"]:
            role = scaling.parameters[name].role
            std = stds[name] if role.trait.start == "random" else None
            rows.setdefault(role, set()).add((std, group["lr"], group["weight_decay"], group["eps"]))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"bias": False, "norm": "rmsnorm"},
        {"qk_norm": True},
        {"tied": True, "positions": "learned", "context": 64},
        {"experts": 4, "active_experts": 2, "activation": "swiglu"},
        {"experts": 4, "shared_experts": 1, "bias": False, "qk_norm": True, "tied": True},
    ],
    ids=str,
)
def test_a_plan_has_the_roles_and_settings_that_the_decoder_has(parts):
    """The plan reads them from the table without building a model; `parametrize` finds them in the built one."""
    model, base = (GPTConfig(width, depth, 61, 16, **parts) for width, depth in ((128, 4), (64, 2)))
    planned = plan_shape(model, base=Shape(64, 2), tokens=1e6, batch=8, sequence=64)
    rows = {r.role: (r.init_std, r.lr, r.weight_decay, r.eps) for r in planned.roles()}
    built = built_settings(model, base, planned.run.hyperparameters)
    assert rows.keys() == built.keys()
    for role, settings in built.items():
        assert len(settings) == 1, role
        assert settings.pop() == pytest.approx(rows[role], abs=0), role


def test_a_role_without_its_trait_would_be_missing_from_a_plan(monkeypatch):
    planned = plan_shape(GPTConfig(128, 4, 61, 16), base=Shape(64, 2), tokens=1e6, batch=8, sequence=64)
    without = replace(Role.HIDDEN.trait, in_decoder="never")
    monkeypatch.setattr(table, "TRAITS", {**table.TRAITS, Role.HIDDEN: without})
    assert Role.HIDDEN not in {r.role for r in planned.roles()}


def test_the_costs_are_numbers_that_add_up():
    planned = plan_shape(GPTConfig(512, 4))
    costs = next(p for p in planned.document().parts if isinstance(p, Table) and p.title == "FLOPs per token")
    assert [costs.numeric(i) for i in range(4)] == [False, True, True, True]
    total = sum(row[1] + row[2] for row in costs.rows)
    assert total * planned.run.tokens == pytest.approx(planned.flops, rel=1e-3)  # a run has whole steps
    assert [row[3] for row in costs.rows] == pytest.approx([100 * (row[1] + row[2]) / total for row in costs.rows])


def test_a_plan_counts_experts():
    """Tokens follow the parameters that one token passes, and the router has a row of its own."""
    dense = plan(width=512, depth=4)
    sparse = plan(width=512, depth=4, experts=8, active_experts=2, expert_width=1024)
    assert sparse.m_N == 2
    model = sparse.run.model
    assert (model.experts, model.active_experts, model.expert_width, model.shared_experts) == (8, 2, 1024, 0)
    assert sparse.run.tokens == pytest.approx(20 * flops.active(model), rel=0.05)
    assert flops.active(model) == pytest.approx(flops.total(dense.run.model), rel=0.01)  # as many pass the experts
    assert flops.total(model) > 1.1 * flops.active(model)
    roles = {str(r.role): r for r in sparse.roles()}
    assert roles["router"].eps == pytest.approx(roles["expert weight"].eps * sparse.m_N, abs=0)
    assert not {"router", "expert weight"} & {str(r.role) for r in dense.roles()}
    again = plan(width=1024, depth=8, tuned=sparse.run)
    assert again.run.model.experts == 8
    with pytest.raises(UserError, match="there are 0 experts"):
        plan(width=256, depth=4, active_experts=2)


@pytest.mark.parametrize("value", [1e-200, 1e200, float("nan"), float("inf"), 10**400])
def test_a_tuned_value_that_no_run_can_have_is_refused(value, tmp_path):
    """Products of such values leave the range of a float, so that the timescale of weight decay is no number."""
    found = TunedValues(
        {"lr": TunedValue(0.01), "weight_decay": TunedValue(value)}, Shape(64, 2), "completep", "PASS", "", [], "x",
        constants={"steps": 10},
    )  # fmt: skip
    path = write_tuned(tmp_path / "tuned.json", found)
    with pytest.raises(UserError, match=r"weight_decay is .*, not a number that a run can have"):
        plan(width=1024, depth=24, tuned=path)
