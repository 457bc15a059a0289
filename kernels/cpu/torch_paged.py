"""Paged attention on the CPU in plain torch: gather each job's keys once, attend densely, merge by log-sum-exp.

Knows nothing of models or of how jobs are chosen (see plan.py). Needs no compiler; any floating dtype.

Partial results over disjoint key sets merge exactly given each one's log-sum-exp (Milakov and Gimelshein, "Online
normalizer calculation for softmax", arXiv 1805.02867; over shared prefixes: Hydragen, arXiv 2402.05099).
"""

from __future__ import annotations

import torch

from .plan import Job, Plan

_SCORE_ROWS = 256  # query rows of one softcapped product: bounds its score matrix


def attend(
    q: torch.Tensor,  # [T, H, D]
    k_cache: torch.Tensor,  # [num_pages + 1, page_size, Hkv, D]
    v_cache: torch.Tensor,  # [num_pages + 1, page_size, Hkv, Dv]
    plan: Plan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """`reference.attend` in the dtype of `q`, `[T, H, Dv]`; sums are kept in float32, or float64 for float64.

    The query heads of one KV head are packed as rows of one product, so a key is read once for all of them, and once
    for all rows of a job.
    """
    num_heads, num_kv_heads, value_dim = q.shape[1], k_cache.shape[2], v_cache.shape[3]
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty(q.shape[0], num_heads, value_dim, dtype=accumulate)
    lse = torch.empty(q.shape[0], num_heads, dtype=accumulate)
    for job in plan.jobs(window):
        groups, num_rows = job.rows.shape
        rows = job.rows.view(-1)
        k = _gather(k_cache, job.slots, plan.scratch("k", num_kv_heads * k_cache.shape[3], q.dtype))
        v = _gather(v_cache, job.slots, plan.scratch("v", num_kv_heads * value_dim, q.dtype))
        packed = q.index_select(0, rows).view(groups, num_rows, num_kv_heads, -1, q.shape[2]).permute(0, 2, 3, 1, 4)
        partial, weight = _partial(packed, k, v, job, scale=scale, softcap=softcap)
        partial = partial.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, value_dim).to(accumulate)
        weight = weight.permute(0, 3, 1, 2).reshape(-1, num_heads).to(accumulate)
        if not job.fresh:
            held = lse.index_select(0, rows)
            share = torch.sigmoid(weight - held)[..., None]
            partial = torch.lerp(out.index_select(0, rows), partial, share)
            weight = torch.logaddexp(held, weight)
        out.index_copy_(0, rows, partial)
        lse.index_copy_(0, rows, weight)
    return out.to(q.dtype)


def _gather(cache: torch.Tensor, slots: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """The slots' vectors as `[b, Hkv, L, D]`, in `scratch`."""
    groups, length = slots.shape
    flat = cache.view(-1, scratch.shape[1])
    gathered = torch.index_select(flat, 0, slots.view(-1), out=scratch[: groups * length])
    return gathered.view(groups, length, cache.shape[2], cache.shape[3]).transpose(1, 2)


def _partial(
    q: torch.Tensor,  # [b, Hkv, G, n, D]
    k: torch.Tensor,  # [b, Hkv, L, D]
    v: torch.Tensor,  # [b, Hkv, L, Dv]
    job: Job,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over this job's keys alone: the result `[b, Hkv, G, n, Dv]` and its log-sum-exp `[b, Hkv, G, n]`."""
    groups, num_kv_heads, group, num_rows, _ = q.shape
    if job.causal or (job.mask is not None and num_rows > 1):  # rows differ: KV heads as batch, query heads as heads
        shape = (num_kv_heads, group, -1, -1)
        q, k, v = q[0], k[0][:, None].expand(shape), v[0][:, None].expand(shape)
    else:
        q = q.reshape(groups, num_kv_heads, group * num_rows, -1)
    if softcap is None and k.shape[3] == v.shape[3]:
        mask = None if job.mask is None else job.mask.to(q.dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, job.causal, attn_mask=mask, scale=scale
        )
    else:
        out, lse = _explicit(q, k, v, job, scale=scale, softcap=softcap)
    return (
        out.reshape(groups, num_kv_heads, group, num_rows, -1),
        lse.reshape(groups, num_kv_heads, group, num_rows),
    )


def _explicit(
    q: torch.Tensor,  # [B, heads, M, D]
    k: torch.Tensor,  # [B, heads, L, D]
    v: torch.Tensor,  # [B, heads, L, Dv]
    job: Job,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch's flash attention does not offer: softcap, and values of another width than keys."""
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    columns = torch.arange(k.shape[2])
    outs, lses = [], []
    for start in range(0, q.shape[2], _SCORE_ROWS):
        rows = q[:, :, start : start + _SCORE_ROWS]
        scores = torch.matmul(rows, k.transpose(2, 3)).to(accumulate) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if job.causal:
            scores = scores.masked_fill(columns > columns[start : start + _SCORE_ROWS, None], -torch.inf)
        elif job.mask is not None:
            scores = scores + (job.mask if job.mask.shape[2] == 1 else job.mask[:, :, start : start + _SCORE_ROWS])
        lse = torch.logsumexp(scores, dim=3)
        weights = torch.exp(scores - lse[..., None]).to(v.dtype)
        outs.append(torch.matmul(weights, v))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def write_kv(
    k_cache: torch.Tensor,  # [num_pages + 1, page_size, Hkv, D]
    v_cache: torch.Tensor,  # [num_pages + 1, page_size, Hkv, Dv]
    k: torch.Tensor,  # [T, Hkv, D]
    v: torch.Tensor,  # [T, Hkv, Dv]
    rows: torch.Tensor | None,  # [W], or None for all rows in order
    slots: torch.Tensor,  # [W]
) -> None:
    """`reference.write_kv`."""
    for cache, new in ((k_cache, k), (v_cache, v)):
        source = new if rows is None else new.index_select(0, rows)
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, source)


def copy_pages(cache: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """`reference.copy_pages`."""
    cache.index_copy_(0, dst, cache.index_select(0, src))
