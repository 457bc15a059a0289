"""The seam between whoever has a step to attend and whatever computes it: what an attention backend promises.

Knows nothing of models; plan.py says what a step reads, and reference.py is the oracle of every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .plan import AttentionPlan, IntArray


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per token: `num_heads` keys of `key_dim` and values of `value_dim`."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def token_width(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's cache, page first (`[num_pages + 1, ...]`), in the layout of the backend that made it."""

    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def by_slot(
        cls, num_pages: int, page_size: int, shape: LayerShape, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        """Zeros in the plain layout `[num_pages + 1, page_size, num_heads, dim]`: a slot is one of the first two."""
        size = (num_pages + 1, page_size, shape.num_heads)
        k, v = (torch.zeros(*size, dim, dtype=dtype, device=device) for dim in (shape.key_dim, shape.value_dim))
        return cls(k, v)

    def fill_slots(self, slots: IntArray, value: float) -> None:
        """Fill these slots of a cache in the plain layout."""
        for cache in (self.k, self.v):
            cache.flatten(0, 1).index_fill_(0, torch.tensor(slots, device=cache.device), value)


class AttentionBackend(Protocol):
    """Paged attention over caches that it lays out itself; slot = page * page_size + offset."""

    name: str
    sharing_cost: int  # for `build_plan`: what a shared node must save, in tokens read once less

    def inexact(self, dtype: torch.dtype, page_size: int, shape: LayerShape, group: int) -> str | None:
        """Why an exact plan may not give exact results here, for `group` query heads a KV head; None where it does."""

    def allocate(
        self, num_pages: int, page_size: int, shape: LayerShape, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        """A layer's cache of zeros, pages `0..num_pages`; the system backs it with memory when it is touched."""

    def prepare(self, plan: AttentionPlan, write_rows: IntArray, write_slots: IntArray) -> Any:
        """What `attend` needs of a step, made once and shared by all layers. Row `write_rows[i]` goes to slot
        `write_slots[i]`; slots are distinct.
        """

    def attend(
        self,
        q: torch.Tensor,  # [T, H, D]; only the last dimension need be contiguous
        k: torch.Tensor,  # [T, Hkv, D]
        v: torch.Tensor,  # [T, Hkv, Dv]
        kv: LayerKV,
        step: Any,  # of `prepare`
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Write the step's keys and values, then `reference.attend` through the plan: `[T, H, Dv]` in the dtype of q.

        Sums are kept in float32, or float64 for float64.
        """

    def copy_pages(self, source: Sequence[LayerKV], target: Sequence[LayerKV], src: IntArray, dst: IntArray) -> None:
        """Make page `dst[i]` of `target` equal to page `src[i]` of `source` in every layer.

        They are the same caches, and no page is in both lists, or one of them is like the other but in host memory
        (pinned where the device is CUDA; then the copies are queued on the current stream).
        """

    def fill_slots(self, layers: Sequence[LayerKV], slots: IntArray, value: float) -> None:
        """Set every number of these slots, in every layer."""

    def unpack(self, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of both caches as `[num_pages + 1, page_size, Hkv, D]` and `[..., Dv]`: the oracle's layout."""
