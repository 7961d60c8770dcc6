"""Any model under FSDP2: parametrize first, then shard. Rules are keyed by parameter name, so they survive sharding.

torchrun --nproc-per-node 2 -m examples.fsdp2
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import completep as cp
from completep.data.builtin import builtin_corpus
from completep.data.sampler import Sampler
from examples.own_model import MyModel

STEPS, BATCH, TIME = 20, 8, 64


def main() -> list[float]:
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    with torch.device("meta"):  # no rank ever holds the whole model
        model = MyModel(width=128, depth=4)
    scaling = cp.parametrize(
        model, base=lambda: MyModel(width=64, depth=2), specimen=lambda: MyModel(width=64, depth=2)
    )
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device=device)
    scaling.init_(std=0.05, seed=0)  # the same numbers on any number of ranks
    optimizer = torch.optim.AdamW(scaling.param_groups(lr=2**-7, eps=1e-12), betas=(0.9, 0.95))
    sampler = Sampler(builtin_corpus(), "train", TIME, BATCH, seed=0)
    losses = []
    for step in range(STEPS):
        batch = torch.from_numpy(sampler.batch_at(step, dist.get_rank(), dist.get_world_size())).to(device)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        scaling.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


if __name__ == "__main__":
    losses = main()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: loss {losses[0]:.3f} → {losses[-1]:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
