"""Trained weights, folded, in one safetensors file, with the config that builds the model."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from completep.anatomy.names import named_parameters
from completep.config import GPTConfig
from completep.errors import UserError, some
from completep.files import read_text, write_new
from completep.model.gpt import GPT
from completep.rules.scaling import Scaling
from completep.train.distributed import World

WEIGHTS, CONFIG = "model.safetensors", "model.json"


def export(folder: Path, model: nn.Module, scaling: Scaling, config: GPTConfig, world: World) -> None:
    """Fold the model in place and write its weights. Every rank must call this; rank 0 writes."""
    from safetensors.torch import save

    scaling.fold()
    plain = {}
    for name, p in named_parameters(model):
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        if world.first:
            plain[name] = whole.detach().cpu().contiguous()
    if world.first:
        # Checked one by one: a kill or a full disk may have prevented only the second.
        if not (folder / WEIGHTS).exists():
            write_new(folder / WEIGHTS, save(plain, metadata={"format": "pt", "completep": "folded"}))
        if not (folder / CONFIG).exists():
            write_new(folder / CONFIG, json.dumps(asdict(config), indent=2) + "\n")


def load_exported(folder: Path) -> GPT:
    """The trained model with ordinary weights: no multipliers, no rules."""
    from safetensors.torch import load_file

    if not (folder / WEIGHTS).exists():
        raise UserError(f"{folder} has no {WEIGHTS}", fix="name the folder of a run that is done")
    model = GPT(GPTConfig(**json.loads(read_text(folder / CONFIG))))
    weights = load_file(folder / WEIGHTS)
    keys = model.load_state_dict(weights, strict=False)
    missing = set(keys.missing_keys) - ({"unembedding.weight"} if model.config.tied else set())
    if missing or keys.unexpected_keys:
        wrong = some(sorted([*missing, *keys.unexpected_keys]), 3)
        raise UserError(f"{folder / WEIGHTS} does not fit the model in {CONFIG}: {wrong}", fix="train the run again")
    return model.to(torch.float32)
