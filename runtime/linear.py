"""The linear layers of a model on CPU: the same bits for a row whatever rows stand beside it, and however many.

Knows nothing of models, nor how a product is computed: natively in one way (kernels/cpu/product.py), else by recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from radixrt.kernels.cpu import product
from radixrt.kernels.cpu.product import NativeProduct

from . import recipe
from .recipe import Found, Prepared, Recipe


class Linear(nn.Module):
    """`x @ weight.T + bias` for `x [..., K]`. `weight` holds no values, only its shape and dtype."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        multiply: Callable[..., torch.Tensor],  # (x, bias=)
        *,
        in_place: torch.Tensor | None = None,
        packed: product.Weight | None = None,
    ) -> None:
        """`multiply` computes it; `in_place` is the weight where that reads it as it lies, None where it has a copy.

        `packed` is that copy where the native product has it.
        """
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.weight = hollow(weight)
        self.multiply = multiply
        self.in_place = in_place
        self.packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, bias=self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def hollow(weight: torch.Tensor) -> torch.Tensor:
    """What stands for a weight whose values are elsewhere. Some models ask a layer for its weight's dtype or device;
    who computes with this one gets NaN and is seen.
    """
    return torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape)


def weights_in_place(module: nn.Module) -> set[int]:
    """Addresses of the weights that layers in `module` read where they lie."""
    layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
    return {layer.in_place.data_ptr() for layer in layers if layer.in_place is not None}


@dataclass(slots=True, kw_only=True)
class Workshop:
    """Makes the linear layers of one model: native where that serves a weight's dtype, else by recipe.

    For recipes, `exact` probes each distinct shape once, on up to `max_rows` rows; without it they are for speed alone.
    """

    exact: bool
    max_rows: int
    native: NativeProduct | None = None
    found: dict[tuple[Any, ...], Found] = field(default_factory=dict)

    def multiplies_natively(self, dtype: torch.dtype) -> bool:
        return self.native is not None and product.unserved(dtype) is None

    def linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        shared: bool = False,
        packed: product.Weight | None = None,
    ) -> Linear:
        """The layer of a weight `[N, K]`; one that is `shared` with another module is used where it lies.

        Otherwise the layer has a copy, if it needs one, and the caller lets go of the weight. `packed`: that copy, made
        before for the native product.
        """
        weight, bias = weight.detach(), None if bias is None else bias.detach().clone()
        if self.multiplies_natively(weight.dtype) and not shared:
            assert self.native is not None
            operand = product.pack(weight) if packed is None else packed
            return Linear(weight, bias, partial(self.native, weight=operand), packed=operand)
        prepared = self._prepare(weight, bias, shared=shared)
        return Linear(weight, bias, prepared, in_place=None if prepared.operand.is_mkldnn else prepared.operand)

    def flaws(self) -> list[str]:
        """The shapes whose rows are not the same everywhere, and why."""
        return [
            f"products with {str(dtype).removeprefix('torch.')} weights of {n} x {k} depend on {found.flaw}"
            for (n, k, dtype, *_), found in self.found.items()
            if found.flaw
        ]

    def _prepare(self, weight: torch.Tensor, bias: torch.Tensor | None, *, shared: bool) -> Prepared:
        packs = recipe.can_pack(weight.dtype)
        operand = recipe.pack(weight) if packs and not shared else weight
        key = (*weight.shape, weight.dtype, bias is not None, shared)
        if key not in self.found:
            self.found[key] = (
                recipe.find(operand, weight, bias, max_rows=self.max_rows)
                if self.exact
                else Found(Recipe(onednn=packs), None)
            )
        how = self.found[key].recipe
        return Prepared(how, operand if how.onednn else weight)
