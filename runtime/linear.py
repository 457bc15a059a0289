"""Products of rows with a weight on CPU: the same bits for a row whatever rows stand beside it, and however many.

Knows nothing of models: a weight, and what a probe of its shape finds on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .threads import threads

_VOCABULARY = 32_768  # outputs: so many products of 16 bits show in which order they were summed
_HEAD = 16  # a weight with more outputs than this times its inputs is a vocabulary: it sees few rows at a time,
_HEAD_ROWS = 64  # and probing it with more would take most of a second
_TILE = 16
_MANY = 2**31 - 1
_TEST_ROWS = 3  # distinct rows of a probe; odd, so that each comes to stand at every place of a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a product is run: by oneDNN or by torch, on `least` to `most` rows at a time; fewer are padded with zeros."""

    onednn: bool
    least: int = 0
    most: int = _MANY


@dataclass(frozen=True, slots=True)
class Found:
    """What the probe of a shape found. `flaw` says on what else a row's bits depend, None where on nothing."""

    recipe: Recipe
    flaw: str | None


class Linear(nn.Module):
    """`x @ weight.T + bias` for `x [..., K]`, run by a recipe. `weight` holds no values, only its shape and dtype."""

    def __init__(self, operand: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, recipe: Recipe) -> None:
        """`operand` is `weight [N, K]` itself, or packed; a packed one leaves the weight free to go."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.recipe = recipe
        self.bias = bias
        # Some models ask a layer for its weight's dtype or device; who computes with this one gets NaN and is seen.
        self.weight = torch.full((), torch.nan, dtype=weight.dtype).expand(weight.shape)
        self.operand = operand
        self._least, self._most = recipe.least, recipe.most
        self._multiply = _multiplier(recipe.onednn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.numel() // self.in_features
        if self._least <= num_rows <= self._most and num_rows:
            return self._multiply(x, self.operand, self.bias)
        if 0 < num_rows < self._least and x.shape[-2:-1] == (num_rows,):  # one row: 5 us less than the general way
            padded = torch.constant_pad_nd(x, (0, 0, 0, self._least - num_rows))
            return self._multiply(padded, self.operand, self.bias).narrow(-2, 0, num_rows)
        rows = x.reshape(num_rows, self.in_features)
        y = run_tiled(self._multiply, rows, self.operand, self.bias, self.recipe)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.recipe}"


def operands(module: nn.Module) -> set[int]:
    """Addresses of the weights that layers in `module` use where they lie."""
    layers = [layer for layer in module.modules() if isinstance(layer, Linear)]
    return {layer.operand.data_ptr() for layer in layers if not layer.operand.is_mkldnn}


Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def run_tiled(
    multiply: Multiply,
    x: torch.Tensor,  # [M, K]
    operand: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
) -> torch.Tensor:
    """The product of any number of rows, none included, run as the recipe says: `[M, N]`."""
    if not x.shape[0]:
        return x.new_empty(0, operand.shape[0])
    parts = []
    for tile in torch.split(x, min(recipe.most, x.shape[0])):
        padded = torch.constant_pad_nd(tile, (0, 0, 0, max(0, recipe.least - tile.shape[0])))
        parts.append(multiply(padded, operand, bias)[: tile.shape[0]])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(slots=True, kw_only=True)
class Workshop:
    """Makes the linear layers of one model; probes each distinct shape once.

    `exact=False` asks for speed alone: no probe, no padding. Products run on at most `max_rows` rows at a time, the
    most that is probed.
    """

    exact: bool
    max_rows: int
    found: dict[tuple[Any, ...], Found] = field(default_factory=dict)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, shared: bool = False) -> Linear:
        """The layer of a weight `[N, K]`; one that is `shared` with another module is used where it lies.

        Otherwise the layer has a copy, and the caller lets go of the weight.
        """
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        packs = can_pack(weight.dtype)
        operand = torch.ops.mkldnn._reorder_linear_weight(weight) if packs and not shared else weight
        key = (*weight.shape, weight.dtype, bias is not None, shared)
        if key not in self.found:
            shows = weight.itemsize > 2 or weight.shape[0] >= _VOCABULARY
            find = self._find if shows else self._find_in_noise
            self.found[key] = find(operand, weight, bias) if self.exact else Found(Recipe(onednn=packs), None)
        recipe = self.found[key].recipe
        if not recipe.onednn:
            operand = weight
        return Linear(operand, None if bias is None else bias.clone(), weight, recipe)

    def flaws(self) -> list[str]:
        """The shapes whose rows are not the same everywhere, and why."""
        return [
            f"products with {str(dtype).removeprefix('torch.')} weights of {n} x {k} depend on {found.flaw}"
            for (n, k, dtype, *_), found in self.found.items()
            if found.flaw
        ]

    def _find_in_noise(self, operand: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Found:
        """`_find` with another weight of this shape: each product sums terms to zero that cancel in pairs.

        What is left is rounding, which shows in which order the terms were summed. Of a common product 16 bits keep
        too little of that: one in 10,000 shows it.
        """
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(weight.shape[1], generator=generator)
        half = torch.randn(weight.shape[0], weight.shape[1] // 2, generator=generator)
        noise = torch.cat((half, -half, torch.zeros(weight.shape[0], weight.shape[1] % 2)), 1)[:, order].to(weight)
        packed = torch.ops.mkldnn._reorder_linear_weight(noise) if operand.is_mkldnn else noise
        return self._find(packed, noise, None if bias is None else torch.zeros_like(bias), pairs=order)

    def _find(
        self, operand: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pairs: torch.Tensor | None = None
    ) -> Found:
        """The fastest recipe without a flaw; else one that at least does not depend on the rows beside."""
        n, k = weight.shape
        most = max(2, min(self.max_rows, _HEAD_ROWS) if n > _HEAD * k else self.max_rows)
        onednn = can_pack(weight.dtype)
        distinct = torch.randn(_TEST_ROWS, k, generator=torch.Generator().manual_seed(1))
        if pairs is not None:  # the terms of a pair get the same factor
            distinct[:, k // 2 : k // 2 * 2] = distinct[:, : k // 2]
            distinct = distinct[:, pairs]
        distinct = distinct.to(weight.dtype)
        tried = []
        alone, fast = (Recipe(onednn=onednn, least=least, most=most) for least in (1, 2))
        tiled = Recipe(onednn=onednn, least=_TILE, most=_TILE)
        for recipe in dict.fromkeys((alone, fast, tiled, replace(tiled, onednn=False))):
            flaw = _flaw(recipe, operand if recipe.onednn else weight, bias, distinct, _nums_rows(most))
            tried.append(Found(recipe, flaw))
            if flaw is None:
                break
        return min(tried, key=lambda found: (None, _THREADS, _ROWS).index(found.flaw))


def _nums_rows(most: int) -> list[int]:
    return sorted({m for m in (1, 2, 3, 4, 5, 8, 17, 64) if m < most} | {most})


_ROWS, _THREADS = "the rows beside", "the number of threads"


def _flaw(
    recipe: Recipe,
    operand: torch.Tensor,
    bias: torch.Tensor | None,
    distinct: torch.Tensor,  # [_TEST_ROWS, K]
    nums_rows: Sequence[int],
) -> str | None:
    """On what the bits of a row depend, among these numbers of rows on 1, 2 or all threads; None if on nothing."""
    x = distinct.repeat(max(nums_rows) // _TEST_ROWS + 1, 1)
    multiply = _multiplier(recipe.onednn)
    seen = []
    for num_threads in sorted({1, 2, torch.get_num_threads()}):
        with threads(num_threads):
            alone = torch.cat([run_tiled(multiply, row[None], operand, bias, recipe) for row in distinct])
            for num_rows in nums_rows:
                y = run_tiled(multiply, x[:num_rows], operand, bias, recipe)
                if any(not torch.equal(part, alone[: len(part)]) for part in torch.split(y, _TEST_ROWS)):
                    return _ROWS
            seen.append(alone)
    return None if all(torch.equal(alone, seen[0]) for alone in seen) else _THREADS


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies in this dtype on this machine."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _multiplier(onednn: bool) -> Multiply:  # noqa: FBT001
    return _onednn if onednn else F.linear


def _onednn(x: torch.Tensor, operand: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, operand, bias, "none", [], "")
    return y
