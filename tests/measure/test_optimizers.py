"""The derived SGD and Muon columns put to a coordinate check by hand, independent of the one in the package."""

import math

import pytest
import torch
import torch.nn.functional as F

from completep import COMPLETEP, MUP, SP, Role, alpha, parametrize
from completep.measure.coordinates import rms
from completep.measure.subject import python_bytes
from completep.model.gpt import gpt


def moved(rules, width, depth, optimizer, role=None, steps=3):
    """How far the last stream moves in a few steps, when only one role is trained (or all are)."""

    def model(width, depth):
        return gpt(width, depth, 256, head_size=16)

    torch.manual_seed(0)
    body = model(width, depth)
    scaling = parametrize(body, base=lambda: model(32, 2), rules=rules).init_(0.06, seed=0)
    roles = None if role is None else [role]
    lr = {"sgd": 0.3, "muon": 0.01}[optimizer]
    make = {"sgd": lambda g: torch.optim.SGD(g, lr=lr), "muon": lambda g: torch.optim.Muon(g)}[optimizer]
    step = make(scaling.param_groups(lr, optimizer=optimizer, roles=roles))
    data = python_bytes(4 * 4 * 33).view(4, 4, 33)
    first = body.stream(data[3, :, :-1]).detach()
    for batch in data[:steps]:
        body.zero_grad()
        F.cross_entropy(body(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        step.step()
    return rms(body.stream(data[3, :, :-1]).detach() - first)


def slope(values, sizes):
    x = [math.log(s) for s in sizes]
    y = [math.log(v) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


BLOCK_ROLES = [Role.HIDDEN, Role.HIDDEN_BIAS, Role.BLOCK_NORM]


@pytest.mark.slow
@pytest.mark.parametrize("role", BLOCK_ROLES, ids=str)
@pytest.mark.parametrize("a", [0.5, 1.0])
def test_sgd_moves_the_stream_alike_at_any_depth(a, role):
    depths = (4, 8, 16, 32)
    assert abs(slope([moved(alpha(a), 32, d, "sgd", role) for d in depths], depths)) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("role", BLOCK_ROLES, ids=str)
def test_sgd_without_its_depth_rule_does_not(role):
    depths = (4, 8, 16, 32)
    assert slope([moved(SP, 32, d, "sgd", role) for d in depths], depths) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("role", [*BLOCK_ROLES, Role.EMBEDDING], ids=str)
def test_sgd_moves_the_stream_alike_at_any_width(role):
    widths = (32, 64, 128, 256)
    right = slope([moved(MUP, w, 2, "sgd", role) for w in widths], widths)
    assert abs(right) < 0.35
    if role is not Role.HIDDEN:  # whose SGD rate has no width factor, so that SP has nothing to get wrong there
        assert abs(slope([moved(SP, w, 2, "sgd", role) for w in widths], widths)) > abs(right) + 0.2


@pytest.mark.slow
def test_muon_moves_the_stream_alike_at_any_size():
    depths, widths = (4, 8, 16, 32), (32, 64, 128, 256)
    assert abs(slope([moved(COMPLETEP, 32, d, "muon") for d in depths], depths)) < 0.3
    assert abs(slope([moved(COMPLETEP, w, 2, "muon") for w in widths], widths)) < 0.3
    assert slope([moved(MUP, 32, d, "muon") for d in depths], depths) > 0.5
