"""Your own optimizer compared with the table: a correct one passes, and each known mistake is found and named."""

import json
import math

import pytest
import torch

from completep import COMPLETEP, MUP, SP, Role, Shape, UserError, alpha, audit, parametrize
from completep.model.gpt import gpt
from completep.rules import multipliers
from completep.rules.weights import unmark
from tests.measure import pairs
from tests.rules import zoo
from tests.rules.models import Model, clean
from tests.rules.training import VOCABULARY, slow

WIDTH, DEPTH, M_N, M_L = 64, 6, 2.0, 3.0
TUNED = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-10, "std": 0.05}


def small(width=32, depth=2, **options):
    return gpt(width, depth, VOCABULARY, head_size=16, **options)


def theirs(rules=MUP, change=lambda groups, model: None, style="multiplier"):
    """A model and optimizer that follow the rules, then one mistake made by hand."""
    model = small(WIDTH, DEPTH)
    scaling = parametrize(model, base=small, rules=rules, style=style).init_(0.05)
    groups = [
        {k: v for k, v in g.items() if k in ("params", "lr", "weight_decay", "eps")} | {"r": g["roles"]}
        for g in scaling.param_groups(1e-2, weight_decay=0.1, eps=1e-10)
    ]
    change(groups, model)
    return model, torch.optim.AdamW([{k: v for k, v in g.items() if k != "r"} for g in groups])


@pytest.mark.slow
@pytest.mark.parametrize("style", ["multiplier", "folded"])
@pytest.mark.parametrize("rules", [slow(SP), slow(MUP), slow(alpha(0.5)), COMPLETEP], ids=lambda r: r.name)
def test_what_follows_the_rules_passes_and_no_other_rules_do(rules, style):
    model, optimizer = theirs(rules, style=style)
    found = audit(model, optimizer, base=small, rules=rules)
    assert clean(found), found.departures
    assert found.tuned == pytest.approx({"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-10, "std": 0.05}, rel=0.05)
    for other in (SP, MUP, alpha(0.5), COMPLETEP):
        assert clean(audit(model, optimizer, base=small, rules=other)) == (other.name == rules.name)


def of(groups, *roles):
    return [g for g in groups if set(g["r"]) & set(roles)]


def one_eps(groups, model):
    for g in groups:
        g["eps"] = 1e-10 / M_N


def unscaled_decay(groups, model):
    for g in of(groups, "hidden weight"):
        g["weight_decay"] = 0.1


def gpt2_init(groups, model):
    with torch.no_grad():
        for block in model.blocks:
            block.attention.out.weight.mul_((2 * DEPTH) ** -0.5)
            block.mlp.down.weight.mul_((2 * DEPTH) ** -0.5)


def spectral_sgd(groups, model):
    for g in list(of(groups, "hidden weight")):
        groups.remove(g)
        groups += [g | {"params": [p], "lr": 1e-2 * p.shape[0] / p.shape[1]} for p in g["params"]]


def bias_lr(groups, model):
    for g in of(groups, "hidden bias", "block norm"):
        g["lr"] = 1e-2


def hidden_lr_width(groups, model):
    for g in of(groups, "hidden weight"):
        g["lr"] *= M_N


def decayed_norms(groups, model):
    for g in groups:
        g["weight_decay"] = g["weight_decay"] or 0.1


def no_multiplier(groups, model):
    model.set_multipliers(branch=1.0, logits=1 / M_N)


def one_block(groups, model):
    model.blocks[2].multiplier = 1.0


VECTORS = {"hidden bias", "block norm"}
OUTER = {"embedding", "final norm", "unembedding"}
MISTAKES = [
    ("one global eps", COMPLETEP, one_eps, "eps", "one global eps", {"hidden weight"} | VECTORS | OUTER),
    ("wd not scaled", MUP, unscaled_decay, "weight_decay", "not scaled with width", {"hidden weight"}),
    ("gpt-2 init", COMPLETEP, gpt2_init, "init", r"1/sqrt\(2L\)", {"hidden weight"}),
    ("spectral", MUP, spectral_sgd, "lr", "spectral rule for SGD", {"hidden weight"}),
    ("bias lr", alpha(0.5), bias_lr, "lr", "not scaled with depth", VECTORS),
    ("hidden lr", COMPLETEP, hidden_lr_width, "lr", "not scaled with width", {"hidden weight"}),
    ("decayed norms", COMPLETEP, decayed_norms, "weight_decay", "norms are decayed", VECTORS | {"final norm"}),
    ("no multiplier", COMPLETEP, no_multiplier, "multiplier", "does not have this multiplier", {"branch multiplier"}),
    ("one block", COMPLETEP, one_block, "multiplier", "does not have this multiplier", {"branch multiplier"}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "mistake", "quantity", "cause", "roles"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_a_known_mistake_is_found_and_named(rules, mistake, quantity, cause, roles):
    model, optimizer = theirs(rules, mistake)
    found = audit(model, optimizer, base=small, rules=rules)
    assert {d.quantity for d in found.departures} == {quantity}
    assert {d.role for d in found.departures} == roles
    for d in found.departures:
        assert cause in d.cause.replace("\\", "") or cause.replace("\\", "") in d.cause
        assert d.found == pytest.approx(d.expected * d.factor) or math.isinf(d.factor)


def test_one_block_without_its_multiplier_is_named():
    model, optimizer = theirs(COMPLETEP, one_block)
    names = [d.name for d in audit(model, optimizer, base=small, rules=COMPLETEP).departures]
    assert names == ["blocks.2.attention.out", "blocks.2.mlp.down"]


def test_the_factor_says_by_how_much():
    model, optimizer = theirs(MUP, unscaled_decay)
    assert {round(d.factor, 9) for d in audit(model, optimizer, base=small, rules=MUP).departures} == {1 / M_N}


def test_a_parameter_in_no_group_is_told():
    model, _ = theirs(SP)
    rest = [p for n, p in model.named_parameters() if n != "final_norm.bias"]
    found = audit(
        model, torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.0), base=Shape(32, 2), rules=SP, check_init=False
    )
    assert [(d.name, d.quantity) for d in found.departures] == [("final_norm.bias", "optimizer")]


@pytest.mark.slow
def test_a_warm_up_that_has_begun_does_not_confuse():
    model, optimizer = theirs(COMPLETEP)
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, 10)
    assert clean(audit(model, optimizer, base=small))


@pytest.mark.slow
def test_trained_weights_need_no_init_check():
    model, optimizer = theirs(COMPLETEP)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3)
    assert not clean(audit(model, optimizer, base=small))
    assert clean(audit(model, optimizer, base=small, check_init=False))


@pytest.mark.slow
def test_meta_models_are_audited_but_for_their_starting_values():
    with torch.device("meta"):
        model = small(WIDTH, DEPTH)
    scaling = parametrize(model, base=small)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-2, weight_decay=0.1, eps=1e-10))
    found = audit(model, optimizer, base=small)
    assert found.verdict == "INCONCLUSIVE"
    assert found.unchecked[-1] == "the starting values, which a model on the meta device does not have"
    assert "Not checked: the starting values" in str(found)
    assert clean(audit(model, optimizer, base=small, check_init=False))
    model.set_multipliers(branch=1.0, logits=1 / M_N)
    assert audit(model, optimizer, base=small).verdict == "FAIL"  # the forward pass is measured on a reduced copy


# -- the odd one out -------------------------------------------------------------------------------


def divided(*roles):
    def change(groups, model):
        for g in of(groups, *roles):
            g["lr"] /= M_N

    return change


def all_divided(groups, model):
    for g in groups:
        if "hidden weight" not in g["r"]:
            g["lr"] /= M_N


def swapped(groups, model):
    for g in groups:
        g["lr"] = 1e-2 * (1e-2 / g["lr"])


def root_of_depth(groups, model):
    model.set_multipliers(branch=M_L**-0.5, logits=1 / M_N)


def base_pair():
    model = small()
    scaling = parametrize(model, base=small).init_(0.05)
    return model, torch.optim.AdamW(scaling.param_groups(1e-2, weight_decay=0.1, eps=1e-10))


ODD = [
    ("embedding / m_N", divided("embedding"), "lr", {"embedding"}, "divided by m_N, which only hidden matrices need"),
    ("final norm / m_N", divided("final norm"), "lr", {"final norm"}, "divided by m_N"),
    ("swapped", swapped, "lr", {"hidden weight"}, "base and target are swapped"),
    ("1/sqrt(m_L)", root_of_depth, "multiplier", {"branch multiplier"}, "1/sqrt(m_L), which is alpha=0.5"),
]


@pytest.mark.slow
@pytest.mark.parametrize("with_optimizer", [False, True], ids=["base model", "base with its optimizer"])
@pytest.mark.parametrize(("mistake", "quantity", "roles", "cause"), [m[1:] for m in ODD], ids=[m[0] for m in ODD])
def test_the_odd_one_out_is_blamed(mistake, quantity, roles, cause, with_optimizer):
    model, optimizer = theirs(COMPLETEP, mistake)
    found = audit(model, optimizer, base=base_pair if with_optimizer else small)
    assert {d.quantity for d in found.departures} == {quantity}
    assert {d.role for d in found.departures} == roles
    assert all(cause in d.cause for d in found.departures)


@pytest.mark.slow
def test_everything_divided_by_the_width_is_seen_with_the_bases_own_optimizer():
    model, optimizer = theirs(COMPLETEP, all_divided)
    found = audit(model, optimizer, base=base_pair)
    assert "hidden weight" not in {d.role for d in found.departures}
    assert {d.role for d in found.departures} >= {"embedding", "unembedding", "final norm", "block norm"}
    assert {d.cause for d in found.departures} == {"divided by m_N, which only hidden matrices need"}


@pytest.mark.slow
@pytest.mark.parametrize("key", ["lr", "weight_decay", "eps"])
def test_a_factor_on_everything_is_not_passed_over(key):
    """Base values that are read from the audited optimizer itself hide it; the base's optimizer and values show it."""

    def change(groups, model):
        for g in groups:
            g[key] /= M_N

    model, optimizer = theirs(COMPLETEP, change)
    blind = audit(model, optimizer, base=small)
    assert blind.verdict == "INCONCLUSIVE"
    assert any(key in line and "have in common" in line for line in blind.unchecked)
    for known in (audit(model, optimizer, base=base_pair), audit(model, optimizer, base=small, **TUNED)):
        assert known.verdict == "FAIL"
        assert {d.quantity for d in known.departures} == {key}
    right = theirs(COMPLETEP)
    assert audit(*right, base=base_pair).passed
    assert audit(*right, base=small, **TUNED).passed


def muon_and_adamw(width=32, depth=2, change=1.0):
    """Muon for hidden matrices, AdamW for the rest, each with a learning rate of its own."""
    model = small(width, depth)
    scaling = parametrize(model, base=small).init_(0.05)
    others = [role for role in Role if role is not Role.HIDDEN]
    muon = scaling.param_groups(2e-2, weight_decay=0.1, optimizer="muon", roles=[Role.HIDDEN])
    adamw = scaling.param_groups(1e-2, weight_decay=0.1, eps=1e-10, roles=others)
    muon[0]["lr"] *= change
    return model, [torch.optim.Muon(muon), torch.optim.AdamW(adamw)]


@pytest.mark.slow
def test_several_optimizers_are_audited_together():
    right = audit(*muon_and_adamw(WIDTH, DEPTH), base=muon_and_adamw)
    assert right.passed, right
    wrong = audit(*muon_and_adamw(WIDTH, DEPTH, change=0.5), base=muon_and_adamw)
    assert {(d.role, d.quantity) for d in wrong.departures} == {("hidden weight", "lr")}
    with pytest.raises(UserError, match="2 optimizers have no base values in common") as e:
        audit(*muon_and_adamw(WIDTH, DEPTH), base=small)
    assert "(model, [optimizers])" in e.value.fix
    with pytest.raises(UserError, match="not a torch optimizer"):
        audit(small(WIDTH, DEPTH), [], base=small)


@pytest.mark.slow
def test_two_mistakes_of_the_same_size_are_both_named():
    """m_N = 2 and m_L = 4."""
    model = small(64, 8)
    scaling = parametrize(model, base=small).init_(0.05)
    groups = scaling.param_groups(1e-2, weight_decay=0.1, eps=1e-10)
    for group in groups:
        group["lr"] /= 2
    found = audit(model, torch.optim.AdamW(groups), base=base_pair)
    causes = {d.role: d.cause for d in found.departures}
    assert causes["hidden weight"] == "divided by m_N twice; or divided by sqrt(m_L), which is alpha=0.5's rule"
    assert causes["embedding"].startswith("divided by m_N, which only hidden matrices need")


def test_one_global_epsilon_is_blamed_on_every_role_that_scales_it():
    model, _ = theirs(COMPLETEP)
    found = audit(model, torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-10), base=small, check_init=False)
    wrong = {d.role for d in found.departures if d.quantity == "eps"}
    assert wrong >= {"embedding", "hidden weight", "hidden bias", "block norm", "final norm", "unembedding"}
    assert {d.cause for d in found.departures if d.quantity == "eps"} == {"one global eps for all groups"}


@pytest.mark.slow
def test_a_base_tuned_role_by_role_is_followed():
    """Your base trains its embedding at another rate: the target must too."""

    def pair(base_model, rate):
        scaling = parametrize(base_model, base=small).init_(0.05)
        groups = []
        for name, p in base_model.named_parameters():
            f, own = scaling.settings(name), rate if name.startswith("embedding") else 1.0
            settings = {"lr": 1e-2 * own * f.lr, "weight_decay": 0.1 * f.weight_decay, "eps": 1e-10 * f.eps}
            groups.append({"params": [p], **settings})
        return base_model, torch.optim.AdamW(groups)

    model, optimizer = pair(small(WIDTH, DEPTH), 8.0)
    assert audit(model, optimizer, base=lambda: pair(small(), 8.0)).verdict == "PASS"
    wrong = audit(model, optimizer, base=lambda: pair(small(), 1.0))
    assert {d.role for d in wrong.departures} == {"embedding"}


@pytest.mark.slow
def test_a_missing_attention_factor_is_found():
    """One false PASS of old: heads that grow without the factor on q·k."""
    grown = {**zoo.LLAMA_LIKE, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": lambda n, _: n // 2}
    llama = zoo.huggingface("Llama", **grown)

    def build(width, depth, keep):
        model = llama(width, depth)
        scaling = parametrize(model, base=lambda: llama(32, 2)).init_(0.05)
        if not keep:
            multipliers.remove(model)
            multipliers.install(model, tuple(m for m in scaling.multipliers if m.kind != "attention"))
        return model, torch.optim.AdamW(scaling.param_groups(1e-2, weight_decay=0.1, eps=1e-10))

    assert clean(audit(*build(64, 4, keep=True), base=lambda: llama(32, 2)))
    found = audit(*build(64, 4, keep=False), base=lambda: llama(32, 2))
    assert {(d.role, d.quantity) for d in found.departures} == {("attention multiplier", "multiplier")}
    assert {round(d.expected, 4) for d in found.departures} == {round(0.5**0.5, 4)}


class Scaled(Model):
    """The multiplier on the stream: c·(x + f(x))."""

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) * (len(self.blocks) / 2) ** -0.5
        return self.head(self.norm(x))


def test_a_multiplier_on_the_stream_is_named():
    model = Scaled(32, 6)
    found = audit(model, torch.optim.AdamW(model.parameters()), base=lambda: Scaled(32, 2))
    assert found.verdict == "FAIL"
    assert [d.cause for d in found.departures] == [
        "the multiplier acts on the stream itself: it belongs on the branch, x + c·f(x)"
    ]
    assert "everything else" in found.unchecked[0]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_multiplier_inside_the_readouts_own_forward_is_seen(tied):
    """Counted as the logit multiplier; wrong, it is named; and parametrize does not add a second one."""
    base = lambda: pairs.divided(32, 2, tied=tied)[0]  # noqa: E731
    assert clean(audit(*pairs.divided(64, 4, tied=tied), base=base))
    found = audit(*pairs.divided(64, 4, power=0.5, tied=tied), base=base)
    assert [(d.name, d.role) for d in found.departures] == [("unembedding", "logits multiplier")]
    assert found.departures[0].found == pytest.approx(2**-0.5, rel=1e-3)
    model = pairs.divided(64, 4, tied=tied)[0]
    model.set_multipliers(branch=1.0, logits=1.0)
    unmark(model)
    with pytest.raises(
        UserError, match=r"'unembedding' by a factor that depends on its size: 1 at the base, 0\.5 here"
    ):
        parametrize(model, base=base)


@pytest.mark.slow
@pytest.mark.parametrize("right", [True, False])
def test_a_folded_model_with_bare_branches(right):
    """zoo's Oddity ends its branches in bare parameters: only its weights can hold the multiplier."""
    build = zoo.ZOO["oddity"]
    model = build(64, 6)
    roles = zoo.roles_for("oddity")
    scaling = parametrize(model, base=lambda: build(32, 2), style="folded", roles=roles).init_(0.05)
    groups = scaling.param_groups(1e-2, weight_decay=0.1, eps=1e-10)
    if not right:
        groups[-1]["lr"] *= 2
    found = audit(model, torch.optim.AdamW(groups), base=lambda: build(32, 2), roles=roles, **TUNED)
    assert found.verdict == ("PASS" if right else "FAIL"), found


def test_bad_base_pairs_are_named():
    model, optimizer = theirs(COMPLETEP)
    with pytest.raises(UserError, match=r"the base factory returned \(GPT, int\)"):
        audit(model, optimizer, base=lambda: (small(), 3))


def test_other_peoples_parameters_are_refused():
    model, _ = theirs(COMPLETEP)
    with pytest.raises(UserError, match="not in this model"):
        audit(model, torch.optim.AdamW(small().parameters()), base=small)


def test_unknown_optimizer_is_refused():
    model, _ = theirs(COMPLETEP)
    with pytest.raises(UserError, match="Adafactor"):
        audit(model, torch.optim.Adafactor(model.parameters()), base=small)


def test_roles_are_roles():
    model, optimizer = theirs(COMPLETEP)
    with pytest.raises(UserError, match="hidden"):
        audit(model, optimizer, base=small, roles={"blocks.*": "hidden"})
    assert Role("hidden weight") is Role.HIDDEN


@pytest.mark.slow
def test_the_result_reads_well_everywhere():
    model, optimizer = theirs(MUP, unscaled_decay)
    failed = audit(model, optimizer, base=small, rules="mup")
    assert (failed.verdict, failed.passed, failed.rules, failed.name) == ("FAIL", False, "mup", "muP")
    text = str(failed)
    assert text.startswith("FAIL: 24 settings depart from muP")
    [row] = failed.document().parts[-1].rows
    assert row[:3] == ("blocks.0.attention.qkv.weight (+23 more)", "hidden weight", "weight_decay")
    assert row[3:6] == pytest.approx((0.2, 0.1, 0.5))
    assert "not scaled with width" in row[6]
    data = json.loads(json.dumps(failed.to_json()))
    assert (data["verdict"], data["passed"], data["rules"], data["name"]) == ("FAIL", False, "mup", "muP")
    assert {d["factor"] for d in data["departures"]} == {1 / M_N}
    assert data["departures"][0]["found"] == 0.1
    assert failed._repr_html_().index("FAIL") < failed._repr_html_().index("blocks.0")

    model, optimizer = theirs(MUP)
    passed = audit(model, optimizer, base=small, rules=MUP, **TUNED)
    assert (passed.verdict, passed.passed, passed.to_json()["departures"]) == ("PASS", True, [])
    assert str(passed).startswith("PASS: every setting is as muP prescribes")


def test_a_model_without_a_final_norm_passes():
    """The stream is measured before the logit multiplier, which here acts on the same module."""

    class NoNorm(Model):
        def __init__(self, width, depth):
            super().__init__(width, depth)
            self.norm = torch.nn.Identity()

    model = NoNorm(64, 8)
    scaling = parametrize(model, base=lambda: NoNorm(32, 2)).init_(0.1)
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-3, weight_decay=0.1))
    assert clean(audit(model, optimizer, base=lambda: NoNorm(32, 2)))
