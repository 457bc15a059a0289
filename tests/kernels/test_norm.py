"""Native norms: right beside float64, and a row the same bits in any company and on any number of threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from radixrt.kernels.cpu import native
from radixrt.kernels.cpu.native import DTYPES
from radixrt.kernels.cpu.norm import NativeNorm

pytestmark = pytest.mark.skipif(native.build().library is None, reason=f"no build: {native.build().reason}")
BOUNDS = {
    torch.float32: 1e-6,
    torch.bfloat16: 2.0**-8,
}  # relative to each number: half of a last place, and two roundings
EPS = 1e-5


def norm() -> NativeNorm:
    library = native.build().library
    assert library is not None
    return NativeNorm(library)


def make(num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in ((num_rows, width), (width,)))  # type: ignore[return-value]


@given(st.integers(0, 40), st.integers(1, 300), st.sampled_from(DTYPES), st.integers(0, 99))
def test_it_is_right(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> None:
    x, weight = make(num_rows, width, dtype, seed)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    y = norm()(x, weight, EPS)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert bool(((y - expected).abs() <= BOUNDS[dtype] * expected.abs() + 1e-30).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [576, 77, 4096])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, width: int) -> None:
    """Up to more numbers than one thread takes, and out of a wider tensor."""
    (x, weight), run, before = make(200, width, dtype), norm(), torch.get_num_threads()
    alone = torch.cat([run(x[i : i + 1], weight, EPS) for i in range(len(x))])
    padded = torch.nn.functional.pad(x, (3, 5), value=torch.nan)[:, 3:-5]
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for rows in (x, padded):
                assert torch.equal(run(rows, weight, EPS), alone)
                assert torch.equal(run(rows[60:77][None], weight, EPS), alone[60:77][None])
    finally:
        torch.set_num_threads(before)
    x[5, width - 1] = torch.nan
    y = run(x, weight, EPS)
    assert bool(y[5].isnan().all())
    assert torch.equal(y[6:], alone[6:])


def test_what_does_not_fit_is_refused() -> None:
    x, weight = make(3, 40, torch.float32)
    for other in (weight[:39], weight.bfloat16()):
        with pytest.raises(ValueError, match=r"x \[3, 40\] of torch.float32 does not fit"):
            norm()(x, other, EPS)
