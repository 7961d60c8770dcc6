"""A model in the style of nanochat and modded-nanogpt, by hand.

Norms are functions without gains, also after the embedding and on queries and keys. Learned numbers per layer multiply
the stream and mix the embedding into it again. Tables of value embeddings, one for every second layer, enter the
values through a gate. Logits are squashed by a soft-cap.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from completep import Role, UserError, audit, check, parametrize
from tests.rules.models import clean, roles
from tests.rules.training import VOCABULARY, tokens, worst

HEAD = 8


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class Attention(nn.Module):
    def __init__(self, width, valued):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate = nn.Linear(8, width // HEAD, bias=False) if valued else None

    def forward(self, x: Tensor, values: Tensor | None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)) for f in (self.q, self.k, self.v))
        if values is not None:
            v = v + 2 * torch.sigmoid(self.gate(x[..., :8]))[..., None] * values.unflatten(-1, (-1, HEAD))
        q, k = norm(q), norm(k)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, valued):
        super().__init__()
        self.attention = Attention(width, valued)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, values: Tensor | None) -> Tensor:
        x = x + self.attention(norm(x), values)
        return x + self.down(F.relu(self.up(norm(x))).square())


class NanoChat(nn.Module):
    again = 0.0  # how much of the embedding every layer mixes in at init

    def __init__(self, width, depth):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, valued=i % 2 == 1) for i in range(depth))
        self.values = nn.ModuleDict({str(i): nn.Embedding(VOCABULARY, width) for i in range(1, depth, 2)})
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.keep = nn.Parameter(torch.ones(depth))
        self.mix = nn.Parameter(torch.full((depth,), self.again))

    def forward(self, ids: Tensor) -> Tensor:
        x = start = norm(self.table(ids))
        for i, block in enumerate(self.blocks):
            x = self.keep[i] * x + self.mix[i] * start
            x = block(x, self.values[str(i)](ids) if str(i) in self.values else None)
        return 15 * torch.tanh(self.head(norm(x)) / 15)


def scaled(style="multiplier", kind=NanoChat, depth=8):
    torch.manual_seed(0)
    model = kind(64, depth)
    return model, parametrize(model, base=lambda: kind(32, 2), style=style)


def test_the_roles():
    _, scaling = scaled()
    found = roles(scaling)
    assert found["keep"] is found["mix"] is Role.STREAM_SCALE
    assert found["values.*.weight"] is Role.BLOCK_TABLE
    assert found["blocks.*.attention.gate.weight"] is Role.HIDDEN
    assert found["table.weight"] is Role.EMBEDDING
    assert scaling.factors() == {"branch": 0.25, "logits": 0.5}
    keep, values = scaling.settings("keep"), scaling.settings("values.5.weight")
    assert (keep.lr, keep.eps) == (0.25, 1.0)
    assert (values.init_std, values.lr, values.weight_decay, values.eps) == (1.0, 1.0, 1.0, 1 / 2 / 4)
    assert scaling.settings("blocks.1.attention.gate.weight").lr == 1.0  # it reads eight features at every width


def test_both_styles_train_alike_in_float64():
    made = []
    for style in ("multiplier", "folded"):
        model, scaling = scaled(style)
        model.double()
        scaling.init_(0.1, seed=1)
        assert model.keep.min() == 1.0
        optimizer = torch.optim.AdamW(scaling.param_groups(1e-2, weight_decay=0.1, eps=1e-9))
        for i in range(3):
            optimizer.zero_grad()
            model(tokens(i)).square().mean().backward()
            optimizer.step()
        made.append(model(tokens(9)).detach())
    assert worst(made[1], made[0]) < 1e-9


@pytest.mark.slow
def test_the_audit_passes_and_misses_a_multiplier():
    model, scaling = scaled()
    scaling.init_(0.1)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-3, weight_decay=0.1, eps=1e-12))
    assert clean(audit(model, optimizer, base=lambda: NanoChat(32, 2)))
    model.blocks[3].down._forward_hooks.clear()
    found = audit(model, optimizer, base=lambda: NanoChat(32, 2))
    assert [d.name for d in found.departures if d.quantity == "multiplier"] == ["blocks.3.down"]


class MixedAtInit(NanoChat):
    """Every layer adds a tenth of the embedding, so the stream grows with depth."""

    again = 0.1


class Shrinking(NanoChat):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.keep = nn.Parameter(torch.full((depth,), 0.9))


@pytest.mark.parametrize("kind", [MixedAtInit, Shrinking])
def test_numbers_that_do_not_leave_the_stream_unchanged_are_refused(kind):
    with pytest.raises(UserError, match=r"is not what it was before|still changes the residual stream"):
        scaled(kind=kind)


class PerFeature(NanoChat):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.keep = nn.Parameter(torch.ones(depth, width))


def test_gains_for_every_feature_of_the_stream_are_refused():
    with pytest.raises(UserError, match="the residual stream takes in the result of Mul"):
        scaled(kind=PerFeature)


class ScaledOutside(NanoChat):
    """The numbers multiply what a block returns."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for i, block in enumerate(self.blocks):
            x = self.keep[i] * block(x, self.values[str(i)](ids) if str(i) in self.values else None)
        return self.head(norm(x))

    def __init__(self, width, depth):
        super().__init__(width, depth)
        del self.mix


def test_numbers_on_what_blocks_return():
    _, scaling = scaled(kind=ScaledOutside)
    assert roles(scaling)["keep"] is Role.STREAM_SCALE
    assert scaling.parameters["blocks.0.down.weight"].fold == 0.25


def nanochat(width, depth):
    return NanoChat(width, depth)


def as_trained(width, depth, *, keep=1.0):
    """The model with an optimizer of the rules, except for the learning rate of the numbers on the stream."""
    model = NanoChat(width, depth)
    scaling = parametrize(model, base=lambda: NanoChat(32, 2)).init_(0.06)
    groups = scaling.param_groups(2e-3, weight_decay=0.1, eps=1e-16)
    for group in groups:
        group["lr"] *= keep if "keep" in group["names"] else 1.0
    return model, torch.optim.AdamW(groups)


@pytest.mark.slow
def test_the_check_confirms_the_rows_of_its_own_and_names_a_break():
    sizes = {"widths": (32, 64, 128), "depths": (2, 4, 8, 16), "base": (32, 2), "workers": 1}
    found = check(nanochat, **sizes)
    own = [f for f in found.findings if f.tensor in ("keep", "mix", "values.*.weight")]
    assert {(f.tensor, f.setting) for f in own} >= {("keep", "learning rate"), ("mix", "epsilon")}
    assert found.verdict == "PASS", [str(f) for f in found.findings if f.word != "PASS"]
    broken = check(lambda width, depth: as_trained(width, depth, keep=depth / 2), **sizes)
    assert broken.verdict == "FAIL"
    assert {f.tensor for f in broken.findings if f.word == "FAIL"} == {"keep", "mix"}  # both are in one group
