"""A cache that is not there: ids alone, one request at a time, to learn what a policy would have hit.

Knows nothing of tokens, pages in memory or the real cache.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import groupby, repeat
from typing import TypeVar

from .errors import require

T = TypeVar("T")
Key = tuple[int, int]  # the use before the last (0: none known, or of no interest), the last use
Ghosts = OrderedDict[int, int]  # the last use of what was evicted, by id, longest gone first
GHOSTS_PER_PAGE = 4  # remembered after eviction; as good as all of them on the traces of benchmarks/eviction.py


class Shadow:
    """LRU, or with `looks_back` LRU-2 with ghosts, over paths of prefix ids.

    A request takes its whole path in, and nothing of it goes to make room for the rest; what exceeds the capacity stays
    out. A use of a page is one of all pages before it, so no page is colder than what continues it, and the coldest one
    is a leaf. Pages of equal times were used by the same two requests: they are a piece of one path, evicted from its
    end. Costs O(log n) for each such piece and up to 1 us for each id. Ids that collide distort counts, nothing else.
    """

    def __init__(self, capacity: int, *, looks_back: bool) -> None:
        self._capacity = capacity
        self._looks_back = looks_back
        self._now = 0
        self._key_of: dict[int, Key] = {}
        self._pieces: dict[Key, dict[int, None]] = {}  # the ids of each time, in order of depth; none is empty
        self._coldest: list[Key] = []  # a heap of their keys, and of keys that are gone
        self._ghosts: Ghosts = OrderedDict()

    def ask(self, path: list[int]) -> int:
        """One request for the prefixes `path`, shortest first; return how many of them it hit."""
        self._now += 1
        path = path[: self._capacity]
        pieces: list[tuple[int, list[int]]] = []
        num_missing = 0
        for key, ids in _runs(map(self._key_of.get, path), path):
            if key is None:
                num_missing += len(ids)
                pieces += self._known(ids)
            else:
                self._take(key, ids)
                pieces.append((key[1] if self._looks_back else 0, ids))
        self._evict(len(self._key_of) + num_missing - self._capacity)
        for before, ids in pieces:
            self._put((before, self._now), ids)
        return len(path) - num_missing

    def check(self) -> None:
        """Raise `BrokenInvariant` unless keys, pieces and heap agree (they do as long as no ids collide)."""
        listed = {number: key for key, piece in self._pieces.items() for number in piece}
        require(listed == self._key_of, "ids are listed under other times than theirs")
        require(all(self._pieces.values()), "an empty piece was kept")
        require(self._pieces.keys() <= set(self._coldest), "a piece cannot be found for eviction")
        require(len(self._key_of) <= self._capacity, "the shadow holds more than its capacity")
        require(len(self._ghosts) <= GHOSTS_PER_PAGE * self._capacity, "too many ghosts")

    def _known(self, ids: list[int]) -> list[tuple[int, list[int]]]:
        """Ids that come in, by their last use as far as a ghost remembers it (0 where none does)."""
        if self._ghosts.keys().isdisjoint(ids):
            return [(0, ids)]
        return list(_runs(map(self._ghosts.pop, ids, repeat(0)), ids))

    def _take(self, key: Key, ids: list[int]) -> None:
        if (piece := self._pieces.get(key)) is not None:
            _exhaust(map(piece.pop, ids, repeat(None)))
            if not piece:
                del self._pieces[key]

    def _put(self, key: Key, ids: list[int]) -> None:
        if (piece := self._pieces.get(key)) is not None:
            piece.update(dict.fromkeys(ids))
        else:
            self._pieces[key] = dict.fromkeys(ids)
            heappush(self._coldest, key)
            if len(self._coldest) > 2 * len(self._pieces) + 64:
                self._coldest = list(self._pieces)
                heapify(self._coldest)
        self._key_of.update(dict.fromkeys(ids, key))

    def _evict(self, count: int) -> None:
        while count > 0 and self._coldest:
            key = self._coldest[0]
            piece = self._pieces.get(key)
            if piece is None:
                heappop(self._coldest)
                continue
            ids = [piece.popitem()[0] for _ in range(min(count, len(piece)))]
            _exhaust(map(self._key_of.pop, ids, repeat(None)))
            if self._looks_back:
                remember(self._ghosts, dict.fromkeys(ids, key[1]), GHOSTS_PER_PAGE * self._capacity)
            count -= len(ids)
            if not piece:
                del self._pieces[key]


def remember(ghosts: Ghosts, last_uses: Mapping[int, int], max_ghosts: int) -> None:
    """Note the last uses of ids evicted in this order as the newest ghosts; forget the oldest beyond `max_ghosts`."""
    ghosts.update(last_uses)
    for _ in range(len(ghosts) - max_ghosts):
        ghosts.popitem(last=False)


def _runs(values: Iterable[T], ids: list[int]) -> Iterator[tuple[T, list[int]]]:
    """Cut `ids` where the value, of which each has one, changes."""
    start = 0
    for value, run in groupby(values):
        stop = start + len(list(run))
        yield value, ids[start:stop]
        start = stop


def _exhaust(iterator: Iterable[object]) -> None:
    deque(iterator, maxlen=0)
