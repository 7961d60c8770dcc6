"""Log-likelihoods of many endings at once: what begins alike is read once, and texts of like length share a batch.

All endings of one beginning stand in one sequence: each sees the beginning and itself, at the positions it would have alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from completep.model.gpt import GPT, Places

TOKENS = {"cpu": 2048, "cuda": 16384}  # in a batch, padding included: a CPU is fastest with what its caches hold
TREE = 2048  # tokens of one sequence, unless its beginning alone is half of that: masks grow with the square
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

    def spans(self) -> Iterator[tuple[int, int]]:
        """Where each ending stands in the sequence."""
        return pairwise(accumulate((len(e) - 1 for e in self.endings), initial=len(self.beginning)))


@torch.no_grad()
def score(model: GPT, pairs: Sequence[Pair], *, longest: int, tokens: int | None = None) -> list[Score]:
    """One score a pair, in their order. A pair longer than `longest` loses tokens at its start."""
    if not all(begin and end for begin, end in pairs):
        raise ValueError("a pair with an empty beginning or ending has no likelihood")
    tokens = tokens or TOKENS.get(model.embedding.weight.device.type, TOKENS["cuda"])
    cut = [shortened(pair, longest) for pair in pairs]
    endings: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
    for beginning, ending in cut:
        endings.setdefault(beginning, {})[ending] = None
    width = model.config.width
    trees = sorted((tree for b, e in endings.items() for tree in planted(b, tuple(e), width)), key=len)
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


def planted(beginning: tuple[int, ...], endings: Sequence[tuple[int, ...]], width: int) -> Iterator[Tree]:
    """One tree, or several where reading the beginning again costs less than keeping the endings together.

    In units of one query times one key: a token costs a block some 6·width beside attention, so another reading costs
    s·(6·width + s/2); an ending of e tokens beside others of E in all makes the kernel look at 2·e·E pairs that do not see each other.
    """
    start = len(beginning)
    again, most = start * (6 * width + start / 2), max(TREE, 2 * start)
    some: list[tuple[int, ...]] = []
    beside = 0
    for ending in endings:
        inner = len(ending) - 1
        if some and (2 * inner * beside > again or start + beside + inner > most):
            yield Tree(beginning, tuple(some))
            some, beside = [], 0
        some.append(ending)
        beside += inner
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
    token = torch.zeros(len(trees), time, dtype=torch.int32)
    position = torch.zeros_like(token)
    rows: list[tuple[int, int, int]] = []  # (sequence, place, token that is predicted there)
    owners: list[Pair] = []
    for b, tree in enumerate(trees):
        start = len(tree.beginning)
        token[b, : len(tree)] = torch.tensor([*tree.beginning, *(t for e in tree.endings for t in e[:-1])])
        position[b, :start] = torch.arange(start)
        for ending, (at, end) in zip(tree.endings, tree.spans(), strict=True):
            position[b, at:end] = torch.arange(start, start + end - at)
            rows += [(b, place, t) for place, t in zip((start - 1, *range(at, end)), ending, strict=True)]
            owners += [(tree.beginning, ending)] * len(ending)
    places = Places(position.to(device), sees(trees, time).to(device))
    x = model.final_norm(model.stream(token.to(device), places))
    likelihood, best = predicted(model, x, torch.tensor(rows, device=device))
    found: dict[Pair, Score] = {}
    for pair, value, right in zip(owners, likelihood.tolist(), best.tolist(), strict=True):
        before = found.get(pair, Score(0.0, True))
        found[pair] = Score(before.log_likelihood + value, before.greedy and right)
    return found


def sees(trees: Sequence[Tree], time: int) -> Tensor:
    """Each token sees what stands before it, but an ending not the other endings. What padding sees is never looked at.

    Only of the tokens after the shortest beginning: the others follow one another in every tree.
    """
    shared = min(len(tree.beginning) for tree in trees)
    seen_BQT = torch.ones(time, time, dtype=torch.bool).tril()[shared:].repeat(len(trees), 1, 1)
    for b, tree in enumerate(trees):
        for at, end in tree.spans():
            seen_BQT[b, at - shared : end - shared, len(tree.beginning) : at] = False
    return seen_BQT


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
