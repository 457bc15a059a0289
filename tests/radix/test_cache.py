"""RadixCache by example: one test for each kind of fault that such caches have had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from radixrt.radix import (
    BrokenInvariant,
    CacheError,
    ClosedTable,
    InvalidTokens,
    LiveTables,
    PageTable,
    RadixCache,
    WritePlan,
)


def run(cache: RadixCache, table: PageTable, tokens: Sequence[int], **extra: Any) -> WritePlan:
    """Extend, with the copies done at once."""
    plan = cache.extend(table, tokens, **extra)
    assert plan is not None
    cache.copies_done(plan)
    return plan


def live(cache: RadixCache, tokens: Sequence[int], namespace: str = "", label: str = "") -> PageTable:
    """A published live sequence."""
    table = cache.open(tokens, namespace, label)
    run(cache, table, tokens[table.seq_len :])
    cache.publish(table)
    cache.check()
    return table


def put(cache: RadixCache, tokens: Sequence[int], namespace: str = "", *, tail: bool = False) -> None:
    """A sequence from open to close."""
    table = live(cache, tokens, namespace)
    if tail:
        cache.publish(table, tail=True)
    cache.close(table)
    cache.check()


# Hits.


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_every_prefix_hits_to_the_token(page_size: int) -> None:
    cache = RadixCache(num_pages=64, page_size=page_size)
    tokens = list(range(100, 100 + 3 * page_size + page_size // 2))
    put(cache, tokens, tail=True)
    for seq_len in {0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size, len(tokens)}:
        match = cache.match(tokens[:seq_len])
        assert (match.length, match.prefix_len) == (seq_len, seq_len // page_size * page_size)
        assert cache.match([*tokens[:seq_len], 7]).length == seq_len
    assert cache.peek([*tokens, 1, 2, 3]) == len(tokens)


def test_without_a_tail_only_full_pages_stay() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    put(cache, [1, 2, 3, 4, 5, 6])
    assert cache.peek([1, 2, 3, 4, 5, 6]) == 4
    assert cache.stats().num_cached == 1


def test_a_live_tail_is_hit_and_then_written_by_neither() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    first = live(cache, [1, 2, 3, 4, 5, 6])
    match = cache.match([1, 2, 3, 4, 5, 9])
    assert (match.tail_page, match.tail_len) == (int(first.page_ids[1]), 1)
    second = cache.open([1, 2, 3, 4, 5, 9])
    shared = int(second.page_ids[1])
    plan = run(cache, second, [9])
    assert [(copy.src, copy.num_tokens) for copy in plan.copies] == [(shared, 1)]
    assert run(cache, first, [7]).copies == ()  # the last owner writes in place
    cache.check()


def test_nothing_unwritten_is_hit() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    table = cache.open([])
    run(cache, table, [1, 2, 3])
    assert cache.peek([1, 2, 3]) == 0
    cache.publish(table)
    assert cache.peek([1, 2, 3]) == 3
    cache.truncate(table, 1)
    assert cache.peek([1, 2, 3]) == 2  # the full page is the tree's


def test_a_page_that_waits_for_its_copy_is_not_hit() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    table = live(cache, [1, 2, 3])
    other = cache.fork(table)
    plan = cache.extend(table, [4])
    cache.close(other)
    assert plan is not None
    assert cache.peek([1, 2, 3]) == 0
    cache.copies_done(plan)
    assert cache.peek([1, 2, 3]) == 3


def test_namespaces_share_nothing() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    table = live(cache, [1, 2, 3], "a")
    assert cache.peek([1, 2, 3]) == cache.peek([1, 2, 3], "b") == 0
    assert cache.fork(table).namespace == "a"
    with pytest.raises(CacheError, match="namespace"):
        cache.extend(cache.open([], "b"), [1, 2, 3], leader=table, shared_len=3)


# Writing, copy-on-write and leaders.


def test_extend_says_what_to_write() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    table = cache.open([])
    assert cache.extend(table, [1, 2, 3]) == WritePlan(0, 3, ())
    assert cache.extend(table, [4, 5]) == WritePlan(3, 5, ())
    assert cache.extend(table, []) == WritePlan(5, 5, ())
    assert (len(table), len(table.page_ids), table.tokens.tolist()) == (5, 2, [1, 2, 3, 4, 5])


def test_a_fork_copies_on_write_and_the_last_owner_does_not() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    table = live(cache, [1, 2, 3, 4, 5])
    forks = [cache.fork(table, label=f"fork {i}") for i in range(2)]
    assert cache.stats().num_free == 6
    assert len(run(cache, forks[0], [6]).copies) == 1
    assert len(run(cache, table, [7]).copies) == 1
    assert run(cache, forks[1], [8]).copies == ()
    assert [fork.label for fork in forks] == ["fork 0", "fork 1"]
    assert len({int(t.page_ids[1]) for t in (table, *forks)}) == 3
    cache.check()


def test_a_fork_of_a_fork_outlives_its_parents() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    table = live(cache, [1, 2, 3])
    child = cache.fork(table)
    grandchild = cache.fork(child)
    cache.close(table)
    cache.close(child)
    assert run(cache, grandchild, [4]).copies == ()
    assert grandchild.tokens.tolist() == [1, 2, 3, 4]
    cache.check()


def test_a_published_tail_is_copied_even_by_its_only_holder() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    table = live(cache, [1, 2])
    cache.publish(table, tail=True)
    assert len(run(cache, table, [3]).copies) == 1
    cache.check()


def test_truncate_into_a_shared_page_borrows_it() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    table = live(cache, [1, 2, 3, 4])
    cache.truncate(table, 3)
    assert (table.num_tree_pages, len(table.page_ids)) == (1, 2)
    assert len(run(cache, table, [9]).copies) == 1
    cache.publish(table)
    assert cache.peek([1, 2, 3, 4]) == cache.peek([1, 2, 3, 9]) == 4
    cache.check()


def test_both_ends_of_a_copy_live_until_it_is_done() -> None:
    freed: list[int] = []
    cache = RadixCache(num_pages=4, page_size=2, on_free=lambda page_ids: freed.extend(page_ids.tolist()))
    put(cache, [1, 2])
    table = cache.open([1])
    plan = cache.extend(table, [5])
    assert plan is not None
    (copy,) = plan.copies
    cache.close(table)
    assert cache.evict(4) == 0
    assert freed == []
    with pytest.raises(LiveTables, match="1 copies"):
        cache.reset()
    cache.copies_done(plan)
    assert freed == [copy.dst]
    assert cache.evict(4) == 1
    with pytest.raises(CacheError, match="done before"):
        cache.copies_done(plan)
    cache.check()


def test_a_copy_of_a_page_that_waits_for_a_copy_reads_the_first_source() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    put(cache, [1, 2, 3, 4])
    table = cache.open([1, 2])
    first = cache.extend(table, [5])
    child = cache.fork(table)
    cache.truncate(child, 2)
    second = cache.extend(child, [6])
    assert first is not None
    assert second is not None
    assert first.copies[0].src == second.copies[0].src
    assert first.copies[0].dst != second.copies[0].dst
    with pytest.raises(CacheError, match="copies_done before publish"):
        cache.publish(table)
    cache.check()


def test_a_follower_shares_the_leaders_new_pages() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    leader, follower = cache.open([]), cache.open([])
    run(cache, leader, [1, 2, 3, 4, 5, 6])
    run(cache, follower, [1, 2, 3, 4, 5, 9], leader=leader, shared_len=5)
    assert follower.page_ids[:2].tolist() == leader.page_ids[:2].tolist()
    assert follower.page_ids[2] != leader.page_ids[2]
    cache.check()
    for table in (follower, leader):
        cache.publish(table)
        cache.check()
    assert cache.stats().num_cached == 4


@pytest.mark.parametrize("shared_len", [-1, 4, 5, 100])
def test_a_leader_must_have_the_tokens(shared_len: int) -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    leader, follower = cache.open([]), cache.open([])
    run(cache, leader, [1, 2, 3, 4])
    with pytest.raises(CacheError):
        cache.extend(follower, [1, 2, 3, 9], leader=leader, shared_len=shared_len)
    with pytest.raises(CacheError, match="needs a leader"):
        cache.extend(follower, [1, 2], shared_len=2)
    with pytest.raises(CacheError, match="another table"):
        cache.extend(leader, [5], leader=leader, shared_len=2)
    assert follower.seq_len == 0
    cache.check()


# Publishing.


def test_twins_published_together_end_on_one_copy() -> None:
    freed: list[int] = []
    cache = RadixCache(num_pages=8, page_size=2, on_free=lambda page_ids: freed.extend(page_ids.tolist()))
    twins = [cache.open([]) for _ in range(2)]
    for twin in twins:
        run(cache, twin, [1, 2, 3, 4, 5])
    duplicates = twins[1].page_ids[:2].tolist()
    for twin in twins:
        cache.publish(twin)
        cache.check()
    assert twins[0].page_ids[:2].tolist() == twins[1].page_ids[:2].tolist()
    assert freed == duplicates
    taken = cache.pool.alloc(cache.num_free)
    assert taken is not None
    assert not set(taken.tolist()) & {page for twin in twins for page in twin.page_ids.tolist()}


def test_publish_is_idempotent_and_order_free() -> None:
    sequences = ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2], [1, 2, 3, 4, 7, 8])
    shapes = []
    for order in (sequences, sequences[::-1]):
        cache = RadixCache(num_pages=16, page_size=2)
        for tokens in (*order, *order):
            put(cache, tokens)
        shapes.append([cache.peek(tokens) for tokens in sequences])
        assert cache.stats().num_cached == 4
    assert shapes == [[4, 4, 2, 6]] * 2


def test_a_withdrawn_chunk_leaves_nothing() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    table = live(cache, [1, 2, 3, 4])
    run(cache, table, [5, 6, 7])
    cache.truncate(table, 4)
    cache.close(table)
    cache.check()
    assert cache.peek([1, 2, 3, 4, 5, 6, 7]) == 4
    assert cache.num_free == 6


def test_a_borrowed_tail_survives_being_superseded() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    put(cache, [1, 2, 3], tail=True)
    borrower = cache.open([1, 2, 3])
    put(cache, [1, 2, 3, 4])
    assert run(cache, borrower, [9]).copies == ()  # the tree let go of it
    cache.publish(borrower)
    assert cache.peek([1, 2, 3, 4]) == cache.peek([1, 2, 3, 9]) == 4
    cache.check()


# Eviction.


def test_a_split_keeps_heat() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    x, y = [1, 2, 3, 4], [5, 6, 7, 8]
    put(cache, x)
    put(cache, y)
    put(cache, [*x[:2], 9, 9])  # splits x and uses its first half
    cache.close(cache.open(x[:2]))
    cache.close(cache.open(x))
    assert cache.evict(2) == 2
    assert (cache.peek(y), cache.peek(x)) == (0, 4)


def test_a_match_inside_an_edge_warms_what_it_used_of_it() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    put(cache, [1, 2, 3, 4])
    put(cache, [5, 6, 7, 8])
    cache.close(cache.open([1, 2]))
    left = []
    for _ in range(4):
        left.append((cache.peek([5, 6, 7, 8]), cache.peek([1, 2, 3, 4])))
        assert cache.evict(1) == 1
        cache.check()
    assert left == [(4, 4), (4, 2), (2, 2), (0, 2)]


def test_looking_does_not_warm() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    put(cache, [1, 2])
    put(cache, [3, 4])
    cache.match([1, 2])
    cache.peek([1, 2])
    cache.evict(1)
    assert cache.peek([1, 2]) == 0


@pytest.mark.parametrize("asked", [0, 1, 2, 3, 4, 5, 10**9])
def test_eviction_takes_exactly_what_is_asked_from_the_tail(asked: int) -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    put(cache, list(range(8)))
    assert cache.evict(asked) == min(asked, 4)
    assert cache.peek(list(range(8))) == 8 - 2 * min(asked, 4)
    assert cache.num_free == 4 + min(asked, 4)
    cache.check()


def test_held_pages_stay_and_do_not_hide_free_ones() -> None:
    cache = RadixCache(num_pages=8, page_size=1)
    put(cache, [1, 2, 3])
    put(cache, [4, 5])
    holder = cache.open([1, 2])
    assert cache.num_evictable == 3
    cold = cache.open([4])
    assert (cache.evict(9), cache.peek([1, 2, 3]), cache.peek([4, 5])) == (2, 2, 1)
    cache.close(holder)
    cache.close(cold)
    cache.check()
    assert cache.evict(9) == 3


def test_pins_keep_full_pages_and_unpin_once() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    put(cache, [1, 2, 3, 4, 5], tail=True)
    pin = cache.pin([1, 2, 3, 4, 5, 6])
    assert pin is not None
    assert pin.prefix_len == 4
    assert cache.evict(9) == 1
    assert cache.peek([1, 2, 3, 4, 5]) == 4
    with pytest.raises(LiveTables, match="1 pins"):
        cache.reset()
    cache.unpin(pin)
    with pytest.raises(ClosedTable):
        cache.unpin(pin)
    assert cache.evict(9) == 2
    cache.check()


def test_pins_over_their_budget_are_refused_and_change_nothing() -> None:
    cache = RadixCache(num_pages=8, page_size=2, max_pinned=3)
    put(cache, [1, 2, 3, 4, 5, 6])
    put(cache, [7, 8])
    pins = [cache.pin([1, 2, 3, 4]), cache.pin([1, 2, 3, 4, 5, 6])]  # pages in both count once
    assert None not in pins
    assert cache.stats().num_pinned == 3
    assert cache.pin([7, 8]) is None
    assert cache.stats().num_pins == 2
    assert cache.evict(9) == 1
    for pin in pins:
        assert pin is not None
        cache.unpin(pin)
    assert cache.stats().num_pinned == 0
    cache.check()


def test_pages_a_follower_holds_without_their_path_are_not_counted_evictable() -> None:
    cache = RadixCache(num_pages=16, page_size=1)
    leader, follower = cache.open([]), cache.open([])
    run(cache, leader, [1, 2, 3])
    run(cache, follower, [1, 2, 3], leader=leader, shared_len=3)
    put(cache, [1, 2])  # another computes the beginning first: the leader moves to its pages
    cache.publish(leader)
    cache.close(leader)
    cache.check()
    assert cache.num_evictable == cache.evict(99) == 0
    cache.publish(follower)
    cache.close(follower)
    cache.check()
    assert cache.evict(99) == 3


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_all_that_lies_behind_a_prefix_is_found(page_size: int) -> None:
    cache = RadixCache(num_pages=128, page_size=page_size)
    rng = np.random.default_rng(page_size)
    there = [rng.integers(0, 3, rng.integers(1, 9)).tolist() for _ in range(20)]
    for tokens in there:
        put(cache, tokens, tail=True)
    put(cache, [0, 1, 2] * 3, "other", tail=True)
    ends = [tokens for tokens in there if not any(o[: len(tokens)] == tokens and o != tokens for o in there)]
    for _ in range(200):
        wanted = rng.integers(0, 3, rng.integers(0, 7)).tolist()
        found = [tokens.tolist() for tokens in cache.behind(wanted)]
        assert sorted(found) == sorted({tuple(t): t for t in ends if t[: len(wanted)] == wanted}.values())
    assert cache.behind([9]) == cache.behind([], "empty") == []
    assert [len(tokens) for tokens in cache.behind([], "other")] == [9]


# All or nothing.


def test_extend_without_room_changes_nothing() -> None:
    cache = RadixCache(num_pages=4, page_size=2)
    put(cache, [1, 2, 3, 4])
    table = cache.open([1, 2])
    stats, refs, page_ids = cache.stats(), cache.pool.refs.copy(), table.page_ids.copy()
    assert cache.extend(table, range(100, 108)) is None
    assert cache.stats() == stats
    assert np.array_equal(cache.pool.refs, refs)
    assert np.array_equal(table.page_ids, page_ids)
    assert cache.peek([1, 2, 3, 4]) == 4
    assert cache.extend(table, range(100, 106)) is not None
    assert cache.num_free == 0
    assert cache.stats().evicted_pages == 1
    cache.check()


def test_a_copy_counts_in_the_room_needed() -> None:
    cache = RadixCache(num_pages=1, page_size=2)
    put(cache, [1], tail=True)
    table = cache.open([1])
    assert cache.extend(table, [2]) is None  # its only page is borrowed and cannot be evicted
    assert table.tokens.tolist() == [1]
    cache.check()


def test_misuse_changes_nothing() -> None:
    cache = RadixCache(num_pages=4, page_size=2)
    table = live(cache, [1, 2, 3])
    for seq_len in (-1, 4):
        with pytest.raises(CacheError, match="truncate"):
            cache.truncate(table, seq_len)
    with pytest.raises(CacheError, match="-1"):
        cache.evict(-1)
    assert table.tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        table.page_ids[0] = 3
    cache.check()


def follow(cache: RadixCache, leader: PageTable) -> None:
    follower = cache.open([])
    try:
        cache.extend(follower, [1], leader=leader, shared_len=1)
    finally:
        cache.close(follower)


@pytest.mark.parametrize(
    "use",
    [
        RadixCache.close,
        RadixCache.fork,
        RadixCache.publish,
        lambda cache, table: cache.extend(table, [1]),
        lambda cache, table: cache.truncate(table, 0),
        follow,
    ],
)
def test_closed_and_foreign_tables_are_refused(use: Callable[[RadixCache, PageTable], object]) -> None:
    cache = RadixCache(num_pages=4, page_size=2)
    table = live(cache, [1, 2, 3])
    with pytest.raises(ClosedTable, match="another cache"):
        use(RadixCache(num_pages=4, page_size=2), table)
    cache.close(table)
    with pytest.raises(ClosedTable, match="was closed"):
        use(cache, table)
    cache.reset()
    with pytest.raises(ClosedTable, match="was closed"):
        use(cache, table)
    assert cache.num_free == 4


def test_reset_frees_all_and_refuses_while_tables_live() -> None:
    cache = RadixCache(num_pages=4, page_size=2)
    table = live(cache, [1, 2, 3])
    with pytest.raises(LiveTables, match="1 tables"):
        cache.reset()
    assert cache.peek([1, 2, 3]) == 3
    cache.close(table)
    cache.reset()
    cache.check()
    assert (cache.num_free, cache.peek([1, 2, 3])) == (4, 0)
    put(cache, [1, 2, 3])


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**31],
        [2**70],
        [1.5],
        ["1"],
        [None],
        [True],
        [[1, 2]],
        [[1], [2, 3]],
        "12",
        7,
        np.array([1.0]),
        np.array([-1], np.int32),
        np.array([2**32], np.uint64),
        np.zeros((2, 2), np.int32),
    ],
)
def test_bad_tokens_are_refused_everywhere(tokens: Any) -> None:
    cache = RadixCache(num_pages=4, page_size=2)
    table = live(cache, [1, 2, 3])
    for use in (cache.match, cache.peek, cache.open, cache.pin, cache.explain, lambda ids: cache.extend(table, ids)):
        with pytest.raises(InvalidTokens, match="token ids"):
            use(tokens)
    cache.check()
    assert cache.stats().num_tables == 1
    assert cache.stats().opened == 1


@pytest.mark.parametrize("tokens", [(1, 2), range(1, 3), np.array([1, 2], np.uint8), np.array([1, 0, 2])[::2]])
def test_any_integer_sequence_will_do(tokens: Sequence[int]) -> None:
    cache = RadixCache(num_pages=4, page_size=2)
    put(cache, tokens)
    assert cache.peek([1, 2]) == 2


def test_sizes_are_checked() -> None:
    for num_pages, page_size in ((0, 1), (1, 0), (-1, 4)):
        with pytest.raises(CacheError):
            RadixCache(num_pages=num_pages, page_size=page_size)


# Reporting.


def test_stats_count_what_happened() -> None:
    cache = RadixCache(num_pages=8, page_size=2, policy="lru")
    put(cache, [1, 2, 3, 4])
    table = cache.open([1, 2, 3, 9])
    run(cache, table, [9])
    stats = cache.stats()
    assert (stats.opened, stats.opened_tokens, stats.hit_tokens) == (2, 8, 3)
    assert (stats.reused_copies, stats.forked_copies, stats.num_tables, stats.num_cached) == (1, 0, 1, 2)
    assert (stats.num_held, stats.num_evictable, stats.num_free) == (1, 1, 5)


def test_after_the_last_close_every_page_is_free_or_cached() -> None:
    cache = RadixCache(num_pages=32, page_size=4)
    generator = np.random.default_rng(1)
    tables = []
    for _ in range(40):
        tokens = generator.integers(0, 2, 12).tolist()
        table = cache.open(tokens)
        if (plan := cache.extend(table, tokens[table.seq_len :])) is not None:
            cache.copies_done(plan)
            cache.publish(table)
        tables.append(table)
        if len(tables) > 5:
            cache.close(tables.pop(0))
    for table in tables:
        cache.close(table)
    stats = cache.stats()
    assert stats.num_free + stats.num_cached == 32
    assert (stats.num_held, stats.num_evictable) == (0, stats.num_cached)
    cache.check()


@pytest.mark.parametrize(
    "breakage",
    [
        lambda cache: cache.pool.refs.__setitem__(1, 5),
        lambda cache: cache.tree.owner.__setitem__(1, 0),
        lambda cache: cache.tree.order.clear(),
        lambda cache: cache.tails.tables.clear(),
        lambda cache: next(iter(cache.tree.nodes.values())).tokens.view.__setitem__(0, 9),
        lambda cache: setattr(next(iter(cache.tables)), "written_len", 99),
    ],
)
def test_check_sees_what_is_wrong(breakage: Callable[[RadixCache], None]) -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    put(cache, [5, 6])
    live(cache, [1, 2, 3])
    cache.check()
    breakage(cache)
    with pytest.raises(BrokenInvariant):
        cache.check()
