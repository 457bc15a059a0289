"""Pools without pages: the list of gaps against a bitmap, and the replay against counting step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from radixrt.frontend.lengths import Lengths
from radixrt.frontend.reservation import Gaps, replay


@given(st.data())
def test_gaps_are_those_of_a_bitmap(data: st.DataObject) -> None:
    """First fit over single slots, whatever is taken and given back in whatever order."""
    num_slots = data.draw(st.integers(1, 40))
    gaps, taken = Gaps(num_slots), np.zeros(num_slots, bool)
    live: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        giving = data.draw(st.booleans())
        if live and giving:
            given, length = live.pop(data.draw(st.integers(0, len(live) - 1)))
            gaps.give(given, length)
            taken[given : given + length] = False
            continue
        size = data.draw(st.integers(1, num_slots))
        fits = [at for at in range(num_slots - size + 1) if not taken[at : at + size].any()]
        start = gaps.take(size)
        assert start == (fits[0] if fits else None)
        if start is not None:
            live.append((start, size))
            taken[start : start + size] = True


def test_all_alike_run_in_lockstep() -> None:
    """A pool of 10 slots holds three of 3; each begins at 2 tokens and lives for 2 steps."""
    sessions, live = replay(Lengths.of((2, 2)), np.array([3]), 10)
    assert sessions == 3
    assert live == 3 * 2.5


def test_gaps_cost_what_they_cost() -> None:
    """Two of 4 in 10 slots leave 2 that fit nothing; a third of 2 would."""
    assert replay(Lengths.of((3, 1)), np.array([4]), 10)[0] == 2
    lengths = Lengths.of([(3, 1), (3, 1), (1, 1)])
    assert replay(lengths, np.array([4, 4, 2]), 10)[0] == 3


def test_a_large_pool_is_many_small_ones() -> None:
    random = np.random.default_rng(0)
    lengths = Lengths(random.integers(1, 900, 500), random.integers(1, 300, 500))
    sizes = lengths.prompt + lengths.output
    shares = [replay(lengths, sizes, slots)[1] / slots for slots in (1 << 17, 1 << 20, 1 << 26)]
    assert shares == pytest.approx([shares[0]] * 3, rel=0.02)


@pytest.mark.parametrize("num_requests", [2001, 4999, 10_000])
def test_a_long_list_is_taken_evenly(num_requests: int) -> None:
    """Not its beginning alone, which would run ten at once."""
    lengths = Lengths(np.full(num_requests, 5), np.full(num_requests, 2))
    num_small = num_requests // 5
    assert replay(lengths, np.repeat([10, 50], [num_small, num_requests - num_small]), 100)[0] == 2
