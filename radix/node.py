"""One edge of the radix tree with the node it leads to, and the sorted children below it.

Knows nothing of reference counts or eviction; the tree keeps the invariants.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from sortedcontainers import SortedList

from .buffer import IntBuffer
from .policy import Heat
from .tokens import key_agreement

Rank = tuple[int, Heat, int]  # priority, heat, and the node's id


class Node:
    """`tokens` in `pages`, from position `start` of the sequences that pass here; a root has none of either.

    All pages are full, except that a leaf's last may be partly filled. The first `num_device` lie on the device, the
    others in host memory; `num_warm` children have pages on the device. `rank` and `host_rank` are the node's entries
    in the eviction orders of both memories, None while it has none.
    """

    __slots__ = (
        "children",
        "host_rank",
        "id",
        "key",
        "namespace",
        "num_device",
        "num_warm",
        "pages",
        "parent",
        "rank",
        "start",
        "tokens",
    )

    def __init__(
        self,
        *,
        node_id: int = 0,
        parent: Node | None = None,
        key: bytes = b"",
        start: int = 0,
        namespace: str = "",
    ) -> None:
        self.id = node_id
        self.parent = parent  # None for the root of a namespace
        self.key = key  # the first page's tokens, as `page_key`
        self.start = start
        self.tokens = IntBuffer()
        self.pages = IntBuffer()
        self.children: Children | None = None  # None for a leaf
        self.num_device = 0
        self.num_warm = 0
        self.rank: Rank | None = None
        self.host_rank: Rank | None = None
        self.namespace = namespace  # meaningful at a root


class Children:
    """The nodes below one node by their first page: O(1) exact, O(log n) nearest, insertion and removal.

    A dict beside a sorted list of its keys: a SortedDict takes 2.0 KB and 58 us to make for two children, this 0.7 KB
    and 11 us, and most nodes that branch have few.
    """

    __slots__ = ("_keys", "nodes")

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        self._keys = SortedList()

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def sorted_keys(self) -> list[bytes]:
        return list(self._keys)

    def add(self, node: Node) -> None:
        self.nodes[node.key] = node
        self._keys.add(node.key)

    def replace(self, node: Node) -> None:
        """Put `node` where the child with its key was."""
        self.nodes[node.key] = node

    def remove(self, node: Node) -> None:
        del self.nodes[node.key]
        self._keys.remove(node.key)

    def agreement_beside(self, key: bytes) -> int:
        """Return how many leading tokens the child at `key` shares with any other."""
        after = next(self._keys.irange(minimum=key, inclusive=(False, True)), b"")
        before = next(self._keys.irange(maximum=key, inclusive=(True, False), reverse=True), b"")
        return max(key_agreement(key, after), key_agreement(key, before))

    def nearest(self, key: bytes) -> tuple[Node, int]:
        """Return the child that shares most leading tokens with `key`, and how many (there must be a child).

        Keys sort as their tokens do, so the best is next to where `key` belongs.
        """
        # irange, not bisect: the latter rebuilds a positional index, O(children / 1000), after every insertion.
        after = next(self._keys.irange(minimum=key), None)
        before = next(self._keys.irange(maximum=key, inclusive=(True, False), reverse=True), None)
        agreed, best = max((key_agreement(key, other), other) for other in (before, after) if other is not None)
        return self.nodes[best], agreed

    def beginning_with(self, key: bytes) -> list[Node]:
        """Return the children whose first page begins with the tokens of `key`, in order. O(log n) and each."""
        return [self.nodes[other] for other in takewhile(lambda k: k.startswith(key), self._keys.irange(minimum=key))]
