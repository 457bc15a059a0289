"""The shape of the tree behind a cache: splits, merges, partly filled leaves, sorted children."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.radix import CacheStats, RadixCache
from radixrt.radix.buffer import IntBuffer
from radixrt.radix.tokens import agreement, key_agreement, page_key

from .sequences import put


def edges(cache: RadixCache) -> list[list[int]]:
    """The tokens of every edge, sorted."""
    return sorted(node.tokens.view.tolist() for node in cache.tree.nodes.values())


def test_a_sequence_is_one_edge_of_full_pages() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    put(cache, [1, 2, 3, 4, 5])
    assert edges(cache) == [[1, 2, 3, 4]]


def test_divergence_at_a_page_splits_there() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    put(cache, [1, 2, 3, 4])
    put(cache, [1, 2, 5, 6])
    assert edges(cache) == [[1, 2], [3, 4], [5, 6]]


def test_divergence_inside_a_page_makes_siblings_that_share_tokens() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    put(cache, [1, 2, 3, 4])
    put(cache, [1, 2, 3, 5])
    assert edges(cache) == [[1, 2], [3, 4], [3, 5]]
    assert cache.match([1, 2, 3, 9]).tail_len == 1


def test_looking_never_splits() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    put(cache, [1, 2, 3, 4, 5, 6])
    cache.match([1, 2, 3, 9])
    cache.peek([1, 2, 9])
    cache.explain([1, 2, 3, 9])
    cache.close(cache.open([1, 2, 3, 4, 9]))
    assert edges(cache) == [[1, 2, 3, 4, 5, 6]]


def test_a_leaf_grows_in_place() -> None:
    cache = RadixCache(num_pages=8, page_size=1)
    table = cache.open([])
    for token in range(8):
        assert cache.extend(table, [token]) is not None
        cache.publish(table)
        assert edges(cache) == [list(range(token + 1))]


def test_an_only_child_merges_when_its_sibling_goes() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    put(cache, [1, 2, 3, 4])
    put(cache, [1, 2, 5, 6])
    assert cache.evict(1) == 1
    cache.check()
    assert edges(cache) == [[1, 2, 5, 6]]


def test_a_table_may_end_inside_an_edge_and_publish_from_there() -> None:
    cache = RadixCache(num_pages=16, page_size=2)
    put(cache, [1, 2, 3, 4, 5, 6])
    table = cache.open([1, 2, 3, 4, 7, 8])
    assert cache.extend(table, [7, 8]) is not None
    cache.publish(table)
    assert edges(cache) == [[1, 2, 3, 4], [5, 6], [7, 8]]
    cache.check()


@pytest.mark.parametrize("longer", [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7]])
def test_a_partial_leaf_is_superseded_by_what_continues_it(longer: list[int]) -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    put(cache, [1, 2, 3], tail=True)
    assert edges(cache) == [[1, 2, 3]]
    put(cache, longer, tail=True)
    assert edges(cache) == [longer]
    assert cache.stats().num_cached == -(-len(longer) // 4)


def test_a_partial_tail_that_something_continues_adds_nothing() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    put(cache, [1, 2, 3, 4, 5, 6, 7], tail=True)
    for seq_len in range(1, 8):
        put(cache, [1, 2, 3, 4, 5, 6, 7][:seq_len], tail=True)
    assert edges(cache) == [[1, 2, 3, 4, 5, 6, 7]]


def test_a_tail_that_something_diverges_from_becomes_its_own_child() -> None:
    cache = RadixCache(num_pages=8, page_size=4)
    put(cache, [1, 2, 3, 4, 5, 6, 7], tail=True)
    put(cache, [1, 2, 3, 4, 5, 9], tail=True)
    assert edges(cache) == [[1, 2, 3, 4], [5, 6, 7], [5, 9]]


def test_the_best_partial_agreement_is_found_among_many() -> None:
    cache = RadixCache(num_pages=300, page_size=4)
    for a in range(4):
        for b in range(4):
            put(cache, [7, a, b, 9])
    for a in range(4):
        match = cache.match([7, a, 2, 5])
        assert (match.prefix_len, match.tail_len) == (0, 3)
    assert cache.match([7, 3, 8]).tail_len == 2
    assert cache.match([8]).tail_len == 0


def test_namespaces_are_disjoint_and_vanish_when_empty() -> None:
    cache = RadixCache(num_pages=8, page_size=2)
    put(cache, [1, 2, 3, 4], namespace="a")
    put(cache, [1, 2, 3, 4], namespace="b")
    assert [cache.peek([1, 2, 3, 4], name) for name in ("", "a", "b")] == [0, 4, 4]
    assert cache.stats().num_namespaces == 2
    cache.evict(2)
    cache.check()
    assert [cache.peek([1, 2, 3, 4], name) for name in ("", "a", "b")] == [0, 0, 4]
    assert cache.stats().num_namespaces == 1


def test_nodes_stay_within_twice_the_leaves() -> None:
    cache = RadixCache(num_pages=64, page_size=1)
    generator = np.random.default_rng(0)
    for _ in range(200):
        put(cache, generator.integers(0, 2, generator.integers(1, 9)).tolist())
        stats: CacheStats = cache.stats()
        assert stats.num_nodes <= 2 * stats.num_leaves + stats.num_namespaces


def test_huge_token_ids_sort_and_match() -> None:
    top = 2**31 - 1
    cache = RadixCache(num_pages=8, page_size=2)
    for tokens in ([top, 0], [0, top], [top, top], [255, 256], [256, 255]):
        put(cache, tokens)
        assert cache.peek(tokens) == 2
    assert cache.match([top, 5]).tail_len == 1


def test_agreement_over_every_length_and_difference() -> None:
    for size in (0, 1, 3, 2047, 2048, 2049, 16384, 40000):
        a = np.arange(size, dtype=np.int32)
        assert agreement(a, a.copy()) == size
        for at in {0, size // 2, size - 1} - {-1}:
            b = a.copy()
            if at < size:
                b[at] += 1
                assert agreement(a, b) == at


def test_keys_sort_and_agree_as_tokens_do() -> None:
    rows = [[0], [0, 1], [1], [1, 255], [1, 256], [256], [2**31 - 1]]
    keys = [page_key(np.array(row, np.int32), 0, 4) for row in rows]
    assert keys == sorted(keys)
    assert key_agreement(keys[3], keys[4]) == 1
    assert key_agreement(keys[0], keys[1]) == 1
    assert key_agreement(keys[0], keys[6]) == 0
    assert key_agreement(b"", keys[0]) == 0


def test_a_buffer_lets_go_of_what_is_cut_off() -> None:
    buffer = IntBuffer(np.arange(1000, dtype=np.int32))
    buffer.truncate(10)
    assert buffer.view.base is not None
    assert len(buffer.view.base) <= 40
    buffer.extend(np.arange(5, dtype=np.int32))
    assert buffer.view.tolist() == [*range(10), *range(5)]


@pytest.mark.parametrize("at", [1, 40, 60, 99])
def test_the_halves_of_a_split_buffer_grow_apart(at: int) -> None:
    buffer = IntBuffer(np.arange(100, dtype=np.int32))
    buffer.extend(np.array([100], np.int32))  # leaves room behind
    head = buffer.split(at)
    head.extend(np.array([-1], np.int32))
    buffer.extend(np.array([-2], np.int32))
    assert head.view.tolist() == [*range(at), -1]
    assert buffer.view.tolist() == [*range(at, 101), -2]
