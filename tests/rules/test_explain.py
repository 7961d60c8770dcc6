import io
import json

import pytest
from rich.console import Console

from completep import COMPLETEP, SP, parametrize
from completep.model.gpt import gpt
from completep.rules import explain


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
        s = scaling(style)
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


def test_table_json_and_page():
    s = scaling()
    found = s.explain()
    console = Console(width=180, record=True, file=io.StringIO())
    console.print(explain.to_table(found, explain.summary(s)))
    text = console.export_text()
    assert "blocks.*.mlp.down.weight" in text
    assert "branch × 0.25" in text
    assert "CompleteP, Table 1" in text
    data = json.loads(json.dumps(explain.to_json(s, found)))
    assert len(data["parameters"]) == len(found)
    assert data["multipliers"] == {"branch": 0.25, "logits": 0.5}
    page = explain.to_html(s, found)
    assert page.count("<tr>") == len(explain.collapse(found)) + 1
    assert "http" not in page


def test_the_page_escapes_names():
    s = scaling()
    nasty = [r.__class__(**{**vars(r), "template": "<script>x</script>"}) for r in s.explain()[:1]]
    assert "<script>" not in explain.to_html(s, nasty)
