"""Models on which a careless library would scale the wrong thing: handled correctly, or refused with the reason."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from completep import COMPLETEP, MUP, Role, UserError, audit, parametrize
from completep.rules.table import literature
from tests.rules.models import Block, Model, changed_by_folding, clean, scale
from tests.rules.training import VOCABULARY, logits, step, tokens, worst
from tests.rules.zoo import ZOO, huggingface

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


@pytest.mark.slow
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
    scaling.init_()
    groups = scaling.param_groups(0.02, weight_decay=0.1, optimizer="muon")
    assert {round(g["lr"] * g["weight_decay"], 12) for g in groups} == {0.002}
    assert len({g["lr"] for g in groups}) > 1
    assert {g["adjust_lr_fn"] for g in groups} == {"original"}


def test_epsilon_follows_the_fan_out():
    """A gradient is divided among the outputs that it flows back from. This is measured and compared with the rule."""

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
    scaling.init_()
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
    with pytest.raises(UserError, match="'nonsense' is not a Role"):
        scale(Model)[1].param_groups(0.1, roles=["nonsense"])


# -- audit -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_audit_says_what_it_did_not_check_and_finds_a_missing_embedding_factor():
    def qwen(width, head):
        sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        return huggingface("Qwen3", head_dim=head, intermediate_size=width, **sizes)(width, 2)

    model = qwen(64, 32)
    found = audit(model, torch.optim.AdamW(model.parameters()), base=lambda: qwen(32, 16), check_init=False)
    assert "attention multiplier" in str(found)  # it is missing
    scaling = parametrize(model, base=lambda: qwen(32, 16)).init_(0.1)
    tuned = {"lr": 1e-3, "weight_decay": 0.0, "eps": 1e-8, "std": 0.1}
    found = audit(model, torch.optim.AdamW(scaling.param_groups(1e-3)), base=lambda: qwen(32, 16), **tuned)
    assert found.verdict == "PASS", found
    assert "attention" not in str(found)  # the scale on q·k was measured, and is right

    gemma = ZOO["gemma"](64, 4)
    scaling = parametrize(gemma, base=lambda: ZOO["gemma"](32, 2)).init_(0.1)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-3, weight_decay=0.1))
    assert clean(audit(gemma, optimizer, base=lambda: ZOO["gemma"](32, 2)))
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
