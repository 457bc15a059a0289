"""The partly filled last pages of live sequences, so that a prompt can hit what another is still decoding.

Knows nothing of the tree's edges or of reference counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from .copies import Copies
from .table import PageTable
from .tokens import IntArray, agreement

Anchor = int | str  # what a tail follows: the full tree page before it, or the namespace it begins


@dataclass(frozen=True, slots=True)
class LiveTail:
    """The written part of `table`'s last page, whose first `agreed` tokens are the ones sought."""

    table: PageTable
    agreed: int
    page: int
    tokens: IntArray


class LiveTails:
    """Tables by their anchor. A table is here exactly while it has written tokens beyond its full pages."""

    def __init__(self) -> None:
        self.tables: dict[Anchor, dict[PageTable, None]] = {}  # in order of arrival, so that ties repeat
        self._anchors: dict[PageTable, Anchor] = {}

    def update(self, table: PageTable) -> None:
        """Follow a change of `table`'s written length or of its last full page. O(1)."""
        anchor = None if table.closed else anchor_of(table)
        previous = self._anchors.get(table)
        if anchor == previous:
            return
        if previous is not None:
            del self._anchors[table], self.tables[previous][table]
            if not self.tables[previous]:
                del self.tables[previous]
        if anchor is not None:
            self._anchors[table] = anchor
            self.tables.setdefault(anchor, {})[table] = None

    def best(self, anchor: Anchor, rest: IntArray, copies: Copies) -> LiveTail | None:
        """Return the tail that agrees furthest with `rest`, the tokens after the anchor; None if there is none.

        Pages that wait for their content are passed over. O(tails at this anchor).
        """
        best = None
        for table in self.tables.get(anchor, ()):
            index = table.num_tree_pages
            page = int(table.page_buffer.view[index])
            tokens = table.token_buffer.view[index * table.page_size : table.written_len]
            agreed = agreement(tokens, rest)
            if page not in copies and (best is None or agreed > best.agreed):
                best = LiveTail(table, agreed, page, tokens)
        return best


def anchor_of(table: PageTable) -> Anchor | None:
    """Return what the written tail of `table` follows, None if its written tokens fill their pages."""
    if table.written_len % table.page_size == 0:
        return None
    index = table.num_tree_pages
    return int(table.page_buffer.view[index - 1]) if index else table.namespace
