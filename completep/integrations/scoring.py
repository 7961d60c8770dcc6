"""Log-likelihoods of many endings at once: what begins alike is read once, and texts of like length share a batch.

All endings of one beginning stand in one sequence: each sees the beginning and itself, at the positions it would have alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from completep.model.gpt import GPT, Places

TOKENS = 8192  # in a batch, padding included
ROWS = 1024  # of logits that are held at a time


@dataclass(frozen=True)
class Score:
    log_likelihood: float
    greedy: bool  # whether the ending is what the model itself would have written


Pair = tuple[tuple[int, ...], tuple[int, ...]]  # beginning and ending, neither of them empty


@dataclass(frozen=True)
class Tree:
    """A beginning with its endings; the last token of an ending is only predicted, never read."""

    beginning: tuple[int, ...]
    endings: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.beginning) + sum(len(e) - 1 for e in self.endings)


@torch.no_grad()
def score(model: GPT, pairs: Sequence[Pair], *, longest: int, tokens: int = TOKENS) -> list[Score]:
    """One score a pair, in their order. A pair longer than `longest` loses tokens at its start."""
    cut = [shortened(pair, longest) for pair in pairs]
    endings: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
    for beginning, ending in cut:
        endings.setdefault(beginning, {})[ending] = None
    trees = sorted((tree for b, e in endings.items() for tree in planted(b, tuple(e), tokens)), key=len)
    found: dict[Pair, Score] = {}
    for batch in batches(trees, tokens):
        found |= score_batch(model, batch)
    return [found[pair] for pair in cut]


def shortened(pair: Pair, longest: int) -> Pair:
    """The last `longest` tokens that are read, and the one after them."""
    beginning, ending = pair
    whole = (beginning + ending)[-(longest + 1) :]
    read = max(1, len(whole) - len(ending))
    return whole[:read], whole[read:]


def planted(beginning: tuple[int, ...], endings: Sequence[tuple[int, ...]], tokens: int) -> Iterator[Tree]:
    """One tree, or as many as it takes for each to fit into a batch."""
    some: list[tuple[int, ...]] = []
    for ending in endings:
        if some and len(Tree(beginning, (*some, ending))) > tokens:
            yield Tree(beginning, tuple(some))
            some = []
        some.append(ending)
    yield Tree(beginning, tuple(some))


def batches(trees: Sequence[Tree], tokens: int) -> Iterator[list[Tree]]:
    """Neighbours in length together, as long as they fit."""
    batch: list[Tree] = []
    for tree in trees:
        if batch and len(tree) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(tree)
    if batch:
        yield batch


def score_batch(model: GPT, trees: Sequence[Tree]) -> dict[Pair, Score]:
    device = model.embedding.weight.device
    time = max(map(len, trees))
    token = torch.zeros(len(trees), time, dtype=torch.long)
    position = torch.zeros_like(token)
    branch = torch.full_like(token, -1)  # -1 is padding, 0 the beginning, then one number an ending
    rows: list[tuple[int, int, int]] = []  # (sequence, place, token that is predicted there)
    owners: list[Pair] = []
    for b, tree in enumerate(trees):
        start = len(tree.beginning)
        token[b, :start] = torch.tensor(tree.beginning)
        position[b, :start] = torch.arange(start)
        branch[b, :start] = 0
        at = start
        for k, ending in enumerate(tree.endings):
            inner = len(ending) - 1
            token[b, at : at + inner] = torch.tensor(ending[:-1], dtype=torch.long)
            position[b, at : at + inner] = start + torch.arange(inner)
            branch[b, at : at + inner] = k + 1
            rows += [(b, place, t) for place, t in zip((start - 1, *range(at, at + inner)), ending, strict=True)]
            owners += [(tree.beginning, ending)] * len(ending)
            at += inner
    places = Places(position.to(device), sees(position, branch).to(device))
    x = model.final_norm(model.stream(token.to(device), places))
    likelihood, best = predicted(model, x, torch.tensor(rows, device=device))
    found: dict[Pair, Score] = {}
    for pair, value, right in zip(owners, likelihood.tolist(), best.tolist(), strict=True):
        before = found.get(pair, Score(0.0, True))
        found[pair] = Score(before.log_likelihood + value, before.greedy and right)
    return found


def sees(position_BT: Tensor, branch_BT: Tensor) -> Tensor:
    """The beginning sees what is before it; an ending sees the beginning and what is before it in itself; padding sees itself."""
    mine, theirs = branch_BT[:, :, None], branch_BT[:, None, :]
    related = (theirs == 0) & (mine >= 0) | (theirs == mine) & (mine > 0)
    earlier = position_BT[:, None, :] <= position_BT[:, :, None]
    itself = torch.eye(position_BT.shape[1], dtype=torch.bool)
    return related & earlier | itself


def predicted(model: GPT, x_BTN: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(log-likelihood of the token, whether it is the likeliest) at each (sequence, place, token); a few rows of logits at a time."""
    likelihoods, best = [], []
    for part in torch.split(rows, ROWS):
        h = x_BTN[part[:, 0], part[:, 1]] * model.logit_multiplier
        logits = model.unembedding(h).float()
        likelihoods.append(F.log_softmax(logits, -1).gather(1, part[:, 2:]).squeeze(1))
        best.append(logits.argmax(-1) == part[:, 2])
    return torch.cat(likelihoods).double(), torch.cat(best)


@torch.no_grad()
def continue_greedily(
    model: GPT, beginning: Sequence[int], *, most: int, longest: int, stop: "Iterator[int] | Sequence[int]" = ()
) -> Iterator[int]:
    """The likeliest token, again and again, until `most` or a token to stop at."""
    tokens, last = list(beginning), set(stop)
    device = model.embedding.weight.device
    for _ in range(most):
        x = model.final_norm(model.stream(torch.tensor([tokens[-longest:]], device=device)))[:, -1]
        token = int(model.unembedding(x * model.logit_multiplier).argmax())
        if token in last:
            return
        yield token
        tokens.append(token)
