"""Native products: right beside float64, and a row the same bits in any company and place, on any number of threads.

Knows nothing of models; the layers that use them are tested in tests/runtime/test_linear.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from radixrt.kernels.cpu import native, product
from radixrt.kernels.cpu.product import NativeProduct, pack

needs_compiler = pytest.mark.skipif(native.build().library is None, reason=f"no build: {native.build().reason}")
pytestmark = needs_compiler

DTYPES = [torch.float32, torch.bfloat16]
SUMMING = 6e-7  # of the sum of all sizes: what float32 loses while it sums up to some thousand terms
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}  # of the output: to 8 bits, once
MOST = 70  # rows: blocks of every height, on either side of where panels are widened, and several blocks


def multiply(library: native.Build) -> NativeProduct:
    assert library.library is not None
    return NativeProduct(library.library)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """A product of `MOST` rows with a weight `[n, k]`."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def expected(self) -> torch.Tensor:
        bias = 0 if self.bias is None else self.bias.double()
        return self.x.double() @ self.weight.double().T + bias

    def is_right(self, y: torch.Tensor) -> bool:
        expected, bias = self.expected(), 0 if self.bias is None else self.bias.double().abs()
        sizes = self.x.double().abs() @ self.weight.double().abs().T + bias
        return bool(((y - expected).abs() <= SUMMING * sizes + ROUNDING[y.dtype] * expected.abs()).all())


def make(n: int, k: int, dtype: torch.dtype, *, biased: bool = False, rows: int = MOST, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, k), (n, k), (n,)))
    return Case(x, weight, bias if biased else None)


SHAPES = st.tuples(st.integers(1, 200), st.integers(1, 450))


@given(SHAPES, st.sampled_from(DTYPES), st.booleans(), st.integers(0, MOST), st.integers(0, 99))
def test_it_is_right(shape: tuple[int, int], dtype: torch.dtype, biased: bool, num_rows: int, seed: int) -> None:  # noqa: FBT001
    case = make(*shape, dtype, biased=biased, rows=num_rows, seed=seed)
    y = multiply(native.build())(case.x, pack(case.weight), case.bias)
    assert (y.shape, y.dtype) == ((num_rows, shape[0]), dtype)
    assert case.is_right(y)


@given(SHAPES, st.sampled_from(DTYPES), st.booleans(), st.data())
def test_a_row_has_the_same_bits_in_any_company(
    shape: tuple[int, int],
    dtype: torch.dtype,
    biased: bool,  # noqa: FBT001
    data: st.DataObject,
) -> None:
    case, run = make(*shape, dtype, biased=biased), multiply(native.build())
    weight = pack(case.weight)
    with threads(1):
        alone = torch.cat([run(case.x[i : i + 1], weight, case.bias) for i in range(MOST)])
    for _ in range(4):
        start = data.draw(st.integers(0, MOST - 1))
        stop = data.draw(st.integers(start + 1, MOST))
        with threads(data.draw(st.integers(1, 3))):
            assert torch.equal(run(case.x[start:stop], weight, case.bias), alone[start:stop])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(96, 2048), (1000, 576), (48, 1535)], ids=str)
def test_more_rows_than_go_at_a_time(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """And widths whose rows lie a power of two apart."""
    case, run = make(*shape, dtype, biased=True, rows=1100), multiply(native.build())
    weight = pack(case.weight)
    y = run(case.x, weight, case.bias)
    assert case.is_right(y)
    for start, stop in ((0, 1), (511, 513), (1090, 1100), (100, 400)):
        assert torch.equal(run(case.x[start:stop], weight, case.bias), y[start:stop])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 48, 49, 300])
@pytest.mark.parametrize("k", [32, 256, 800])
def test_rows_that_fill_registers_and_not(dtype: torch.dtype, n: int, k: int) -> None:
    """Beside others that they do not read, on up to three threads."""
    case, run = make(n, k, dtype, biased=True, rows=70), multiply(native.build())
    weight = pack(case.weight)
    alone = torch.cat([run(case.x[i : i + 1], weight, case.bias) for i in range(70)])
    wide = torch.full((70, 3 * k), torch.nan, dtype=dtype)
    wide[:, k : 2 * k] = case.x
    for count in (0, 4, 5, 15, 16, 17, 31, 32, 33, 64, 70):
        for x in (case.x[:count], wide[:count, k : 2 * k], case.x[:1].expand(count, k)):
            with threads(1 + count % 3):
                y = run(x, weight, case.bias)
            assert torch.equal(y, alone[:count] if x.stride(0) else alone[:1].expand(count, n))
    assert case.is_right(alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1e-38, 1.0), (1e-30, 1e-9), (1e-40, 1.0)], ids=str)
def test_the_smallest_numbers_have_the_same_bits(dtype: torch.dtype, sizes: tuple[float, float]) -> None:
    """Below 2^-126 some instructions take numbers for zero, and others do not."""
    case, run = make(100, 96, dtype), multiply(native.build())
    x, weight = case.x * sizes[0], pack(case.weight * sizes[1])
    alone = torch.cat([run(x[i : i + 1], weight, None) for i in range(MOST)])
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(run(x, weight, None).view(bits), alone.view(bits))


@pytest.mark.parametrize("k", [1, 2, 63, 193, 576])
def test_each_output_is_one_chain(k: int) -> None:
    """Fused multiply-adds in order of the inputs, from zero: float64 holds a product of two float32 exactly."""
    case, run = make(50, k, torch.float32, rows=20), multiply(native.build())
    total = torch.zeros(20, 50)
    for i in range(k):
        exact = case.x[:, i : i + 1].double() * case.weight[:, i].double() + total.double()
        total = exact.float()  # rounded twice; where that matters, once in 2^29, the two may differ by a bit
    assert (run(case.x, pack(case.weight), None) != total).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("k", [33, 64])
def test_a_strange_row_stays_alone(dtype: torch.dtype, poison: float, k: int) -> None:
    case, run = make(50, k, dtype), multiply(native.build())
    weight = pack(case.weight)
    clean = run(case.x, weight, None)
    x = case.x.clone()
    x[5, k - 1] = poison
    y = run(x, weight, None)
    assert not y[5].isfinite().any()
    others = torch.arange(MOST) != 5
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_shape_and_stride(dtype: torch.dtype) -> None:
    case, run = make(50, 40, dtype, biased=True), multiply(native.build())
    weight, expected = pack(case.weight), multiply(native.build())(case.x, pack(case.weight), case.bias)
    wide = torch.randn(MOST, 100).to(dtype)
    wide[:, 7:47] = case.x
    assert torch.equal(run(wide[:, 7:47], weight, case.bias), expected)
    assert torch.equal(run(case.x.T.contiguous().T, weight, case.bias), expected)
    assert torch.equal(run(case.x.view(2, 5, 7, 40), weight, case.bias), expected.view(2, 5, 7, 50))
    assert torch.equal(run(case.x[3], weight, case.bias), expected[3])
    assert run(case.x[:0].view(1, 0, 40), weight, case.bias).shape == (1, 0, 50)


def test_what_does_not_fit_is_refused() -> None:
    case, run = make(50, 40, torch.float32), multiply(native.build())
    weight = pack(case.weight)
    for x, bias in (
        (case.x[:, :39], None),
        (case.x.bfloat16(), None),
        (case.x, torch.zeros(50).bfloat16()),
        (case.x, torch.zeros(49)),
    ):
        with pytest.raises(ValueError, match=r"does not fit a weight 50 x 40 of torch\.float32"):
            run(x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(50, 40), (48, 33), (1, 1), (5_000, 300)], ids=str)
def test_a_packed_weight_gives_its_rows_back(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """In pieces of a few megabytes, each of which is released once and then free to change."""
    original = make(*shape, dtype).weight
    weight, released = original.clone(), []

    def release(piece: torch.Tensor) -> None:
        released.append(len(piece))
        piece.zero_()

    packed = pack(weight, release=release)
    assert sum(released) == shape[0]
    assert not weight.any()
    indices = torch.randint(shape[0], (2, 3, 7))
    assert torch.equal(packed.rows(indices), original[indices])
    assert torch.equal(packed.rows(indices[:, :0]), original[indices[:, :0]])


def test_other_instruction_sets_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "avx2" not in native.cpu_facts():
        pytest.skip("not on this CPU")
    monkeypatch.setenv("RADIXRT_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_bfloat16_flags", lambda _: ())  # the one instruction that sums otherwise
    run = multiply(native.build.__wrapped__())
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-O1", "-march=haswell"))
    other = multiply(native.build.__wrapped__())
    for dtype in DTYPES:
        case = make(100, 77, dtype, biased=True, rows=30)
        weight = pack(case.weight)
        assert torch.equal(other(case.x, weight, case.bias), run(case.x, weight, case.bias))


CPUS = {  # flags of a CPU: whether float32, bfloat16 are served
    "GenuineIntel avx2": (False, False),
    "GenuineIntel avx512f": (True, True),
    "GenuineIntel avx512f avx512_bf16": (True, True),
    "GenuineIntel avx512f avx512_bf16 amx_bf16": (True, True),
    "AuthenticAMD avx512f avx512_bf16": (True, True),
}


@pytest.mark.parametrize("cpu", CPUS)
def test_where_it_is_used(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_facts", lambda: cpu)
    assert tuple(product.unserved(dtype) is None for dtype in DTYPES) == CPUS[cpu]
    assert "float64" in str(product.unserved(torch.float64))
