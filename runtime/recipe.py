"""How a product by oneDNN or torch is run so that a row gets the same bits whatever rows stand beside it: by recipe.

Knows nothing of models or layers: a weight, and what a probe of its shape finds on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

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


Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A weight with its recipe: `x [..., K]` to `[..., N]`."""

    recipe: Recipe
    operand: torch.Tensor  # the weight [N, K], or packed

    def __call__(self, x: torch.Tensor, *, bias: torch.Tensor | None) -> torch.Tensor:
        k = x.shape[-1]
        num_rows = x.numel() // k
        least, most = self.recipe.least, self.recipe.most
        multiply = multiplier(self.recipe)
        if least <= num_rows <= most and num_rows:
            return multiply(x, self.operand, bias)
        if 0 < num_rows < least and x.shape[-2:-1] == (num_rows,):  # one row: 5 us less than the general way
            padded = torch.constant_pad_nd(x, (0, 0, 0, least - num_rows))
            return multiply(padded, self.operand, bias).narrow(-2, 0, num_rows)
        y = run_tiled(multiply, x.reshape(num_rows, k), self.operand, bias, self.recipe)
        return y.view(*x.shape[:-1], self.operand.shape[0])


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


def find(operand: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, max_rows: int) -> Found:
    """The recipe of products of up to `max_rows` rows with a weight of this shape; `operand` is it, or it packed.

    The fastest one without a flaw; else one that at least does not depend on the rows beside.
    """
    if weight.itemsize > 2 or weight.shape[0] >= _VOCABULARY:
        return _find(operand, weight, bias, _distinct_rows(weight), max_rows)
    # Another weight of this shape: each product sums terms to zero that cancel in pairs. What is left is rounding,
    # which shows in which order the terms were summed. Of a common product 16 bits keep too little of that: one in
    # 10,000 shows it.
    n, k = weight.shape
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(k, generator=generator)
    half = torch.randn(n, k // 2, generator=generator)
    noise = torch.cat((half, -half, torch.zeros(n, k % 2)), 1)[:, order].to(weight)
    rows = _distinct_rows(weight)
    rows[:, k // 2 : k // 2 * 2] = rows[:, : k // 2]  # the terms of a pair get the same factor
    bias = None if bias is None else torch.zeros_like(bias)
    return _find(pack(noise) if operand.is_mkldnn else noise, noise, bias, rows[:, order], max_rows)


def _distinct_rows(weight: torch.Tensor) -> torch.Tensor:
    rows = torch.randn(_TEST_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(1))
    return rows.to(weight.dtype)


def _find(
    operand: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor, max_rows: int
) -> Found:
    n, k = weight.shape
    most = max(2, min(max_rows, _HEAD_ROWS) if n > _HEAD * k else max_rows)
    onednn = can_pack(weight.dtype)
    tried = []
    alone, fast = (Recipe(onednn=onednn, least=least, most=most) for least in (1, 2))
    tiled = Recipe(onednn=onednn, least=_TILE, most=_TILE)
    for recipe in dict.fromkeys((alone, fast, tiled, replace(tiled, onednn=False))):
        flaw = _flaw(recipe, operand if recipe.onednn else weight, bias, rows, _nums_rows(most))
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
    multiply = multiplier(recipe)
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


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A copy of the weight in oneDNN's own layout."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def multiplier(recipe: Recipe) -> Multiply:
    """The product that a recipe runs, of rows `[M, K]` and an operand."""
    return _onednn if recipe.onednn else F.linear


def _onednn(x: torch.Tensor, operand: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, operand, bias, "none", [], "")
    return y
