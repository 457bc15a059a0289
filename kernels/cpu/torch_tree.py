"""Fast attention in plain torch: gather each job's keys once, attend densely, merge by log-sum-exp.

Knows nothing of models or of how jobs are chosen (see torch_jobs.py). Needs no compiler; any floating dtype.

Partial results over disjoint key sets merge exactly given each one's log-sum-exp (Milakov and Gimelshein, "Online
normalizer calculation for softmax", arXiv 1805.02867; over shared prefixes: Hydragen, arXiv 2402.05099).
"""

from __future__ import annotations

import torch

from ..backend import LayerKV
from ..plan import AttentionPlan
from .scratch import Scratch
from .torch_jobs import Job, jobs

_SCORE_ROWS = 256  # query rows of one softcapped product: bounds its score matrix
# From so many query rows per key on, bfloat16 attention is slower than float32's with the widening of the keys: 0.9 at
# 24 rows, 1.5 at 96, 1.7 at 768 (2,048 keys, 3 heads of 64, one thread of a Xeon with AVX512-BF16 and without AMX).
_WIDE_ROWS = 32


class TreeAttention:
    """One step's attention, prepared once for all layers."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self._jobs: dict[int | None, list[Job]] = {}
        self._scratch = Scratch()

    def jobs(self, window: int | None) -> list[Job]:
        """The jobs of a layer with this sliding window; one that reaches past every row's start is none."""
        if window is not None and window > self._plan.positions.max(initial=0):
            window = None
        if window not in self._jobs:
            self._jobs[window] = list(jobs(self._plan, window))
        return self._jobs[window]

    def attend(
        self, q: torch.Tensor, kv: LayerKV, *, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """`AttentionBackend.attend` after its writes.

        The query heads of one KV head are packed as rows of one product, so a key is read once for all of them, and
        once for all rows of a job.
        """
        num_rows, num_heads, value_dim = q.shape[0], q.shape[1], kv.v.shape[3]
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.zeros(num_rows, num_heads, value_dim, dtype=wide)
        lse = torch.full((num_rows, num_heads), -torch.inf, dtype=wide)
        for job in self.jobs(window):
            (groups, per_group), rows = job.rows.shape, job.rows.view(-1)
            dtype = wide if per_group * num_heads >= _WIDE_ROWS * kv.k.shape[2] else q.dtype
            k, v = self._gather("k", kv.k, job.slots, dtype), self._gather("v", kv.v, job.slots, dtype)
            packed = q.index_select(0, rows).to(dtype).view(groups, per_group, kv.k.shape[2], -1, q.shape[2])
            partial, weight = _partial(packed.permute(0, 2, 3, 1, 4), k, v, job, scale=scale, softcap=softcap)
            partial = partial.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, value_dim).to(wide)
            weight = weight.permute(0, 3, 1, 2).reshape(-1, num_heads).to(wide)
            held = lse.index_select(0, rows)
            share = torch.sigmoid(weight - held)[..., None]
            out.index_copy_(0, rows, torch.lerp(out.index_select(0, rows), partial, share))
            lse.index_copy_(0, rows, torch.logaddexp(held, weight))
        return out.to(q.dtype)

    def _gather(self, name: str, cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The slots' vectors as `[b, Hkv, L, D]`, in scratch memory."""
        gathered = self._scratch.gather(name, cache.view(-1, cache.shape[2] * cache.shape[3]), slots.view(-1), dtype)
        return gathered.view(*slots.shape, *cache.shape[2:]).transpose(1, 2)


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
