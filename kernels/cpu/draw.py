"""Draws of tokens in the native library. Knows nothing of requests; the kernel is native/draw.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from ..draws import Draw
from .native import DRAW

_WORD = 2**64


class NativeDraw:
    """A Drawer: the tokens of `draws.draw`, in a fifth to a seventh of the time on one thread, on as many as torch has.

    Where two scores are equal but for a logarithm's last bit, another token than there may be the larger.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._draw = library.radixrt_draw

    def __call__(self, draws: Sequence[Draw]) -> list[int]:
        """ValueError for logits that are not contiguous float32, or of which the largest is not finite."""
        found = np.empty(len(draws), dtype=np.int64)
        packed = b"".join(map(_pack, draws))
        self._draw(packed, len(draws), torch.get_num_threads(), found.ctypes.data)
        places: list[int] = found.tolist()
        if min(places, default=0) < 0:
            raise ValueError(f"logits of row {places.index(-1)} are not finite: nothing can be drawn from them")
        return places


def _pack(its: Draw) -> bytes:
    logits, ids = its.logits, its.ids
    if logits.dtype != np.float32 or not logits.flags.c_contiguous or not len(logits):
        raise ValueError(f"logits of {logits.dtype} and shape {logits.shape} are no contiguous float32")
    if ids is not None and (ids.dtype != np.int64 or ids.shape != logits.shape or not ids.flags.c_contiguous):
        raise ValueError(f"ids of {ids.dtype} and shape {ids.shape} do not fit logits of shape {logits.shape}")
    return DRAW.pack(
        *(logits.ctypes.data, 0 if ids is None else ids.ctypes.data, len(logits)),
        *(its.temperature, its.top_p, its.min_p, its.key % _WORD, its.key // _WORD),
    )
