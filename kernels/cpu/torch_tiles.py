"""An exact step's attention cut into batches of tiles, one fixed shape each: which rows, which slots, folded where.

Knows positions, page tables and the shapes it may use: no keys, no values, no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..plan import AttentionPlan, IntArray, group_len

_SHORTEST = 32  # positions of the shortest tile
_BATCH_TOKENS = 8192  # bounds what a batch gathers: 32 tiles of a whole group, some 12 MB with 3 heads of 64
_BATCH_ROWS = 512  # bounds its scores: 5 MB with 9 query heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """b tiles of n rows over L positions of one group each; a spare row of a tile repeats its last."""

    rows: torch.Tensor  # [b, n]
    slots: torch.Tensor  # [b, L]; past what the tile's rows read, its first slot again: other memory may hold NaN
    unread: torch.Tensor | None  # [b, 1, n, 1, L] bool; None if every row reads all
    users: torch.Tensor  # [U] the distinct rows
    depth: int  # the most tiles that one row is in
    picks: torch.Tensor | None  # [P] the tiles' rows, counted [0, b * n), that are not spare; None if all are in order
    places: torch.Tensor | None  # [P] and where they go in [depth, U], counted [0, depth * U)


def lengths(page_size: int) -> tuple[int, ...]:
    """Positions of a tile, by the last position of the group that a row reads: the least of these that hold it."""
    longest = -(-group_len(page_size) // 16) * 16
    shorter = [_SHORTEST << i for i in range(longest.bit_length()) if _SHORTEST << i < longest]
    return (*shorter, longest)


def batches(plan: AttentionPlan, window: int | None, row_counts: Sequence[int]) -> Iterator[Batch]:
    """The step's batches, in an order in which each row's groups ascend. Tiles have one of `row_counts` (ascending).

    A group that a row reads nothing of is in none of its tiles. O(rows * groups).
    """
    size, counts, sizes = group_len(plan.page_size), np.array(row_counts), np.array(lengths(plan.page_size))
    node = np.repeat(np.arange(plan.num_nodes), np.diff(plan.row_indptr))
    position = plan.positions[plan.row_ids]
    stop = (plan.starts + np.diff(plan.page_indptr) * plan.page_size)[node]
    low = plan.starts[node] if window is None else np.maximum(plan.starts[node], position - window + 1)
    reads, nth = _expand(np.maximum(np.minimum(position, stop - 1) // size - low // size + 1, 0))
    node, row, position, group = node[reads], plan.row_ids[reads], position[reads], (low // size)[reads] + nth
    length = sizes[np.searchsorted(sizes, np.minimum(position + 1 - group * size, size))]
    # Only a row's last group is shorter than a whole one: longer tiles first, then by group, keeps each row's order.
    order = np.lexsort((row, node, group, -length))
    node, row, position, group, length = (array[order] for array in (node, row, position, group, length))
    first, used = _runs((length, group, node), counts[-1])
    num_rows = counts[np.searchsorted(counts, used)]
    order = np.lexsort((num_rows, group[first], -length[first]))
    first, used, num_rows, length = first[order], used[order], num_rows[order], length[first[order]]
    most = np.maximum(1, np.minimum(_BATCH_TOKENS // length, _BATCH_ROWS // num_rows))
    for start, num_tiles in zip(*_runs((length, num_rows), most), strict=True):
        tiles = slice(start, start + num_tiles)
        item = first[tiles, None] + np.minimum(np.arange(num_rows[start]), used[tiles, None] - 1)
        real = np.arange(num_rows[start]) < used[tiles, None]
        offsets = np.arange(length[start])
        span = group[first[tiles], None] * size + offsets
        last = position[item][..., None]
        unread = (span[:, None] > last) | (offsets >= size)
        if window is not None:
            unread |= span[:, None] <= last - window
        read = np.where((span <= last.max(axis=1)) & (offsets < size), span, span[:, :1])
        yield _batch(row[item], real, _slots(plan, node[first[tiles]], read), unread)


def _slots(plan: AttentionPlan, nodes: IntArray, positions: IntArray) -> IntArray:
    """Slots of `positions[i]` in node `nodes[i]`."""
    page = plan.page_indptr[nodes, None] + (positions - plan.starts[nodes, None]) // plan.page_size
    return plan.page_ids[page] * plan.page_size + positions % plan.page_size


def _batch(rows: IntArray, real: np.ndarray, slots: IntArray, unread: np.ndarray) -> Batch:
    users, user, num_tiles = np.unique(rows[real], return_inverse=True, return_counts=True)
    nth = np.empty_like(user)
    nth[np.argsort(user, kind="stable")] = _expand(num_tiles)[1]
    depth = int(num_tiles.max())
    places = nth * len(users) + user
    in_order = np.array_equal(places, np.arange(rows.size)) and rows.size == depth * len(users)
    return Batch(
        rows=torch.from_numpy(rows),
        slots=torch.from_numpy(slots),
        unread=torch.from_numpy(unread)[:, None, :, None] if unread.any() else None,
        users=torch.from_numpy(users),
        depth=depth,
        picks=None if in_order else torch.from_numpy(np.flatnonzero(real)),
        places=None if in_order else torch.from_numpy(places),
    )


def _expand(counts: IntArray) -> tuple[IntArray, IntArray]:
    """`counts[i]` items for each i: the i of each, and its number among them."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _runs(keys: tuple[IntArray, ...], most: IntArray | int) -> tuple[IntArray, IntArray]:
    """Start and length of the runs in which all keys are equal, cut into pieces of at most `most` (equal in a run)."""
    new = np.ones(len(keys[0]), dtype=bool)
    new[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    starts = np.flatnonzero(new)
    nth = np.arange(len(new)) - np.repeat(starts, np.diff(np.append(starts, len(new))))
    starts = np.flatnonzero(nth % most == 0)
    return starts, np.diff(np.append(starts, len(new)))
