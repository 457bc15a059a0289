"""The KV pool: one cache per layer, in the layout of the backend that attends to it.

Knows nothing of who owns a page or what is in it.
"""

from __future__ import annotations

import numpy as np
import torch

from radixrt.kernels.backend import AttentionBackend, LayerKV, LayerShape
from radixrt.kernels.plan import IntArray


class KVPool:
    """Pages `0..num_pages` of `page_size` slots in every layer; page 0 is the padding sink and never read.

    A layer's memory is made zero at its first use, and the system backs a page of it with memory only when touched.
    """

    def __init__(
        self, backend: AttentionBackend, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.backend = backend
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.shapes: dict[int, LayerShape] = {}
        self._layers: dict[int, LayerKV] = {}

    def layer(self, index: int, shape: LayerShape) -> LayerKV:
        """The cache of layer `index`, made on first use."""
        if index not in self._layers:
            self.shapes[index] = shape
            self._layers[index] = self.backend.allocate(self.num_pages, self.page_size, shape, self.dtype, self.device)
        return self._layers[index]

    def copy_pages(self, src: IntArray, dst: IntArray) -> None:
        """Make pages `dst[i]` equal to `src[i]` in all layers; no page is in both lists."""
        self.backend.copy_pages(list(self._layers.values()), src, dst)

    def poison_slots(self, slots: IntArray) -> None:
        """Fill these slots with NaN in all layers, so that any result that reads them shows it."""
        self.backend.fill_slots(list(self._layers.values()), slots, np.nan)
