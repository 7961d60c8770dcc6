"""Real models as their authors wrote them: the role of every parameter, and one deliberate break for each."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from completep import Role, UserError, parametrize
from completep.anatomy.blocks import find_stacks
from tests.rules.training import worst
from tests.rules.zoo import EACH, VOCABULARY, ZOO, TorchEncoderLM, alternating, huggingface, roles_for, scale

GOLDEN = Path(__file__).parent / "golden" / "roles.txt"  # checked by eye; one line per template
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of other people's models


def golden():
    rows = {}
    for line in GOLDEN.read_text().splitlines():
        model, template, role, m_N, fold, start = (cell.strip() for cell in line.split("|"))
        rows.setdefault(model, {})[template] = (role, float(m_N), float(fold), start)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_explain_gives_every_parameter_its_role(name):
    _, scaling = scale(name)
    explained = {row.template: (row.role, row.m_N) for row in scaling.explain()}
    resolved = {r.template: r for r in scaling.parameters.values()}
    for template, (role, m_N, fold, start) in golden()[name].items():
        r = resolved.pop(template)
        assert (str(r.role), r.m_N) == explained[template] == (role, m_N), template
        assert r.fold == pytest.approx(fold, rel=1e-6), template
        assert start == ("random" if r.role.trait.start == "random" else f"{r.part.start:g}")
    assert not resolved


def broken(name, block_index=1):
    """The same model with one block that does not add to the stream but shrinks it."""
    model = ZOO[name](32, 2)
    stem = find_stacks(model)[0].stem
    block = model.get_submodule(f"{stem}{block_index}")
    forward = block.forward

    def shrinking(x, *args, **kwargs):
        out = forward(x, *args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        first = first + 0.1 * x if name == "outer-sum" else 0.9 * first
        return (first, *out[1:]) if isinstance(out, tuple) else first

    block.forward = shrinking
    return model, f"{stem}{block_index}"


@pytest.mark.parametrize("name", EACH)
def test_a_broken_block_is_caught_and_named(name):
    _, block = broken(name)
    with pytest.raises(UserError, match=re.escape(f"'{block}' still changes the residual stream")):
        parametrize(ZOO[name](64, 4), base=lambda: broken(name)[0], roles=roles_for(name))


@pytest.mark.parametrize("name", ["gpt2", "llama", "torch-encoder", "oddity"])
def test_a_forgotten_writer_is_caught(name):
    """Naming only some of the writers leaves a branch open, and the proof sees it."""
    forgotten = {
        "gpt2": "*.attn.c_proj.*",
        "llama": "*.o_proj.*",
        "torch-encoder": "*.linear2.*",
        "oddity": "*.shrink.*",
    }
    with pytest.raises(UserError, match=r"still changes the residual stream|is not what it was before"):
        parametrize(ZOO[name](64, 4), base=lambda: ZOO[name](32, 2), writers=[forgotten[name]], roles=roles_for(name))


def test_named_writers_that_are_right_are_taken():
    model = ZOO["llama"](64, 4)
    scaling = parametrize(model, base=lambda: ZOO["llama"](32, 2), writers=["*.o_proj.weight", "*.down_proj.weight"])
    assert scaling.state_dict() == scale("llama", depth=4)[1].state_dict()


def test_unknown_parameters_are_all_listed_with_a_way_out():
    with pytest.raises(
        UserError, match=r"2 parameters have no role: storey\*.mixer.wander, storey\*.mixer.gather"
    ) as e:
        parametrize(ZOO["oddity"](64, 4), base=lambda: ZOO["oddity"](32, 2))
    assert "roles={'storey*.mixer.wander': Role.HIDDEN" in e.value.fix
    assert eval("dict(" + re.search(r"roles=(\{.*\})", e.value.fix).group(0) + ")", {"Role": Role})


SMALL = {
    "hidden_size": lambda n, _: n,
    "num_hidden_layers": lambda _, depth: depth,
    "num_attention_heads": 2,
}
NO_RULE = {
    "post-ln": (lambda n, depth: TorchEncoderLM(n, depth, norm_first=False), "post-LN.*norm2"),
    "bert": (huggingface("Bert", intermediate_size=64, is_decoder=True, **SMALL), "post-LN.*LayerNorm"),
    "zamba2": (
        huggingface(
            "Zamba2",
            mamba_d_state=8,
            mamba_headdim=16,
            n_mamba_heads=lambda n, _: n // 8,
            chunk_size=8,
            num_key_value_heads=2,
            layers_block_type=alternating("mamba", "hybrid"),
            intermediate_size=64,
            **SMALL,
        ),
        r"one parameter is shared inside the blocks: model\.layers\.1\.shared_transformer",
    ),
    "factorised-embedding": (
        huggingface("OPT", word_embed_proj_dim=16, ffn_dim=64, max_position_embeddings=32, **SMALL),
        "project_(in|out)' is a matrix outside",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("build", "reason"), NO_RULE.values(), ids=NO_RULE)
@pytest.mark.parametrize("style", ["multiplier", "folded"])
def test_what_has_no_rule_is_refused_by_name(build, reason, style):
    with pytest.raises(UserError, match=reason):
        parametrize(build(64, 4), base=lambda: build(32, 2), style=style)


def t5(width, depth):
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=width, num_layers=depth, num_heads=width // 16, d_kv=16, d_ff=2 * width,
        dropout_rate=0.0, pad_token_id=0, eos_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def whisper(width, depth):
    import transformers

    heads, inner = width // 16, 2 * width
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=width, encoder_layers=depth, decoder_layers=depth, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=inner, decoder_ffn_dim=inner, num_mel_bins=8,
        max_source_positions=8, max_target_positions=16, decoder_start_token_id=0, pad_token_id=0, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


@pytest.mark.parametrize(("build", "given"), [(t5, "input_ids"), (whisper, "input_features")])
def test_an_encoder_decoder_is_refused_with_the_stack_that_has_no_rule(build, given):
    ids = torch.randint(1, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
    example = {given: ids if given == "input_ids" else torch.randn(2, 8, 16), "decoder_input_ids": ids}
    with pytest.raises(UserError, match=r"no block of '.*encoder.*' adds anything to the residual stream") as e:
        parametrize(build(64, 4), base=lambda: build(32, 2), example=example)
    assert "parametrize the decoder alone" in e.value.fix


class DiTBlock(nn.Module):
    """adaLN-zero: shift, scale and gate of both branches come from the condition."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.mix, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(c)).chunk(6, -1)
        x = x + gate1[:, None] * self.mix(self.norm1(x) * (1 + scale1[:, None]) + shift1[:, None])
        h = self.norm2(x) * (1 + scale2[:, None]) + shift2[:, None]
        return x + gate2[:, None] * self.down(F.gelu(self.up(h)))


class DiT(nn.Module):
    def __init__(self, width, depth, modulated=True):
        super().__init__()
        self.modulated = modulated
        self.patches, self.classes = nn.Linear(12, width), nn.Embedding(10, width)
        self.blocks = nn.ModuleList(DiTBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=not modulated)
        self.modulation = nn.Linear(width, 2 * width) if modulated else None
        self.out = nn.Linear(width, 12)

    def forward(self, x, label):
        x, c = self.patches(x), self.classes(label)
        for block in self.blocks:
            x = block(x, c)
        x = self.norm(x)
        if self.modulation is not None:
            shift, scale = self.modulation(F.silu(c)).chunk(2, -1)
            x = x * (1 + scale[:, None]) + shift[:, None]
        return self.out(x)


def test_a_dit_with_its_conditions():
    """Gates from a condition work inside the blocks, and the last norm's shift and scale come from a head matrix."""
    example = (torch.randn(2, 4, 12), torch.tensor([1, 2]))
    made = []
    for style in ("multiplier", "folded"):
        torch.manual_seed(0)
        model = DiT(64, 4).double()
        scaling = parametrize(model, base=lambda: DiT(32, 2), example=example, style=style).init_(0.1, seed=1)
        found = {r.template: r for r in scaling.parameters.values()}
        assert found["blocks.*.down.weight"].fold == found["blocks.*.mix.weight"].fold == 0.5
        assert found["blocks.*.modulation.weight"].fold == 1.0
        assert found["blocks.*.modulation.weight"].role is Role.HIDDEN
        assert (found["modulation.weight"].role, found["modulation.bias"].role) == (Role.HEAD, Role.HEAD_BIAS)
        assert found["classes.weight"].role is found["patches.weight"].role is Role.EMBEDDING
        optimizer = torch.optim.AdamW(scaling.param_groups(1e-2, weight_decay=0.1, eps=1e-9))
        for _ in range(3):
            optimizer.zero_grad()
            model(example[0].double(), example[1]).square().mean().backward()
            optimizer.step()
        made.append(model(example[0].double(), example[1]).detach())
    assert worst(made[1], made[0]) < 1e-9


class ShrinkingStream(DiT):
    """The stream shrinks between the blocks."""

    def forward(self, x, label):
        x, c = self.patches(x), self.classes(label)
        for block in self.blocks:
            x = 0.9 * block(x, c)
        return self.out(self.norm(x))


def test_a_broken_dit_is_caught():
    example = (torch.randn(2, 4, 12), torch.tensor([1, 2]))
    with pytest.raises(UserError, match=r"is not what it was before|still changes the residual stream"):
        parametrize(ShrinkingStream(64, 4, False), base=lambda: ShrinkingStream(32, 2, False), example=example)
