"""Trained weights, folded, in one safetensors file, with the config that builds the model."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from completep.anatomy.names import named_parameters
from completep.compute import flops
from completep.config import GPTConfig, parse_json, structure
from completep.errors import UserError, some
from completep.files import read_text, sha256_of, write_over
from completep.model.gpt import GPT
from completep.rules.scaling import Scaling
from completep.rules.weights import whole
from completep.train.distributed import World
from completep.train.folder import CONFIG, RESULT, WEIGHTS, check_files, read_result


def export(folder: Path, model: nn.Module, scaling: Scaling, config: GPTConfig, world: World) -> dict[str, str]:
    """Fold the model in place and write its weights. Every rank must call this; rank 0 writes, and returns the hashes.

    The bytes are a function of the weights: one key of metadata, since safetensors writes several in any order.
    """
    from safetensors.torch import save

    scaling.fold()
    plain = {}
    for name, p in named_parameters(model):
        full = whole(p)
        if world.first:
            plain[name] = full.detach().cpu().contiguous()
    if not world.first:
        return {}
    contents = {
        WEIGHTS: save(plain, metadata={"format": "pt"}),
        CONFIG: (json.dumps(asdict(config), indent=2) + "\n").encode(),
    }
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    for name, content in contents.items():
        path = folder / name  # an earlier attempt, killed before its result, may have left it, whole or damaged
        if not path.is_file() or sha256_of(path) != hashes[name]:
            write_over(path, content)
    return hashes


def load_exported(folder: Path) -> GPT:
    """The trained model with ordinary weights: no multipliers, no rules. Its files must match the run's result."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    result = read_result(folder)
    if result is None or not path.exists():
        missing = RESULT if path.exists() else WEIGHTS
        raise UserError(f"{folder} has no {missing}", fix="name the folder of a run that is done")
    check_files(folder, result, WEIGHTS, CONFIG)
    fix = "train the run again"
    config = structure(parse_json(read_text(folder / CONFIG), str(folder / CONFIG), fix), GPTConfig, CONFIG, fix)
    if 4 * flops.total(config) > 2 * path.stat().st_size:  # before a model of that size is built
        raise UserError(f"{path} does not fit the model in {CONFIG}: it is too small", fix=fix)
    model = GPT(config)
    try:
        weights = load_file(path)
        keys = model.load_state_dict(weights, strict=False)
    except (SafetensorError, RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{path} does not fit the model in {CONFIG}: {str(error)[:300]}", fix=fix) from error
    missing_keys = set(keys.missing_keys) - ({"unembedding.weight"} if model.config.tied else set())
    if missing_keys or keys.unexpected_keys:
        wrong = some(sorted([*missing_keys, *keys.unexpected_keys]), 3)
        raise UserError(f"{path} does not fit the model in {CONFIG}: {wrong}", fix=fix)
    model = model.to(torch.float32)
    broken = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    if broken:
        raise UserError(f"{path} has weights that are not finite: {some(broken, 3)}", fix=fix)
    return model
