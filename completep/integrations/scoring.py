"""Log-likelihoods of many endings at once. A shared beginning is read once, and texts of similar length share a batch.

All endings of one beginning are packed into one sequence. Each ending attends to the beginning and to itself, at the
positions it would have on its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from completep.model.gpt import GPT, Places

TOKENS = {"cpu": 2048, "cuda": 16384}  # per batch, with padding; a CPU is fastest with what fits into its caches
TREE = 2048  # most tokens of a sequence, unless its beginning has half as many: masks grow with the square
ROWS = 1024  # rows of logits that are held at a time

Tokens = tuple[int, ...]
Pair = tuple[Tokens, Tokens]  # a beginning and an ending, both non-empty


@dataclass(frozen=True)
class Score:
    log_likelihood: float
    greedy: bool  # whether the ending is what greedy decoding would generate


@dataclass(frozen=True)
class Tree:
    """A beginning with its endings, as one sequence. The last token of an ending is predicted but not read."""

    beginning: Tokens
    endings: tuple[Tokens, ...]

    def __len__(self) -> int:
        return len(self.beginning) + sum(len(ending) - 1 for ending in self.endings)

    def spans(self) -> Iterator[tuple[int, int]]:
        """The start and stop of each ending in the sequence."""
        return pairwise(accumulate((len(ending) - 1 for ending in self.endings), initial=len(self.beginning)))


@torch.no_grad()
def score(model: GPT, pairs: Sequence[Pair], *, longest: int, tokens: int | None = None) -> list[Score]:
    """One score per pair, in order. A pair longer than `longest` tokens loses tokens at its start."""
    if not all(beginning and ending for beginning, ending in pairs):
        raise ValueError("a pair with an empty beginning or ending has no likelihood")
    tokens = tokens or TOKENS.get(model.embedding.weight.device.type, TOKENS["cuda"])
    shortened = [shorten(pair, longest) for pair in pairs]
    endings: dict[Tokens, dict[Tokens, None]] = {}
    for beginning, ending in shortened:
        endings.setdefault(beginning, {})[ending] = None
    width = model.config.width
    trees = sorted((tree for b, e in endings.items() for tree in make_trees(b, tuple(e), width)), key=len)
    scores: dict[Pair, Score] = {}
    for batch in batches(trees, tokens):
        scores |= score_batch(model, batch)
    return [scores[pair] for pair in shortened]


def shorten(pair: Pair, longest: int) -> Pair:
    """Keep the last `longest` tokens that are read, and the last token, which is only predicted."""
    beginning, ending = pair
    whole = (beginning + ending)[-(longest + 1) :]
    cut = max(1, len(whole) - len(ending))
    return whole[:cut], whole[cut:]


def make_trees(beginning: Tokens, endings: Sequence[Tokens], width: int) -> Iterator[Tree]:
    """One tree, or several where reading the beginning again is cheaper than putting all endings into one sequence.

    Costs are in units of one query times one key. Apart from attention, a token costs about 6·width per block, so to
    read a beginning of s tokens again costs s·(6·width + s/2). To put an ending of e tokens next to endings of E tokens
    costs 2·e·E: the kernel computes these pairs although they do not attend to each other.
    """
    start = len(beginning)
    rereading, most = start * (6 * width + start / 2), max(TREE, 2 * start)
    group: list[Tokens] = []
    size = 0
    for ending in endings:
        inner = len(ending) - 1
        if group and (2 * inner * size > rereading or start + size + inner > most):
            yield Tree(beginning, tuple(group))
            group, size = [], 0
        group.append(ending)
        size += inner
    yield Tree(beginning, tuple(group))


def batches(trees: Sequence[Tree], tokens: int) -> Iterator[list[Tree]]:
    """Groups of consecutive trees, as large as `tokens` allows."""
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
    rows: list[tuple[int, int, int]] = []  # (sequence, place, the token predicted there)
    owners: list[Pair] = []
    for b, tree in enumerate(trees):
        start = len(tree.beginning)
        token[b, : len(tree)] = torch.tensor([*tree.beginning, *(t for e in tree.endings for t in e[:-1])])
        position[b, :start] = torch.arange(start)
        for ending, (first, stop) in zip(tree.endings, tree.spans(), strict=True):
            position[b, first:stop] = torch.arange(start, start + stop - first)
            rows += [(b, place, t) for place, t in zip((start - 1, *range(first, stop)), ending, strict=True)]
            owners += [(tree.beginning, ending)] * len(ending)
    places = Places(position.to(device), visibility(trees, time).to(device))
    x = model.final_norm(model.stream(token.to(device), places))
    likelihood, greedy = predicted(model, x, torch.tensor(rows, device=device))
    scores: dict[Pair, Score] = {}
    for pair, value, is_greedy in zip(owners, likelihood.tolist(), greedy.tolist(), strict=True):
        so_far = scores.get(pair, Score(0.0, True))
        scores[pair] = Score(so_far.log_likelihood + value, so_far.greedy and is_greedy)
    return scores


def visibility(trees: Sequence[Tree], time: int) -> Tensor:
    """Each token sees the tokens before it, except those of other endings. What padding sees does not matter.

    Rows start after the shortest beginning: before that, every tree is a plain sequence.
    """
    shared = min(len(tree.beginning) for tree in trees)
    seen_BQT = torch.ones(time, time, dtype=torch.bool).tril()[shared:].repeat(len(trees), 1, 1)
    for b, tree in enumerate(trees):
        for first, stop in tree.spans():
            seen_BQT[b, first - shared : stop - shared, len(tree.beginning) : first] = False
    return seen_BQT


def predicted(model: GPT, x_BTN: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """For each (sequence, place, token): the log-likelihood of the token, and whether it is the most likely one."""
    likelihoods, greedy = [], []
    for part in torch.split(rows, ROWS):
        h = x_BTN[part[:, 0], part[:, 1]] * model.logit_multiplier
        logits = model.unembedding(h).float()
        likelihoods.append(F.log_softmax(logits, -1).gather(1, part[:, 2:]).squeeze(1))
        greedy.append(logits.argmax(-1) == part[:, 2])
    return torch.cat(likelihoods).double(), torch.cat(greedy)


@torch.no_grad()
def continue_greedily(
    model: GPT, beginning: Sequence[int], *, most: int, longest: int, stop: Iterable[int] = ()
) -> Iterator[int]:
    """Generate the most likely token, again and again, until there are `most` or until a token in `stop`."""
    tokens, stops = list(beginning), set(stop)
    device = model.embedding.weight.device
    for _ in range(most):
        x = model.final_norm(model.stream(torch.tensor([tokens[-longest:]], device=device)))[:, -1]
        token = int(model.unembedding(x * model.logit_multiplier).argmax())
        if token in stops:
            return
        yield token
        tokens.append(token)
