"""Counts against the paper's table, against torch's own counter, and against the real model."""

import csv
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from completep.compute import flops
from completep.compute.memory import memory, saved_per_token
from completep.compute.plan import plan_shape
from completep.config import GPTConfig
from completep.errors import UserError
from completep.model.gpt import GPT

TABLE = Path(__file__).parent / "size_table.csv"  # the paper's, as printed
ROWS = list(csv.DictReader(TABLE.read_text().splitlines()))
OPTIONS = [
    {},
    {"bias": False},
    {"norm": "rmsnorm", "activation": "swiglu", "qk_norm": True},
    {"positions": "learned", "context": 32, "activation": "gelu", "tied": True},
    {"qk_norm": True, "positions": "rotary"},
    {"experts": 4, "active_experts": 2},
    {"experts": 8, "active_experts": 3, "expert_width": 48, "shared_experts": 2, "activation": "swiglu"},
    {"experts": 4, "shared_experts": 1, "bias": False},
]

PLAIN = [  # without ALiBi, whose mask is not an activation
    {"positions": "none"},
    {"positions": "rotary"},
    {"positions": "none", "norm": "rmsnorm", "activation": "swiglu", "bias": False},
    {"positions": "none", "qk_norm": True},
    {"positions": "none", "experts": 4, "active_experts": 2},
    {"positions": "none", "experts": 8, "active_experts": 2, "expert_width": 96, "shared_experts": 1},
    {"positions": "none", "experts": 8, "active_experts": 4, "activation": "swiglu"},
]


def printed(row):
    model = GPTConfig(width=int(row["width"]), depth=int(row["depth"]))
    p = plan_shape(model)
    tokens = 20 * flops.total(model)
    return {
        "params_non_embedding_M": f"{flops.non_embedding(model) / 1e6:.1f}",
        "params_total_M": f"{flops.total(model) / 1e6:.1f}",
        "tokens_B": f"{tokens / 1e9:.1f}",
        "train_flops": f"{p.flops:.2E}",
        "steps": str(p.run.schedule.steps),
        "batch": str(p.run.batch),
    }


def test_there_are_25_rows():
    assert len(ROWS) == 25


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['width']}x{r['depth']}")
def test_every_cell_of_the_papers_size_table(row):
    ours = printed(row)
    assert ours == {name: row[name] for name in ours}


def test_the_simple_count_is_not_enough():
    """The negative control: 6·P·D misses most cells."""
    hits = 0
    for row in ROWS:
        model = GPTConfig(width=int(row["width"]), depth=int(row["depth"]))
        total = flops.total(model)
        hits += f"{6 * flops.non_embedding(model) * 20 * total:.2E}" == row["train_flops"]
    assert hits == 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("width", "depth"), [(64, 2), (128, 3), (192, 1)])
def test_parameters_are_the_models_own(width, depth, options):
    config = GPTConfig(width, depth, 61, **options)
    with torch.device("meta"):
        model = GPT(config)
    assert flops.total(config) == sum(p.numel() for p in model.parameters())
    assert flops.non_embedding(config) == sum(p.numel() for p in model.blocks.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("width", "depth", "batch", "time"), [(64, 2, 2, 16), (128, 3, 1, 24), (192, 1, 3, 8)])
def test_matrix_products_agree_with_torch_exactly(width, depth, batch, time, options):
    config = GPTConfig(width, depth, 61, **options)
    model = GPT(config)
    ids = torch.randint(61, (batch, time))
    with FlopCounterMode(display=False) as forward, sdpa_kernel(SDPBackend.MATH):
        loss = model(ids).square().mean()
    with FlopCounterMode(display=False) as backward, sdpa_kernel(SDPBackend.MATH):
        loss.backward()
    ours = {"router": flops.Cost(0, 0), **flops.flops_per_token(config, time)}
    tokens = batch * time
    assert forward.get_total_flops() == tokens * sum(ours[m].forward for m in (*flops.MATMULS, "router"))
    assert backward.get_total_flops() == tokens * sum(ours[m].backward for m in (*flops.MATMULS, "router"))


def test_active_parameters_are_those_that_a_token_passes():
    """One token: the experts that it is not sent to have no gradient."""
    config = GPTConfig(64, 2, 61, experts=8, active_experts=3, expert_width=48, shared_experts=1)
    model = GPT(config)
    model(torch.zeros(1, 1, dtype=torch.long)).square().sum().backward()
    experts = [p for n, p in model.named_parameters() if ".experts." in n]
    used = sum(int((p.grad.flatten(1).abs().sum(1) > 0).sum()) * p[0].numel() for p in experts)
    others = flops.total(config) - sum(p.numel() for p in experts)
    assert flops.active(config) == others + used < flops.total(config)
    dense = GPTConfig(64, 2, 61)
    assert flops.active(dense) == flops.total(dense)


def saved_elements(config, batch, time):
    """The elements that autograd saves, without parameters, each storage once."""
    model, kept, alive = GPT(config), {}, []
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t):
        alive.append(t)
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() / 4
        return t

    ids = torch.randint(config.vocabulary, (batch, time))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    return sum(kept.values())


@pytest.mark.parametrize("options", PLAIN, ids=str)
@pytest.mark.parametrize(("width", "depth"), [(128, 2), (256, 5)])
def test_activation_memory_is_what_autograd_saves(width, depth, options):
    config = GPTConfig(width, depth, 200, **options)
    assert saved_per_token(config) * 2 * 32 == pytest.approx(saved_elements(config, 2, 32), rel=0.05)


def test_memory_is_shared_over_ranks():
    config = GPTConfig(1024, 24)
    one = memory(config, sequence=2048, micro_batch=1, ranks=1)
    eight = memory(config, sequence=2048, micro_batch=1, ranks=8)
    assert one.state == 16 * flops.total(config)
    assert eight.state == one.state / 8
    assert one.checkpoint == eight.checkpoint == 12 * flops.total(config)
    assert one.activations == eight.activations
    assert memory(config, sequence=2048, micro_batch=4, ranks=8).activations == 4 * one.activations


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"micro_batch": -1}])
def test_memory_needs_positive_numbers(wrong):
    (name, value), options = next(iter(wrong.items())), {"micro_batch": 1, "ranks": 1} | wrong
    with pytest.raises(UserError, match=f"{name}={value}: must be at least 1"):
        memory(GPTConfig(64, 2), sequence=8, **options)
