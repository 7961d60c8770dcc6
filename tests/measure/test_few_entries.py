"""Tensors with few entries: a router's bias, a readout with three classes. They are measured with little noise."""

from functools import partial

import numpy as np
import pytest

import completep as cp
from completep import COMPLETEP
from completep.config import Shape
from completep.measure import tensors
from completep.measure.subject import Setting, Source, Subjects, random_batch
from completep.measure.tensors import measure_start, measure_tensors
from tests.measure.controls import assert_named
from tests.rules.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore")
BASE = (64, 2)
SIZES = {"width": {"widths": (64, 128, 256)}, "depth": {"depths": (2, 4, 8)}}
ROUTER_BIAS = "model.layers.*.mlp.router.bias"


def subjects_of(name, setting):
    source = Source(ZOO[name], Shape(*BASE))
    base = source.base_model()
    return Subjects(source, base, Shape(*BASE), COMPLETEP, setting, None), partial(random_batch, source, base, setting)


@pytest.mark.slow
def test_terms_of_a_routers_bias_are_added_without_their_signs():
    """GPT-OSS's router returns a tuple. Against the gradients of its logits, token by token."""
    subjects, batch = subjects_of("gpt-oss", Setting(batch=8, time=8))
    rows = {row.template: row for row in measure_tensors(subjects.start(0), batch(0), {})[0]}
    twin, logits = subjects.start(0), []
    for layer in twin.model.model.layers:
        layer.mlp.router.register_forward_hook(lambda m, args, out: out[0].retain_grad() or logits.append(out[0]))
    twin.loss(batch(0)).backward()
    unsigned = sum(out.grad.abs().sum().item() for out in logits)
    signed = sum(layer.mlp.router.bias.grad.abs().sum().item() for layer in twin.model.model.layers)
    lr = twin.settings["model.layers.0.mlp.router.bias"].lr
    assert rows[ROUTER_BIAS].pull == pytest.approx(lr * unsigned, rel=1e-3)
    assert unsigned > 1.5 * signed  # otherwise the test would show nothing


@pytest.mark.slow
def test_the_gain_of_a_readout_with_three_classes_does_not_depend_on_its_inputs(monkeypatch):
    """It is σ·√fan-in, to a few percent. As measured on its own inputs, which are almost all alike, it is noise."""
    subjects, batch = subjects_of("dinov2-vit", Setting(batch=8))

    def relative_gains():
        for seed in range(6):
            subject = subjects.start(seed)
            fan_in = subject.model.classifier.weight.shape[1]
            yield measure_start(subject, batch(seed))[1]["classifier.weight"] / (0.02 * fan_in**0.5)

    subjects.setting = Setting(0.02, batch=8)
    assert np.std(list(relative_gains())) < 0.05
    assert np.mean(list(relative_gains())) == pytest.approx(1, abs=0.05)
    monkeypatch.setattr(tensors, "FEW_OUTPUTS", 0)
    assert np.std(list(relative_gains())) > 0.15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "dinov2-vit"])
def test_right_rules_pass(name):
    result = cp.check(ZOO[name], **SIZES["width"], **SIZES["depth"], workers=1)
    assert result.verdict == "PASS", [str(f) for f in result.findings if f.word != "PASS"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gpt-oss", (ROUTER_BIAS, "learning rate", "width", 0.25)),
        ("gpt-oss", (ROUTER_BIAS, "epsilon", "depth", -0.25)),
        ("dinov2-vit", ("classifier.weight", "init", "width", -0.25)),
        ("dinov2-vit", ("classifier.weight", "multiplier", "width", 0.25)),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_a_fault_in_exactly_these_cells_is_named(name, fault):
    assert_named(ZOO[name], BASE, fault, SIZES[fault[2]])
