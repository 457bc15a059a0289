"""The order in which the nodes of a tree lose pages, in either memory.

Reads counts, priorities and heat, and changes none; knows nothing of tokens, nor of what becomes of the pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

import numpy as np
from sortedcontainers import SortedList

from .node import Node, Rank
from .policy import EvictionPolicy
from .tokens import EMPTY, IntArray, count_after_last


class EvictionOrder:
    """Nodes by the page that they would lose first: the lowest priority goes first, then what is coldest.

    In `device` are those that have device pages, the last of them of count 1, and none below; in `host` the leaves that
    end in a host page of count 1.
    """

    def __init__(
        self,
        nodes: Mapping[int, Node],  # of the tree, by id
        *,
        refs: IntArray,  # by page, and so is the next
        priority: IntArray,
        policy: EvictionPolicy,
    ) -> None:
        """All of them are the tree's own, and looked at as they are then."""
        self.device = SortedList()
        self.host = SortedList()
        self._nodes = nodes
        self._refs = refs
        self._priority = priority
        self._policy = policy

    def rank_at(self, node: Node, index: int) -> Rank:
        """Return the place of `node` among those that end in their memory as it does: the lowest loses pages first."""
        page = int(node.pages.view[index])
        return int(self._priority[page]), self._policy.heat(page), node.id

    # Who is in it.

    def put(self, node: Node) -> None:
        """Let `node` enter or leave, or move, in both memories. The only look at counts but for `cold_from`'s."""
        pages, stop = node.pages.view, node.num_device
        free = stop > 0 and not node.num_warm and self._refs[pages[stop - 1]] == 1
        free_host = stop < len(pages) and node.children is None and self._refs[pages[-1]] == 1
        rank = self.rank_at(node, stop - 1) if free else None
        host_rank = self.rank_at(node, len(pages) - 1) if free_host else None
        node.rank = _put(self.device, node.rank, rank)
        node.host_rank = _put(self.host, node.host_rank, host_rank)

    def remove(self, node: Node) -> None:
        """Let `node` leave, if it is there."""
        node.rank = _put(self.device, node.rank, None)
        node.host_rank = _put(self.host, node.host_rank, None)

    def sort(self) -> None:
        """Sort anew, after the policy changed its mind. O(leaves log leaves)."""
        ranked = [node for node in self._nodes.values() if node.rank is not None]
        on_host = [node for node in self._nodes.values() if node.host_rank is not None]
        for node in ranked:
            node.rank = self.rank_at(node, node.num_device - 1)
        for node in on_host:
            node.host_rank = self.rank_at(node, node.pages.size - 1)
        self.device = SortedList(node.rank for node in ranked)
        self.host = SortedList(node.host_rank for node in on_host)

    def clear(self) -> None:
        """Forget all nodes."""
        self.device.clear()
        self.host.clear()

    # Who comes first.

    def coldest(self) -> Node | None:
        """Return the node to take device pages from, None if all are held."""
        return self._nodes[self.device[0][-1]] if self.device else None

    def coldest_host(self) -> Node | None:
        """Return the leaf to take host pages from, None if all are held."""
        return self._nodes[self.host[0][-1]] if self.host else None

    def cold_from(self, node: Node, start: int, stop: int, max_pages: int) -> int:
        """Where the up to `max_pages` pages begin that end `[start, stop)`, have count 1 and are no warmer."""
        pages = node.pages.view[max(start, stop - max_pages) : stop]
        if len(pages) == 1:
            return stop - 1
        warmer = (self._refs[pages] != 1) | (self._priority[pages] > self._priority[pages[-1]])
        return stop - self._policy.count_as_cold(pages[len(pages) - count_after_last(warmer) :])

    def cold_pages(self, max_pages: int) -> IntArray:
        """Return up to `max_pages` device pages with count 1 in the order in which they would be evicted. O(each log).

        Pages behind a held one, or above several continuations, are not among them.
        """
        found = [EMPTY]
        order = iter(self.device)
        fresh: Rank | None = next(order, None)
        begun: list[tuple[Rank, int]] = []  # a heap of nodes that are used in part: up to this page
        while max_pages and (fresh is not None or begun):
            if fresh is None or (begun and begun[0][0] < fresh):
                rank, stop = heappop(begun)
                node = self._nodes[rank[-1]]
            else:
                node = self._nodes[fresh[-1]]
                stop, fresh = node.num_device, next(order, None)
            first = self.cold_from(node, 0, stop, max_pages)
            found.append(node.pages.view[first:stop][::-1])
            max_pages -= stop - first
            if first and self._refs[node.pages.view[first - 1]] == 1:
                heappush(begun, (self.rank_at(node, first - 1), first))
        return np.concatenate(found)


def _put(order: SortedList, old: Rank | None, new: Rank | None) -> Rank | None:
    """Replace an entry of an order; return the new one."""
    if old != new:
        if old is not None:
            order.remove(old)
        if new is not None:
            order.add(new)
    return new
