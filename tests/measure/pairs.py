"""Factories of (model, optimizer), right and wrong, as a user's own implementation would be."""

import torch
from torch import nn

from completep import COMPLETEP, parametrize
from completep.model.gpt import gpt


def model(width, depth):
    return gpt(width, depth, 256, head_size=16)


def right(width, depth):
    body = model(width, depth)
    scaling = parametrize(body, base=lambda: model(32, 2), rules=COMPLETEP).init_(0.06, seed=torch.initial_seed())
    return body, torch.optim.AdamW(scaling.param_groups(2e-3, eps=1e-16), betas=(0.9, 0.95))


def ignores_its_size(width, depth):
    return model(32, 2)


def diverges(width, depth):
    body, optimizer = right(width, depth)
    with torch.no_grad():
        body.unembedding.weight.fill_(float("nan"))
    return body, optimizer


def diverges_when_deep(width, depth):
    return diverges(width, depth) if depth > 4 else right(width, depth)


def frozen(width, depth):
    body, _ = right(width, depth)
    return body, torch.optim.AdamW(body.parameters(), lr=0.0)


class Noisy(nn.Module):
    """The decoder with dropout on its embedding."""

    def __init__(self, width, depth):
        super().__init__()
        self.body = model(width, depth)
        self.drop = nn.Dropout(0.1)
        self.body.embedding.register_forward_hook(lambda module, args, out: self.drop(out))

    def forward(self, tokens):
        return self.body(tokens)


class Keyed(nn.Module):
    """Takes no plain tensor."""

    def __init__(self, width, depth):
        super().__init__()
        self.body = model(width, depth)

    def forward(self, *, prompt):
        return self.body(prompt["ids"])


def keyed_batches(step):
    ids = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(step))
    return {"prompt": {"ids": ids[:, :-1]}}, ids[:, 1:]


def bad_batches(step):
    return [1, 2, 3]


def misfitting_batches(step):
    inputs, targets = keyed_batches(step)
    return inputs, targets[:, :5]
