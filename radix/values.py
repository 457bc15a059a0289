"""What the cache answers with: immutable values, safe to keep.

Knows nothing of how they come about.
"""

from __future__ import annotations

from dataclasses import dataclass

from .tokens import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How much of a sequence is cached: full pages, then `tail_len < page_size` tokens at the start of one more."""

    page_ids: IntArray
    prefix_len: int
    tail_page: int | None
    tail_len: int

    @property
    def length(self) -> int:
        """Tokens found."""
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

    At `diverged_at` the cache continues with `expected`, published by the sequence labelled `diverged_from`, where
    `got` was asked for; where several edges continue, the one that sorts nearest. None where nothing is cached
    further. `evicted_by` and `evicted_at` (the cache's count of time) are set if what was asked for next was cached
    once, as far back as the ledger reaches.
    """

    matched: int
    diverged_at: int | None = None
    diverged_from: str | None = None
    expected: int | None = None
    got: int | None = None
    evicted_by: str | None = None
    evicted_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Pages now (`num_*`), what ranks them for eviction, and counts since the cache was made (the last six)."""

    num_pages: int
    page_size: int
    num_free: int
    num_cached: int  # owned by the tree
    num_evictable: int
    num_held: int  # owned by the tree and by someone else
    num_tables: int
    num_pins: int
    num_pinned: int  # distinct pages that pins hold
    num_copies: int
    num_nodes: int  # roots included
    num_leaves: int
    num_namespaces: int
    policy: str
    evicted_pages: int
    dropped_pages: int
    copied_pages: int
    opened: int
    opened_tokens: int
    hit_tokens: int
