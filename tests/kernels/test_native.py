"""The native kernel against the reference: every dtype, page size, head shape and tree, and bits that no plan changes.

Also its build: other instruction sets, a missing compiler, several first users at once. Knows nothing of models.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from radixrt.kernels import reference
from radixrt.kernels.backend import LayerKV, LayerShape
from radixrt.kernels.cpu import native
from radixrt.kernels.cpu.native import NativeAttention, Prepared
from radixrt.kernels.plan import GROUP_LEN, AttentionPlan, IntArray, build_plan

from ..plans import random_plan
from .pools import pages_go_to_another_pool_and_back

CPU = torch.device("cpu")
NEVER = 2**62  # a sharing cost that no run reaches
# Of the largest output: float32 sums, and bfloat16's own rounding (2^-8) of results and probabilities.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
Heads = tuple[int, int, int]  # query heads, KV heads, elements
Segment = tuple[int, int, int]  # first position, number of rows, leading pages taken from the segment before


@pytest.fixture(scope="module")
def backend() -> NativeAttention:
    return use(native.build())


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def use(built: native.Build) -> NativeAttention:
    if built.library is None:
        pytest.skip(built.reason)
    return NativeAttention(built.library)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Rows over cached pages; every slot that no row may read holds NaN, in both layouts."""

    heads: Heads
    page_size: int
    positions: IntArray
    row_indptr: IntArray
    tables: list[IntArray]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cached: tuple[torch.Tensor, torch.Tensor]  # the keys and values of slots below, before the step
    cached_slots: IntArray
    write_slots: IntArray  # of row i
    num_pages: int

    @property
    def csr(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        return (
            self.positions,
            self.row_indptr,
            np.cumsum([0, *map(len, self.tables)]),
            np.concatenate(self.tables),
        )

    def plan(self, *, sharing_cost: int = 1, exact: bool = True) -> AttentionPlan:
        return build_plan(*self.csr, page_size=self.page_size, exact=exact, sharing_cost=sharing_cost)

    def cache(self, backend: NativeAttention) -> LayerKV:
        """A native cache as it is before the step."""
        shape = LayerShape(self.heads[1], self.heads[2], self.heads[2])
        kv = backend.allocate(self.num_pages, self.page_size, shape, self.q.dtype, CPU)
        backend.fill_slots([kv], np.arange(kv.k.shape[0] * self.page_size), float("nan"))
        write(backend, kv, *self.cached, self.cached_slots)
        return kv

    @cached_property
    def reference_cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both caches as they are after the step."""
        shape = (self.num_pages + 1, self.page_size, self.heads[1], self.heads[2])
        k, v = (torch.full(shape, torch.nan, dtype=self.q.dtype) for _ in range(2))
        for keys, values, slots in ((*self.cached, self.cached_slots), (self.k, self.v, self.write_slots)):
            reference.write_kv(k, v, keys, values, torch.arange(len(slots)), torch.tensor(slots))
        return k, v

    def expected(self, *, window: int | None, softcap: float | None) -> torch.Tensor:
        _, rows, indptr, pages = (torch.tensor(array) for array in self.csr)
        starts = torch.tensor(self.positions[self.row_indptr[:-1]])
        return reference.attend(
            self.q, *self.reference_cache, rows, indptr, pages, starts, scale=0.3, window=window, softcap=softcap
        )

    def run(
        self,
        backend: NativeAttention,
        plan: AttentionPlan,
        *,
        threads: int = 1,
        window: int | None = None,
        softcap: float | None = None,
        kv: LayerKV | None = None,
    ) -> torch.Tensor:
        kv = kv or self.cache(backend)
        step = backend.prepare(plan, np.arange(len(self.positions)), self.write_slots)
        return attend(backend, self.q, self.k, self.v, kv, step, threads=threads, window=window, softcap=softcap)


def attend(
    backend: NativeAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: LayerKV,
    step: Prepared,
    *,
    threads: int = 1,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    torch.set_num_threads(threads)
    return backend.attend(q, k, v, kv, step, scale=0.3, window=window, softcap=softcap)


def write(backend: NativeAttention, kv: LayerKV, k: torch.Tensor, v: torch.Tensor, slots: IntArray) -> None:
    """Put k[i] and v[i] into slot i: a step whose rows each read the first slot of a page, for nothing."""
    indptr, zeros = np.arange(len(slots) + 1), np.zeros(len(slots), dtype=np.int64)
    page_size = kv.k.shape[3]
    plan = AttentionPlan(
        page_size=page_size,
        positions=zeros,
        starts=zeros,
        page_indptr=indptr,
        page_ids=slots // page_size,
        row_indptr=indptr,
        row_ids=indptr[:-1],
        exact=False,
    )
    attend(backend, k, k, v, kv, backend.prepare(plan, indptr[:-1], slots))


def make(
    segments: Sequence[Segment],
    *,
    heads: Heads = (3, 1, 32),
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Step:
    generator = torch.Generator().manual_seed(seed)
    num_pages = sum(-(-(start + rows) // page_size) for start, rows, _ in segments)
    free = (torch.randperm(num_pages, generator=generator) + 1).tolist()
    tables: list[list[int]] = []
    for start, rows, shared in segments:
        kept = tables[-1][: min(shared, start // page_size)] if tables else []
        tables.append(kept + [free.pop() for _ in range(-(-(start + rows) // page_size) - len(kept))])

    def slots(first: int, stop: int, table: list[int]) -> list[int]:
        return [table[position // page_size] * page_size + position % page_size for position in range(first, stop)]

    own = [slots(start, start + rows, table) for (start, rows, _), table in zip(segments, tables, strict=True)]
    before = {slot for (start, *_), table in zip(segments, tables, strict=True) for slot in slots(0, start, table)}
    num_rows = sum(map(len, own))

    def tensor(rows: int, num_heads: int) -> torch.Tensor:
        return torch.randn(rows, num_heads, heads[2], generator=generator).to(dtype)

    return Step(
        heads=heads,
        page_size=page_size,
        positions=np.concatenate([np.arange(start, start + rows) for start, rows, _ in segments]),
        row_indptr=np.cumsum([0, *map(len, own)]),
        tables=[np.array(table) for table in tables],
        q=tensor(num_rows, heads[0]),
        k=tensor(num_rows, heads[1]),
        v=tensor(num_rows, heads[1]),
        cached=(tensor(len(before), heads[1]), tensor(len(before), heads[1])),
        cached_slots=np.array(sorted(before), dtype=np.int64),
        write_slots=np.concatenate(own),
        num_pages=num_pages,
    )


def assert_agrees(
    backend: NativeAttention,
    step: Step,
    plan: AttentionPlan,
    *,
    threads: int = 1,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    plan.check()
    kv = step.cache(backend)
    got = step.run(backend, plan, threads=threads, window=window, softcap=softcap, kv=kv)
    for unpacked, want in zip(backend.unpack(kv), step.reference_cache, strict=True):
        torch.testing.assert_close(unpacked, want, rtol=0, atol=0, equal_nan=True)
    expected = step.expected(window=window, softcap=softcap)
    assert got.dtype == step.q.dtype
    assert got.is_contiguous()
    bound = BOUNDS[got.dtype] * expected.abs().max().item()
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=bound)


def ragged(page_size: int) -> list[Segment]:
    """Decodes, chunks and fresh prompts whose prefix is empty, one token, around a page's end, or long."""
    prefixes = [0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size + 3]
    return [(prefix, rows, 0) for prefix in prefixes for rows in (1, 3)] + [(2 * GROUP_LEN + 5, 2, 0)]


HEADS: list[Heads] = [(9, 3, 64), (2, 2, 32), (8, 1, 80), (4, 1, 128), (2, 1, 256)]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_ragged_segments_agree(backend: NativeAttention, dtype: torch.dtype, page_size: int, heads: Heads) -> None:
    step = make(ragged(page_size), heads=heads, page_size=page_size, dtype=dtype)
    assert_agrees(backend, step, step.plan(exact=page_size % 16 == 0))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (15, None), (16, 2.0), (261, None), (9999, 2.0)])
def test_windows_and_softcap_agree(
    backend: NativeAttention, dtype: torch.dtype, window: int, softcap: float | None
) -> None:
    step = make([*ragged(8), (600, 1, 64), (601, 9, 64)], page_size=8, dtype=dtype)
    for sharing_cost in (1, NEVER):
        assert_agrees(backend, step, step.plan(sharing_cost=sharing_cost), threads=2, window=window, softcap=softcap)


@given(
    segments=st.lists(
        st.tuples(st.integers(0, 1100), st.sampled_from([1, 1, 2, 20]), st.integers(0, 70)), min_size=1, max_size=4
    ),
    page_size=st.sampled_from([8, 16, 128]),
    dtype=st.sampled_from(list(BOUNDS)),
    window=st.sampled_from([None, None, 40, 300]),
    threads=st.integers(1, 2),
    exact=st.booleans(),
    random=st.randoms(use_true_random=False),
)
def test_any_forest_agrees(
    backend: NativeAttention,
    segments: list[Segment],
    page_size: int,
    dtype: torch.dtype,
    window: int | None,
    threads: int,
    exact: bool,  # noqa: FBT001
    random: Random,
) -> None:
    step = make(segments, heads=(2, 1, 32), page_size=page_size, dtype=dtype)
    plan = random_plan(random, *step.csr, page_size=page_size, exact=exact)
    assert_agrees(backend, step, plan, threads=threads, window=window)


def test_a_tree_of_four_levels_agrees(backend: NativeAttention) -> None:
    segments = [(1100, 1, 0), (1100, 1, 16), (1090, 1, 32), (1090, 1, 48), (1100, 3, 64), (1089, 1, 64)]
    step = make(segments, heads=(6, 2, 64))
    plan = step.plan()
    assert sorted(set(plan.starts.tolist())) == [0, 256, 512, 768, 1024]
    assert_agrees(backend, step, plan, threads=2)


# --- the same bits -----------------------------------------------------------------------------------------------

# Decodes over shared prefixes, chunks and a fresh prompt: 1,500 positions deep, so that six groups are folded.
MIXED: list[Segment] = [(1500, 1, 0), (1511, 1, 90), (1400, 70, 85), (700, 1, 40), (300, 2, 0), (0, 40, 0), (900, 1, 3)]
EXACT_CASES = [
    (torch.float32, 16, (6, 2, 64)),
    (torch.bfloat16, 16, (9, 3, 64)),
    (torch.bfloat16, 8, (2, 2, 48)),
    (torch.bfloat16, 32, (8, 2, 80)),
]


@pytest.mark.parametrize(("dtype", "page_size", "heads"), EXACT_CASES, ids=str)
@pytest.mark.parametrize("window", [None, 500])
def test_no_plan_and_no_thread_changes_a_bit(
    backend: NativeAttention, dtype: torch.dtype, page_size: int, heads: Heads, window: int | None
) -> None:
    step = make(MIXED, heads=heads, page_size=page_size, dtype=dtype)
    expected = step.run(backend, step.plan(sharing_cost=NEVER), window=window)
    for threads in (1, 2):
        plans = [step.plan(sharing_cost=1), step.plan(sharing_cost=NEVER)]
        plans += [random_plan(Random(i), *step.csr, page_size=page_size, exact=True) for i in range(6)]
        for plan in plans:
            assert torch.equal(step.run(backend, plan, threads=threads, window=window), expected)


@pytest.mark.parametrize(("dtype", "page_size", "heads"), EXACT_CASES, ids=str)
def test_no_neighbour_and_no_page_order_changes_a_bit(
    backend: NativeAttention, dtype: torch.dtype, page_size: int, heads: Heads
) -> None:
    step = make(MIXED, heads=heads, page_size=page_size, dtype=dtype)
    expected = step.run(backend, step.plan())
    k, v = step.reference_cache
    for segment, table in enumerate(step.tables):
        rows = slice(int(step.row_indptr[segment]), int(step.row_indptr[segment + 1]))
        slots = np.arange(int(step.positions[rows][-1]) + 1)
        alone = backend.allocate(len(table), page_size, LayerShape(heads[1], *heads[2:] * 2), dtype, CPU)
        where = table[slots // page_size], slots % page_size
        write(backend, alone, k[where], v[where], slots + page_size)  # on pages 1, 2, ... in order
        positions = step.positions[rows]
        plan = build_plan(
            *(positions, np.array([0, len(positions)]), np.array([0, len(table)]), np.arange(len(table)) + 1),
            page_size=page_size,
            exact=True,
            sharing_cost=1,
        )
        prepared = backend.prepare(plan, np.arange(len(positions)), positions + page_size)
        got = attend(backend, step.q[rows], step.k[rows], step.v[rows], alone, prepared)
        assert torch.equal(got, expected[rows])


@pytest.mark.parametrize(("dtype", "page_size", "heads"), EXACT_CASES, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 64, 333])
def test_no_chunk_size_changes_a_bit(
    backend: NativeAttention, dtype: torch.dtype, page_size: int, heads: Heads, chunk: int
) -> None:
    step = make([(0, 600, 0)], heads=heads, page_size=page_size, dtype=dtype)
    expected = step.run(backend, step.plan())
    kv = step.cache(backend)
    parts = []
    for first in range(0, 600, chunk):
        rows = slice(first, first + chunk)
        positions = step.positions[rows]
        pages = step.tables[0][: -(-(int(positions[-1]) + 1) // page_size)]
        csr = (positions, np.array([0, len(positions)]), np.array([0, len(pages)]), pages)
        plan = build_plan(*csr, page_size=page_size, exact=True, sharing_cost=1)
        prepared = backend.prepare(plan, np.arange(len(positions)), step.write_slots[rows])
        parts.append(attend(backend, step.q[rows], step.k[rows], step.v[rows], kv, prepared))
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize(("dtype", "page_size", "heads"), EXACT_CASES, ids=str)
@pytest.mark.parametrize(
    "sizes", [(1e-30, 1e-9, 1.0), (1.0, 1.0, 1e-38), (1.0, 1.0, 1e-40), (1e-39, 1.0, 1.0)], ids=str
)
def test_no_plan_changes_a_bit_of_the_smallest_numbers(
    backend: NativeAttention, dtype: torch.dtype, page_size: int, heads: Heads, sizes: tuple[float, float, float]
) -> None:
    """Below 2^-126 some instructions take numbers for zero, and others do not."""
    step = make(MIXED, heads=heads, page_size=page_size, dtype=dtype)
    q, k, v = sizes
    cached = step.cached[0] * k, step.cached[1] * v
    step = replace(step, q=step.q * q, k=step.k * k, v=step.v * v, cached=cached)
    expected = bits(step.run(backend, step.plan(sharing_cost=NEVER)))
    for plan in [step.plan(), *(random_plan(Random(i), *step.csr, page_size=page_size, exact=True) for i in range(3))]:
        assert torch.equal(bits(step.run(backend, plan, threads=2)), expected)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Zeros of either sign apart."""
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def test_no_neighbour_changes_the_sign_of_a_zero(backend: NativeAttention) -> None:
    """The row at position 63 adds a zero, which is negative where sums below 2^-126 count as none; others add more."""
    step = make([(0, 96, 0)], heads=(1, 1, 32), dtype=torch.bfloat16)
    q, v = torch.zeros_like(step.q), torch.zeros_like(step.v)
    v[0], v[32] = 1.5 * 2**-126, -1.75 * 2**-126
    step = replace(step, q=q, v=v)
    backend_cache = step.cache(backend)
    together = step.run(backend, step.plan(), kv=backend_cache)
    pages = step.tables[0][:4]
    csr = (np.array([63]), np.array([0, 1]), np.array([0, 4]), pages)
    plan = build_plan(*csr, page_size=16, exact=True, sharing_cost=1)
    prepared = backend.prepare(plan, np.arange(1), step.write_slots[63:64])
    alone = attend(backend, step.q[63:64], step.k[63:64], step.v[63:64], backend_cache, prepared)
    assert torch.equal(bits(alone[0]), bits(together[63]))


def test_without_exact_plans_change_bits(backend: NativeAttention) -> None:
    """The tests above have power: nodes cut inside groups, which only inexact plans allow, give other bits."""
    step = make(MIXED, heads=(6, 2, 64))
    expected = step.run(backend, step.plan(sharing_cost=NEVER, exact=False))
    got = step.run(backend, step.plan(sharing_cost=1, exact=False))
    assert not torch.equal(got, expected)


# --- what is read and written ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_nan_reaches_those_who_read_it_and_nobody_else(backend: NativeAttention, dtype: torch.dtype) -> None:
    step = make([(300, 1, 0), (310, 1, 16), (290, 40, 0)], dtype=dtype)
    poisoned = 2 + 20  # the row at position 310 of the chunk
    for tensor in (step.k, step.v):
        before = tensor[poisoned].clone()
        tensor[poisoned, :, 3] = torch.nan
        got = step.run(backend, step.plan(), threads=2)
        tensor[poisoned] = before
        bad = got.isnan().any(dim=(1, 2))
        assert bad.tolist() == [False] * poisoned + [True] * (42 - poisoned)
        assert torch.equal(got[:poisoned], step.run(backend, step.plan(), threads=2)[:poisoned])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_nan_before_a_window_reaches_nobody_behind(backend: NativeAttention, dtype: torch.dtype) -> None:
    """Rows at 300 to 339, of which each reads 20 positions; the last that reads position 285 is at 304."""
    step = make([(300, 40, 0)], dtype=dtype)
    expected = step.run(backend, step.plan(), window=20)
    slot = step.tables[0][285 // 16] * 16 + 285 % 16
    step.cached[1][np.searchsorted(step.cached_slots, slot)] = torch.nan
    got = step.run(backend, step.plan(), window=20)
    assert got.isnan().any(dim=(1, 2)).tolist() == [True] * 5 + [False] * 35
    assert torch.equal(got[5:], expected[5:])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("page_size", [8, 64])
def test_writes_copies_and_fills_agree(backend: NativeAttention, dtype: torch.dtype, page_size: int) -> None:
    """A row may go to several slots; strided queries, keys and values are read as they are."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(5, 6, 3 * 32, generator=generator).to(dtype)
    q, k, v = packed[..., :32], packed[:, :2, 32:64], packed[:, :2, 64:]
    layers = [backend.allocate(6, page_size, LayerShape(2, 32, 32), dtype, CPU) for _ in range(3)]
    expected = [backend.unpack(kv) for kv in layers]
    rows, slots = np.array([0, 3, 3, 4, 1, 2, 3]), np.array([21, 5, 6, 23, 8, 13, 40])
    positions, pages = np.arange(5), np.array([1])
    plan = build_plan(
        *(positions, np.array([0, 5]), np.array([0, 1]), pages), page_size=page_size, exact=True, sharing_cost=1
    )
    step = backend.prepare(plan, rows, slots)
    for kv in layers:
        attend(backend, q, k, v, kv, step)
    backend.copy_pages(layers, layers, np.array([0, 1]), np.array([4, 3]))
    backend.fill_slots(layers, np.array([7, page_size]), 2.0)
    for kv, want in zip(layers, expected, strict=True):
        reference.write_kv(*want, k, v, torch.tensor(rows), torch.tensor(slots))
        for cache, got in zip(want, backend.unpack(kv), strict=True):
            reference.copy_pages(cache, torch.tensor([0, 1]), torch.tensor([4, 3]))
            cache[0, 7] = cache[1, 0] = 2.0
            assert torch.equal(got, cache)


def test_pages_go_to_another_pool_and_back(backend: NativeAttention) -> None:
    pages_go_to_another_pool_and_back(backend, page_size=16, shape=LayerShape(2, 32, 32))


def test_it_runs_on_torchs_own_threads(backend: NativeAttention) -> None:
    step = make([(2000, 1, 0)] * 4, heads=(9, 3, 64))
    torch.set_num_threads(2)
    torch.randn(512, 512) @ torch.randn(512, 512)
    threads = len(os.listdir("/proc/self/task"))
    step.run(backend, step.plan(), threads=2)
    assert len(os.listdir("/proc/self/task")) == threads


# --- what is served, and how it is built -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "page_size", "shape", "said"),
    [
        (torch.float64, 16, LayerShape(1, 64, 64), "torch.float64 is neither"),
        (torch.float32, 4, LayerShape(1, 64, 64), "page size 4 is none of 8"),
        (torch.float32, 16, LayerShape(1, 64, 32), "keys have 64 elements and values 32"),
        (torch.float32, 16, LayerShape(1, 20, 20), "head dimension 20"),
        (torch.bfloat16, 128, LayerShape(1, 256, 256), None),
    ],
)
def test_what_is_not_served_is_said(
    backend: NativeAttention, dtype: torch.dtype, page_size: int, shape: LayerShape, said: str | None
) -> None:
    reason = native.unserved(dtype, page_size, shape)
    assert (reason is None) == (said is None)
    if said is not None:
        assert said in str(reason)
        with pytest.raises(ValueError, match="cannot serve this cache: .*" + said):
            backend.allocate(1, page_size, shape, dtype, CPU)


def test_tensors_that_do_not_fit_are_refused(backend: NativeAttention) -> None:
    step = make([(5, 1, 0)])
    kv, prepared = step.cache(backend), backend.prepare(step.plan(), np.arange(1), step.write_slots)
    with pytest.raises(ValueError, match="do not fit 1 rows"):
        attend(backend, step.q.repeat(2, 1, 1), step.k, step.v, kv, prepared)
    with pytest.raises(ValueError, match="do not fit"):
        attend(backend, step.q, step.k.bfloat16(), step.v, kv, prepared)
    with pytest.raises(ValueError, match="must be positive"):
        attend(backend, step.q, step.k, step.v, kv, prepared, window=0)


@pytest.fixture
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RADIXRT_CACHE", str(tmp_path))


@pytest.mark.usefixtures("backend", "_own_cache")
@pytest.mark.parametrize(
    ("flag", "needed"),
    [
        ("-march=haswell", "avx2"),
        ("-march=native", "avx512f"),
        ("-DRADIXRT_BF16_DOT", "avx512_bf16"),
        ("-DRADIXRT_AMX", "amx_bf16"),
    ],
)
def test_other_instruction_sets_agree(monkeypatch: pytest.MonkeyPatch, flag: str, needed: str) -> None:
    if needed not in native.cpu_facts() or ("AMX" in flag and not native._has_tiles()):
        pytest.skip("not on this CPU")
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-O1"))
    monkeypatch.setattr(native, "_bfloat16_flags", lambda cpu: (flag,))
    backend = use(native.build.__wrapped__())
    for dtype in BOUNDS:
        step = make([*ragged(8), (600, 1, 64), (601, 9, 64)], page_size=8, heads=(4, 2, 48), dtype=dtype)
        expected = step.run(backend, step.plan(sharing_cost=NEVER))
        assert_agrees(backend, step, step.plan(), threads=2)
        assert torch.equal(step.run(backend, step.plan(), threads=2), expected)


@pytest.mark.usefixtures("backend", "_own_cache")
def test_several_first_users_build_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-O0"))
    (tmp_path / "native" / "cut-off").mkdir(parents=True)  # what a killed build leaves
    with ThreadPoolExecutor(2) as pool:
        builds = list(pool.map(lambda _: native.build.__wrapped__(), range(2)))
    assert [built.library is not None for built in builds] == [True, True]
    assert len(list((tmp_path / "native").glob("*.so"))) == 1
    assert len(list((tmp_path / "native").iterdir())) == 2


@pytest.mark.usefixtures("_own_cache")
def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    built = native.build.__wrapped__()
    assert built.library is None
    assert "cannot be built with c++: " in built.reason
    assert "No such file" in built.reason


@pytest.mark.usefixtures("backend", "_own_cache")
def test_a_compile_error_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-march=abacus"))
    built = native.build.__wrapped__()
    assert built.library is None
    assert "abacus" in built.reason
    assert "\n" not in built.reason
    assert not list((tmp_path / "native").glob("*.so"))


@pytest.mark.usefixtures("backend", "_own_cache")
@pytest.mark.parametrize("length", [4_096, -100])
def test_a_library_that_was_cut_off_is_built_again(
    length: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To load it would end the process."""
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-O0"))
    monkeypatch.setenv("CXX", "c++ -DUNUSED=1")
    assert native.build.__wrapped__().library is not None
    [path] = (tmp_path / "native").glob("*.so")
    whole = path.read_bytes()
    path.unlink()  # this process has it mapped
    path.write_bytes(whole[:length])
    assert native.build.__wrapped__().library is not None
    assert len(path.read_bytes()) == len(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_any_size_give_finite_rows(backend: NativeAttention, dtype: torch.dtype) -> None:
    """Far beyond 2^31, where a score times log2(e) rounds by more than an exponent can hold."""
    step = make(ragged(16), dtype=dtype)
    q = step.q
    for size in (1e3, 1e6, 1e12):
        loud = replace(step, q=q * size)
        assert loud.run(backend, loud.plan()).isfinite().all()
