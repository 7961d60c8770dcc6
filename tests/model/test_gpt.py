"""The reference decoder against a second implementation of the paper's model, in plain float64 loops."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from completep import UserError, parametrize
from completep.model.gpt import alibi_slopes, gpt
from tests.rules.training import tokens, worst

POSITIONS, ACTIVATIONS, NORMS = (
    ("alibi", "rotary", "learned", "none"),
    ("relu2", "gelu", "swiglu"),
    ("layernorm", "rmsnorm"),
)


def naive(model, ids: Tensor) -> Tensor:
    """The forward pass, one sequence and one head at a time."""
    c = model.config
    branch, logit = model.get_multipliers()
    out = []
    for row in ids:
        x = model.embedding.weight[row]
        if c.positions == "learned":
            x = x + model.positions.weight[: len(row)]
        for block in model.blocks:
            x = x + branch * attend(block.attention, norm(block.attention_norm, x, c), c)
            x = x + branch * (mix if c.experts else feed)(block.mlp, norm(block.mlp_norm, x, c), c)
        out.append(logit * norm(model.final_norm, x, c) @ model.unembedding.weight.T)
    return torch.stack(out)


def norm(module, x, c):
    if c.norm == "rmsnorm":
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    return x * module.weight + (module.bias if module.bias is not None else 0)


def linear(module, x):
    return x @ module.weight.T + (module.bias if module.bias is not None else 0)


def attend(a, x, c):
    q, k, v = linear(a.qkv, x).chunk(3, dim=-1)
    heads = []
    for h in range(c.heads):
        part = slice(h * c.head_size, (h + 1) * c.head_size)
        qh, kh, vh = q[:, part], k[:, part], v[:, part]
        if c.qk_norm:
            qh, kh = norm(a.q_norm, qh, c), norm(a.k_norm, kh, c)
        if c.positions == "rotary":
            qh, kh = spin(qh), spin(kh)
        rows = []
        for t in range(len(x)):
            scores = torch.stack([qh[t] @ kh[s] / c.head_size for s in range(t + 1)])
            if c.positions == "alibi":
                scores = scores - 2 ** (-8 * (h + 1) / c.heads) * torch.arange(t, -1, -1).double()
            rows.append(scores.softmax(0) @ vh[: t + 1])
        heads.append(torch.stack(rows))
    return linear(a.out, torch.cat(heads, -1))


def spin(x):
    out = x.clone()
    half = x.shape[1] // 2
    for t, i in itertools.product(range(x.shape[0]), range(half)):
        angle = t * 10000 ** (-2 * i / x.shape[1])
        a, b = x[t, i], x[t, i + half]
        out[t, i], out[t, i + half] = (
            a * math.cos(angle) - b * math.sin(angle),
            a * math.sin(angle) + b * math.cos(angle),
        )
    return out


def feed(m, x, c):
    h = linear(m.up, x)
    if c.activation == "relu2":
        h = h.clamp_min(0) ** 2
    elif c.activation == "gelu":
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    else:
        g = linear(m.gate, x)
        h = g * torch.sigmoid(g) * h
    return linear(m.down, h)


def nonlinear(h, g, c):
    if c.activation == "relu2":
        return h.clamp_min(0) ** 2
    return h * 0.5 * (1 + torch.erf(h / math.sqrt(2))) if g is None else g * torch.sigmoid(g) * h


def mix(m, x, c):
    """Token by token: the experts with the largest scores, each times the sigmoid of its score."""
    rows = []
    for row in x:
        scores = m.router.weight @ row
        made = torch.zeros_like(row)
        for expert in scores.argsort(descending=True)[: c.active_experts]:
            e = m.experts
            h, g = row @ e.up[expert], None if e.gate is None else row @ e.gate[expert]
            made = made + torch.sigmoid(scores[expert]) / c.active_experts * (nonlinear(h, g, c) @ e.down[expert])
        rows.append(made if m.shared is None else made + feed(m.shared, row, c))
    return torch.stack(rows)


@pytest.mark.parametrize(("activation", "active", "shared"), list(itertools.product(ACTIVATIONS, (1, 3), (0, 2))))
def test_a_mixture_of_experts_is_what_its_config_says(activation, active, shared):
    options = {"head_size": 16, "experts": 6, "active_experts": active, "shared_experts": shared, "expert_width": 24}
    model = gpt(64, 2, 61, activation=activation, **options).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.05, 0.3)
    model.set_multipliers(branch=0.3, logits=0.7)
    ids = tokens(0, batch=2, time=7)
    with torch.no_grad():
        assert worst(model(ids), naive(model, ids)) < 1e-9
    model(ids).square().mean().backward()
    assert model.blocks[0].mlp.router.weight.grad.abs().max() > 0  # also with one active expert


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"experts": 1}, "experts=1"),
        ({"experts": 4, "active_experts": 5}, "there are 4 experts"),
        ({"active_experts": 2}, "there are 0 experts"),
        ({"shared_experts": 1}, "shared_experts=1 without experts"),
        ({"expert_width": 8}, "expert_width=8 without experts"),
        ({"experts": 4, "active_experts": 0}, "active_experts=0"),
        ({"experts": -2}, "experts=-2"),
        ({"experts": 4, "expert_width": 0}, "expert_width=0"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(options, what):
    with pytest.raises(UserError, match=what) as e:
        gpt(64, 2, 61, head_size=16, **options)
    assert e.value.fix


def test_the_rules_of_a_mixture():
    def build(width, depth):
        return gpt(width, depth, 61, head_size=16, experts=8, active_experts=2, shared_experts=1)

    scaling = parametrize(build(64, 6), base=lambda: build(32, 2))
    found = {r.template: str(r.role) for r in scaling.parameters.values()}
    assert found["blocks.*.mlp.router.weight"] == "router"
    assert found["blocks.*.mlp.experts.up"] == found["blocks.*.mlp.experts.down"] == "expert weight"
    assert found["blocks.*.mlp.shared.down.weight"] == "hidden weight"
    settings = scaling.settings("blocks.0.mlp.router.weight")
    assert (settings.lr, settings.eps) == (0.5, pytest.approx(1 / 3))
    assert scaling.factors() == {"branch": pytest.approx(1 / 3), "logits": 0.5}


@pytest.mark.parametrize(
    ("positions", "activation", "norm_name"), list(itertools.product(POSITIONS, ACTIVATIONS, NORMS))
)
def test_forward_is_what_the_paper_says(positions, activation, norm_name):
    options = {"positions": positions, "activation": activation, "norm": norm_name, "context": 16}
    more = {"qk_norm": norm_name == "rmsnorm", "bias": norm_name == "layernorm"}
    model = gpt(64, 2, 61, head_size=16, **options, **more).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.3, 0.3)
    model.set_multipliers(branch=0.3, logits=0.7)
    ids = tokens(0, batch=2, time=7)
    with torch.no_grad():
        # rotary angles are computed in float32, as in every implementation
        assert worst(model(ids), naive(model, ids)) < (1e-5 if positions == "rotary" else 1e-9)
        assert worst(model(ids), naive(gpt(64, 2, 61, head_size=16, **options, **more).double(), ids)) > 1e-3


def test_it_is_causal():
    model = gpt(64, 2, 61, head_size=16)
    ids = tokens(0)
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 61
    assert torch.allclose(model(ids)[:, :5], model(changed)[:, :5], atol=1e-6)
    assert not torch.allclose(model(ids)[:, 5:], model(changed)[:, 5:], atol=1e-3)


@pytest.mark.parametrize(("width", "depth", "vocabulary"), [(64, 2, 61), (128, 5, 100), (256, 3, 50257)])
def test_parameter_counts_are_the_papers(width, depth, vocabulary):
    with torch.device("meta"):
        model = gpt(width, depth, vocabulary)
    expected = 12 * width**2 * depth + 13 * width * depth + 2 * width + 2 * vocabulary * width
    assert sum(p.numel() for p in model.parameters()) == expected


def test_alibi_slopes():
    assert alibi_slopes(8).tolist() == [2**-i for i in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2**-8]
    # 12 heads: the 8 of the next smaller power of two, then every other of 16's (Press et al., reference code)
    assert alibi_slopes(12).tolist() == pytest.approx(
        [2**-i for i in range(1, 9)] + [2 ** (-i / 2) for i in (1, 3, 5, 7)]
    )
    assert len(alibi_slopes(13)) == 13


def test_alibi_reads_longer_than_it_was_built_for_and_learned_positions_do_not():
    assert gpt(64, 1, 61, head_size=16)(tokens(0, time=50)).shape == (2, 50, 61)
    with pytest.raises(UserError, match="50 tokens is longer than the 16"):
        gpt(64, 1, 61, head_size=16, positions="learned", context=16)(tokens(0, time=50))


def test_tied_is_tied():
    model = gpt(64, 1, 61, head_size=16, tied=True)
    assert model.unembedding.weight is model.embedding.weight
