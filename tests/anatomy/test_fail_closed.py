"""What would be scaled wrongly in silence: handled correctly, or refused with the reason."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from completep import MUP, SP, Role, Shape, UserError, audit, check, parametrize
from completep.anatomy import forward
from completep.anatomy.forward import measure_forward
from completep.rules.parametrize import explain
from tests.rules.models import Block, Heads, Model, NormModule, ValueHead, changed_by_folding, heads, roles, scale
from tests.rules.training import VOCABULARY, logits, tokens, worst
from tests.rules.zoo import LLAMA_LIKE, ZOO, Squash, huggingface

# -- numbers that are not finite ---------------------------------------------------------------------


class NormalisedBlock(Block):
    """What the branch adds does not depend on the size of its last matrix. At zero it is 0/0."""

    eps = 0.0

    def forward(self, x):
        h = self.branch(x)
        return x + h / (h.square().mean(-1, keepdim=True) + self.eps).sqrt()


class Normalised(Model):
    block = NormalisedBlock


class ReplacingBlock(NormalisedBlock):
    """Not residual."""

    def forward(self, x):
        return super().forward(x) - x


class Replacing(Model):
    block = ReplacingBlock


@pytest.mark.parametrize("kind", [Normalised, Replacing])
def test_numbers_that_are_not_finite_prove_nothing(kind):
    with pytest.raises(UserError, match=r"with all writers at zero, the output of 'blocks\.0' \(\w+\) is not finite"):
        scale(kind, writers=["*.down.*"])


def test_the_advice_for_them_leads_to_the_real_reason(monkeypatch):
    monkeypatch.setattr(NormalisedBlock, "eps", 1e-6)
    with pytest.raises(UserError, match=r"not linear in blocks\.\d\.down"):
        scale(Normalised, writers=["*.down.*"])
    with pytest.raises(UserError, match=r"is not what it was before|still changes"):
        scale(Replacing, writers=["*.down.*"])


# -- several heads -----------------------------------------------------------------------------------


class EarlyValue(ValueHead):
    """The value reads the stream before the last block."""

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            before, x = x, block(x)
        return self.head(self.norm(x)), self.value(before)


VALUE = {"value.weight": Role.UNEMBEDDING, "value.bias": Role.UNEMBEDDING_BIAS}


@pytest.mark.parametrize("style", ["multiplier", "folded"])
def test_a_second_head_has_its_own_logit_multiplier(style):
    model, scaling = scale(ValueHead, roles=VALUE, style=style)
    scaling.init_(0.1)
    assert scaling.parameters["value.weight"].m_N == 2
    assert scaling.factors() == {"branch": 0.25, "logits head": 0.5, "logits value": 0.5}
    out, value = model(tokens(0))
    x = model.norm(model.run(model.embed(tokens(0))))
    plain = F.linear(x, model.value.weight, model.value.bias), F.linear(x, model.head.weight)
    if style == "multiplier":
        plain = plain[0] * 0.5, plain[1] * 0.5
    assert worst(value, plain[0]) < 1e-5
    assert worst(out, plain[1]) < 1e-5
    assert not model.value.bias.any()


def test_a_head_that_reads_something_else_is_refused():
    with pytest.raises(UserError, match=r"'value' does not read the stream after the blocks"):
        scale(EarlyValue, roles=VALUE)
    with pytest.raises(UserError, match=r"value\.weight, value\.bias make a result that does not come from the stream"):
        scale(EarlyValue)


# -- the scale on q·k --------------------------------------------------------------------------------


class WrittenOut(Heads):
    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        mask = torch.ones(scores.shape[-2:]).tril().bool()
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


class Einsum(Heads):
    def attend(self, q, k, v):
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("bhij,bhjd->bhid", torch.softmax(scores, dim=-1), v)


class ByHeadSize(Heads):
    """muP's own 1/d."""

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / q.shape[-1])


class ScaledBefore(Heads):
    """The queries are scaled, not the product."""

    def prepare(self, q, k):
        return q * q.shape[-1] ** -0.5, k

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


class ConstantScale(Heads):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)


class InlineNorm(Heads):
    def prepare(self, q, k):
        return (F.rms_norm(x, x.shape[-1:]) for x in (q, k))


class UnitVectors(Heads):
    """Products of unit vectors do not grow with the head size."""

    def prepare(self, q, k):
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=10.0)


MEASURED = {
    Heads: 2**-0.5,
    WrittenOut: 2**-0.5,
    Einsum: 2**-0.5,
    ByHeadSize: None,
    ScaledBefore: 2**-0.5,
    ConstantScale: 0.5,
    UnitVectors: None,
    NormModule: 2**-0.5,
}


@pytest.mark.parametrize("kind", MEASURED, ids=lambda k: k.__name__)
def test_the_scale_on_queries_and_keys_is_measured(kind):
    """Heads twice as large need half the scale on q·k. What the model lacks of that is added, and measured again."""
    model, scaling = scale(heads(kind), depth=2)
    factor = scaling.factors().get("attention")
    assert factor == (None if MEASURED[kind] is None else pytest.approx(MEASURED[kind], rel=1e-12))
    there = measure_forward(heads(kind)(32, 2), scaling.anatomy).attentions["blocks.0"]
    here = measure_forward(model, scaling.anatomy).attentions["blocks.0"]
    assert (here.head_size, there.head_size) == (32, 16)
    assert here.scale / there.scale == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("kind", [Heads, ConstantScale, ScaledBefore])
def test_the_factor_on_the_queries_folds(kind):
    model, scaling = scale(heads(kind), depth=2)
    scaling.init_(0.2)
    assert {"blocks.0.alice", "blocks.1.alice"} <= {m for mult in scaling.multipliers for m in mult.modules}
    assert changed_by_folding(model, scaling) < 1e-5


def test_sp_adds_nothing_to_attention():
    assert "attention" not in scale(heads(Heads), rules=SP)[1].factors()
    assert "attention" in scale(heads(Heads), rules=MUP)[1].factors()


def test_a_norm_takes_a_factor_on_the_queries_away():
    with pytest.raises(UserError, match=r"heads of 32 where the base has 16, and its queries are normalised") as e:
        scale(heads(InlineNorm), depth=2)
    assert "keep the head size at 16" in e.value.fix
    with pytest.raises(UserError, match="attention multiplier cannot be folded"):
        scale(heads(NormModule), depth=2, style="folded")


def test_keeping_the_head_size_needs_no_factor():
    class SixteenEach(InlineNorm):
        def split(self, x):
            return x.unflatten(-1, (-1, 16)).transpose(1, 2)

    assert set(scale(heads(SixteenEach))[1].factors()) == {"branch", "logits"}


class ByWidth(Heads):
    """The heads keep their size, the scale does not."""

    fused = False

    def split(self, x):
        return x.unflatten(-1, (-1, 16)).transpose(1, 2)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.norm.weight.shape[0] ** -0.5)

    def prepare(self, q, k):
        return super().prepare(F.rms_norm(q, (16,)) if self.fused else q, k)


def test_a_scale_that_depends_on_the_width_is_taken_out(monkeypatch):
    assert scale(heads(ByWidth))[1].factors()["attention"] == pytest.approx(2**0.5, rel=1e-3)
    monkeypatch.setattr(ByWidth, "fused", True)
    with pytest.raises(UserError, match=r"scales q·k by a number that depends on the size of the model"):
        scale(heads(ByWidth))


def test_a_factor_on_shared_queries_and_keys_would_act_twice():
    class Shared(Heads):
        def forward(self, x):
            h = self.norm(x)
            q = self.split(self.alice(h))
            return x + self.dave(self.attend(q, q, self.split(self.bob(self.carol(h)))).transpose(1, 2).flatten(2))

    with pytest.raises(UserError, match=r"its queries and keys are both the output of 'blocks\.0\.alice'"):
        scale(heads(Shared), depth=2)


def test_heads_that_grow_where_nothing_is_measured_are_refused():
    class Linear(Heads):
        """No softmax: nothing to see."""

        def __init__(self, width):
            super().__init__(width)
            self.head_dim = width // 2

        def attend(self, q, k, v):
            return q @ (k.transpose(-1, -2) @ v) / self.head_dim

    with pytest.raises(UserError, match=r"'blocks\.0' has heads of 32 where the base has 16.*cannot be measured"):
        scale(heads(Linear), depth=2)


# -- the model's own factors -------------------------------------------------------------------------


class OwnBranches(Model):
    def run(self, x):
        for block in self.blocks:
            x = x + block.branch(x) * (2 / self.depth)
        return x


class OwnLogits(Model):
    def forward(self, ids):
        return super().forward(ids) * (32 / self.width)


@pytest.mark.parametrize("kind", [OwnBranches, OwnLogits])
def test_own_factors_are_seen_on_the_meta_device(kind):
    with torch.device("meta"):
        model = kind(64, 8)
    for function in (parametrize, explain):
        with pytest.raises(UserError, match="the model itself multiplies"):
            function(model, base=lambda: kind(32, 2))


def test_own_factors_are_seen_in_a_large_model(monkeypatch):
    monkeypatch.setattr(forward, "LARGEST_CHECKED", 1000)
    with pytest.raises(UserError, match=r"the model itself multiplies 'blocks\.0\.down'"):
        scale(OwnBranches)
    assert scale(Model)[1].unchecked == ()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_model_of_seven_billion_parameters_is_checked():
    def llama(width, depth):
        more = {"num_attention_heads": width // 128, "num_key_value_heads": width // 128, "head_dim": 128}
        return huggingface("Llama", hidden_size=width, num_hidden_layers=depth, intermediate_size=2 * width, **more)(
            width, depth
        )

    with torch.device("meta"):
        model = llama(4096, 32)
    assert parametrize(model, base=lambda: llama(256, 2)).unchecked == ()


class Auxiliary(Model):
    """Keeps numbers of its last forward pass, as for an auxiliary loss."""

    always = False

    def forward(self, ids):
        out = super().forward(ids)
        if self.training or self.always:
            self.aux, self.all = out.square().mean(), {"losses": [out.mean()]}
        return out


class AlwaysAuxiliary(Auxiliary):
    always = True


@pytest.mark.parametrize("kind", [Auxiliary, AlwaysAuxiliary])
@pytest.mark.parametrize("by_shape", [False, True])
def test_a_model_that_keeps_numbers_of_its_forward_pass(kind, by_shape):
    model = kind(64, 8)
    model(tokens(0))
    aux = model.aux
    scaling = parametrize(model, base=Shape(32, 2) if by_shape else lambda: kind(32, 2))
    assert scaling.factors() == {"branch": 0.25, "logits": 0.5}
    assert model.aux is aux


class Mixing(nn.Module):
    """Attention whose scale cannot be measured, with two heads of unknown names that grow with the width."""

    def __init__(self, width, kind):
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(width)
        self.a, self.b, self.c, self.d = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        (batch, time, width), h = x.shape, self.norm(x)
        q, k, v = (m(h).view(batch, time, 2, width // 2).transpose(1, 2) for m in (self.a, self.b, self.c))
        w = q @ k.transpose(-1, -2) * (width // 2) ** -0.5
        if self.kind == "written out":
            w = w.exp() / w.exp().sum(-1, keepdim=True)
        elif self.kind == "entry by entry":
            w = ((q[..., :, None, :] * k[..., None, :, :]).sum(-1) * (width // 2) ** -0.5).softmax(-1)
        elif self.kind == "log":
            w = w.log_softmax(-1).exp()
        elif self.kind != "linear":
            w = getattr(torch, self.kind)(w) / time
        return x + self.d((w @ v).transpose(1, 2).flatten(2))


class Mixer(nn.Module):
    def __init__(self, width, depth, kind):
        super().__init__()
        self.table, self.norm, self.out = nn.Embedding(61, width), nn.LayerNorm(width), nn.Linear(width, 61)
        self.blocks = nn.ModuleList(Mixing(width, kind) for _ in range(depth))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


UNMEASURED = ["written out", "entry by entry", "linear", "relu", "sigmoid"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNMEASURED)
def test_attention_that_cannot_be_measured_is_said_where_its_heads_grow(kind):
    with pytest.warns(
        UserWarning, match=r"the scale on a product of activations in 'blocks\.\*', which sums over 2 times"
    ):
        scaling = parametrize(Mixer(64, 8, kind), base=lambda: Mixer(32, 2, kind))
    assert len(scaling.unchecked) == 1
    assert parametrize(Mixer(32, 8, kind), base=lambda: Mixer(32, 2, kind)).unchecked == ()
    optimizer = torch.optim.AdamW(scaling.init_(0.05).param_groups(1e-2))
    found = audit(
        scaling.model, optimizer, base=lambda: Mixer(32, 2, kind), lr=1e-2, eps=1e-8, weight_decay=0, std=0.05
    )
    assert found.verdict == "INCONCLUSIVE"


def test_a_log_softmax_is_measured():
    scaling = parametrize(Mixer(64, 8, "log"), base=lambda: Mixer(32, 2, "log"))
    assert scaling.factors()["attention"] == pytest.approx(0.5**0.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not checked")
def test_the_check_cannot_decide_about_attention_that_cannot_be_measured():
    options = {"widths": (32, 64, 128), "base": (32, 2), "workers": 1, "arguments": {"kind": "linear"}}
    found = check(Mixer, **options)
    assert found.verdict == "INCONCLUSIVE"
    assert [f.tensor for f in found.findings if f.word != "PASS"] == ["blocks.* (product of activations)"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not checked")
def test_with_a_shape_sides_that_need_not_grow_are_said_and_not_blamed():
    """Two key heads at every width, right by a factory: a Shape would scale ε of the keys in another way."""
    build = huggingface("Llama", **{**LLAMA_LIKE, "num_key_value_heads": 2})
    scaling = parametrize(build(128, 4), base=lambda: build(64, 2)).init_(0.05)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-2, eps=1e-8, weight_decay=0.1))
    keys = "model.layers.*.self_attn.k_proj.weight"
    unchecked = parametrize(build(128, 4), base=Shape(64, 2)).unchecked
    assert [keys in line for line in unchecked] == [True, False]
    values = {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1, "std": 0.05}
    found = audit(scaling.model, optimizer, base=Shape(64, 2), **values)
    assert found.verdict == "INCONCLUSIVE", found
    for group in optimizer.param_groups:
        group["eps"] *= 3
    assert any("k_proj" in d.name for d in audit(scaling.model, optimizer, base=Shape(64, 2), **values).departures)


def test_with_a_shape_it_is_said_what_was_not_checked():
    with pytest.warns(UserWarning, match=r"not checked: whether the factor 0\.25 on 'blocks\.\*\.down'"):
        scaling = parametrize(OwnBranches(64, 8), base=Shape(32, 2))
    assert len(scaling.unchecked) == 1
    explained = scaling.explain()
    assert "Not checked: whether the factor 0.25 on 'blocks.*.down'" in str(explained).replace("\n", " ")
    assert explained.to_json()["unchecked"] == list(scaling.unchecked)
    assert parametrize(Model(64, 8), base=Shape(32, 2)).unchecked == ()


class Counting(Model):
    """Needs all of its blocks."""

    def run(self, x):
        for i in range(self.depth):
            x = self.blocks[i](x)
        return x


def test_a_model_that_does_not_run_with_one_block_is_said_to_be_unchecked():
    with torch.device("meta"):
        model = Counting(64, 8)
    explained = explain(model, base=lambda: Counting(32, 2))  # says so, without a warning
    with pytest.warns(UserWarning, match="a copy with one block of each kind does not run"):
        scaling = parametrize(model, base=lambda: Counting(32, 2))
    assert scaling.factors() == {"branch": 0.25, "logits": 0.5}
    assert explained.unchecked == scaling.unchecked


class Embedded(Model):
    power = 0.0

    def embed(self, ids):
        return self.table(ids) * self.width**self.power


@pytest.mark.slow
@pytest.mark.parametrize("power", [1, 0.25, -0.5, 0.5, 0.0])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_any_power_of_the_width_on_the_embedding_is_taken_out(power, device):
    kind = type("Powered", (Embedded,), {"power": power})
    with torch.device(device):
        model = kind(64, 8)
    scaling = parametrize(model, base=lambda: kind(32, 2))
    assert scaling.factors().get("embedding", 1.0) == pytest.approx(2.0**-power, rel=1e-12)
    assert "embedding" not in parametrize(kind(64, 8), base=lambda: kind(32, 2), rules=SP).factors()


class Patches(Model):
    """An input projection, with its width in a factor after it."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.table = nn.Linear(7, width)

    def embed(self, x):
        return self.table(x) * self.width**0.5


class Pictures(Patches):
    image_size = 16

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.table = nn.Conv2d(3, width, 8, 8)

    def embed(self, x):
        return self.table(x).flatten(2).transpose(1, 2) * self.width**0.5


def test_a_picture_model_on_the_meta_device_is_reduced_in_depth_only():
    with torch.device("meta"):
        model = Pictures(256, 8)
    scaling = parametrize(model, base=lambda: Pictures(32, 2))
    assert scaling.unchecked == ()
    assert scaling.factors()["embedding"] == pytest.approx(8**-0.5)


def test_an_input_projection_is_an_embedding():
    x = torch.randn(2, 9, 7)
    model, scaling = scale(Patches, example=x)
    scaling.init_(0.1)
    assert scaling.factors()["embedding"] == pytest.approx(2**-0.5)
    nn.init.ones_(model.table.bias)
    assert changed_by_folding(model, scaling, x) < 1e-5


def test_a_factor_on_the_embedding_that_is_no_power_is_refused():
    class Odd(Model):
        def embed(self, ids):
            return self.table(ids) * math.log(self.width)

    with pytest.raises(UserError, match=r"multiplies 'table.weight' .* by no simple power: 3\.466 at the base, 4\.159"):
        scale(Odd)
    assert set(scale(Odd, rules=SP)[1].factors()) == {"branch", "logits"}  # SP takes nothing out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["timm-vit", "timm-vit-average", "torchvision-vit"])
def test_tokens_of_another_kind_are_no_factor(kind):
    """A class token stands beside those of the image."""
    model = ZOO[kind](64, 4)
    with pytest.warns(UserWarning, match="a Shape does not say"):
        unchecked = parametrize(model, base=Shape(32, 2)).unchecked
    assert [line[:16] for line in unchecked] == ["the scale on q·k"]


# -- training mode -----------------------------------------------------------------------------------


class TrainingBranch(Block):
    def __init__(self, width):
        super().__init__(width)
        self.extra = nn.Linear(width, width)

    def forward(self, x):
        x = super().forward(x)
        return x + self.extra(x) if self.training else x


class ShrinksInTraining(Block):
    def forward(self, x):
        return super().forward(x) if not self.training else 0.9 * x + self.branch(x)


class Dropping(Block):
    """Dropout in both forms, and in attention's."""

    def __init__(self, width):
        super().__init__(width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        h = F.dropout(self.norm(x), 0.5, self.training)
        q = h.unflatten(-1, (-1, 16)).transpose(1, 2)
        h = F.scaled_dot_product_attention(q, q, q, None, 0.3 * self.training, True).transpose(1, 2).flatten(2)
        return F.dropout(x + self.drop(self.down(F.gelu(self.up(h)))), 0.1, self.training)


def with_block(kind):
    return type(f"With{kind.__name__}", (Model,), {"block": kind})


def test_what_runs_in_training_mode_only_is_refused():
    with pytest.raises(UserError, match=r"blocks\.0\.extra\.bias, .* act on the logits in training mode only"):
        scale(with_block(TrainingBranch))
    with pytest.raises(UserError, match=r"with all writers .* at zero in training mode, the stream before") as error:
        scale(with_block(ShrinksInTraining))
    assert error.value.fix == "let forward do the same in both modes, except for dropout"


class FactorInTraining(Model):
    """What training mode multiplies by: a number per block, on the logits, or on the embedding."""

    def branch_factor(self, i):
        return 1.0

    def run(self, x):
        for i, block in enumerate(self.blocks):
            x = x + block.branch(x) * (self.branch_factor(i) if self.training else 1.0)
        return x


class DepthInTraining(FactorInTraining):
    def branch_factor(self, i):
        return self.depth**-0.5


class SameInTraining(FactorInTraining):
    def branch_factor(self, i):
        return 1.25


class LogitsInTraining(Model):
    def forward(self, ids):
        return super().forward(ids) * (self.width**-0.5 if self.training else 1.0)


class EmbeddingInTraining(Model):
    def embed(self, ids):
        return super().embed(ids) * (self.width**0.5 if self.training else 1.0)


class Scores(Block):
    """Attention whose scale is another one in training mode."""

    def scale_in_training(self, width):
        return 1 / width

    def branch(self, x):
        q = self.norm(x).unflatten(-1, (-1, 16)).transpose(1, 2)
        scale = self.scale_in_training(x.shape[-1]) if self.training else None
        h = F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=scale).transpose(1, 2).flatten(2)
        return self.down(F.gelu(self.up(h)))


class SameScores(Scores):
    def scale_in_training(self, width):
        return 0.1


@pytest.mark.parametrize(
    ("kind", "place", "sizes"),
    [
        (DepthInTraining, r"'blocks\.0\.down", r"0\.7071 at the base, 0\.3536 here"),
        (LogitsInTraining, "'head", r"0\.1768 at the base, 0\.125 here"),
        (EmbeddingInTraining, r"'table\.weight", r"5\.657 at the base, 8 here"),
        (with_block(Scores), r"q·k in 'blocks\.0", r"0\.125 at the base, 0\.0625 here"),
    ],
)
def test_a_factor_of_training_mode_alone_that_depends_on_the_size_is_named(kind, place, sizes):
    with pytest.raises(UserError, match=rf"in training mode only, the model multiplies {place}' by .* size: {sizes}"):
        scale(kind)


@pytest.mark.parametrize("kind", [SameInTraining, with_block(SameScores)])
def test_a_constant_factor_of_training_mode_alone_changes_nothing(kind):
    _, scaling = scale(kind)
    assert scaling.factors() == {"branch": 0.25, "logits": 0.5}
    assert scaling.unchecked == ()


@pytest.mark.slow
def test_check_and_audit_judge_the_factors_of_training_mode():
    """An implementation of the rules that only training mode has; without it the branches lack their multiplier."""

    def build(kind, width, depth):
        model = kind(width, depth)
        scaling = parametrize(Model(width, depth), base=lambda: Model(32, 2)).init_(0.02)
        model.load_state_dict(scaling.model.state_dict())
        tensors = dict(model.named_parameters())
        groups = [
            g | {"params": [tensors[n] for n in g["names"]]} for g in scaling.param_groups(1e-3, weight_decay=0.1)
        ]
        return model, torch.optim.AdamW(groups)

    class Right(FactorInTraining):
        def branch_factor(self, i):
            return 2 / self.depth

        def forward(self, ids):
            return super().forward(ids) * (32 / self.width)

    class Wrong(Right):
        def branch_factor(self, i):
            return 1.0

    def verdict(kind):
        return check(lambda width, depth: build(kind, width, depth), depths=(2, 4, 8), base=(32, 2), workers=1)

    assert verdict(Right).verdict == "PASS"
    wrong = verdict(Wrong)
    assert (wrong.verdict, {f.setting for f in wrong.culprits}) == ("FAIL", {"multiplier"})
    assert audit(*build(Right, 64, 8), base=lambda: build(Right, 32, 2), std=0.02).passed
    assert not audit(*build(Wrong, 64, 8), base=lambda: build(Wrong, 32, 2), std=0.02).passed


class StochasticDepth(Block):
    """Whole branches are dropped at random, with a rate per block."""

    rate, way = 0.3, "bernoulli"

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        keep = 1 - self.rate
        each = torch.empty(len(x), 1, 1)
        mask = each.bernoulli_(keep) if self.way == "bernoulli" else (keep + torch.rand_like(each)).floor()
        return x + self.branch(x) * mask / keep


class StochasticDepthOfMany(StochasticDepth):
    way = "floor"


def rising(kind):
    """The rate rises with depth, as is usual, so the factors that a mask is divided by depend on the depth."""

    class Rising(with_block(kind)):
        def __init__(self, width, depth):
            super().__init__(width, depth)
            for i, block in enumerate(self.blocks):
                block.rate = 0.2 * i / max(depth - 1, 1)

    return Rising


def test_stochastic_depth_is_no_factor():
    _, scaling = scale(rising(StochasticDepth))
    assert (scaling.factors(), scaling.unchecked) == ({"branch": 0.25, "logits": 0.5}, ())
    with pytest.warns(UserWarning, match="not checked: the factors on branches in training mode, which draws random"):
        scale(rising(StochasticDepthOfMany))


class Noise(Model):
    """Noise in one of several places, always or in training mode only."""

    place, always = "stream", False

    def noise(self, x):
        return torch.randn_like(x) / 4 if self.training or self.always else torch.zeros(())

    def embed(self, ids):
        x = super().embed(ids)
        return x + self.noise(x) if self.place == "embedding" else x

    def run(self, x):
        for block in self.blocks:
            h = block.norm(x)
            h = block.down(F.gelu(block.up(h + self.noise(h) if self.place == "branch" else h)))
            x = x + h
            x = x + self.noise(x) if self.place == "stream" else x
        return x


def noisy(place, always):
    return type("Noisy", (Noise,), {"place": place, "always": always})


@pytest.mark.parametrize(("always", "mode"), [(False, "training"), (True, "evaluation")])
def test_noise_on_the_stream_is_called_noise(always, mode):
    with pytest.raises(UserError, match=rf"draws random numbers in {mode} mode, and they reach the .* stream") as error:
        scale(noisy("stream", always))
    assert "remove the noise, or add it" in (error.value.fix or "")
    assert ("only in training, " in (error.value.fix or "")) == always


def test_noise_in_a_branch_in_evaluation_mode_is_not_called_nonlinear():
    with pytest.raises(UserError, match="draws random numbers in evaluation mode"):
        scale(noisy("branch", True))


@pytest.mark.parametrize("place", ["branch", "embedding", "nowhere"])
def test_the_advice_for_noise_works(place):
    _, scaling = scale(noisy(place, False))
    assert scaling.factors() == {"branch": 0.25, "logits": 0.5}


def test_dropout_is_no_difference_between_the_modes():
    model, scaling = scale(with_block(Dropping))
    assert scaling.unchecked == ()
    assert model.training


class NeedsTargets(Model):
    def forward(self, ids):
        if self.training:
            raise RuntimeError("no targets")
        return super().forward(ids)


def test_a_training_mode_that_cannot_be_run_is_said_to_be_unchecked():
    with pytest.warns(UserWarning, match=r"not checked: training mode, in which .* RuntimeError: no targets"):
        scale(NeedsTargets)


# -- norms are known by what they do -----------------------------------------------------------------


class RMS(Squash):
    """No `norm` in the name."""


class Plus(nn.Module):
    """A gain that is used as 1 + w, with a bias, by keyword."""

    def __init__(self, width):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, *, features):
        return F.layer_norm(features, features.shape[-1:]) * (1 + self.w) + self.b


class PlusBlock(Block):
    def __init__(self, width):
        super().__init__(width)
        self.norm = Plus(width)

    def branch(self, x):
        return self.down(F.gelu(self.up(self.norm(features=x))))


class RMSBlock(Block):
    def __init__(self, width):
        super().__init__(width)
        self.norm = RMS(width)


class WithRMS(Model):
    block = RMSBlock

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.norm = RMS(width)


def test_a_norm_by_any_name():
    model, scaling = scale(WithRMS)
    scaling.init_(0.1)
    assert roles(scaling)["blocks.*.norm.g"] is Role.BLOCK_NORM
    assert roles(scaling)["norm.g"] is Role.FINAL_NORM
    assert changed_by_folding(model, scaling) < 1e-5
    _, scaling = scale(with_block(PlusBlock))
    parts = {name.rpartition(".")[2]: r.part for name, r in scaling.parameters.items() if "blocks.0.norm" in name}
    assert (parts["w"].start, parts["w"].offset, parts["b"].start, parts["b"].offset) == (0.0, 1.0, 0.0, 0.0)


class Tanh(nn.Module):
    """Scale invariant only where it saturates."""

    def __init__(self, width):
        super().__init__()
        self.g = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.g * torch.tanh(x)


def test_what_does_not_normalise_is_no_norm():
    class Block2(Block):
        def __init__(self, width):
            super().__init__(width)
            self.norm = Tanh(width)

    _, scaling = scale(with_block(Block2))
    assert roles(scaling)["blocks.*.norm.g"] is Role.BLOCK_VECTOR


# -- other people's models ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nanochat_whose_norm_runs_twice():
    nanochat = huggingface("NanoChat", **LLAMA_LIKE)
    model = nanochat(64, 4)
    scaling = parametrize(model, base=lambda: nanochat(32, 2)).init_(0.1)
    assert scaling.factors() == {"branch": 0.5, "logits": 0.5}
    before = logits(model.eval(), tokens(0)).detach()
    scaling.fold()
    assert worst(logits(model, tokens(0)), before) < 1e-4


@pytest.mark.filterwarnings("ignore")
def test_a_classifier_that_pools_after_its_readout():
    import transformers

    def classifier(width, depth):
        sizes = {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": width}
        more = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "num_labels": 3, "head_dim": 16}
        return transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **more)
        )

    model = classifier(64, 4)
    scaling = parametrize(model, base=lambda: classifier(32, 2)).init_(0.1)
    assert scaling.factors() == {"branch": 0.5, "logits": 0.5}
    before = model.eval()(tokens(0)).logits.detach()
    scaling.fold()
    assert worst(model(tokens(0)).logits, before) < 1e-4


class BareBranch(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.v = nn.LayerNorm(width), nn.Linear(width, width)
        self.w = nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        return x + self.v(self.norm(x)) @ self.w


class TwoStacks(Model):
    block = BareBranch

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.more = nn.ModuleList(BareBranch(width) for _ in range(depth))

    def run(self, x):
        for block in self.more:
            x = block(x)
        return super().run(x)


def test_two_stacks_of_bare_branches():
    _, scaling = scale(TwoStacks, style="folded", roles={"*.w": Role.HIDDEN})
    assert scaling.factors() == {"branch blocks.0.w": 0.25, "branch more.0.w": 0.25, "logits": 0.5}
    scaling.load_state_dict(scaling.state_dict())
    assert len(list(scaling.explain())) == len(scaling.parameters)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inside_a_mode_without_gradients(mode):
    model = Model(64, 8)
    with mode():
        scaling = parametrize(model, base=lambda: Model(32, 2))
    assert scaling.state_dict() == scale(Model)[1].state_dict()


@pytest.mark.filterwarnings("ignore")
def test_gemma_on_the_meta_device_keeps_its_embedding_factor():
    """Its factor is a buffer, which has no value there."""
    with torch.device("meta"):
        model = ZOO["gemma3"](64, 4)
    scaling = parametrize(model, base=lambda: ZOO["gemma3"](32, 2))
    assert scaling.factors()["embedding"] == pytest.approx(2**-0.5)
    assert any("assumed to be the square root of its width" in line for line in scaling.unchecked)
