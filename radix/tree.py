"""The radix tree: which token sequence lies in which pages, and which leaf is coldest.

Reads reference counts and never changes them; knows nothing of tables, copies or the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedList

from .node import Children, Node
from .policy import EvictionPolicy, Heat
from .tokens import EMPTY, IntArray, agreement, page_key


@dataclass(frozen=True, slots=True)
class Walk:
    """The end of a walk over full pages: `offset` tokens into `node`, after passing `page_ids`."""

    node: Node
    offset: int
    page_ids: IntArray


@dataclass(frozen=True, slots=True)
class NextPage:
    """A cached page that continues a walk: page `index` of `node`, whose first `agreed` tokens are the ones sought."""

    node: Node
    index: int
    agreed: int
    page: int
    tokens: IntArray  # its tokens, at most page_size


@dataclass(frozen=True, slots=True)
class Cut:
    """Pages taken from the end of a leaf, and where they hung: `after` (0: the root of `namespace`) and their key."""

    page_ids: IntArray
    namespace: str
    after: int
    key: bytes


class RadixTree:
    """Compressed edges of whole pages; a node with one child exists at a root only. One root per namespace.

    Tokens decide identity. Siblings differ in their first page; they may share up to page_size - 1 tokens of it. A
    partly filled page ends a leaf or is a leaf, and is never a prefix of a sibling or of what continues beside it.
    `owner[page]` is the id of the page's node, `publisher[page]` the label of the sequence it came from,
    `priority[page]` the highest retention priority that anyone gave it, never less than that of what continues it.
    Pages, not nodes, are what callers hold and what has heat, so that splits and merges go unnoticed.
    """

    def __init__(self, *, page_size: int, refs: IntArray, policy: EvictionPolicy) -> None:
        self.page_size = page_size
        self.roots: dict[str, Node] = {}
        self.nodes: dict[int, Node] = {}  # without the roots
        self.order = SortedList()  # `rank_of` the leaves whose last page has count 1
        self.owner: npt.NDArray[np.int64] = np.zeros(len(refs), np.int64)
        self.publisher: npt.NDArray[np.object_] = np.full(len(refs), "", object)
        self.priority: IntArray = np.zeros(len(refs), np.int32)
        self.policy = policy
        self.num_leaves = 0
        self.num_pages = 0
        self._refs = refs
        self._last_id = 0

    # Looking: nothing below changes anything.

    def root(self, namespace: str) -> Node:
        """Return the root of `namespace`; one that is new joins the tree with its first leaf."""
        return self.roots.get(namespace) or Node(namespace=namespace)

    def node_of(self, page: int) -> Node | None:
        """Return the node that owns `page`."""
        return self.nodes.get(int(self.owner[page]))

    def walk(self, node: Node, offset: int, tokens: IntArray, position: int) -> Walk:
        """Follow `tokens[position:]` over full pages, from `offset` tokens (whole pages) inside `node`.

        O(tokens passed / vector width + nodes passed).
        """
        page_size, passed = self.page_size, []
        first = offset  # tokens of `node` that are already among `passed`; `offset` have been agreed
        while True:
            edge_len = node.tokens.size // page_size * page_size
            if offset < edge_len:
                agreed = agreement(node.tokens.view[offset:edge_len], tokens[position:]) // page_size * page_size
                offset += agreed
                position += agreed
            passed.append(node.pages.view[first // page_size : offset // page_size])
            if offset < node.tokens.size or node.children is None or position + page_size > len(tokens):
                break
            child = node.children.nodes.get(page_key(tokens, position, position + page_size))
            if child is None:
                break
            node, first, offset = child, 0, page_size
            position += page_size
        return Walk(node, offset, np.concatenate(passed))

    def next_page(self, walk: Walk, rest: IntArray) -> NextPage | None:
        """Return the page that continues a walk and agrees furthest with `rest`, the tokens after it; None at an end.

        O(page_size + log children).
        """
        node, index = walk.node, walk.offset // self.page_size
        wanted = rest[: self.page_size]
        if walk.offset < node.tokens.size:
            agreed = agreement(self._page_tokens(node, index), wanted)
        elif node.children is not None:
            node, agreed = node.children.nearest(page_key(wanted, 0, self.page_size))
            index = 0
        else:
            return None
        return NextPage(node, index, agreed, int(node.pages.view[index]), self._page_tokens(node, index))

    def path_to(self, page: int) -> Iterator[IntArray]:
        """Yield the pages that come before `page` on its path, a node's share at a time."""
        node = self.node_of(page)
        assert node is not None
        yield node.pages.view[: int(np.flatnonzero(node.pages.view == page)[0])]
        while (node := node.parent) is not None:
            yield node.pages.view

    def free_end(self, page: int) -> Node | None:
        """Return the leaf that ends in `page` if nobody holds it, else None."""
        node = self.node_of(page)
        return node if node is not None and node.rank is not None and node.pages.view[-1] == page else None

    def rank_of(self, leaf: Node) -> tuple[int, Heat, int]:
        """Return the place of `leaf` among those that can be evicted: the lowest goes first."""
        page = int(leaf.pages.view[-1])
        return int(self.priority[page]), self.policy.heat(page), leaf.id

    # Growing.

    def insert(
        self, walk: Walk, tokens: IntArray, page_ids: IntArray, *, label: str, priority: int, now: int
    ) -> IntArray | None:
        """Continue the path where `walk` ended with `tokens` (at least one), which lie in `page_ids`.

        Full pages must have been walked as far as they go. Returns the pages that left the tree because the new ones
        continue them, or None if the tree holds these tokens already. Call `settle` once the counts are right.
        """
        node, superseded = walk.node, EMPTY
        index = (node.start + walk.offset) // self.page_size
        beside = self.next_page(walk, tokens)
        if beside is not None and beside.agreed == len(tokens):
            return None
        if beside is not None and beside.agreed == len(beside.tokens):
            superseded = self._cut(beside.node, 1)
        if walk.offset < node.tokens.size:
            node = self._split(node, walk.offset)
        if node.parent is None or node.children is not None:
            node = self._add_leaf(node, page_key(tokens, 0, self.page_size))
        assert node.parent is not None
        after, namespace = self._page_before(node, node.pages.size), node.parent.namespace  # which a root knows
        self.policy.add(page_ids, tokens, now, after=after, index=index, namespace=namespace)
        node.tokens.extend(tokens)
        node.pages.extend(page_ids)
        self.owner[page_ids] = node.id
        self.publisher[page_ids] = label
        self.priority[page_ids] = priority
        self.num_pages += len(page_ids)
        if len(superseded):
            self._inherit(int(page_ids[0]), superseded)
        return superseded

    def use(self, page_ids: IntArray, *, priority: int, now: int) -> None:
        """Warm pages of one path, which the caller holds, and raise their priority to `priority`. O(pages)."""
        self.policy.use(page_ids, now)
        self.priority[page_ids] = np.maximum(self.priority[page_ids], priority)

    def rerank(self) -> None:
        """Sort the eviction order anew, after the policy changed its mind. O(leaves log leaves)."""
        ranked = [node for node in self.nodes.values() if node.rank is not None]
        for node in ranked:
            node.rank = self.rank_of(node)
        self.order = SortedList(node.rank for node in ranked)

    # Shrinking.

    def clear(self) -> IntArray:
        """Forget everything; return the pages that were cached."""
        page_ids = np.flatnonzero(self.owner).astype(np.int32)
        self.roots.clear()
        self.nodes.clear()
        self.order.clear()
        self.policy.clear()
        self.owner[:] = 0
        self.num_leaves = self.num_pages = 0
        return page_ids

    def settle(self, page: int) -> None:
        """Let the node of `page` enter or leave the eviction order, as the count of its last page says. O(log n).

        To be called when the count of a page that may end a leaf moves between 1 and more.
        """
        if (node := self.node_of(page)) is not None:
            self._rank(node)

    def coldest(self) -> Node | None:
        """Return the leaf to evict from, None if every leaf is held."""
        return self.nodes[self.order[0][-1]] if self.order else None

    def count_as_cold(self, leaf: Node, max_pages: int) -> int:
        """Return how many pages, up to `max_pages`, can go from the end of the coldest leaf while it is the coldest."""
        pages = leaf.pages.view[-max_pages:]
        if len(pages) == 1:
            return 1
        higher = np.flatnonzero(self.priority[pages] > self.priority[pages[-1]])
        return self.policy.count_as_cold(pages[int(higher[-1]) + 1 if len(higher) else 0 :])

    def trim(self, leaf: Node, max_pages: int) -> Cut:
        """Cut up to `max_pages` pages with count 1 from the end of `leaf`; at least one, as it is in the order.

        What they followed inherits their heat. Where a leaf is used up, its parent merges with an only child that
        remains.
        """
        pages = leaf.pages.view[-max_pages:]
        held = np.flatnonzero(self._refs[pages] != 1)
        count = len(pages) - (int(held[-1]) + 1 if len(held) else 0)
        index, parent = leaf.pages.size - count, leaf.parent
        assert parent is not None
        key = page_key(self._page_tokens(leaf, index), 0, self.page_size)
        after = self._page_before(leaf, index)
        cut = Cut(self._cut(leaf, count), parent.namespace, after, key)
        if after:
            self._inherit(after, cut.page_ids)
        if index:
            self._rank(leaf)
        elif parent.parent is not None and parent.children is not None and len(parent.children) == 1:
            self._merge(parent)
        return cut

    # Structure. None of these looks at counts.

    def _add_leaf(self, parent: Node, key: bytes) -> Node:
        leaf = self._new_node(parent, key, parent.start + parent.tokens.size)
        if parent.children is None:
            parent.children = Children()
            self.roots[parent.namespace] = parent  # only a root gains a first child here
        parent.children.add(leaf)
        self.num_leaves += 1
        return leaf

    def _cut(self, leaf: Node, count: int) -> IntArray:
        """Take the last `count` pages off `leaf`, and the leaf off the tree if none is left."""
        index = leaf.pages.size - count
        page_ids = leaf.pages.view[index:].copy()
        self.owner[page_ids] = 0
        self.num_pages -= count
        leaf.pages.truncate(index)
        leaf.tokens.truncate(index * self.page_size)
        if not index:
            self._unlink(leaf)
        return page_ids

    def _unlink(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        assert parent.children is not None
        parent.children.remove(leaf)
        if not parent.children:
            parent.children = None
            del self.roots[parent.namespace]  # below a root nobody has an only child
        if leaf.rank is not None:
            self.order.remove(leaf.rank)
        del self.nodes[leaf.id]
        self.num_leaves -= 1

    def _split(self, node: Node, at: int) -> Node:
        """Cut the edge to `node` at `at` tokens (whole pages); return the new upper node.

        The lower one stays itself, so its rank stands. O(upper pages + smaller half).
        """
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        upper = self._new_node(parent, node.key, node.start)
        upper.tokens, upper.pages = node.tokens.split(at), node.pages.split(at // self.page_size)
        self.owner[upper.pages.view] = upper.id
        parent.children.replace(upper)
        node.parent, node.start = upper, node.start + at
        node.key = page_key(node.tokens.view, 0, self.page_size)
        upper.children = Children()
        upper.children.add(node)
        return upper

    def _merge(self, upper: Node) -> None:
        """Undo a split: `upper`'s only child takes over its edge, in the upper's arrays. Its rank stands."""
        parent = upper.parent
        assert parent is not None
        assert parent.children is not None
        assert upper.children is not None
        (node,) = upper.children
        self.owner[upper.pages.view] = node.id
        upper.tokens.extend(node.tokens.view)
        upper.pages.extend(node.pages.view)
        node.tokens, node.pages = upper.tokens, upper.pages
        node.parent, node.key, node.start = parent, upper.key, upper.start
        parent.children.replace(node)
        del self.nodes[upper.id]

    def _new_node(self, parent: Node, key: bytes, start: int) -> Node:
        self._last_id += 1
        node = Node(node_id=self._last_id, parent=parent, key=key, start=start)
        self.nodes[node.id] = node
        return node

    def _rank(self, node: Node) -> None:
        free = node.children is None and self._refs[node.pages.view[-1]] == 1
        rank = self.rank_of(node) if free else None
        if rank != node.rank:
            if node.rank is not None:
                self.order.remove(node.rank)
            if rank is not None:
                self.order.add(rank)
            node.rank = rank

    def _inherit(self, page: int, gone: IntArray) -> None:
        self.policy.inherit(page, gone)
        self.priority[page] = max(self.priority[page], self.priority[gone].max())

    def _page_before(self, node: Node, index: int) -> int:
        """Return the page that comes before page `index` of `node`, 0 at a root."""
        before = node.pages.view[:index] if index or node.parent is None else node.parent.pages.view
        return int(before[-1]) if len(before) else 0

    def _page_tokens(self, node: Node, index: int) -> IntArray:
        return node.tokens.view[index * self.page_size : (index + 1) * self.page_size]
