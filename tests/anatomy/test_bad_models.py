"""A model that cannot be examined is refused. The error contains your own input and a way out."""

import copy

import pytest
import torch
from torch import nn

from completep import Shape, UserError, parametrize
from completep.model.gpt import gpt
from tests.rules.training import VOCABULARY, tokens
from tests.rules.zoo import ZOO, OuterSum


def small(width=32, depth=2, **options):
    return gpt(width, depth, VOCABULARY, head_size=16, **options)


class Shared(OuterSum):
    """ALBERT: one layer used over and over."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        for branch in self.branches[1:]:
            branch[1].weight = self.branches[0][1].weight


class Gated(OuterSum):
    """A learned gate after the last matrix of each branch."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, ids):
        x = self.table(ids)
        for branch in self.branches:
            x = x + self.gate * branch(x)
        return self.out(self.norm(x))


class InPlace(OuterSum):
    def forward(self, ids):
        x = self.table(ids)
        for branch in self.branches:
            x += branch(x)
        return self.out(self.norm(x))


class TwoInputs(OuterSum):
    def forward(self, ids, mask):
        return super().forward(ids) + 0 * mask.sum()


class OnlyLoss(OuterSum):
    def forward(self, ids):
        return {"step": 3}


class NotResidual(OuterSum):
    def forward(self, ids):
        x = self.table(ids)
        for branch in self.branches:
            x = branch(x)
        return self.out(self.norm(x))


class SoftReadout(OuterSum):
    def forward(self, ids):
        return super().forward(ids).exp()


def no_blocks(width, depth):
    return nn.Sequential(nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY))


def widths(build):
    return build(64, 4), lambda: build(32, 2)


CASES = {
    "base with other names": (lambda: (small(64, 4), lambda: small(bias=False)), r"only in the model: .*bias"),
    "base of another class": (lambda: (small(64, 4), lambda: OuterSum(32, 2)), "different parameters"),
    "base with zero layers": (lambda: (OuterSum(64, 2), lambda: OuterSum(32, 0)), "zero layers|no repeated blocks"),
    "model with zero layers": (lambda: (OuterSum(64, 0), lambda: OuterSum(32, 2)), "the model has zero layers"),
    "no blocks at all": (lambda: widths(no_blocks), "no repeated blocks in Sequential"),
    "base is a number": (lambda: (small(), 256), "neither a factory nor a Shape"),
    "base is a model": (lambda: (small(), small()), "failed|returned|neither"),
    "factory returns no model": (lambda: (small(), lambda: 3), "returned int"),
    "weights shared over blocks": (lambda: widths(Shared), r"shared inside the blocks: branches.0.1.weight, bran"),
    "a gate on every branch": (lambda: widths(Gated), "'gate' stands outside the blocks and multiplies"),
    "in-place stream": (lambda: widths(InPlace), "backward pass fails"),
    "forward wants more": (lambda: widths(TwoInputs), "forward failed on the example input: TypeError.*mask"),
    "forward gives no logits": (lambda: widths(OnlyLoss), "returned dict with no logits"),
    "not residual": (lambda: widths(NotResidual), "does not reach back to an embedding"),
    "logits are no product": (lambda: widths(SoftReadout), "logits come from operation Exp"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_models_and_bases(case):
    make, message = CASES[case]
    model, base = make()
    with pytest.raises(UserError, match=message) as e:
        parametrize(model, base=base)
    assert e.value.fix


def test_the_example_can_be_given():
    model, base = widths(TwoInputs)
    scaling = parametrize(model, base=base, example=(tokens(0), torch.ones(3)))
    assert scaling.base == Shape(32, 2)
    scaling = parametrize(TwoInputs(64, 4), base=base, example={"ids": tokens(0), "mask": torch.ones(3)})
    assert scaling.base == Shape(32, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not checked.*a Shape does not say")
def test_meta_with_only_a_shape_asks_for_a_specimen():
    with torch.device("meta"):
        model = small(64, 4)
    with pytest.raises(UserError, match="only a Shape"):
        parametrize(model, base=Shape(32, 2))
    assert parametrize(model, base=Shape(32, 2), specimen=small).base == Shape(32, 2)
    assert parametrize(small(64, 4), base=Shape(32, 2), specimen=small()).base == Shape(32, 2)


def test_a_specimen_of_another_kind_is_refused():
    with pytest.raises(UserError, match="the specimen that was examined"):
        parametrize(small(64, 4), base=Shape(32, 2), specimen=lambda: small(bias=False))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lora_is_refused_and_merging_helps():
    peft = pytest.importorskip("peft")
    plain = ZOO["llama"](64, 4)
    wrapped = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(UserError, match=r"LoRA adapters: .*lora_A"):
        parametrize(wrapped, base=lambda: ZOO["llama"](32, 2))
    merged = wrapped.merge_and_unload()
    merged.requires_grad_(True)
    assert parametrize(merged, base=lambda: ZOO["llama"](32, 2)).base == Shape(32, 2)


@pytest.mark.filterwarnings("ignore")
def test_quantised_models_are_refused():
    model = OuterSum(64, 4)
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UserError, match="quantised"):
        parametrize(quantised, base=lambda: OuterSum(32, 2))
    model.out.weight = nn.Parameter(model.out.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UserError, match=r"quantised: out.weight \(torch.int8\)"):
        parametrize(model, base=lambda: OuterSum(32, 2))


def test_half_precision_models_are_fine():
    model = small(64, 4).to(torch.bfloat16)
    scaling = parametrize(model, base=lambda: small().to(torch.bfloat16)).init_(0.1)
    assert scaling.parameters["blocks.0.mlp.up.weight"].m_N == 2
    assert model.blocks[0].mlp.up.weight.dtype == torch.bfloat16
