"""The oracle of every kernel: attention, KV writes and page copies as plain loops in float64.

Knows nothing of speed; a kernel is right when it agrees with this file within its dtype's rounding.
"""

from __future__ import annotations

import torch


def attend(
    q: torch.Tensor,  # [T, H, D]
    k_cache: torch.Tensor,  # [num_pages + 1, page_size, Hkv, D]
    v_cache: torch.Tensor,  # [num_pages + 1, page_size, Hkv, Dv]
    row_indptr: torch.Tensor,  # [S + 1] rows of segment s: [row_indptr[s], row_indptr[s + 1])
    page_indptr: torch.Tensor,  # [S + 1]
    page_ids: torch.Tensor,  # [page_indptr[-1]] pages of segment s, in order of position
    starts: torch.Tensor,  # [S] position of each segment's first row
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of each row over its segment's paged KV, `[T, H, Dv]` in float64.

    A row at position t reads positions `[0, t]`, or `(t - window, t]`; query head h reads KV head `h // (H / Hkv)`.
    `softcap` bounds a score s to `softcap * tanh(s / softcap)` before the softmax. Nothing else is read: other slots
    may hold NaN.
    """
    page_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros(q.shape[0], q.shape[1], v_cache.shape[3], dtype=torch.float64)
    for segment in range(len(starts)):
        pages = page_ids[page_indptr[segment] : page_indptr[segment + 1]]
        first_row = int(row_indptr[segment])
        for row in range(first_row, int(row_indptr[segment + 1])):
            position = int(starts[segment]) + row - first_row
            low = 0 if window is None else max(0, position - window + 1)
            read = torch.arange(low, position + 1)
            where = pages[read // page_size], read % page_size
            for head in range(q.shape[1]):
                k, v = (cache[*where, head // group].double() for cache in (k_cache, v_cache))
                scores = k @ q[row, head].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[row, head] = torch.softmax(scores, dim=0) @ v
    return out


def write_kv(
    k_cache: torch.Tensor,  # [num_pages + 1, page_size, Hkv, D]
    v_cache: torch.Tensor,  # [num_pages + 1, page_size, Hkv, Dv]
    k: torch.Tensor,  # [T, Hkv, D]
    v: torch.Tensor,  # [T, Hkv, Dv]
    rows: torch.Tensor,  # [W]
    slots: torch.Tensor,  # [W] distinct; slot = page * page_size + offset
) -> None:
    """Put `k[rows[i]]` and `v[rows[i]]` into slot `slots[i]`, for each i."""
    page_size = k_cache.shape[1]
    for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
        k_cache[slot // page_size, slot % page_size] = k[row]
        v_cache[slot // page_size, slot % page_size] = v[row]


def copy_pages(cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Make page `dst[i]` of `cache` equal to page `src[i]`, for each i; no page is in both."""
    for source, destination in zip(src.tolist(), dst.tolist(), strict=True):
        cache[destination] = cache[source]
