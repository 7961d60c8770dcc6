"""The check: right models pass, every planted fault is named with its tensor, setting and exponents."""

import json
import math
from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np
import polars as pl
import pytest
import torch

import completep as cp
from benchmarks.architectures import ARCHITECTURES
from completep import COMPLETEP, Role, parametrize
from completep.cli import main
from completep.config import Shape
from completep.errors import UserError
from completep.measure import check as check_module
from completep.measure import subject as subject_module
from completep.measure.diagnosis import BAND, WIDE, Finding, culprits, judge_survey, noisy, overall
from completep.measure.subject import Setting, Source, Subjects, python_bytes, random_batch, reference
from completep.measure.survey import MOST_RHO, find_limit, survey
from completep.measure.tensors import branch_share, measure_start, measure_tensors
from completep.report.document import Table
from completep.rules import multipliers
from completep.rules.table import MUP, SP, Column, alpha, literature
from completep.stats import Slope
from tests.measure import pairs
from tests.measure.controls import one_block_unscaled, planted, unscaled
from tests.rules import zoo

BASE = (32, 2)
SETTING = Setting(batch=8, time=8, weight_decay=0.1)
SHAPES = {"widths": (32, 64, 128), "depths": (2, 4, 8), "base": BASE, "workers": 1}


def quick_check(factory=pairs.model, axis="both", **options):
    sizes = {k: v for k, v in SHAPES.items() if axis == "both" or k in ("base", "workers") or k.startswith(axis)}
    return cp.check(factory, **{**sizes, **options})


def subject_at(width, depth, rules=COMPLETEP, factory=pairs.model, setting=SETTING):
    source = Source(factory, Shape(*BASE))
    base = source.base_model()
    batch = random_batch(source, base, setting, 0)
    return Subjects(source, base, Shape(width, depth), rules, setting, None).start(0), batch


def faulty(*fault):
    return partial(planted, pairs.model, BASE, fault)


# -- what is measured ------------------------------------------------------------------------------


@pytest.mark.slow
def test_pull_epsilon_ratio_and_gain_are_what_their_definitions_say():
    """Against autograd by hand, in the decoder: matrices by the plain gradient, vectors by unsigned terms."""
    subject, batch = subject_at(64, 4)
    _, gains = measure_start(subject, batch)
    rows = {row.template: row for row in measure_tensors(subject, batch, gains)[0]}
    twin, _ = subject_at(64, 4)
    twin.loss(batch).backward()
    tensors, settings = dict(twin.model.named_parameters()), twin.settings
    down = [n for n in tensors if n.endswith("mlp.down.weight")]
    pull = sum(settings[n].lr * tensors[n].grad.abs().sum().item() for n in down)
    assert rows["blocks.*.mlp.down.weight"].pull == pytest.approx(pull, rel=1e-4)
    square = np.mean([tensors[n].grad.double().square().mean().item() for n in down])
    assert rows["blocks.*.mlp.down.weight"].eps_ratio == pytest.approx(settings[down[0]].eps / square**0.5, rel=1e-4)
    own = settings[down[0]]
    assert rows["blocks.*.mlp.down.weight"].decay == pytest.approx(own.lr * own.weight_decay)
    spread = [0.06 * tensors[n].shape[1] ** 0.5 * (32 / 64) ** 0.5 / 2 for n in down]  # σ √fan-in m_N^-1/2 / m_L
    assert rows["blocks.*.mlp.down.weight"].gain == pytest.approx(spread[0], rel=0.05)


def test_unsigned_terms_are_those_of_the_gradient():
    """Σ over tokens of the terms is the gradient; Σ of their absolute values is what the row holds."""
    subject, batch = subject_at(32, 2)
    rows = {row.template: row for row in measure_tensors(subject, batch, {})[0]}
    twin, _ = subject_at(32, 2)
    outputs = []
    norm = twin.model.final_norm
    norm.register_forward_hook(lambda m, args, out: out.retain_grad() or outputs.append(out))
    twin.loss(batch).backward()
    [out] = outputs
    terms = (out.grad * (out - norm.bias) / norm.weight).flatten(0, 1)
    torch.testing.assert_close(terms.sum(0), norm.weight.grad, rtol=1e-3, atol=1e-7)
    lr = twin.settings["final_norm.weight"].lr
    assert rows["final_norm.weight"].pull == pytest.approx(lr * terms.abs().sum().item(), rel=1e-3)
    assert terms.abs().sum() > 1.5 * terms.sum(0).abs().sum()  # otherwise the test would show nothing


def test_the_weights_are_the_starting_ones_afterwards():
    subject, batch = subject_at(32, 2)
    before = {n: p.detach().clone() for n, p in subject.model.named_parameters()}
    measure_tensors(subject, batch, {})
    branch_share(subject, batch)
    assert all(torch.equal(p, before[n]) for n, p in subject.model.named_parameters())


@pytest.mark.slow
def test_the_limit_is_measured_and_reached():
    """ρ against the decoder's own streams; the scaled copy has ρ ≤ MOST_RHO; ρ² goes with L* as the text says."""
    subject, batch = subject_at(32, 2)
    embedded = subject.model.embedding(batch[0]).detach()
    with torch.no_grad():
        added = subject.model.stream(batch[0]) - embedded
    rho = (added.square().sum(-1) / embedded.square().sum(-1)).mean().sqrt()
    assert branch_share(subject, batch) == pytest.approx(rho.item(), rel=1e-4)
    limit = find_limit(Source(pairs.model, Shape(*BASE)), COMPLETEP, Setting(batch=8, time=8), near_limit=True)
    assert limit.rho == pytest.approx(rho.item(), rel=1e-4)
    assert limit.depth == pytest.approx(2 * limit.rho**2)
    assert limit.scale < 1
    as_it_is = find_limit(Source(pairs.model, Shape(*BASE)), COMPLETEP, Setting(batch=8, time=8), near_limit=False)
    assert as_it_is.scale == 1
    far = find_limit(Source(pairs.model, Shape(*BASE)), COMPLETEP, Setting(0.3, batch=8, time=8), near_limit=True)
    assert far.rho > 8
    assert not far.fit
    assert "Use a smaller init std" in str(far)
    assert MOST_RHO == 0.05


def text_batches(step):
    """Python's source as bytes: a few of them are most of it."""
    tokens = python_bytes(16 * 17, 16 * 17 * (step + 128_000)).view(16, 17)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.slow
def test_text_needs_small_branches(monkeypatch):
    """Attention adds almost the same vector to all tokens, and text has gradients that go the same way for all tokens.

    So what branches add changes gradients to first order in ρ: with ρ = 0.25 a right BLOOM failed in depth.
    """

    def deviations():
        bloom, sizes = ARCHITECTURES["BLOOM"], {"depths": (2, 4, 8, 16), "base": (96, 2), "workers": 1}
        checked = cp.check(bloom, **sizes, batches=text_batches, std=0.06)
        unsure = [str(f) for f in checked.findings if f.word != "PASS"]
        return unsure, max(abs(f.deviation) for f in checked.findings if f.setting == "learning rate")

    unsure, near = deviations()
    assert unsure == []
    monkeypatch.setattr("completep.measure.survey.MOST_RHO", 0.25)
    _, far = deviations()
    assert far > 2 * near


@pytest.mark.slow
def test_without_the_limit_slopes_are_bent():
    """The reason for the scaled copy: as it is, the decoder's hidden gradients do not fall as m_L^-1."""
    near, as_it_is = (quick_check(axis="depth", near_limit=near, seeds=2) for near in (True, False))
    assert near.verdict == "PASS"
    bent = [f for f in as_it_is.findings if f.setting == "epsilon" and f.role == Role.HIDDEN]
    assert max(abs(f.deviation) for f in bent) > BAND


# -- right and wrong -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "rules"),
    [
        ("adamw", "completep"),
        ("adamw", "alpha=0.75"),
        ("sgd", "completep"),
        ("sgd", "alpha=0.5"),
        ("muon", "completep"),
    ],
)
def test_right_rules_pass(rules, optimizer):
    check = quick_check(rules=rules, optimizer=optimizer, widths=(64, 128, 256), base=(64, 2))
    assert check.verdict == "PASS", check
    assert not check.culprits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "sentences"),
    [
        (SP, ["unembedding.weight: multiplier is constant, should be m_N^-1", "blocks.*.mlp.up.weight: init"]),
        (MUP, ["blocks.*.mlp.down.weight: multiplier", "blocks.*.attention.out.weight: multiplier"]),
        (literature(0.5), ["blocks.*.mlp.up.bias: learning rate"]),
    ],
    ids=lambda value: getattr(value, "key", ""),
)
def test_wrong_rules_fail_and_the_tensor_is_named(rules, sentences):
    check = quick_check(rules=rules)
    assert check.verdict == "FAIL"
    named = [str(f) for f in check.culprits]
    for sentence in sentences:
        assert any(n.startswith(sentence) for n in named), named


@pytest.mark.slow
def test_the_message_has_both_exponents():
    rules = unscaled(COMPLETEP, "lr", [Role.HIDDEN])
    [first, *_] = quick_check(rules=rules, axis="width").culprits
    assert first.setting == "learning rate"
    assert str(first).endswith("should be m_N^-1")
    assert abs(first.exponent.value) < BAND
    assert first.expected == pytest.approx(-1)


FAULTS = [
    (tensor, setting, axis, exponent)
    for tensor, settings in {
        "blocks.*.attention.qkv.weight": ("learning rate", "epsilon", "weight decay", "init"),
        "blocks.*.mlp.down.weight": ("learning rate", "init", "multiplier"),
        "blocks.*.mlp_norm.weight": ("learning rate", "epsilon", "init"),
        "blocks.*.mlp.up.bias": ("learning rate", "epsilon"),
        "embedding.weight": ("learning rate", "epsilon", "init"),
        "final_norm.weight": ("learning rate", "epsilon"),
        "unembedding.weight": ("learning rate", "weight decay", "init", "multiplier"),
    }.items()
    for i, setting in enumerate(settings)
    for axis, exponent in ((("width", -0.5), ("depth", 0.25))[(i + len(settings)) % 2],)
]  # every cell in both directions and with every exponent: benchmarks/check_power.py


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: " ".join(map(str, fault)))
def test_a_planted_fault_is_named_with_its_tensor_and_setting(fault):
    tensor, setting, axis, exponent = fault
    check = quick_check(faulty(*fault), axis=axis)
    assert check.verdict == "FAIL"
    assert {(f.tensor, f.setting, f.axis) for f in check.culprits} == {(tensor, setting, axis)}
    assert check.culprits[0].deviation == pytest.approx(exponent, abs=0.06)


@pytest.mark.slow
def test_a_planted_fault_is_the_right_survey_with_one_column_multiplied():
    """What benchmarks/check_power.py relies on."""
    fault = ("blocks.*.mlp.up.weight", "learning rate", "width", 0.5)
    shapes = [Shape(width, 2) for width in (32, 64, 128)]
    planted, right = (
        survey(Source(faulty(*f), Shape(*BASE)), [COMPLETEP], shapes, SETTING, seeds=(0,), workers=1).tensors
        for f in (fault, ("", "", "width", 0.0))
    )
    where = right["template"] == fault[0]
    ratio = (planted["pull"] / right["pull"]).to_numpy()
    expected = np.where(where, (right["width"].to_numpy() / 32) ** 0.5, 1.0)
    np.testing.assert_allclose(ratio, expected, rtol=1e-5)


@pytest.mark.slow
def test_one_block_that_differs_is_named():
    check = quick_check(one_block_unscaled, axis="depth")
    assert check.verdict == "FAIL"
    assert any(f.setting == "one block" and "mlp.down" in f.tensor for f in check.culprits)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay", "init"])
@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_one_block_that_differs_in_any_setting_is_named(key, factor):
    """By more the deeper the model. A setting of a tensor of one block, larger or smaller."""

    def odd(width, depth):
        model = pairs.model(width, depth)
        scaling = parametrize(model, base=lambda: pairs.model(*BASE)).init_(0.06, seed=torch.initial_seed())
        groups = []
        for name, p in model.named_parameters():
            f = scaling.settings(name)
            group = {"params": [p], "lr": 2e-3 * f.lr, "weight_decay": 0.1 * f.weight_decay, "eps": 1e-12 * f.eps}
            groups.append(group)
            if name == f"blocks.{depth - 1}.mlp.up.weight":
                change = factor ** math.log2(depth / 2)
                if key == "init":
                    p.data *= change
                else:
                    group[key] *= change
        return model, torch.optim.AdamW(groups, betas=(0.9, 0.95))

    check = quick_check(odd, axis="depth", seeds=1)
    assert check.verdict == "FAIL"
    assert any(f.setting == "one block" and f.tensor == "blocks.*.mlp.up.weight" for f in check.culprits)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_multiplier_inside_the_readouts_own_forward_counts(tied):
    sizes = {"widths": (64, 128, 256), "depths": (), "base": (64, 2)}  # at 32, a tied model is far from wide
    assert quick_check(partial(pairs.divided, tied=tied, base=64), **sizes).verdict == "PASS"
    wrong = quick_check(partial(pairs.divided, tied=tied, base=64, power=0.5), **sizes)
    readout = "unembedding.weight (tied)" if tied else "unembedding.weight"
    assert [(f.tensor, f.setting) for f in wrong.culprits] == [(readout, "multiplier")]
    assert wrong.culprits[0].expected == pytest.approx(-1)
    assert wrong.culprits[0].exponent.value == pytest.approx(-0.5, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("flushed", [False, True])
def test_large_logits_at_init_are_no_fault(flushed, request):
    """Their softmax is uneven, and less so in wider models: the copy that is measured has small ones.

    Training flushes tiny numbers to zero. A check after it, in the same process, must not see that.
    """
    request.addfinalizer(lambda: torch.set_flush_denormal(False))
    torch.set_flush_denormal(flushed)
    options = {"std": 0.5, "widths": (64, 128, 256), "depths": (), "base": (64, 2)}
    near = quick_check(**options)
    assert near.verdict == "PASS", [str(f) for f in near.findings if f.word != "PASS"]
    assert quick_check(**options, near_limit=False).verdict != "PASS"
    assert (float(torch.tensor(1e-40) * 1.0) == 0.0) == flushed  # as it was


@pytest.mark.slow
def test_a_tiny_learning_rate_is_measured_exactly():
    assert quick_check(lr=1e-12).verdict == "PASS"


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0.15, -0.15, 0.08])
def test_a_learning_rate_that_is_a_little_wrong_is_not_called_a_wrong_weight_decay(exponent):
    """The decay per step, η·λ, is typed and shows it exactly. λ alone is blamed where η is right."""
    tensor = "blocks.*.mlp.up.weight"
    for setting in ("learning rate", "weight decay"):
        wrong = quick_check(faulty(tensor, setting, "width", exponent), axis="width")
        assert {(f.tensor, f.setting) for f in wrong.culprits} == {(tensor, setting)}


@pytest.mark.slow
def test_a_growing_head_needs_its_scale():
    def growing(width, depth):
        model = zoo.huggingface("Llama", **{**zoo.LLAMA_LIKE, "head_dim": width // 2,
                                "num_attention_heads": 2, "num_key_value_heads": 2})  # fmt: skip
        return model(width, depth)

    def unscaled_attention(width, depth):
        model = growing(width, depth)
        scaling = parametrize(model, base=lambda: growing(*BASE)).init_(0.06, seed=torch.initial_seed())
        multipliers.remove(model)
        multipliers.install(model, tuple(m for m in scaling.multipliers if m.kind != "attention"))
        return model, torch.optim.AdamW(scaling.param_groups(2e-3, eps=1e-12, weight_decay=0.1))

    assert quick_check(growing, axis="width").verdict == "PASS"
    wrong = quick_check(unscaled_attention, axis="width")
    assert wrong.verdict == "FAIL"
    assert [str(f) for f in wrong.culprits] == [
        "model.layers.*.self_attn: attention scale falls as m_N^-0.50, should be m_N^-1"
    ]


FIXED = {**zoo.LLAMA_LIKE, "num_key_value_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_keys_and_values_in_a_fixed_number_of_heads_pass(kind):
    """Their gradient is a sum over the query heads: at init a random one, so its exponent is smaller by a half."""
    check = quick_check(zoo.huggingface(kind, **FIXED), axis="width", widths=(64, 128, 256), base=(64, 2))
    assert check.verdict == "PASS", check
    lags = dict(check.survey.tensors.filter(pl.col("width") == 256).select("template", "lag").iter_rows())
    first = dict(check.survey.tensors.filter(pl.col("width") == 64).select("template", "lag").iter_rows())
    lagging = {t.rpartition("self_attn.")[2] for t, lag in lags.items() if lag / first[t] > 2}
    assert lagging == {"k_proj.weight", "v_proj.weight"} | ({"k_norm.weight"} if kind == "Qwen3" else set())


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [-0.5, -0.25, 0.25, 0.5])
@pytest.mark.parametrize(
    ("tensor", "setting"), [("k_proj", "learning rate"), ("v_proj", "epsilon"), ("k_norm", "learning rate")]
)
def test_a_fault_of_keys_in_a_fixed_number_of_heads_is_named(tensor, setting, exponent):
    """Also one that makes up for the random sum, so that the plain exponent at init is as for other matrices."""
    name = f"model.layers.*.self_attn.{tensor}.weight"
    fault = (name, setting, "width", exponent)
    wrong = partial(planted, zoo.huggingface("Qwen3", **FIXED), (64, 2), fault)
    check = quick_check(wrong, axis="width", widths=(64, 128, 256), base=(64, 2))
    assert check.verdict == "FAIL"
    assert {(f.tensor, f.setting) for f in check.culprits} == {(name, setting)}
    assert check.culprits[0].deviation == pytest.approx(exponent, abs=0.1)


@pytest.mark.slow
def test_outputs_of_which_only_a_part_grows_have_no_right_epsilon():
    """Mamba's x_proj makes time steps, which grow, and states, which do not. Its learning rate is judged by part."""
    check = quick_check(zoo.ZOO["mamba"], axis="width", widths=(64, 128, 256), base=(64, 2))
    settings = {f.setting for f in check.findings if "x_proj" in f.tensor}
    assert "learning rate" in settings
    assert "epsilon" not in settings
    assert [line for line in check.unchecked if "x_proj" in line] == [
        "epsilon of backbone.layers.*.mixer.x_proj.weight in width, since only a part of the outputs grows"
    ]


def without(change):
    """The right implementation, with what `change` does to the groups of the qkv matrices."""

    def factory(width, depth):
        model, optimizer = faulty("", "", "width", 0.0)(width, depth)
        names = {id(p): name for name, p in model.named_parameters()}
        for group in optimizer.param_groups:
            if "qkv.weight" in names[id(group["params"][0])]:
                change(group)
        return model, optimizer

    return factory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda g: g.update(weight_decay=0.0), "weight decay of blocks.*.attention.qkv.weight, which is 0"),
        (lambda g: g.update(eps=0.0), "epsilon of blocks.*.attention.qkv.weight, which is 0 or does not exist"),
        (lambda g: g["params"][0].requires_grad_(False), "blocks.*.attention.qkv.weight, which no optimizer trains"),
    ],
    ids=["decay", "eps", "frozen"],
)
def test_what_cannot_be_seen_is_said_of_the_very_tensor(change, line):
    options = {"axis": "width", "widths": (32, 48, 64), "seeds": 2}
    assert line in quick_check(without(change), **options).unchecked
    assert not any("qkv" in said for said in quick_check(without(lambda group: None), **options).unchecked)


def zero_readout(width, depth, fault=("", "", "width", 0.0)):
    """The decoder with a readout that starts at zero, so that nothing else has a gradient at first."""
    model, optimizer = faulty(*fault)(width, depth)
    torch.nn.init.zeros_(model.unembedding.weight)
    return model, optimizer


@pytest.mark.slow
def test_what_starts_at_zero_moves_first_and_alone_is_blamed():
    wrong = quick_check(partial(zero_readout, fault=("unembedding.weight", "learning rate", "width", -0.5)))
    assert {(f.tensor, f.setting) for f in wrong.culprits} == {("unembedding.weight", "learning rate")}
    check = quick_check(zero_readout)
    assert check.verdict == "PASS", check
    assert any("starts at zero" in text and "unembedding.weight" in text for text in check.unchecked)
    assert {f.tensor for f in check.findings if f.setting == "learning rate"} >= {"embedding.weight"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "olmo2", "timm-vit", "bloom", "oddity", "outer-sum"])
def test_real_models_pass_and_mup_in_depth_fails(name):
    """Grouped keys, QK norms, norms after branches, images, tied embeddings after a norm, bare tensors."""
    options = {"roles": zoo.roles_for(name), "widths": (64, 128, 256), "base": (64, 2)}
    right = quick_check(zoo.ZOO[name], **options)
    assert right.verdict == "PASS", right
    wrong = quick_check(zoo.ZOO[name], **{**options, "widths": ()}, rules="mup")
    assert wrong.verdict == "FAIL"
    assert {f.setting for f in wrong.culprits} == {"multiplier", "epsilon"}  # muP has no depth factor in either


# -- what cannot be decided ------------------------------------------------------------------------


@pytest.mark.slow
def test_what_cannot_be_seen_is_said():
    check = quick_check(axis="depth", weight_decay=0.0, seeds=1)
    assert "weight decay, which is 0" in check.unchecked
    assert "width, which was not varied" in check.unchecked
    assert "Not checked: width, which was not varied; weight decay, which is 0." in str(check)
    assert any(text.startswith("epsilon, which is 0") for text in quick_check(axis="depth", eps=0.0).unchecked)


@pytest.mark.slow
def test_exchanged_names_are_noticed_and_the_fix_works():
    def factory(a, b):
        return pairs.model(16 * a, b)

    sizes = {"widths": (2, 4, 8), "depths": (2, 4, 8), "base": (2, 2), "seeds": 1}
    with pytest.raises(UserError, match=r"'b' changes the number of blocks.*\n.*names=\('a', 'b'\)"):
        quick_check(factory, names=("b", "a"), **sizes)
    assert quick_check(factory, names=("a", "b"), **sizes).findings


@pytest.mark.slow
def test_numpy_sizes_and_a_loss_before_the_logits_are_understood():
    class LossFirst(torch.nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.body = pairs.model(width, depth)

        def forward(self, ids):
            logits = self.body(ids)
            return logits.mean(), logits

    assert quick_check(LossFirst, widths=np.array([32, 64, 128]), depths=()).verdict == "PASS"


@pytest.mark.slow
def test_inconclusive_is_never_a_pass():
    assert quick_check(pairs.diverges, axis="depth", seeds=1).verdict == "INCONCLUSIVE"
    frozen = quick_check(pairs.frozen, axis="depth", seeds=1)
    assert frozen.verdict != "PASS"
    assert any("it is not trained" in f.why for f in frozen.findings)
    deep = quick_check(pairs.diverges_when_deep, axis="depth", seeds=1)
    assert deep.verdict == "FAIL"
    assert any("is not finite from depth 8 on" in f.why for f in deep.findings)
    two = quick_check(depths=(2, 4), widths=(), seeds=1)
    assert two.verdict == "INCONCLUSIVE"
    assert any("cannot be fitted with 2 depths" in f.why for f in two.findings)


@pytest.mark.slow
def test_more_seeds_are_added_where_an_interval_is_too_wide(monkeypatch):
    """At most four times as many; each of them new, and all of them in the result."""
    answers = iter([["depth"], ["depth"], []])
    monkeypatch.setattr(check_module, "noisy", lambda findings: next(answers))
    assert sorted(quick_check(axis="depth", seeds=1).survey.tensors["seed"].unique()) == [0, 1, 2]
    monkeypatch.setattr(check_module, "noisy", lambda findings: ["depth"])
    assert sorted(quick_check(axis="depth", seeds=1).survey.states["seed"].unique()) == [0, 1, 2, 3]


@pytest.mark.slow
def test_more_seeds_are_run_along_the_open_axis_only(monkeypatch):
    answers = iter([["width"], []])
    monkeypatch.setattr(check_module, "noisy", lambda findings: next(answers))
    states = quick_check(seeds=1).survey.states
    seeds = {shape: sorted(rows["seed"]) for shape, rows in states.partition_by("width", "depth", as_dict=True).items()}
    assert seeds == {(32, 2): [0, 1], (64, 2): [0, 1], (128, 2): [0, 1], (32, 4): [0], (32, 8): [0]}


def test_the_open_axes_are_those_with_a_wide_interval():
    wide = Finding("completep", "width", "w", "init", Slope(0.1, -0.1, 0.3), 0.0, "INCONCLUSIVE", WIDE)
    unseen = replace(wide, axis="depth", exponent=None, why="is 0: it is not trained")
    others = [replace(wide, axis="depth", word="PASS"), unseen]
    assert noisy([wide, *others]) == ["width"]
    assert noisy(others) == []


@pytest.mark.slow
def test_the_base_is_examined_once_for_all_shapes_and_seeds(monkeypatch):
    examined = []
    module = import_module("completep.rules.parametrize")
    plain = module.examine
    monkeypatch.setattr(module, "examine", lambda *a, **k: examined.append(1) or plain(*a, **k))
    checked = quick_check(axis="depth")
    assert (checked.verdict, len(examined)) == ("PASS", 1)
    quick_check(rules=["completep", "mup"], axis="depth")
    assert len(examined) == 2


@pytest.mark.slow
def test_a_large_model_is_not_kept_and_gives_the_same_numbers(monkeypatch):
    kept = quick_check(rules="mup", axis="depth")
    assert "multiplier" in {f.setting for f in kept.culprits}  # so there was a second survey, of the same models
    monkeypatch.setattr(subject_module, "LARGEST_KEPT", 0)
    assert quick_check(rules="mup", axis="depth").to_json() == kept.to_json()


@pytest.mark.slow
def test_nan_passes_nothing():
    """Every quantity of every tensor set to NaN, one at a time, at the largest size: never PASS."""
    source = Source(pairs.model, Shape(*BASE))
    shapes = [Shape(32, d) for d in (2, 4, 8)]
    measured = survey(source, [COMPLETEP], shapes, Setting(batch=8, time=8, weight_decay=0.1), seeds=(0, 1), workers=1)
    assert overall(judge_survey(measured)) == "PASS"
    last = pl.col("depth") == 8
    for column in ("gain", "pull", "eps_ratio", "decay"):
        broken = measured.tensors.with_columns(pl.when(last).then(math.nan).otherwise(pl.col(column)).alias(column))
        findings = judge_survey(
            type(measured)(measured.base, measured.limit, broken, measured.states, measured.attentions)
        )
        assert overall(findings) == "FAIL", column
        assert culprits(findings)


def test_a_model_with_dropout_is_refused_by_name():
    with pytest.raises(UserError, match=r"not deterministic: dropout is on in transformer\.drop"):
        quick_check(zoo.gpt2)


def test_a_factory_that_ignores_its_arguments_is_noticed():
    with pytest.raises(UserError, match="depth=8 is no larger than the base: the factory does not use depth"):
        quick_check(pairs.ignores_its_size, axis="depth")


@pytest.mark.slow
def test_special_batches_and_their_mistakes():
    assert quick_check(pairs.Keyed, axis="depth", batches=pairs.keyed_batches).verdict == "PASS"
    for wrong, message in ((pairs.bad_batches, "returned list"), (pairs.misfitting_batches, "do not fit targets")):
        with pytest.raises(UserError, match=message):
            quick_check(pairs.Keyed, axis="depth", batches=wrong, seeds=1)


@pytest.mark.slow
def test_parameterizations_do_not_disturb_each_other():
    """A repair of one of them is not made on the other."""
    both = quick_check(rules=["sp", "completep"], axis="width")
    assert {key: both.word(key) for key in both.by_rules} == {"sp": "FAIL", "completep": "PASS"}


@pytest.mark.slow
def test_what_no_optimizer_trains_is_said():
    def forgetful(width, depth):
        model, optimizer = pairs.right(width, depth)
        kept = [p for n, p in model.named_parameters() if "mlp.up" not in n]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if any(p is k for k in kept)]
        return model, optimizer

    check = quick_check(forgetful, axis="depth", seeds=1)
    assert any("mlp.up.weight" in line and "no optimizer trains" in line for line in check.unchecked)


@pytest.mark.slow
def test_half_precision_is_measured_in_single():
    check = quick_check(lambda width, depth: pairs.model(width, depth).bfloat16(), axis="width")
    assert check.verdict == "PASS", check


@pytest.mark.slow
def test_a_side_that_does_not_grow_is_no_fault():
    """A feed-forward width that is the same at every size: its gradients align only in training."""
    fixed = zoo.huggingface("Llama", **{**zoo.LLAMA_LIKE, "intermediate_size": 192})
    assert quick_check(fixed, widths=(64, 128, 256), base=(64, 2)).verdict == "PASS"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": []}, "rules="),
        ({"rules": ["none", "completep"]}, "rules="),
        ({"optimizer": "sophia"}, "optimizer='sophia'"),
        ({"std": 0.0}, "std=0.0: must be positive"),
        ({"names": ("width",)}, "names="),
        ({"batches": lambda step: (torch.randint(256, (4, 8)), torch.randint(900, 999, (4, 8)))}, "IndexError"),
        ({"batches": lambda step: (torch.randint(256, (4, 8)), torch.rand(4, 8))}, "RuntimeError"),
        ({"factory": pairs.strangers}, "trains no parameter of this model"),
        ({"factory": pairs.right, "rules": ["completep", "mup"]}, "brings its own optimizer"),
        ({"factory": lambda width, depth: None}, "the factory returned NoneType"),
        ({"factory": lambda width, depth: pairs.model(16 * depth, width // 16)}, "'depth' changes the width"),
        ({"factory": pairs.optimized(torch.optim.Adam, weight_decay=0.1)}, "adds weight decay to the gradient"),
        ({"factory": pairs.optimized(torch.optim.AdamW, maximize=True)}, "AdamW maximizes the loss"),
        ({"factory": pairs.optimized(torch.optim.AdamW, lr=-1.0)}, "negative learning rate"),
        ({"factory": pairs.not_finite}, "'blocks.0.mlp.up.weight' is not finite"),
    ],
)  # fmt: skip
def test_bad_arguments_are_users_errors(options, message):
    with pytest.raises(UserError, match=message):
        quick_check(**{"axis": "depth", "seeds": 1, **options})


# -- as a result and as a command ------------------------------------------------------------------


def test_reference_rules():
    assert reference(MUP) is reference(SP) is COMPLETEP
    assert reference(literature(0.5)).key == alpha(0.5).key


@pytest.mark.slow
def test_no_rules_print_exponents_without_a_verdict():
    check = quick_check(rules="none", seeds=2)
    assert check.verdict is None
    text = str(check)
    assert "No rules were given" in text
    assert "pull" in text
    json.dumps(check.to_json())


@pytest.mark.slow
def test_the_second_opinion_is_beside_the_first():
    check = quick_check(axis="depth", steps=2, time=8, seeds=2)
    assert check.movement is not None
    assert "Second opinion" in str(check)
    assert {"tensors", "states", "stream", "roles"} == set(check.frames())


@pytest.mark.slow
def test_the_result_reads_as_text_json_and_html():
    check = quick_check(seeds=2)
    assert repr(check) == f"<Check: {check.verdict}>"
    assert str(check).startswith(check.verdict)
    assert "blocks.*.mlp.down.weight" in str(check)
    assert check.to_json()["verdicts"] == {"completep": check.verdict}
    assert check.to_json()["rho"] == check.survey.limit.rho
    html = check._repr_html_()
    assert "<svg" in html
    wrong = quick_check(rules="mup", axis="depth", seeds=2)
    [table, *_] = [part for part in wrong.document().parts if isinstance(part, Table)]
    words = [row[2] for row in table.rows]
    assert words == sorted(words, key=["FAIL", "INCONCLUSIVE", "PASS"].index)  # failing rows first
    assert "FAIL" in words


@pytest.mark.slow
def test_a_pair_may_have_several_optimizers():
    def two(width, depth):
        model = pairs.model(width, depth)
        scaling = parametrize(model, base=lambda: pairs.model(*BASE)).init_(0.06, seed=torch.initial_seed())
        others = [role for role in Role if role is not Role.HIDDEN]
        muon = torch.optim.Muon(scaling.param_groups(2e-2, optimizer="muon", roles=[Role.HIDDEN]))
        return model, (muon, torch.optim.AdamW(scaling.param_groups(2e-3, eps=1e-12, roles=others)))

    check = quick_check(two)
    assert check.verdict == "PASS", check
    assert set(check.survey.tensors["column"].to_list()) == {str(Column.MUON), str(Column.ADAM)}


MODEL = ["completep.model.gpt:gpt", "--args", "head_size=16", "vocabulary=256", "--workers", "1"]


@pytest.mark.slow
def test_command_line(tmp_path, capsys):
    words = ["check", *MODEL, "--widths", "64", "--depths", "2", "4", "8", "16", "--out", str(tmp_path / "runs")]
    assert main([*words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == "PASS"
    names = sorted(f.rsplit("/", 1)[1] for f in printed["files"])
    pictures = [f"depth-tensors.{kind}" for kind in ("pdf", "png", "svg")]
    assert names == sorted([*pictures, "report.html", "report.md", "states.csv", "tensors.csv"])
    assert main([*words, "--rules", "mup"]) == 1
    assert "blocks.*.mlp.down.weight: multiplier" in " ".join(capsys.readouterr().out.split())
    assert main(["check", *MODEL, "--widths", "64", "--depths", "2", "4", "--out", str(tmp_path / "runs")]) == 3
    assert "INCONCLUSIVE" in capsys.readouterr().out
    assert main([*words, "--rules", "none"]) == 0


@pytest.mark.slow
def test_processes_give_the_same_numbers():
    source = Source("completep.model.gpt:gpt", Shape(32, 2), {"vocabulary": 256, "head_size": 16})
    shapes, setting = [Shape(32, d) for d in (2, 4, 8)], Setting(batch=8, time=8)
    one, two = (survey(source, [COMPLETEP], shapes, setting, seeds=(0,), workers=n) for n in (1, 2))
    np.testing.assert_allclose(one.tensors["pull"].to_numpy(), two.tensors["pull"].to_numpy(), rtol=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check"], "one shape has no slope"),
        (["check", "--depths", "2", "2"], "one shape has no slope"),
        (["check", "--depths", "2", "4", "--seeds", "0"], "seeds=0"),
        (["check", "nowhere:model", "--depths", "2", "4"], "nowhere"),
        (["check", "--depths", "2", "4", "--rules", "mupp"], "no rules named 'mupp'"),
        (["check", "--depths", "0", "4"], "depth=0"),
        (["check", "--depths", "2", "4", "--time", "0"], "time=0"),
    ],
)
def test_mistakes_are_reported(words, message, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
