"""What the rules do to each parameter, as a result that reads well in a terminal, in a notebook and as JSON."""

import copy
import dataclasses
import json
import re

import pytest
import torch

from completep import COMPLETEP, SP, Shape, UserError, alpha, parametrize
from completep.model.gpt import gpt
from completep.report.document import number
from completep.report.terminal import as_text
from completep.rules.parametrize import explain
from tests.rules.zoo import LLAMA_LIKE, ZOO, OuterSum, huggingface


def scaling(style="multiplier", rules=COMPLETEP, **options):
    def make(width, depth):
        return gpt(width, depth, 61, head_size=16, **options)

    return parametrize(make(64, 8), base=lambda: make(32, 2), rules=rules, style=style)


def rows(s, **base):
    return {r.name: r for r in s.explain(**base)}


def test_every_parameter_has_a_row_with_all_that_changed():
    s = scaling(qk_norm=True)
    found = rows(s, lr=0.01, weight_decay=0.1, eps=1e-8, std=0.02)
    assert list(found) == [name for name, _ in s.model.named_parameters()]
    row = found["blocks.3.mlp.down.weight"]
    assert (row.role, row.shape, row.m_N, row.m_L) == ("hidden weight", (64, 256), 2.0, 4.0)
    assert (row.lr, row.weight_decay, row.eps) == pytest.approx((0.005, 0.2, 1e-8 / 8))
    assert row.init == "N(0, 0.01414²)"
    assert row.multiplier == 0.25
    assert "Table 1" in row.source
    assert "2512.22382" in found["blocks.0.attention.q_norm.weight"].source
    assert found["unembedding.weight"].multiplier == 0.5
    assert found["blocks.0.mlp_norm.weight"].init == "1"


def test_folded_rows_show_the_weights_instead():
    row = rows(scaling("folded"))["blocks.0.mlp.down.weight"]
    assert (row.lr, row.weight_decay, row.eps, row.multiplier) == pytest.approx((0.5 / 4, 2 * 4, 1 / 8 * 4, 1))
    assert row.init == "N(0, 0.1768²)"  # 2^-1/2 / 4


def test_explain_agrees_with_the_optimizer_groups():
    for style in ("multiplier", "folded"):
        s = scaling(style).init_()
        found = rows(s, lr=3e-3, weight_decay=0.1, eps=1e-9)
        for group in s.param_groups(3e-3, weight_decay=0.1, eps=1e-9):
            for name in group["names"]:
                assert (found[name].lr, found[name].weight_decay, found[name].eps) == (
                    group["lr"],
                    group["weight_decay"],
                    group["eps"],
                )


def test_sp_explains_that_nothing_happens():
    assert {(r.lr, r.eps, r.multiplier) for r in scaling(rules=SP).explain()} == {(1.0, 1.0, 1.0)}


def test_the_result_reads_well_everywhere():
    found = scaling().explain()
    text = str(found)
    assert "blocks.*.mlp.down.weight" in text
    assert "branch × 0.25" in text
    assert "width 32 → 64 (m_N = 2), depth 2 → 8 (m_L = 4)" in text
    assert "CompleteP, Table 1" in text
    data = json.loads(json.dumps(found.to_json()))
    assert len(data["parameters"]) == len(found) == len(list(found))
    assert data["multipliers"] == {"branch": 0.25, "logits": 0.5}
    assert (data["model"], data["rules"], data["name"]) == ("GPT", "completep", "CompleteP")
    assert (data["base"], data["target"]) == ({"width": 32, "depth": 2}, {"width": 64, "depth": 8})
    assert (data["m_N"], data["m_L"], data["style"]) == (2, 4, "multiplier")
    html = found._repr_html_()
    assert html.count("<tr>") == len(found.collapsed()) + 1
    assert "http" not in html


def test_html_escapes_names():
    found = scaling().explain()
    nasty = dataclasses.replace(found.rows[0], template="<script>x</script>")
    assert "<script>" not in dataclasses.replace(found, rows=(nasty,))._repr_html_()


def test_frozen_parameters_and_own_ratios_are_shown():
    model = gpt(64, 8, 61, head_size=16)
    model.embedding.weight.requires_grad_(False)
    table = explain(model, base=lambda: gpt(32, 2, 61, head_size=16)).document().parts[-1]
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert (first["role"], first["lr"], first["wd"]) == ("embedding (frozen)", None, None)
    assert "m_N" not in table.columns  # the same for all parameters, so the summary above the table has it
    grown = explain(
        ZOO["llama"](64, 4), base=lambda: huggingface("Llama", **LLAMA_LIKE | {"intermediate_size": 32})(32, 2)
    )
    assert {row.m_N for row in grown} == {2.0, 6.0}
    assert "m_N" in grown.document().parts[-1].columns


def test_scaling_shows_itself():
    s = scaling()
    line = repr(s)
    assert "\n" not in line
    for words in ("GPT", "CompleteP", "32 → 64", "2 → 8", "m_N = 2", "m_L = 4", "branch × 0.25", "in the forward pass"):
        assert words in line
    assert (s.target, s.base, s.m_N, s.m_L) == (Shape(64, 8), Shape(32, 2), 2, 4)
    assert "blocks.*.mlp.down.weight" in s._repr_html_()
    s.fold()
    assert "folded into the weights" in repr(s)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["multiplier", "folded"])
@pytest.mark.parametrize("build", [lambda n, depth: gpt(n, depth, 61, head_size=16), OuterSum], ids=["own", "hooks"])
def test_explain_leaves_the_model_alone_and_tells_what_parametrize_does(build, style):
    model = build(64, 8)
    before, hooks = copy.deepcopy(model.state_dict()), [len(m._forward_hooks) for m in model.modules()]
    shown = explain(model, base=lambda: build(32, 2), rules="alpha=0.5", style=style, lr=0.01)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    done = parametrize(model, base=lambda: build(32, 2), rules=alpha(0.5), style=style)
    assert done.explain(lr=0.01) == shown
    assert shown.style == style


def test_explain_refuses_what_parametrize_refuses():
    model = OuterSum(64, 8)
    parametrize(model, base=lambda: OuterSum(32, 2))
    with pytest.raises(UserError, match="parametrized already") as e:
        explain(model, base=lambda: OuterSum(32, 2))
    assert "scaling.explain()" in e.value.fix
    with pytest.raises(UserError, match="style='fold'"):
        explain(OuterSum(64, 8), base=lambda: OuterSum(32, 2), style="fold")


@pytest.mark.slow
@pytest.mark.parametrize("width", [50, 80, 100, 120, 200])
@pytest.mark.parametrize("build", [ZOO["llama"], lambda n, depth: gpt(n, depth, 61, head_size=16, qk_norm=True)])
def test_no_name_and_no_number_is_cut_at_any_width(build, width):
    """Every name and number stands in the text as a whole word: 0.0039 never reads 0.003."""
    model = build(64, 8)
    shown = explain(model, base=lambda: build(32, 2), lr=0.0039, weight_decay=0.1, eps=1.7e-16, std=0.02)
    text = as_text(shown.document(), width)
    words = set(re.split(r"[\s│┃]+", text))
    for row, count in shown.collapsed():
        assert row.template in words
        for value in (row.lr, row.weight_decay, row.eps, row.multiplier, count):
            assert number(value) in words
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
