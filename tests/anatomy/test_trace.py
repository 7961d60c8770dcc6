"""What a module is given, however it is called."""

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import nn

from completep import UserError
from completep.anatomy.calls import replace_first
from completep.anatomy.names import named_parameters, plain, unwrap
from completep.anatomy.trace import Tap, call, find_logits, first_tensor, given_tensor, stream_of
from tests.rules.models import Model
from tests.rules.training import tokens

FLOAT, IDS = torch.ones(2), torch.ones(2, dtype=torch.long)


@pytest.mark.parametrize(
    ("args", "kwargs"), [((FLOAT,), {}), ((), {"x": FLOAT}), ((IDS, [FLOAT]), {"y": IDS}), ((None, {"a": FLOAT}), {})]
)
def test_the_given_tensor_is_the_first_floating_one(args, kwargs):
    assert given_tensor(args, kwargs) is FLOAT


def test_there_may_be_none():
    assert given_tensor((IDS, 3), {"mask": None}) is None
    assert first_tensor("text") is None


def test_the_input_of_a_module_is_taken_before_hooks_change_it():
    model, seen = Model(32), []
    model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]) or (args[0] * 0,))
    x, output = stream_of(model, Tap("norm"), tokens(0))
    assert x is seen[0]
    assert torch.equal(output, model(tokens(0)))
    assert len(model.norm._forward_pre_hooks) == 1


def test_examples_are_tensors_tuples_or_mappings():
    model = nn.Bilinear(2, 2, 3)
    expected = model(FLOAT, FLOAT)
    assert torch.equal(call(model, (FLOAT, FLOAT)), expected)
    assert torch.equal(call(model, {"input1": FLOAT, "input2": FLOAT}), expected)
    assert find_logits({"loss": IDS, "logits": FLOAT}) is FLOAT


def test_names_do_not_depend_on_wrappers():
    model = Model(32)
    wrapped = torch.compile(model, backend="eager")
    assert unwrap(wrapped) is model
    assert [n for n, _ in named_parameters(wrapped)] == [n for n, _ in model.named_parameters()]
    assert plain("_orig_mod.blocks.0._checkpoint_wrapped_module.up") == "blocks.0.up"


def test_an_input_that_is_no_activation_is_refused():
    class Direct(Model):
        def forward(self, x):
            return self.head(x) + 0 * super().forward(tokens(0)).sum()

    from completep.anatomy.examine import examine

    with pytest.raises(UserError):
        examine(Direct(32), example=torch.ones(2, 32))


@pytest.mark.slow
def test_a_model_on_the_meta_device_needs_no_compiler():
    """Torch imports it, for a second, to draw random numbers that nobody sees."""
    code = (
        "import sys, torch\nfrom torch import nn\nfrom completep.anatomy.specimen import build\n"
        "make = lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))\n"
        "drawn, real = build(make, 'meta'), build(make, 'cpu')\nassert 'torch._dynamo' not in sys.modules\n"
        "assert all(p.is_meta for p in drawn.parameters())\nassert all((p != 0).any() for p in real.parameters())\n"
        "assert [p._version for p in drawn.parameters()] == [p._version for p in real.parameters()]\n"
        "with torch.device('meta'): make()\nassert 'torch._dynamo' in sys.modules  # the negative control"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Pair(NamedTuple):
    mask: torch.Tensor
    stream: torch.Tensor


def test_the_first_tensor_is_the_one_that_is_replaced():
    """Of all containers that a module may be given or return; the types of the containers stay."""
    mask, x, y = torch.tensor([True]), torch.ones(2), torch.zeros(2)
    values = [x, (x, y), [None, x, y], {"mask": mask, "x": x, "y": y}, ((mask, {"x": (x, y)}), {}), Pair(mask, x)]
    for value in values:
        changed = replace_first(value, lambda first: 3 * first)
        assert first_tensor(value) is x
        assert type(changed) is type(value)
        assert torch.equal(first_tensor(changed), 3 * x)
        assert torch.equal(x, torch.ones(2))
        assert first_tensor(replace_first(changed, lambda first: x)) is x
    assert replace_first((x, y), lambda first: first)[1] is y
    assert replace_first((mask, None), lambda first: y) == (mask, None)
    assert first_tensor((mask, None)) is None
