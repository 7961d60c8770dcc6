"""Log-likelihoods: shared beginnings, batches and cuts change nothing that the naive way, one at a time, would say."""

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
    planted,
    score,
    sees,
    shortened,
)
from completep.model.gpt import Places, gpt


def model(**options):
    torch.manual_seed(0)
    made = gpt(32, 3, 61, head_size=16, **options)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return made.eval()


def naive(model, pair, longest):
    """One pair, read as it stands."""
    whole = (pair[0] + pair[1])[-(longest + 1) :]
    with torch.no_grad():
        logits = model(torch.tensor([whole[:-1]])).double()[0, -len(pair[1]) :]
    targets = torch.tensor(whole[-len(logits) :])
    found = F.log_softmax(logits, -1)[range(len(targets)), targets].sum().item()
    return found, bool((logits.argmax(-1) == targets).all())


def pairs(seed=0, count=40):
    g = torch.Generator().manual_seed(seed)

    def some(low, high):
        size = int(torch.randint(low, high, (), generator=g))
        return tuple(torch.randint(61, (size,), generator=g).tolist())

    begins = [some(1, 30) for _ in range(count // 4)]
    return [(begin, some(1, 9)) for begin in begins for _ in range(4)]


@pytest.mark.parametrize("positions", ["alibi", "rotary", "learned", "none"])
@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "swiglu", "norm": "rmsnorm", "qk_norm": True, "bias": False}],
    ids=["paper", "modern"],
)
def test_equal_to_one_at_a_time(positions, options):
    m = model(positions=positions, context=64, **options)
    asked = pairs()
    found = score(m, asked, longest=48, tokens=128)
    for pair, got in zip(asked, found, strict=True):
        value, greedy = naive(m, pair, 48)
        assert got.log_likelihood == pytest.approx(value, abs=1e-4)
        assert got.greedy == greedy


def test_cut_to_the_longest_as_the_naive_way():
    m = model()
    asked = pairs(seed=1)
    for pair, got in zip(asked, score(m, asked, longest=12), strict=True):
        assert got.log_likelihood == pytest.approx(naive(m, pair, 12)[0], abs=1e-4)
    assert shortened(((1, 2, 3), (4, 5)), 3) == ((2, 3), (4, 5))
    assert shortened(((1, 2), (3, 4, 5, 6)), 2) == ((4,), (5, 6))


@pytest.mark.parametrize("positions", ["alibi", "rotary", "learned", "none"])
def test_endings_of_one_token(positions):
    """As yes and no: nothing is read after the beginning."""
    m = model(positions=positions, context=64)
    asked = [((4, 5, 6, 7), (1,)), ((4, 5, 6, 7), (2,)), ((9, 8, 7, 6), (3,))]
    for pair, got in zip(asked, score(m, asked, longest=48), strict=True):
        assert got.log_likelihood == pytest.approx(naive(m, pair, 48)[0], abs=1e-4)


def test_the_models_own_words_are_greedy():
    m = model()
    begin = (5, 17, 40)
    said = tuple(continue_greedily(m, begin, most=6, longest=64))
    other = (*said[:-1], (said[-1] + 1) % 61)
    first, second = score(m, [(begin, said), (begin, other)], longest=64)
    assert first.greedy
    assert not second.greedy
    assert first.log_likelihood > second.log_likelihood
    assert tuple(continue_greedily(m, begin, most=6, longest=64, stop=[said[2]])) == said[: said.index(said[2])]


def test_each_beginning_is_read_once(monkeypatch):
    m, read = model(), []
    stream = m.stream
    monkeypatch.setattr(
        m, "stream", lambda tokens, places=None: (read.append(tokens.numel()), stream(tokens, places))[1]
    )
    begin = tuple(range(40))
    asked = [(begin, (i, 3)) for i in range(4)]
    score(m, asked, longest=64)
    assert sum(read) == 40 + 4  # not 4 times 41
    assert score(m, [*asked, *asked], longest=64)[:4] == score(m, asked, longest=64)


def test_who_sees_whom():
    """Two endings of a beginning of two; the last row is padding, which none of the others sees."""
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
    assert torch.equal(sees([tree], 6)[0, :3], expected[2:])  # the beginning is the same in all trees
    shorter = Tree((8,), ((1, 2),))
    assert torch.equal(sees([tree, shorter], 6)[0, :4], expected[1:])


def test_batches_hold_what_fits():
    trees = [Tree(tuple(range(n)), ((1,),)) for n in range(1, 50)]
    made = list(batches(trees, 100))
    assert list(itertools.chain(*made)) == trees
    assert all(len(b) == 1 or max(map(len, b)) * len(b) <= 100 for b in made)


def test_plain_places_are_the_plain_model():
    for positions in ("alibi", "rotary", "learned", "none"):
        m = model(positions=positions, context=32)
        tokens = torch.randint(61, (2, 20))
        t = torch.arange(20)[None].expand(2, -1)
        causal = t[:, :, None] >= t[:, None, :]
        with torch.no_grad():
            torch.testing.assert_close(m.stream(tokens, Places(t, causal)), m.stream(tokens), atol=1e-5, rtol=1e-5)


def test_learned_positions_have_an_end():
    m = model(positions="learned", context=16)
    with pytest.raises(UserError, match="longer than the 16 learned positions"):
        score(m, [(tuple(range(30)), (1,))], longest=64)
    assert isinstance(score(m, [(tuple(range(30)), (1,))], longest=16)[0], Score)


def test_endings_share_a_beginning_while_that_pays():
    """Behind one token each ending stands alone; behind a page they all share it; and no tree outgrows its bound."""
    endings = [(*range(20, 50), i) for i in range(100)]
    assert [len(t.endings) for t in planted((7,), endings, 64)] == [1] * 100
    (whole,) = planted(tuple(range(1000)), endings[:4], 64)
    assert whole.endings == tuple(endings[:4])
    parted = list(planted(tuple(range(1000)), endings, 1024))
    assert [e for t in parted for e in t.endings] == endings
    assert 1 < len(parted) < 10
    assert max(map(len, parted)) <= TREE
    assert [t.endings for t in planted((7,), [(1,), (2,), (3,)], 64)] == [((1,), (2,), (3,))]  # one token costs nothing


def test_many_endings_of_one_beginning():
    m = model()
    asked = [((7,), tuple(torch.randint(61, (20,)).tolist())) for _ in range(30)]
    found = score(m, asked, longest=64, tokens=100)
    for pair, got in zip(asked, found, strict=True):
        assert got.log_likelihood == pytest.approx(naive(m, pair, 64)[0], abs=1e-4)


def test_nothing_has_no_likelihood():
    for pair in (((1, 2), ()), ((), (3,))):
        with pytest.raises(ValueError, match="empty"):
            score(model(), [pair], longest=64)
