"""PagePool: counts, all-or-nothing operations, and the free list."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.radix import BrokenInvariant, CacheError, DoubleRelease, IntArray, PagePool


def pages(*page_ids: int) -> IntArray:
    return np.array(page_ids, np.int32)


def test_alloc_gives_distinct_pages_with_count_one() -> None:
    pool = PagePool(4)
    taken = pool.alloc(3)
    assert taken is not None
    assert taken.tolist() == [1, 2, 3]
    assert pool.refs.tolist() == [0, 1, 1, 1, 0]
    assert pool.num_free == 1
    pool.check()


@pytest.mark.parametrize("num_pages", [3, 5, 10**9])
def test_alloc_of_too_many_changes_nothing(num_pages: int) -> None:
    pool = PagePool(4)
    pool.alloc(2)
    refs, free = pool.refs.copy(), pool.free_pages()
    assert pool.alloc(num_pages) is None
    assert np.array_equal(pool.refs, refs)
    assert np.array_equal(pool.free_pages(), free)


def test_alloc_of_none_is_empty() -> None:
    pool = PagePool(1)
    taken = pool.alloc(0)
    assert taken is not None
    assert len(taken) == 0
    assert pool.num_free == 1


def test_release_names_the_pages_that_became_free() -> None:
    pool = PagePool(4)
    pool.alloc(3)
    pool.retain(pages(2, 2))
    assert pool.release(pages(3, 2, 1)).tolist() == [1, 3]
    assert pool.release(pages(2, 2)).tolist() == [2]
    assert pool.num_free == 4
    pool.check()


@pytest.mark.parametrize("wrong", [(1, 1), (1, 2, 2, 2), (1, 4), (1, 0), (1, -1), (1, 5)])
def test_one_release_too_many_raises_and_changes_nothing(wrong: tuple[int, ...]) -> None:
    pool = PagePool(4)
    pool.alloc(2)
    pool.retain(pages(2))
    before = pool.refs.tolist()
    with pytest.raises(DoubleRelease):
        pool.release(pages(*wrong))
    assert pool.refs.tolist() == before
    assert pool.num_free == 2
    pool.check()


@pytest.mark.parametrize("wrong", [(1, 3), (0,), (5,), (-1,)])
def test_retain_of_a_free_page_raises_and_changes_nothing(wrong: tuple[int, ...]) -> None:
    pool = PagePool(4)
    pool.alloc(2)
    with pytest.raises(DoubleRelease):
        pool.retain(pages(*wrong))
    assert pool.refs.tolist() == [0, 1, 1, 0, 0]


def test_each_life_of_a_page_has_its_own_generation() -> None:
    pool = PagePool(1)
    lives = set()
    for _ in range(3):
        pool.alloc(1)
        lives.add(int(pool.generations[1]))
        pool.release(pages(1))
    assert len(lives) == 3


def test_a_pool_needs_a_page() -> None:
    with pytest.raises(CacheError, match="num_pages=0"):
        PagePool(0)


def test_check_sees_a_count_written_from_outside() -> None:
    pool = PagePool(2)
    pool.refs[1] = 1
    with pytest.raises(BrokenInvariant, match="1"):
        pool.check()
