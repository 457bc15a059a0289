"""Native rotation: torch's own bits, in any company and on any number of threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from radixrt.kernels.cpu import native
from radixrt.kernels.cpu.native import DTYPES
from radixrt.kernels.cpu.rotation import NativeRotation

pytestmark = pytest.mark.skipif(native.build().library is None, reason=f"no build: {native.build().reason}")


def rotation() -> NativeRotation:
    library = native.build().library
    assert library is not None
    return NativeRotation(library)


def make(num_rows: int, num_heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Heads in the middle of wider rows, as a fused product gives them; cos and sin."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_rows, num_heads + 3, dim), (num_rows, 1, dim), (num_rows, 1, dim))
    wide, cos, sin = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return wide[:, 1:-2], cos, sin


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 70), st.sampled_from(DTYPES), st.integers(0, 99))
def test_it_has_the_bits_of_torch(num_rows: int, num_heads: int, half: int, dtype: torch.dtype, seed: int) -> None:
    x, cos, sin = make(num_rows, num_heads, 2 * half, dtype, seed)
    expected = x * cos + x.roll(half, -1) * sin
    together = x.clone()
    rotation()(x, cos, sin)
    assert torch.equal(x, expected)
    apart = [torch.stack((part, part), -1)[..., 0] for part in (cos, sin)]
    rotation()(together, *apart)
    assert torch.equal(together, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """Up to more numbers than one thread takes; what lies around the heads stays."""
    run, before = rotation(), torch.get_num_threads()
    x, cos, sin = make(200, 9, 80, dtype)
    expected = x * cos + x.roll(40, -1) * sin
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            wide = torch.nn.functional.pad(x, (0, 0, 2, 1), value=torch.nan)
            run(wide[:, 2:-1], cos, sin)
            assert torch.equal(wide[:, 2:-1], expected)
            assert bool(wide[:, [0, 1, -1]].isnan().all())
    finally:
        torch.set_num_threads(before)


def test_what_does_not_fit_is_refused() -> None:
    x, cos, sin = make(4, 2, 32, torch.float32)
    odd = [part[..., :31].contiguous() for part in (x, cos, sin)]
    for case in (
        (x, cos[:3], sin),
        (x, cos, sin[..., :30]),
        (x.transpose(0, 1), cos, sin),
        (x.bfloat16(), cos, sin),
        odd,
    ):
        before = case[0].clone()
        with pytest.raises(ValueError, match="does not fit"):
            rotation()(*case)
        assert torch.equal(case[0], before)
