"""Several results, each with its readout: values, shared weights, layers and norms of their own, own factors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from completep import Role, UserError, audit, parametrize
from tests.rules.models import Model, ValueHead, clean, roles, scale
from tests.rules.training import VOCABULARY, tokens, worst


class TiedValue(ValueHead):
    """A tied language-model head and a value, which read the same norm."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.head.weight = self.table.weight


class ValueFirst(TiedValue):
    def forward(self, ids):
        return super().forward(ids)[::-1]


class BareSecond(Model):
    """The second result is a product with the embedding's own weight."""

    def forward(self, ids):
        x = self.norm(self.run(self.embed(ids)))
        return self.head(x), x @ self.table.weight.T


class Twins(ValueHead):
    """Two readouts with one weight, as for two tokens at once."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.value = nn.Linear(width, VOCABULARY, bias=False)
        self.value.weight = self.head.weight


class OwnNorm(ValueHead):
    """The value reads the stream through a norm of its own."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.run(self.embed(ids))
        return self.head(self.norm(x)), self.value(self.norm2(x))


class DeepValue(TiedValue):
    """The value has a layer of its own, beside a tied head."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.first = nn.Linear(width, width)

    def forward(self, ids):
        x = self.norm(self.run(self.embed(ids)))
        return self.head(x), self.value(torch.tanh(self.first(x)))


class RawValue(ValueHead):
    """The value reads the stream without a norm."""

    def forward(self, ids):
        x = self.run(self.embed(ids))
        return self.head(self.norm(x)), self.value(x)


class Bounded(ValueHead):
    """A nonlinearity follows the value."""

    def forward(self, ids):
        logits, value = super().forward(ids)
        return logits, torch.sigmoid(value)


KINDS = [ValueHead, TiedValue, ValueFirst, Twins, OwnNorm, DeepValue, RawValue]


def test_a_bounded_value_is_a_readout():
    _, scaling = scale(Bounded)
    assert scaling.factors() == {"branch": 0.25, "logits head": 0.5, "logits value": 0.5}


class Returned(TiedValue):
    """What the final norm returns is a result itself, beside a tied readout."""

    def forward(self, ids):
        x = self.norm(self.run(self.embed(ids)))
        return self.head(x), self.value(x), x


def test_a_norm_that_is_returned_holds_no_multiplier():
    scale(Returned)
    with pytest.raises(UserError, match="the logits multiplier cannot be folded"):
        scale(Returned, style="folded")


class Pooled(Model):
    """Attention pooling over tokens before the readout."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.query = nn.Parameter(torch.randn(width))

    def forward(self, ids):
        x = self.norm(self.run(self.embed(ids)))
        return self.head(((x @ self.query).softmax(-1)[..., None] * x).sum(1))


def test_a_pool_between_norm_and_readout_is_refused():
    with pytest.raises(UserError, match="no module of the blocks is given what the readout reads"):
        scale(Pooled)


def trained(kind, style, steps=3):
    """All results of a model after some steps on all of them, in float64."""
    torch.manual_seed(0)
    model = kind(64, 8).double()
    scaling = parametrize(model, base=lambda: kind(32, 2), style=style)
    scaling.init_(0.1, seed=1)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-2, weight_decay=0.1, eps=1e-9))
    for i in range(steps):
        optimizer.zero_grad()
        sum(out.square().mean() for out in model(tokens(i))).backward()
        optimizer.step()
    return [out.detach() for out in model(tokens(9))], scaling


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_results_train_alike_in_both_styles(kind):
    multiplied, _ = trained(kind, "multiplier")
    folded, _ = trained(kind, "folded")
    for one, other in zip(multiplied, folded, strict=True):
        assert worst(other, one) < 1e-9


@pytest.mark.parametrize("kind", [*KINDS, BareSecond])
def test_every_result_falls_as_its_multiplier_says(kind):
    """Each result is linear in its readout's input, so the multiplier is its ratio to the plain model's."""
    torch.manual_seed(0)
    model = kind(64, 2)
    scaling = parametrize(model, base=lambda: kind(32, 2), style="folded")
    scaling.init_(0.1, seed=1)
    scaled = model(tokens(0))
    bare = kind(64, 2)
    folds = {n: r.fold for n, r in scaling.parameters.items()}
    with torch.no_grad():
        for (name, p), own in zip(bare.named_parameters(), model.parameters(), strict=True):
            p.copy_(own / folds[name])
    for out, plain in zip(scaled, bare(tokens(0)), strict=True):
        assert worst(out, 0.5 * plain) < 1e-4


def test_the_roles_of_further_heads_are_found():
    _, scaling = scale(DeepValue)
    found = roles(scaling)
    assert (found["value.weight"], found["value.bias"]) == (Role.UNEMBEDDING, Role.UNEMBEDDING_BIAS)
    assert (found["first.weight"], found["first.bias"]) == (Role.HEAD, Role.HEAD_BIAS)
    _, scaling = scale(OwnNorm)
    assert roles(scaling)["norm2.weight"] is Role.FINAL_NORM
    _, scaling = scale(ValueFirst)
    assert roles(scaling)["table.weight"] is Role.EMBEDDING
    assert {m.modules for m in scaling.multipliers if m.kind == "logits"} == {("value",), ("head",)}


def test_a_bare_second_readout_needs_the_folded_style():
    with pytest.raises(UserError, match="logits multiplier has no module to act on"):
        scale(BareSecond)


def test_readouts_with_one_weight_have_one_multiplier():
    _, scaling = scale(Twins)
    (logits,) = (m for m in scaling.multipliers if m.kind == "logits")
    assert logits.modules == ("head", "value")
    assert scaling.parameters["head.weight"].fold == 0.5


class Elsewhere(Model):
    """The readout's weight is used again, in front of the blocks."""

    def embed(self, ids):
        x = self.table(ids)
        return x + F.linear(x, self.head.weight) @ self.head.weight


def test_a_readout_weight_that_is_used_elsewhere_is_refused():
    with pytest.raises(UserError, match=r"head\.weight makes logits, and is also multiplied by something else"):
        scale(Elsewhere)


def test_the_audit_sees_a_second_readout_without_its_multiplier():
    """Folded by hand, but for the value: the audit names it."""
    model, scaling = scale(Twins, style="folded")
    scaling.init_(0.1)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-3, weight_decay=0.1, eps=1e-12))
    assert clean(audit(model, optimizer, base=lambda: Twins(32, 2)))
    model, scaling = scale(ValueHead)
    scaling.init_(0.1)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-3, weight_decay=0.1, eps=1e-12))
    assert clean(audit(model, optimizer, base=lambda: ValueHead(32, 2)))
    model.value._forward_pre_hooks.clear()
    found = audit(model, optimizer, base=lambda: ValueHead(32, 2))
    assert [d.name for d in found.departures if d.quantity == "multiplier"] == ["value"]


class OwnFactor(ValueHead):
    def forward(self, ids):
        logits, value = super().forward(ids)
        return logits, value / self.width


def test_a_factor_on_a_second_result_is_measured():
    with pytest.raises(
        UserError, match=r"multiplies 'value' by a factor that depends on its size: 0\.03125 at the base"
    ):
        scale(OwnFactor)


class Temperature(Model):
    """A learned number on the logits."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, ids):
        return super().forward(ids) * self.log_scale.exp()


def test_a_learned_temperature_scales_with_nothing():
    model, scaling = scale(Temperature)
    settings = scaling.settings("log_scale")
    assert (settings.lr, settings.eps) == (1.0, 1.0)
    scaling.init_(0.1)
    assert model.log_scale.item() == pytest.approx(0.3)


class SmallHead(Model):
    """A head with a layer of fixed size: the readout's own fan-in does not grow."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.dense, self.head = nn.Linear(width, 24), nn.Linear(24, VOCABULARY)

    def forward(self, ids):
        return self.head(F.gelu(self.dense(self.norm(self.run(self.embed(ids))))))


def test_the_width_is_that_of_the_stream():
    _, scaling = scale(SmallHead)
    assert scaling.m_N == 2
    assert scaling.parameters["dense.weight"].m_N == 2
    assert scaling.factors()["logits"] == 1.0
    assert scaling.settings("blocks.0.up.weight").lr == 0.5


class Factorised(Model):
    """Embeddings of a width of their own, tied to the readout through a layer."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.table, self.rise = nn.Embedding(VOCABULARY, 16), nn.Linear(16, width)
        self.dense, self.norm2 = nn.Linear(width, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def embed(self, ids):
        return self.rise(self.table(ids))

    def forward(self, ids):
        return self.head(self.norm2(F.gelu(self.dense(self.norm(self.run(self.embed(ids)))))))


def test_embeddings_of_another_width_are_refused():
    with pytest.raises(UserError, match=r"'rise' is a matrix outside the blocks between embeddings and a stream"):
        scale(Factorised)


# -- norms without a module --------------------------------------------------------------------------


class Functional(Model):
    """The final norm is a function."""

    def forward(self, ids):
        x = self.run(self.embed(ids))
        return self.head(F.rms_norm(x, (self.width,)))

    def __init__(self, width, depth):
        super().__init__(width, depth)
        del self.norm


class FunctionalGain(Functional):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, ids):
        x = self.run(self.embed(ids))
        return self.head(self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class NoNorm(Functional):
    """What follows the last block is no norm."""

    def forward(self, ids):
        return self.head(F.softplus(self.run(self.embed(ids))))


def test_a_functional_final_norm():
    for kind, given in ((Functional, None), (FunctionalGain, {"gain": Role.FINAL_NORM})):
        model, scaling = scale(kind, roles=given)
        assert scaling.factors() == {"branch": 0.25, "logits": 0.5}
        scaling.init_(0.1)
        out = model(tokens(0)).detach()
        scaling.fold()
        assert worst(model(tokens(0)), out) < 1e-5
    with pytest.raises(UserError, match="result of Softplus"):
        scale(NoNorm)


# -- roles that the forward pass denies --------------------------------------------------------------


class Gated(Model):
    """A gate outside the blocks, on the embedding."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.gate = nn.Linear(width, 1)

    def embed(self, ids):
        x = self.table(ids)
        return x * torch.sigmoid(self.gate(x))


WRONG = {
    "a head's layer as a table": (DeepValue, "first.weight", Role.EMBEDDING, "reads activations"),
    "a head's layer as a norm": (DeepValue, "first.weight", Role.FINAL_NORM, "as a matrix"),
    "a value as a table": (OwnNorm, "value.weight", Role.EMBEDDING, "reads activations"),
    "a gate as a table": (Gated, "gate.weight", Role.EMBEDDING, "reads activations"),
    "an outer matrix as a hidden one": (DeepValue, "first.weight", Role.HIDDEN, "reads activations"),
    "a hidden matrix as a table": (Model, "blocks.*.up.weight", Role.EMBEDDING, "inside the blocks"),
    "a hidden matrix as a bias": (Model, "blocks.*.up.weight", Role.HIDDEN_BIAS, "as a matrix"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_role_that_the_forward_pass_denies_is_refused(case):
    kind, name, role, why = WRONG[case]
    with pytest.raises(UserError, match=why) as e:
        scale(kind, roles={name: role})
    if "use Role." in e.value.fix:
        right = Role[e.value.fix.removeprefix("use Role.")]
        assert roles(scale(kind, roles={name: right})[1])[name] is right
