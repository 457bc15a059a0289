"""Decoder layers in the native library, each in one call. Knows nothing of models; the kernel is native/layer.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ..backend import LayerKV, LayerShape
from .native import LAYER, LAYER_ROWS, NO_WINDOW, Prepared, by_dtype
from .product import Weight


class NativeLayer:
    """Norm, attention over rotated queries and keys, sum, norm, MLP gated by SiLU, sum; with the bits of its parts.

    A layer's weights push all else out of the second cache: what Python does between calls of its parts then takes
    300 us a layer, as long as reading the weights; after one call it takes 50.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        *,
        norms: Sequence[tuple[torch.Tensor, float]],  # weights [K] and epsilons, of the two in their order
        products: Sequence[tuple[Weight, torch.Tensor | None]],  # qkv, out, gate_up and down, with their biases
        shape: LayerShape,
        scale: float,
        window: int | None,
    ) -> None:
        """All tensors in one of `native.DTYPES`; they are kept where they lie. ValueError if they do not fit."""
        qkv, out, _, down = (weight for weight, _ in products)
        width, q_width, inner, dim = qkv.num_inputs, out.num_inputs, down.num_inputs, shape.key_dim
        sizes = [(weight.num_outputs, weight.num_inputs) for weight, _ in products]
        expected = [(q_width + shape.token_width, width), (width, q_width), (2 * inner, width), (width, inner)]
        biases = [(bias, weight.num_outputs) for weight, bias in products if bias is not None]
        vectors = [(weight, width) for weight, _ in norms] + biases
        tensors = [weight.panels for weight, _ in products] + [vector for vector, _ in vectors]
        if (
            sizes != expected
            or any(vector.shape != (length,) or not vector.is_contiguous() for vector, length in vectors)
            or len({tensor.dtype for tensor in tensors}) > 1
            or q_width % (dim * shape.num_heads)
        ):
            raise ValueError(f"weights {sizes} and vectors {[list(v.shape) for v, _ in vectors]} do not fit {shape}")
        self.shape = shape
        self.window = window
        self.num_heads = q_width // dim
        self.dtype = tensors[0].dtype
        self._width = width
        self._tensors = tensors  # their addresses are packed
        self._run = by_dtype(library, "run")[self.dtype]
        self._layer = LAYER.pack(
            *(at for w, bias in products for at in (w.panels.data_ptr(), 0 if bias is None else bias.data_ptr())),
            *(weight.data_ptr() for weight, _ in norms),
            *(width, self.num_heads, shape.num_heads, dim, inner, NO_WINDOW if window is None else window),
            *(scale, *(eps for _, eps in norms)),
        )

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: LayerKV, step: Prepared
    ) -> torch.Tensor:
        """`[..., K]`, a row for each of the step's, to the same; cos and sin `[T, 1, D]` as NativeRotation takes them.

        The rows' keys and values are written to `kv`, which NativeAttention made. ValueError if they do not fit.
        """
        num_rows, page_size, heads, dim = step.num_rows, step.page_size, self.shape.num_heads, self.shape.key_dim
        turns = (num_rows, 1, dim)
        _, cached_heads, pairs, cached_size, pair = kv.k.shape
        if (
            (x.shape[-1], x.numel()) != (self._width, num_rows * self._width)
            or (cos.shape, sin.shape) != (turns, turns)
            or (cached_heads, pairs * pair, cached_size) != (heads, dim, page_size)
            or not self.dtype == x.dtype == cos.dtype == sin.dtype == kv.k.dtype
        ):
            raise ValueError(
                f"x {list(x.shape)} of {x.dtype} and angles {list(cos.shape)} do not fit {num_rows} rows of "
                f"{self._width} over a cache {list(kv.k.shape)} of pages of {page_size}"
            )
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        y = torch.empty_like(x)
        rows = LAYER_ROWS.pack(
            *(x.data_ptr(), y.data_ptr(), cos.data_ptr(), sin.data_ptr(), kv.k.data_ptr(), kv.v.data_ptr()),
            *(num_rows, torch.get_num_threads()),
        )
        self._run(step.handle, self._layer, rows)
        return y
