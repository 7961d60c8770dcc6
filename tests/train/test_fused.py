"""kernels.c against torch in float64, and what happens where it cannot be used."""

import copy
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from completep.config import GPTConfig
from completep.model.gpt import GPT, alibi_mask, alibi_slopes
from completep.train import fused

needs_compiler = pytest.mark.skipif(fused.load() is None, reason="needs a C compiler")


def plain_attention(qkv, scale, dtype):
    """As the decoder computes it without the kernel."""
    time, heads = qkv.shape[1], qkv.shape[3]
    place = torch.arange(time)
    mask = alibi_mask(heads, (place[:, None] - place)[None], dtype)
    q, k, v = qkv.to(dtype).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def attention_errors(slopes, time, size, heads=5, scale=0.3):
    """Largest errors of value and gradient: ours, and torch's in float32, both against torch in float64."""
    torch.manual_seed(time + size)
    qkv = (3 * torch.randn(2, time, 3, heads, size)).requires_grad_()
    weight = torch.randn(2, time, heads, size)
    ours = fused.Attention(slopes)(qkv, scale)
    values = [ours, *(plain_attention(qkv, scale, dtype) for dtype in (torch.float32, torch.float64))]
    gradients = [torch.autograd.grad((y * weight).sum(), qkv)[0] for y in values]
    return [[(x - several[2]).abs().max().item() for x in several[:2]] for several in (values, gradients)]


@needs_compiler
@pytest.mark.parametrize("size", fused.HEAD_SIZES)
@pytest.mark.parametrize("time", [4, 8, 12, 20, 64, 128])
def test_attention_is_torchs(time, size):
    for ours, torchs in attention_errors(alibi_slopes(5), time, size):
        assert ours < 4 * torchs + 1e-6


@needs_compiler
def test_wrong_slopes_would_be_seen():
    for ours, torchs in attention_errors(2 * alibi_slopes(5), 64, 8):
        assert ours > 100 * torchs


@needs_compiler
def test_nothing_flows_from_later_tokens():
    qkv = torch.randn(1, 16, 3, 4, 8)
    later = qkv.clone()
    later[:, 9:] = torch.randn(1, 7, 3, 4, 8)
    attend = fused.Attention(alibi_slopes(4))
    assert torch.equal(attend(qkv, 0.1)[:, :9], attend(later, 0.1)[:, :9])


@needs_compiler
@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_a_number_stays_visible(kind, value):
    qkv = torch.randn(1, 16, 3, 4, 8)
    qkv[0, 3, kind, 2, 5] = value
    assert not fused.Attention(alibi_slopes(4))(qkv, 0.1).isfinite().all()
    assert not fused.relu2(torch.tensor([1.0, value])).isfinite().all()


@needs_compiler
def test_relu2_is_torchs():
    x = torch.linspace(-3, 3, 1001, requires_grad=True)
    expected = F.relu(x.double()) ** 2
    assert torch.allclose(fused.relu2(x).double(), expected, rtol=1e-6)
    found, wanted = (torch.autograd.grad(y.sin().sum(), x)[0] for y in (fused.relu2(x), expected))
    assert torch.allclose(found, wanted.float(), atol=1e-5)


def decoder_block(width, head_size, multiplier=0.3):
    torch.manual_seed(width)
    block = GPT(GPTConfig(width, 1, 61, head_size=head_size)).blocks[0]
    for parameter in block.parameters():  # norms and biases too have values of their own
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    block.multiplier = multiplier
    return block


def block_values(block, x, weight, kernel, dtype):
    """The output, and the gradients of the input and of every parameter."""
    block = copy.deepcopy(block).to(dtype)
    block.kernel = kernel
    x = x.to(dtype).requires_grad_()
    place = torch.arange(x.shape[1])
    mask = alibi_mask(
        block.attention.qkv.in_features // block.attention.head_size, (place[:, None] - place)[None], dtype
    )
    y = block(x, mask, place[None])
    return [y.detach(), *torch.autograd.grad((y * weight.to(dtype)).sum(), [x, *block.parameters()])]


def block_errors(ours, block, time):
    """Largest errors of output and gradients relative to float64: of the kernel, and of torch in float32."""
    width = block.attention.qkv.in_features
    x, weight = torch.randn(2, 3, time, width)
    kernel = fused.WholeBlock(alibi_slopes(width // block.attention.head_size))
    exact = block_values(block, x, weight, None, torch.float64)
    mine = block_values(ours, x, weight, kernel, torch.float32)
    torchs = block_values(block, x, weight, None, torch.float32)
    return [
        [((value - true).abs().max() / true.abs().max()).item() for value in both]
        for *both, true in zip(mine, torchs, exact, strict=True)
    ]


@needs_compiler
@pytest.mark.parametrize(("width", "head_size"), [(32, 8), (40, 8), (48, 16), (88, 8), (128, 32)])
@pytest.mark.parametrize("time", [8, 24, 64, 128])
def test_a_whole_block_is_torchs(width, head_size, time):
    block = decoder_block(width, head_size)
    errors = block_errors(block, block, time)
    assert len(errors) == 14
    for ours, torchs in errors:
        assert ours < 4 * torchs + 1e-6


@needs_compiler
def test_another_multiplier_would_be_seen():
    errors = block_errors(decoder_block(32, 8, 0.31), decoder_block(32, 8, 0.3), 16)
    assert all(ours > 100 * torchs for ours, torchs in errors)


@needs_compiler
def test_a_block_that_is_not_a_number_stays_visible():
    block = decoder_block(32, 8)
    block.mlp.up.weight.data[3, 2] = math.nan
    x = torch.randn(1, 8, 32)
    ours, torchs = (
        block_values(block, x, torch.ones_like(x), kernel, torch.float32)
        for kernel in (fused.WholeBlock(alibi_slopes(4)), None)
    )
    finite = [value.isfinite().all().item() for value in ours]
    assert finite == [value.isfinite().all().item() for value in torchs]
    assert sum(finite) == 1  # the gradient of the last bias alone does not pass through the MLP


@needs_compiler
@pytest.mark.parametrize(
    ("options", "time", "whole"),
    [
        ({}, 16, True),
        ({}, 12, False),
        ({"width": 48}, 16, True),
        ({"width": 160}, 16, False),
        ({"bias": False}, 16, False),
        ({"norm": "rmsnorm"}, 16, False),
        ({"activation": "gelu"}, 16, False),
        ({"experts": 4, "active_experts": 2}, 16, False),
    ],
)
def test_only_the_papers_narrow_blocks_are_taken_whole(options, time, whole):
    model = GPT(GPTConfig(**{"width": 64, "depth": 2, "vocabulary": 61, "head_size": 8, **options}))
    assert fused.fuse(model, time)
    assert all((block.kernel is not None) is whole for block in model.blocks)


def losses(model, use):
    torch.manual_seed(0)
    tokens = torch.randint(0, 61, (4, 17))
    used = fused.fuse(model, 16) if use else False
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return used, loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


@needs_compiler
@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({}, True),
        ({"activation": "gelu"}, True),
        ({"positions": "rotary"}, False),
        ({"qk_norm": True}, False),
        ({"head_size": 64}, False),
        ({"activation": "swiglu"}, True),
    ],
)
def test_the_decoder_computes_the_same(options, fits):
    config = GPTConfig(64, 3, 61, **{"head_size": 16, **options})
    torch.manual_seed(1)
    model = GPT(config)
    _, loss, gradient = losses(model, use=False)
    model.zero_grad()
    used, same, close = losses(model, use=True)
    assert used is fits
    assert same == pytest.approx(loss, rel=1e-6)
    assert (close - gradient).abs().max() < 1e-5 * gradient.abs().max()


@needs_compiler
def test_other_lengths_and_types_are_left_to_torch():
    config = GPTConfig(64, 1, 61, head_size=16)
    assert not fused.fuse(GPT(config), 18)
    assert not fused.fuse(GPT(config), 256)
    assert not fused.fuse(GPT(config).double(), 16)
    assert not fused.fuse(GPT(config).to("meta"), 16)


@pytest.mark.slow
def test_without_a_compiler_torch_does_it(tmp_path):
    """A compiler that is not there, one that fails, no place for the library: the decoder trains all the same."""
    (tmp_path / "cc").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    code = (
        "from completep.config import GPTConfig\nfrom completep.model.gpt import GPT\n"
        "from completep.train import fused\n"
        "print(fused.fuse(GPT(GPTConfig(64, 1, 61, head_size=16)), 16))"
    )
    for compiler, cache in (("no-such-compiler", "cache"), (str(tmp_path / "cc"), "cache"), ("cc", "cc/cache")):
        environment = {"CC": compiler, "PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / cache)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "False"
