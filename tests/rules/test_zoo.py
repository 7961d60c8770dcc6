"""Real models as their authors wrote them: roles, proof, both styles, and one deliberate break each."""

import re
from pathlib import Path

import pytest
import torch

from completep import COMPLETEP, MUP, Role, UserError, audit, parametrize
from completep.rules.anatomy import find_stacks
from tests.rules.training import logits, worst
from tests.rules.zoo import ODD_ROLES, ZOO, TorchEncoderLM, huggingface

GOLDEN = Path(__file__).parent / "golden" / "roles.txt"  # read through by eye; one line per template
pytestmark = pytest.mark.filterwarnings("ignore")  # other people's models, other people's warnings


def roles_for(name):
    return {pattern: Role[role] for pattern, role in ODD_ROLES.items()} if name == "oddity" else None


def scale(name, style="multiplier", rules=COMPLETEP, width=64, depth=6):
    model = ZOO[name](width, depth)
    base = lambda: ZOO[name](32, 2)  # noqa: E731
    return model, parametrize(model, base=base, rules=rules, style=style, roles=roles_for(name))


def example_for(name):
    generator = torch.Generator().manual_seed(1)
    if "vit" in name:
        return torch.randn(2, 3, 16, 16, generator=generator)
    return torch.randint(61, (2, 9), generator=generator)


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
        assert start == ("random" if r.role in (Role.EMBEDDING, Role.HIDDEN, Role.UNEMBEDDING) else f"{r.part.start:g}")
    assert not resolved


@pytest.mark.parametrize("name", ZOO)
def test_both_styles_give_the_same_logits_and_fold_into_the_plain_class(name):
    model, scaling = scale(name)
    folded, theirs = scale(name, "folded")
    scaling.init_(0.1, seed=2)
    theirs.init_(0.1, seed=2)
    inputs = example_for(name)
    model.eval()
    folded.eval()
    with torch.no_grad():
        expected = logits(model, inputs)
        assert expected.std() > 1e-4
        assert worst(logits(folded, inputs), expected) < 1e-4
        scaling.fold()
        plain = ZOO[name](64, 6).eval()
        plain.load_state_dict(model.state_dict())
        assert worst(logits(plain, inputs), expected) < 1e-4


@pytest.mark.parametrize("name", ZOO)
def test_a_branch_really_is_scaled(name):
    """Doubling the multiplier by hand doubles what each branch adds: measured by the audit's probes, not by our own hooks."""
    model, scaling = scale(name)
    scaling.init_(0.05, seed=0)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-3, weight_decay=0.1, eps=1e-12))
    base = lambda: ZOO[name](32, 2)  # noqa: E731
    assert audit(model, optimizer, base=base, roles=roles_for(name)).passed
    found = audit(model, optimizer, base=base, roles=roles_for(name), rules=MUP)
    assert "multiplier" in {d.quantity for d in found.departures}


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


@pytest.mark.parametrize("name", ZOO)
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


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda n, depth: TorchEncoderLM(n, depth, norm_first=False), "post-LN.*norm2"),
        (huggingface("Bert", hidden_size=lambda n, _: n, num_hidden_layers=lambda _, depth: depth, num_attention_heads=2,
                     intermediate_size=64, is_decoder=True), "cls.predictions.transform"),
        (huggingface("Mixtral", hidden_size=lambda n, _: n, num_hidden_layers=lambda _, depth: depth, num_attention_heads=2,
                     num_key_value_heads=2, intermediate_size=64, num_local_experts=2), "mixture of experts"),
        (huggingface("OPT", hidden_size=lambda n, _: n, word_embed_proj_dim=16, num_hidden_layers=lambda _, depth: depth,
                     num_attention_heads=2, ffn_dim=64, max_position_embeddings=32), "project_(in|out)' is a matrix outside"),
    ],
    ids=["post-ln", "bert", "mixtral", "factorised-embedding"],
)  # fmt: skip
@pytest.mark.parametrize("style", ["multiplier", "folded"])
def test_what_has_no_rule_is_refused_by_name(build, reason, style):
    with pytest.raises(UserError, match=reason):
        parametrize(build(64, 4), base=lambda: build(32, 2), style=style)


def test_seventy_billion_parameters_on_meta():
    """In a process of its own, for its peak memory; how long it takes is benchmarks/rules_cost.py's to say."""
    import subprocess
    import sys

    code = """
import resource, torch
from transformers import LlamaConfig, LlamaForCausalLM
import completep as cp
def llama(width, depth, heads, kv, inner):
    return LlamaForCausalLM(LlamaConfig(hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads,
        num_key_value_heads=kv, intermediate_size=inner, vocab_size=32000, head_dim=128))
with torch.device("meta"):
    model = llama(8192, 80, 64, 8, 28672)
assert sum(p.numel() for p in model.parameters()) > 68e9
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
scaling = cp.parametrize(model, base=lambda: llama(256, 2, 2, 1, 896))
added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
assert len(scaling.param_groups(1e-3)) <= 8
assert {m.kind: m.factor for m in scaling.multipliers} == {"branch": 1 / 40, "logits": 1 / 32}
assert added < 1, f"{added:.2f} GB"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
