"""The two attention kernels: a tile of query rows over a run of pages, and the merge of what a row's runs gave.

Know nothing of plans or of which launches make a step: schedule.py cuts the work, backend.py launches it.

One kernel is decode, split-KV, extend and the tree form: the query heads of one KV head, for all rows of a node, are
packed as the rows of one product, which needs 16 of them at least. A tile leaves (max, sum, output), which merge
exactly (arXiv 1805.02867). Scores are in units of log 2, because the hardware's exponential is exp2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import schedule

ITEM_LEN = tl.constexpr(schedule.ITEM_LEN)
NOTHING = tl.constexpr(-1e30)  # the maximum of an empty set: finite, so that the difference of two is not NaN


@triton.jit(do_not_specialize=["window"])
def attend_tiles(
    partials,  # [P, H, VALUE_DIM] float32, out
    stats,  # [P, H, 2] float32, out: maximum and sum
    q,  # [T, H, KEY_DIM]
    k_cache,  # [num_pages + 1, PAGE_SIZE, Hkv, KEY_DIM]
    v_cache,  # [num_pages + 1, PAGE_SIZE, Hkv, VALUE_DIM]
    items,  # [I, ITEM_LEN] int32
    page_ids,  # int32
    row_ids,  # [E] int32: the rows of each node
    entry_partials,  # [E] int32: a row's partial of a node's first chunk
    positions,  # [T] int32
    q_stride_row,
    q_stride_head,
    scale,  # a score is scale * q.k, or cap * tanh of that half
    cap,  # float or None
    window,  # int or None
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,  # the dims, padded to powers of two
    BLOCK_VALUE: tl.constexpr,
    UPCAST: tl.constexpr,  # for the interpreter, whose product of bfloat16 multiplies bit patterns
):
    """Program (i, h): item i's packed rows of KV head h, over the item's positions. A row that reads none of them
    leaves (NOTHING, 0, 0).
    """
    item = items + tl.program_id(0) * ITEM_LEN
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    first_page, start, stop, chunk = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    first_entry, first_packed, num_packed = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)

    packed = first_packed + tl.arange(0, BLOCK_ROWS)
    is_row = packed < num_packed
    entry = first_entry + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    row = tl.load(row_ids + entry, mask=is_row, other=0)
    position = tl.load(positions + row, mask=is_row, other=-1)
    key_lane, value_lane = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    q_at = q + (row.to(tl.int64) * q_stride_row + head * q_stride_head)[:, None] + key_lane
    queries = tl.load(q_at, mask=is_row[:, None] & (key_lane < KEY_DIM), other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)

    stop = tl.minimum(stop, tl.max(position) + 1)  # what lies behind the last row may hold NaN
    last = tl.minimum(position, stop - 1)
    low = start
    if window is not None:
        behind = tl.min(tl.where(is_row, position, 2147483647)) - window + 1 - start
        low += tl.maximum(behind, 0) // BLOCK_TOKENS * BLOCK_TOKENS

    peak = tl.full([BLOCK_ROWS], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    out = tl.zeros([BLOCK_ROWS, BLOCK_VALUE], tl.float32)
    for block in tl.range(low, stop, BLOCK_TOKENS):
        token = block + tl.arange(0, BLOCK_TOKENS)
        is_token = token < stop
        page = tl.load(page_ids + first_page + (token - start) // PAGE_SIZE, mask=is_token, other=0)
        slot = (page.to(tl.int64) * PAGE_SIZE + token % PAGE_SIZE) * num_kv_heads + kv_head
        k_at = k_cache + (slot * KEY_DIM)[None, :] + key_lane[:, None]
        keys = tl.load(k_at, mask=is_token[None, :] & (key_lane < KEY_DIM)[:, None], other=0.0)
        v_at = v_cache + (slot * VALUE_DIM)[:, None] + value_lane
        values = tl.load(v_at, mask=is_token[:, None] & (value_lane < VALUE_DIM), other=0.0)
        scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * scale
        if cap is not None:
            scores = cap - 2 * cap / (tl.exp2(scores) + 1)
        reads = token <= last[:, None]
        if window is not None:
            reads &= token > position[:, None] - window
        scores = tl.where(reads, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        decay = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        weights = weights.to(values.dtype)
        if UPCAST:
            weights, values = weights.to(tl.float32), values.to(tl.float32)
        out = tl.dot(weights, values, out * decay[:, None], input_precision="ieee")
        peak = new_peak

    partial = tl.load(entry_partials + entry, mask=is_row, other=0) + chunk
    at = partial.to(tl.int64) * (num_kv_heads * GROUP) + head
    tl.store(stats + at * 2, peak, mask=is_row)
    tl.store(stats + at * 2 + 1, total, mask=is_row)
    mask = is_row[:, None] & (value_lane < VALUE_DIM)
    tl.store(partials + at[:, None] * VALUE_DIM + value_lane, out, mask=mask)


@triton.jit
def merge_partials(
    out,  # [T, H, VALUE_DIM]
    partials,  # [P, H, VALUE_DIM] float32
    stats,  # [P, H, 2] float32
    partial_indptr,  # [T + 1] int32: row t's partials, in order of position
    VALUE_DIM: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Program (t, h): the fold of row t's partials of head h, a block of them at a time, in order of position."""
    row, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    stop = tl.load(partial_indptr + row + 1)
    lane = tl.arange(0, BLOCK_VALUE)
    peak = tl.full([1], NOTHING, tl.float32)
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([BLOCK_VALUE], tl.float32)
    for first in tl.range(tl.load(partial_indptr + row), stop, BLOCK_PARTIALS):
        partial = first + tl.arange(0, BLOCK_PARTIALS)
        at = partial.to(tl.int64) * num_heads + head
        peaks = tl.load(stats + at * 2, mask=partial < stop, other=NOTHING)
        totals = tl.load(stats + at * 2 + 1, mask=partial < stop, other=0.0)
        mask = (partial < stop)[:, None] & (lane < VALUE_DIM)
        values = tl.load(partials + at[:, None] * VALUE_DIM + lane, mask=mask, other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0, keep_dims=True))
        decay, weights = tl.exp2(peak - new_peak), tl.exp2(peaks - new_peak)
        total = total * decay + tl.sum(totals * weights, axis=0, keep_dims=True)
        merged = merged * decay + tl.sum(values * weights[:, None], axis=0)
        peak = new_peak
    at = (row.to(tl.int64) * num_heads + head) * VALUE_DIM
    tl.store(out + at + lane, (merged / total).to(out.dtype.element_ty), mask=lane < VALUE_DIM)
