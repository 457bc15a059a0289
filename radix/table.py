"""The handles a caller holds: a live sequence's page table, and a pin.

Data only: `RadixCache` alone changes them and knows what holding a page means.
"""

from __future__ import annotations

from dataclasses import dataclass

from .buffer import IntBuffer
from .tokens import IntArray


class PageTable:
    """One live sequence: its tokens and, in order, the pages that hold (or will hold) their KV.

    Lengths are in tokens and ordered: `num_tree_pages * page_size <= written_len <= seq_len`. `[0, written_len)` is
    known to be written; after `publish` that is everything. Of the written pages the full ones belong to the tree. The
    last page may be borrowed: read here, but copied before the sequence grows in it; `borrows` while it is the partly
    filled one that `open` found. Of cached leaves those of the
    lowest `priority` are evicted first. A closed table keeps its tokens and holds no page.
    """

    __slots__ = (
        "borrows",
        "closed",
        "label",
        "namespace",
        "page_buffer",
        "page_size",
        "priority",
        "token_buffer",
        "written_len",
    )

    def __init__(
        self,
        *,
        namespace: str,
        label: str,
        priority: int,
        page_size: int,
        tokens: IntArray,
        page_ids: IntArray,
        written_len: int,
        borrows: bool,
    ) -> None:
        self.namespace = namespace
        self.label = label
        self.priority = priority
        self.page_size = page_size
        self.borrows = borrows
        self.closed = False
        self.written_len = written_len
        self.token_buffer = IntBuffer(tokens)
        self.page_buffer = IntBuffer(page_ids)

    @property
    def seq_len(self) -> int:
        """Tokens that have a place in a page."""
        return self.token_buffer.size

    @property
    def tokens(self) -> IntArray:
        """The token ids, int32 `[seq_len]`, read-only; valid until the table changes."""
        return _read_only(self.token_buffer.view)

    @property
    def page_ids(self) -> IntArray:
        """The pages in order, int32 `[ceil(seq_len / page_size)]`, read-only; valid until the table changes."""
        return _read_only(self.page_buffer.view)

    @property
    def num_tree_pages(self) -> int:
        """Leading pages that are full, written and owned by the tree."""
        return self.written_len // self.page_size

    def __len__(self) -> int:
        return self.token_buffer.size

    def __bool__(self) -> bool:
        """A handle is there, however short: `if table` asks for the handle, `len(table)` for tokens."""
        return True

    def __repr__(self) -> str:
        state = (
            "closed" if self.closed else f"{self.written_len}/{self.seq_len} tokens in {self.page_buffer.size} pages"
        )
        return f"<PageTable {self.label!r} {state}>"


@dataclass(slots=True, eq=False)
class Pin:
    """Full pages kept from eviction until `unpin`."""

    page_ids: IntArray
    prefix_len: int  # tokens in them
    closed: bool = False


def _read_only(view: IntArray) -> IntArray:
    view.flags.writeable = False
    return view
