"""An error that suggests roles=, writers= or style= is tried out: the suggestion must work."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from completep import Role, UserError, parametrize
from tests.rules.models import Block, Model, NormModule, ValueHead, changed_by_folding, heads, roles
from tests.rules.training import VOCABULARY, logits, tokens
from tests.rules.zoo import LLAMA_LIKE, ZOO, huggingface

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of other people's models


def advised(fix):
    """The arguments that a fix suggests, as a user would paste them."""
    found = re.search(r"((?:writers|roles|style)=.*)$", fix)
    assert found, fix
    pasted = re.sub(r"(style='\w+'),.*$", r"\1", found.group(1))  # "style='multiplier', or …"
    return eval(f"dict({pasted})", {"Role": Role})


def follow(build, **arguments):
    """(model, scaling, arguments) after following all advice, each piece of which must bring something new."""
    for _ in range(4):
        model = build(64, 4)
        try:
            return model, parametrize(model, base=lambda: build(32, 2), **arguments), arguments
        except UserError as error:
            new = advised(error.fix)
        new["roles"] = {**arguments.get("roles", {}), **new.get("roles", {})}
        assert {**arguments, **new} != arguments
        arguments |= new
    raise AssertionError(arguments)


class IdleHead(Model):
    """A value head that forward uses in training mode, or never."""

    ever = False

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.value = nn.Linear(width, 1)

    def forward(self, ids):
        h = self.norm(self.run(self.embed(ids)))
        return (self.head(h), self.value(h)) if self.ever and self.training else self.head(h)


class TrainingHead(IdleHead):
    ever = True


class ReturnedHead(IdleHead):
    def forward(self, ids):
        h = self.norm(self.run(self.embed(ids)))
        return self.head(h), self.value(h)


@pytest.mark.parametrize("kind", [IdleHead, TrainingHead])
def test_a_head_that_forward_does_not_use_is_given_no_role(kind):
    """A role without the logit multiplier would be wrong for it. Both ways out are tried."""
    with pytest.raises(UserError, match=r"forward does not use value\.weight, value\.bias") as error:
        parametrize(kind(64, 8), base=lambda: kind(32, 2))
    assert "Role." not in str(error.value)
    assert "let forward return the result" in error.value.fix
    returned = parametrize(ReturnedHead(64, 8), base=lambda: ReturnedHead(32, 2))
    assert any("value" in m.modules for m in returned.multipliers if m.kind == "logits")

    def removed(width, depth):
        model = kind(width, depth)
        model.value, model.ever = None, False
        return model

    assert parametrize(removed(64, 8), base=lambda: removed(32, 2)).factors() == {"branch": 0.25, "logits": 0.5}


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        return x * self.gamma


class GateBlock(Block):
    """LayerScale as a module, as in DINOv2 and timm."""

    def __init__(self, width):
        super().__init__(width)
        self.scale = Gate(width)

    def forward(self, x):
        return x + self.scale(self.branch(x))


class BareGateBlock(Block):
    """LayerScale as a bare parameter, on one of two branches."""

    def __init__(self, width):
        super().__init__(width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))
        self.other = nn.Linear(width, width)

    def forward(self, x):
        x = x + self.gamma * self.branch(x)
        return x + self.other(self.norm2(x)) if hasattr(self, "norm2") else x + self.other(x)


class Decay(Block):
    """A bare vector and a bare scalar that act elementwise, and a bare matrix."""

    def __init__(self, width):
        super().__init__(width)
        self.log_decay = nn.Parameter(torch.linspace(-2, 0, 2 * width))
        self.table = nn.Parameter(torch.rand(2 * width, 3) + 0.5)  # elementwise, although it has two axes
        self.mix = nn.Parameter(torch.randn(width, width) * width**-0.5)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def branch(self, x):
        h = self.up(self.norm(x) @ self.mix) * self.log_decay.exp()
        return self.down(F.gelu(h.unsqueeze(-1) * self.table).sum(-1) * self.gain)


class BareMatrices(Block):
    """Bare matrices whose axes grow differently."""

    def __init__(self, width):
        super().__init__(width)
        heads = width // 16
        self.inside = nn.Parameter(torch.randn(heads, 16, 16) / 4)
        self.narrow = nn.Parameter(torch.randn(width, 8) * width**-0.5)
        self.widen = nn.Parameter(torch.randn(8, width) * 8**-0.5)

    def branch(self, x):
        h = self.norm(x).unflatten(-1, (-1, 16))
        h = torch.einsum("bthd,hde->bthe", h, self.inside).flatten(-2)
        return self.down(F.gelu(self.up(F.linear(h @ self.narrow, self.widen.T))))


def with_block(kind):
    return type(f"With{kind.__name__}", (Model,), {"block": kind})


class Untrained(Model):
    """A table and a vector that the logits hardly use."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.values, self.shift = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.zeros(width))


class BareReadout(Model):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        del self.head

    def forward(self, ids):
        return F.linear(self.norm(self.run(self.embed(ids))), self.table.weight)


def cohere(width, depth):
    return huggingface("Cohere", use_qk_norm=True, **{k: v for k, v in LLAMA_LIKE.items() if k != "head_dim"})(
        width, depth
    )


def transformers_model(name, width, depth, **options):
    import transformers

    sizes = {"vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": depth, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**sizes, eos_token_id=0, bos_token_id=0, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


def mamba(width, depth):
    return transformers_model("Mamba", width, depth, state_size=8)


def mamba2(width, depth):
    options = {"state_size": 8, "head_dim": 16, "num_heads": width // 8, "n_groups": 1, "chunk_size": 4}
    return transformers_model("Mamba2", width, depth, **options)


def diffllama(width, depth):
    heads = {"num_attention_heads": width // 16, "num_key_value_heads": width // 16, "head_dim": 16}
    return transformers_model("DiffLlama", width, depth, intermediate_size=2 * width, **heads)


def hybrid(name):
    def build(width, depth):
        return transformers_model(
            name, width, depth, num_attention_heads=width // 16, num_key_value_heads=width // 32, head_dim=16,
            intermediate_size=2 * width, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0,
            linear_num_key_heads=width // 16, linear_num_value_heads=width // 8, mlp_only_layers=list(range(depth)),
            layer_types=["linear_attention", "full_attention"] * (depth // 2),
        )  # fmt: skip

    return build


def dinov2(width, depth):
    import transformers

    sizes = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": width // 16, "mlp_ratio": 2}
    config = transformers.Dinov2Config(image_size=16, patch_size=8, num_labels=3, **sizes)
    return transformers.Dinov2ForImageClassification(config)


NO_ADVICE = {
    "value head": ValueHead,
    "layer scale": with_block(GateBlock),
    "bare layer scale": with_block(BareGateBlock),
    "mamba": mamba,
    "mamba2": mamba2,
    "diffllama": diffllama,
    "qwen3.5": hybrid("Qwen3_5Text"),
    "qwen3-next": hybrid("Qwen3Next"),
}
ADVICE = {
    "dinov2": dinov2,  # its mask token is not used
    "bare vectors": with_block(Decay),
    "bare matrices": with_block(BareMatrices),
    "unused": Untrained,
    "bare readout": BareReadout,
    "oddity": ZOO["oddity"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ADVICE, *NO_ADVICE])
def test_advice_works(name):
    """It is accepted, `init_` keeps what the table does not start, and the model still learns everywhere."""
    model, scaling, arguments = follow((ADVICE | NO_ADVICE)[name])
    assert bool(arguments) == (name in ADVICE)
    constructed = {n: p.detach().clone() for n, p in model.named_parameters()}
    folds = {n: scaling.fold_factor(n) for n in constructed}
    for _ in range(2):  # the second time over its own numbers
        scaling.init_(0.1)
    given = [n for n, r in scaling.parameters.items() if r.part.kept]
    for n in given:
        assert torch.equal(model.get_parameter(n), constructed[n]) or folds[n] != 1.0, n
    x = torch.randn(2, 3, 16, 16) if name == "dinov2" else tokens(0)
    out = logits(model, x) if name != "value head" else model(x)[0]
    out.square().mean().backward()
    for n in given:
        grad = model.get_parameter(n).grad
        assert grad is None or grad.isfinite().all(), n
        assert name == "unused" or grad.abs().max() > 0, n


@pytest.mark.slow
def test_cohere_has_gains_for_every_head():
    model = cohere(64, 4)
    scaling = parametrize(model, base=lambda: cohere(32, 2)).init_(0.1)
    role = roles(scaling)["model.layers.*.self_attn.q_norm.weight"]
    assert role is Role.BLOCK_NORM
    assert scaling.parameters["model.layers.0.self_attn.q_norm.weight"].m_out == 2
    assert changed_by_folding(model, scaling) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "vectors"),
    [(mamba2, ("A_log", "dt_bias")), (mamba, ("A_log", "D")), (diffllama, ("lambda_q1", "lambda_k2"))],
)
def test_constructor_values_that_no_rule_starts_are_kept(build, vectors):
    model, scaling, _ = follow(build)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith(vectors)}
    assert before
    scaling.init_(0.1).init_(0.2, seed=3)
    assert all(torch.equal(model.get_parameter(n), value) for n, value in before.items())
    assert {r.init for r in scaling.explain() if r.name in before} == {"as constructed"}


def test_kept_values_fold_and_unfold():
    given = {"writers": ["*.gamma"], "roles": {"*.gamma": Role.BLOCK_NORM}}
    model = with_block(GateBlock)(64, 4)
    scaling = parametrize(model, base=lambda: with_block(GateBlock)(32, 2), style="folded", **given)
    scaling.init_(0.1).init_(0.1)
    assert model.blocks[0].scale.gamma.tolist() == pytest.approx([0.05] * 64)
    assert next(r for r in scaling.explain() if r.name.endswith("gamma")).init == "0.5 × as constructed"
    scaling.unfold()
    assert model.blocks[0].scale.gamma.tolist() == pytest.approx([0.1] * 64)


@pytest.mark.slow
def test_kept_values_do_not_exist_on_the_meta_device():
    base = lambda: with_block(Decay)(32, 2)  # noqa: E731
    given = {"*.log_decay": Role.HIDDEN_BIAS, "*.table": Role.HIDDEN_BIAS, "*.gain": Role.BLOCK_NORM}
    given |= {"*.mix": Role.HIDDEN}
    with torch.device("meta"):
        model = with_block(Decay)(64, 4)
    scaling = parametrize(model, base=base, roles=given)
    model.to_empty(device="cpu")
    with pytest.raises(UserError, match=r"meta device does not have: blocks\.0\.log_decay") as e:
        scaling.init_(0.1)
    assert "buffers_filled=True" in e.value.fix
    assert model.blocks[0].gain.item() == 0.5  # one number in every block of the specimen
    real = with_block(Decay)(64, 4)
    with torch.no_grad():
        for mine, theirs in zip(model.blocks, real.blocks, strict=True):
            mine.log_decay.copy_(theirs.log_decay)
            mine.table.copy_(theirs.table)
    for _ in range(2):
        scaling.init_(0.1, buffers_filled=True)
        assert torch.equal(model.blocks[1].log_decay, real.blocks[1].log_decay)


def test_a_role_for_matrices_on_a_vector_is_refused_with_one_that_works():
    with pytest.raises(UserError, match=r"has shape \(\), but Role\.HIDDEN is for matrices"):
        parametrize(with_block(Decay)(64, 4), base=lambda: with_block(Decay)(32, 2), roles={"*.gain": Role.HIDDEN})
    _, scaling, _ = follow(with_block(Decay), roles={"*.gain": Role.HIDDEN})
    assert roles(scaling)["blocks.*.gain"] is Role.BLOCK_NORM


def test_a_matrix_with_a_role_for_vectors_is_refused_with_one_that_works():
    with pytest.raises(
        UserError, match=r"given Role\.BLOCK_NORM, but it is multiplied with activations as a matrix"
    ) as e:
        parametrize(Model(64, 4), base=lambda: Model(32, 2), roles={"*.up.weight": Role.BLOCK_NORM})
    assert e.value.fix == "use Role.HIDDEN"
    parametrize(Model(64, 4), base=lambda: Model(32, 2), roles={"*.up.weight": Role.HIDDEN})


def test_a_style_that_is_refused_names_one_that_works():
    _, scaling, arguments = follow(heads(NormModule), style="folded")
    assert arguments["style"] == "multiplier"
    assert "attention" in scaling.factors()


@pytest.mark.parametrize("where", ["up", "down", "head"])
@pytest.mark.parametrize("new", [True, False])
def test_weight_norm_is_refused_and_removing_it_works(where, new):
    from torch.nn.utils import parametrizations, remove_weight_norm, weight_norm

    def build(width, depth, remove=False):
        model = Model(width, depth)
        for module in [model.head] if where == "head" else [b.get_submodule(where) for b in model.blocks]:
            (parametrizations.weight_norm if new else weight_norm)(module)
            if remove and new:
                nn.utils.parametrize.remove_parametrizations(module, "weight")
            elif remove:
                remove_weight_norm(module)
        return model

    with pytest.raises(UserError, match=rf"{where}' \(\w+\) computes its weight") as e:
        parametrize(build(64, 4), base=lambda: build(32, 2))
    assert ("remove_parametrizations" if new else "remove_weight_norm") in e.value.fix
    scaling = parametrize(build(64, 4, True), base=lambda: build(32, 2, True))
    assert scaling.factors() == {"branch": 0.5, "logits": 0.5}


def modernbert(width, depth, head=True):
    import transformers

    tokens = {f"{k}_token_id": 0 for k in ("pad", "bos", "eos", "cls", "sep")}
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": width // 16}
    config = transformers.ModernBertConfig(vocab_size=VOCABULARY, intermediate_size=width, **sizes, **tokens)
    model = transformers.ModernBertForMaskedLM(config)
    if not head:
        model.head = nn.Identity()
    return model


@pytest.mark.slow
def test_heads_of_several_layers_and_of_one_work():
    scaling = parametrize(modernbert(64, 4), base=lambda: modernbert(32, 2))
    assert roles(scaling)["head.dense.weight"] is Role.HEAD
    scaling = parametrize(modernbert(64, 4, False), base=lambda: modernbert(32, 2, False))
    assert scaling.factors() == {"branch": 0.5, "logits": 0.5}


def test_bert_is_told_that_it_is_post_ln():
    bert = huggingface("Bert", hidden_size=lambda n, _: n, num_hidden_layers=lambda _, d: d, num_attention_heads=2,
                       intermediate_size=64, is_decoder=True)  # fmt: skip
    with pytest.raises(UserError, match=r"post-LN.*bert\.encoder\.layer\.1\.output\.LayerNorm"):
        parametrize(bert(64, 4), base=lambda: bert(32, 2))


def test_a_digit_in_a_name_is_not_a_block():
    """Wav2Vec2 and DINOv2 end in a digit."""

    class Wrapped(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.model2 = Model(width, depth)

        def forward(self, ids):
            return self.model2(ids)

    scaling = parametrize(Wrapped(64, 4), base=lambda: Wrapped(32, 2))
    assert [s.stem for s in scaling.anatomy.stacks] == ["model2.blocks."]


def test_a_hybrid_whose_blocks_end_differently_is_refused():
    def olmo(width, depth):
        return transformers_model(
            "OlmoHybrid", width, depth, num_attention_heads=width // 16, num_key_value_heads=width // 32,
            intermediate_size=2 * width, linear_key_head_dim=8, linear_value_head_dim=8,
            linear_num_key_heads=width // 16, linear_num_value_heads=width // 16, 
            layer_types=["linear_attention", "full_attention"] * (depth // 2),
        )  # fmt: skip

    given = {"*.A_log": Role.HIDDEN_BIAS, "*.dt_bias": Role.HIDDEN_BIAS}
    with pytest.raises(UserError, match=r"ends a branch, but .*, its counterpart in another block, does not"):
        parametrize(olmo(64, 4), base=lambda: olmo(32, 2), roles=given)


class EndsInNorm(Block):
    """The same parameters, in another layout."""

    def branch(self, x):
        return self.norm(self.down(F.gelu(self.up(x))))


def test_one_layout_in_all_blocks_works():
    def build(width, depth, *kinds):
        model = Model(width, depth)
        model.blocks = nn.ModuleList(kinds[i % len(kinds)](width) for i in range(depth))
        return model

    with pytest.raises(UserError, match=r"ends a branch, but 'blocks\.\d\.norm\.weight'") as e:
        parametrize(build(64, 4, Block, EndsInNorm), base=lambda: build(32, 2, Block, EndsInNorm))
    assert "the same layout" in e.value.fix
    for kind in (Block, EndsInNorm):
        scaling = parametrize(build(64, 4, kind), base=lambda kind=kind: build(32, 2, kind))
        assert scaling.factors() == {"branch": 0.5, "logits": 0.5}


def test_the_gain_of_the_stream_itself_is_no_writer():
    class Doge(Block):
        def __init__(self, width):
            super().__init__(width)
            self.residual = nn.Parameter(torch.ones(width))

        def forward(self, x):
            return self.residual * x + self.branch(x)

    with pytest.raises(UserError, match="takes in the result of Mul") as e:
        parametrize(with_block(Doge)(64, 4), base=lambda: with_block(Doge)(32, 2))
    assert "writers" not in e.value.fix
