"""The pages and how often each is held.

Knows nothing of who holds them, of tokens, or of the memory behind a page.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .errors import BrokenInvariant, CacheError, DoubleRelease
from .tokens import EMPTY, IntArray

_ONE = np.int32(1)  # a numpy scalar keeps np.add.at on its fast path: 2 us, not 30, for 512 pages


class PagePool:
    """Pages `1..num_pages` with one reference count each; page 0 is the padding sink and never owned.

    `refs[page]` is the count, `generations[page]` how often the page became free: (page, generation) names one life of
    a page. Both are read by the rest of the cache and written here alone.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise CacheError(f"a pool needs at least one page, got num_pages={num_pages}")
        self.num_pages = num_pages
        self.num_free = num_pages
        self.refs: IntArray = np.zeros(num_pages + 1, np.int32)
        self.generations: npt.NDArray[np.int64] = np.zeros(num_pages + 1, np.int64)
        self._free: IntArray = np.arange(num_pages, 0, -1, dtype=np.int32)  # a stack, top at num_free

    def alloc(self, num_pages: int) -> IntArray | None:
        """Take `num_pages` distinct free pages with count 1 each, or return None and change nothing. O(num_pages)."""
        if num_pages > self.num_free:
            return None
        top = self.num_free
        page_ids = self._free[top - num_pages : top][::-1].copy()
        self.num_free -= num_pages
        self.refs[page_ids] = 1
        return page_ids

    def retain(self, page_ids: IntArray) -> None:
        """Count each page once more. Raises `DoubleRelease`, changing nothing, if one of them is free or no page."""
        if not len(page_ids):
            return
        self._require_pages(page_ids)
        if not self.refs.take(page_ids).all():
            free = sorted(set(page_ids[self.refs[page_ids] == 0].tolist()))
            raise DoubleRelease(f"pages {free} are free and cannot be retained: their holder released them too early")
        np.add.at(self.refs, page_ids, _ONE)

    def release(self, page_ids: IntArray) -> IntArray:
        """Count each page once less; return those that became free, ascending.

        A page may be listed several times. Raises `DoubleRelease`, changing nothing, if one is released too often.
        """
        if not len(page_ids):
            return EMPTY
        self._require_pages(page_ids)
        np.subtract.at(self.refs, page_ids, _ONE)
        counts = self.refs.take(page_ids)  # half the time of an index: that converts the ids first
        lowest = counts.min()
        if lowest > 0:
            return EMPTY
        if lowest < 0:
            np.add.at(self.refs, page_ids, _ONE)
            wrong = sorted(set(page_ids[counts < 0].tolist()))
            raise DoubleRelease(f"pages {wrong} released more often than retained")
        freed = np.sort(page_ids[counts == 0])
        if (freed[1:] == freed[:-1]).any():
            freed = np.unique(freed)
        self.generations[freed] += 1
        self._free[self.num_free : self.num_free + len(freed)] = freed[::-1]
        self.num_free += len(freed)
        return freed

    def free_pages(self) -> IntArray:
        """Return the free pages, in no order of meaning."""
        return self._free[: self.num_free].copy()

    def check(self) -> None:
        """Raise `BrokenInvariant` unless the free list is exactly the pages with count 0. O(num_pages)."""
        free, unheld = self._free[: self.num_free], np.flatnonzero(self.refs[1:] == 0) + 1
        if not np.array_equal(np.sort(free), unheld):
            wrong = sorted(set(free.tolist()) ^ set(unheld.tolist())) or "listed twice"
            raise BrokenInvariant(f"the free list differs from the pages with count 0: {wrong}")
        if self.refs[0] != 0 or (self.refs < 0).any():
            raise BrokenInvariant(f"impossible counts of pages {np.flatnonzero(self.refs < 0)}, sink {self.refs[0]}")

    def _require_pages(self, page_ids: IntArray) -> None:
        if page_ids.min() < 1 or page_ids.max() > self.num_pages:
            wrong = sorted({page for page in page_ids.tolist() if not 1 <= page <= self.num_pages})
            raise DoubleRelease(f"pages {wrong} do not exist: the pool has pages 1..{self.num_pages}")
