"""Muon on experts: lists of matrices take the rule of hidden matrices, tensors that stack them are refused."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import completep as cp
from completep import COMPLETEP, Role, alpha, parametrize
from completep.errors import UserError
from completep.rules.table import Column, Power
from tests.anatomy.parts import Flat, Model, Plain, RoutedBlock, flat_block

BOTH = [Role.HIDDEN, Role.EXPERT]


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Listed(nn.Module):
    """Half of the experts are active."""

    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.active, self.gate = count // 2, nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best, chosen = scores.topk(self.active, -1)
        share = torch.zeros_like(scores).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        made = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            made = made + share[..., i : i + 1] * expert(x)
        return made


class Block(Plain):
    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__(width)
        self.norm2, self.mixture = nn.LayerNorm(width), Listed(width, inner, count)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(x)
        return x + self.mixture(self.norm2(x))


def listed(width, depth, inner=None, count=4):
    return Model(width, [lambda n: Block(n, n if inner is None else inner, count)] * depth)


def stacked(width, depth):
    return Model(width, [RoutedBlock] * depth)


def scaled(target, base, rules=COMPLETEP):
    torch.manual_seed(0)
    return parametrize(target(), base=base, rules=rules).init_(0.1, seed=0)


def response(scaling, name, lr=0.02):
    """RMS(ΔW x) / RMS(x) of one step of torch's Muon, for the input that the gradient aligns with."""
    parameter = dict(scaling.model.named_parameters())[name]
    out, x = torch.randn(parameter.shape[0]), torch.randn(parameter.shape[1])
    parameter.grad = -torch.outer(out, x)
    before = parameter.detach().double().clone()
    groups = [g for g in scaling.param_groups(lr, optimizer="muon", roles=BOTH) if name in g["names"]]
    torch.optim.Muon(groups).step()
    moved = (parameter.detach().double() - before) @ x.double()
    return (moved.square().mean().sqrt() / x.double().square().mean().sqrt()).item()


EXPERT = "blocks.0.mixture.experts.3."


@pytest.mark.parametrize("matrix", ["up.weight", "down.weight"])
@pytest.mark.parametrize("inner", [None, 32])  # with the width, or fixed: then the aspect ratio changes
@pytest.mark.parametrize("a", [0.5, 1.0])
def test_an_expert_moves_its_output_alike_at_any_width_and_number_of_experts(a, inner, matrix):
    def base():
        return listed(32, 2, inner)

    small = scaled(base, base, alpha(a))
    wide = scaled(lambda: listed(128, 2, inner), base, alpha(a))
    deep = scaled(lambda: listed(32, 8, inner), base, alpha(a))
    many = scaled(lambda: listed(32, 2, inner, count=16), base, alpha(a))
    start = response(small, EXPERT + matrix)
    assert response(wide, EXPERT + matrix) == pytest.approx(start, rel=0.05)  # Muon works in bfloat16
    assert response(many, EXPERT + matrix) == pytest.approx(start, rel=0.05)
    assert response(deep, EXPERT + matrix) == pytest.approx(start * 4 ** (a - 1), rel=0.05)


def test_a_width_factor_would_be_seen():
    rows = COMPLETEP.columns[Column.MUON]
    wrong = replace(rows[Role.EXPERT], lr=Power(width=-1 / 2))
    rules = replace(COMPLETEP, columns={**COMPLETEP.columns, Column.MUON: {**rows, Role.EXPERT: wrong}})
    base = response(scaled(lambda: listed(32, 2), lambda: listed(32, 2), rules), EXPERT + "up.weight")
    wide = response(scaled(lambda: listed(128, 2), lambda: listed(32, 2), rules), EXPERT + "up.weight")
    assert wide == pytest.approx(base / 2, rel=0.05)


def test_an_expert_has_the_settings_of_a_hidden_matrix_of_its_shape():
    scaling = scaled(lambda: listed(128, 8, 32, count=16), lambda: listed(32, 2, 32), alpha(0.5))
    groups = scaling.param_groups(1.0, weight_decay=0.1, optimizer="muon", roles=BOTH)
    lr = {name: g["lr"] for g in groups for name in g["names"]}
    decay = {name: g["lr"] * g["weight_decay"] for g in groups for name in g["names"]}
    assert lr["blocks.0.up.weight"] == pytest.approx(1 / 2)  # m_L^(α-1)
    # fan-in 32 → 128 at fan-out 32: torch's Muon leaves wide matrices alone, so sqrt(32/128) more
    assert lr[EXPERT + "up.weight"] == pytest.approx(1 / 2 * 1 / 2)
    # fan-out 32 → 128: torch's Muon multiplies by sqrt(128/32) itself
    assert lr[EXPERT + "down.weight"] == pytest.approx(1 / 2)
    assert {round(d, 9) for d in decay.values()} == {0.05}


def test_without_roles_experts_are_left_to_adamw():
    """Both optimizers of the documentation train every parameter once."""
    scaling = scaled(lambda: listed(64, 2), lambda: listed(32, 2))
    names = sorted(scaling.parameters)

    def taken(muon, adamw):
        groups = scaling.param_groups(0.02, optimizer="muon", roles=muon) + scaling.param_groups(1e-3, roles=adamw)
        return sorted(name for group in groups for name in group["names"])

    assert taken(None, set(Role) - {Role.HIDDEN}) == names
    assert taken(BOTH, set(Role) - set(BOTH)) == names


def flat(width, depth):
    return Model(width, [flat_block(Flat, 4)] * depth)


@pytest.mark.parametrize(
    ("model", "shape"), [(stacked, r"\(4, 64, 64\)"), (flat, r"\(256, 64\)")], ids=["stacked", "flat"]
)
def test_experts_in_one_tensor_are_refused_with_a_fix_that_works(model, shape):
    scaling = scaled(lambda: model(64, 2), lambda: model(32, 2))
    with pytest.raises(UserError, match=rf"'blocks.0.mixture.experts.up', of shape {shape}, holds those of") as e:
        scaling.param_groups(0.02, optimizer="muon", roles=BOTH)
    assert "leave Role.EXPERT out of Muon's roles and add it to AdamW's" in e.value.fix
    torch.optim.Muon(scaling.param_groups(0.02, optimizer="muon", roles=[Role.HIDDEN]))
    groups = scaling.param_groups(1e-3, roles=set(Role) - {Role.HIDDEN})
    torch.optim.AdamW(groups)
    assert any("blocks.0.mixture.experts.up" in group["names"] for group in groups)


def test_torchs_muon_does_not_take_stacked_matrices():
    """The reason for the refusal. If this fails, a rule for stacked experts is worth deriving."""
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        torch.optim.Muon([nn.Parameter(torch.zeros(4, 8, 8))])


SIZES = {"widths": (64, 128, 256), "depths": (2, 4, 8), "optimizer": "muon", "workers": 1}


@pytest.mark.slow
@pytest.mark.parametrize("model", [listed, stacked])
def test_check_passes(model):
    result = cp.check(model, **SIZES)
    assert result.verdict == "PASS", [str(f) for f in result.findings if f.word != "PASS"]
    columns = set(result.survey.tensors.filter(role=Role.EXPERT)["column"])
    assert columns == {Column.MUON if model is listed else Column.ADAM}


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["width", "depth"])
def test_check_names_a_wrong_rule(axis):
    rows = COMPLETEP.columns[Column.MUON]
    wrong = replace(rows[Role.EXPERT], lr=Power(**{axis: {"width": -1 / 4, "depth": 1 / 4}[axis]}))
    rules = replace(COMPLETEP, columns={**COMPLETEP.columns, Column.MUON: {**rows, Role.EXPERT: wrong}})
    other = {"width": "depths", "depth": "widths"}[axis]
    sizes = {key: value for key, value in SIZES.items() if key != other}
    result = cp.check(listed, **sizes, base=(64, 2), rules=rules)
    assert result.verdict == "FAIL"
    assert {(f.tensor, f.setting, f.axis) for f in result.culprits} == {
        (f"blocks.*.mixture.experts.*.{matrix}.weight", "learning rate", axis) for matrix in ("up", "down")
    }
