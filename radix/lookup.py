"""How much of a sequence is cached, where, and why no more: pure questions to the tree and to live sequences.

Knows nothing of reference counts; whoever wants to keep what was found retains it.
"""

from __future__ import annotations

import numpy as np

from .copies import Copies
from .explain import EvictionLedger
from .tails import LiveTail, LiveTails
from .tokens import EMPTY, IntArray, page_key
from .tree import NextPage, RadixTree, Walk
from .values import Explanation, Match


class Lookup:
    """Full pages come from the tree; the tail from the page, cached or live, that agrees furthest with what follows.

    On the device the tail is a live one where the cached page that agrees furthest lies in host memory: others beside
    it are not searched.
    """

    def __init__(self, tree: RadixTree, tails: LiveTails, copies: Copies, ledger: EvictionLedger) -> None:
        self._tree = tree
        self._tails = tails
        self._copies = copies
        self._ledger = ledger

    def match(self, wanted: IntArray, namespace: str) -> Match:
        """Return the longest cached prefix of `wanted`. O(its pages / vector width + nodes + log children)."""
        walk, cached, live = self._search(wanted, namespace)
        page_size, host_ids = self._tree.page_size, walk.page_ids[walk.num_device :]
        reached = len(walk.page_ids) * page_size
        tail: NextPage | LiveTail | None = live
        if cached is not None and cached.on_device:
            tail = _further(cached, live)
        elif cached is not None and cached.agreed:
            host_ids = np.append(host_ids, np.int32(cached.page))
            reached += cached.agreed
        prefix_len, tail_len = walk.num_device * page_size, tail.agreed if tail else 0
        host_len = max(0, reached - prefix_len - tail_len) if len(host_ids) else 0
        return Match(
            page_ids=walk.page_ids[: walk.num_device],
            prefix_len=prefix_len,
            tail_page=tail.page if tail and tail_len else None,
            tail_len=tail_len,
            host_ids=host_ids if host_len else EMPTY,
            host_len=host_len,
        )

    def path(self, wanted: IntArray, namespace: str) -> IntArray:
        """Return the cached pages whose tokens all lie in `wanted`, a partly filled last one included."""
        walk = self._tree.walk(self._tree.root(namespace), 0, wanted, 0)
        rest = wanted[len(walk.page_ids) * self._tree.page_size :]
        beside = self._tree.next_page(walk, rest) if len(rest) else None
        if beside is None or beside.agreed < len(beside.tokens):
            return walk.page_ids
        return np.append(walk.page_ids, np.int32(beside.page))

    def behind(self, wanted: IntArray, namespace: str) -> list[IntArray]:
        """Return every cached sequence that begins with `wanted`, to its end."""
        walk = self._tree.walk(self._tree.root(namespace), 0, wanted, 0)
        stop = len(walk.page_ids) * self._tree.page_size
        return [np.concatenate([wanted[:stop], rest]) for rest in self._tree.behind(walk, wanted[stop:])]

    def explain(self, wanted: IntArray, namespace: str) -> Explanation:
        """Say where the match ends and why."""
        match = self.match(wanted, namespace)
        stop, page_size = match.length + match.host_len, self._tree.page_size
        if stop == len(wanted):
            return Explanation(matched=match.length, host_len=match.host_len)
        walk, cached, live = self._search(wanted, namespace)
        beside = _further(cached, live) if len(walk.page_ids) == walk.num_device else cached
        agreed = stop % page_size
        start = stop - agreed
        after = int(walk.page_ids[-1]) if start else 0
        eviction = self._ledger.find(after, namespace, page_key(wanted, start, start + page_size), agreed)
        there = beside if beside and agreed < len(beside.tokens) else None
        return Explanation(
            matched=match.length,
            host_len=match.host_len,
            diverged_at=stop if there else None,
            diverged_from=self._label(there) if there else None,
            expected=int(there.tokens[agreed]) if there else None,
            got=int(wanted[stop]),
            evicted_by=eviction.by if eviction else None,
            evicted_at=eviction.at if eviction else None,
        )

    def _search(self, wanted: IntArray, namespace: str) -> tuple[Walk, NextPage | None, LiveTail | None]:
        """Walk both memories; the cached page that goes on there, and the live tail that goes on on the device."""
        walk = self._tree.walk(self._tree.root(namespace), 0, wanted, 0)
        rest = wanted[len(walk.page_ids) * self._tree.page_size :]
        cached = self._tree.next_page(walk, rest) if len(rest) else None
        here = wanted[walk.num_device * self._tree.page_size :]
        anchor = int(walk.page_ids[walk.num_device - 1]) if walk.num_device else namespace
        return walk, cached, self._tails.best(anchor, here, self._copies) if len(here) else None

    def _label(self, there: NextPage | LiveTail) -> str:
        return there.table.label if isinstance(there, LiveTail) else str(self._tree.publisher[there.page])


def _further(cached: NextPage | None, live: LiveTail | None) -> NextPage | LiveTail | None:
    """The one of the two that agrees further, the cached one where they agree alike."""
    if cached is None or (live is not None and live.agreed > cached.agreed):
        return live
    return cached
