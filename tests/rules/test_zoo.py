"""Real models as their authors wrote them: both styles, and multipliers that really act."""

import subprocess
import sys

import pytest
import torch

from completep import MUP, audit
from tests.rules.models import clean
from tests.rules.training import logits, step, tokens, worst
from tests.rules.zoo import EACH, EXPERTS, HYBRIDS, ZOO, roles_for, scale

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of other people's models


SINGLE = ("mamba", "mamba2", "recurrent-gemma")  # these compute a part in float32, whatever their weights are


def example_for(name):
    generator = torch.Generator().manual_seed(1)
    if "vit" in name:
        return torch.randn(2, 3, 16, 16, generator=generator)
    return torch.randint(1, 61, (2, 9), generator=generator)


@pytest.mark.parametrize("name", EACH)
def test_both_styles_give_the_same_logits_and_fold_into_the_plain_class(name):
    model, scaling = scale(name)
    folded, theirs = scale(name, "folded")
    scaling.init_(0.1, seed=2)
    theirs.init_(0.1, seed=2)
    inputs = example_for(name)
    model.eval()
    folded.eval()
    with torch.no_grad():
        expected = logits(model, inputs)
        assert expected.std() > 1e-4
        assert worst(logits(folded, inputs), expected) < 1e-4
        scaling.fold()
        plain = ZOO[name](64, 6).eval()
        plain.load_state_dict(model.state_dict())
        assert worst(logits(plain, inputs), expected) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_a_branch_really_is_scaled(name):
    """The audit measures the multipliers with probes of its own: they are there, and muP's are not."""
    model, scaling = scale(name)
    scaling.init_(0.05, seed=0)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-3, weight_decay=0.1, eps=1e-12))
    base = lambda: ZOO[name](32, 2)  # noqa: E731
    assert clean(audit(model, optimizer, base=base, roles=roles_for(name)))
    found = audit(model, optimizer, base=base, roles=roles_for(name), rules=MUP)
    assert "multiplier" in {d.quantity for d in found.departures}


def doubled(name, style):
    """A model in float64, with experts that run in it."""
    model, scaling = scale(name, style)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.double()
    return model, scaling.init_(0.1, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXPERTS, *HYBRIDS])
def test_both_styles_train_alike_in_float64(name):
    made = []
    for style in ("multiplier", "folded"):
        model, scaling = doubled(name, style)
        optimizer = torch.optim.AdamW(scaling.param_groups(1e-3, weight_decay=0.1, eps=1e-9))
        for i in range(3):
            step(model, optimizer, i)
        made.append(logits(model.eval(), tokens(99)).detach())
    assert worst(made[1], made[0]) < (1e-4 if name in SINGLE else 1e-9)


@pytest.mark.slow
def test_seventy_billion_parameters_on_meta():
    """In a separate process, to measure its peak memory. benchmarks/rules_cost.py measures the time."""

    code = """
import resource, torch
from transformers import LlamaConfig, LlamaForCausalLM
import completep as cp
def llama(width, depth, heads, kv, inner):
    return LlamaForCausalLM(LlamaConfig(hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads,
        num_key_value_heads=kv, intermediate_size=inner, vocab_size=32000, head_dim=128))
with torch.device("meta"):
    model = llama(8192, 80, 64, 8, 28672)
assert sum(p.numel() for p in model.parameters()) > 68e9
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
scaling = cp.parametrize(model, base=lambda: llama(256, 2, 2, 1, 896))
added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
assert len(scaling.param_groups(1e-3)) <= 8
assert {m.kind: m.factor for m in scaling.multipliers} == {"branch": 1 / 40, "logits": 1 / 32}
assert added < 1, f"{added:.2f} GB"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
