"""`explain`: what matched, from whom it diverged, and what evicted the rest."""

from __future__ import annotations

import pytest

from radixrt.radix import Explanation, RadixCache

from .sequences import put


def test_nothing_cached_explains_nothing() -> None:
    cache = RadixCache(num_pages=4, page_size=2)
    assert cache.explain([]) == Explanation(matched=0)
    assert cache.explain([5, 6]) == Explanation(matched=0, got=5)


def test_a_whole_match_has_no_divergence() -> None:
    cache = RadixCache(num_pages=4, page_size=2)
    put(cache, [1, 2, 3, 4], label="first")
    for seq_len in range(5):
        assert cache.explain([1, 2, 3, 4][:seq_len]) == Explanation(matched=seq_len)


@pytest.mark.parametrize("at", range(6))
def test_divergence_names_place_tokens_and_publisher(at: int) -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    put(cache, [1, 2, 3, 4, 5, 6], label="first")
    wanted = [1, 2, 3, 4, 5, 6]
    wanted[at] = 9
    assert cache.explain(wanted) == Explanation(
        matched=at, diverged_at=at, diverged_from="first", expected=at + 1, got=9
    )


def test_each_part_of_an_edge_keeps_its_publisher() -> None:
    cache = RadixCache(num_pages=16, page_size=2)
    put(cache, [1, 2], label="first")
    put(cache, [1, 2, 3, 4], label="second")  # the same edge, grown
    put(cache, [1, 2, 3, 4, 5, 6], label="third")
    put(cache, [1, 2, 9, 9], label="fourth")  # splits it
    assert cache.explain([7]).diverged_from == "first"
    assert cache.explain([1, 2, 3, 7]).diverged_from == "second"
    assert cache.explain([1, 2, 3, 4, 5, 7]).diverged_from == "third"
    assert cache.explain([1, 2, 9, 7]).diverged_from == "fourth"


def test_the_end_of_what_is_cached_is_no_divergence() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    put(cache, [1, 2, 3, 4, 5, 6], label="first", tail=True)
    assert cache.explain([1, 2, 3, 4, 5, 6, 7]) == Explanation(matched=6, got=7)


def test_divergence_from_a_live_sequence() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    table = cache.open([], label="decoding")
    cache.extend(table, [1, 2, 3])
    cache.publish(table)
    assert cache.explain([1, 2, 9]) == Explanation(
        matched=2, diverged_at=2, diverged_from="decoding", expected=3, got=9
    )


def test_the_ledger_names_who_evicted_the_rest() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    put(cache, [1, 2, 3, 4, 5, 6], label="first")
    assert cache.evict(1, by="hungry") == 1
    explained = cache.explain([1, 2, 3, 4, 5, 6])
    assert (explained.matched, explained.got, explained.evicted_by) == (4, 5, "hungry")
    assert cache.evict(2, by="hungrier") == 2
    later = cache.explain([1, 2, 3, 4, 5, 6])
    assert (later.matched, later.evicted_by) == (0, "hungrier")
    assert explained.evicted_at is not None
    assert later.evicted_at is not None
    assert later.evicted_at > explained.evicted_at
    assert cache.explain([9, 9]).evicted_by is None


def test_extend_signs_its_evictions_with_by_or_the_label() -> None:
    for by, signed in (("step 7", "step 7"), ("", "second")):
        cache = RadixCache(num_pages=2, page_size=2)
        put(cache, [1, 2, 3, 4], label="first")
        table = cache.open([5, 6], label="second")
        assert cache.extend(table, [5, 6], by=by) is not None
        assert cache.explain([1, 2, 3]).evicted_by == signed


def test_a_page_in_a_new_life_does_not_inherit_the_ledger() -> None:
    cache = RadixCache(num_pages=2, page_size=1)
    put(cache, [1, 2])
    cache.evict(1, by="first")  # 2 followed the page of 1
    cache.evict(1)
    put(cache, [3])  # in the page where 1 was
    assert cache.explain([3, 2]) == Explanation(matched=1, got=2)


def test_an_eviction_is_found_by_a_part_of_its_page() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    put(cache, [1, 2, 3, 4, 5, 6, 7], tail=True)
    cache.evict(1, by="other")
    assert cache.explain([1, 2, 3, 4, 5, 6]).evicted_by == "other"
    assert cache.explain([1, 2, 3, 4, 5, 6, 7, 8]).evicted_by == "other"
    assert cache.explain([1, 2, 3, 4, 6]).evicted_by is None


def test_the_ledger_is_bounded() -> None:
    cache = RadixCache(num_pages=2, page_size=1)
    for token in range(5000):
        put(cache, [token])
        cache.evict(1, by=str(token))
    assert cache.explain([0]).evicted_by is None
    assert cache.explain([4999]).evicted_by == "4999"
