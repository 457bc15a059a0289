"""Native gates: right beside float64, and a row the same bits in any company and on any number of threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from radixrt.kernels.cpu import native
from radixrt.kernels.cpu.gate import NativeGate
from radixrt.kernels.cpu.native import DTYPES

pytestmark = pytest.mark.skipif(native.build().library is None, reason=f"no build: {native.build().reason}")
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}  # relative to each number: two roundings, and some last places


def gate() -> NativeGate:
    library = native.build().library
    assert library is not None
    return NativeGate(library)


def make(num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(num_rows, 2 * width, generator=torch.Generator().manual_seed(seed))).to(dtype)


@given(st.integers(0, 40), st.integers(1, 300), st.sampled_from(DTYPES), st.integers(0, 99))
def test_it_is_right(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    x = make(num_rows, width, dtype, seed)
    opened, up = x.double().chunk(2, -1)
    expected = torch.nn.functional.silu(opened) * up
    y = gate()(x)
    assert (y.shape, y.dtype) == ((num_rows, width), dtype)
    assert bool(((y - expected).abs() <= BOUNDS[dtype] * expected.abs() + 1e-30).all())


def test_far_from_zero_it_is_open_or_shut() -> None:
    """The gate's exponential neither overflows nor is lost."""
    far = torch.tensor([-1e38, -200.0, -100.0, -88.0, 0.0, 88.0, 100.0, 1e38])
    y = gate()(torch.stack((far, torch.ones_like(far)), -1))[:, 0]
    assert torch.equal(y[4:], far[4:])
    assert bool((y[:4].abs() < 1e-30).all())
    assert bool(gate()(torch.tensor([[torch.nan, 1.0]])).isnan().all())


def test_an_odd_number_has_no_two_halves() -> None:
    with pytest.raises(ValueError, match="no two halves"):
        gate()(torch.zeros(3, 5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1536, 77])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, width: int) -> None:
    """Up to more numbers than one thread takes, and out of a wider tensor."""
    x, run, before = make(200, width, dtype), gate(), torch.get_num_threads()
    alone = torch.cat([run(x[i : i + 1]) for i in range(len(x))])
    padded = torch.nn.functional.pad(x, (3, 5), value=torch.nan)[:, 3:-5]
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for rows in (x, padded):
                assert torch.equal(run(rows), alone)
                assert torch.equal(run(rows[60:77][None]), alone[60:77][None])
    finally:
        torch.set_num_threads(before)
