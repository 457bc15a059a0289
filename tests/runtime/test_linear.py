"""Linear layers give a row the same bits whatever stands beside it, are right, and say so where they cannot."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from radixrt.kernels.cpu import product
from radixrt.runtime import linear, recipe
from radixrt.runtime.backends import choose_product
from radixrt.runtime.linear import Workshop
from radixrt.runtime.recipe import Prepared, Recipe, can_pack
from radixrt.runtime.threads import threads

MOST = 96  # rows at a time
NUMS_ROWS = (1, 2, 3, 4, 5, 8, 17, 64, MOST, MOST + 1, 2 * MOST + 5)
SHAPES = [(96, 32), (40, 24), (960, 576), (576, 1536), (1024, 16)]  # N x K; the last has a vocabulary's proportions
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def weight_of(n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n)).div(k**0.5).to(dtype)


def rows_of(count: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, k, generator=torch.Generator().manual_seed(1)).to(dtype)


def differing(layer: torch.nn.Module, x: torch.Tensor, *, thread_counts: tuple[int, ...]) -> list[tuple[int, int]]:
    """(threads, rows) where some row is not what the row alone gives on one thread; from the start and to the end."""
    with threads(1):
        alone = torch.cat([layer(x[i : i + 1]) for i in range(len(x))])
    found = []
    for num_threads in thread_counts:
        with threads(num_threads):
            for m in (m for m in NUMS_ROWS if m <= len(x)):
                if not torch.equal(layer(x[:m]), alone[:m]) or not torch.equal(layer(x[-m:]), alone[-m:]):
                    found.append((num_threads, m))
    return found


def workshop(kernel: str, *, exact: bool = True, max_rows: int = MOST) -> Workshop:
    native = choose_product(torch.float32, asked=kernel).native
    if kernel == "native" and native is None:
        pytest.skip(f"no native products: {choose_product(torch.float32).reason}")
    return Workshop(exact=exact, max_rows=max_rows, native=native)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_are_the_same_bits(dtype: torch.dtype, shape: tuple[int, int], *, biased: bool) -> None:
    """By recipe, in every number of rows, on one thread and on two, with more rows than go in one product."""
    shop = workshop("torch")
    weight = weight_of(*shape, dtype)
    bias = weight_of(shape[0], 1, dtype)[:, 0] if biased else None
    with threads(2):
        layer = shop.linear(weight, bias)
    (found,) = shop.found.values()
    assert (found.flaw is None) == (not shop.flaws())
    x = rows_of(max(NUMS_ROWS), shape[1], dtype)
    if found.flaw != "the rows beside":
        assert not differing(layer, x, thread_counts=(1, 2) if found.flaw is None else (1,))
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert float((layer(x) - expected).abs().max()) < TOLERANCES[dtype] * float(expected.abs().max())


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_native_layers_need_no_recipe(dtype: torch.dtype, shape: tuple[int, int], *, exact: bool) -> None:
    """Where the rule gives them to the native product; no probe, and the same bits with and without exactness."""
    shop = workshop("native", exact=exact)
    weight, bias = weight_of(*shape, dtype), weight_of(shape[0], 1, dtype)[:, 0]
    layer = shop.linear(weight, bias)
    assert shop.multiplies_natively(dtype) == (product.unserved(dtype) is None)
    assert bool(shop.found) != shop.multiplies_natively(dtype)
    assert isinstance(layer.multiply, Prepared) != shop.multiplies_natively(dtype)
    if shop.multiplies_natively(dtype):
        x = rows_of(max(NUMS_ROWS), shape[1], dtype)
        assert not differing(layer, x, thread_counts=(1, 2))
        expected = F.linear(x.double(), weight.double(), bias.double())
        assert float((layer(x) - expected).abs().max()) < TOLERANCES[dtype] * float(expected.abs().max())
        assert isinstance(shop.linear(weight, bias, shared=True).multiply, Prepared)


@pytest.mark.parametrize("num_outputs", [48, 256, 1000, 4000])
@pytest.mark.parametrize("k", [576, 1536])
def test_heads_tied_to_small_vocabularies_are_exact(num_outputs: int, k: int) -> None:
    """bfloat16 keeps too little of a common product to show in which order it was summed; few outputs show it least."""
    weight = weight_of(num_outputs, k, torch.bfloat16)
    shop = Workshop(exact=True, max_rows=MOST)
    layer = shop.linear(weight, shared=True)
    assert shop.flaws() == []
    assert not differing(layer, rows_of(max(NUMS_ROWS), k, torch.bfloat16), thread_counts=(1, 2))


def test_rows_differ_without_padding() -> None:
    """The checks above have power: here are products that fail them. Which ones do depends on the machine."""
    shop = Workshop(exact=False, max_rows=MOST)
    failing = [
        (dtype, shape)
        for dtype in (torch.float32, torch.bfloat16)
        for shape in SHAPES
        if differing(shop.linear(weight_of(*shape, dtype)), rows_of(MOST, shape[1], dtype), thread_counts=(1, 2))
    ]
    if not failing:
        pytest.skip("on this machine rows of unpadded products are the same bits in every number of rows tried")


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("exact", [False, True])
def test_any_leading_shape(kernel: str, *, exact: bool) -> None:
    layer = workshop(kernel, exact=exact, max_rows=8).linear(weight_of(24, 16, torch.float32))
    for shape in [(0, 16), (1, 0, 16), (1, 1, 16), (16,), (2, 3, 16), (1, 19, 16), (1, 1, 1, 16)]:
        x = rows_of(1, 16, torch.float32)[0].expand(shape)
        y = layer(x)
        assert y.shape == (*shape[:-1], 24)
        torch.testing.assert_close(y, layer(rows_of(1, 16, torch.float32))[0].expand(y.shape))


def test_a_shape_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = []
    find = recipe._flaw

    def flaw(*given: Any) -> str | None:
        probed.append(given)
        return find(*given)

    monkeypatch.setattr(recipe, "_flaw", flaw)
    shop = Workshop(exact=True, max_rows=8)
    for _ in range(3):
        shop.linear(weight_of(24, 16, torch.float32))
    num_probes = len(probed)
    assert num_probes >= 1
    shop.linear(weight_of(24, 16, torch.float32))
    assert len(probed) == num_probes
    Workshop(exact=False, max_rows=8).linear(weight_of(24, 16, torch.float32))
    assert len(probed) == num_probes, "speed alone needs no probe"


def crooked(x: torch.Tensor, operand: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product whose bits depend on the number of rows, unless that is 16."""
    y = F.linear(x, operand.to_dense() if operand.is_mkldnn else operand, bias)
    return y if len(x) == 16 else y + len(x)


def test_tiles_of_16_where_the_probe_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "multiplier", lambda _recipe: crooked)
    shop = Workshop(exact=True, max_rows=40)
    layer = shop.linear(torch.ones(2, 2))
    assert isinstance(layer.multiply, Prepared)
    assert (layer.multiply.recipe.least, layer.multiply.recipe.most) == (16, 16)
    assert shop.flaws() == []
    assert not differing(layer, torch.ones(40, 2), thread_counts=(1, 2))


def test_a_flaw_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that depends on the place of a row."""

    def multiply(x: torch.Tensor, operand: torch.Tensor, _bias: torch.Tensor | None) -> torch.Tensor:
        return torch.arange(float(len(x)))[:, None].expand(-1, operand.shape[0])

    monkeypatch.setattr(recipe, "multiplier", lambda _recipe: multiply)
    shop = Workshop(exact=True, max_rows=40)
    shop.linear(torch.ones(2, 3))
    assert shop.flaws() == ["products with float32 weights of 2 x 3 depend on the rows beside"]


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_a_shared_weight_is_used_where_it_lies_and_others_are_let_go(kernel: str) -> None:
    shop = workshop(kernel, max_rows=8)
    weight = weight_of(64, 32, torch.float32)
    layer = shop.linear(weight, shared=True)
    assert layer.in_place is not None
    assert linear.weights_in_place(layer) == {weight.data_ptr()}
    weight.mul_(2)
    torch.testing.assert_close(layer(torch.eye(32)), weight.T)
    if kernel == "torch" and not can_pack(torch.float32):
        pytest.skip("oneDNN does not multiply here")
    packed = shop.linear(weight)
    alive = weakref.ref(weight)
    del weight, layer
    gc.collect()
    assert alive() is None
    assert linear.weights_in_place(packed) == set()
    assert packed.weight.shape == (64, 32)
    assert packed.weight.isnan().all()


def test_a_recipe_says_how_many_rows_go_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def multiply(x: torch.Tensor, operand: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(len(x))
        return F.linear(x, operand, bias)

    x = rows_of(19, 4, torch.float32)
    weight = weight_of(3, 4, torch.float32)
    for how, expected in {
        Recipe(onednn=True, least=2, most=6): [6, 6, 6, 2],
        Recipe(onednn=False, least=8, most=8): [8, 8, 8],
        Recipe(onednn=True): [19],
    }.items():
        seen.clear()
        torch.testing.assert_close(recipe.run_tiled(multiply, x, weight, None, how), x @ weight.T)
        assert seen == expected
