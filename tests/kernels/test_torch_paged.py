"""The torch CPU path against the reference: every dtype, page size, head shape, ragged length and sharing pattern."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st

from radixrt.kernels import reference
from radixrt.kernels.cpu import plan as plan_module, torch_paged
from radixrt.kernels.cpu.plan import Plan

_BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Packed:
    """Segments over one pool in which every slot that no row may read holds NaN."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    row_indptr: torch.Tensor
    page_indptr: torch.Tensor
    page_ids: torch.Tensor
    starts: torch.Tensor

    @property
    def csr(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.row_indptr, self.page_indptr, self.page_ids, self.starts


def pack(
    segments: list[tuple[int, int, int]],  # (start, number of rows, leading pages taken from the segment before)
    *,
    heads: Heads,
    page_size: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    num_pages = sum(-(-(start + rows) // page_size) for start, rows, _ in segments)
    free = (torch.randperm(num_pages, generator=generator) + 1).tolist()
    tables: list[list[int]] = []
    for start, rows, shared in segments:
        kept = tables[-1][: min(shared, start // page_size)] if tables else []
        tables.append(kept + [free.pop() for _ in range(-(-(start + rows) // page_size) - len(kept))])
    k_cache = torch.full((num_pages + 1, page_size, heads.kv, heads.key_dim), torch.nan, dtype=dtype)
    v_cache = torch.full((num_pages + 1, page_size, heads.kv, heads.value_dim), torch.nan, dtype=dtype)
    for (start, rows, _), table in zip(segments, tables, strict=True):
        for position in range(start + rows):
            where = table[position // page_size], position % page_size
            k_cache[where] = torch.randn(heads.kv, heads.key_dim, generator=generator).to(dtype)
            v_cache[where] = torch.randn(heads.kv, heads.value_dim, generator=generator).to(dtype)
    lengths = torch.tensor([rows for _, rows, _ in segments])
    return Packed(
        q=torch.randn(int(lengths.sum()), heads.query, heads.key_dim, generator=generator).to(dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        row_indptr=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        page_indptr=torch.tensor([0, *(len(table) for table in tables)]).cumsum(0),
        page_ids=torch.tensor([page for table in tables for page in table]),
        starts=torch.tensor([start for start, _, _ in segments]),
    )


def assert_agrees(packed: Packed, *, window: int | None = None, softcap: float | None = None) -> list[plan_module.Job]:
    page_size = packed.k_cache.shape[1]
    plan = Plan(*packed.csr, page_size=page_size)
    got = torch_paged.attend(packed.q, packed.k_cache, packed.v_cache, plan, scale=0.2, window=window, softcap=softcap)
    want = reference.attend(
        packed.q, packed.k_cache, packed.v_cache, *packed.csr, scale=0.2, window=window, softcap=softcap
    )
    assert got.dtype == packed.q.dtype
    assert want.isfinite().all()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=_BOUNDS[packed.q.dtype])
    return plan.jobs(window)


def ragged(page_size: int) -> list[tuple[int, int, int]]:
    """Decodes, chunks and fresh prompts whose prefix is empty, one token, or around a page's end."""
    prefixes = [0, 1, page_size - 1, page_size, page_size + 1, 5 * page_size + 3]
    return [(prefix, rows, 0) for prefix in prefixes for rows in (1, 2, page_size + 1)]


@pytest.mark.parametrize("dtype", _BOUNDS, ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    "heads", [Heads(9, 3, 64, 64), Heads(4, 4, 20, 20), Heads(8, 1, 32, 32), Heads(4, 2, 24, 16)], ids=str
)
def test_ragged_segments_agree(dtype: torch.dtype, page_size: int, heads: Heads) -> None:
    assert_agrees(pack(ragged(page_size), heads=heads, page_size=page_size, dtype=dtype))


@pytest.mark.parametrize("dtype", _BOUNDS, ids=str)
@pytest.mark.parametrize("window", [1, 5, 16, 33, 1000])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_windows_and_softcap_agree(dtype: torch.dtype, window: int, softcap: float | None) -> None:
    packed = pack(ragged(8), heads=Heads(6, 2, 16, 16), page_size=8, dtype=dtype)
    assert_agrees(packed, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", _BOUNDS, ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_shared_run_is_one_job_and_agrees(dtype: torch.dtype, softcap: float | None) -> None:
    segments = [(600, 1, 0), (607, 1, 37), (592, 9, 37), (640, 1, 37), (900, 3, 37), (30, 2, 0)]
    packed = pack(segments, heads=Heads(6, 2, 16, 16), page_size=16, dtype=dtype)
    jobs = assert_agrees(packed, softcap=softcap)
    assert [tuple(job.rows.shape) + tuple(job.slots.shape) for job in jobs[:1]] == [(1, 15, 1, 592)]


@pytest.fixture
def _cheap_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share every run, however short, batch tails of at most four tokens in all, and work in small pieces."""
    monkeypatch.setattr(torch_paged, "_SCORE_ROWS", 4)
    monkeypatch.setattr(plan_module, "JOB_COST_TOKENS", 1)
    monkeypatch.setattr(plan_module, "MAX_BATCH_TOKENS", 4)
    monkeypatch.setattr(plan_module, "MAX_MASK_ROWS", 3)


@pytest.mark.usefixtures("_cheap_jobs")
@settings(max_examples=80, deadline=None)
@given(
    segments=st.lists(st.tuples(st.integers(0, 14), st.integers(1, 5), st.integers(0, 7)), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 3, 8]),
    softcap=st.sampled_from([None, 2.0]),
)
def test_any_tree_of_shared_pages_agrees(
    segments: list[tuple[int, int, int]], page_size: int, window: int | None, softcap: float | None
) -> None:
    packed = pack(segments, heads=Heads(2, 1, 4, 4), page_size=page_size, dtype=torch.float64)
    assert_agrees(packed, window=window, softcap=softcap)


@pytest.mark.usefixtures("_cheap_jobs")
def test_nested_runs_are_read_once_each() -> None:
    """Four segments share 2 pages, the last two of them 2 more: 4 + 4 + 1 + 1 slots of their own and 2 runs."""
    segments = [(12, 1, 0), (12, 1, 2), (20, 1, 2), (20, 1, 4)]
    packed = pack(segments, heads=Heads(2, 1, 4, 4), page_size=4, dtype=torch.float64)
    jobs = assert_agrees(packed)
    assert sorted(tuple(job.slots.shape) for job in jobs if job.rows.shape[1] > 1) == [(1, 8), (1, 8)]
    assert sum(job.slots.numel() for job in jobs) == 8 + 8 + 5 + 5 + 5 + 5


@pytest.mark.usefixtures("_cheap_jobs")
def test_pages_that_agree_after_a_difference_are_not_one_run() -> None:
    packed = pack([(12, 1, 0), (12, 1, 3)], heads=Heads(2, 1, 4, 4), page_size=4, dtype=torch.float64)
    packed.page_ids[1] = packed.page_ids[0]  # the first segment's second page alone
    assert_agrees(packed)


def test_tails_of_unlike_length_are_not_padded_together() -> None:
    segments = [(5000, 1, 0), (4999, 1, 0), (40, 1, 0), (8, 1, 0)]
    packed = pack(segments, heads=Heads(2, 1, 4, 4), page_size=16, dtype=torch.float32)
    jobs = assert_agrees(packed)
    assert [tuple(job.slots.shape) for job in jobs] == [(2, 5001), (2, 41)]


@pytest.mark.parametrize("dtype", _BOUNDS, ids=str)
def test_writes_and_copies_agree(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    k_cache, v_cache = (torch.randn(6, 4, 2, 3, generator=generator).to(dtype) for _ in range(2))
    k_expected, v_expected = k_cache.clone(), v_cache.clone()
    k, v = (torch.randn(5, 2, 3, generator=generator).to(dtype) for _ in range(2))
    rows, slots = torch.tensor([0, 3, 3, 4, 1, 2]), torch.tensor([21, 5, 6, 23, 8, 13])
    torch_paged.write_kv(k_cache, v_cache, k, v, rows, slots)
    reference.write_kv(k_expected, v_expected, k, v, rows, slots)
    torch_paged.write_kv(k_cache, v_cache, k, v, None, slots[:5] - 4)
    reference.write_kv(k_expected, v_expected, k, v, torch.arange(5), slots[:5] - 4)
    for cache, want in ((k_cache, k_expected), (v_cache, v_expected)):
        torch_paged.copy_pages(cache, torch.tensor([1, 3]), torch.tensor([4, 2]))
        reference.copy_pages(want, torch.tensor([1, 3]), torch.tensor([4, 2]))
        assert torch.equal(cache, want)
