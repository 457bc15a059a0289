"""radixrt.radix: a prefix cache over pages, as a deterministic library. Needs numpy and sortedcontainers alone.

`RadixCache` is the face; everything else here is what it takes, returns or raises.
"""

from __future__ import annotations

from .cache import RadixCache
from .errors import (
    BrokenInvariant,
    CacheError,
    ClosedTable,
    DoubleRelease,
    InvalidTokens,
    LiveTables,
    RadixrtError,
    require,
)
from .policy import LRU, LRU2, POLICIES, Duel, EvictionPolicy
from .pool import PagePool
from .table import PageTable, Pin
from .tokens import IntArray, Tokens, agreement, as_tokens, page_key
from .tree import RadixTree
from .values import CacheStats, Explanation, Match, PageCopy, WritePlan

__all__ = [
    "LRU",
    "LRU2",
    "POLICIES",
    "BrokenInvariant",
    "CacheError",
    "CacheStats",
    "ClosedTable",
    "DoubleRelease",
    "Duel",
    "EvictionPolicy",
    "Explanation",
    "IntArray",
    "InvalidTokens",
    "LiveTables",
    "Match",
    "PageCopy",
    "PagePool",
    "PageTable",
    "Pin",
    "RadixCache",
    "RadixTree",
    "RadixrtError",
    "Tokens",
    "WritePlan",
    "agreement",
    "as_tokens",
    "page_key",
    "require",
]
