"""The kernels that move keys and values: new rows into slots, and pages onto pages in all layers at once.

Know nothing of attention, or of what is in a page.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs"])
def write_pairs(
    k_cache,  # [num_pages + 1, page_size, Hkv, KEY_DIM], out
    v_cache,  # [num_pages + 1, page_size, Hkv, VALUE_DIM], out
    k,  # [T, Hkv, KEY_DIM]
    v,  # [T, Hkv, VALUE_DIM]
    rows,  # [W] int32
    slots,  # [W] int32
    num_pairs,
    k_stride_row,
    k_stride_head,
    v_stride_row,
    v_stride_head,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Program (b, h): head h of the b-th block of (row, slot) pairs, keys and values."""
    pair = tl.program_id(0) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    head = tl.program_id(1)
    is_pair = (pair < num_pairs)[:, None]
    row = tl.load(rows + pair, mask=pair < num_pairs, other=0).to(tl.int64)[:, None]
    slot = tl.load(slots + pair, mask=pair < num_pairs, other=0).to(tl.int64)[:, None]
    to = slot * tl.num_programs(1) + head
    lane = tl.arange(0, BLOCK_KEY)[None, :]
    mask = is_pair & (lane < KEY_DIM)
    tl.store(k_cache + to * KEY_DIM + lane, tl.load(k + row * k_stride_row + head * k_stride_head + lane, mask), mask)
    lane = tl.arange(0, BLOCK_VALUE)[None, :]
    mask = is_pair & (lane < VALUE_DIM)
    tl.store(v_cache + to * VALUE_DIM + lane, tl.load(v + row * v_stride_row + head * v_stride_head + lane, mask), mask)


@triton.jit
def copy_pages(
    caches,  # [C, 3] int64: the addresses of a cache to read and one to write, and their words per page
    pairs,  # [N, 2] int32: source and destination page
    WORD: tl.constexpr,  # an integer type of which a page of every cache is a whole number
    BLOCK: tl.constexpr,
):
    """Program (i, c): the i-th copy in cache c. No page is in both columns, so the order does not matter.

    Either address may be of pinned host memory, which CUDA maps at the same address.
    """
    source, destination = tl.load(pairs + tl.program_id(0) * 2), tl.load(pairs + tl.program_id(0) * 2 + 1)
    cache = tl.load(caches + tl.program_id(1) * 3).to(tl.pointer_type(WORD))
    target = tl.load(caches + tl.program_id(1) * 3 + 1).to(tl.pointer_type(WORD))
    num_words = tl.load(caches + tl.program_id(1) * 3 + 2)
    for first in tl.range(0, num_words, BLOCK):
        word = first + tl.arange(0, BLOCK)
        mask = word < num_words
        tl.store(target + destination * num_words + word, tl.load(cache + source * num_words + word, mask), mask)
