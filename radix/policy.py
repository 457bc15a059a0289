"""What makes a cached page cold: policies that watch pages being used, added and evicted, and say which go first.

Knows nothing of the tree: a page is a number, a path an array of them, and time is the caller's count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .prefixes import IdArray, PrefixIds
from .shadow import GHOSTS_PER_PAGE, Ghosts, Shadow, remember
from .tokens import IntArray, count_after_last

Heat = Any  # opaque to the tree; values of one policy, between two of its changes of mind, order among themselves
_TimeArray = npt.NDArray[np.int64]


class EvictionPolicy(Protocol):
    """Watches every page and gives the heat of each; of the leaves, the one whose last page is coldest goes first.

    State lies with pages, not with edges, so that splits and merges need not carry it. Page ids are those of one path,
    in its order. Decides by counts alone: no clock, no chance.
    """

    @property
    def name(self) -> str:
        """What ranks the pages now, for people."""

    def ask(self, tokens: IntArray, namespace: str) -> bool:
        """A request asks for `tokens`; return whether that changed the heat of pages, so that all are to be ranked."""

    def use(self, page_ids: IntArray, now: int) -> None:
        """These cached pages serve one more request."""

    def add(
        self, page_ids: IntArray, gone: IntArray, tokens: IntArray, now: int, *, after: int, index: int, namespace: str
    ) -> None:
        """Pages with `tokens` join the cache, behind page `after` (0: at the root of `namespace`), `index` from it.

        The first takes the place of the pages `gone`, of which it may be one itself, and is as warm as they were.
        """

    def inherit(self, page: int, gone: IntArray) -> None:
        """Pages that continued `page`, or began as it does, are gone: it is as warm as they were, and as itself."""

    def move(self, src: int, dst: int) -> None:
        """Page `dst` takes the place of `src`, in another memory, and is as warm."""

    def evicted(self, page_ids: IntArray) -> None:
        """These pages were evicted."""

    def last_use(self, page_ids: IntArray) -> _TimeArray:
        """Return when each page, or one that was evicted from behind it, was used last."""

    def heat(self, page: int) -> Heat:
        """Return how warm a cached page is; colder sorts first."""

    def count_as_cold(self, page_ids: IntArray) -> int:
        """Return how many pages at the end of a path (at least one) can go before what is left gets warmer."""

    def clear(self) -> None:
        """Forget everything."""


class LRU:
    """The heat is the time of the last use."""

    name = "lru"

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self._last: _TimeArray = np.zeros(num_pages + 1, np.int64)

    def ask(self, tokens: IntArray, namespace: str) -> bool:
        return False

    def use(self, page_ids: IntArray, now: int) -> None:
        self._last[page_ids] = now

    def add(
        self, page_ids: IntArray, gone: IntArray, tokens: IntArray, now: int, *, after: int, index: int, namespace: str
    ) -> None:
        self._last[page_ids] = now

    def inherit(self, page: int, gone: IntArray) -> None:
        self._last[page] = max(self._last[page], self._last[gone].max())

    def move(self, src: int, dst: int) -> None:
        self._last[dst] = self._last[src]

    def evicted(self, page_ids: IntArray) -> None:
        pass

    def last_use(self, page_ids: IntArray) -> _TimeArray:
        return self._last[page_ids]

    def heat(self, page: int) -> int:
        return int(self._last[page])

    def count_as_cold(self, page_ids: IntArray) -> int:
        last = self._last[page_ids]
        return count_after_last(last > last[-1])

    def clear(self) -> None:
        self._last[:] = 0


class LRU2:
    """The heat is the time of the use before the last one; among pages used once, which are colder, of that one.

    O'Neil, O'Neil, Weikum: The LRU-K page replacement algorithm, SIGMOD 1993. Ghosts remember the last use of evicted
    prefixes, four for each page of the pool, so that what comes back has been used before. About 0.9 KB a page.
    """

    name = "lru2"

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self._max_ghosts = GHOSTS_PER_PAGE * num_pages
        self._prefixes = PrefixIds(page_size)
        self._ids: IdArray = np.zeros(num_pages + 1, np.uint64)
        self._ghosts = Ghosts()
        self._before: _TimeArray = np.zeros(num_pages + 1, np.int64)
        self.last: _TimeArray = np.zeros(num_pages + 1, np.int64)

    def ask(self, tokens: IntArray, namespace: str) -> bool:
        return False

    def use(self, page_ids: IntArray, now: int) -> None:
        self._before[page_ids] = self.last[page_ids]
        self.last[page_ids] = now

    def add(
        self, page_ids: IntArray, gone: IntArray, tokens: IntArray, now: int, *, after: int, index: int, namespace: str
    ) -> None:
        prefix_id = int(self._ids[after]) if after else self._prefixes.root(namespace)
        ids = self._prefixes.after(prefix_id, index, tokens)
        before_gone = self._before[gone].max(initial=0)
        self._ids[page_ids] = ids
        self._before[page_ids] = [self._ghosts.pop(number, 0) for number in ids.tolist()] if self._ghosts else 0
        self._before[page_ids[0]] = max(self._before[page_ids[0]], before_gone)
        self.last[page_ids] = now

    def inherit(self, page: int, gone: IntArray) -> None:
        for times in (self._before, self.last):
            times[page] = max(times[page], times[gone].max())

    def move(self, src: int, dst: int) -> None:
        for state in (self._ids, self._before, self.last):
            state[dst] = state[src]

    def evicted(self, page_ids: IntArray) -> None:
        """The end of a path becomes a ghost first, and so is forgotten first; what it continued is as warm as it."""
        backwards = page_ids[::-1]
        uses = np.maximum.accumulate(self.last[backwards]).tolist()
        remember(self._ghosts, dict(zip(self._ids[backwards].tolist(), uses, strict=True)), self._max_ghosts)

    def last_use(self, page_ids: IntArray) -> _TimeArray:
        return self.last[page_ids]

    def heat(self, page: int) -> tuple[int, int]:
        return int(self._before[page]), int(self.last[page])

    def count_as_cold(self, page_ids: IntArray) -> int:
        before, last = self._before[page_ids], self.last[page_ids]
        return count_after_last((before > before[-1]) | (last > last[-1]))

    def clear(self) -> None:
        self._ghosts.clear()
        self._before[:] = self.last[:] = 0


class Duel:
    """LRU or LRU-2, whichever would have hit more of late, as two shadow caches of ids find that see every request.

    Hits fade by `DECAY` a request. Each `interval` requests LRU-2 takes over if it leads by `HYSTERESIS`, LRU if it
    leads at all: at high hit rates 1 % of the hits is much of the misses. Neither is best for all loads
    (benchmarks/eviction.py); the duel is never far from the better one.
    """

    DECAY = 0.9995
    HYSTERESIS = 0.01

    def __init__(self, *, num_pages: int, page_size: int, interval: int = 100) -> None:
        self._num_pages = num_pages
        self._interval = interval
        self._uses = LRU2(num_pages=num_pages, page_size=page_size)
        self._prefixes = PrefixIds(page_size)
        self._start()

    def _start(self) -> None:
        self._shadows = [Shadow(self._num_pages, looks_back=looks_back) for looks_back in (False, True)]
        self._scores = [0.0, 0.0]
        self._num_asked = 0
        self._looks_back = False

    @property
    def name(self) -> str:
        return "duel: lru2" if self._looks_back else "duel: lru"

    def ask(self, tokens: IntArray, namespace: str) -> bool:
        path = self._prefixes.of(tokens, namespace).tolist()
        if not path:
            return False
        for i, shadow in enumerate(self._shadows):
            self._scores[i] = self._scores[i] * self.DECAY + shadow.ask(path)
        self._num_asked += 1
        if self._num_asked % self._interval:
            return False
        lru, lru2 = self._scores
        looked_back = self._looks_back
        self._looks_back = lru2 >= lru if looked_back else lru2 > lru * (1 + self.HYSTERESIS)
        return self._looks_back != looked_back

    def use(self, page_ids: IntArray, now: int) -> None:
        self._uses.use(page_ids, now)

    def add(
        self, page_ids: IntArray, gone: IntArray, tokens: IntArray, now: int, *, after: int, index: int, namespace: str
    ) -> None:
        self._uses.add(page_ids, gone, tokens, now, after=after, index=index, namespace=namespace)

    def inherit(self, page: int, gone: IntArray) -> None:
        self._uses.inherit(page, gone)

    def move(self, src: int, dst: int) -> None:
        self._uses.move(src, dst)

    def evicted(self, page_ids: IntArray) -> None:
        self._uses.evicted(page_ids)

    def last_use(self, page_ids: IntArray) -> _TimeArray:
        return self._uses.last_use(page_ids)

    def heat(self, page: int) -> Heat:
        return self._uses.heat(page) if self._looks_back else int(self._uses.last[page])

    def count_as_cold(self, page_ids: IntArray) -> int:
        if self._looks_back:
            return self._uses.count_as_cold(page_ids)
        last = self._uses.last[page_ids]
        return count_after_last(last > last[-1])

    def clear(self) -> None:
        self._uses.clear()
        self._start()


POLICIES: dict[str, Callable[..., EvictionPolicy]] = {"lru": LRU, "lru2": LRU2, "duel": Duel}
"""Policies by name; each takes `num_pages`, which counts the pages of both memories, and `page_size`."""
