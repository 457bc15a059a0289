"""Gated units of rows in the native library. Knows nothing of models; the kernel is native/gate.h."""

from __future__ import annotations

import ctypes

import torch

from .native import GATE, as_rows, by_dtype


class NativeGate:
    """`silu(x[..., :W]) * x[..., W:]`, a row the same bits whatever stands beside it.

    Each operation rounds as torch's does. There these are three, of up to 20 us each in a decode step.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._gate = by_dtype(library, "gate")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., 2 * W]` in one of `native.DTYPES` to `[..., W]`. ValueError for an odd number."""
        width, odd = divmod(x.shape[-1], 2)
        if odd:
            raise ValueError(f"x {list(x.shape)} has no two halves")
        rows = as_rows(x)
        y = x.new_empty(*x.shape[:-1], width)
        sizes = (rows.shape[0], width, rows.stride(0), width, torch.get_num_threads())
        self._gate[x.dtype](GATE.pack(rows.data_ptr(), y.data_ptr(), *sizes))
        return y
