"""Models on which a careless library would be silently wrong: each is handled right, or refused with the reason."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from completep import COMPLETEP, MUP, Role, UserError, audit, parametrize
from completep.model.gpt import gpt
from completep.rules.table import literature
from tests.rules.training import VOCABULARY, logits, step, tokens, worst
from tests.rules.zoo import ZOO, huggingface


class Block(nn.Module):
    def __init__(self, width, inner=None):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner or 2 * width), nn.Linear(inner or 2 * width, width)

    def branch(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return x + self.branch(x)


class Model(nn.Module):
    """Embedding, blocks, norm, head; the tests change one thing at a time."""

    block = Block

    def __init__(self, width, depth=2):
        super().__init__()
        self.width, self.depth = width, depth
        self.table = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(self.block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def embed(self, ids):
        return self.table(ids)

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids):
        return self.head(self.norm(self.run(self.embed(ids))))


def scale(kind, width=64, depth=8, base=(32, 2), **options):
    model = kind(width, depth)
    return model, parametrize(model, base=lambda: kind(*base), **options)


def roles(scaling):
    return {r.template: r.role for r in scaling.parameters.values()}


def changed_by_folding(model, scaling, inputs=None):
    inputs = tokens(0) if inputs is None else inputs
    before = logits(model, inputs).detach()
    scaling.fold()
    return worst(logits(model, inputs), before)


def test_the_plain_one_is_fine():
    model, scaling = scale(Model)
    scaling.init_(0.2)
    assert changed_by_folding(model, scaling) < 1e-5


# -- what runs, and how often ------------------------------------------------------------------------


class Looped(Model):
    """Two blocks, applied over and over: depth is not the number of modules."""

    def __init__(self, width, depth):
        super().__init__(width, 2)
        self.loops = depth // 2

    def run(self, x):
        for _ in range(self.loops):
            x = super().run(x)
        return x


class OneNorm(Model):
    """One norm after the embedding and at the end."""

    def embed(self, ids):
        return self.norm(self.table(ids))


class MixedTwice(Block):
    def __init__(self, width):
        super().__init__(width)
        self.mix = nn.Linear(width, width)

    def branch(self, x):
        return self.mix(F.gelu(self.mix(self.norm(x))))


class TwiceInABranch(Model):
    block = MixedTwice


@pytest.mark.parametrize("kind", [Looped, OneNorm, TwiceInABranch])
def test_a_module_that_runs_twice_is_refused(kind):
    with pytest.raises(UserError, match=r"runs \d times in one forward pass"):
        scale(kind, base=(32, 4))


# -- the stream must be a plain sum ------------------------------------------------------------------


class BareBlock(Block):
    def forward(self, x):
        return self.branch(x)


class Shrinking(Model):
    def run(self, x):
        for block in self.blocks:
            x = 0.9 * x + block.branch(x)
        return x


class ShrinkingBare(Shrinking):
    def run(self, x):
        for block in self.blocks:
            x = 0.9 * x + block(x) - x
        return x


class Injected(Model):
    """The embedding is added again after every block."""

    def run(self, x):
        first = x
        for block in self.blocks:
            x = block(x) + first
        return x


class ShrinkingOutside(Model):
    block = BareBlock

    def run(self, x):
        for block in self.blocks:
            x = 0.9 * x + block(x)
        return x


@pytest.mark.parametrize("kind", [Shrinking, ShrinkingBare, Injected, ShrinkingOutside])
def test_a_stream_that_changes_between_blocks_is_refused(kind):
    with pytest.raises(UserError, match=r"the stream before 'blocks\.1(\.norm)?' is not what it was before 'blocks\.0"):
        scale(kind)


class Pairs(Model):
    """Blocks that are never called themselves: `for attention, mlp in self.layers`."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.blocks = nn.ModuleList(nn.ModuleList([BareBlock(width), BareBlock(width)]) for _ in range(depth))

    def run(self, x):
        for first, second in self.blocks:
            x = first(x) + x
            x = second(x) + x
        return x


def test_blocks_that_are_never_called_themselves():
    model, scaling = scale(Pairs)
    scaling.init_(0.2)
    assert len(scaling.multipliers[0].modules) == 16
    assert changed_by_folding(model, scaling) < 1e-5


class Squashed(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


class SquashedBlock(Block):
    def __init__(self, width):
        super().__init__(width)
        self.down = Squashed(2 * width, width)


class SquashedWriter(Model):
    block = SquashedBlock


class SquashedHead(Model):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.head = Squashed(width, VOCABULARY)


def test_a_writer_or_readout_that_is_not_linear_is_refused():
    with pytest.raises(UserError, match=r"not linear in blocks\.\d\.down\.weight"):
        scale(SquashedWriter)
    with pytest.raises(UserError, match="the readout 'head' is not linear"):
        scale(SquashedHead)


@pytest.mark.parametrize("writers", [["blocks.*.mlp.*", "blocks.*.attention.*"], "blocks.*.mlp.*", "*"])
def test_too_many_named_writers_are_refused(writers):
    with pytest.raises(UserError, match=r"adds nothing to the stream|is not what it was|still changes"):
        parametrize(gpt(64, 4, 61, head_size=16), base=lambda: gpt(32, 2, 61, head_size=16), writers=writers)


def test_one_pattern_is_a_pattern():
    _, one = scale(Model, writers="*.down.*")
    _, many = scale(Model, writers=["*.down.*"])
    assert one.state_dict() == many.state_dict() == scale(Model)[1].state_dict()


class Layerscale(Block):
    def __init__(self, width):
        super().__init__(width)
        self.gamma = nn.Parameter(torch.full((width,), 1e-4))

    def forward(self, x):
        return x + self.gamma * self.branch(x)


class LayerscaleModel(Model):
    block = Layerscale


def test_a_layer_scale_is_refused_and_the_advice_works():
    with pytest.raises(UserError, match="takes in the result of Mul") as e:
        scale(LayerscaleModel)
    assert "writers=" in e.value.fix
    advice = {"writers": ["*.gamma"], "roles": {"*.gamma": Role.BLOCK_NORM}}
    model, scaling = scale(LayerscaleModel, style="folded", **advice)
    assert scaling.parameters["blocks.0.gamma"].fold == 0.25
    scaling.init_(0.1)
    assert model.blocks[0].gamma.tolist() == pytest.approx([0.25 * 1e-4] * 64)  # as constructed, folded


# -- roles -------------------------------------------------------------------------------------------


class Pooled(Model):
    def forward(self, ids):
        return self.head(self.norm(self.run(self.embed(ids)).mean(1)))


def test_pooling_before_the_final_norm_makes_no_qk_norms():
    _, scaling = scale(Pooled)
    assert roles(scaling)["blocks.*.norm.weight"] is Role.BLOCK_NORM


class NormLinear(nn.Linear):
    """A linear layer with an unlucky name."""


class UnluckyBlock(Block):
    def __init__(self, width):
        super().__init__(width)
        self.up = NormLinear(width, 2 * width)


class Unlucky(Model):
    block = UnluckyBlock


class LN(nn.LayerNorm):
    """A norm without the word in its name."""


class AnnotatedLayerNorm(nn.Module):
    """The Annotated Transformer's."""

    def __init__(self, width):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b_2


class NamelessBlock(Block):
    def __init__(self, width):
        super().__init__(width)
        self.norm = LN(width)


class Nameless(Model):
    block = NamelessBlock


class AnnotatedBlock(Block):
    def __init__(self, width):
        super().__init__(width)
        self.norm = AnnotatedLayerNorm(width)


class Annotated(Model):
    block = AnnotatedBlock


class Gainless(Model):
    """OLMo's final norm has no parameters."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)


def test_norms_are_known_by_what_they_do():
    assert roles(scale(Unlucky)[1])["blocks.*.up.weight"] is Role.HIDDEN
    assert roles(scale(Nameless)[1])["blocks.*.norm.weight"] is Role.BLOCK_NORM
    model, scaling = scale(Annotated)
    scaling.init_(0.1)
    assert roles(scaling)["blocks.*.norm.a_2"] is roles(scaling)["blocks.*.norm.b_2"] is Role.BLOCK_NORM
    assert (model.blocks[0].norm.a_2 == 1).all()
    assert (model.blocks[0].norm.b_2 == 0).all()
    assert changed_by_folding(*scale(Gainless)) < 1e-5


class FalseNorm(nn.Module):
    """Called a norm, normalises nothing."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x


class FalseNormBlock(Block):
    def __init__(self, width):
        super().__init__(width)
        self.norm = FalseNorm(width)


class FalseNormModel(Model):
    block = FalseNormBlock


class ValueTable(Model):
    """A second table, read inside the branches only."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.values = nn.Embedding(VOCABULARY, width)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + block.down(F.gelu(block.up(block.norm(x)))) * 1.0
        return self.head(self.norm(x)) + 0 * self.values(ids).sum()


class UnusedTable(Model):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.values = nn.Embedding(VOCABULARY, width)


def test_what_is_not_what_it_is_called_has_no_role():
    with pytest.raises(UserError, match=r"no role: blocks\.\*\.norm\.weight") as e:
        scale(FalseNormModel)
    assert "Role.BLOCK_NORM" in e.value.fix
    with pytest.raises(UserError, match=r"no role: values\.weight"):
        scale(UnusedTable)


class BareReadout(Model):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        del self.head

    def forward(self, ids):
        return F.linear(self.norm(self.run(self.embed(ids))), self.table.weight)


def test_a_bare_tied_readout_as_wide_as_the_vocabulary():
    _, scaling = scale(BareReadout, width=2 * VOCABULARY, base=(VOCABULARY, 2), style="folded")
    assert scaling.factors()["logits"] == 0.5
    assert scaling.parameters["table.weight"].m_N == 2
    with pytest.raises(UserError, match="no module to act on"):
        scale(BareReadout)


class TiedBare(Model):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.norm = nn.Identity()
        self.head.weight = self.table.weight


def test_tied_without_a_final_norm_cannot_be_folded():
    _, scaling = scale(TiedBare)
    with pytest.raises(UserError, match="cannot be folded"):
        scaling.fold()
    assert scaling.style == "multiplier"
    with pytest.raises(UserError, match="cannot be folded"):
        scale(TiedBare, style="folded")


class BareTensor(Block):
    def __init__(self, width, inner=None):
        super().__init__(width)
        self.w = nn.Parameter(torch.randn(2, width, inner or 2 * width) * 0.1)

    def branch(self, x):
        h = torch.einsum("btn,knf->btkf", self.norm(x), self.w).sum(2)
        return self.down(F.gelu(h[..., : self.down.in_features]))


def test_a_bare_tensor_whose_axes_grow_differently_is_refused():
    def build(width, inner):
        model = Model(width)
        model.blocks = nn.ModuleList(BareTensor(width, inner) for _ in range(2))
        for b in model.blocks:
            del b.up
        return model

    role = {"*.w": Role.HIDDEN}
    with pytest.raises(UserError, match="cannot tell which axis is its fan-in"):
        parametrize(build(64, 1024), base=lambda: build(32, 64), roles=role)
    assert parametrize(build(64, 128), base=lambda: build(32, 64), roles=role).parameters["blocks.0.w"].m_N == 2


class Mixed(nn.Module):
    """Everything in one numbered list."""

    def __init__(self, width, depth):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.body = nn.Sequential(*[Block(width) for _ in range(depth)], nn.LayerNorm(width))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        return self.head(self.body(self.table(ids)))


def test_strangers_among_the_blocks_are_named():
    with pytest.raises(UserError, match=r"'body\.8' \(LayerNorm\) is numbered among the blocks"):
        scale(Mixed)


# -- the model's own factors -------------------------------------------------------------------------


class OwnMultipliers(Model):
    def run(self, x):
        for block in self.blocks:
            x = x + block.branch(x) * (2 / self.depth)
        return x


class OwnLogits(Model):
    def forward(self, ids):
        return super().forward(ids) * (32 / self.width)


@pytest.mark.parametrize(("kind", "site"), [(OwnMultipliers, "blocks.0.down"), (OwnLogits, "head")])
def test_a_model_that_scales_itself_is_refused(kind, site):
    with pytest.raises(UserError, match=f"the model itself multiplies '{site}'"):
        scale(kind)


class ConstantEmbedding(Model):
    def embed(self, ids):
        return self.table(ids) * 32**0.5  # sqrt of the base's width, by chance


class RootEmbedding(Model):
    def embed(self, ids):
        return self.table(ids) * self.width**0.5


def test_a_constant_is_not_taken_for_the_root_of_the_width():
    assert "embedding" not in scale(ConstantEmbedding)[1].factors()
    assert scale(RootEmbedding)[1].factors()["embedding"] == pytest.approx(2**-0.5)


# -- heads -------------------------------------------------------------------------------------------


class NanoAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.n_head, self.n_embd = heads, width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class NanoBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), NanoAttention(width, 2)

    def forward(self, x):
        return x + self.attn(self.norm(x))


class Nano(Model):
    block = NanoBlock


def test_head_size_is_read_from_the_number_of_heads():
    with pytest.raises(UserError, match="heads of 32 where the base has 16"):
        scale(Nano)


@pytest.mark.filterwarnings("ignore")
def test_growing_heads_under_a_scale_that_is_not_a_root():
    def gemma(width, head):
        sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        return huggingface("Gemma3Text", head_dim=head, intermediate_size=width, **sizes)(width, 2)

    scaling = parametrize(gemma(64, 32), base=lambda: gemma(32, 16))
    assert scaling.factors()["attention"] == pytest.approx(0.5)  # its scale is a constant, so all of 1/d is missing


def test_the_reference_decoder_divides_by_its_head_size_already():
    def decoder(head):
        return gpt(64, 2, 61, head_size=head)

    assert set(parametrize(decoder(32), base=lambda: decoder(16)).factors()) == {"branch", "logits"}


# -- wrappers, buffers, optimizers -------------------------------------------------------------------


def test_checkpoint_wrapped_blocks_are_all_hooked():
    model = Model(64, 8)
    for i in range(0, 8, 2):
        model.blocks[i] = checkpoint_wrapper(model.blocks[i])
    scaling = parametrize(model, base=lambda: Model(32, 2)).init_(0.2)
    assert len(scaling.multipliers[0].modules) == 8
    plain, theirs = scale(Model)
    theirs.init_(0.2)
    assert worst(model(tokens(0)), plain(tokens(0))) < 1e-6
    assert changed_by_folding(model, scaling) < 1e-5


class KeywordHead(Model):
    def forward(self, ids):
        return self.head(input=self.norm(self.run(self.embed(ids))))


def test_a_readout_that_is_called_by_keyword():
    model, scaling = scale(KeywordHead)
    scaling.init_(0.2)
    assert changed_by_folding(model, scaling) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_buffers_from_the_meta_device_are_not_forgotten():
    with torch.device("meta"):
        model = ZOO["llama"](64, 4)
    scaling = parametrize(model, base=lambda: ZOO["llama"](32, 2))
    model.to_empty(device="cpu")
    with pytest.raises(UserError, match="inv_freq"):
        scaling.init_(0.1)
    real = ZOO["llama"](64, 4)
    for (_, b), (_, r) in zip(model.named_buffers(), real.named_buffers(), strict=True):
        b.copy_(r)
    scaling.init_(0.1, buffers_filled=True)
    parametrize(real, base=lambda: ZOO["llama"](32, 2)).init_(0.1)
    assert worst(logits(model, tokens(0)), logits(real, tokens(0))) < 1e-5


class Padded(Model):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.table = nn.Embedding(VOCABULARY, width, padding_idx=3)


def test_a_padding_row_stays_zero():
    model, scaling = scale(Padded)
    scaling.init_(0.1)
    assert not model.table.weight[3].any()
    assert model.table.weight[4].any()


def test_muon_and_adamw_fold_together():
    outs = []
    for fold in (False, True):
        model, scaling = scale(Model)
        model.double()
        scaling.init_(0.2)
        muon = torch.optim.Muon(scaling.param_groups(0.02, weight_decay=0.1, optimizer="muon"))
        adamw = torch.optim.AdamW(scaling.param_groups(0.01, eps=1e-9, roles=set(Role) - {Role.HIDDEN}))
        for i in range(12):
            if fold and i == 6:
                with pytest.raises(UserError, match="no optimizer that was given holds"):
                    scaling.fold(muon)
                assert scaling.style == "multiplier"
                scaling.fold(muon, adamw)
            step(model, adamw, i, clip=muon.step)
            muon.zero_grad()
        outs.append(model(tokens(50)).detach())
    assert worst(outs[1], outs[0]) < 1e-2  # Muon itself works in bfloat16


def test_muon_keeps_the_decay_per_step():
    class Thin(Block):
        def __init__(self, width):
            super().__init__(width, 16)

    class ThinModel(Model):
        block = Thin

    _, scaling = scale(ThinModel, width=256, base=(32, 8))
    groups = scaling.param_groups(0.02, weight_decay=0.1, optimizer="muon")
    assert {round(g["lr"] * g["weight_decay"], 12) for g in groups} == {0.002}
    assert len({g["lr"] for g in groups}) > 1
    assert {g["adjust_lr_fn"] for g in groups} == {"original"}


def test_epsilon_follows_the_fan_out():
    """A gradient is shared out over the outputs it flows back from: measured, then compared with the rule."""

    def build(inner):
        model = Model(64)
        model.blocks = nn.ModuleList(Block(64, inner) for _ in range(2))
        return model

    wide, narrow = build(2048), build(64)
    scaling = parametrize(wide, base=lambda: build(64), rules=MUP).init_(0.5)
    parametrize(narrow, base=lambda: build(64), rules=MUP).init_(0.5)
    sizes = {}
    for model in (wide, narrow):
        optimizer = torch.optim.AdamW(parametrize_groups(scaling if model is wide else None, model), lr=1e-2)
        for i in range(5):
            step(model, optimizer, i)
        sizes[model] = {n: p.grad.square().mean().sqrt().item() for n, p in model.named_parameters() if "blocks.0" in n}
    eps = {n: g["eps"] for g in scaling.param_groups(1.0, eps=1.0) for n in g["names"]}
    ratio = {n: sizes[wide][n] / sizes[narrow][n] for n in sizes[wide]}
    assert eps["blocks.0.up.weight"] == pytest.approx(1 / 32)
    assert eps["blocks.0.down.weight"] == pytest.approx(1.0)
    assert ratio["blocks.0.down.weight"] > 0.3
    assert ratio["blocks.0.up.weight"] < 0.3


def parametrize_groups(scaling, model):
    return scaling.param_groups(1e-2) if scaling is not None else list(model.parameters())


def test_folding_between_backward_and_step():
    outs = []
    for fold in (False, True):
        model, scaling = scale(Model)
        model.double()
        scaling.init_(0.2)
        optimizer = torch.optim.AdamW(scaling.param_groups(1e-2, eps=1e-4))
        clip = (lambda s=scaling, o=optimizer: s.fold(o)) if fold else None
        step(model, optimizer, 0, clip=clip)
        outs.append(model(tokens(50)).detach())
    assert worst(outs[1], outs[0]) < 1e-10


@pytest.mark.parametrize("floor", [{"eta_min": 1e-4}])
def test_a_floor_for_all_groups_breaks_the_ratios_and_fold_says_so(floor):
    _, scaling = scale(Model, width=512)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-3))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4, **floor)
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    assert len({g["lr"] / g["lr_scale"] for g in optimizer.param_groups}) > 1
    with pytest.raises(UserError, match="one floor for all groups"):
        scaling.fold(optimizer, schedulers=[scheduler])


def test_rules_without_a_column_say_so():
    _, scaling = scale(Model, rules=literature(0.5))
    with pytest.raises(UserError, match="has no SGD column"):
        scaling.param_groups(0.1, optimizer="sgd")
    with pytest.raises(UserError, match="'nonsense' is no role"):
        scale(Model)[1].param_groups(0.1, roles=["nonsense"])


# -- audit -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_audit_says_what_it_did_not_check_and_finds_a_missing_embedding_factor():
    def qwen(width, head):
        sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        return huggingface("Qwen3", head_dim=head, intermediate_size=width, **sizes)(width, 2)

    model = qwen(64, 32)
    scaling = parametrize(model, base=lambda: qwen(32, 16)).init_(0.1)
    found = audit(model, torch.optim.AdamW(scaling.param_groups(1e-3)), base=lambda: qwen(32, 16))
    assert any("attention multiplier is not checked" in note for note in found.notes)

    gemma = ZOO["gemma"](64, 4)
    scaling = parametrize(gemma, base=lambda: ZOO["gemma"](32, 2)).init_(0.1)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-3, weight_decay=0.1))
    assert audit(gemma, optimizer, base=lambda: ZOO["gemma"](32, 2)).passed
    gemma.model.embed_tokens._forward_hooks.clear()
    missing = audit(gemma, optimizer, base=lambda: ZOO["gemma"](32, 2)).departures
    assert {d.role for d in missing} == {"embedding multiplier"}


def test_audit_sees_weight_decay_in_the_gradient():
    model, scaling = scale(Model)
    scaling.init_(0.1)
    groups = scaling.param_groups(1e-3, weight_decay=0.1)
    found = audit(model, torch.optim.Adam(groups), base=lambda: Model(32, 2))
    assert {d.quantity for d in found.departures} == {"weight_decay"}
    assert "use AdamW" in found.departures[0].cause


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parametrize("model", base=lambda: Model(32)), "model is a str"),
        (lambda: parametrize(Model(64), base=lambda: 1 / 0), "ZeroDivisionError"),
        (lambda: parametrize(Model(64), base=lambda: Model(32), roles=["x"]), "is not a mapping"),
        (lambda: parametrize(Model(64), base=lambda: Model(32), specimen=3), "specimen=3"),
        (lambda: audit(Model(64), "x", base=lambda: Model(32)), "optimizer is a str"),
    ],
)
def test_wrong_kinds_of_things(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_growth_is_what_it_should_be():
    _, scaling = scale(Model, rules=COMPLETEP)
    assert scaling.factors() == {"branch": 0.25, "logits": 0.5}
    assert math.isclose(scaling.parameters["blocks.7.down.weight"].m_L, 4)
