"""The torch CPU backend against the reference: every dtype, page size, head shape, ragged length, forest and plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from radixrt.kernels import plan as plan_module, reference
from radixrt.kernels.backend import AttentionBackend, LayerKV, LayerShape
from radixrt.kernels.cpu import torch_exact, torch_jobs, torch_tiles, torch_tree
from radixrt.kernels.cpu.torch_attention import TorchAttention
from radixrt.kernels.plan import AttentionPlan, build_plan, group_len

from .pools import pages_go_to_another_pool_and_back

_BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
_NEVER = 1 << 60  # a sharing cost that no run of pages is worth


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Branch:
    """A sequence that has positions `[0, fork)` from `parent`, an earlier one (or nothing, with fork 0)."""

    length: int
    parent: int = 0
    fork: int = 0


@dataclass(frozen=True)
class Chunk:
    """Rows of one sequence in a step: its own positions `[start, stop)`."""

    branch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Case:
    """A step over a pool in which every slot that no row may read holds NaN, as does every slot that it writes."""

    chunks: list[Chunk]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv: LayerKV
    positions: np.ndarray
    row_indptr: np.ndarray
    page_indptr: np.ndarray
    page_ids: np.ndarray
    write_rows: np.ndarray
    write_slots: np.ndarray
    page_size: int

    def plan(self, *, exact: bool, sharing_cost: int = 1) -> AttentionPlan:
        plan = build_plan(
            self.positions,
            self.row_indptr,
            self.page_indptr,
            self.page_ids,
            page_size=self.page_size,
            exact=exact,
            sharing_cost=sharing_cost,
        )
        plan.check()
        return plan

    def attend(self, plan: AttentionPlan, *, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        kv = LayerKV(self.kv.k.clone(), self.kv.v.clone())
        backend = TorchAttention()
        step = backend.prepare(plan, self.write_rows, self.write_slots)
        return backend.attend(self.q, self.k, self.v, kv, step, scale=0.2, window=window, softcap=softcap)

    def expected(self, *, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
        k, v = self.kv.k.clone(), self.kv.v.clone()
        reference.write_kv(k, v, self.k, self.v, torch.tensor(self.write_rows), torch.tensor(self.write_slots))
        starts = self.positions[self.row_indptr[:-1]]
        csr = (torch.tensor(array) for array in (self.row_indptr, self.page_indptr, self.page_ids, starts))
        return reference.attend(self.q, k, v, *csr, scale=0.2, window=window, softcap=softcap)


@dataclass
class Forest:
    """Sequences that share what they forked from, with fixed q, k and v at each position."""

    branches: list[Branch]
    heads: Heads
    page_size: int
    dtype: torch.dtype
    values: list[list[torch.Tensor]] = field(default_factory=list)  # q, k and v by position
    origins: list[np.ndarray] = field(default_factory=list)  # which sequence's row fills each position
    tables: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        needed = sum(-(-b.length // self.page_size) - b.fork // self.page_size for b in self.branches)
        free = np.random.default_rng(0).permutation(needed) + 1
        self.num_pages, heads = needed, self.heads
        shapes = (heads.query, heads.key_dim), (heads.kv, heads.key_dim), (heads.kv, heads.value_dim)
        for i, branch in enumerate(self.branches):
            generator = torch.Generator().manual_seed(i)
            new = [torch.randn(branch.length, *shape, generator=generator).to(self.dtype) for shape in shapes]
            origin, kept = np.full(branch.length, i), np.empty(0, dtype=np.int64)
            if branch.fork:
                for mine, inherited in zip(new, self.values[branch.parent], strict=True):
                    mine[: branch.fork] = inherited[: branch.fork]
                origin[: branch.fork] = self.origins[branch.parent][: branch.fork]
                kept = self.tables[branch.parent][: branch.fork // self.page_size]
            num_own = -(-branch.length // self.page_size) - len(kept)
            self.values.append(new)
            self.origins.append(origin)
            self.tables.append(np.concatenate([kept, free[:num_own]]))
            free = free[num_own:]

    def step(self, starts: list[int], stops: list[int] | None = None) -> Case:
        """Each sequence's own rows from `starts` on, up to `stops` or its end; what comes before is in the pool."""
        stops = stops or [branch.length for branch in self.branches]
        chunks: list[Chunk] = []
        first_row, num_rows = np.zeros(len(self.branches), dtype=np.int64), 0
        own = [max(start, branch.fork) for branch, start in zip(self.branches, starts, strict=True)]
        for i, (start, stop) in enumerate(zip(own, stops, strict=True)):
            first_row[i] = num_rows
            if start < stop:
                chunks.append(Chunk(i, start, stop))
                num_rows += stop - start
        backend = TorchAttention()
        shape = LayerShape(self.heads.kv, self.heads.key_dim, self.heads.value_dim)
        kv = backend.allocate(self.num_pages, self.page_size, shape, self.dtype, torch.device("cpu"))
        backend.fill_slots([kv], np.arange((self.num_pages + 1) * self.page_size), float("nan"))
        writes: dict[int, int] = {}
        for branch, stop in enumerate(stops):
            position, origin = np.arange(stop), self.origins[branch][:stop]
            slot = self.tables[branch][position // self.page_size] * self.page_size + position % self.page_size
            new = position >= np.array(own)[origin]
            row = first_row[origin] + position - np.array(own)[origin]
            writes |= dict(zip(slot[new].tolist(), row[new].tolist(), strict=True))
            old = torch.tensor(position[~new])
            for cache, values in zip((kv.k, kv.v), self.values[branch][1:], strict=True):
                cache.view(-1, *cache.shape[2:])[torch.tensor(slot[~new])] = values[old]
        q, k, v = (
            torch.cat([self.values[c.branch][i][c.start : c.stop] for c in chunks], dim=0)
            .transpose(0, 1)
            .contiguous()
            .transpose(0, 1)  # strided as models give it
            for i in range(3)
        )
        tables = [self.tables[c.branch][: -(-c.stop // self.page_size)] for c in chunks]
        return Case(
            chunks=chunks,
            q=q,
            k=k,
            v=v,
            kv=kv,
            positions=np.concatenate([np.arange(c.start, c.stop) for c in chunks]),
            row_indptr=np.cumsum([0, *(c.stop - c.start for c in chunks)]),
            page_indptr=np.cumsum([0, *map(len, tables)]),
            page_ids=np.concatenate(tables),
            write_rows=np.array(list(writes.values())),
            write_slots=np.array(list(writes)),
            page_size=self.page_size,
        )


def assert_agrees(case: Case, *, window: int | None = None, softcap: float | None = None) -> None:
    """Both modes, shared and by sequence."""
    want = case.expected(window=window, softcap=softcap)
    assert want.isfinite().all()
    for exact in (False, True):
        for sharing_cost in (1, _NEVER):
            got = case.attend(case.plan(exact=exact, sharing_cost=sharing_cost), window=window, softcap=softcap)
            assert got.dtype == case.q.dtype
            assert got.is_contiguous()
            torch.testing.assert_close(got.double(), want, rtol=0, atol=_BOUNDS[case.q.dtype])


def varied(plan: AttentionPlan, seed: int) -> AttentionPlan:
    """Another legal plan of the same step: nodes cut at random, their rows dealt to random parts."""
    random = np.random.default_rng(seed)
    align = group_len(plan.page_size) if plan.exact else plan.page_size
    nodes = []
    for start, pages, rows in plan.nodes():
        stop = start + len(pages) * plan.page_size
        inner = np.arange(start + align, stop, align)
        cuts = [start, *inner[random.random(len(inner)) < 0.4].tolist(), stop]
        for low, high in pairwise(cuts):
            part = random.integers(random.integers(1, 4), size=len(rows))
            run = pages[(low - start) // plan.page_size : (high - start) // plan.page_size]
            for i in range(3):
                if len(readers := rows[(part == i) & (plan.positions[rows] >= low)]):
                    nodes.append((low, run, readers))
    result = AttentionPlan.of(nodes, plan.positions, page_size=plan.page_size, exact=plan.exact)
    result.check()
    return result


def ragged(page_size: int) -> tuple[list[Branch], list[int]]:
    """Decodes, chunks and fresh prompts whose prefix is empty, one token, or around a page's end."""
    prefixes = [0, 1, page_size - 1, page_size, page_size + 1, 5 * page_size + 3]
    cases = [(prefix, rows) for prefix in prefixes for rows in (1, 2, page_size + 1)]
    return [Branch(prefix + rows) for prefix, rows in cases], [prefix for prefix, _ in cases]


@pytest.mark.parametrize("dtype", _BOUNDS, ids=str)
@pytest.mark.parametrize("page_size", [1, 7, 16, 24])
@pytest.mark.parametrize(
    "heads", [Heads(9, 3, 64, 64), Heads(4, 4, 20, 20), Heads(8, 1, 32, 32), Heads(4, 2, 24, 16)], ids=str
)
def test_ragged_sequences_agree(dtype: torch.dtype, page_size: int, heads: Heads) -> None:
    branches, starts = ragged(page_size)
    assert_agrees(Forest(branches, heads, page_size, dtype).step(starts))


@pytest.mark.parametrize("dtype", _BOUNDS, ids=str)
@pytest.mark.parametrize("window", [1, 5, 33, 1000])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_windows_and_softcap_agree(dtype: torch.dtype, window: int, softcap: float | None) -> None:
    branches, starts = ragged(8)
    assert_agrees(Forest(branches, Heads(6, 2, 16, 16), 8, dtype).step(starts), window=window, softcap=softcap)


def tree(page_size: int) -> tuple[Forest, list[int]]:
    """Depth 4 and several groups long: decodes, a chunk in progress, and prompts that fork inside it and each other."""
    branches = [
        Branch(700),
        Branch(900, parent=0, fork=590),
        Branch(610, parent=0, fork=590),
        Branch(640, parent=2, fork=605),  # from rows of this very step
        Branch(650, parent=3, fork=638),
        Branch(930, parent=1, fork=850),
        Branch(40),
    ]
    return Forest(branches, Heads(6, 2, 16, 16), page_size, torch.float32), [699, 897, 592, 0, 0, 929, 33]


@pytest.mark.parametrize("page_size", [16, 24])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 1.5), (270, None)])
def test_a_deep_tree_agrees(page_size: int, window: int | None, softcap: float | None) -> None:
    forest, starts = tree(page_size)
    assert_agrees(forest.step(starts), window=window, softcap=softcap)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Groups of 8 positions, tiles of 4 and more, batches of little: every boundary within a few pages."""
    monkeypatch.setattr(plan_module, "GROUP_LEN", 8)
    monkeypatch.setattr(torch_tiles, "_SHORTEST", 4)
    monkeypatch.setattr(torch_tiles, "_BATCH_TOKENS", 40)
    monkeypatch.setattr(torch_exact, "_ROW_COUNTS", (1, 2, 4))
    monkeypatch.setattr(torch_tree, "_SCORE_ROWS", 4)
    monkeypatch.setattr(torch_jobs, "MAX_BATCH_TOKENS", 4)
    monkeypatch.setattr(torch_jobs, "MAX_MASK_ROWS", 3)
    torch_exact.row_counts.cache_clear()
    yield
    torch_exact.row_counts.cache_clear()


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[Branch], list[int]]:
    branches: list[Branch] = []
    for i in range(draw(st.integers(1, 6))):
        parent = draw(st.integers(0, max(0, i - 1)))
        fork = draw(st.integers(0, branches[parent].length - 1)) if i else 0
        branches.append(Branch(fork + draw(st.integers(1, 12)), parent, fork))
    return branches, [draw(st.integers(0, branch.length - 1)) for branch in branches]


@pytest.mark.usefixtures("_small")
@given(
    forest=forests(),
    page_size=st.sampled_from([1, 2, 3, 4]),
    window=st.sampled_from([None, 1, 3, 8]),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 99),
)
def test_any_plan_of_any_forest_agrees(
    forest: tuple[list[Branch], list[int]], page_size: int, window: int | None, softcap: float | None, seed: int
) -> None:
    branches, starts = forest
    case = Forest(branches, Heads(4, 2, 8, 8), page_size, torch.float64).step(starts)
    want = case.expected(window=window, softcap=softcap)
    assert want.isfinite().all()
    for sharing_cost in (1, _NEVER):
        fast = case.plan(exact=False, sharing_cost=sharing_cost)
        for plan in (fast, varied(fast, seed)):
            torch.testing.assert_close(case.attend(plan, window=window, softcap=softcap), want, rtol=0, atol=1e-12)
    exact = case.plan(exact=True)
    first = case.attend(exact, window=window, softcap=softcap)
    torch.testing.assert_close(first, want, rtol=0, atol=1e-12)
    for plan in (varied(exact, seed), case.plan(exact=True, sharing_cost=_NEVER)):
        assert torch.equal(case.attend(plan, window=window, softcap=softcap), first)


_CHUNKINGS = [[100, 260, 263, 500], [1, 255, 256, 257, 258, 511, 512, 513], list(range(590, 600))]


@pytest.mark.parametrize(
    ("dtype", "page_size"),
    [(torch.float64, 16), (torch.float32, 16), (torch.bfloat16, 16), (torch.float32, 7), (torch.float32, 300)],
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "window", "softcap"),
    [
        (Heads(9, 3, 64, 64), None, None),
        (Heads(9, 3, 64, 64), 270, None),
        (Heads(2, 2, 20, 24), None, 1.5),
        (Heads(4, 1, 256, 256), None, None),
    ],
    ids=str,
)
def test_exact_bits_do_not_depend_on_chunks_batch_or_threads(
    dtype: torch.dtype, page_size: int, heads: Heads, window: int | None, softcap: float | None
) -> None:
    alone = Forest([Branch(600)], heads, page_size, dtype)
    whole = alone.step([0])
    expected = whole.attend(whole.plan(exact=True), window=window, softcap=softcap)
    threads = torch.get_num_threads()
    try:
        for turn, cuts in enumerate(_CHUNKINGS):
            torch.set_num_threads(1 + turn % 2)
            others = [Branch(297 + 7 * i) for i in range(3 * turn)]
            forest = Forest([Branch(600), *others], heads, page_size, dtype)
            for start, stop in pairwise([0, *cuts, 600]):
                case = forest.step([start, *(295 for _ in others)], [stop, *(b.length for b in others)])
                got = case.attend(case.plan(exact=True), window=window, softcap=softcap)
                assert torch.equal(got[: stop - start], expected[start:stop]), (cuts, start, stop)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("page_size", [16, 24])
@pytest.mark.parametrize("window", [None, 270])
def test_exact_bits_do_not_depend_on_the_plan(page_size: int, window: int | None) -> None:
    forest, starts = tree(page_size)
    case = forest.step(starts)
    expected = case.attend(case.plan(exact=True), window=window)
    for plan in (case.plan(exact=True, sharing_cost=_NEVER), *(varied(case.plan(exact=True), i) for i in range(4))):
        assert torch.equal(case.attend(plan, window=window), expected)


def test_exact_bits_do_not_depend_on_how_rows_are_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the probe leaves only tiles of one row gives the same bits, more slowly."""
    forest, starts = tree(16)
    case = forest.step(starts)
    expected = case.attend(case.plan(exact=True))
    for counts in ((1,), (1, 5), (1, 128)):
        monkeypatch.setattr(torch_exact, "row_counts", lambda *_, counts=counts: counts)
        assert torch.equal(case.attend(case.plan(exact=True)), expected)


def test_fast_bits_depend_on_the_plan() -> None:
    """What the exact tests compare can differ, so they can fail."""
    forest, starts = tree(16)
    case = forest.step(starts)
    alone = case.attend(case.plan(exact=False, sharing_cost=_NEVER))
    assert not torch.equal(case.attend(case.plan(exact=False)), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [Heads(9, 3, 64, 64), Heads(8, 1, 256, 256)], ids=str)
def test_the_probe_finds_this_machine_exact(dtype: torch.dtype, heads: Heads) -> None:
    threads = torch.get_num_threads()
    assert torch_exact.exact_here(dtype, heads.query // heads.kv, heads.key_dim, heads.value_dim, 16)
    assert torch.get_num_threads() == threads


def test_the_probe_drops_tiles_that_change_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that contract 256 numbers do on some machines: here every product of many rows is off by one bit."""
    right = torch_exact._product

    def wrong(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        right(a, b, out)
        return out.mul_(1 + 2**-23) if a.shape[1] > 24 else out

    monkeypatch.setattr(torch_exact, "_product", wrong)
    torch_exact.row_counts.cache_clear()
    assert torch_exact.row_counts(torch.float32, 3, 64, 64, 16) == (1, 2, 3, 4, 6, 8)
    torch_exact.row_counts.cache_clear()


def _shapes(case: Case, sharing_cost: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    plan = case.plan(exact=False, sharing_cost=sharing_cost)
    return [(tuple(job.rows.shape), tuple(job.slots.shape)) for job in torch_jobs.jobs(plan, None)]


def test_a_shared_run_is_one_job_and_one_tile_per_group() -> None:
    branches = [Branch(601), *(Branch(length, 0, 592) for length in (608, 601, 641, 903))]
    case = Forest(branches, Heads(6, 2, 16, 16), 16, torch.float32).step([600, 607, 592, 640, 900])
    assert _shapes(case, sharing_cost=2048)[0] == ((1, 15), (1, 592))
    counts = torch_exact.row_counts(torch.float32, 3, 16, 16, 16)
    first = next(torch_tiles.batches(case.plan(exact=True), None, counts))
    assert (tuple(first.rows.shape), tuple(first.slots.shape), first.depth) == ((2, 16), (2, 256), 2)


def test_nested_runs_are_read_once_each() -> None:
    """Four decodes share 2 pages, the last two of them 2 more."""
    branches = [Branch(13), Branch(13, 0, 8), Branch(21, 0, 8), Branch(21, 2, 16)]
    case = Forest(branches, Heads(2, 1, 4, 4), 4, torch.float64).step([12, 12, 20, 20])
    shapes = _shapes(case, sharing_cost=1)
    assert [slots for rows, slots in shapes if rows[1] > 1] == [(1, 8), (1, 8)]
    assert sum(slots[0] * slots[1] for _, slots in shapes) == 8 + 8 + 5 + 5 + 5 + 5


def test_tails_of_unlike_length_are_not_padded_together() -> None:
    branches = [Branch(length) for length in (5001, 5000, 41, 9)]
    case = Forest(branches, Heads(2, 1, 4, 4), 16, torch.float32).step([5000, 4999, 40, 8])
    assert _shapes(case, sharing_cost=_NEVER) == [((2, 1), (2, 5001)), ((2, 1), (2, 41))]


@pytest.mark.parametrize("dtype", _BOUNDS, ids=str)
def test_writes_copies_and_fills_agree(dtype: torch.dtype) -> None:
    """Rows go to several slots or none; copies and fills reach every layer."""
    generator = torch.Generator().manual_seed(1)
    backend: AttentionBackend = TorchAttention()
    layers = [backend.allocate(6, 4, LayerShape(2, 3, 5), dtype, torch.device("cpu")) for _ in range(2)]
    rows, slots = np.array([0, 3, 3, 4, 2]), np.array([21, 5, 6, 23, 8])
    plan = build_plan(
        np.arange(5), np.array([0, 5]), np.array([0, 2]), np.array([5, 1]), page_size=4, exact=False, sharing_cost=1
    )
    for kv in layers:
        kv.k.copy_(torch.randn(kv.k.shape, generator=generator))
        kv.v.copy_(torch.randn(kv.v.shape, generator=generator))
        k, v = (torch.randn(5, 2, dim, generator=generator).to(dtype) for dim in (3, 5))
        expected = backend.unpack(kv)
        reference.write_kv(*expected, k, v, torch.tensor(rows), torch.tensor(slots))
        backend.attend(k, k, v, kv, backend.prepare(plan, rows, slots), scale=1.0)
        assert all(torch.equal(*pair) for pair in zip(backend.unpack(kv), expected, strict=True))
    expected_layers = [backend.unpack(kv) for kv in layers]
    backend.copy_pages(layers, layers, np.array([1, 3]), np.array([4, 2]))
    backend.fill_slots(layers, np.array([0, 9]), 7.0)
    for kv, want in zip(layers, expected_layers, strict=True):
        for cache, expected_cache in zip(backend.unpack(kv), want, strict=True):
            reference.copy_pages(expected_cache, torch.tensor([1, 3]), torch.tensor([4, 2]))
            expected_cache[0, 0] = expected_cache[2, 1] = 7
            assert torch.equal(cache, expected_cache)


def test_pages_go_to_another_pool_and_back() -> None:
    pages_go_to_another_pool_and_back(TorchAttention(), page_size=4, shape=LayerShape(2, 3, 5))
