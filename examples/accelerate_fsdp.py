"""A Hugging Face model with Accelerate and FSDP2.

torchrun --nproc-per-node 2 -m examples.accelerate_fsdp
"""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import LlamaForCausalLM

import completep as cp
from completep.data.builtin import builtin_corpus
from completep.data.sampler import Sampler
from examples.hf_trainer import llama

STEPS, BATCH, TIME = 20, 8, 64


def main() -> tuple[Accelerator, list[float]]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    model = llama(width=64, depth=4)
    assert isinstance(model, LlamaForCausalLM)
    scaling = cp.parametrize(model, base=lambda: llama(width=32, depth=2))
    scaling.init_(std=0.1, seed=0)
    # Accelerate needs model and optimizer together. It puts the shards into the groups and keeps their settings.
    optimizer = torch.optim.AdamW(scaling.param_groups(lr=2**-6, eps=1e-12), betas=(0.9, 0.95))
    model, optimizer = accelerator.prepare(model, optimizer)
    sampler = Sampler(builtin_corpus(), "train", TIME, BATCH, seed=0)
    losses = []
    for step in range(STEPS):
        part = sampler.batch_at(step, accelerator.process_index, accelerator.num_processes)
        ids = torch.from_numpy(part[:, :-1]).to(accelerator.device)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return accelerator, losses


if __name__ == "__main__":
    accelerator, losses = main()
    accelerator.print(f"{accelerator.num_processes} ranks: loss {losses[0]:.3f} → {losses[-1]:.3f}")
    accelerator.end_training()
