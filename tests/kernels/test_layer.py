"""Native decoder layers: to the bit what their parts give one by one, on any number of threads.

The parts are tested against their oracles beside this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from radixrt.kernels.backend import LayerKV, LayerShape
from radixrt.kernels.cpu import native
from radixrt.kernels.cpu.gate import NativeGate
from radixrt.kernels.cpu.layer import NativeLayer
from radixrt.kernels.cpu.native import DTYPES, NativeAttention, Prepared
from radixrt.kernels.cpu.norm import NativeNorm
from radixrt.kernels.cpu.product import NativeProduct, pack
from radixrt.kernels.cpu.rotation import NativeRotation
from radixrt.kernels.plan import build_plan

pytestmark = pytest.mark.skipif(native.build().library is None, reason=f"no build: {native.build().reason}")
EPS = (1e-6, 1e-5)
Sizes = tuple[int, int, int, int, int]  # width, query heads, KV heads, elements of a head, inner width
Segment = tuple[int, int]  # first position, number of rows


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer's weights, and rows of sequences that stand after random keys and values."""

    sizes: Sizes
    norms: list[torch.Tensor]
    weights: list[torch.Tensor]  # qkv, out, gate_up, down
    biases: list[torch.Tensor] | list[None]
    window: int | None
    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    kv: LayerKV  # before the step
    step: Prepared
    backend: NativeAttention

    @property
    def shape(self) -> LayerShape:
        return LayerShape(self.sizes[2], self.sizes[3], self.sizes[3])

    def cache(self) -> LayerKV:
        return LayerKV(self.kv.k.clone(), self.kv.v.clone())

    def layer(self, **changes: Any) -> NativeLayer:
        given: dict[str, Any] = {
            "products": list(zip(map(pack, self.weights), self.biases, strict=True)),
            "norms": list(zip(self.norms, EPS, strict=True)),
            "shape": self.shape,
            "scale": 0.3,
            "window": self.window,
        }
        return NativeLayer(library(), **(given | changes))

    def run(self, kv: LayerKV) -> torch.Tensor:
        return self.layer()(self.x, self.cos, self.sin, kv, self.step)

    def run_parts(self, kv: LayerKV) -> torch.Tensor:
        _, num_heads, num_kv_heads, dim, _ = self.sizes
        norm, multiply = NativeNorm(library()), NativeProduct(library())
        weights = list(zip(map(pack, self.weights), self.biases, strict=True))
        heads = multiply(norm(self.x, self.norms[0], EPS[0]), *weights[0]).view(len(self.x), -1, dim)
        NativeRotation(library())(heads[:, : num_heads + num_kv_heads], self.cos, self.sin)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        attended = self.backend.attend(q, k, v, kv, self.step, scale=0.3, window=self.window)
        x = multiply(attended.flatten(1), *weights[1]) + self.x
        opened = multiply(norm(x, self.norms[1], EPS[1]), *weights[2])
        return multiply(NativeGate(library())(opened), *weights[3]) + x


def library() -> Any:
    return native.build().library


def make(
    segments: list[Segment],
    sizes: Sizes = (96, 4, 2, 32, 80),
    *,
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
    biased: bool = False,
    window: int | None = None,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    width, num_heads, num_kv_heads, dim, inner = sizes
    shapes = [((num_heads + 2 * num_kv_heads) * dim, width), (width, num_heads * dim), (2 * inner, width)]
    shapes.append((width, inner))
    num_pages = [-(-(start + rows) // page_size) for start, rows in segments]
    positions = np.concatenate([np.arange(start, start + rows) for start, rows in segments])
    page_indptr, row_indptr = np.cumsum([0, *num_pages]), np.cumsum([0, *(rows for _, rows in segments)])
    page_ids = 1 + torch.randperm(sum(num_pages), generator=generator).numpy()
    first_pages = np.repeat(page_indptr[:-1], np.diff(row_indptr))
    slots = page_ids[first_pages + positions // page_size] * page_size + positions % page_size
    plan = build_plan(positions, row_indptr, page_indptr, page_ids, page_size=page_size, exact=True, sharing_cost=256)
    backend = NativeAttention(library())
    shape = LayerShape(num_kv_heads, dim, dim)
    kv = backend.allocate(sum(num_pages), page_size, shape, dtype, torch.device("cpu"))
    for cache in (kv.k, kv.v):
        cache.copy_(tensor(*cache.shape))
    angles = torch.rand(len(positions), 1, dim, generator=generator) * 6
    return Case(
        sizes=sizes,
        norms=[tensor(width), tensor(width)],
        weights=[tensor(*shape) / shape[1] ** 0.5 for shape in shapes],
        biases=[tensor(outputs) for outputs, _ in shapes] if biased else [None] * 4,
        window=window,
        x=tensor(len(positions), width),
        cos=angles.cos().to(dtype),
        sin=angles.sin().to(dtype),
        kv=kv,
        step=backend.prepare(plan, np.arange(len(positions)), slots),
        backend=backend,
    )


def is_its_parts(case: Case) -> bool:
    """Outputs and caches, on several numbers of threads."""
    caches = [case.cache(), case.cache()]
    torch.set_num_threads(1)
    expected = case.run_parts(caches[0])
    assert bool(expected.isfinite().all())
    found = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        found.append(torch.equal(case.run(caches[1]), expected))
    return all(found) and all(torch.equal(getattr(caches[0], name), getattr(caches[1], name)) for name in "kv")


@given(
    segments=st.lists(st.tuples(st.integers(0, 600), st.sampled_from([1, 1, 1, 2, 40])), min_size=1, max_size=12),
    sizes=st.sampled_from([(96, 4, 2, 32, 80), (64, 2, 2, 48, 96), (70, 3, 1, 32, 33), (128, 8, 1, 64, 256)]),
    dtype=st.sampled_from(DTYPES),
    page_size=st.sampled_from([8, 16, 64]),
    biased=st.booleans(),
    window=st.sampled_from([None, None, 40, 300]),
    seed=st.integers(0, 99),
)
def test_it_is_its_parts(segments: list[Segment], sizes: Sizes, **settings: Any) -> None:
    assert is_its_parts(make(segments, sizes, **settings))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "segments",
    [[(512, 1)], [(700, 1)] * 8, [(300, 1)] * 33, [(0, 530), (9, 1)]],
    ids=["one", "eight", "many", "chunk"],
)
def test_a_layer_of_a_real_size_is_its_parts(dtype: torch.dtype, segments: list[Segment]) -> None:
    """Widths at which rows would share places of a cache, and more rows than a product takes at once."""
    assert is_its_parts(make(segments, (576, 9, 3, 64, 1536), dtype=dtype))


@pytest.mark.parametrize(("num_threads", "repeats"), [(9, 200), (19, 40)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_that_many_threads_run_over_and_over(dtype: torch.dtype, num_threads: int, repeats: int) -> None:
    """More threads than cores, so that some come to a loop when others are done with it; and more than have blocks."""
    case = make([(40, 1)] * 5, (256, 4, 2, 32, 512), dtype=dtype)
    kv, layer = case.cache(), case.layer()
    torch.set_num_threads(1)
    expected = layer(case.x, case.cos, case.sin, kv, case.step)
    torch.set_num_threads(num_threads)
    for _ in range(repeats):
        assert torch.equal(layer(case.x, case.cos, case.sin, kv, case.step), expected)


def test_what_lies_apart_is_taken_together() -> None:
    case = make([(20, 1), (3, 4)])
    expected = case.run_parts(case.cache())
    x = torch.nn.functional.pad(case.x, (1, 2), value=torch.nan)[:, 1:-2]
    cos, sin = (torch.stack((each, each), -1)[..., 0] for each in (case.cos, case.sin))
    assert torch.equal(case.layer()(x[None], cos, sin, case.cache(), case.step), expected[None])


@pytest.mark.parametrize("part", range(4))
def test_weights_that_do_not_fit_are_refused(part: int) -> None:
    case = make([(0, 2)])
    products: list[Any] = [(pack(weight), None) for weight in case.weights]
    wrong = list(products)
    wrong[part] = (pack(case.weights[part][1:]), None)
    with pytest.raises(ValueError, match="do not fit"):
        case.layer(products=wrong)
    wrong[part] = (products[part][0], torch.zeros(3))
    with pytest.raises(ValueError, match="do not fit"):
        case.layer(products=wrong)
    wrong[part] = (pack(case.weights[part].bfloat16()), None)
    with pytest.raises(ValueError, match="do not fit"):
        case.layer(products=wrong)
    with pytest.raises(ValueError, match="do not fit"):
        case.layer(norms=[(case.norms[0], 1e-5), (case.norms[1][1:], 1e-5)])
    with pytest.raises(ValueError, match="do not fit"):
        case.layer(shape=LayerShape(2, 32, 16))


def test_rows_that_do_not_fit_are_refused() -> None:
    case, other = make([(0, 2)]), make([(0, 3)], (96, 4, 2, 32, 80), page_size=32)
    layer, kv = case.layer(), case.cache()
    given: list[Any] = [case.x, case.cos, case.sin, kv, case.step]
    layer(*given)
    changes: list[tuple[int, Any]] = [
        (0, case.x[:1]),
        (0, case.x[:, 1:]),
        (0, case.x.bfloat16()),
        (1, case.cos[:1]),
        (2, case.sin[..., 1:]),
        (2, case.sin.bfloat16()),
        (3, other.kv),
        (4, other.step),
    ]
    for at, wrong in changes:
        with pytest.raises(ValueError, match="do not fit"):
            layer(*(wrong if i == at else each for i, each in enumerate(given)))
