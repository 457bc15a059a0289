"""Host pages by example: what moves, what a match says of it, and what becomes of a copy when its world has changed."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.radix import CacheError, LiveTables, PageCopy, RadixCache

from .sequences import put


def a_cache(num_pages: int = 8, num_host_pages: int = 8, page_size: int = 2) -> RadixCache:
    return RadixCache(num_pages=num_pages, page_size=page_size, num_host_pages=num_host_pages)


def out(cache: RadixCache, num_pages: int) -> tuple[PageCopy, ...]:
    copies = cache.swap_out(num_pages)
    cache.swaps_done(copies)
    cache.check()
    return copies


def test_a_page_is_matched_on_the_device_until_its_copy_ends() -> None:
    cache = a_cache()
    put(cache, [1, 2, 3, 4, 5], tail=True)
    copies = cache.swap_out(2)
    assert [copy.src for copy in copies] == [3, 2]
    assert all(copy.dst > 8 for copy in copies)
    assert cache.match([1, 2, 3, 4, 5]).length == 5
    assert cache.num_free == 5
    cache.swaps_done(copies)
    match = cache.match([1, 2, 3, 4, 5, 6])
    assert (match.page_ids.tolist(), match.length, match.host_len) == ([1], 2, 3)
    assert match.host_ids.tolist() == [copy.dst for copy in reversed(copies)]
    assert (cache.peek([1, 2, 3, 4]), cache.open([1, 2, 3, 4]).seq_len) == (2, 2)
    assert cache.num_free == 7


def test_pages_come_back_in_order_and_are_matched_again() -> None:
    cache = a_cache()
    put(cache, [1, 2, 3, 4, 5], tail=True)
    out(cache, 3)
    assert cache.stats().num_host_cached == 3
    first = cache.swap_in([1, 2, 3, 4, 5], max_pages=1)
    assert first is not None
    cache.swaps_done(first)
    assert cache.match([1, 2, 3, 4, 5]).length == 2
    rest = cache.swap_in([1, 2, 3, 4, 5])
    assert rest is not None
    cache.swaps_done(rest)
    match = cache.match([1, 2, 3, 4, 5])
    assert (match.length, match.host_len, len(match.host_ids)) == (5, 0, 0)
    assert (cache.stats().swapped_out, cache.stats().swapped_in) == (3, 3)
    assert cache.stats().num_host_free == 8


def test_a_copy_whose_source_somebody_took_hold_of_is_dropped() -> None:
    cache = a_cache()
    put(cache, [1, 2, 3, 4])
    copies = cache.swap_out(1)
    reader = cache.open([1, 2, 3, 4])
    cache.swaps_done(copies)
    assert reader.page_ids.tolist() == [1, 2]
    assert (cache.stats().num_host_free, cache.stats().swapped_out) == (8, 0)
    cache.check()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_copy_that_overtakes_one_it_depends_on_is_dropped(order: tuple[int, int]) -> None:
    cache = a_cache()
    put(cache, [1, 2, 3, 4])
    copies = cache.swap_out(2)
    for i in order:
        cache.swaps_done((copies[i],))
        cache.check()
    assert cache.match([1, 2, 3, 4]).length == (0 if order == (0, 1) else 2)
    assert cache.stats().swapped_out == (2 if order == (0, 1) else 1)


def test_a_page_that_is_still_copied_out_is_not_written() -> None:
    """Though nobody else reads it: the tree gave it up for a page that continues it."""
    cache = a_cache()
    put(cache, [1], tail=True)
    copies = cache.swap_out(1)
    table = cache.open([1])
    put(cache, [1, 2])
    plan = cache.extend(table, [3])
    assert plan is not None
    assert [copy.src for copy in plan.copies] == [copies[0].src]
    cache.copies_done(plan)
    cache.swaps_done(copies)
    cache.check()
    assert cache.num_free == 6  # all but [1, 2] and the table's


def test_a_failed_copy_changes_nothing() -> None:
    cache = a_cache()
    put(cache, [1, 2, 3, 4])
    cache.swaps_failed(cache.swap_out(2))
    assert cache.match([1, 2, 3, 4]).length == 4
    assert (cache.num_free, cache.stats().num_host_free, cache.num_evictable) == (6, 8, 2)
    cache.check()


def test_a_prefix_computed_anew_comes_home_for_free() -> None:
    cache = a_cache()
    put(cache, [1, 2, 3, 4, 5], tail=True)
    out(cache, 3)
    coming = cache.swap_in([1, 2], max_pages=1)
    assert coming is not None
    put(cache, [1, 2, 3, 4, 5], tail=True)
    assert (cache.peek([1, 2, 3, 4, 5]), cache.stats().num_host_cached) == (5, 0)
    cache.swaps_done(coming)  # too late, and dropped
    cache.check()
    assert (cache.stats().num_host_free, cache.num_free) == (8, 5)


def test_eviction_drops_the_host_pages_behind_a_device_page() -> None:
    cache = a_cache()
    put(cache, [1, 2, 3, 4, 5, 6])
    out(cache, 2)
    assert cache.evict(1, by="another") == 1
    stats = cache.stats()
    assert (stats.num_free, stats.num_host_free, stats.evicted_pages, stats.evicted_host_pages) == (8, 8, 1, 2)
    assert cache.explain([1, 2]).evicted_by == "another"


def test_a_late_copy_does_not_keep_what_is_before_it() -> None:
    """Eviction goes past it where nothing else is left; the page itself is free once the copy has ended, not before."""
    freed: list[int] = []
    cache = RadixCache(
        num_pages=3, page_size=2, num_host_pages=3, on_free=lambda page_ids: freed.extend(page_ids.tolist())
    )
    put(cache, [1, 2, 3, 4, 5, 6])
    copies = cache.swap_out(1)
    assert cache.num_evictable == 2
    table = cache.open([])
    assert cache.extend(table, [9] * 6) is None
    assert cache.extend(table, [9] * 4) is not None
    cache.check()
    assert freed == [1, 2]
    cache.swaps_done(copies)
    assert freed == [1, 2, 3, copies[0].dst]
    cache.check()


def test_the_coldest_host_pages_make_way() -> None:
    cache = a_cache(num_host_pages=1)
    put(cache, [1, 2])
    put(cache, [3, 4])
    out(cache, 1)
    out(cache, 1)
    assert (cache.match([1, 2]).host_len, cache.match([3, 4]).host_len) == (0, 2)
    assert cache.explain([1, 2]).got == 1


def test_swapping_in_never_evicts_its_own_path() -> None:
    cache = a_cache(num_pages=2)
    put(cache, [1, 2, 3, 4])
    out(cache, 1)
    table = cache.open([])
    assert cache.extend(table, [8, 9]) is not None
    assert cache.swap_in([1, 2, 3, 4]) is None
    assert cache.match([1, 2, 3, 4]).host_len == 2
    cache.close(table)
    copies = cache.swap_in([1, 2, 3, 4])
    assert copies is not None
    assert cache.swap_in([1, 2, 3, 4]) == ()  # under way already
    cache.swaps_done(copies)
    assert cache.peek([1, 2, 3, 4]) == 4


def test_explain_says_what_lies_in_host_memory_and_where_that_ends() -> None:
    cache = a_cache()
    put(cache, [1, 2, 3, 4, 5, 6])
    out(cache, 2)
    explained = cache.explain([1, 2, 3, 4, 5, 9])
    assert (explained.matched, explained.host_len, explained.diverged_at, explained.expected) == (2, 3, 5, 6)


def test_misuse_is_refused() -> None:
    cache = a_cache()
    put(cache, [1, 2])
    with pytest.raises(CacheError, match="-1"):
        cache.swap_out(-1)
    copies = cache.swap_out(1)
    with pytest.raises(LiveTables, match="1 copies"):
        cache.reset()
    cache.swaps_done(copies)
    for end in (cache.swaps_done, cache.swaps_failed):
        with pytest.raises(CacheError, match="done before"):
            end(copies)
    with pytest.raises(CacheError, match="num_host_pages=-1"):
        a_cache(num_host_pages=-1)
    cache.reset()
    assert cache.stats().num_host_free == 8


def test_without_host_pages_nothing_moves() -> None:
    cache = RadixCache(num_pages=4, page_size=2)
    put(cache, [1, 2])
    assert cache.swap_out(5) == ()
    assert cache.swap_in([1, 2]) == ()
    assert np.array_equal(cache.pool.free_pages(), [4, 3, 2])


# -- beside policies, priorities and drop -----------------------------------------------------------------------------


def test_what_goes_out_first_is_what_would_be_evicted_first() -> None:
    """Lower priorities, then colder pages; the end of a path goes long before a beginning of higher priority."""
    cache = a_cache()
    put(cache, [1, 2], priority=1)
    put(cache, [1, 2, 3, 4])
    put(cache, [5, 6])
    assert [copy.src for copy in cache.swap_out(3)] == [2, 3, 1]


def test_a_page_keeps_its_priority_and_its_heat_out_and_back() -> None:
    for policy in ("lru", "lru2", "duel"):
        cache = RadixCache(num_pages=4, page_size=2, num_host_pages=4, policy=policy)
        put(cache, [1, 2], priority=3)
        put(cache, [3, 4], priority=3)
        put(cache, [1, 2])
        heat = cache.tree.policy.heat(2)
        (copy,) = out(cache, 1)
        assert (copy.src, cache.tree.priority[copy.dst], cache.tree.policy.heat(copy.dst)) == (2, 3, heat)
        back = cache.swap_in([3, 4])
        assert back is not None
        cache.swaps_done(back)
        cache.check()
        assert cache.tree.priority[back[0].dst] == 3
        assert cache.tree.policy.heat(back[0].dst) > heat, "who asked for it used it"


def test_host_pages_of_low_priority_make_way_first() -> None:
    cache = a_cache(num_host_pages=2)
    put(cache, [1, 2], priority=1)
    put(cache, [3, 4])
    out(cache, 2)
    put(cache, [5, 6], priority=2)
    out(cache, 1)
    assert [cache.match(tokens).host_len for tokens in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]


def test_what_is_asked_for_does_not_make_way_for_itself() -> None:
    """The coldest pages of either memory stay while `keep` names them."""
    cache = a_cache(num_pages=3, num_host_pages=1)
    put(cache, [1, 2, 3, 4])
    out(cache, 1)
    put(cache, [5, 6])
    keep = cache.match([1, 2, 3, 4])
    assert cache.swap_out(2, keep=keep) == ()
    assert cache.match([1, 2, 3, 4]).host_len == 2
    (copy,) = cache.swap_out(1)
    assert copy.src == keep.page_ids[0]
    cache.swaps_failed((copy,))
    cache.check()


def test_drop_takes_the_dead_part_from_both_memories() -> None:
    cache = a_cache()
    put(cache, [1, 2, 3, 4, 5, 6, 7], tail=True)
    out(cache, 2)
    assert cache.drop([1, 2, 3, 4, 5, 6, 7], 2) == 3
    cache.check()
    stats = cache.stats()
    assert (stats.dropped_pages, stats.num_cached, stats.num_host_cached, stats.num_host_free) == (3, 1, 0, 8)
    assert cache.explain([1, 2, 3, 4]).evicted_by == "drop"


def test_drop_goes_past_copies_and_stops_at_readers() -> None:
    cache = a_cache()
    put(cache, [1, 2, 3, 4, 5, 6])
    copies = cache.swap_out(2)
    reader = cache.open([1, 2, 3, 4])
    assert cache.drop([1, 2, 3, 4, 5, 6]) == 1
    cache.check()
    cache.close(reader)
    assert cache.drop([1, 2, 3, 4]) == 2
    assert cache.num_free == 6, "what copies name is free when they end"
    cache.swaps_done(copies)
    cache.check()
    assert (cache.num_free, cache.stats().num_host_free) == (8, 8)


def test_tokens_that_came_back_are_counted_at_their_first_hit() -> None:
    cache = a_cache()
    put(cache, [1, 2, 3, 4, 5], tail=True)
    out(cache, 2)
    back = cache.swap_in([1, 2, 3, 4, 5])
    assert back is not None
    cache.swaps_done(back)
    for _ in range(2):
        cache.close(cache.open([1, 2, 3, 4, 5]))
        assert (cache.stats().host_hit_tokens, cache.stats().num_host_cached) == (3, 0)
