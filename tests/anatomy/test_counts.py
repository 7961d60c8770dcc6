"""How often your factory is called, and how often a copy of a model is run: what the docstrings say."""

from collections import Counter

import pytest
import torch
from torch import nn

from completep import SP, Shape, audit, parametrize
from completep.anatomy import forward, specimen
from completep.anatomy.examine import examine
from completep.anatomy.forward import measure_forward
from completep.rules.parametrize import explain
from tests.rules.models import Block, Model


class TwoBranches(Block):
    """A block with two kinds of branches, as in a transformer."""

    def __init__(self, width):
        super().__init__(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        x = x + self.mix(x)
        return x + self.branch(x)


RUNS = Counter()  # by width


class Counted(Model):
    block = TwoBranches

    def forward(self, ids):
        RUNS[self.width] += 1
        return super().forward(ids)


class NotOnMeta(Counted):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.first = self.table.weight[0, 0].item()


@pytest.fixture
def counting():
    """(base factory, the devices that it was called on, runs by width)"""
    devices = []
    RUNS.clear()

    def base(kind=Counted):
        devices.append(torch.get_default_device().type)
        return kind(32, 2)

    return base, devices, RUNS


@pytest.mark.parametrize("style", ["multiplier", "folded"])
@pytest.mark.parametrize("function", [parametrize, explain])
def test_the_base_is_built_twice_and_run_as_often_as_the_docstring_says(function, style, counting):
    base, devices, runs = counting
    function(Counted(64, 8), base=base, style=style)
    assert devices == ["meta", "cpu"]
    assert runs == {32: 7 + 2, 64: 2}


def test_an_audit_builds_and_runs_no_more_than_that(counting):
    base, devices, runs = counting
    model = Counted(64, 8)
    audit(model, torch.optim.AdamW(model.parameters()), base=base, rules=SP, check_init=False)
    assert devices == ["meta", "cpu"]
    assert runs == {32: 7 + 2, 64: 2}


def test_a_base_that_cannot_be_built_on_meta_is_built_once_for_real(counting):
    base, devices, runs = counting
    parametrize(NotOnMeta(64, 8), base=lambda: base(NotOnMeta))
    assert devices == ["meta", "cpu"]
    assert runs == {32: 7 + 2, 64: 2}


def test_a_base_too_large_to_run_stays_on_meta(counting, monkeypatch):
    base, devices, runs = counting
    smaller = specimen.size(Counted(32, 2)) - 1
    for module in (specimen, forward):
        monkeypatch.setattr(module, "LARGEST_SPECIMEN", smaller)
    with pytest.warns(UserWarning, match="the base is too large to run"):
        parametrize(Counted(16, 2), base=base)
    assert devices == ["meta"]
    assert runs == {16: 7 + 2}


def test_a_specimen_factory_is_called_as_often_as_a_base(counting):
    base, devices, runs = counting
    calls = []

    def small():
        calls.append(torch.get_default_device().type)
        return Counted(16, 2)

    parametrize(Counted(64, 8), base=base, specimen=small)
    assert calls == devices == ["meta", "cpu"]
    assert runs == {16: 7, 32: 2, 64: 2}


def test_the_second_call_is_needed_for_numbers_that_only_a_constructor_knows():
    """A factor in a buffer: the base on the meta device does not have it, and the measurement must see it."""

    class Scaled(Counted):
        def __init__(self, width, depth):
            super().__init__(width, depth)
            self.register_buffer("factor", torch.tensor(width**0.5))

        def embed(self, ids):
            return self.table(ids) * self.factor

    scaling = parametrize(Scaled(64, 8), base=lambda: Scaled(32, 2))
    assert [m.factor for m in scaling.multipliers if m.kind == "embedding"] == pytest.approx([2**-0.5])
    plain = parametrize(Counted(64, 8), base=lambda: Counted(32, 2))
    assert not [m for m in plain.multipliers if m.kind == "embedding"]


def test_a_shape_needs_no_base(counting):
    _, devices, runs = counting
    parametrize(Counted(64, 8), base=Shape(32, 2))
    assert devices == []
    assert runs == {64: 7 + 2}


def test_a_target_on_meta_is_run_as_a_reduced_copy(counting):
    base, devices, runs = counting
    with torch.device("meta"):
        model = Counted(64, 8)
    parametrize(model, base=base)
    assert devices == ["meta", "cpu"]
    assert runs == {32: 7 + 2, 64: 2}


def test_one_run_measures_branches_readout_and_tables(counting):
    base, _, runs = counting
    anatomy = examine(base())
    runs.clear()
    factors = measure_forward(base(), anatomy)
    assert runs == {32: 1}
    assert factors.tables == pytest.approx({"table.weight": 1.0})
    expected = ["blocks.0.down", "blocks.0.mix", "blocks.1.down", "blocks.1.mix", "head"]
    assert factors.sites == pytest.approx(dict.fromkeys(expected, 1.0))
