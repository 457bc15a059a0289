"""The Triton backend as far as it needs no GPU: how a step is cut into work, the choice of tiles, the kernels' numbers.

The kernels run in the interpreter, in a process of their own (triton_cases.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from radixrt.kernels.plan import AttentionPlan, build_plan
from radixrt.kernels.triton.config import DTYPES, configs
from radixrt.kernels.triton.schedule import ITEM_LEN, MIN_CHUNK_LEN, Schedule, build_schedule

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_the_kernels_agree_in_the_interpreter() -> None:
    """Fails with the report of triton_cases.py."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/triton_cases.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "SHARD": "1/1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"\n{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@needs_triton
def test_a_cpu_is_refused_outside_the_interpreter() -> None:
    code = "import torch, radixrt.kernels.triton.backend as b; b.TritonAttention(torch.device('cpu'))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "ValueError: the Triton kernels need a CUDA device, not cpu" in done.stderr


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 32, 64, 100, 128, 256])
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0)])
def test_tiles_grow_and_fit_a_product(dtype: torch.dtype, head_dim: int, capability: tuple[int, int]) -> None:
    kinds = configs(dtype, head_dim, capability)
    heights = [kind.block_rows for kind in kinds]
    assert heights == ([16] if dtype == torch.float32 else [16, 64])
    for kind in kinds:
        assert kind.block_tokens in (32, 64)  # powers of two, which a product needs
        constants = kind.constants(group=3, key_dim=head_dim, value_dim=head_dim, page_size=16)
        assert max(16, head_dim) <= constants["BLOCK_KEY"] == constants["BLOCK_VALUE"] < max(17, 2 * head_dim)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability"),
    [(torch.float64, 64, (9, 0)), (torch.int8, 64, (9, 0)), (torch.float16, 257, (9, 0)), (torch.float16, 64, (7, 5))],
    ids=str,
)
def test_what_no_kernel_serves_is_refused(dtype: torch.dtype, head_dim: int, capability: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no Triton kernel for"):
        configs(dtype, head_dim, capability)


def random_plan(segments: list[tuple[int, int, int]], page_size: int) -> AttentionPlan:
    """Segments of (first position, rows, leading pages taken from the one before); every shared run is a node."""
    tables: list[list[int]] = []
    next_page = 1
    for start, rows, shared in segments:
        kept = tables[-1][: min(shared, start // page_size)] if tables else []
        num_new = -(-(start + rows) // page_size) - len(kept)
        tables.append(kept + list(range(next_page, next_page + num_new)))
        next_page += num_new
    return build_plan(
        np.concatenate([np.arange(start, start + rows) for start, rows, _ in segments]),
        np.cumsum([0, *(rows for _, rows, _ in segments)]),
        np.cumsum([0, *map(len, tables)]),
        np.concatenate([np.array(table) for table in tables]),
        page_size=page_size,
        exact=False,
        sharing_cost=1,
    )


def read_through(plan: AttentionPlan, schedule: Schedule, group: int) -> dict[tuple[int, int], dict[int, range]]:
    """What the kernels make of a schedule: for each (row, head of the group), partial -> positions.

    Asserts that an item's pages are those of its positions, and that no partial is written twice.
    """
    found: dict[tuple[int, int], dict[int, range]] = {}
    page_of = {
        (int(plan.row_indptr[i]), start + page * plan.page_size): int(plan.page_indptr[i]) + page
        for i, (start, pages, _) in enumerate(plan.nodes())
        for page in range(len(pages))
    }
    for height, items in zip((16, 64), schedule.items, strict=True):
        assert items.shape[1] == ITEM_LEN
        for first_page, start, stop, chunk, first_entry, first_packed, num_packed, _ in items.tolist():
            assert page_of[first_entry, start] == first_page
            for packed in range(first_packed, min(first_packed + height, num_packed)):
                entry, head = first_entry + packed // group, packed % group
                partials = found.setdefault((int(plan.row_ids[entry]), head), {})
                partial = int(schedule.entry_partials[entry]) + chunk
                assert partial not in partials
                partials[partial] = range(start, stop)
    return found


@settings(max_examples=settings().max_examples // 2)
@given(
    segments=st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 30), st.integers(0, 99)), min_size=1, max_size=8),
    page_size=st.sampled_from([1, 16, 24, 128]),
    group=st.sampled_from([1, 3, 16, 40]),
    window=st.sampled_from([None, 100]),
    num_programs=st.sampled_from([1, 64, 100_000]),
)
def test_a_schedule_reads_every_position_once_and_in_order(
    segments: list[tuple[int, int, int]], page_size: int, group: int, window: int | None, num_programs: int
) -> None:
    plan = random_plan(segments, page_size)
    schedule = build_schedule(
        plan,
        heights=(16, 64),
        block_tokens=64,
        group=group,
        num_kv_heads=2,
        window=window,
        num_programs=num_programs,
    )
    found = read_through(plan, schedule, group)
    assert set(found) == {(row, head) for row in range(plan.num_rows) for head in range(group)}
    for (row, _), partials in found.items():
        assert sorted(partials) == list(range(schedule.partial_indptr[row], schedule.partial_indptr[row + 1]))
        reached = 0
        for partial in sorted(partials):
            assert partials[partial].start == reached < partials[partial].stop
            reached = partials[partial].stop
        assert plan.positions[row] < reached


def num_items(plan: AttentionPlan, *, num_programs: int, window: int | None = None) -> list[int]:
    schedule = build_schedule(
        plan,
        heights=(16, 64),
        block_tokens=64,
        group=4,
        num_kv_heads=8,
        window=window,
        num_programs=num_programs,
    )
    return [len(items) for items in schedule.items]


def test_a_lone_decode_is_split_until_the_device_is_full() -> None:
    plan = random_plan([(100_000, 1, 0)], 16)
    for num_programs in (8, 512, 2048):
        (items, _) = num_items(plan, num_programs=num_programs)
        assert num_programs // 8 * 0.8 <= items <= num_programs // 8 + 1
    assert num_items(plan, num_programs=10**9) == [-(-100_001 // MIN_CHUNK_LEN), 0]


def test_a_batch_that_fills_the_device_is_not_split() -> None:
    assert num_items(random_plan([(5000, 1, 0)] * 64, 16), num_programs=512) == [64, 0]


def test_a_windowed_layer_is_split_by_what_it_reads() -> None:
    plan = random_plan([(100_000, 1, 0)], 16)
    assert num_items(plan, num_programs=128, window=4096)[0] == -(-100_001 // MIN_CHUNK_LEN)


def test_a_node_of_many_rows_gets_tall_tiles() -> None:
    plan = random_plan([(4096 + i, 1, 256) for i in range(33)], 16)
    tails, shared = num_items(plan, num_programs=8)
    assert (tails, shared) == (33, 3)  # 33 rows of 4 heads, 64 a tile
