"""Run under torchrun by test_distributed: the same few steps, sharded or replicated, written out as JSON by rank 0."""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from completep import parametrize
from completep.model.gpt import gpt
from tests.rules.models import Model
from tests.rules.training import tokens

MODELS = {
    "reference": lambda width=32, depth=2: gpt(width, depth, 61, head_size=16),
    "hooks": lambda width=32, depth=2: Model(width, depth),
}


def main(how: str, style: str, kind: str, path: str) -> None:
    small = MODELS[kind]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    with torch.device("meta" if how == "fsdp" else "cpu"):
        model = small(64, 4)
    scaling = parametrize(model, base=small, style=style)
    wrapped = model
    if how == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        model.to_empty(device="cpu")
        scaling.init_(0.1, seed=7)
    else:
        scaling.init_(0.1, seed=7)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    first = {n: full(p).sum().item() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(scaling.param_groups(1e-2, weight_decay=0.1, eps=1e-8))
    losses, norms = [], []
    for i in range(8):
        if i == 4:
            scaling.fold(optimizer) if style == "multiplier" else scaling.unfold(optimizer)
        batch = tokens(i, batch=4)
        mine = batch.chunk(world)[rank]
        loss = F.cross_entropy(wrapped(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(scaling.clip_grad_norm_(0.5).item())
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    if rank == 0:
        with open(path, "w") as f:
            json.dump({"first": first, "losses": losses, "norms": norms}, f)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort an interpreter that is shutting down


def full(p):
    return p.full_tensor() if isinstance(p, DTensor) else p


if __name__ == "__main__":
    main(*sys.argv[1:])
