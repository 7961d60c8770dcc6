"""Real models as their authors wrote them: the role of every parameter, and one deliberate break for each."""

import re
from pathlib import Path

import pytest

from completep import Role, UserError, parametrize
from completep.anatomy.blocks import find_stacks
from tests.rules.zoo import EACH, ZOO, TorchEncoderLM, huggingface, roles_for, scale

GOLDEN = Path(__file__).parent / "golden" / "roles.txt"  # checked by eye; one line per template
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of other people's models


def golden():
    rows = {}
    for line in GOLDEN.read_text().splitlines():
        model, template, role, m_N, fold, start = (cell.strip() for cell in line.split("|"))
        rows.setdefault(model, {})[template] = (role, float(m_N), float(fold), start)
    return rows


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
    "bert": (huggingface("Bert", intermediate_size=64, is_decoder=True, **SMALL), "cls.predictions.transform"),
    "mixtral": (
        huggingface("Mixtral", num_key_value_heads=2, intermediate_size=64, num_local_experts=2, **SMALL),
        "mixture of experts",
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
