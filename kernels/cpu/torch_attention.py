"""The attention backend that needs no compiler: plain torch on the CPU, any floating dtype, page size and head width.

Knows nothing of models. An exact plan runs in torch_exact.py, any other in torch_tree.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..backend import LayerKV, LayerShape
from ..plan import AttentionPlan, IntArray
from .torch_exact import ExactAttention, exact_here
from .torch_tree import TreeAttention


@dataclass(frozen=True, slots=True)
class _Step:
    attention: ExactAttention | TreeAttention
    write_rows: torch.Tensor | None  # [W]; None for all rows in order
    write_slots: torch.Tensor  # [W]


class TorchAttention:
    """`AttentionBackend` over caches `[num_pages + 1, page_size, num_heads, dim]`."""

    name = "torch"
    # Swept over 2 to 32 readers and 256 to 2,048 tokens (9/3/64, one thread of a Xeon): sharing pays from 900 tokens
    # saved in float32 and 1,900 in bfloat16, in exact plans from the least there is, one group of 256.
    sharing_cost = 1024

    def inexact(self, dtype: torch.dtype, page_size: int, shape: LayerShape, group: int) -> str | None:
        exact = exact_here(dtype, group, shape.key_dim, shape.value_dim, page_size)
        return None if exact else "torch's products of single tiles depend on their batch on this machine"

    def allocate(
        self, num_pages: int, page_size: int, shape: LayerShape, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        return LayerKV.by_slot(num_pages, page_size, shape, dtype, device)

    def prepare(self, plan: AttentionPlan, write_rows: IntArray, write_slots: IntArray) -> _Step:
        in_order = np.array_equal(write_rows, np.arange(plan.num_rows))
        return _Step(
            ExactAttention(plan) if plan.exact else TreeAttention(plan),
            None if in_order else torch.from_numpy(write_rows),
            torch.from_numpy(write_slots),
        )

    def attend(
        self,
        q: torch.Tensor,  # [T, H, D]
        k: torch.Tensor,  # [T, Hkv, D]
        v: torch.Tensor,  # [T, Hkv, Dv]
        kv: LayerKV,
        step: _Step,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        for cache, new in ((kv.k, k), (kv.v, v)):
            source = new if step.write_rows is None else new.index_select(0, step.write_rows)
            _by_slot(cache).index_copy_(0, step.write_slots, source)
        return step.attention.attend(q, kv, scale=scale, window=window, softcap=softcap)

    def copy_pages(self, source: Sequence[LayerKV], target: Sequence[LayerKV], src: IntArray, dst: IntArray) -> None:
        read, written = torch.from_numpy(src), torch.from_numpy(dst)
        for ours, theirs in zip(source, target, strict=True):
            for cache, other in ((ours.k, theirs.k), (ours.v, theirs.v)):
                other.index_copy_(0, written, cache.index_select(0, read))

    def fill_slots(self, layers: Sequence[LayerKV], slots: IntArray, value: float) -> None:
        for kv in layers:
            kv.fill_slots(slots, value)

    def unpack(self, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        return kv.k.clone(), kv.v.clone()


def _by_slot(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(-1, *cache.shape[2:])
