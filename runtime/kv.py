"""The KV pool: one pair of tensors per layer, pages of slots. Knows nothing of who owns a page or what is in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixrt.kernels.cpu import torch_paged
from radixrt.kernels.plan import IntArray


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
    """One layer's cache."""

    k: torch.Tensor  # [num_pages + 1, page_size, num_heads, key_dim]
    v: torch.Tensor  # [num_pages + 1, page_size, num_heads, value_dim]


class KVPool:
    """Pages `0..num_pages` of `page_size` slots in every layer; page 0 is the padding sink and never read.

    A layer's memory is made zero at its first use, and the system backs a page of it with memory only when touched.
    """

    def __init__(self, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.layers: dict[int, LayerKV] = {}

    def layer(self, index: int, shape: LayerShape) -> LayerKV:
        """The cache of layer `index`, made on first use."""
        if index not in self.layers:
            size = (self.num_pages + 1, self.page_size, shape.num_heads)
            self.layers[index] = LayerKV(
                torch.zeros(*size, shape.key_dim, dtype=self.dtype, device=self.device),
                torch.zeros(*size, shape.value_dim, dtype=self.dtype, device=self.device),
            )
        return self.layers[index]

    def shapes(self) -> dict[int, LayerShape]:
        """The layers used so far."""
        return {i: LayerShape(kv.k.shape[2], kv.k.shape[3], kv.v.shape[3]) for i, kv in sorted(self.layers.items())}

    def copy_pages(self, src: IntArray, dst: IntArray) -> None:
        """Make pages `dst[i]` equal to `src[i]` in all layers; no page is in both lists."""
        source, destination = torch.tensor(src, device=self.device), torch.tensor(dst, device=self.device)
        for kv in self.layers.values():
            torch_paged.copy_pages(kv.k, source, destination)
            torch_paged.copy_pages(kv.v, source, destination)

    def poison_slots(self, slots: IntArray) -> None:
        """Fill these slots with NaN in all layers, so that any result that reads them shows it."""
        index = torch.tensor(slots, device=self.device)
        for kv in self.layers.values():
            for cache in (kv.k, kv.v):
                cache.view(-1, *cache.shape[2:]).index_fill_(0, index, torch.nan)
