"""Several processes: the environment that torchrun sets, and DDP or FSDP2 around the model."""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from completep.errors import UserError
from completep.train.settings import Parallel


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


def join(parallel: Parallel) -> World:
    """This process's rank, from the environment variables of torchrun, and its device."""
    size, rank, local = _number("WORLD_SIZE", 1), _number("RANK", 0), _number("LOCAL_RANK", 0)
    if rank >= size:
        raise UserError(f"RANK is {rank}, but there are {size} ranks", fix="unset RANK, or start it with torchrun")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if size > 1 or parallel != "none":
        if "RANK" not in os.environ:
            raise UserError(
                f"parallel={parallel!r} in a single process",
                fix="start it with torchrun: torchrun --nproc-per-node 2 -m completep train …",
            )
        if not dist.is_initialized():
            dist.init_process_group("nccl" if cuda else "gloo")
    return World(rank, size, device)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal()):
        what = f"the environment variable {name} is {text!r}, not a number"
        raise UserError(what, fix=f"unset {name}, or start it with torchrun, which sets it")
    return int(text)


def shard(model: nn.Module, world: World, replicas: int) -> None:
    """FSDP2, one unit per block. With several replicas, each is sharded and they hold copies (HSDP)."""
    if replicas < 1 or world.size % replicas:
        raise UserError(f"replicas={replicas} does not divide {world.size} ranks", fix=f"use a divisor of {world.size}")
    kind = world.device.type
    if replicas > 1:
        mesh = init_device_mesh(kind, (replicas, world.size // replicas), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(kind, (world.size,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def syncing(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Synchronise gradients only with the last micro-batch of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    elif isinstance(model, nn.parallel.DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def mean(value: Tensor, world: World) -> float:
    """The mean over all ranks."""
    if world.size > 1:
        dist.all_reduce(value)
        value = value / world.size
    return float(value)


def agree(flag: bool, world: World) -> bool:
    """True on every rank if it is true on any rank."""
    if world.size == 1:
        return flag
    vote = torch.tensor(float(flag), device=world.device)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


def leave() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
