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
    """Device pages `1..num_pages`, then host pages up to `num_pages + num_host_pages`, with one reference count each.

    Page 0 is the padding sink and never owned. `refs[page]` is the count, `generations[page]` how often the page became
    free: (page, generation) names one life of a page. Both are read by the rest of the cache and written here alone.
    """

    def __init__(self, num_pages: int, num_host_pages: int = 0) -> None:
        if num_pages < 1:
            raise CacheError(f"a pool needs at least one page, got num_pages={num_pages}")
        if num_host_pages < 0:
            raise CacheError(f"a pool has no or some host pages, got num_host_pages={num_host_pages}")
        self.num_pages = num_pages
        self.num_host_pages = num_host_pages
        self.refs: IntArray = np.zeros(num_pages + num_host_pages + 1, np.int32)
        self.generations: npt.NDArray[np.int64] = np.zeros(len(self.refs), np.int64)
        self._device = _FreeList(1, num_pages)
        self._host = _FreeList(num_pages + 1, num_host_pages)

    @property
    def num_free(self) -> int:
        """Free device pages."""
        return self._device.size

    @property
    def num_free_host(self) -> int:
        return self._host.size

    def alloc(self, num_pages: int) -> IntArray | None:
        """Take `num_pages` distinct free device pages with count 1 each, or return None and change nothing.

        O(num_pages).
        """
        return self._take(self._device, num_pages)

    def alloc_host(self, num_pages: int) -> IntArray | None:
        """Take host pages as `alloc` takes device pages."""
        return self._take(self._host, num_pages)

    def _take(self, free: _FreeList, num_pages: int) -> IntArray | None:
        if not num_pages:
            return EMPTY  # what a token asks for that fits in its sequence's last page
        page_ids = free.pop(num_pages)
        if page_ids is not None:
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
        if freed[-1] <= self.num_pages:
            self._device.push(freed)
        else:
            num_device = int(np.searchsorted(freed, self.num_pages, side="right"))
            self._device.push(freed[:num_device])
            self._host.push(freed[num_device:])
        return freed

    def free_pages(self) -> IntArray:
        """Return the free pages, in no order of meaning: those of the device, then those of the host."""
        return np.concatenate([self._device.view, self._host.view])

    def check(self) -> None:
        """Raise `BrokenInvariant` unless the free lists are exactly the pages with count 0. O(all pages)."""
        for free, first, num_pages in ((self._device, 1, self.num_pages), (self._host, self.num_pages + 1, None)):
            unheld = np.flatnonzero(self.refs[first:][:num_pages] == 0) + first
            if not np.array_equal(np.sort(free.view), unheld):
                wrong = sorted(set(free.view.tolist()) ^ set(unheld.tolist())) or "listed twice"
                raise BrokenInvariant(f"a free list differs from the pages with count 0: {wrong}")
        if self.refs[0] != 0 or (self.refs < 0).any():
            raise BrokenInvariant(f"impossible counts of pages {np.flatnonzero(self.refs < 0)}, sink {self.refs[0]}")

    def _require_pages(self, page_ids: IntArray) -> None:
        last = len(self.refs) - 1
        if page_ids.min() < 1 or page_ids.max() > last:
            wrong = sorted({page for page in page_ids.tolist() if not 1 <= page <= last})
            raise DoubleRelease(f"pages {wrong} do not exist: the pool has pages 1..{last}")


class _FreeList:
    """Free pages of one memory, `first .. first + num_pages - 1` at the start: a stack, top at `size`."""

    def __init__(self, first: int, num_pages: int) -> None:
        self.size = num_pages
        self._pages: IntArray = np.arange(first + num_pages - 1, first - 1, -1, dtype=np.int32)

    @property
    def view(self) -> IntArray:
        """The free pages, not copied: valid until the next change."""
        return self._pages[: self.size]

    def pop(self, num_pages: int) -> IntArray | None:
        """Take `num_pages` pages; None, and nothing taken, where there are fewer."""
        if num_pages > self.size:
            return None
        self.size -= num_pages
        return self._pages[self.size : self.size + num_pages][::-1].copy()

    def push(self, page_ids: IntArray) -> None:
        """Give pages back, ascending: the lowest is taken first."""
        self._pages[self.size : self.size + len(page_ids)] = page_ids[::-1]
        self.size += len(page_ids)
