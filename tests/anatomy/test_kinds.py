"""Parts of models beyond the plain transformer: experts, gates, heads with layers, blocks of several kinds."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from completep import Role, UserError, parametrize
from tests.anatomy.parts import Flat, Model, Plain, RoutedBlock, flat_block
from tests.rules.training import logits, tokens, worst


class Double(Plain):
    """Two branches."""

    def __init__(self, width):
        super().__init__(width)
        self.norm2, self.second = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(x)
        return x + self.second(self.norm2(x))


def scaled(kinds, base_kinds, style="multiplier", width=64):
    torch.manual_seed(0)
    model = Model(width, kinds)
    return model, parametrize(model, base=lambda: Model(32, base_kinds), style=style)


def roles(scaling):
    return {r.template: r.role for r in scaling.parameters.values()}


def same_in_both_styles(kinds, base_kinds):
    """The largest relative difference between the two styles."""
    made = []
    for style in ("multiplier", "folded"):
        model, scaling = scaled(kinds, base_kinds, style)
        scaling.init_(0.1, seed=3)
        with torch.no_grad():
            made.append(logits(model.eval(), tokens(0)))
    return worst(*made)


# -- depth -------------------------------------------------------------------------------------------


def test_depth_counts_branches_where_blocks_differ():
    _, scaling = scaled([Plain, Plain, Plain, Double, Double, Double], [Plain, Double])
    assert scaling.factors()["branch"] == pytest.approx(3 / 9)
    assert scaling.parameters["blocks.0.up.weight"].m_L == 3
    _, scaling = scaled([Plain, Plain, Plain, Double], [Plain, Double])  # 5 branches against 3, 4 blocks against 2
    assert scaling.factors()["branch"] == pytest.approx(3 / 5)
    assert {r.m_L for r in scaling.parameters.values() if "blocks" in r.name} == {5 / 3}
    _, equal = scaled([Double] * 6, [Double] * 2)
    assert equal.factors()["branch"] == pytest.approx(1 / 3)


# -- gates -------------------------------------------------------------------------------------------


class ReZero(Plain):
    def __init__(self, width):
        super().__init__(width)
        self.strength = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.strength * self.branch(x)


class OwnGate(Plain):
    """A gate that is computed from the stream, one number per token."""

    def __init__(self, width):
        super().__init__(width)
        self.gate = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.gate(x)) * self.branch(x)


@pytest.mark.parametrize(("kind", "gate"), [(ReZero, "strength"), (OwnGate, "gate.weight")])
def test_a_gate_on_a_branch_leaves_the_multiplier_to_the_matrix_before_it(kind, gate):
    _, scaling = scaled([kind] * 4, [kind] * 2)
    assert scaling.parameters["blocks.0.down.weight"].fold == 0.5
    assert scaling.parameters[f"blocks.0.{gate}"].fold == 1.0
    assert roles(scaling)[f"blocks.*.{gate}"] is (Role.BLOCK_VECTOR if kind is ReZero else Role.HIDDEN)
    assert same_in_both_styles([kind] * 4, [kind] * 2) < 1e-5


class GatedStream(Plain):
    """The gate multiplies the stream too, which no rule covers."""

    def __init__(self, width):
        super().__init__(width)
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * (x + self.branch(x))


def test_a_gate_on_the_stream_is_refused():
    with pytest.raises(UserError, match=r"result of Mul|reach back to an embedding|residual stream"):
        scaled([GatedStream] * 4, [GatedStream] * 2)


class Normalised(Plain):
    """A weight that is computed from a bare parameter: not elementwise, although no product takes it directly."""

    def __init__(self, width):
        super().__init__(width)
        self.matrix = nn.Parameter(torch.randn(width, width))

    def branch(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x) @ (self.matrix / self.matrix.norm()))))


class ByHand(Plain):
    """A product that is written as a sum over an axis."""

    def __init__(self, width):
        super().__init__(width)
        self.matrix = nn.Parameter(torch.randn(width, width))

    def branch(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up((self.norm(x)[..., None] * self.matrix).sum(-2))))


def test_a_computed_matrix_is_not_taken_for_a_vector():
    with pytest.raises(UserError, match=r"no role: blocks\.\*\.matrix"):
        scaled([Normalised] * 4, [Normalised] * 2)
    with pytest.raises(UserError, match="two of its axes grow"):
        scaled([ByHand] * 4, [ByHand] * 2)


# -- experts -----------------------------------------------------------------------------------------


class LeakyBlock(RoutedBlock):
    leak = 0.1


def test_experts_and_router_of_a_model_by_hand():
    _, scaling = scaled([RoutedBlock] * 4, [RoutedBlock] * 2)
    found = roles(scaling)
    assert found["blocks.*.mixture.router.weight"] is Role.ROUTER
    assert found["blocks.*.mixture.experts.up"] is found["blocks.*.mixture.experts.down"] is Role.EXPERT
    up, router = (scaling.parameters[f"blocks.0.mixture.{n}"] for n in ("experts.up", "router.weight"))
    assert (up.part.fan_in, up.m_N, up.m_out) == ((1,), 2.0, 2.0)
    assert (router.m_N, router.m_out) == (2.0, 1.0)
    assert scaling.parameters["blocks.0.mixture.experts.down"].fold == 0.5
    assert scaling.settings("blocks.0.mixture.router.weight").eps == pytest.approx(1 / 2)  # 1/m_L, and not 1/m_N
    assert same_in_both_styles([RoutedBlock] * 4, [RoutedBlock] * 2) < 1e-5


def test_a_mixture_that_leaks_the_stream_is_caught():
    with pytest.raises(UserError, match=r"adds nothing to the stream without the others"):
        scaled([LeakyBlock] * 4, [LeakyBlock] * 2)


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Listed(nn.Module):
    """Experts in a list. Only those that a token is routed to run."""

    count = 8

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, self.count, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(self.count))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        share, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        share = share / share.sum(-1, keepdim=True)
        made = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            if len(token):
                made = made.index_add(0, token, expert(rows[token]) * share[token, place, None])
        return made.view_as(x)


class ManyListed(Listed):
    count = 32


class ListedBlock(Plain):
    kind = Listed

    def __init__(self, width):
        super().__init__(width)
        self.norm2, self.mixture = nn.LayerNorm(width), self.kind(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(x)
        return x + self.mixture(self.norm2(x))


class ManyListedBlock(ListedBlock):
    kind = ManyListed


@pytest.mark.slow
def test_a_list_of_experts_has_one_template_and_counts_as_one_fan_out():
    """Many of 32 experts get no token of the example: they have the roles of the others."""
    _, scaling = scaled([ManyListedBlock] * 4, [ListedBlock] * 2)
    found = roles(scaling)
    assert found["blocks.*.mixture.gate.weight"] is Role.ROUTER
    assert found["blocks.*.mixture.experts.*.up.weight"] is Role.EXPERT
    assert found["blocks.*.mixture.experts.*.down.bias"] is Role.HIDDEN_BIAS
    up, gate = (scaling.parameters[f"blocks.0.mixture.{n}.weight"] for n in ("experts.31.up", "gate"))
    assert (up.m_N, up.m_out, gate.m_N, gate.m_out) == (2.0, 8.0, 2.0, 4.0)  # twice as wide, four times the experts
    down = [r for n, r in scaling.parameters.items() if ".experts." in n and ".down." in n]
    assert len(down) == 4 * 32 * 2
    assert {r.fold for r in down} == {0.5}
    assert scaling.settings("blocks.0.mixture.experts.3.up.weight").eps == pytest.approx(1 / 8 / 2)
    assert same_in_both_styles([ManyListedBlock] * 4, [ListedBlock] * 2) < 1e-5


def test_a_broken_list_of_experts_is_caught():
    class Leaks(Listed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.sigmoid()

    class Block(ListedBlock):
        kind = Leaks

    with pytest.raises(UserError, match="takes in the result of Sigmoid"):
        scaled([Block] * 4, [Block] * 2)


# -- heads -------------------------------------------------------------------------------------------


class DeepHead(Model):
    """norm → layer → GELU → norm → readout, as in an MLM head."""

    def __init__(self, width, kinds):
        super().__init__(width, kinds)
        self.dense, self.norm2 = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm2(F.gelu(self.dense(self.norm(x)))))


def test_a_head_with_a_layer_has_rules_without_depth():
    model = DeepHead(64, [Plain] * 4)
    scaling = parametrize(model, base=lambda: DeepHead(32, [Plain] * 2))
    found = roles(scaling)
    assert (found["dense.weight"], found["dense.bias"]) == (Role.HEAD, Role.HEAD_BIAS)
    assert found["norm.weight"] is found["norm2.weight"] is Role.FINAL_NORM
    weight, bias = scaling.settings("dense.weight"), scaling.settings("dense.bias")
    assert (weight.init_std, weight.lr, weight.weight_decay, weight.eps) == pytest.approx((2**-0.5, 0.5, 2.0, 0.5))
    assert (bias.lr, bias.eps) == (1.0, 0.5)


@pytest.mark.slow
def test_experts_in_a_list_whose_gates_do_not_add_up_to_one():
    """Ties decide which experts run in the measurement. What arrives from all of them together is one factor."""

    class Shares(Listed):
        def forward(self, x: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            share, chosen = self.gate(rows).softmax(-1).topk(2, -1)
            made = torch.zeros_like(rows)
            for i, expert in enumerate(self.experts):
                token, place = torch.where(chosen == i)
                made = made.index_add(0, token, expert(rows[token]) * share[token, place, None])
            return made.view_as(x)

    class Block(ListedBlock):
        kind = Shares

    _, scaling = scaled([Block] * 4, [Block] * 2)
    assert roles(scaling)["blocks.*.mixture.experts.*.up.weight"] is Role.EXPERT
    assert same_in_both_styles([Block] * 4, [Block] * 2) < 1e-5


class FlatSlices(Flat):
    def forward(self, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for i, (up, down) in enumerate(zip(self.up.chunk(self.count), self.down.chunk(self.count), strict=True)):
            y = y + (share * (chosen == i)).sum(-1, keepdim=True) * (F.silu(x @ up.T) @ down)
        return y


@pytest.mark.parametrize("kind", [Flat, FlatSlices])
def test_experts_that_are_stored_flat_do_not_count_in_the_fan_in(kind):
    """Four times the experts, and twice the width."""
    _, scaling = scaled([flat_block(kind, 16)] * 4, [flat_block(kind, 4)] * 2)
    up, down = (scaling.parameters[f"blocks.0.mixture.experts.{n}"] for n in ("up", "down"))
    assert up.role is down.role is Role.EXPERT
    assert (up.m_N, up.m_out) == (2.0, 8.0)
    assert (down.m_N, down.m_out) == (2.0, 8.0)
    assert scaling.settings(down.name).lr == 0.5


def test_flat_matrices_that_nothing_counts_are_refused():
    class Half(Plain):
        """Two halves of a matrix, for two halves of the features, which are not added up."""

        def __init__(self, width):
            super().__init__(width)
            self.mix = nn.Parameter(torch.randn(width, width // 2))

        def branch(self, x: Tensor) -> Tensor:
            a, b = self.norm(x).chunk(2, -1)
            top, bottom = self.mix.chunk(2)
            return self.down(F.gelu(self.up(torch.cat((a @ top, b @ bottom), -1))))

    with pytest.raises(UserError, match="holds 2 matrices one after the other") as e:
        scaled([Half] * 4, [Half] * 2)
    assert "three axes" in e.value.fix


# -- one matrix per head -----------------------------------------------------------------------------


class PerHead(Plain):
    """Heads of 8: one matrix into and one out of every head, whose results are added up."""

    def __init__(self, width):
        super().__init__(width)
        heads = width // 8
        self.norm2 = nn.LayerNorm(width)
        self.into = nn.Parameter(torch.randn(heads, width, 8))
        self.out = nn.Parameter(torch.randn(heads, 8, width))

    def heads(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1).expand(len(self.into), -1, -1)
        return torch.bmm(F.silu(torch.bmm(rows, self.into)), self.out).sum(0).view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch(x)
        return x + self.heads(self.norm2(x))


class PerHeadMatmul(PerHead):
    def heads(self, x: Tensor) -> Tensor:
        return (F.silu(x[:, None] @ self.into) @ self.out).sum(1)


class PerHeadEinsum(PerHead):
    def heads(self, x: Tensor) -> Tensor:
        made = torch.einsum("btn,hnd->bhtd", x, self.into)
        return torch.einsum("bhtd,hdn->bhtn", F.silu(made), self.out).sum(1)


class PerHeadLoop(PerHead):
    def heads(self, x: Tensor) -> Tensor:
        return sum(F.silu(x @ a) @ b for a, b in zip(self.into, self.out, strict=True))


class PerHeadBeside(PerHead):
    """Results beside each other, not added up: a block-diagonal matrix, as in RecurrentGemma."""

    def __init__(self, width):
        super().__init__(width)
        self.out = nn.Parameter(torch.randn(width // 8, 8, 8))
        self.last = nn.Linear(width, width)

    def heads(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1).expand(len(self.into), -1, -1)
        made = torch.bmm(F.silu(torch.bmm(rows, self.into)), self.out)
        return self.last(made.movedim(0, 1).reshape(x.shape))


@pytest.mark.parametrize("kind", [PerHead, PerHeadMatmul, PerHeadEinsum, PerHeadLoop])
def test_heads_that_are_added_up_count_in_the_fan_in(kind):
    given = {"*.into": Role.HIDDEN} if kind is PerHeadEinsum else None
    model, base = Model(64, [kind] * 4), lambda: Model(32, [kind] * 2)
    scaling = parametrize(model, base=base, style="folded", roles=given)
    into, out = (scaling.parameters[f"blocks.0.{n}"] for n in ("into", "out"))
    assert (into.m_N, into.m_out) == (2.0, 2.0)
    assert (out.part.fan_in, out.m_N, out.m_out) == ((0, 1), 2.0, 2.0)
    assert (out.role, out.fold) == (Role.HIDDEN, 0.5)
    assert scaling.settings("blocks.0.out").lr == pytest.approx(0.5 * 0.5)


def test_heads_that_stand_beside_each_other_do_not():
    _, scaling = scaled([PerHeadBeside] * 4, [PerHeadBeside] * 2)
    out = scaling.parameters["blocks.0.out"]
    assert (out.part.fan_in, out.m_N, out.m_out) == ((1,), 1.0, 2.0)


def test_one_head_does_not_show_whether_several_add_up():
    with pytest.raises(UserError, match=r"blocks\.0\.(into|out)' holds one matrix") as e:
        parametrize(Model(64, [PerHead] * 4), base=lambda: Model(8, [PerHead] * 2), style="folded")
    assert "at least two" in e.value.fix
