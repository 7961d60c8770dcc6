"""The sampler: every window once per epoch, the same batch for any number of ranks, and no state."""

import hashlib
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from completep.data import sampler as module
from completep.data.corpus import load_corpus
from completep.data.sampler import Sampler, permuted, validation_batches
from completep.errors import UserError
from tests.data.made import write_corpus

MASK = 2**64 - 1


def places(size):
    return np.arange(size, dtype=np.uint64)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Ids count up, so a window shows where it comes from. 23 windows of 7 in three shards, and tails."""
    shards = [range(0, 80), range(100, 135), range(140, 200)]
    folder = write_corpus(tmp_path_factory.mktemp("sampler") / "c", shards, [range(1, 33), range(40, 48)])
    return load_corpus(folder)


STARTS = [*range(0, 71, 7), *range(100, 128, 7), *range(140, 196, 7)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 13, 16, 17, 64, 97, 255, 257, 1000, 1009, 65536, 65537])
def test_it_is_a_permutation(size):
    for key in ("0 0", "0 1", "1 0"):
        assert np.array_equal(np.sort(permuted(places(size), size, key)), places(size))


@given(size=st.integers(1, 3000), key=st.text(max_size=5))
@settings(deadline=None, max_examples=60)
@pytest.mark.slow
def test_it_is_a_permutation_of_any_size(size, key):
    assert len(np.unique(permuted(places(size), size, key))) == size


def test_without_cycle_walking_it_is_no_permutation():
    keys = np.arange(8, dtype=np.uint64)
    assert module._feistel(places(10), 2, keys).max() >= 10
    assert len(np.unique(module._feistel(places(16), 2, keys))) == 16


def by_hand(place: int, size: int, key: str) -> int:
    """The same algorithm in plain integers."""
    half = 1
    while 4**half < size:
        half += 1
    stream = hashlib.shake_128(f"completep order {key}".encode()).digest(64)
    while True:
        left, right = place >> half, place % 2**half
        for i in range(0, 64, 8):
            x = right + int.from_bytes(stream[i : i + 8], "little") & MASK
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
            x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
            left, right = right, left ^ (x ^ x >> 31) % 2**half
        place = left << half | right
        if place < size:
            return place


@pytest.mark.parametrize("size", [1, 2, 23, 4096, 10**9 + 7, 2**50 + 1])
def test_against_plain_integers(size):
    """Also at sizes that are too large for a table."""
    chosen = np.array(sorted({0, 1 % size, size // 2, size - 1}), dtype=np.uint64)
    assert permuted(chosen, size, "3 5").tolist() == [by_hand(int(i), size, "3 5") for i in chosen]


def test_the_order_is_pinned():
    """Another order would silently change the data of every run."""
    assert permuted(places(10), 10, "0 0").tolist() == [1, 2, 5, 7, 4, 6, 9, 8, 0, 3]


@pytest.mark.slow
def test_orders_look_random():
    """Over 2000 keys each of 6 windows is at each of 6 places about equally often. The identity fails the test."""
    seen = np.array([permuted(places(6), 6, f"0 {epoch}") for epoch in range(2000)])
    table = np.array([np.bincount(column, minlength=6) for column in seen.T.astype(int)])
    assert chi_square(table) < 60  # 25 degrees of freedom: 60 is beyond one in ten thousand
    assert chi_square(np.eye(6) * 2000) > 60
    assert len(Counter(map(tuple, seen.tolist()))) > 600  # of 720 orders


def chi_square(table):
    return ((table - 2000 / 6) ** 2 / (2000 / 6)).sum()


def test_neighbours_are_separated():
    order = permuted(places(10007), 10007, "0 0").astype(int)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04
    assert np.corrcoef(np.arange(10006), np.arange(1, 10007))[0, 1] > 0.99


def starts(batch):
    assert (batch == batch[:, :1] + np.arange(batch.shape[1])).all(), "a window spans two shards"
    return batch[:, 0].tolist()


def test_an_epoch_visits_every_window_once(corpus):
    sampler = Sampler(corpus, "train", sequence=7, batch=1, seed=0)
    epochs = [[starts(sampler.batch_at(step))[0] for step in range(23 * e, 23 * (e + 1))] for e in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [STARTS] * 3
    assert epochs[0] != epochs[1] != epochs[2] != STARTS
    other = Sampler(corpus, "train", sequence=7, batch=1, seed=1)
    assert [starts(other.batch_at(step))[0] for step in range(23)] != epochs[0]


def test_batches_span_epochs(corpus):
    """23 windows in batches of 5: 23 batches are exactly 5 epochs."""
    sampler = Sampler(corpus, "train", sequence=7, batch=5, seed=0)
    seen = [s for step in range(23) for s in starts(sampler.batch_at(step))]
    assert Counter(seen) == dict.fromkeys(STARTS, 5)
    assert all(sorted(seen[i : i + 23]) == STARTS for i in range(0, 115, 23))
    assert sorted(seen[1:24]) != STARTS


def test_a_batch_of_many_epochs(corpus):
    batch = Sampler(corpus, "train", sequence=7, batch=92, seed=0).batch_at(0)
    assert Counter(starts(batch)) == dict.fromkeys(STARTS, 4)


def test_shape_and_type(corpus):
    batch = Sampler(corpus, "train", sequence=7, batch=6, seed=0).batch_at(3, rank=1, world=2)
    assert (batch.shape, batch.dtype) == ((3, 8), np.int64)


@given(
    batch=st.sampled_from([1, 2, 6, 12, 24]),
    sequence=st.integers(1, 31),
    seed=st.integers(-(2**70), 2**70),
    step=st.integers(0, 10**9),
)
@settings(deadline=None, max_examples=60)
@pytest.mark.slow
def test_ranks_change_nothing(corpus, batch, sequence, seed, step):
    whole = Sampler(corpus, "train", sequence, batch, seed).batch_at(step)
    assert whole.shape == (batch, sequence + 1)
    for world in (w for w in range(1, batch + 1) if batch % w == 0):
        ranks = [Sampler(corpus, "train", sequence, batch, seed).batch_at(step, r, world) for r in range(world)]
        assert np.array_equal(np.concatenate(ranks), whole)


def test_ranks_in_another_order_are_another_batch(corpus):
    sampler = Sampler(corpus, "train", 7, 6, 0)
    assert not np.array_equal(np.concatenate([sampler.batch_at(0, r, 2) for r in (1, 0)]), sampler.batch_at(0))


def test_it_has_no_state(corpus):
    sampler = Sampler(corpus, "train", 7, 4, 0)
    late = sampler.batch_at(9)
    sampler.batch_at(2)
    assert np.array_equal(sampler.batch_at(9), late)
    assert not np.array_equal(sampler.batch_at(2), late)


def test_it_is_pickled_without_the_data(corpus):
    sampler = Sampler(corpus, "train", 7, 4, 0)
    sent = pickle.dumps(sampler)
    assert np.array_equal(pickle.loads(sent).batch_at(5), sampler.batch_at(5))
    assert bytes(range(20, 60)) not in sent
    assert bytes(range(20, 60)) in pickle.dumps(corpus.open("train"))


def test_one_window(tmp_path):
    sampler = Sampler(load_corpus(write_corpus(tmp_path / "c", [[1, 2, 3]])), "train", 2, 2, 0)
    assert sampler.batch_at(0).tolist() == [[1, 2, 3]] * 2


def test_no_window(corpus, tmp_path):
    Sampler(corpus, "train", sequence=79, batch=1, seed=0)
    with pytest.raises(UserError, match=r"no 81 tokens in a row \(sequence=80.*longest shard has 80"):
        Sampler(corpus, "train", sequence=80, batch=1, seed=0)
    without = load_corpus(write_corpus(tmp_path / "c", [[1, 2, 3]]))
    with pytest.raises(UserError, match=r"the validation split .* longest shard has 0"):
        Sampler(without, "validation", sequence=1, batch=1, seed=0)


@pytest.mark.parametrize("world", [4, 0, -1, 7])
def test_a_batch_that_does_not_divide(corpus, world):
    sampler = Sampler(corpus, "train", 7, 6, 0)
    sampler.batch_at(0, 0, 3)
    with pytest.raises(UserError, match=f"a batch of 6 sequences does not divide over {world} ranks"):
        sampler.batch_at(0, 0, world)


@pytest.mark.parametrize(("step", "rank"), [(-1, 0), (0, 2), (0, -1)])
def test_no_such_step_or_rank(corpus, step, rank):
    with pytest.raises(UserError, match=f"step {step}, rank {rank} of 2"):
        Sampler(corpus, "train", 7, 6, 0).batch_at(step, rank, 2)


@pytest.mark.parametrize("numbers", [{"sequence": 0}, {"batch": 0}])
def test_numbers_below_one(corpus, numbers):
    with pytest.raises(UserError, match=f"{next(iter(numbers))}=0"):
        Sampler(**{"corpus": corpus, "split": "train", "sequence": 7, "batch": 6, "seed": 0} | numbers)


def test_validation_batches_are_spread_over_the_split(corpus):
    """Windows of 7: four in the first shard of 32 tokens, one in the second of 8."""
    whole = [1, 8, 15, 22, 40]
    assert [starts(b) for b in validation_batches(corpus, 7, batch=2, tokens=35)] == [[1, 8], [15, 22], [40]]
    assert [starts(b) for b in validation_batches(corpus, 7, batch=99, tokens=10**9)] == [whole]
    assert [starts(b) for b in validation_batches(corpus, 7, batch=9, tokens=14)] == [[1, 15]]
    assert [starts(b) for b in validation_batches(corpus, 7, batch=9, tokens=1)] == [[1]]
    with pytest.raises(UserError, match=r"the validation split .* no 33 tokens in a row"):
        validation_batches(corpus, 32, batch=2, tokens=2)
    with pytest.raises(UserError, match="tokens=0"):
        validation_batches(corpus, 7, batch=2, tokens=0)
