"""Who gives pages up when room runs short: allocation, eviction, drops, and who hears of what became free.

Knows nothing of who asks, nor of what a copy between the memories is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from .ages import Ages
from .copies import Copies
from .explain import Eviction, EvictionLedger
from .node import Node
from .pool import PagePool
from .table import PageTable
from .tokens import IntArray, count_after_last
from .tree import Cut, RadixTree
from .values import Match


class Room:
    """The pages of one cache, free or to be freed, in both memories.

    `now` is the cache's count of time: every use, eviction and drop is a `tick`. Whoever holds pages is looked up in
    `tables`, `copies` (on the device) and `swaps` (between the memories), which the cache changes.
    """

    def __init__(
        self,
        *,
        pool: PagePool,
        tree: RadixTree,
        tables: set[PageTable],
        copies: Copies,
        swaps: Copies,
        ledger: EvictionLedger,
        on_free: Callable[[IntArray], None],
    ) -> None:
        self.pool = pool
        self.tree = tree
        self.now = 0
        self.ages = Ages()
        self.evicted_pages = self.evicted_host_pages = self.dropped_pages = 0
        self._tables = tables
        self._copies = copies
        self._swaps = swaps
        self._ledger = ledger
        self._on_free = on_free

    def tick(self) -> int:
        """Let time go on by one; the time that it is then."""
        self.now += 1
        return self.now

    @property
    def num_evictable(self) -> int:
        """Device pages that `evict` could free now: count 1, and nobody holds a device page that continues them.

        A copy to the host is no obstacle: `evict` takes the page it names off the tree where nothing else is left. Who
        holds a page holds all before it, save for the few pages that `_stray_pages` lists. O(num_pages), vectorised.
        """
        stop = self.pool.num_pages + 1
        evictable = (self.pool.refs[:stop] == 1) & (self.tree.owner[:stop] > 0)
        for page in self._stray_pages():
            for before in self.tree.path_to(page):
                evictable[before] = False
        return int(np.count_nonzero(evictable))

    def alloc(self, num_pages: int, by: str) -> IntArray | None:
        """Allocate, evicting exactly what is missing; None, and nothing evicted, if that cannot be enough."""
        missing = num_pages - self.pool.num_free
        if missing > 0:
            # Each leaf in the order gives a page at least, which spares the full count in the common case.
            if missing > len(self.tree.order.device) and missing > self.num_evictable:
                return None
            self.evict(missing, by)
        return self.pool.alloc(num_pages)

    def evict(self, num_pages: int, by: str) -> int:
        """Free up to `num_pages` device pages, and the host pages that continue them; return how many it found."""
        num_found = self._shrink(self.tree.order.coldest, self.tree.trim, num_pages, by)
        if num_found < num_pages and self._swaps:
            num_pages = min(num_pages, num_found + self.num_evictable)
            while num_found < num_pages:
                self._give_up_swaps(by)
                num_found += self._shrink(self.tree.order.coldest, self.tree.trim, num_pages - num_found, by)
        return num_found

    def evict_host(self, num_pages: int, by: str) -> None:
        """Free up to `num_pages` host pages, the coldest first."""
        self._shrink(self.tree.order.coldest_host, self.tree.trim_host, num_pages, by)

    def drop(self, doomed: IntArray, by: str) -> int:
        """Free what can be of these pages, the end of a path, which are dead; return how many."""
        self.tick()
        leaf = self.tree.leaf_of(int(doomed[-1])) if len(doomed) else None
        # Where the leaf's edge begins another sequence goes on, or the root is.
        num_pages = self._num_loose(doomed[-leaf.pages.size :]) if leaf is not None else 0
        if leaf is None or not num_pages:
            return 0
        cut = self.tree.cut_end(leaf, num_pages)
        self._note(cut, by)
        self.release(cut.edges[0])
        self.dropped_pages += num_pages
        return num_pages

    def release(self, page_ids: IntArray) -> None:
        """Count these pages once less, and say which became free."""
        freed = self.pool.release(page_ids)
        if len(freed):
            self._on_free(freed)

    def settle(self, page_ids: IntArray) -> None:
        """Re-examine the leaves that end in one of these pages, whose counts moved."""
        for page in page_ids.tolist():
            self.tree.settle(page)

    @contextmanager
    def holding(self, match: Match | None) -> Iterator[None]:
        """Keep the full pages that were matched, in both memories, while this lasts."""
        if match is None:
            yield
            return
        ends = np.concatenate([match.page_ids[-1:], match.host_ids[-1:]])
        for page_ids in (match.page_ids, match.host_ids):
            self.pool.retain(page_ids)
        self.settle(ends)
        yield
        for page_ids in (match.page_ids, match.host_ids):
            self.release(page_ids)
        self.settle(ends)

    def _shrink(
        self, coldest: Callable[[], Node | None], trim: Callable[[Node, int], Cut], num_pages: int, by: str
    ) -> int:
        """Free up to `num_pages` pages of the memory that `coldest` and `trim` are about; return how many it found."""
        cuts: list[Cut] = []
        remaining = num_pages
        while remaining and (node := coldest()) is not None:
            cuts.append(trim(node, remaining))
            remaining -= cuts[-1].count
        self._forget(cuts, by)
        return num_pages - remaining

    def _give_up_swaps(self, by: str) -> None:
        """Take pages on their way to the host off the tree, until one before them can be evicted, as there is one.

        They are free once their copies end.
        """
        while not self.tree.order.device:
            for copy in self._swaps:
                held = int(self.pool.refs[copy.src]) > 2 or copy.src > self.pool.num_pages
                if not held and (cut := self.tree.cut_off(copy.src)) is not None:
                    self._forget([cut], by)
                    break
            else:
                raise AssertionError("a page was counted as evictable that nothing gives up")

    def _forget(self, cuts: list[Cut], by: str) -> None:
        """Note what was evicted, and let go of it."""
        self.tick()
        for cut in cuts:
            self._note(cut, by)
        for edge in (edges := [edge for cut in cuts for edge in cut.edges]):
            last_use = np.maximum.accumulate(self.tree.policy.last_use(edge)[::-1])  # as if one by one, from the end
            self.ages.add((self.now - last_use).tolist())
            self.tree.policy.evicted(edge)
        if edges:
            page_ids = np.concatenate(edges)
            num_device = len(page_ids)
            if self.pool.num_host_pages:
                num_device = int(np.count_nonzero(page_ids <= self.pool.num_pages))
            self.evicted_pages += num_device
            self.evicted_host_pages += len(page_ids) - num_device
            self.release(page_ids)

    def _num_loose(self, page_ids: IntArray) -> int:
        """How many pages at the end nobody holds but the tree and copies between device and host."""
        counts = self.pool.refs[page_ids]
        if self._swaps:
            counts -= np.array([self._swaps.naming(page) for page in page_ids.tolist()], np.int32)
        return count_after_last(counts != 1)

    def _note(self, cut: Cut, by: str) -> None:
        """Write down who took pages off the tree; they keep their count for the caller to release."""
        self._ledger.record(cut.after, cut.namespace, cut.key, Eviction(by, self.now))

    def _stray_pages(self) -> Iterator[int]:
        """Yield tree pages whose holder may not hold the path to them, few and short-lived.

        They are unpublished pages of a table that another published (a fork or a leader, on a path where the tree had
        earlier pages already), and pages of copies in flight whose table moved on.
        """
        for table in self._tables:
            beyond = table.num_tree_pages + 1  # the page before it borrows or follows tree pages the table holds
            if table.page_buffer.size > beyond:
                yield from (page for page in table.page_buffer.view[beyond:].tolist() if self.tree.owner[page])
        for copy in self._copies:
            yield from (page for page in (copy.src, copy.dst) if self.tree.owner[page])
