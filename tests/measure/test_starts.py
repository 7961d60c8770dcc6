"""What the start of a model must not bend: few classes, and decays that a constructor draws."""

import pytest
import torch
from torch import nn

from completep import COMPLETEP, check
from completep.config import Shape
from completep.measure import survey
from completep.measure.subject import Setting, Source, Subjects
from completep.measure.survey import _starts
from completep.measure.tensors import repeat_starts_
from tests.rules.models import Block, Model

CLASSES = 3


class Classifier(Model):
    """Three classes for every token."""

    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.head = nn.Linear(width, CLASSES, bias=False)


def classifier(width, depth):
    return Classifier(width, depth)


def batches(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(61, (32, 16), generator=generator), torch.randint(CLASSES, (32, 16), generator=generator)


@pytest.mark.slow
def test_few_classes_are_no_fault(monkeypatch):
    """With ordinary logits the softmax of three classes is uneven at small widths, and gradients fall too fast."""
    sizes = {"widths": (32, 64, 128, 256), "depths": (2,), "base": (32, 2), "workers": 1, "std": 0.2}

    def worst():
        found = check(classifier, **sizes, batches=batches).findings
        return max(
            abs(f.deviation) for f in found if f.exponent and f.tensor == "table.weight" and f.setting == "epsilon"
        )

    assert worst() < 0.06
    monkeypatch.setattr(survey, "SMALL", 1.0)
    assert worst() > 0.12


class Decay(Block):
    """A decay per feature, drawn by the constructor over many sizes."""

    def __init__(self, width):
        super().__init__(width)
        self.decay = nn.Parameter(torch.rand(width).log())

    def branch(self, x):
        return super().branch(x) * torch.exp(-self.decay.exp())


class Decaying(Model):
    block = Decay


def test_drawn_values_are_the_bases_at_every_size():
    source = Source(lambda width, depth: Decaying(width, depth), Shape(16, 2))
    setting = Setting(batch=2, time=8)
    subject = Subjects(source, source.base_model(), Shape(64, 6), COMPLETEP, setting, None).start(3)
    starts = _starts(source, subject, 3)
    assert set(starts) == {"blocks.*.decay"}
    drawn = subject.model.blocks[0].decay.detach().clone()
    repeat_starts_(subject, starts)
    torch.manual_seed(3)
    base = source.base_model()
    for i, block in enumerate(subject.model.blocks):
        assert torch.equal(block.decay, base.blocks[i % 2].decay.repeat(4))
    assert not torch.equal(subject.model.blocks[0].decay, drawn)
    assert subject.model.blocks[0].norm.weight.eq(1).all()  # what the rules start is left alone
