"""Host memory as a second tier: which cached pages are on the way between it and the device, and which came back.

Knows nothing of how a page is copied, nor of who asks for it.
"""

from __future__ import annotations

import numpy as np

from .copies import Copies
from .lookup import Lookup
from .room import Room
from .tokens import IntArray
from .values import Match, PageCopy


class HostPages:
    """Moves of cached pages between the two memories of one cache: begun here, run by others, ended in any order.

    `swaps` holds the copies in flight, each of a whole page that the tree owns to one allocated for it.
    """

    def __init__(self, *, room: Room, lookup: Lookup, swaps: Copies, page_size: int) -> None:
        self.swapped_out = self.swapped_in = 0
        self._room = room
        self._pool, self._tree = room.pool, room.tree
        self._lookup = lookup
        self._swaps = swaps
        self._page_size = page_size
        self._came_back = np.zeros(room.pool.num_pages + 1, np.bool_)  # from the host, and no request has hit it since

    def swap_out(self, num_pages: int, by: str, keep: Match | None) -> tuple[PageCopy, ...]:
        """Begin to move up to `num_pages` of the coldest device pages; where host pages are short the coldest go."""
        with self._room.holding(keep):
            page_ids = self._tree.order.cold_pages(num_pages if self._pool.num_host_pages else 0)
            missing = len(page_ids) - self._pool.num_free_host
            if missing > 0:
                self._room.evict_host(missing, by)
        page_ids = page_ids[: self._pool.num_free_host]
        host_ids = self._pool.alloc_host(len(page_ids))
        assert host_ids is not None, "no more was asked for than is free"
        return self._begin(page_ids, host_ids)

    def swap_in(self, wanted: IntArray, namespace: str, max_pages: int | None, by: str) -> tuple[PageCopy, ...] | None:
        """Begin to bring the first `max_pages` host pages of a path back; None if there is no room for them."""
        match = self._lookup.match(wanted, namespace)
        used = host_ids = match.host_ids[:max_pages]
        host_ids = host_ids[[not self._swaps.naming(page) for page in host_ids.tolist()]] if self._swaps else host_ids
        if not len(host_ids):
            return ()
        with self._room.holding(match):
            page_ids = self._room.alloc(len(host_ids), by)
            if page_ids is not None:
                self._tree.use(np.concatenate([match.page_ids, used]), now=self._room.tick())
        return None if page_ids is None else self._begin(host_ids, page_ids)

    def done(self, copies: tuple[PageCopy, ...]) -> None:
        """Let each destination take the place of its source, where nothing has come between."""
        self._swaps.finish(copies)
        for copy in copies:
            src, dst = copy.src, copy.dst
            moved = int(self._pool.refs[src]) == 2 and self._tree.move(src, dst)  # held by the tree and the copy alone
            self.swapped_out += moved and dst > self._pool.num_pages
            self.swapped_in += moved and src > self._pool.num_pages
            if moved and src > self._pool.num_pages:
                self._came_back[dst] = True
            self._end(copy, np.array([src, src if moved else dst], np.int32))

    def failed(self, copies: tuple[PageCopy, ...]) -> None:
        """Free the destinations."""
        self._swaps.finish(copies)
        for copy in copies:
            self._end(copy, np.array([copy.src, copy.dst], np.int32))

    def bring_home(self, own: IntArray, host: IntArray) -> None:
        """Let `own`, pages of a table that hold what these host pages do, take their place in the tree."""
        self._pool.retain(own)
        for page, home in zip(host.tolist(), own.tolist(), strict=True):
            moved = self._tree.move(page, home)
            assert moved, "the pages before are on the device"
        self._room.release(host)

    def take_hits(self, page_ids: IntArray, length: int) -> int:
        """How many of a request's `length` tokens host memory made possible, once for each return of a page."""
        index = np.flatnonzero(self._came_back[page_ids])
        if not len(index):
            return 0
        self._came_back[page_ids] = False
        return int(np.minimum(length - index * self._page_size, self._page_size).sum())

    def freed(self, page_ids: IntArray) -> None:
        """These pages became free."""
        if self._pool.num_host_pages:
            self._came_back[page_ids[page_ids <= self._pool.num_pages]] = False

    def _begin(self, src: IntArray, dst: IntArray) -> tuple[PageCopy, ...]:
        """Note copies of whole pages from `src`, in the tree, to `dst`, just allocated for them."""
        pairs = zip(src.tolist(), dst.tolist(), strict=True)
        copies = tuple(self._swaps.begin(page, to, self._page_size) for page, to in pairs)
        self._pool.retain(src)
        self._room.settle(src)
        return copies

    def _end(self, copy: PageCopy, page_ids: IntArray) -> None:
        """Let go of `page_ids`, which a finished copy held."""
        self._room.release(page_ids)
        self._room.settle(np.array([copy.src, copy.dst], np.int32))
