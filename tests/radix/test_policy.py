"""What goes first: policies by example, retention priorities, and liveness hints.

The reference of the test kit says the same at length (test_machine.py); this says it in words.
"""

from __future__ import annotations

import math
from functools import partial

import pytest

from radixrt.radix import POLICIES, CacheError, Duel, RadixCache

from . import sequences

put = partial(sequences.put, tail=True)

ALL = sorted(POLICIES)


def order_of_eviction(cache: RadixCache, *sequences: list[int]) -> list[int]:
    """Evict page by page: the index of the sequence that lost one each time."""
    lost = []
    lengths = [cache.peek(tokens) for tokens in sequences]
    while cache.evict(1):
        now = [cache.peek(tokens) for tokens in sequences]
        lost += [i for i, (before, after) in enumerate(zip(lengths, now, strict=True)) if after < before]
        lengths = now
        cache.check()
    return lost


# Policies.


@pytest.mark.parametrize("policy", ALL)
def test_every_policy_evicts_the_end_of_a_path_first(policy: str) -> None:
    cache = RadixCache(num_pages=8, page_size=1, policy=policy)
    put(cache, [1, 2, 3, 4])
    for left in (3, 2, 1, 0):
        assert cache.evict(1) == 1
        assert cache.peek([1, 2, 3, 4]) == left


def test_a_policy_has_a_known_name() -> None:
    with pytest.raises(CacheError, match="'mru'; there are lru, lru2, duel"):
        RadixCache(num_pages=8, page_size=1, policy="mru")


def test_lru2_evicts_what_was_used_once_first() -> None:
    cache = RadixCache(num_pages=8, page_size=1, policy="lru2")
    for tokens in ([1], [2], [1], [2], [3], [4]):
        put(cache, tokens)
    assert order_of_eviction(cache, [1], [2], [3], [4]) == [2, 3, 0, 1]


def test_lru2_looks_at_the_use_before_the_last() -> None:
    cache = RadixCache(num_pages=8, page_size=1, policy="lru2")
    for tokens in ([1], [2], [2], [1]):
        put(cache, tokens)
    assert order_of_eviction(cache, [1], [2]) == [0, 1]


def test_a_long_sequence_in_steps_is_one_use() -> None:
    cache = RadixCache(num_pages=8, page_size=1, policy="lru2")
    put(cache, [1])
    put(cache, [1])
    table = cache.open([])
    for token in (2, 3, 4):
        assert cache.extend(table, [token]) is not None
        cache.publish(table)
    cache.close(table)
    assert order_of_eviction(cache, [1], [2, 3, 4]) == [1, 1, 1, 0]


def test_what_comes_back_has_been_used_before() -> None:
    cache = RadixCache(num_pages=2, page_size=1, policy="lru2")
    put(cache, [1])
    cache.evict(1)
    put(cache, [1])
    put(cache, [2])
    assert order_of_eviction(cache, [1], [2]) == [1, 0]


def test_ghosts_are_of_one_namespace_and_of_one_path() -> None:
    for other, namespace in (([1], "tenant"), ([2, 1], "")):
        cache = RadixCache(num_pages=4, page_size=1, policy="lru2")
        put(cache, other, namespace=namespace)
        cache.evict(4)
        put(cache, [1])
        put(cache, [3])
        assert order_of_eviction(cache, [1], [3]) == [0, 1]


def test_ghosts_are_forgotten_after_four_times_the_pool() -> None:
    for scanned, first in ((7, 1), (8, 0)):
        cache = RadixCache(num_pages=2, page_size=1, policy="lru2")
        put(cache, [1])
        for token in range(100, 100 + scanned):
            put(cache, [token])
        cache.evict(2)
        put(cache, [1])
        put(cache, [2])
        assert order_of_eviction(cache, [1], [2])[0] == first


def test_reset_forgets_uses_and_ghosts() -> None:
    cache = RadixCache(num_pages=4, page_size=1, policy="lru2")
    put(cache, [1])
    cache.evict(1)
    cache.reset()
    put(cache, [1])
    put(cache, [2])
    assert order_of_eviction(cache, [1], [2]) == [0, 1]


def test_the_duel_follows_the_shadow_that_hits_more() -> None:
    cache = RadixCache(num_pages=4, page_size=1, policy=Duel(num_pages=4, page_size=1, interval=10))
    fresh = iter(range(10, 10_000))

    def turn() -> None:
        """One that comes back, then as many new ones as fit."""
        for token in (1, *(next(fresh) for _ in range(4))):
            put(cache, [token])

    assert cache.stats().policy == "duel: lru"
    for _ in range(4):
        turn()
    assert cache.stats().policy == "duel: lru2"
    assert cache.peek([1]) == 1
    while cache.stats().policy == "duel: lru2":  # now each comes back once and soon: LRU-2 keeps old friends instead
        soon = [next(fresh) for _ in range(3)]
        for token in soon * 2:
            put(cache, [token])
        assert soon[0] < 5000, "the duel never came back"


def test_the_duel_ranks_anew_when_it_changes_its_mind() -> None:
    """Pages used under one ranking keep their times for the other."""
    duel = Duel(num_pages=4, page_size=1, interval=1)
    cache = RadixCache(num_pages=4, page_size=1, policy=duel)
    for tokens in ([1], [1], [2]):
        put(cache, tokens)
    duel._scores = [0.0, 100.0]
    cache.close(cache.open([7]))
    assert cache.stats().policy == "duel: lru2"
    cache.check()
    assert order_of_eviction(cache, [1], [2]) == [1, 0]


# Priorities.


@pytest.mark.parametrize("policy", ALL)
def test_low_priority_goes_first_however_warm(policy: str) -> None:
    cache = RadixCache(num_pages=8, page_size=1, policy=policy)
    put(cache, [1], priority=1)
    put(cache, [2])
    put(cache, [3], priority=-1)
    put(cache, [3], priority=-1)
    assert order_of_eviction(cache, [1], [2], [3]) == [2, 1, 0]


def test_a_priority_covers_the_whole_path_and_is_never_lowered() -> None:
    cache = RadixCache(num_pages=8, page_size=1)
    put(cache, [1, 2])
    put(cache, [1, 2, 3], priority=5)
    put(cache, [1, 2, 3, 4], priority=-5)
    put(cache, [9], priority=4)
    assert order_of_eviction(cache, [1, 2, 3, 4], [9]) == [0, 1, 0, 0, 0]


def test_the_first_half_of_a_split_edge_keeps_its_priority_and_so_does_the_second() -> None:
    cache = RadixCache(num_pages=8, page_size=1)
    put(cache, [1, 2, 3, 4], priority=1)
    put(cache, [1, 2, 9])
    put(cache, [7])
    assert order_of_eviction(cache, [7], [1, 2, 9], [1, 2, 3, 4]) == [1, 0, 2, 2, 1, 2, 1, 2]


def test_a_page_that_continues_a_partly_filled_one_takes_over_its_priority() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    put(cache, [1, 2, 3], priority=1)
    put(cache, [1, 2, 3, 4])
    put(cache, [9])
    assert order_of_eviction(cache, [1, 2, 3, 4], [9]) == [1, 0]


def test_a_partly_filled_page_that_grows_stays_as_warm_and_as_dear() -> None:
    """The page of a live sequence, of which another has published the first token."""
    cache = RadixCache(num_pages=8, page_size=4, policy="lru2")
    table = cache.open([], priority=-1)
    assert cache.extend(table, [1, 2]) is not None
    cache.publish(table)
    reader = cache.open([1], priority=3)
    cache.publish(reader, tail=True)
    cache.close(cache.open([1]))
    [page] = reader.page_ids.tolist()
    before, last = cache.tree.policy.heat(page)
    assert 0 < before < last
    cache.publish(table, tail=True)
    assert table.page_ids.tolist() == [page]
    assert cache.peek([1, 2]) == 2
    assert cache.tree.priority[page] == 3
    assert cache.tree.policy.heat(page)[0] == before
    cache.check()


def test_forks_and_duplicates_have_their_priority() -> None:
    cache = RadixCache(num_pages=8, page_size=1)
    parent = cache.open([], priority=2)
    child = cache.fork(parent)
    assert child.priority == 2
    low = cache.open([])
    for table in (low, parent):
        assert cache.extend(table, [1]) is not None
        cache.publish(table)  # the second finds the page of the first
        cache.check()
    for table in (low, parent, child):
        cache.close(table)
    put(cache, [2], priority=1)
    assert order_of_eviction(cache, [1], [2]) == [1, 0]


def test_a_page_in_a_new_life_has_no_old_priority() -> None:
    cache = RadixCache(num_pages=1, page_size=1)
    put(cache, [1], priority=9)
    put(cache, [2])
    assert cache.tree.priority.max() == 0


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1])
def test_a_priority_fits(priority: int) -> None:
    cache = RadixCache(num_pages=1, page_size=1)
    with pytest.raises(CacheError, match="int32"):
        cache.open([1], priority=priority)
    assert cache.stats().opened == 0


# Liveness.


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize(("keep_len", "kept"), [(0, 0), (1, 2), (2, 2), (3, 4), (4, 4), (5, 5)])
def test_drop_frees_what_follows(policy: str, keep_len: int, kept: int) -> None:
    cache = RadixCache(num_pages=8, page_size=2, policy=policy)
    put(cache, [1, 2, 3, 4, 5])
    put(cache, [9])
    freed = -(-5 // 2) - -(-keep_len // 2)
    assert cache.drop([1, 2, 3, 4, 5], keep_len) == freed
    assert (cache.peek([1, 2, 3, 4, 5]), cache.peek([9])) == (kept, 1)
    stats = cache.stats()
    assert (stats.num_free, stats.dropped_pages, stats.evicted_pages) == (4 + freed, freed, 0)
    cache.check()


def test_drop_leaves_what_another_continues() -> None:
    cache = RadixCache(num_pages=16, page_size=2)
    put(cache, [1, 2, 3, 4, 5, 6])
    put(cache, [1, 2, 3, 4, 7, 8])
    assert cache.drop([1, 2, 3, 4]) == 0
    assert cache.drop([1, 2, 3, 4, 5, 6]) == 1
    assert cache.peek([1, 2, 3, 4, 7, 8]) == 6
    assert cache.drop([1, 2, 3, 4, 7]) == 0  # 8 follows
    assert cache.drop([1, 2, 3, 4, 7, 8]) == 3
    assert cache.num_free == 16


def test_drop_takes_a_partly_filled_end_but_not_a_sibling() -> None:
    cache = RadixCache(num_pages=16, page_size=4)
    put(cache, [1, 2, 3, 4, 5, 6])
    put(cache, [1, 2, 3, 4, 5, 7, 8])
    assert cache.drop([1, 2, 3, 4, 5, 6, 9]) == 1
    assert cache.peek([1, 2, 3, 4, 5, 7, 8]) == 7
    assert cache.drop([1, 2, 3, 4, 5]) == 0


def test_drop_leaves_what_somebody_holds() -> None:
    cache = RadixCache(num_pages=8, page_size=1)
    put(cache, [1, 2, 3, 4])
    holder = cache.open([1, 2])
    assert cache.drop([1, 2, 3, 4]) == 2
    assert cache.drop([1, 2]) == 0
    cache.close(holder)
    pin = cache.pin([1])
    assert pin is not None
    assert cache.drop([1, 2]) == 1
    cache.unpin(pin)
    assert cache.drop([1, 2]) == 1
    cache.check()


def test_drop_is_of_one_namespace() -> None:
    cache = RadixCache(num_pages=8, page_size=1)
    put(cache, [1], namespace="a")
    assert (cache.drop([1]), cache.drop([1], namespace="b"), cache.drop([1], namespace="a")) == (0, 0, 1)
    assert cache.stats().num_namespaces == 0


def test_explain_tells_of_a_drop() -> None:
    cache = RadixCache(num_pages=8, page_size=1)
    put(cache, [1, 2])
    cache.drop([1, 2], 1)
    assert cache.explain([1, 2]).evicted_by == "drop"
    cache.drop([1], by="session 7")
    assert cache.explain([1, 2]).evicted_by == "session 7"


@pytest.mark.parametrize("keep_len", [-1, 3])
def test_drop_keeps_what_there_is(keep_len: int) -> None:
    cache = RadixCache(num_pages=8, page_size=1)
    put(cache, [1, 2])
    with pytest.raises(CacheError, match=f"keep {keep_len} tokens: 2"):
        cache.drop([1, 2], keep_len)
    assert cache.peek([1, 2]) == 2


def test_dropped_pages_leave_no_ghosts() -> None:
    cache = RadixCache(num_pages=4, page_size=1, policy="lru2")
    put(cache, [1])
    cache.drop([1])
    put(cache, [1])
    put(cache, [2])
    assert order_of_eviction(cache, [1], [2]) == [0, 1]


@pytest.mark.parametrize("policy", ALL)
def test_ages_at_eviction(policy: str) -> None:
    """In uses and evictions of the whole cache; a page is as old as the last of what was evicted from behind it."""
    cache = RadixCache(num_pages=8, page_size=1, policy=policy)
    put(cache, [1, 2, 3])  # opened at 1, published at 2
    cache.close(cache.open([1]))  # at 3
    assert math.isnan(cache.stats().mean_eviction_age)
    cache.evict(2)  # at 4
    put(cache, [7])  # at 5 and 6
    cache.evict(2)  # at 7: one is 4 old, the other 1
    stats = cache.stats()
    assert (stats.eviction_ages, stats.eviction_age_total) == ((1, 2, 1), 2 + 2 + 4 + 1)
    assert stats.mean_eviction_age == 9 / 4


def test_pages_that_leave_host_memory_have_an_age_too() -> None:
    cache = RadixCache(num_pages=2, page_size=1, num_host_pages=1)
    put(cache, [1])  # published at 2
    cache.swaps_done(cache.swap_out(1))
    put(cache, [2])  # published at 4
    cache.swaps_done(cache.swap_out(1))  # for which the first is dropped, at 5
    stats = cache.stats()
    assert (stats.evicted_pages, stats.evicted_host_pages, stats.eviction_ages) == (0, 1, (0, 1))
