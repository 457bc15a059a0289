"""What the cache answers with: immutable values, safe to keep.

Knows nothing of how they come about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .tokens import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How much of a sequence is cached on the device: full pages, then `tail_len` tokens at the start of one more.

    `host_len` tokens beyond those are in host memory: the pages `host_ids` follow `page_ids`, the last of them perhaps
    in part only, and are of no use before `swap_in` has brought them back. Empty where they reach no further.
    """

    page_ids: IntArray
    prefix_len: int
    tail_page: int | None
    tail_len: int
    host_ids: IntArray
    host_len: int

    @property
    def length(self) -> int:
        """Tokens found on the device."""
        return self.prefix_len + self.tail_len


@dataclass(frozen=True, slots=True, eq=False)
class PageCopy:
    """The first `num_tokens` tokens of page `src` are to be copied to page `dst`. Both are held until it is done."""

    src: int
    dst: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The table has room for positions `[start, stop)`; `copies` come before any write of the step."""

    start: int
    stop: int
    copies: tuple[PageCopy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a sequence hit as far as it did, and no further.

    `matched` tokens are on the device, `host_len` more in host memory; `diverged_at` counts both. There the cache
    continues with `expected`, published by the sequence labelled `diverged_from`, where `got` was asked for; where
    several edges continue, the one that sorts nearest. None where nothing is cached further. `evicted_by` and
    `evicted_at` (the cache's count of time) are set if what was asked for next was cached once, as far back as the
    ledger reaches.
    """

    matched: int
    diverged_at: int | None = None
    diverged_from: str | None = None
    expected: int | None = None
    got: int | None = None
    evicted_by: str | None = None
    evicted_at: int | None = None
    host_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Pages now (`num_*`), what ranks them for eviction, and counts since the cache was made (the others).

    Of the device unless they say host.
    """

    num_pages: int
    page_size: int
    num_free: int
    num_cached: int  # owned by the tree
    num_evictable: int
    num_held: int  # owned by the tree and by someone else
    num_host_pages: int
    num_host_free: int
    num_host_cached: int  # owned by the tree
    num_tables: int
    num_pins: int
    num_pinned: int  # distinct pages that pins hold
    num_copies: int  # between pages of the device
    num_swaps: int  # unfinished copies to or from host memory: so many pages of each are swapping
    num_nodes: int  # roots included
    num_leaves: int
    num_namespaces: int
    policy: str
    evicted_pages: int
    evicted_host_pages: int
    eviction_ages: tuple[int, ...]  # pages evicted from either memory, bucket i of ages in [2**i, 2**(i + 1)): how
    eviction_age_total: int  # many uses and evictions of the whole cache lay between a page's last use and its end
    dropped_pages: int  # of both memories
    swapped_out: int  # pages that moved to host memory
    swapped_in: int
    forked_copies: int  # of a partly filled page that forks, or a sequence and the cache, have in common
    reused_copies: int  # of a cached page that a request agreed with in part
    opened: int
    opened_tokens: int
    hit_tokens: int
    host_hit_tokens: int  # of these, in pages that came back from host memory and were not hit since

    @property
    def mean_eviction_age(self) -> float:
        """Uses and evictions of the cache between a page's last use and its own eviction; NaN where there was none."""
        count = sum(self.eviction_ages)
        return self.eviction_age_total / count if count else math.nan

    @property
    def num_active(self) -> int:
        """Pages in use: neither free, nor swapping, nor cached and held by nobody."""
        return self.num_pages - self.num_free - self.num_swaps - (self.num_cached - self.num_held)
