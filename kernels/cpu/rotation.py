"""Rotary position embedding in the native library. Knows nothing of models; the kernel is native/rotation.h."""

from __future__ import annotations

import ctypes

import torch

from .native import ROTATION, by_dtype


class NativeRotation:
    """`x * cos + roll(x, D / 2) * sin` in place, a row the same bits whatever stands beside it.

    Each operation rounds as torch's does. There these are four, of up to 20 us each in a decode step.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rotate = by_dtype(library, "rotate")

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """x `[T, H, D]` whose heads lie together, D even; cos, sin `[T, 1, D]`; all in one of `native.DTYPES`.

        ValueError if they do not fit.
        """
        num_rows, num_heads, dim = x.shape
        turns = (num_rows, 1, dim)
        fits = (cos.shape, sin.shape, x.stride()[1:], dim % 2) == (turns, turns, (dim, 1), 0)
        if not fits or not x.dtype == cos.dtype == sin.dtype:
            raise ValueError(f"x {list(x.shape)} of {x.dtype} does not fit {list(cos.shape)} of {cos.dtype}")
        cos, sin = cos.contiguous(), sin.contiguous()
        sizes = (num_rows, num_heads, dim, x.stride(0), torch.get_num_threads())
        self._rotate[x.dtype](ROTATION.pack(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), *sizes))
