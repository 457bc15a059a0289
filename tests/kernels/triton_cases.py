"""The Triton kernels in the interpreter against the reference. `test_triton.py` runs this file in its own process.

The interpreter must be chosen before triton is imported, and an interpreted triton serves nobody else in a process. It
takes milliseconds a program, so shapes are small; a tile of 64 rows and a chunk of 64 tokens are the kernels' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from radixrt.kernels import reference
from radixrt.kernels.backend import AttentionBackend, LayerKV, LayerShape
from radixrt.kernels.plan import AttentionPlan, build_plan
from radixrt.kernels.triton import schedule
from radixrt.kernels.triton.backend import Step, TritonAttention

CPU = torch.device("cpu")
BOUNDS = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
HALF = (torch.float16, torch.bfloat16)
TWO = (torch.float32, torch.bfloat16)  # float16 takes the same path as bfloat16, without the widening

Segment = tuple[int, int, int]  # first position, number of rows, leading pages taken from the segment before


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split whatever is longer than one block of tokens."""
    monkeypatch.setattr(schedule, "MIN_CHUNK_LEN", 1)


@dataclass(frozen=True)
class Packed:
    """Segments over one pool in which every slot holds NaN but those of positions before each segment's rows."""

    backend: TritonAttention
    plan: AttentionPlan
    step: Step
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # as `reference.attend` takes them
    writes: tuple[torch.Tensor, torch.Tensor]  # rows, slots
    before: torch.Tensor  # slots that hold values
    num_pages: int

    def check(
        self,
        shape: LayerShape,
        group: int,
        dtype: torch.dtype,
        *,
        seed: int = 0,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Run one layer: the caches must equal the reference's, and the returned result must be within bounds."""
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int) -> torch.Tensor:
            """With the first two dimensions the other way round in memory, as models give them."""
            return torch.randn(size[1], size[0], *size[2:], generator=generator).to(dtype).transpose(0, 1)

        page_size = self.plan.page_size
        kv = self.backend.allocate(self.num_pages, page_size, shape, dtype, CPU)
        self.backend.fill_slots([kv], np.arange((self.num_pages + 1) * page_size), torch.nan)
        for cache, dim in ((kv.k, shape.key_dim), (kv.v, shape.value_dim)):
            cache.view(-1, shape.num_heads, dim)[self.before] = random(len(self.before), shape.num_heads, dim)
        k_cache, v_cache = self.backend.unpack(kv)
        q = random(self.plan.num_rows, shape.num_heads * group, shape.key_dim)
        k = random(self.plan.num_rows, shape.num_heads, shape.key_dim)
        v = random(self.plan.num_rows, shape.num_heads, shape.value_dim)
        got = self.backend.attend(q, k, v, kv, self.step, scale=0.2, window=window, softcap=softcap)
        reference.write_kv(k_cache, v_cache, k, v, *self.writes)
        for cache, expected in zip(self.backend.unpack(kv), (k_cache, v_cache), strict=True):
            torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)
        want = reference.attend(q, k_cache, v_cache, *self.tables, scale=0.2, window=window, softcap=softcap)
        assert want.isfinite().all()
        assert got.dtype == dtype
        assert got.is_contiguous()
        torch.testing.assert_close(got.double(), want, rtol=0, atol=BOUNDS[dtype])
        return got

    def num_items(self) -> list[list[int]]:
        """For each kind of layer seen, the items at each height of tile."""
        return [[len(items) for items in work.items] for work in self.step.work.values()]


def pack(segments: Sequence[Segment], *, page_size: int, sharing_cost: int = 1) -> Packed:
    backend = TritonAttention(CPU)
    rng = np.random.default_rng(0)
    num_pages = sum(-(-(start + rows) // page_size) for start, rows, _ in segments)
    free = (rng.permutation(num_pages) + 1).tolist()
    tables: list[list[int]] = []
    for start, rows, shared in segments:
        kept = tables[-1][: min(shared, start // page_size)] if tables else []
        tables.append(kept + [free.pop() for _ in range(-(-(start + rows) // page_size) - len(kept))])
    slots = [(np.array(table)[:, None] * page_size + np.arange(page_size)).ravel() for table in tables]
    new = np.concatenate([slots[i][start : start + rows] for i, (start, rows, _) in enumerate(segments)])
    before = np.unique(np.concatenate([slots[i][:start] for i, (start, _, _) in enumerate(segments)]))
    row_indptr, page_indptr = (
        np.cumsum([0, *counts]) for counts in ([rows for _, rows, _ in segments], [len(table) for table in tables])
    )
    page_ids = np.concatenate([np.array(table) for table in tables])
    positions = np.concatenate([np.arange(start, start + rows) for start, rows, _ in segments])
    plan = build_plan(
        positions, row_indptr, page_indptr, page_ids, page_size=page_size, exact=False, sharing_cost=sharing_cost
    )
    plan.check()
    starts = torch.tensor([start for start, _, _ in segments])
    return Packed(
        backend=backend,
        plan=plan,
        step=backend.prepare(plan, np.arange(len(new)), new),
        tables=(torch.tensor(row_indptr), torch.tensor(page_indptr), torch.tensor(page_ids), starts),
        writes=(torch.arange(len(new)), torch.tensor(new)),
        before=torch.tensor(before),
        num_pages=num_pages,
    )


def test_it_is_a_backend() -> None:
    backend: AttentionBackend = TritonAttention(CPU)
    assert backend.name == "triton"
    assert backend.inexact(torch.float32, 16, LayerShape(1, 64, 64), 3)


@pytest.mark.parametrize("dtype", TWO, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 24, 128])
def test_ragged_decodes_and_chunks_agree(dtype: torch.dtype, page_size: int) -> None:
    prefixes = [0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size + 2]
    segments = [(prefix, 1, 0) for prefix in prefixes] + [(0, 2, 0), (page_size + 1, 5, 0)]
    pack(segments, page_size=page_size).check(LayerShape(1, 32, 32), 3, dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("shape", "group"),
    [
        (LayerShape(3, 64, 64), 3),
        (LayerShape(2, 128, 128), 4),
        (LayerShape(4, 32, 32), 1),
        (LayerShape(1, 24, 40), 20),
        (LayerShape(1, 256, 256), 2),
    ],
    ids=str,
)
def test_head_shapes_agree(dtype: torch.dtype, shape: LayerShape, group: int) -> None:
    pack([(20, 1, 0), (70, 2, 0)], page_size=16).check(shape, group, dtype)


@pytest.mark.parametrize("dtype", TWO, ids=str)
def test_one_decode_over_many_chunks_agrees(dtype: torch.dtype) -> None:
    packed = pack([(1300, 1, 0)], page_size=16)
    packed.check(LayerShape(1, 32, 32), 4, dtype)
    ((items, *_),) = packed.num_items()
    assert items == (21 if dtype in HALF else 41)  # more than one block of partials for the merge


@pytest.mark.parametrize("dtype", TWO, ids=str)
def test_a_long_chunk_over_a_cached_prefix_agrees(dtype: torch.dtype) -> None:
    """70 rows of 2 heads are three tiles of 64, which see different numbers of tokens."""
    packed = pack([(67, 70, 0)], page_size=16)
    packed.check(LayerShape(1, 32, 32), 2, dtype)
    assert packed.num_items() == [[0, 3 * 3] if dtype in HALF else [9 * 5]]


@pytest.mark.parametrize("dtype", TWO, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, 1.5), (1, None), (17, 1.5), (70, None), (1000, None)])
def test_windows_and_softcaps_agree(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    segments = [(0, 1, 0), (200, 1, 0), (100, 1, 0), (130, 9, 0), (149, 1, 8)]
    pack(segments, page_size=16).check(LayerShape(1, 32, 32), 4, dtype, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_tree_of_depth_3_agrees(dtype: torch.dtype) -> None:
    """All share 80 tokens, the first four 48 more, two of these 32 more; the rows of a chunk are among them."""
    segments = [(160, 1, 0), (167, 1, 10), (140, 3, 8), (131, 1, 8), (90, 1, 5), (99, 8, 5), (80, 1, 5)]
    packed = pack(segments, page_size=16)
    assert [start for start, _, _ in packed.plan.nodes()].count(0) == 1
    assert max(np.bincount(packed.plan.row_ids)) == 4  # three shared nodes and its own
    packed.check(LayerShape(1, 32, 32), 4, dtype)
    if dtype in HALF:
        assert all(packed.num_items()[0])  # tiles of both heights


@pytest.mark.parametrize("sharing_cost", [1, 10_000])
def test_sharing_does_not_change_the_result(sharing_cost: int) -> None:
    segments = [(70, 1, 0), (64, 4, 4), (80, 1, 4)]
    packed = pack(segments, page_size=16, sharing_cost=sharing_cost)
    assert packed.plan.num_nodes == (4 if sharing_cost == 1 else 3)
    packed.check(LayerShape(2, 32, 32), 3, torch.float32)


def test_layers_of_any_kind_share_one_step() -> None:
    packed = pack([(70, 1, 0), (64, 4, 4)], page_size=16)
    packed.check(LayerShape(2, 32, 32), 3, torch.float32)
    packed.check(LayerShape(2, 32, 32), 3, torch.float32, seed=1)
    assert len(packed.num_items()) == 1
    packed.check(LayerShape(1, 64, 32), 2, torch.float16)
    packed.check(LayerShape(1, 64, 32), 2, torch.float16, window=20)
    assert len(packed.num_items()) == 3


def test_the_same_inputs_give_the_same_bits() -> None:
    packed = pack([(70, 1, 0), (64, 4, 4)], page_size=16)
    first, second = (packed.check(LayerShape(1, 32, 32), 3, torch.bfloat16) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.usefixtures("_short_chunks")
@settings(max_examples=settings().max_examples // 10)
@given(
    segments=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 5), st.integers(0, 20)), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 4, 8]),
    window=st.sampled_from([None, 1, 30]),
    softcap=st.sampled_from([None, 2.0]),
    dtype=st.sampled_from(list(BOUNDS)),
)
def test_any_forest_agrees(
    segments: list[Segment], page_size: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    packed = pack(segments, page_size=page_size)
    packed.check(LayerShape(1, 16, 16), 2, dtype, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_row_is_written_to_all_its_slots(dtype: torch.dtype) -> None:
    """20 pairs are two programs; row 4 is written nowhere."""
    generator = torch.Generator().manual_seed(1)
    plan = pack([(8, 5, 0)], page_size=4).plan
    backend = TritonAttention(CPU)
    kv = backend.allocate(8, 4, LayerShape(2, 24, 16), dtype, CPU)
    k_cache, v_cache = backend.unpack(kv)
    rows = np.array([0, 3, 3, 1, 2] * 4)
    slots = np.random.default_rng(0).permutation(np.arange(4, 36))[:20]
    q, k, v = (torch.randn(5, 2, dim, generator=generator).to(dtype) for dim in (24, 24, 16))
    backend.attend(q, k, v, kv, backend.prepare(plan, rows, slots), scale=1.0)
    reference.write_kv(k_cache, v_cache, k, v, torch.tensor(rows), torch.tensor(slots))
    assert torch.equal(kv.k, k_cache)
    assert torch.equal(kv.v, v_cache)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dim", [1, 2, 64])  # words of 2, 4 and 8 bytes in pages of one token
def test_pages_are_copied_in_all_layers(page_size: int, dim: int) -> None:
    backend = TritonAttention(CPU)
    shapes = [LayerShape(1, dim, dim), LayerShape(3, 2 * dim, dim)]
    layers = [backend.allocate(6, page_size, shape, torch.float16, CPU) for shape in shapes]
    generator = torch.Generator().manual_seed(0)
    for kv in layers:
        for cache in (kv.k, kv.v):
            cache.copy_(torch.randn(cache.shape, generator=generator))
    wanted = [backend.unpack(kv) for kv in layers]
    src, dst = np.array([2, 6, 2]), np.array([1, 5, 4])
    backend.copy_pages(layers, layers, src, dst)
    backend.copy_pages(layers, layers, src[:0], dst[:0])
    backend.copy_pages([], [], src, dst)
    for kv, pair in zip(layers, wanted, strict=True):
        for cache, want in zip((kv.k, kv.v), pair, strict=True):
            reference.copy_pages(want, torch.tensor(src), torch.tensor(dst))
            assert torch.equal(cache, want)
    others = [backend.allocate(3, page_size, shape, torch.float16, CPU) for shape in shapes]
    backend.copy_pages(layers, others, src[:2], np.array([1, 3]))
    backend.copy_pages(others, layers, np.array([1, 3]), np.array([3, 0]))
    for kv in layers:
        for cache in (kv.k, kv.v):
            assert torch.equal(cache[[3, 0]], cache[src[:2]])


def test_slots_are_filled_and_no_others() -> None:
    backend = TritonAttention(CPU)
    kv = backend.allocate(2, 4, LayerShape(2, 16, 16), torch.float16, CPU)
    backend.fill_slots([kv], np.array([5, 11]), torch.nan)
    for cache in (kv.k, kv.v):
        assert cache.isnan().flatten(2).all(dim=2).flatten().nonzero().flatten().tolist() == [5, 11]
        assert cache.isnan().sum() == 2 * 32


def test_a_step_without_rows_gives_none() -> None:
    nothing = np.empty(0, dtype=np.int64)
    indptr = np.zeros(1, dtype=np.int64)
    plan = build_plan(nothing, indptr, indptr, nothing, page_size=4, exact=False, sharing_cost=1)
    backend = TritonAttention(CPU)
    kv: LayerKV = backend.allocate(1, 4, LayerShape(1, 16, 16), torch.float16, CPU)
    empty = torch.empty(0, 1, 16, dtype=torch.float16)
    step = backend.prepare(plan, nothing, nothing)
    assert backend.attend(empty, empty, empty, kv, step, scale=1.0).shape == (0, 1, 16)


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float64, LayerShape(1, 64, 64)), (torch.float16, LayerShape(1, 64, 512))], ids=str
)
def test_what_is_not_served_is_refused_at_once(dtype: torch.dtype, shape: LayerShape) -> None:
    with pytest.raises(ValueError, match=r"no Triton kernel for .* they serve float16"):
        TritonAttention(CPU).allocate(1, 16, shape, dtype, CPU)
