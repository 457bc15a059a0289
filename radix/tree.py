"""The radix tree: which token sequence lies in which pages.

Knows nothing of tables, copies or the pool, nor of reference counts, but that its eviction order reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .node import Children, Node
from .order import EvictionOrder
from .policy import EvictionPolicy
from .tokens import EMPTY, IntArray, agreement, page_key


@dataclass(frozen=True, slots=True)
class Walk:
    """The end of a walk over full pages: `offset` tokens into `node`, after passing `page_ids`.

    The first `num_device` of them lie on the device, the others in host memory.
    """

    node: Node
    offset: int
    page_ids: IntArray
    num_device: int


@dataclass(frozen=True, slots=True)
class NextPage:
    """A cached page that continues a walk: page `index` of `node`, whose first `agreed` tokens are the ones sought."""

    node: Node
    index: int
    agreed: int
    page: int
    tokens: IntArray  # its tokens, at most page_size

    @property
    def on_device(self) -> bool:
        return self.index < self.node.num_device


@dataclass(frozen=True, slots=True)
class Cut:
    """Pages taken off the tree, and where they hung: `after` (0: the root of `namespace`) and their key.

    `edges` are parts of paths, each after all that continued it. `count` pages are of the memory that was asked for;
    host pages that continued device pages went with them.
    """

    edges: list[IntArray]
    count: int
    namespace: str
    after: int
    key: bytes


class RadixTree:
    """Compressed edges of whole pages; a node with one child exists at a root only. One root per namespace.

    Tokens decide identity. Siblings differ in their first page; they may share up to page_size - 1 tokens of it. A
    partly filled page ends a leaf or is a leaf, and is never a prefix of a sibling or of what continues beside it. On
    every path device pages come before host pages.
    `owner[page]` is the id of the page's node, `publisher[page]` the label of the sequence it came from,
    `priority[page]` the highest retention priority that anyone gave it, never less than that of what continues it.
    Pages, not nodes, are what callers hold and what has heat, so that splits and merges go unnoticed.
    """

    def __init__(self, *, page_size: int, refs: IntArray, policy: EvictionPolicy) -> None:
        self.page_size = page_size
        self.roots: dict[str, Node] = {}
        self.nodes: dict[int, Node] = {}  # without the roots
        self.owner: npt.NDArray[np.int64] = np.zeros(len(refs), np.int64)
        self.publisher: npt.NDArray[np.object_] = np.full(len(refs), "", object)
        self.priority: IntArray = np.zeros(len(refs), np.int32)
        self.policy = policy
        self.order = EvictionOrder(self.nodes, refs=refs, priority=self.priority, policy=policy)
        self.num_leaves = 0
        self.num_pages = 0
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
        page_ids = np.concatenate(passed)
        return Walk(node, offset, page_ids, len(page_ids) - _num_host(node, offset // page_size))

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

    def behind(self, walk: Walk, rest: IntArray) -> Iterator[IntArray]:
        """Yield the tokens that follow a walk up to each leaf, where they begin with `rest`. O(what it yields)."""
        node, begun = walk.node, walk.node.tokens.view[walk.offset :]
        if not len(begun) and node.children is not None:
            beside = node.children.beginning_with(page_key(rest, 0, len(rest)))
            found = [(child, child.tokens.view) for child in beside]
        else:
            is_there = node.parent is not None and agreement(begun, rest) == len(rest)
            found = [(node, begun)] if is_there else []
        while found:
            node, tokens = found.pop()
            if node.children is None:
                yield tokens
            for child in node.children or ():
                found.append((child, np.concatenate([tokens, child.tokens.view])))

    def path_to(self, page: int) -> Iterator[IntArray]:
        """Yield the pages that come before `page` on its path, a node's share at a time."""
        node = self.node_of(page)
        assert node is not None
        yield node.pages.view[: int(np.flatnonzero(node.pages.view == page)[0])]
        while (node := node.parent) is not None:
            yield node.pages.view

    def leaf_of(self, page: int) -> Node | None:
        """Return the leaf that ends in `page`, None where something continues it."""
        node = self.node_of(page)
        return node if node is not None and node.children is None and node.pages.view[-1] == page else None

    def has_like(self, page: int, num_tokens: int) -> bool:
        """Return whether another page in its place begins with the same `num_tokens` tokens. O(log children)."""
        node = self.node_of(page)
        assert node is not None
        if node.parent is None or node.parent.children is None or node.pages.view[0] != page:
            return False
        return node.parent.children.agreement_beside(node.key) >= num_tokens

    # Growing.

    def insert(
        self, walk: Walk, tokens: IntArray, page_ids: IntArray, *, label: str, priority: int, now: int
    ) -> IntArray | None:
        """Continue the path where `walk` ended with `tokens` (at least one), which lie in `page_ids` on the device.

        Full pages must have been walked as far as they go, and lie on the device. Returns the pages that left the tree
        because the new ones continue them, or hold the same on the device; None if the tree holds these tokens already.
        Call `settle` once the counts are right.
        """
        node, superseded = walk.node, EMPTY
        index = (node.start + walk.offset) // self.page_size
        beside = self.next_page(walk, tokens)
        if beside is not None and beside.agreed == len(tokens):
            if beside.agreed < len(beside.tokens) or beside.on_device:
                return None
            moved = self.move(beside.page, int(page_ids[0]))
            assert moved, "the pages before are on the device"
            return np.array([beside.page], np.int32)
        if beside is not None and beside.agreed == len(beside.tokens):
            superseded = self._cut(beside.node, 1)
        if walk.offset < node.tokens.size:
            node = self._split(node, walk.offset)
        if node.parent is None or node.children is not None:
            node = self._add_leaf(node, page_key(tokens, 0, self.page_size))
        assert node.parent is not None
        after, namespace = self._page_before(node, node.pages.size), node.parent.namespace  # which a root knows
        self.policy.add(page_ids, superseded, tokens, now, after=after, index=index, namespace=namespace)
        first_priority = self.priority[superseded].max(initial=priority)  # a page may go on as itself
        node.tokens.extend(tokens)
        node.pages.extend(page_ids)
        self._set_device(node, node.pages.size)
        self.owner[page_ids] = node.id
        self.publisher[page_ids] = label
        self.priority[page_ids] = priority
        self.priority[page_ids[0]] = first_priority
        self.num_pages += len(page_ids)
        return superseded

    def use(self, page_ids: IntArray, *, priority: int | None = None, now: int) -> None:
        """Warm pages of one path, which the caller holds, and raise their priority to `priority`. O(pages)."""
        self.policy.use(page_ids, now)
        if priority is not None:
            self.priority[page_ids] = np.maximum(self.priority[page_ids], priority)

    # Between device and host.

    def move(self, src: int, dst: int) -> bool:
        """Put `dst` in the place of `src`: a page of the other memory with the same content, priority and heat.

        What it followed on the device inherits its heat where it goes to the host. False, and nothing changed, where
        the tree does not own `src`, or a device page would come after a host page. Call `settle` on `dst` once the
        counts are right.
        """
        node = self.node_of(src)
        if node is None:
            return False
        pages, stop, parent = node.pages.view, node.num_device, node.parent
        assert parent is not None
        if stop and pages[stop - 1] == src and not node.num_warm:
            index = num_device = stop - 1
        elif stop < len(pages) and pages[stop] == src and (stop or parent.num_device == parent.pages.size):
            index, num_device = stop, stop + 1
        else:
            return False
        pages[index] = dst
        self.owner[src], self.owner[dst] = 0, node.id
        self.publisher[dst], self.priority[dst] = self.publisher[src], self.priority[src]
        self.policy.move(src, dst)
        if num_device == index:
            self._inherit(self._page_before(node, index), pages[index : index + 1])
        self._set_device(node, num_device)
        return True

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
        """Let the node of `page` enter or leave the eviction order, as the counts of its pages say. O(log n).

        To be called when the count of a page that may end a node's device or host pages moves between 1 and more.
        """
        if (node := self.node_of(page)) is not None:
            self.order.put(node)

    def trim(self, node: Node, max_pages: int) -> Cut:
        """Cut up to `max_pages` device pages off the coldest node while it is that, and what continues them.

        That lies in host pages, whatever their count; at least one page is cut, as the node is in the order. What the
        pages followed inherits their heat. Where a leaf is used up, its parent merges with an only child that remains.
        """
        stop = node.num_device
        return self._trim(node, self.order.cold_from(node, 0, stop, max_pages), stop)

    def trim_host(self, leaf: Node, max_pages: int) -> Cut:
        """Cut up to `max_pages` host pages off the leaf with the coldest, as `trim` does."""
        stop = leaf.pages.size
        return self._trim(leaf, self.order.cold_from(leaf, leaf.num_device, stop, max_pages), stop)

    def cut_off(self, page: int) -> Cut | None:
        """Cut a device page that no device page continues, whatever its count, as `trim` does; None if it is none."""
        node = self.node_of(page)
        if node is None or node.num_warm or node.pages.view[node.num_device - 1] != page:
            return None
        return self._trim(node, node.num_device - 1, node.num_device)

    def cut_end(self, leaf: Node, num_pages: int) -> Cut:
        """Cut the last `num_pages` pages of a leaf, of either memory, whatever their count, as `trim` does."""
        return self._trim(leaf, leaf.pages.size - num_pages, leaf.pages.size)

    # Structure.

    def _trim(self, node: Node, index: int, stop: int) -> Cut:
        """Cut the pages from `index` on, of which those before `stop` were asked for, and all below."""
        parent = node.parent
        assert parent is not None
        key = page_key(self._page_tokens(node, index), 0, self.page_size)
        after = self._page_before(node, index)
        edges = self._drop_children(node)
        edges.append(self._cut(node, node.pages.size - index))
        self._inherit(after, edges[-1])
        if index:
            self.order.put(node)
        else:
            self._reorder_parent(node)
            if parent.parent is not None and parent.children is not None and len(parent.children) == 1:
                self._merge(parent)
        return Cut(edges, stop - index, parent.namespace, after, key)

    def _drop_children(self, node: Node) -> list[IntArray]:
        """Take all that is below `node`, in host pages alone, off the tree; return its edges, the ends first.

        They leave no heat: what they continue has had it since they moved out, and each use since was one of both.
        """
        if node.children is None:
            return []
        dropped: list[Node] = []
        below = [node]
        while below:
            dropped.append(below.pop())
            below += sorted(dropped[-1].children or (), key=lambda child: child.key)
        self.num_leaves += 1
        for child in reversed(dropped[1:]):
            self.owner[child.pages.view] = 0
            self.num_pages -= child.pages.size
            self.num_leaves -= child.children is None
            self.order.remove(child)
            del self.nodes[child.id]
        node.children = None
        return [child.pages.view for child in reversed(dropped[1:])]

    def _set_device(self, node: Node, num_device: int) -> None:
        """Note how many pages of `node` lie on the device; its parent counts the children that have any."""
        parent, change = node.parent, (num_device > 0) - (node.num_device > 0)
        node.num_device = num_device
        if change and parent is not None:
            parent.num_warm += change
            self._reorder_parent(node)

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
        self._set_device(leaf, min(leaf.num_device, index))
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
        self.order.remove(leaf)
        del self.nodes[leaf.id]
        self.num_leaves -= 1

    def _split(self, node: Node, at: int) -> Node:
        """Cut the edge to `node` at `at` tokens (whole pages); return the new upper node.

        The lower one stays itself. O(upper pages + smaller half).
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
        upper.num_device = min(node.num_device, upper.pages.size)
        node.num_device -= upper.num_device
        upper.num_warm = int(node.num_device > 0)
        self.order.put(node)
        self.order.put(upper)
        return upper

    def _merge(self, upper: Node) -> None:
        """Undo a split: `upper`'s only child takes over its edge, in the upper's arrays."""
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
        node.num_device += upper.num_device
        parent.children.replace(node)
        self.order.remove(upper)
        del self.nodes[upper.id]
        self.order.put(node)

    def _new_node(self, parent: Node, key: bytes, start: int) -> Node:
        self._last_id += 1
        node = Node(node_id=self._last_id, parent=parent, key=key, start=start)
        self.nodes[node.id] = node
        return node

    def _reorder_parent(self, node: Node) -> None:
        """The heat of what `node` followed may have changed."""
        if node.parent is not None and node.parent.parent is not None:
            self.order.put(node.parent)

    def _inherit(self, page: int, gone: IntArray) -> None:
        """Make `page`, where it is one, as warm as pages that left the place after it."""
        if page:
            self.policy.inherit(page, gone)
            self.priority[page] = max(self.priority[page], self.priority[gone].max())

    def _page_before(self, node: Node, index: int) -> int:
        """Return the page that comes before page `index` of `node`, 0 at a root."""
        before = node.pages.view[:index] if index or node.parent is None else node.parent.pages.view
        return int(before[-1]) if len(before) else 0

    def _page_tokens(self, node: Node, index: int) -> IntArray:
        return node.tokens.view[index * self.page_size : (index + 1) * self.page_size]


def _num_host(node: Node, stop: int) -> int:
    """How many host pages lie on the path that ends before page `stop` of `node`. O(nodes that hold them)."""
    num_pages = max(0, stop - node.num_device)
    while not node.num_device and (parent := node.parent) is not None:
        num_pages += parent.pages.size - parent.num_device
        node = parent
    return num_pages
