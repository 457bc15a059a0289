"""Buffers that a step's layers share, because fresh memory in each layer faults. Knows nothing of what is put in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


class Scratch:
    """Named buffers that grow to the largest size asked for."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor that holds anything, until the next call with this name and dtype."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)

    def gather(self, name: str, source: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `index` of a `[n, width]` source, in `dtype`."""
        shape = (len(index), source.shape[1])
        gathered = torch.index_select(source, 0, index, out=self(name, shape, source.dtype))
        return gathered if source.dtype == dtype else self(name, shape, dtype).copy_(gathered)
