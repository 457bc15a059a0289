"""What callers waited for, on a clock that the test moves; and a clock that fails."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from radixrt.runtime import SamplingParams
from radixrt.runtime.meter import Durations, Meter
from radixrt.runtime.testing import HashModel

from .conftest import MakeEngine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_waits_are_those_of_the_clock(make_engine: MakeEngine) -> None:
    """One waits for the other: 4 s in the queue, then a token each 2 s."""
    clock = Clock()
    model = HashModel()

    def tick(_: object) -> None:
        clock.now += 2.0

    model.before_forward = tick
    engine = make_engine(model, max_running=1, clock=clock)
    engine.generate([[1, 2], [3, 4]], SamplingParams(max_tokens=3, temperature=0.0))
    waits = engine.stats().waits
    assert (waits.queue.count, waits.queue.total) == (2, 2.0 + 8.0), "a row runs 2 s before it is known to have run"
    assert (waits.first_token.count, waits.first_token.total) == (2, 2.0 + 8.0)
    assert (waits.between_tokens.count, waits.between_tokens.total) == (4, 8.0)
    assert waits.between_tokens.mean == 2.0
    assert 2.0 <= waits.between_tokens.quantile(0.5) <= 2.0 * 2**0.25
    assert waits.num_failures == 0


def test_choices_count_one_by_one(make_engine: MakeEngine) -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.submit([1, 2], SamplingParams(n=3, max_tokens=2))
    for _ in range(2):
        clock.now += 1.0
        engine.step()
    waits = engine.stats().waits
    assert (waits.queue.count, waits.first_token.count, waits.first_token.total) == (1, 3, 3.0)
    assert (waits.between_tokens.count, waits.between_tokens.total) == (3, 3.0)


def test_a_clock_that_fails_harms_nobody(make_engine: MakeEngine) -> None:
    def broken() -> float:
        raise OSError("no clock here")

    engine = make_engine(clock=broken)
    (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))
    assert len(output.choices[0].token_ids) == 4
    waits = engine.stats().waits
    assert waits.num_failures > 0
    assert waits.queue.count == 0
    assert math.isnan(waits.queue.mean)
    assert math.isnan(waits.queue.quantile(0.5))


def test_ended_requests_leave_nothing_behind(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate([[1], [2]], SamplingParams(n=3, max_tokens=4))
    engine.abort(engine.submit([1]))
    meter: Meter = engine._loop.meter
    assert not meter._submitted
    assert not meter._queued
    assert not meter._last


@given(st.lists(st.floats(1e-6, 900.0), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_at_most_a_bucket_too_high(seconds: list[float], q: float) -> None:
    clock = Clock()
    durations: Durations
    meter = Meter(clock)
    for value in seconds:
        meter._queue.add(value)
    durations = meter.waits().queue
    exact = sorted(seconds)[math.ceil(q * len(seconds)) - 1]
    assert exact <= durations.quantile(q) * (1 + 1e-9)
    assert durations.quantile(q) <= exact * 2**0.25 * (1 + 1e-9)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9])
def test_any_duration_has_a_bucket(seconds: float) -> None:
    meter = Meter(lambda: 0.0)
    meter._queue.add(seconds)
    assert meter.waits().queue.count == sum(meter.waits().queue.buckets) == 1
