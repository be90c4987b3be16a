"""The prefix tree (D13): what it finds, what it keeps, what it lets go, and the tree against a slow oracle."""

import random
import time
from collections import Counter
from itertools import count

import numpy as np
import pytest

from cache.radix import RadixTree, common_length
from support.slow_prefixes import SlowPrefixes


class Holder:
    """Reference counts of cells; a fresh cell for whoever computes."""

    def __init__(self):
        self.held = Counter()
        self._next = count()

    def hold_cells(self, cells):
        self.held.update(cells.tolist())

    def release_cells(self, cells):
        assert all(self.held[cell] == 1 for cell in cells.tolist()), "the tree holds a cell once"
        for cell in cells.tolist():
            del self.held[cell]

    def compute(self, num):
        return np.array([next(self._next) for _ in range(num)], np.int32)


class Bench:
    def __init__(self):
        self.holder = Holder()
        self.tree = RadixTree(self.holder)

    def use(self, *tokens, salt=None):
        """A whole life: lease the longest prefix, compute the rest, give it to the tree, leave."""
        lease = self.live(*tokens, salt=salt)
        self.tree.release(lease)
        return self

    def live(self, *tokens, salt=None):
        tokens = ids(*tokens)
        lease = self.tree.acquire(salt, tokens)
        self.tree.extend(lease, tokens, self.holder.compute(tokens.size - lease.length))
        return lease

    def found(self, *tokens, salt=None):
        return self.tree.match(salt, ids(*tokens)).length


def ids(*tokens):
    return np.array(tokens, np.int64)


def cells_of(tree, salt, *tokens):
    lease = tree.acquire(salt, ids(*tokens))
    cells = tree.cells(lease).tolist()
    tree.release(lease)
    return cells


# -- Finding


@pytest.mark.parametrize(
    ("asked", "length"),
    [((1, 2, 3, 4), 4), ((1, 2, 3, 4, 5), 4), ((1, 2), 2), ((1,), 1), ((1, 9), 1), ((2, 1), 0), ((), 0)],
)
def test_hits_have_any_length(asked, length):
    assert Bench().use(1, 2, 3, 4).found(*asked) == length


def test_branches_share_what_they_have_in_common_and_keep_their_own():
    bench = Bench().use(1, 2, 3, 4).use(1, 2, 5, 6).use(1, 2, 3, 7)
    assert cells_of(bench.tree, None, 1, 2, 3, 4) == [0, 1, 2, 3]
    assert cells_of(bench.tree, None, 1, 2, 5, 6) == [0, 1, 4, 5]
    assert cells_of(bench.tree, None, 1, 2, 3, 7) == [0, 1, 2, 6]
    assert bench.tree.num_held == 7


def test_salts_see_nothing_of_each_other():
    bench = Bench().use(1, 2, 3, salt="a").use(1, 2, 3, 4, salt=None)
    assert [bench.found(1, 2, 3, 4, salt=salt) for salt in ("a", None, "", "b")] == [3, 4, 0, 0]
    assert set(cells_of(bench.tree, "a", 1, 2, 3)).isdisjoint(cells_of(bench.tree, None, 1, 2, 3, 4))


def test_pfx_1_token_ids_past_32_bits_are_told_apart():
    assert Bench().use(1 << 40, 7).found((1 << 40) + (1 << 32), 7) == 0


def test_a_match_changes_nothing():
    bench = Bench().use(1, 2, 3, 4)
    assert bench.found(1, 2) == 2
    assert [node.end for node in bench.tree.nodes()] == [0, 4]
    assert bench.found(5, salt="new") == 0
    assert [node.salt for node in bench.tree.nodes()] == [None, None]


def test_a_match_says_what_is_locked_anyway():
    bench = Bench().use(1, 2, 3, 4)
    lease = bench.tree.acquire(None, ids(1, 2, 3))
    match = bench.tree.match(None, ids(1, 2, 3, 4, 5))
    assert (match.length, match.num_locked) == (4, 3)
    match = bench.tree.match(None, ids(1, 2))
    assert (match.length, match.num_locked) == (2, 2)
    bench.tree.release(lease)
    assert bench.tree.match(None, ids(1, 2)).num_locked == 0


# -- Leases


def test_a_locked_path_is_never_evicted_and_what_hangs_behind_it_may_be():
    bench = Bench().use(1, 2, 3, 4)
    lease = bench.tree.acquire(None, ids(1, 2))
    assert bench.tree.num_evictable == 2
    assert bench.tree.evict(99) == 2
    assert bench.found(1, 2, 3) == 2
    bench.tree.release(lease)
    assert bench.tree.evict(99) == 2
    assert (bench.tree.num_held, list(bench.tree.nodes()), bench.holder.held) == (0, [], Counter())


def test_a_shared_lease_locks_until_both_are_released():
    bench = Bench()
    lease = bench.live(1, 2, 3)
    other = bench.tree.share(lease)
    bench.tree.release(lease)
    assert (bench.tree.evict(9), bench.tree.num_leases) == (0, 1)
    bench.tree.release(other)
    assert (bench.tree.evict(9), bench.tree.num_leases) == (3, 0)


def test_a_lease_stays_at_its_end_when_its_edge_is_split():
    bench = Bench()
    lease = bench.live(1, 2, 3, 4)
    bench.use(1, 2, 9)
    assert (lease.length, bench.tree.cells(lease).tolist()) == (4, [0, 1, 2, 3])
    assert bench.tree.num_evictable == 1
    bench.tree.check_integrity()


def test_what_was_computed_twice_is_taken_from_the_tree():
    bench = Bench()
    first, second = (bench.tree.acquire(None, ids(1, 2, 3)) for _ in range(2))
    bench.tree.extend(first, ids(1, 2, 3), np.array([0, 1, 2], np.int32))
    known = bench.tree.cells_past(second, ids(1, 2, 3, 4))
    assert known.tolist() == [0, 1, 2]
    with pytest.raises(AssertionError, match="with other cells"):
        bench.tree.extend(second, ids(1, 2, 3, 4), np.array([5, 6, 7, 8], np.int32))
    bench.tree.extend(second, ids(1, 2, 3, 4), np.array([*known, 8], np.int32))
    assert bench.tree.cells(second).tolist() == [0, 1, 2, 8]


# -- Eviction


def test_other_cells_for_the_same_tokens_take_the_place_of_the_old_ones_and_branches_stay():
    """From the lease's end to the tokens' end, which may lie inside an edge; what hangs behind stays where it is."""
    bench = Bench().use(1, 2, 3, 4, 5, 6).use(1, 2, 3, 9)
    tree, asked = bench.tree, ids(1, 2, 3, 4, 5)
    assert tree.found(None, ids(1, 2, 3, 4, 7)).tolist() == [0, 1, 2, 3]
    lease = tree.acquire(None, asked[:2])
    own = bench.holder.compute(3)
    tree.replace(lease, asked, own)
    tree.extend(lease, asked, own)
    assert tree.found(None, ids(1, 2, 3, 4, 5, 6)).tolist() == [0, 1, *own.tolist(), 5]
    assert tree.found(None, ids(1, 2, 3, 9)).tolist() == [0, 1, int(own[0]), 6]
    tree.release(lease)
    tree.check_integrity()
    assert tree.evict(tree.num_evictable) == 7


def test_the_least_recently_used_leaf_goes_first_and_loses_no_more_than_it_must():
    bench = Bench().use(1, 1, 1).use(2, 2, 2).use(3, 3, 3).use(1, 1, 1)
    assert bench.tree.evict(2) == 2
    assert [bench.found(*[token] * 3) for token in (1, 2, 3)] == [3, 1, 3]
    bench.tree.evict(2)
    assert [bench.found(*[token] * 3) for token in (1, 2, 3)] == [3, 0, 2]


def test_a_prefix_goes_only_behind_everything_that_hangs_on_it():
    bench = Bench().use(1, 2, 3).use(1, 2, 4).use(5)
    for found in ([2, 3, 1], [2, 2, 1], [1, 1, 1], [0, 0, 1]):
        bench.tree.evict(1)
        assert [bench.found(1, 2, 3), bench.found(1, 2, 4), bench.found(5)] == found
        bench.tree.check_integrity()


def test_an_empty_salt_leaves_no_root_behind():
    bench = Bench()
    for number in range(50):
        bench.use(1, 2, salt=str(number))
    bench.tree.evict(100)
    leases = [bench.tree.acquire(str(number), ids(1, 2)) for number in range(50)]
    for lease in leases:
        bench.tree.release(lease)
    assert list(bench.tree.nodes()) == []


def test_stale_entries_do_not_pile_up():
    bench = Bench().use(1, 2, 3)
    for _ in range(1000):
        bench.use(1, 2, 3)
    assert len(bench.tree._idle_leaves) < 100
    assert bench.tree.evict(3) == 3


# -- Speed


def test_a_long_prompt_is_matched_and_inserted_without_a_loop_over_its_tokens():
    """Well under a millisecond for 16k tokens; the bound is wide because the machine may be shared."""
    bench = Bench()
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50_000, 16_384)
    for end in range(512, prompt.size + 1, 512):  # a path of many edges
        lease = bench.tree.acquire(None, prompt[:end])
        bench.tree.extend(lease, prompt[:end], bench.holder.compute(end - lease.length))
        bench.tree.release(lease)
    other, cells = prompt.copy(), np.arange(10**6, 10**6 + 16_383, dtype=np.int32)
    other[1] = -1
    bench.holder.hold_cells = lambda cells: None
    matches, inserts = [], []
    for attempt in range(20):
        started = time.perf_counter()
        assert bench.tree.match(None, prompt).length == prompt.size
        matches.append(time.perf_counter() - started)
        other[1] = -1 - attempt
        started = time.perf_counter()
        lease = bench.tree.acquire(None, other)
        bench.tree.extend(lease, other, cells)
        bench.tree.release(lease)
        inserts.append(time.perf_counter() - started)
    assert min(matches) < 0.001
    assert min(inserts) < 0.001


@pytest.mark.parametrize(
    ("a", "b", "length"), [((), (), 0), ((1, 2), (1, 2), 2), ((1, 2), (1, 3, 4), 1), ((1,), (2,), 0)]
)
def test_the_common_length_is_where_two_first_differ(a, b, length):
    assert common_length(ids(*a), ids(*b)) == common_length(ids(*b), ids(*a)) == length


# -- Against the oracle


def random_lives(seed, turns):
    """Arrivals, computing, sharing, ends and evictions; every answer is the slow one's."""
    rng = random.Random(seed)
    bench, slow = Bench(), SlowPrefixes()
    tree, holder = bench.tree, bench.holder
    open_leases = []  # (lease, its prefix)
    for turn in range(turns):
        kind = rng.choices(("arrive", "extend", "share", "release", "evict"), (5, 6, 1, 5, 2))[0]
        if kind == "arrive":
            salt, tokens = rng.choice((None, None, "a")), random_tokens(rng)
            length, match = slow.longest(salt, tokens), tree.match(salt, ids(*tokens))
            locked = sum((salt, tokens[:end]) in slow.locked() for end in range(1, length + 1))
            assert (match.length, match.num_locked) == (length, locked)
            lease, prefix = tree.acquire(salt, ids(*tokens)), (salt, tokens[:length])
            slow.leases.append(prefix)
            open_leases.append((lease, prefix))
        elif kind == "evict":
            num = rng.randint(0, 12)
            before = set(holder.held)
            assert tree.num_evictable == len(slow.cells) - len(slow.locked())
            gone = slow.evict(num)
            assert tree.evict(num) == len(gone)
            assert before - set(holder.held) == set(gone)
        elif open_leases:
            at = rng.randrange(len(open_leases))
            lease, prefix = open_leases[at]
            if kind == "extend":
                tokens = prefix[1] + random_tokens(rng)
                known = tree.cells_past(lease, ids(*tokens))
                assert lease.length + known.size == slow.longest(prefix[0], tokens)
                cells = [*known.tolist(), *holder.compute(len(tokens) - lease.length - known.size).tolist()]
                path = tree.cells(lease).tolist() + cells
                tree.extend(lease, ids(*tokens), np.array(cells, np.int32))
                open_leases[at] = (lease, slow.extend(prefix, tokens, path))
            elif kind == "share":
                slow.leases.append(prefix)
                open_leases.append((tree.share(lease), prefix))
            else:
                del open_leases[at]
                tree.release(lease)
                slow.release(prefix)
        for lease, prefix in open_leases:
            assert tree.cells(lease).tolist() == slow.cells_of(prefix)
        assert sorted(holder.held) == sorted(slow.cells.values())
        assert tree.num_leases == len(open_leases)
        if turn % 8 == 0:
            tree.check_integrity()
    for lease, _ in open_leases:
        tree.release(lease)
    tree.evict(tree.num_evictable)
    assert (tree.num_held, list(tree.nodes()), holder.held) == (0, [], Counter())


def random_tokens(rng):
    """From so few ids that prefixes meet, in edges that several leases cut."""
    return tuple(rng.choices((1, 2, 3), (6, 2, 1), k=rng.randint(0, 7)))


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_answers_as_the_slow_one(seed):
    random_lives(seed, 150)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 300))
def test_the_tree_answers_as_the_slow_one_over_1e5_turns(seed):
    random_lives(seed, 500)
