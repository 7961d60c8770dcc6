"""What parametrize promises: nothing changes at the base, and both styles are the same run."""

import copy
import json
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import completep as cp
from completep import COMPLETEP, MUP, SP, Role, Shape, UserError, alpha, parametrize
from completep.model.gpt import gpt
from completep.rules.table import flat_eps, literature
from tests.rules.training import VOCABULARY, logits, slow, step, tokens, worst

S = torch.optim.lr_scheduler
RULES = [SP, MUP, alpha(0.5), alpha(0.75), COMPLETEP, literature(0.5)]
STYLES = ["multiplier", "folded"]
MODERN = {"positions": "rotary", "activation": "swiglu", "norm": "rmsnorm", "bias": False, "qk_norm": True}
OPTIONS = {"paper": {}, "modern": MODERN, "tied": {"positions": "learned", "activation": "gelu", "tied": True}}


def small(width=32, depth=2, **options):
    return gpt(width, depth, VOCABULARY, head_size=16, context=32, **options)


def scaled(rules=COMPLETEP, style="multiplier", width=64, depth=6, options=None, seed=0, **more):
    options = options or {}
    model = small(width, depth, **options)
    scaling = parametrize(model, base=lambda: small(**options), rules=rules, style=style, **more)
    return model, scaling.init_(0.1, seed=seed)


# -- at the base nothing changes ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("rules", RULES, ids=lambda r: r.name)
def test_at_the_base_it_trains_bitwise_like_the_plain_model(rules, style):
    model = small()
    plain = copy.deepcopy(model)
    scaling = parametrize(model, base=small, rules=rules, style=style)
    optimizer = torch.optim.AdamW(scaling.param_groups(3e-3, weight_decay=0.1, eps=1e-10), betas=(0.9, 0.95))
    decayed = [p for p in plain.parameters() if p.dim() > 1]
    rest = [p for p in plain.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=3e-3, eps=1e-10, betas=(0.9, 0.95))
    for i in range(20):
        assert step(model, optimizer, i) == step(plain, reference, i)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_away_from_the_base_it_does_not():
    model = small(depth=4)
    plain = copy.deepcopy(model)
    parametrize(model, base=small)
    assert worst(model(tokens(0)), plain(tokens(0))) > 1e-3


# -- folded = multiplier -----------------------------------------------------------------------------


def optimizers(name):
    weight_decay = {"adamw": 0.1, "sgd": 0.01}.get(name, 0.0)
    eps = {"eps": 1e-6} if name in ("adamw", "adam", "adagrad") else {}
    make = {
        "adamw": lambda g: torch.optim.AdamW(g, betas=(0.9, 0.95)),
        "adam": lambda g: torch.optim.Adam(g, amsgrad=True),
        "adagrad": torch.optim.Adagrad,
        "sgd": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9),
    }[name]
    return lambda scaling: make(scaling.param_groups(1e-2, weight_decay=weight_decay, **eps, optimizer=name))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["paper", slow("modern"), slow("tied")])
@pytest.mark.parametrize("rules", [slow(MUP), slow(alpha(0.5)), COMPLETEP], ids=lambda r: r.name)
def test_folded_is_the_same_run(rules, option):
    runs = []
    for style in STYLES:
        model, scaling = scaled(rules, style, options=OPTIONS[option])
        model.double()
        scaling.init_(0.1, seed=3)
        optimizer = optimizers("adamw")(scaling)
        losses = [step(model, optimizer, i % 3) for i in range(30)]
        runs.append((model(tokens(99)).detach(), losses))
    assert worst(runs[1][0], runs[0][0]) <= 1e-9
    assert runs[1][1] == pytest.approx(runs[0][1], rel=1e-10)
    assert runs[0][1][-1] < runs[0][1][0]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_name", ["adamw", slow("adam"), slow("adagrad"), slow("sgd")])
def test_fold_and_unfold_in_the_middle_of_training(optimizer_name):
    torch.set_default_dtype(torch.float64)
    try:
        straight, moved = scaled(options=MODERN), scaled(options=MODERN)
    finally:
        torch.set_default_dtype(torch.float32)
    runs = []
    for (model, scaling), moves in ((straight, False), (moved, True)):
        optimizer = optimizers(optimizer_name)(scaling)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=30)
        for i in range(30):
            if moves and i == 11:
                scaling.fold(optimizer, schedulers=[scheduler])
                assert model.get_multipliers() == (1.0, 1.0)
            if moves and i == 21:
                scaling.unfold(optimizer, schedulers=[scheduler])
                assert model.get_multipliers() != (1.0, 1.0)
            step(model, optimizer, i)
            scheduler.step()
        runs.append(model(tokens(99)).detach())
    assert worst(runs[1], runs[0]) <= 1e-9


@pytest.mark.slow
def test_forgetting_the_optimizer_when_folding_shows():
    """The negative control of the test above: weights fold, lr and state do not."""
    model, scaling = scaled()
    other, theirs = scaled()
    a, b = optimizers("adamw")(scaling), optimizers("adamw")(theirs)
    for i in range(10):
        if i == 5:
            theirs.fold()
        step(model, a, i)
        step(other, b, i)
    assert worst(other(tokens(99)), model(tokens(99))) > 1e-3


def test_folded_weights_load_into_the_plain_class():
    model, scaling = scaled(depth=8)
    optimizer = optimizers("adamw")(scaling)
    for i in range(5):
        step(model, optimizer, i)
    before = model(tokens(7)).detach()
    scaling.fold(optimizer)
    plain = small(64, 8)
    plain.load_state_dict(model.state_dict())
    assert worst(plain(tokens(7)), before) < 1e-5


def test_unfolded_weights_in_the_plain_class_are_wrong():
    model, _ = scaled(depth=8)
    plain = small(64, 8)
    plain.load_state_dict(model.state_dict())
    assert worst(plain(tokens(7)), model(tokens(7))) > 1e-2


def mixed_groups(model, scaling):
    return [torch.optim.AdamW(model.parameters(), lr=1e-3)], []


def unknown_state(model, scaling):
    class AdamW(torch.optim.AdamW):  # the same name, one more buffer
        pass

    optimizer = AdamW(scaling.param_groups(1e-3))
    step(model, optimizer, 0)
    parameter = next(model.parameters())
    optimizer.state[parameter]["ema"] = torch.zeros_like(parameter)
    return [optimizer], []


def missing_optimizer(model, scaling):
    return [torch.optim.AdamW(scaling.param_groups(1e-3, roles=[Role.EMBEDDING]))], []


def good_then_bad(model, scaling):
    """The first optimizer could be changed, the second cannot."""
    good = torch.optim.AdamW(scaling.param_groups(1e-3))
    step(model, good, 0)
    return [good, torch.optim.AdamW(model.parameters(), lr=1e-3)], []


def floor(model, scaling):
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-3))
    return [optimizer], [S.LinearLR(optimizer), S.CosineAnnealingLR(optimizer, 4, eta_min=1e-5)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mixed_groups, "different factors"),
        (unknown_state, "ema"),
        (missing_optimizer, "no optimizer that was given holds"),
        (good_then_bad, "different factors"),
        (floor, "one floor for all groups"),
    ],
)
def test_a_refused_fold_changes_nothing(make, message):
    model, scaling = scaled()
    optimizers, schedulers = make(model, scaling)

    def everything():
        return copy.deepcopy(
            [model.state_dict(), model.get_multipliers(), scaling.style, scaling.state_dict()]
            + [o.state_dict() for o in optimizers]
            + [s.state_dict() for s in schedulers]
        )

    before = everything()
    with pytest.raises(UserError, match=message):
        scaling.fold(*optimizers, schedulers=schedulers)
    assert same(everything(), before)
    scaling.fold()  # without optimizers, after the last step
    assert scaling.style == "folded"


def same(a, b):
    """Equality of nested containers with tensors in them."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_tied_without_a_final_norm_cannot_fold():
    class Bare(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.table = nn.Embedding(VOCABULARY, width)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth)
            )

        def forward(self, ids):
            x = self.table(ids)
            for layer in self.layers:
                x = x + layer(x)
            return F.linear(x, self.table.weight)

    with pytest.raises(UserError, match=r"bare matrix product|cannot be folded"):
        parametrize(Bare(32, 4), base=lambda: Bare(16, 2), style="folded")


@pytest.mark.slow
@pytest.mark.parametrize("rules", [alpha(0.5), COMPLETEP], ids=lambda r: r.name)
def test_clipping_sees_the_unfolded_gradient(rules):
    outs, norms = [], []
    for style in STYLES:
        model, scaling = scaled(rules, style)
        model.double()
        scaling.init_(0.1, seed=5)
        optimizer = optimizers("sgd")(scaling)
        for i in range(8):
            step(model, optimizer, i, clip=lambda s=scaling: norms.append(s.clip_grad_norm_(0.05).item()))
        outs.append(model(tokens(50)).detach())
    assert norms[:8] == pytest.approx(norms[8:], rel=1e-10)
    assert max(norms) > 0.05
    assert worst(outs[1], outs[0]) <= 1e-9


def test_in_the_multiplier_style_the_norm_is_torchs_own():
    model, scaling = scaled()
    F.cross_entropy(model(tokens(0)).flatten(0, 1), tokens(0).flatten()).backward()
    assert scaling.grad_norm().item() == pytest.approx(
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item(), rel=1e-6
    )
    torch_model = copy.deepcopy(model)
    for p, q in zip(torch_model.parameters(), model.parameters(), strict=True):
        p.grad = q.grad.clone()
    torch.nn.utils.clip_grad_norm_(torch_model.parameters(), 0.1)
    scaling.clip_grad_norm_(0.1)
    for p, q in zip(torch_model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-12)


# -- groups ------------------------------------------------------------------------------------------


def setting_of(groups):
    return {name: (g["lr"], g["weight_decay"], g.get("eps")) for g in groups for name in g["names"]}


def test_groups_hold_exactly_the_tables_numbers():
    _, scaling = scaled(alpha(0.5), width=128, depth=8, options={"qk_norm": True})
    found = setting_of(scaling.param_groups(0.01, weight_decay=0.1, eps=1e-8))
    N, L = 4.0, 4.0
    assert found["embedding.weight"] == pytest.approx((0.01, 0.1, 1e-8 / N))
    assert found["blocks.3.attention.qkv.weight"] == pytest.approx((0.01 / N * L**-0.5, 0.1 * N, 1e-8 / N * L**-0.5))
    assert found["blocks.0.mlp.down.weight"] == pytest.approx((0.01 / N * L**-0.5, 0.1 * N, 1e-8 / N * L**-0.5))
    assert found["blocks.7.mlp.up.bias"] == pytest.approx((0.01 * L**-0.5, 0.0, 1e-8 / N * L**-0.5))
    assert found["blocks.7.mlp_norm.weight"] == pytest.approx((0.01 * L**-0.5, 0.0, 1e-8 / N * L**-0.5))
    assert found["blocks.7.attention.q_norm.weight"] == pytest.approx((0.01 * L**-0.5, 0.0, 1e-8 * L**-0.5))
    assert found["final_norm.bias"] == pytest.approx((0.01, 0.0, 1e-8 / N))
    assert found["unembedding.weight"] == pytest.approx((0.01, 0.1, 1e-8 / N))


@pytest.mark.slow
def test_folded_groups_follow_the_folding_rule():
    _, plain = scaled(width=128, depth=8)
    _, folded = scaled(width=128, depth=8, style="folded")
    a = setting_of(plain.param_groups(0.01, weight_decay=0.1, eps=1e-8))
    b = setting_of(folded.param_groups(0.01, weight_decay=0.1, eps=1e-8))
    for name, c in {
        "blocks.0.attention.out.weight": 1 / 4,
        "unembedding.weight": 1 / 4,
        "embedding.weight": 1.0,
    }.items():
        lr, decay, eps = a[name]
        assert b[name] == pytest.approx((lr * c, decay / c, eps / c)), name


ABSENT = {
    "embedding bias", "unembedding bias", "expert weight", "router", "block table", "block vector", "stream scale",
    "head weight", "head bias",
}  # fmt: skip


@pytest.mark.slow
def test_few_groups_and_every_parameter_in_one():
    model, scaling = scaled(depth=24, options={"qk_norm": True})
    groups = scaling.param_groups(1e-3, weight_decay=0.1)
    assert len(groups) <= 8
    names = [n for g in groups for n in g["names"]]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    assert all(g["lr"] == 1e-3 * g["lr_scale"] for g in groups)
    assert {r for g in groups for r in g["roles"]} == {str(r) for r in Role} - ABSENT


SCHEDULERS = {
    "LambdaLR": lambda o: S.LambdaLR(o, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: S.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [2, 4], 0.5),
    "ConstantLR": lambda o: S.ConstantLR(o, 0.3, 3),
    "LinearLR": lambda o: S.LinearLR(o, 0.1, 1.0, 5),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: S.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: S.OneCycleLR(o, [g["lr"] for g in o.param_groups], total_steps=9),
    "CyclicLR": lambda o: S.CyclicLR(
        o, [g["lr"] / 10 for g in o.param_groups], [g["lr"] for g in o.param_groups], 2, cycle_momentum=False
    ),
    "SequentialLR": lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, 1, 3), S.CosineAnnealingLR(o, 4)], [3]),
    "ChainedScheduler": lambda o: S.ChainedScheduler([S.ConstantLR(o, 0.5, 2), S.ExponentialLR(o, 0.9)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_torch_scheduler_keeps_the_ratios_and_survives_a_fold(name):
    model, scaling = scaled(alpha(0.5))
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-2))
    scheduler = SCHEDULERS[name](optimizer)
    for i in range(6):
        if i == 4:
            scaling.fold(optimizer, schedulers=[scheduler])
        base = {round(g["lr"] / g["lr_scale"], 9) for g in optimizer.param_groups}
        assert len(base) == 1, f"step {i}"
        step(model, optimizer, i)
        scheduler.step()
    assert len({round(g["lr"] / g["lr_scale"], 9) for g in optimizer.param_groups}) == 1


def test_a_scheduler_that_assigns_one_rate_to_all_is_seen():
    """The negative control: OneCycleLR with one max_lr overwrites the groups' own."""
    _, scaling = scaled(alpha(0.5))
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-2))
    S.OneCycleLR(optimizer, 1e-2, total_steps=9)
    assert len({round(g["lr"] / g["lr_scale"], 9) for g in optimizer.param_groups}) > 1


@pytest.mark.parametrize("name", ["lion", "SignSGD"])
def test_sign_like_optimizers_take_adams_rates_and_have_no_epsilon(name):
    _, scaling = scaled(alpha(0.5))
    adam, sign = (setting_of(scaling.param_groups(0.01, weight_decay=0.1, optimizer=o)) for o in ("adamw", name))
    assert {n: s[:2] for n, s in adam.items()} == {n: s[:2] for n, s in sign.items()}
    assert {s[2] for s in sign.values()} == {None}


@pytest.mark.slow
def test_muon_and_adamw_share_the_work():
    model, scaling = scaled(alpha(0.5), width=128, depth=8)
    muon = torch.optim.Muon(scaling.param_groups(0.02, weight_decay=0.1, optimizer=torch.optim.Muon))
    adamw = torch.optim.AdamW(scaling.param_groups(1e-3, optimizer="adamw", roles=set(Role) - {Role.HIDDEN}))
    taken = [n for o in (muon, adamw) for g in o.param_groups for n in g["names"]]
    assert sorted(taken) == sorted(n for n, _ in model.named_parameters())
    assert {g["lr"] for g in muon.param_groups} == {0.02 * 4.0**-0.5}
    assert {g["weight_decay"] for g in muon.param_groups} == {0.1}
    loss = F.cross_entropy(model(tokens(0)).flatten(0, 1), tokens(0).flatten())
    loss.backward()
    muon.step()
    adamw.step()
    assert F.cross_entropy(model(tokens(0)).flatten(0, 1), tokens(0).flatten()) < loss


def test_muon_follows_the_shape_where_heads_do_not_grow():
    def model(width, depth):  # grouped queries: the key projection keeps its fan-out
        return Grouped(width, depth)

    scaling = parametrize(model(128, 2), base=lambda: model(32, 2)).init_()
    lr = setting_of(scaling.param_groups(1.0, optimizer="muon"))
    assert lr["layers.0.q.weight"][0] == pytest.approx(1.0)
    # fan_out 16 stays, fan_in grows 32 → 128; torch's Muon leaves wide matrices alone, so sqrt(16/128) / sqrt(16/32)
    assert lr["layers.0.k.weight"][0] == pytest.approx(0.5)


class GroupedLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, 16), nn.Linear(width, 16)
        self.o = nn.Linear(width, width)

    def forward(self, x):
        h = self.norm(x)
        q = self.q(h).unflatten(-1, (-1, 16)).transpose(1, 2)
        k, v = (f(h).unsqueeze(1).expand_as(q) for f in (self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Grouped(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.layers = nn.Sequential(*[GroupedLayer(width) for _ in range(depth)])
        self.last = nn.RMSNorm(width)
        self.read = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        return self.read(self.last(self.layers(self.table(ids))))


def test_the_readout_bias_stays_outside_the_logit_multiplier():
    model = Grouped(64, 2)
    scaling = parametrize(model, base=lambda: Grouped(32, 2)).init_()
    with torch.no_grad():
        model.read.weight.zero_()
        model.read.bias.fill_(3.0)
    assert torch.equal(model(tokens(0)), torch.full((2, 9, VOCABULARY), 3.0))
    assert setting_of(scaling.param_groups(1.0, eps=1.0))["read.bias"] == (1.0, 0.0, 1.0)
    scaling.fold()
    assert torch.equal(model(tokens(0)), torch.full((2, 9, VOCABULARY), 3.0))


# -- init --------------------------------------------------------------------------------------------


def test_init_has_the_tables_standard_deviations():
    model, scaling = scaled(width=256, depth=4)
    scaling.init_(0.05, seed=0)
    m_N = 8.0
    expected = {"embedding.weight": 0.05, "unembedding.weight": 0.05, "blocks.1.mlp.up.weight": 0.05 * m_N**-0.5}
    for name, std in expected.items():
        p = model.get_parameter(name)
        assert p.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * p.numel()))
        assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel())
    assert torch.equal(model.blocks[0].mlp_norm.weight, torch.ones(256))
    assert not model.blocks[0].mlp.up.bias.any()


def test_init_depends_on_seed_and_name_alone():
    a, _ = scaled(seed=4)
    torch.manual_seed(123)
    torch.randn(17)
    b, _ = scaled(seed=4, depth=3)
    c, _ = scaled(seed=5)
    assert torch.equal(a.embedding.weight, b.embedding.weight)
    assert torch.equal(a.blocks[2].mlp.up.weight, b.blocks[2].mlp.up.weight)
    assert not torch.equal(a.embedding.weight, c.embedding.weight)
    assert not torch.equal(a.blocks[0].mlp.up.weight, a.blocks[1].mlp.up.weight)


def test_parametrize_leaves_the_random_state_alone():
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    model = small()
    torch.manual_seed(0)
    parametrize(model, base=lambda: small(16))
    assert torch.equal(torch.randn(3), expected)


def test_meta_device_to_real():
    with torch.device("meta"):
        model = small(64, 6)
    scaling = parametrize(model, base=small)
    with pytest.raises(UserError, match="to_empty"):
        scaling.init_(0.1)
    model.to_empty(device="cpu")
    scaling.init_(0.1)
    expected, _ = scaled()
    assert torch.equal(model(tokens(0)), expected(tokens(0)))


def test_frozen_parameters_are_left_alone():
    model = small(64, 4)
    model.embedding.weight.requires_grad_(False)
    before = model.embedding.weight.clone()
    scaling = parametrize(model, base=small).init_(0.1)
    assert torch.equal(model.embedding.weight, before)
    assert "embedding.weight" not in setting_of(scaling.param_groups(1e-3))
    assert next(r for r in scaling.explain() if r.name == "embedding.weight").trained is False


# -- nothing is lost on the way ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "build", [small, lambda *a: Grouped(a[0] if a else 32, a[1] if a else 2)], ids=["own", "hooks"]
)
def test_deepcopy_and_pickle_keep_the_multipliers(build):
    model = build(64, 6)
    scaling = parametrize(model, base=lambda: build(32, 2)).init_(0.1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens(0)), model(tokens(0)))
        theirs = scaling.on(other)
        theirs.fold()
        assert worst(other(tokens(0)), model(tokens(0))) < 1e-5
        assert scaling.style == "multiplier"
        plain = build(64, 6)
        plain.load_state_dict(other.state_dict())
        assert worst(plain(tokens(0)), model(tokens(0))) < 1e-5


def test_another_model_is_not_taken_for_a_copy():
    _, scaling = scaled()
    with pytest.raises(UserError, match="other parameters"):
        scaling.on(small(64, 5))


@pytest.mark.slow
@pytest.mark.parametrize("build", [small, lambda *a: Grouped(*(a or (32, 2)))], ids=["own", "hooks"])
def test_compile_without_graph_breaks(build):
    model = build(64, 4)
    parametrize(model, base=lambda: build(32, 2)).init_(0.1)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(model)(tokens(0))
    assert explained.graph_break_count == 0
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert worst(compiled(tokens(0)), model(tokens(0))) < 1e-5
    assert parametrize(torch.compile(build(64, 4), backend="eager"), base=lambda: build(32, 2)).base == Shape(32, 2)


@pytest.mark.slow
def test_checkpoint_carries_the_rules(tmp_path):
    model, scaling = scaled()
    torch.save({"model": model.state_dict(), "scaling": scaling.state_dict()}, tmp_path / "c.pt")
    state = torch.load(tmp_path / "c.pt", weights_only=True)["scaling"]
    assert json.loads(json.dumps(state)) == state
    scaled()[1].load_state_dict(state)
    others = {
        "rules: 'completep' → 'mup'": scaled(MUP)[1],
        "style: 'multiplier' → 'folded'": scaled(style="folded")[1],
        r"base.depth: 2 → 3": parametrize(small(64, 6), base=lambda: small(32, 3)),
        "role: 'hidden bias' → 'block norm'": scaled(roles={"blocks.*.mlp.up.bias": Role.BLOCK_NORM})[1],
    }
    for difference, other in others.items():
        with pytest.raises(UserError, match=difference):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("rules", "stored"),
    [
        (COMPLETEP, "CompleteP"),
        (MUP, "muP"),
        (SP, "SP"),
        (literature(0.5), "literature alpha=0.5"),
        (flat_eps(1), "flat-eps=1"),
    ],
)
def test_checkpoints_of_older_versions_load(rules, stored):
    """They hold the display name of that version instead of the key."""
    scaling = scaled(rules)[1]
    old = scaling.state_dict() | {"rules": stored}
    scaling.load_state_dict(old)
    with pytest.raises(UserError, match=r"rules: 'alpha=0\.75' →"):
        scaling.load_state_dict(old | {"rules": "alpha=0.75"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:not checked.*a Shape does not say")
def test_a_shape_is_as_good_as_a_factory_for_a_plain_transformer():
    model = small(64, 6, **MODERN)
    by_shape = parametrize(small(64, 6, **MODERN), base=Shape(32, 2))
    by_factory = parametrize(model, base=lambda: small(**MODERN))
    assert by_shape.state_dict() == by_factory.state_dict()


def test_shallower_than_the_base():
    model, scaling = scaled(depth=1)
    assert scaling.parameters["blocks.0.mlp.up.weight"].m_L == 0.5
    assert model.get_multipliers() == (2.0, 0.5)


def test_every_parameters_own_fan_in_counts():
    def build(width, inner):
        return MlpOnly(width, inner)

    scaling = parametrize(build(64, 256), base=lambda: build(32, 32))
    assert scaling.parameters["layers.0.up.weight"].m_N == 2
    assert scaling.parameters["layers.0.down.weight"].m_N == 8


class MlpLayer(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MlpOnly(nn.Module):
    def __init__(self, width, inner, depth=2):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(MlpLayer(width, inner) for _ in range(depth))
        self.last, self.read = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.read(self.last(x))


@pytest.mark.slow
def test_growing_heads_put_a_factor_on_the_queries():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def qwen(width, head):
        sizes = {"hidden_size": width, "intermediate_size": width, "vocab_size": VOCABULARY, "num_hidden_layers": 2}
        return Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=head))

    model = qwen(64, 32)
    scaling = parametrize(model, base=lambda: qwen(32, 16)).init_(0.1)
    m = next(m for m in scaling.multipliers if m.kind == "attention")
    assert m.factor == pytest.approx(2**-0.5)
    assert m.modules == ("model.layers.0.self_attn.q_norm", "model.layers.1.self_attn.q_norm")
    before = logits(model, tokens(0)).detach()
    scaling.fold()
    assert worst(logits(model, tokens(0)), before) < 1e-5
    assert [m.kind for m in parametrize(small(64, 2), base=lambda: small(32, 2)).multipliers] == ["branch", "logits"]


def test_growing_heads_from_a_fused_projection_are_refused():
    class Layer(nn.Module):
        def __init__(self, head):
            super().__init__()
            self.head_dim, self.norm = head, nn.LayerNorm(64)
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x):
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
            return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    class Model(MlpOnly):
        def __init__(self, head):
            super().__init__(64, 64)
            self.layers = nn.ModuleList(Layer(head) for _ in range(2))

    with pytest.raises(UserError, match="fused projection"):
        parametrize(Model(32), base=lambda: Model(16))


def test_public_names():
    for name in ("parametrize", "SP", "MUP", "alpha", "COMPLETEP", "Shape", "Role", "UserError"):
        assert hasattr(cp, name)
        assert name in cp.__all__
