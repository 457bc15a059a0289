"""One step's work as rows of a token trie: who computes what, who shares it, and the batch that says so.

Knows nothing of queues, memory or models; the scheduler decides what is added, this module finds what is shared.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from radixrt.kernels.plan import IntArray
from radixrt.radix import Match, PageCopy, PageTable, WritePlan, agreement, page_key

from .batch import Batch
from .sequence import Sequence, TokenArray

Place = tuple[str, int, int]  # namespace, tokens, and the last full page of those


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One sequence's part of a step: its positions `[start, stop)`, of which `[own_start, stop)` are its own rows.

    `[start, own_start)` are rows of sequences planned before it. `rows[i]` is the row of position `start + i`.
    """

    sequence: Sequence
    start: int
    own_start: int
    stop: int
    rows: IntArray  # [stop - start]
    write: WritePlan

    @property
    def table(self) -> PageTable:
        table = self.sequence.table
        assert table is not None, "a planned sequence holds pages"
        return table

    @property
    def samples(self) -> bool:
        """The last row gives the logits of the sequence's next token, and there is to be one."""
        return self.stop == self.sequence.num_tokens and self.sequence.scores is None


@dataclass(frozen=True, slots=True)
class Leader:
    """An entry that starts where another sequence stands, with the same tokens on `[0, agreed)`."""

    entry: Entry
    agreed: int

    @property
    def shared_stop(self) -> int:
        """Its rows up to here are the other's too."""
        return min(self.agreed, self.entry.stop)


@dataclass(slots=True)
class StepPlan:
    """Entries in the order planned. A sequence at the same place with the same tokens as one before it rides along.

    Two sequences share a row when they stand at the same computed length with the same pages and agree on the tokens
    from there on: equal pages mean equal tokens, so only what follows the last full page is compared.
    """

    page_size: int
    num_rows: int = 0
    entries: list[Entry] = field(default_factory=list)
    scored_rows: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    scored_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    _parted: set[int] = field(default_factory=set)  # rows before which a sharer left: a segment ends there
    _places: dict[Place, list[tuple[bytes, int]]] = field(default_factory=lambda: defaultdict(list))
    _again: dict[Place, list[Entry]] = field(default_factory=lambda: defaultdict(list))

    def leader(
        self, namespace: str, start: int, full_pages: IntArray | TokenArray, tokens: TokenArray
    ) -> Leader | None:
        """The planned entry that shares most rows with `tokens` computed up to `start`, or None. O(log entries)."""
        place = self._places.get(self._place(namespace, start, full_pages))
        if not place:
            return None
        base = start - start % self.page_size
        at = bisect_left(place, (page_key(tokens, base, len(tokens)), -1))
        best: Leader | None = None
        for _, index in place[max(0, at - 1) : at + 1]:  # in sorted order the neighbours agree longest
            entry = self.entries[index]
            agreed = base + agreement(tokens[base:], entry.sequence.tokens[base:])
            if agreed > start and (best is None or agreed > best.agreed):
                best = Leader(entry, agreed)
        return best

    def is_computing(self, namespace: str, start: int, known: Match, tokens: TokenArray) -> bool:
        """Whether an entry that stands elsewhere than `start` computes what comes after the known part of `tokens`.

        Who runs known rows again, for log-probabilities, stands before those who go on behind them. They can share no
        row in this step; in the next one it is cached.
        """
        place = self._place(namespace, known.length, known.page_ids)
        if start < known.length and self.leader(namespace, known.length, known.page_ids, tokens) is not None:
            return True
        others = (entry.sequence.tokens for entry in self._again.get(place, ()) if entry.start != start)
        return any(agreement(tokens, other) > known.length for other in others)

    def runs_again(self, known: Match) -> None:
        """The last entry begins with rows that were known."""
        entry = self.entries[-1]
        self._again[self._place(entry.sequence.namespace, known.length, known.page_ids)].append(entry)

    def add(self, sequence: Sequence, write: WritePlan, leader: Leader | None) -> None:
        """Plan the positions of `write`, the shared ones as rows of `leader`."""
        own_start = write.start
        rows = np.arange(self.num_rows, self.num_rows + write.stop - write.start)
        if leader is not None:
            own_start = min(leader.shared_stop, write.stop)
            shared = leader.entry.rows[: own_start - write.start]
            rows = np.concatenate([shared, np.arange(self.num_rows, self.num_rows + write.stop - own_start)])
            self._parted.add(int(shared[-1]) + 1)
        entry = Entry(
            sequence=sequence, start=write.start, own_start=own_start, stop=write.stop, rows=rows, write=write
        )
        self.num_rows += write.stop - own_start
        self.entries.append(entry)
        if not sequence.is_decoding:  # generated tokens are computed once per branch
            base = entry.start - entry.start % self.page_size
            place = self._place(sequence.namespace, entry.start, entry.table.page_ids)
            insort(self._places[place], (page_key(sequence.tokens, base, sequence.num_tokens), len(self.entries) - 1))

    def __contains__(self, sequence: Sequence) -> bool:
        return any(entry.sequence is sequence for entry in self.entries)

    def batch(self) -> Batch:
        """The packed input of the forward pass; O(rows + pages read)."""
        segments = [segment for entry in self.entries for segment in self._segments(entry)]
        num_pages = [-(-stop // self.page_size) for _, _, stop in segments]
        write_rows, write_slots = self._writes()
        return Batch(
            token_ids=_concat([entry.sequence.tokens[start:stop] for entry, start, stop in segments]),
            positions=_ranges([start for _, start, _ in segments], [stop for _, _, stop in segments]),
            write_rows=write_rows,
            write_slots=write_slots,
            row_indptr=_indptr([stop - start for _, start, stop in segments]),
            page_indptr=_indptr(num_pages),
            page_ids=_concat([e.table.page_ids[:n] for (e, _, _), n in zip(segments, num_pages, strict=True)]),
            namespaces=tuple(entry.sequence.namespace for entry, _, _ in segments),
            logit_rows=self.logit_rows,
            scored_rows=self.scored_rows,
            scored_ids=self.scored_ids,
        )

    def _segments(self, entry: Entry) -> list[tuple[Entry, int, int]]:
        """The entry's own positions, cut where a sharer left.

        A kernel may let a NaN reach earlier rows of its segment (a weight of 0 times NaN), so rows that others share
        never stand in one segment with rows that they do not.
        """
        if not self._parted:
            return [(entry, entry.own_start, entry.stop)] if entry.own_start < entry.stop else []
        first = int(entry.rows[-1]) + 1 - entry.stop  # row minus position of the entry's own rows
        inside = (row - first for row in self._parted)
        cuts = sorted({entry.own_start, entry.stop, *(at for at in inside if entry.own_start < at < entry.stop)})
        return [(entry, start, stop) for start, stop in pairwise(cuts)]

    @property
    def copies(self) -> list[PageCopy]:
        """The page copies to run before the rows."""
        return [copy for entry in self.entries for copy in entry.write.copies]

    @property
    def logit_rows(self) -> IntArray:
        """Rows whose logits are wanted, ascending, each once: twins sample from the same one."""
        return np.unique(np.array([e.rows[-1] for e in self.entries if e.samples], dtype=np.int64))

    def _writes(self) -> tuple[IntArray, IntArray]:
        """(row, slot) pairs: each row into the page of every sequence that shares it, each slot once."""
        size, starts = self.page_size, [entry.start for entry in self.entries]
        # Of each entry the pages from the first that it writes in.
        tables = [entry.table.page_ids[entry.start // size :] for entry in self.entries]
        rows = [entry.rows for entry in self.entries]
        positions = _ranges(starts, [entry.stop for entry in self.entries])
        skipped = _indptr(list(map(len, tables)))[:-1] - np.array(starts, dtype=np.int64) // size
        pages = _concat(tables)[positions // size + np.repeat(skipped, list(map(len, rows)))]
        slots, first = np.unique(pages * size + positions % size, return_index=True)
        return _concat(rows)[first], slots

    def _place(self, namespace: str, start: int, page_ids: IntArray | TokenArray) -> Place:
        full = start // self.page_size
        return namespace, start, int(page_ids[full - 1]) if full else 0


def _concat(parts: list[IntArray] | list[TokenArray] | list[IntArray | TokenArray]) -> IntArray:
    return np.concatenate(parts).astype(np.int64, copy=False) if parts else np.empty(0, dtype=np.int64)


def _ranges(starts: list[int], stops: list[int]) -> IntArray:
    """`[start, stop)` of each, one behind the other."""
    begins = np.array(starts, dtype=np.int64)
    lengths = np.array(stops, dtype=np.int64) - begins
    ranges: IntArray = np.arange(lengths.sum()) + np.repeat(begins + lengths - np.cumsum(lengths), lengths)
    return ranges


def _indptr(lengths: list[int]) -> IntArray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
