"""How much of a sequence is cached, where, and why no more: pure questions to the tree and to live sequences.

Knows nothing of reference counts; whoever wants to keep what was found retains it.
"""

from __future__ import annotations

import numpy as np

from .copies import Copies
from .explain import EvictionLedger
from .tails import LiveTail, LiveTails
from .tokens import IntArray, page_key
from .tree import NextPage, RadixTree, Walk
from .values import Explanation, Match


class Lookup:
    """Full pages come from the tree; the tail from the page, cached or live, that agrees furthest with what follows."""

    def __init__(self, tree: RadixTree, tails: LiveTails, copies: Copies, ledger: EvictionLedger) -> None:
        self._tree = tree
        self._tails = tails
        self._copies = copies
        self._ledger = ledger

    def match(self, wanted: IntArray, namespace: str) -> Match:
        """Return the longest cached prefix of `wanted`. O(its pages / vector width + nodes + log children)."""
        walk, beside = self._search(wanted, namespace)
        agreed = beside.agreed if beside else 0
        return Match(
            page_ids=walk.page_ids,
            prefix_len=len(walk.page_ids) * self._tree.page_size,
            tail_page=beside.page if beside and agreed else None,
            tail_len=agreed,
        )

    def path(self, wanted: IntArray, namespace: str) -> IntArray:
        """Return the cached pages whose tokens all lie in `wanted`, a partly filled last one included."""
        walk = self._tree.walk(self._tree.root(namespace), 0, wanted, 0)
        rest = wanted[len(walk.page_ids) * self._tree.page_size :]
        beside = self._tree.next_page(walk, rest) if len(rest) else None
        if beside is None or beside.agreed < len(beside.tokens):
            return walk.page_ids
        return np.append(walk.page_ids, np.int32(beside.page))

    def explain(self, wanted: IntArray, namespace: str) -> Explanation:
        """Say where the match ends and why."""
        walk, beside = self._search(wanted, namespace)
        page_size = self._tree.page_size
        start = len(walk.page_ids) * page_size
        agreed = beside.agreed if beside else 0
        if start + agreed == len(wanted):
            return Explanation(matched=start + agreed)
        after = int(walk.page_ids[-1]) if start else 0
        eviction = self._ledger.find(after, namespace, page_key(wanted, start, start + page_size), agreed)
        there = beside if beside and agreed < len(beside.tokens) else None
        return Explanation(
            matched=start + agreed,
            diverged_at=start + agreed if there else None,
            diverged_from=self._label(there) if there else None,
            expected=int(there.tokens[agreed]) if there else None,
            got=int(wanted[start + agreed]),
            evicted_by=eviction.by if eviction else None,
            evicted_at=eviction.at if eviction else None,
        )

    def _search(self, wanted: IntArray, namespace: str) -> tuple[Walk, NextPage | LiveTail | None]:
        walk = self._tree.walk(self._tree.root(namespace), 0, wanted, 0)
        rest = wanted[len(walk.page_ids) * self._tree.page_size :]
        if not len(rest):
            return walk, None
        cached = self._tree.next_page(walk, rest)
        anchor = int(walk.page_ids[-1]) if len(walk.page_ids) else namespace
        live = self._tails.best(anchor, rest, self._copies)
        if cached is None or (live is not None and live.agreed > cached.agreed):
            return walk, live
        return walk, cached

    def _label(self, there: NextPage | LiveTail) -> str:
        return there.table.label if isinstance(there, LiveTail) else str(self._tree.publisher[there.page])
