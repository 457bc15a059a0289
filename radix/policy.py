"""What makes a cached leaf cold.

Knows nothing of trees or pages: it turns touches at counted times into heats, and the coldest leaf goes first.
"""

from __future__ import annotations

from typing import Any, Protocol

Heat = Any  # opaque to the tree; values of one policy order among themselves


class EvictionPolicy(Protocol):
    """Heats are immutable and sortable, colder first. Ties fall to the older node. A split copies the heat."""

    def touch(self, heat: Heat | None, now: int) -> Heat:
        """Return the heat of a node used at `now`, whose heat was `heat` (None: the node is new)."""

    def join(self, a: Heat, b: Heat) -> Heat:
        """Return the heat of two nodes that became one, or of a parent whose child was removed."""


class LRU:
    """The heat is the time of the last touch."""

    def touch(self, heat: int | None, now: int) -> int:
        return now

    def join(self, a: int, b: int) -> int:
        return max(a, b)
