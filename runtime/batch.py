"""The packed input of one forward pass: rows of tokens, where their KV goes, and the page tables they read.

Knows nothing of requests, sampling or tensors: numpy arrays of ids, the same for every model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from radixrt.kernels.plan import AttentionPlan, IntArray, build_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's rows, packed. A row is one position of the step's token trie.

    Rows are grouped into segments; segment s holds the consecutive rows `[row_indptr[s], row_indptr[s + 1])`, at
    consecutive positions of one sequence, and reads through the pages `page_ids[page_indptr[s]:page_indptr[s + 1]]`,
    which cover positions `[0, last position of s]`. A row at position t attends to positions `[0, t]`. In every
    layer all writes come before all reads. A row may be written to several slots (sequences that diverge inside a
    page), `slot = page * page_size + offset`.
    """

    token_ids: IntArray  # [T]
    positions: IntArray  # [T]
    write_rows: IntArray  # [W] row of each write
    write_slots: IntArray  # [W] slot of each write; distinct
    row_indptr: IntArray  # [S + 1]
    page_indptr: IntArray  # [S + 1]
    page_ids: IntArray  # [page_indptr[-1]]
    namespaces: tuple[str, ...]  # [S]
    logit_rows: IntArray  # [R] rows whose logits are wanted, ascending
    scored_rows: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # [Q] ascending, of which is wanted
    scored_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # [Q] this token's log-probability

    @classmethod
    def side_by_side(cls, token_ids: IntArray, *, start: int, tables: IntArray, page_size: int) -> Batch:
        """Positions `[start, start + n)` of several sequences, each over pages of its own; logits of each last row.

        `token_ids` [S, n], `tables` [S, pages up to the last position].
        """
        count, length = token_ids.shape
        positions = np.arange(start, start + length)
        return cls(
            token_ids=token_ids.reshape(-1),
            positions=np.tile(positions, count),
            write_rows=np.arange(count * length),
            write_slots=(tables[:, positions // page_size] * page_size + positions % page_size).reshape(-1),
            row_indptr=np.arange(count + 1) * length,
            page_indptr=np.arange(count + 1) * tables.shape[1],
            page_ids=tables.reshape(-1),
            namespaces=("",) * count,
            logit_rows=np.arange(1, count + 1) * length - 1,
        )

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_segments(self) -> int:
        return len(self.row_indptr) - 1

    def plan(self, *, page_size: int, exact: bool, sharing_cost: int) -> AttentionPlan:
        """What its attention reads, shared runs of pages as nodes of their own where that pays: see `build_plan`."""
        return build_plan(
            self.positions,
            self.row_indptr,
            self.page_indptr,
            self.page_ids,
            page_size=page_size,
            exact=exact,
            sharing_cost=sharing_cost,
        )
