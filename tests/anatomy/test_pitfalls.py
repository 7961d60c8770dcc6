"""Models on which a careless library would find the wrong parts: handled correctly, or refused with the reason."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from completep import Role, UserError, audit, check, parametrize
from completep.model.gpt import gpt
from tests.rules.models import Block, Model, changed_by_folding, roles, scale
from tests.rules.training import VOCABULARY
from tests.rules.zoo import huggingface


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


def test_a_layer_scale_is_a_gate_on_the_branch():
    """The matrix before it holds the multiplier, and the scale keeps its constructor's values."""
    model, scaling = scale(LayerscaleModel, style="folded")
    assert roles(scaling)["blocks.*.gamma"] is Role.BLOCK_VECTOR
    assert scaling.parameters["blocks.0.gamma"].fold == 1.0
    assert scaling.parameters["blocks.0.down.weight"].fold == 0.25
    scaling.init_(0.1)
    assert model.blocks[0].gamma.tolist() == pytest.approx([1e-4] * 64)
    given = {"writers": ["*.gamma"], "roles": {"*.gamma": Role.BLOCK_NORM}}  # or say that the scale holds it
    model, scaling = scale(LayerscaleModel, style="folded", **given)
    assert scaling.parameters["blocks.0.gamma"].fold == 0.25


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


def test_what_is_not_what_it_is_called_is_no_norm():
    _, scaling = scale(FalseNormModel)
    assert roles(scaling)["blocks.*.norm.weight"] is Role.BLOCK_VECTOR
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

    def matrix(self):
        return self.w

    def branch(self, x):
        h = torch.einsum("btn,knf->btkf", self.norm(x), self.matrix()).sum(2)
        return self.down(F.gelu(h[..., : self.down.in_features]))


class MultipliedTensor(BareTensor):
    def matrix(self):
        return 0.5 * self.w


class HiddenTensor(BareTensor):
    def matrix(self):
        return self.w.abs()


def bare(kind, width, inner):
    model = Model(width)
    model.blocks = nn.ModuleList(kind(width, inner) for _ in range(2))
    for b in model.blocks:
        del b.up
    return model


@pytest.mark.parametrize("kind", [BareTensor, MultipliedTensor])
def test_the_fan_in_of_a_bare_tensor_is_seen_in_its_product(kind):
    scaling = parametrize(bare(kind, 64, 1024), base=lambda: bare(kind, 32, 64), roles={"*.w": Role.HIDDEN})
    r = scaling.parameters["blocks.0.w"]
    assert (r.m_N, r.m_out) == (2, 16)


def test_a_bare_tensor_whose_axes_grow_differently_is_refused():
    role = {"*.w": Role.HIDDEN}
    with pytest.raises(UserError, match="cannot tell which axis is its fan-in"):
        parametrize(bare(HiddenTensor, 64, 1024), base=lambda: bare(HiddenTensor, 32, 64), roles=role)
    scaling = parametrize(bare(HiddenTensor, 64, 128), base=lambda: bare(HiddenTensor, 32, 64), roles=role)
    assert scaling.parameters["blocks.0.w"].m_N == 2


class ByItself(nn.Module):
    """A block that holds its matrices itself, without modules, and multiplies what it adds by a constant."""

    def __init__(self, width, factor=1.0):
        super().__init__()
        self.factor = factor
        self.up, self.down = nn.Parameter(torch.randn(width, 2 * width)), nn.Parameter(torch.randn(2 * width, width))

    def forward(self, x):
        return x + self.factor * (F.gelu(F.rms_norm(x, x.shape[-1:]) @ self.up) @ self.down)


class OnTheMatrix(ByItself):
    """The constant is on the matrix, before its product."""

    def forward(self, x):
        down = self.down * self.factor
        return x + F.gelu(F.rms_norm(x, x.shape[-1:]) @ self.up) @ down


class DividedTransposed(ByItself):
    def forward(self, x):
        down = (self.down / torch.tensor(1 / self.factor)).T
        return x + F.linear(F.gelu(F.rms_norm(x, x.shape[-1:]) @ self.up), down)


class Shift(nn.Module):
    """One matrix alone is a layer."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        return x + x @ self.up


BARE = {"*.up": Role.HIDDEN, "*.down": Role.HIDDEN}


def of_blocks(kind, width, depth, *more):
    model = Model(width, depth)
    model.blocks = nn.ModuleList(kind(width, *more) for _ in range(depth))
    return model


def test_blocks_of_bare_parameters_are_blocks():
    def scaled(kind):
        base = lambda: of_blocks(kind, 32, 2)  # noqa: E731
        return parametrize(of_blocks(kind, 64, 8), base=base, roles=BARE, style="folded")

    scaling = scaled(ByItself)
    assert (scaling.base.depth, scaling.target.depth) == (2, 8)
    assert scaling.factors()["branch"] == 0.25
    with pytest.raises(UserError, match="no repeated blocks"):
        scaled(Shift)


@pytest.mark.parametrize("kind", [ByItself, OnTheMatrix, DividedTransposed])
def test_a_factor_of_the_models_own_on_bare_parameters_is_measured(kind):
    def build(width, depth):
        return of_blocks(kind, width, depth, 6 / depth)

    with pytest.raises(UserError, match=r"the model itself multiplies 'blocks\.0\.down' .*: 3 at the base, 0\.75 here"):
        parametrize(build(64, 8), base=lambda: build(32, 2), roles=BARE, style="folded")


def by_hand(kind, power, width, depth):
    """CompleteP on bare parameters, written out, with a branch multiplier of one's own."""
    model = of_blocks(kind, width, depth, (depth / 2) ** power)
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 32 / width,))
    scaling = parametrize(Model(width, depth), base=lambda: Model(32, 2))
    groups = []
    for name, p in model.named_parameters():
        known = name if "blocks" not in name else f"{name}.weight"
        f = scaling.settings(known)
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.05 * f.init_std)
        groups.append({"params": [p], "lr": 1e-3 * f.lr, "eps": 1e-8 * f.eps, "weight_decay": 0.1 * f.weight_decay})
    return model, torch.optim.AdamW(groups)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ByItself, OnTheMatrix])
@pytest.mark.parametrize(("power", "word"), [(-1, "PASS"), (-0.5, "FAIL"), (0, "FAIL")])
def test_check_and_audit_see_a_multiplier_on_bare_parameters(kind, power, word):
    build = partial(by_hand, kind, power)
    checked = check(build, depths=(2, 4, 8), base=(32, 2), roles=BARE, workers=1)
    assert checked.verdict == word
    assert {(f.tensor, f.setting) for f in checked.culprits} <= {("blocks.*.down", "multiplier")}
    audited = audit(*build(64, 8), base=lambda: build(32, 2), std=0.05, roles=BARE)
    assert audited.verdict == word
    assert {d.quantity for d in audited.departures} <= {"multiplier"}


@pytest.mark.slow
def test_check_folds_multipliers_that_no_module_can_hold():
    build = partial(of_blocks, ByItself)
    assert check(build, depths=(2, 4, 8), base=(32, 2), roles=BARE, workers=1, std=0.05).verdict == "PASS"
    assert check(build, depths=(2, 4, 8), base=(32, 2), roles=BARE, workers=1, std=0.05, rules="mup").verdict == "FAIL"


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


@pytest.mark.slow
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
