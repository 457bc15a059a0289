"""Products of rows with a weight in the native library: weights as it reads them, and where it is the one to use.

Knows nothing of models. The kernel, and why a row's bits depend on that row alone, is native/product.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from . import native
from .native import PAIRS, PRODUCT, as_rows, by_dtype

_WIDTH = 48  # of a panel; WIDTH in native/product.h
_PIECE = 2**22  # bytes packed at a time


def unserved(dtype: torch.dtype) -> str | None:
    """Why another library's products are to be used here, or None where the native ones are.

    A rule, not a measurement, so that a machine gives the same bits at every start.
    """
    if dtype not in PAIRS:
        return f"{dtype} is neither float32 nor bfloat16"
    if "avx512f" not in native.cpu_facts():
        return "this CPU has no AVX-512, whose registers hold a block of its sums"
    return None


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight `[N, K]` packed in panels of 48 outputs, `[ceil(N / 48), ceil(K / P), 48, P]`, filled up with zeros.

    P, how many inputs lie side by side, is 1 for float32 and 2 for bfloat16.
    """

    panels: torch.Tensor
    num_outputs: int
    num_inputs: int

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weight as it was, `[..., K]`: for an embedding that shares it. Each number is a cache line."""
        found = self.panels[indices // _WIDTH, :, indices % _WIDTH]
        return found.flatten(-2)[..., : self.num_inputs]


def pack(weight: torch.Tensor, *, release: Callable[[torch.Tensor], None] | None = None) -> Weight:
    """A packed copy of `weight [N, K]`, made in pieces; `release` is called with each piece once it is copied."""
    (n, k), pair = weight.shape, PAIRS[weight.dtype]
    panels = weight.new_empty(-(-n // _WIDTH), -(-k // pair), _WIDTH, pair)
    step = max(1, _PIECE // (k * weight.itemsize * _WIDTH)) * _WIDTH
    for begin in range(0, n, step):
        piece = weight[begin : begin + step]
        padded = F.pad(piece, (0, -k % pair, 0, -len(piece) % _WIDTH))
        first = begin // _WIDTH
        into = panels[first : first + len(padded) // _WIDTH]
        into.copy_(padded.view(-1, _WIDTH, panels.shape[1], pair).transpose(1, 2))
        if release is not None:
            release(piece)
    return Weight(panels, n, k)


class NativeProduct:
    """`x @ weight.T + bias`, a row the same bits whatever stands beside it and on any number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._multiply = by_dtype(library, "multiply")

    def __call__(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """`[..., K]` to `[..., N]` in the dtype of all, on torch's number of threads. ValueError if they do not fit."""
        n, k, panels = weight.num_outputs, weight.num_inputs, weight.panels
        fits = bias is None or (bias.dtype == panels.dtype and bias.shape == (n,))
        if x.shape[-1] != k or x.dtype != panels.dtype or not fits:
            raise ValueError(f"x {list(x.shape)} of {x.dtype} does not fit a weight {n} x {k} of {panels.dtype}")
        rows = as_rows(x)
        y = x.new_empty(*x.shape[:-1], n)
        call = PRODUCT.pack(
            *(rows.data_ptr(), panels.data_ptr(), 0 if bias is None else bias.data_ptr(), 0, y.data_ptr()),
            *(rows.shape[0], k, n, rows.stride(0), torch.get_num_threads()),
        )
        self._multiply[x.dtype](call)
        return y
