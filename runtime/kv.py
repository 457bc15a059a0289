"""The KV pool: one cache per layer, in the layout of the backend that attends to it.

Knows nothing of who owns a page or what is in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from radixrt.kernels.backend import AttentionBackend, LayerKV, LayerShape
from radixrt.kernels.plan import IntArray

from .fences import CudaFence, Fence, Passed


class KVPool:
    """Pages `0..num_pages` of `page_size` slots in every layer; page 0 is the padding sink and never read.

    Pages `num_pages + 1 .. num_pages + num_host_pages` lie in host memory, pinned where the device is CUDA: page p is
    the p - num_pages-th of a second cache of the same layout.

    A layer's memory is made zero at its first use, and the system backs a page of it with memory only when touched.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_host_pages: int = 0,
    ) -> None:
        self.backend = backend
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.num_host_pages = num_host_pages
        self.shapes: dict[int, LayerShape] = {}
        self._layers: dict[int, LayerKV] = {}
        self._host_layers: dict[int, LayerKV] = {}
        self._stream: Any = None  # for copies to and from host memory

    def layer(self, index: int, shape: LayerShape) -> LayerKV:
        """The cache of layer `index`, made on first use."""
        if index not in self._layers:
            self.shapes[index] = shape
            kv = self.backend.allocate(self.num_pages, self.page_size, shape, self.dtype, self.device)
            self._layers[index] = kv
            if self.num_host_pages:
                self._host_layers[index] = LayerKV(self._on_host(kv.k), self._on_host(kv.v))
        return self._layers[index]

    def copy_pages(self, src: IntArray, dst: IntArray) -> None:
        """Make pages `dst[i]` equal to `src[i]` in all layers; no page is in both lists."""
        layers = list(self._layers.values())
        self.backend.copy_pages(layers, layers, src, dst)

    def copy_out(self, device_pages: IntArray, host_pages: IntArray) -> Fence:
        """Begin to copy pages to host memory, in all layers."""
        return self._begin_copy(self._layers, self._host_layers, device_pages, host_pages - self.num_pages)

    def copy_in(self, host_pages: IntArray, device_pages: IntArray) -> Fence:
        """Begin to copy pages from host memory, in all layers."""
        return self._begin_copy(self._host_layers, self._layers, host_pages - self.num_pages, device_pages)

    def poison_slots(self, slots: IntArray) -> None:
        """Fill these slots with NaN in all layers, so that any result that reads them shows it."""
        stop = (self.num_pages + 1) * self.page_size
        self.backend.fill_slots(list(self._layers.values()), slots[slots < stop], np.nan)
        if self.num_host_pages:
            host_slots = slots[slots >= stop] - self.num_pages * self.page_size
            self.backend.fill_slots(list(self._host_layers.values()), host_slots, np.nan)

    def _begin_copy(
        self, source: dict[int, LayerKV], target: dict[int, LayerKV], src: IntArray, dst: IntArray
    ) -> Fence:
        """At once on the CPU; on CUDA in a stream of its own, behind the steps that were begun before."""
        layers = list(source.values()), list(target.values())
        if self.device.type != "cuda":
            self.backend.copy_pages(*layers, src, dst)
            return Passed()
        cuda: Any = torch.cuda  # has no types
        self._stream = self._stream or cuda.Stream(self.device)
        self._stream.wait_stream(cuda.current_stream(self.device))
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        with cuda.stream(self._stream):
            begin.record()
            self.backend.copy_pages(*layers, src, dst)
            end.record()
        return CudaFence(begin, end)

    def _on_host(self, cache: torch.Tensor) -> torch.Tensor:
        """The host pages of a cache, `[num_host_pages + 1, ...]`; the first is never used."""
        shape = (self.num_host_pages + 1, *cache.shape[1:])
        return torch.zeros(shape, dtype=cache.dtype, pin_memory=self.device.type == "cuda")
