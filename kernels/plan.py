"""What one step's attention reads: a forest of page runs, each with the rows that read it.

Knows page tables and positions only: no tensors, no model. Every backend runs any plan; planners differ in speed alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

GROUP_LEN = 256


def group_len(page_size: int) -> int:
    """Positions of one reduction group: whole pages, 256 positions where the page size allows it.

    An exact backend reduces each group alone and folds the groups in order, so a row's bits do not depend on how a
    plan cuts its path. 256 keeps the scores of a tile of rows in the first-level cache and folds rarely.
    """
    return max(page_size, GROUP_LEN - GROUP_LEN % page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """A step's attention as a forest: node i is a run of pages that the same rows read.

    In each of its nodes a row at position t reads the positions `<= t`. Its nodes cover `[0, t]` exactly once and
    come in ascending order. So attention by sequence is one node for each, split-KV several, a cascade over a shared
    prefix a node with many rows, and a tree of prefixes a tree of nodes.
    """

    page_size: int
    positions: IntArray  # [T] position of each row of the step
    starts: IntArray  # [N] first position of each node: whole pages, in an exact plan whole groups
    page_indptr: IntArray  # [N + 1]
    page_ids: IntArray  # [page_indptr[-1]] node i covers the positions from starts[i] on that its pages hold
    row_indptr: IntArray  # [N + 1]
    row_ids: IntArray  # [row_indptr[-1]] the rows that read node i, ascending
    exact: bool  # ask for bits that no other plan, batch or number of threads would change

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def num_nodes(self) -> int:
        return len(self.starts)

    @classmethod
    def of(
        cls, nodes: Sequence[tuple[int, IntArray, IntArray]], positions: IntArray, *, page_size: int, exact: bool
    ) -> AttentionPlan:
        """The plan of these nodes, each (first position, page ids, row ids)."""
        starts, pages, rows = zip(*nodes, strict=True) if nodes else ((), (), ())
        return cls(
            page_size=page_size,
            positions=positions,
            starts=np.array(starts, dtype=np.int64),
            page_indptr=_indptr(pages),
            page_ids=_concat(pages),
            row_indptr=_indptr(rows),
            row_ids=_concat(rows),
            exact=exact,
        )

    def nodes(self) -> Iterator[tuple[int, IntArray, IntArray]]:
        """(first position, page ids, row ids) of each node."""
        pages, rows = self.page_indptr.tolist(), self.row_indptr.tolist()
        for i, start in enumerate(self.starts.tolist()):
            yield start, self.page_ids[pages[i] : pages[i + 1]], self.row_ids[rows[i] : rows[i + 1]]

    def check(self) -> None:
        """Raise ValueError unless every row's nodes cover `[0, its position]` once, in order. O(rows + nodes)."""
        align = group_len(self.page_size) if self.exact else self.page_size
        covered = np.zeros(self.num_rows, dtype=np.int64)
        for i, (start, pages, rows) in enumerate(self.nodes()):
            if start % align or not len(pages) or not len(rows):
                raise ValueError(f"node {i} starts at {start} and has {len(pages)} pages and {len(rows)} rows")
            if (np.diff(rows) <= 0).any() or (covered[rows] != start).any() or (self.positions[rows] < start).any():
                raise ValueError(f"node {i} does not go on at {start} where its rows {rows.tolist()} stand")
            covered[rows] = start + len(pages) * self.page_size
        if (covered <= self.positions).any():
            raise ValueError(f"rows {np.flatnonzero(covered <= self.positions).tolist()} are not read to their end")


def build_plan(
    positions: IntArray,  # [T]
    row_indptr: IntArray,  # [S + 1] rows of segment s: [row_indptr[s], row_indptr[s + 1]), at consecutive positions
    page_indptr: IntArray,  # [S + 1]
    page_ids: IntArray,  # [page_indptr[-1]] pages of segment s, in order of position, to its last row's
    *,
    page_size: int,
    exact: bool,
    sharing_cost: int,
) -> AttentionPlan:
    """The plan of a step's segments. Equal runs of pages that several of them start with become one node.

    A run of n tokens with r readers is a node of its own where `(r - 1) * n >= sharing_cost`; else each reader's own
    node takes it over. A chunk of rows shares only what all of its rows read in full. O(pages).
    """
    rows, pages, first_rows = row_indptr.tolist(), page_indptr.tolist(), positions[row_indptr[:-1]].tolist()
    segments = range(len(first_rows))
    tables = [page_ids[pages[i] : pages[i + 1]] for i in segments]
    readers = [np.arange(rows[i], rows[i + 1]) for i in segments]
    shareable = [(first_rows[i] + (len(readers[i]) == 1)) // page_size for i in segments]  # in pages
    align = (group_len(page_size) if exact else page_size) // page_size
    found: list[tuple[int, IntArray, IntArray]] = []
    done = [0] * len(tables)  # pages of each segment that nodes cover

    # What several members share from page `depth` on; they agree on `[0, depth)`.
    agreeing: list[tuple[Iterable[int], int]] = [(segments, 0)]
    while agreeing:
        members, depth = agreeing.pop()
        branches: dict[int, list[int]] = {}
        for i in members:
            if shareable[i] > depth:
                branches.setdefault(int(tables[i][depth]), []).append(i)
        for branch in branches.values():
            if len(branch) == 1:
                continue
            limit = min(shareable[i] for i in branch)
            run = np.stack([tables[i][depth:limit] for i in branch])
            differs = (run != run[0]).any(axis=0)
            agreed = depth + (int(differs.argmax()) if differs.any() else limit - depth)
            start, stop = done[branch[0]], agreed - agreed % align
            if stop > start and (len(branch) - 1) * (stop - start) * page_size >= sharing_cost:
                shared = tables[branch[0]][start:stop]
                found.append((start * page_size, shared, np.concatenate([readers[i] for i in branch])))
                for i in branch:
                    done[i] = stop
            agreeing.append((branch, agreed))
    for i in segments:
        if done[i] < len(tables[i]):
            found.append((done[i] * page_size, tables[i][done[i] :], readers[i]))
    return AttentionPlan.of(found, positions, page_size=page_size, exact=exact)


def _concat(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _indptr(parts: Sequence[IntArray]) -> IntArray:
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)
