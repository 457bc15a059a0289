"""How a plan becomes launches: work items of equal size, and where each row's partial results lie.

Knows nothing of tensors, dtypes or devices: numpy arrays in, numpy arrays out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import numpy as np

from ..plan import AttentionPlan, IntArray

ITEM_LEN = 8  # fields of an item: page index, start, stop, chunk, entry, first packed row, packed rows, unused
MIN_CHUNK_LEN = 256  # tokens; below, a partial's own traffic and launch weigh more than what a split gains


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One step's work for layers of one kind. A row's partials are consecutive, in order of position."""

    items: tuple[IntArray, ...]  # [I, ITEM_LEN] for each height of tile
    entry_partials: IntArray  # [E] for each (node, row) of the plan: the row's partial of the node's first chunk
    partial_indptr: IntArray  # [T + 1]


def build_schedule(
    plan: AttentionPlan,
    *,
    heights: tuple[int, ...],
    block_tokens: int,
    group: int,
    num_kv_heads: int,
    window: int | None,
    num_programs: int,
) -> Schedule:
    """Cut each node into chunks of positions and tiles of packed rows, `group` of them for each of the node's rows.

    A node gets the least of `heights` (ascending) that holds its packed rows, or else several tiles of the greatest.
    All chunks of a step have one length, whole pages and whole blocks of tokens: as long as `num_programs` programs
    allow, so that few partials are written. O(items + entries).
    """
    lengths = np.diff(plan.page_indptr) * plan.page_size
    num_packed = np.diff(plan.row_indptr) * group
    height = np.array(heights)[np.searchsorted(heights[:-1], num_packed)]
    num_tiles = -(-num_packed // height)
    read = lengths if window is None else np.minimum(lengths, window)
    chunk_len = max(MIN_CHUNK_LEN, int((num_tiles * read).sum()) * num_kv_heads // num_programs)
    chunk_len = _round_up(chunk_len, lcm(plan.page_size, block_tokens))
    num_chunks = -(-lengths // chunk_len)

    entry_chunks = np.repeat(num_chunks, np.diff(plan.row_indptr))
    by_row = np.argsort(plan.row_ids, kind="stable")
    entry_partials = np.empty_like(entry_chunks)
    entry_partials[by_row] = np.cumsum(entry_chunks[by_row]) - entry_chunks[by_row]
    per_row = np.bincount(plan.row_ids, weights=entry_chunks, minlength=plan.num_rows).astype(np.int64)

    def items(nodes: IntArray) -> IntArray:
        """The tiles of one chunk stand together: they read the same pages."""
        per_node = (num_tiles * num_chunks)[nodes]
        node = np.repeat(nodes, per_node)
        index = np.arange(len(node)) - np.repeat(np.cumsum(per_node) - per_node, per_node)
        chunk, tile = np.divmod(index, num_tiles[node])
        start = plan.starts[node] + chunk * chunk_len
        stop = np.minimum(start + chunk_len, (plan.starts + lengths)[node])
        first_page = plan.page_indptr[node] + chunk * (chunk_len // plan.page_size)
        fields = (first_page, start, stop, chunk, plan.row_indptr[node], tile * height[node], num_packed[node])
        return np.stack([*fields, np.zeros_like(node)], axis=1)

    return Schedule(
        items=tuple(items(np.flatnonzero(height == rows)) for rows in heights),
        entry_partials=entry_partials,
        partial_indptr=np.concatenate([[0], np.cumsum(per_row)]),
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
