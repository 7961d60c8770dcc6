"""`check` on a DiT: what makes its condition reaches the loss through every block, with a random sign at init."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import completep as cp
from completep import parametrize
from completep.measure.conditions import ConditionGradients
from completep.measure.layout import Layout
from tests.measure.controls import planted
from tests.measure.dit import DiT, batches

BASE = (64, 2)
SIZES = {"width": {"widths": (64, 128, 256)}, "depth": {"depths": (2, 4, 8)}}


def loss_of(model):
    inputs, targets = batches(0)
    return F.cross_entropy(model(*inputs).flatten(0, 1), targets.flatten())


def test_terms_of_a_condition_are_those_of_the_blocks():
    """Against passes in which one block alone, or the last modulation alone, is given the condition."""
    torch.manual_seed(0)
    model, depth = DiT(32, 3), 3
    scaling = parametrize(model, base=lambda: DiT(32, 2), example=batches(0)[0]).init_(0.1, seed=0)
    watched = ConditionGradients(Layout(model, scaling.anatomy).blocks)
    with watched.watching():
        loss = loss_of(model)
    loss.backward(retain_graph=True)
    outside = {name: p for name, p in model.named_parameters() if not name.startswith("blocks.") and p.requires_grad}
    unsigned = watched.unsigned(outside)
    made = {"classes.weight", "time.0.weight", "time.0.bias", "time.2.weight", "time.2.bias"}
    assert unsigned.keys() == made  # not what enters the stream, and not what reads the condition
    signed = {name: outside[name].grad.clone() for name in made}

    def detached(module, args):
        return *args[:-1], args[-1].detach()

    places = [*model.blocks, model.modulation]
    terms = dict.fromkeys(made, 0.0)
    for alone in places:
        handles = [place.register_forward_pre_hook(detached) for place in places if place is not alone]
        model.zero_grad()
        loss_of(model).backward()
        terms = {name: total + outside[name].grad.abs() for name, total in terms.items()}
        for handle in handles:
            handle.remove()
    assert len(places) == depth + 1
    for name in made:
        torch.testing.assert_close(unsigned[name], terms[name], rtol=1e-3, atol=1e-8)
        assert unsigned[name].sum() > 1.05 * signed[name].abs().sum()  # otherwise the test would show nothing


@pytest.mark.slow
def test_right_rules_pass():
    result = cp.check(DiT, **SIZES["width"], **SIZES["depth"], batches=batches, workers=1)
    assert result.verdict == "PASS", [str(f) for f in result.findings if f.word != "PASS"]
    assert list(result.unchecked) == ["places, which no optimizer trains"]
    judged = {(f.tensor, f.setting, f.axis) for f in result.findings}
    assert {("classes.weight", "learning rate", "depth"), ("time.2.weight", "epsilon", "depth")} <= judged


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        ("blocks.*.modulation.1.weight", "learning rate", "width", 0.25),
        ("blocks.*.modulation.1.weight", "init", "width", -0.25),
        ("blocks.*.modulation.1.bias", "learning rate", "depth", 0.25),
        ("blocks.*.mlp.2.weight", "multiplier", "depth", 0.25),
        ("classes.weight", "learning rate", "depth", -0.25),
        ("time.2.weight", "epsilon", "depth", 0.25),
    ],
    ids=lambda fault: " ".join(map(str, fault)),
)
def test_a_planted_fault_is_named(fault):
    tensor, setting, axis, exponent = fault
    wrong = partial(planted, DiT, BASE, fault, example=batches(0)[0])
    result = cp.check(wrong, **SIZES[axis], base=BASE, batches=batches, workers=1)
    assert result.verdict == "FAIL"
    assert {(f.tensor, f.setting, f.axis) for f in result.culprits} == {(tensor, setting, axis)}
    assert result.culprits[0].deviation == pytest.approx(exponent, abs=0.1)
