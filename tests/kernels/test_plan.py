"""Attention plans: every plan covers each row's path once, sharing is found where it pays, and cuts stand on groups."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from radixrt.kernels.plan import AttentionPlan, IntArray, build_plan, group_len

from ..plans import random_plan


def tables_of(*segments: tuple[int, int, list[int]], page_size: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """The arguments of a planner for segments (first position, number of rows, pages)."""
    for start, num_rows, pages in segments:
        assert len(pages) == -(-(start + num_rows) // page_size)
    return (
        np.concatenate([np.arange(start, start + num_rows) for start, num_rows, _ in segments]),
        np.cumsum([0, *(num_rows for _, num_rows, _ in segments)]),
        np.cumsum([0, *(len(pages) for *_, pages in segments)]),
        np.concatenate([np.array(pages, dtype=np.int64) for *_, pages in segments]),
    )


def shown(plan: AttentionPlan) -> list[tuple[int, list[int], list[int]]]:
    return [(start, pages.tolist(), rows.tolist()) for start, pages, rows in plan.nodes()]


def test_a_shared_run_becomes_one_node() -> None:
    step = tables_of((9, 1, [1, 2, 3]), (8, 1, [1, 2, 4]), (11, 1, [5, 6, 7]), page_size=4)
    plan = build_plan(*step, page_size=4, exact=False, sharing_cost=1)
    plan.check()
    assert shown(plan) == [(0, [1, 2], [0, 1]), (8, [3], [0]), (8, [4], [1]), (0, [5, 6, 7], [2])]


def test_sharing_that_saves_too_little_is_left_to_the_readers() -> None:
    step = tables_of((9, 1, [1, 2, 3]), (8, 1, [1, 2, 4]), (8, 1, [1, 2, 5]), page_size=4)
    assert build_plan(*step, page_size=4, exact=False, sharing_cost=16).num_nodes == 4
    assert build_plan(*step, page_size=4, exact=False, sharing_cost=17).num_nodes == 3


def test_a_run_too_short_to_share_joins_the_one_behind_it() -> None:
    step = tables_of((12, 1, [1, 2, 3, 9]), (12, 1, [1, 2, 3, 8]), (4, 1, [1, 7]), page_size=4)
    plan = build_plan(*step, page_size=4, exact=False, sharing_cost=12)
    plan.check()
    assert shown(plan)[0] == (0, [1, 2, 3], [0, 1])


def test_a_tree_of_prefixes_becomes_a_tree_of_nodes() -> None:
    pages = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [1, 8, 9, 10]]
    plan = build_plan(
        *tables_of(*((13, 1, table) for table in pages), page_size=4), page_size=4, exact=False, sharing_cost=1
    )
    plan.check()
    assert shown(plan)[:3] == [(0, [1], [0, 1, 2, 3]), (4, [2], [0, 1, 2]), (8, [3], [0, 1])]


def test_a_chunk_shares_only_what_all_its_rows_read() -> None:
    step = tables_of((5, 6, [1, 2, 3]), (8, 1, [1, 2, 4]), page_size=4)
    plan = build_plan(*step, page_size=4, exact=False, sharing_cost=1)
    plan.check()
    assert shown(plan)[0] == (0, [1], [0, 1, 2, 3, 4, 5, 6])


def test_exact_plans_cut_at_groups() -> None:
    shared = list(range(1, 41))
    step = tables_of((660, 1, [*shared, 50, 51]), (641, 1, [*shared, 52]), page_size=16)
    plan = build_plan(*step, page_size=16, exact=True, sharing_cost=1)
    plan.check()
    assert plan.starts.tolist() == [0, 512, 512]


@pytest.mark.parametrize(
    ("page_size", "expected"), [(1, 256), (16, 256), (24, 240), (100, 200), (256, 256), (300, 300)]
)
def test_a_group_is_whole_pages(page_size: int, expected: int) -> None:
    assert group_len(page_size) == expected


@st.composite
def steps(draw: st.DrawFn, page_size: int, unit: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Segments over random trees of pages: runs of `unit` pages, then a ragged end, decode rows and chunks mixed."""
    fresh = iter(range(1, 10**6))
    runs: list[list[int]] = [[]]  # page paths of whole runs
    segments = []
    for _ in range(draw(st.integers(1, 6))):
        path = list(draw(st.sampled_from(runs)))
        for _ in range(draw(st.integers(0, 2))):
            path = path + [next(fresh) for _ in range(unit * draw(st.integers(1, 2)))]
            runs.append(path)
        num_rows = draw(st.sampled_from([1, 1, 1, 2, 5, 9]))
        start = draw(st.integers(max(0, len(path) * page_size - num_rows), len(path) * page_size + 7))
        num_pages = -(-(start + num_rows) // page_size)
        segments.append((start, num_rows, (path + [next(fresh) for _ in range(num_pages)])[:num_pages]))
    return tables_of(*segments, page_size=page_size)


@given(st.data(), st.sampled_from([(1, 3), (4, 2), (16, 16), (128, 2)]), st.integers(0, 2000))
def test_every_plan_covers_each_row_once(data: st.DataObject, sizes: tuple[int, int], sharing_cost: int) -> None:
    page_size, unit = sizes
    exact = data.draw(st.booleans())
    step = data.draw(steps(page_size, unit))
    build_plan(*step, page_size=page_size, exact=exact, sharing_cost=sharing_cost).check()
    random = data.draw(st.randoms(use_true_random=False))
    random_plan(random, *step, page_size=page_size, exact=exact).check()


@pytest.mark.parametrize("fault", ["missing", "twice", "early", "unaligned", "order"])
def test_the_check_sees_a_plan_that_is_not_legal(fault: str) -> None:
    step = tables_of((9, 1, [1, 2, 3]), (8, 1, [1, 2, 4]), page_size=4)
    plan = build_plan(*step, page_size=4, exact=False, sharing_cost=1)
    broken = {
        "missing": lambda: replace(plan, row_ids=np.array([0, 1, 0, 0])),
        "twice": lambda: replace(plan, starts=np.array([0, 4, 8])),
        "early": lambda: replace(plan, page_indptr=np.array([0, 1, 3, 4])),
        "unaligned": lambda: replace(plan, starts=np.array([0, 8, 9])),
        "order": lambda: replace(plan, row_ids=np.array([1, 0, 0, 1])),
    }[fault]()
    with pytest.raises(ValueError, match=r"node|rows"):
        broken.check()


def test_random_plans_differ() -> None:
    step = tables_of((40, 3, [*range(1, 11), 20]), (41, 1, [*range(1, 11), 21]), page_size=4)
    plans = {str(shown(random_plan(Random(seed), *step, page_size=4, exact=False))) for seed in range(30)}
    assert len(plans) > 10
