"""Log-likelihoods with shared beginnings and batches equal those of one text at a time."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from completep.errors import UserError
from completep.integrations.scoring import (
    TREE,
    Score,
    Tree,
    batches,
    continue_greedily,
    make_trees,
    score,
    shorten,
    visibility,
)
from completep.model.gpt import Places, gpt


def model(**options):
    torch.manual_seed(0)
    made = gpt(32, 3, 61, head_size=16, **options)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return made.eval()


def naive(model, pair, longest):
    """One pair, read on its own."""
    whole = (pair[0] + pair[1])[-(longest + 1) :]
    with torch.no_grad():
        logits = model(torch.tensor([whole[:-1]])).double()[0, -len(pair[1]) :]
    targets = torch.tensor(whole[-len(logits) :])
    total = F.log_softmax(logits, -1)[range(len(targets)), targets].sum().item()
    return total, bool((logits.argmax(-1) == targets).all())


def pairs(seed=0, count=40):
    g = torch.Generator().manual_seed(seed)

    def draw(low, high):
        size = int(torch.randint(low, high, (), generator=g))
        return tuple(torch.randint(61, (size,), generator=g).tolist())

    begins = [draw(1, 30) for _ in range(count // 4)]
    return [(begin, draw(1, 9)) for begin in begins for _ in range(4)]


@pytest.mark.parametrize("positions", ["alibi", "rotary", "learned", "none"])
@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "swiglu", "norm": "rmsnorm", "qk_norm": True, "bias": False}],
    ids=["paper", "modern"],
)
def test_equal_to_one_at_a_time(positions, options):
    m = model(positions=positions, context=64, **options)
    questions = pairs()
    for pair, got in zip(questions, score(m, questions, longest=48, tokens=128), strict=True):
        value, greedy = naive(m, pair, 48)
        assert got.log_likelihood == pytest.approx(value, abs=1e-4)
        assert got.greedy == greedy


def test_long_texts_lose_their_start():
    m = model()
    questions = pairs(seed=1)
    for pair, got in zip(questions, score(m, questions, longest=12), strict=True):
        assert got.log_likelihood == pytest.approx(naive(m, pair, 12)[0], abs=1e-4)
    assert shorten(((1, 2, 3), (4, 5)), 3) == ((2, 3), (4, 5))
    assert shorten(((1, 2), (3, 4, 5, 6)), 2) == ((4,), (5, 6))


@pytest.mark.parametrize("positions", ["alibi", "rotary", "learned", "none"])
def test_endings_of_one_token(positions):
    """Such as yes and no: nothing is read after the beginning."""
    m = model(positions=positions, context=64)
    questions = [((4, 5, 6, 7), (1,)), ((4, 5, 6, 7), (2,)), ((9, 8, 7, 6), (3,))]
    for pair, got in zip(questions, score(m, questions, longest=48), strict=True):
        assert got.log_likelihood == pytest.approx(naive(m, pair, 48)[0], abs=1e-4)


def test_generated_text_is_greedy():
    m = model()
    begin = (5, 17, 40)
    greedy = tuple(continue_greedily(m, begin, most=6, longest=64))
    other = (*greedy[:-1], (greedy[-1] + 1) % 61)
    first, second = score(m, [(begin, greedy), (begin, other)], longest=64)
    assert first.greedy
    assert not second.greedy
    assert first.log_likelihood > second.log_likelihood
    assert tuple(continue_greedily(m, begin, most=6, longest=64, stop=[greedy[2]])) == greedy[: greedy.index(greedy[2])]


def test_each_beginning_is_read_once(monkeypatch):
    m, read = model(), []
    stream = m.stream
    monkeypatch.setattr(
        m, "stream", lambda tokens, places=None: (read.append(tokens.numel()), stream(tokens, places))[1]
    )
    begin = tuple(range(40))
    questions = [(begin, (i, 3)) for i in range(4)]
    score(m, questions, longest=64)
    assert sum(read) == 40 + 4  # not 4 times 41
    assert score(m, [*questions, *questions], longest=64)[:4] == score(m, questions, longest=64)


def test_which_tokens_see_which():
    """Two endings after a beginning of two tokens. The last column is padding, which no token sees."""
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0],
            [1, 1, 1, 1, 0, 0],
            [1, 1, 0, 0, 1, 0],
        ]
    ).bool()
    tree = Tree((8, 8), ((1, 2, 3), (4, 5)))
    assert torch.equal(visibility([tree], 6)[0, :3], expected[2:])  # rows start after the shared beginning
    shorter = Tree((8,), ((1, 2),))
    assert torch.equal(visibility([tree, shorter], 6)[0, :4], expected[1:])


def test_batches_are_as_large_as_allowed():
    trees = [Tree(tuple(range(n)), ((1,),)) for n in range(1, 50)]
    made = list(batches(trees, 100))
    assert list(itertools.chain(*made)) == trees
    assert all(len(b) == 1 or max(map(len, b)) * len(b) <= 100 for b in made)


def test_places_of_a_plain_sequence_change_nothing():
    for positions in ("alibi", "rotary", "learned", "none"):
        m = model(positions=positions, context=32)
        tokens = torch.randint(61, (2, 20))
        t = torch.arange(20)[None].expand(2, -1)
        causal = t[:, :, None] >= t[:, None, :]
        with torch.no_grad():
            torch.testing.assert_close(m.stream(tokens, Places(t, causal)), m.stream(tokens), atol=1e-5, rtol=1e-5)


def test_learned_positions_have_a_limit():
    m = model(positions="learned", context=16)
    with pytest.raises(UserError, match="longer than the 16 learned positions"):
        score(m, [(tuple(range(30)), (1,))], longest=64)
    assert isinstance(score(m, [(tuple(range(30)), (1,))], longest=16)[0], Score)


def test_endings_share_a_beginning_if_that_is_cheaper():
    """After one token each ending is alone, after a page all share it, and no tree exceeds its bound."""
    endings = [(*range(20, 50), i) for i in range(100)]
    assert [len(t.endings) for t in make_trees((7,), endings, 64)] == [1] * 100
    (whole,) = make_trees(tuple(range(1000)), endings[:4], 64)
    assert whole.endings == tuple(endings[:4])
    parts = list(make_trees(tuple(range(1000)), endings, 1024))
    assert [e for t in parts for e in t.endings] == endings
    assert 1 < len(parts) < 10
    assert max(map(len, parts)) <= TREE
    assert [t.endings for t in make_trees((7,), [(1,), (2,), (3,)], 64)] == [
        ((1,), (2,), (3,))
    ]  # one token costs nothing


def test_many_endings_of_one_beginning():
    m = model()
    questions = [((7,), tuple(torch.randint(61, (20,)).tolist())) for _ in range(30)]
    for pair, got in zip(questions, score(m, questions, longest=64, tokens=100), strict=True):
        assert got.log_likelihood == pytest.approx(naive(m, pair, 64)[0], abs=1e-4)


def test_an_empty_text_has_no_likelihood():
    for pair in (((1, 2), ()), ((), (3,))):
        with pytest.raises(ValueError, match="empty"):
            score(model(), [pair], longest=64)
