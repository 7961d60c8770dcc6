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
        body.unembedding.weight.fill_(3e38)
    return body, optimizer


def diverges_when_deep(width, depth):
    return diverges(width, depth) if depth > 4 else right(width, depth)


def frozen(width, depth):
    body, _ = right(width, depth)
    return body, torch.optim.AdamW(body.parameters(), lr=0.0)


def optimized(kind, **settings):
    """A factory whose optimizer has these settings."""

    def factory(width, depth):
        body, _ = right(width, depth)
        optimizer = kind(body.parameters())
        optimizer.param_groups[0] |= settings
        return body, optimizer

    return factory


def not_finite(width, depth):
    body, optimizer = right(width, depth)
    with torch.no_grad():
        body.blocks[0].mlp.up.weight[0, 0] = float("nan")
    return body, optimizer


def strangers(width, depth):
    return model(width, depth), torch.optim.AdamW(model(width, depth).parameters())


class Divided(nn.Linear):
    """A readout that divides inside its own forward, as the one of mup does."""

    by = 1.0

    def forward(self, x):
        return super().forward(x / self.by)


def divided(width, depth, power=1.0, tied=False, base=32):
    """CompleteP with the logit multiplier inside the readout's class: 1 / m_N^power."""
    body = model(width, depth)
    scaling = parametrize(body, base=lambda: model(base, 2)).init_(0.06, seed=torch.initial_seed())
    body.set_multipliers(branch=body.get_multipliers()[0], logits=1.0)
    groups = scaling.param_groups(2e-3, eps=1e-12, weight_decay=0.1)
    weight = body.embedding.weight if tied else body.unembedding.weight
    if tied:
        for group in groups:
            group["params"] = [p for p in group["params"] if p is not body.unembedding.weight]
    body.unembedding = Divided(width, weight.shape[0], bias=False)
    body.unembedding.weight = weight
    body.unembedding.by = (width / base) ** power
    return body, torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.95))


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
