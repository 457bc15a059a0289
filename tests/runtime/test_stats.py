"""The numbers of `engine.stats()`: each thing once, whatever is preempted or moved; and no clock harms a step."""

from __future__ import annotations

import math
from itertools import cycle
from typing import Any

from hypothesis import given, strategies as st

from radixrt.runtime import Engine, Forward, SamplingParams
from radixrt.runtime.batch import Batch
from radixrt.runtime.testing import HashModel

from .test_host_tier import delays, two_prompts
from .test_metamorphic import VOCAB, Work, alone, run, small_pool, works


class CountingModel(HashModel):
    """Counts the rows that it was given."""

    num_rows = 0

    def forward(self, batch: Batch) -> Forward:
        type(self).num_rows += batch.num_rows
        return super().forward(batch)


@given(
    work=works(),
    page_size=st.sampled_from([1, 2, 4]),
    slack=st.integers(0, 4),
    host=st.sampled_from([(0, "auto"), (40, "always"), (3, "always"), (40, "auto")]),
    prefix_cache=st.booleans(),
    copy_delay=delays(),
)
def test_everything_is_counted_once(
    work: Work, page_size: int, slack: int, host: tuple[int, Any], *, prefix_cache: bool, copy_delay: Any
) -> None:
    CountingModel.num_rows = 0
    num_host_pages, swap = host
    pool: dict[str, Any] = {"num_pages": small_pool(work, page_size, slack), "num_host_pages": num_host_pages}
    model = CountingModel(vocab=VOCAB, copy_delay=copy_delay)
    with Engine(model, page_size=page_size, swap=swap, prefix_cache=prefix_cache, **pool) as engine:
        run(engine, work)
        stats = engine.stats()
    counters, cache = stats.counters, stats.cache
    rows = counters.computed + counters.decoded + counters.recomputed_for_logits + counters.recomputed_after_preemption
    assert rows == CountingModel.num_rows
    assert cache.opened == len(work.prompts), "a request that was preempted is no further request"
    assert cache.opened_tokens == (sum(len(prompt) - 1 for prompt in work.prompts) if prefix_cache else 0)
    assert cache.hit_tokens <= cache.opened_tokens
    resumed = counters.preemptions_kept + counters.preemptions_swapped + counters.preemptions_recomputed
    assert resumed == counters.preemptions
    assert sum(cache.eviction_ages) == cache.evicted_pages + cache.evicted_host_pages
    waits = stats.waits
    assert waits.queue.count == waits.first_token.count == len(work.prompts)
    assert stats.swap_rate * counters.steps == stats.transfers.swap_outs + stats.transfers.swap_ins


FATES: list[Any] = [0.0, 1.0, 5.0, -3.0, 1e300, -1e300, math.nan, math.inf, "no number", None, OSError("no clock")]


@given(work=works(), fates=st.lists(st.sampled_from(FATES), min_size=1), copy_delay=delays())
def test_no_clock_harms_a_step(work: Work, fates: list[Any], copy_delay: Any) -> None:
    """One that fails, stands still, goes back or says nonsense, at whatever call: the answers are there."""
    said = cycle(fates)

    def clock() -> Any:
        if isinstance(fate := next(said), Exception):
            raise fate
        return fate

    model = HashModel(vocab=VOCAB, copy_delay=copy_delay)
    with Engine(model, num_pages=small_pool(work, 2, 2), page_size=2, num_host_pages=8, clock=clock) as engine:
        assert run(engine, work) == [alone(p, s) for p, s in zip(work.prompts, work.params, strict=True)]
        engine.stats()


def four_in_a_short_pool(**given: Any) -> Any:
    """The counters after four that fit alone and not together."""
    params = SamplingParams(max_tokens=40, temperature=0.0)
    with Engine(HashModel(vocab=VOCAB), num_pages=50, page_size=2, **given) as engine:
        run(engine, Work([[i] * 20 for i in range(4)], [params] * 4))
        return engine.stats().counters


def test_preemptions_by_kind() -> None:
    recompute = four_in_a_short_pool(prefix_cache=False)
    assert recompute.preemptions_recomputed == recompute.preemptions > 0
    swap = four_in_a_short_pool(num_host_pages=200, swap="always")
    assert swap.preemptions_swapped > 0
    assert swap.preemptions_recomputed == swap.recomputed_after_preemption == 0
    with Engine(HashModel(vocab=VOCAB), num_pages=200, page_size=2) as engine:
        engine.submit([1] * 20, SamplingParams(max_tokens=4))
        engine.step()
        engine._loop.scheduler.preempt(engine._loop.scheduler.running[0])
        engine.step()
        counters = engine.stats().counters
        assert (counters.preemptions, counters.preemptions_kept) == (1, 1)


def test_the_swap_rate_is_by_step() -> None:
    with two_prompts(swap="always") as engine:
        stats = engine.stats()
        assert stats.swap_rate == (stats.transfers.swap_outs + stats.transfers.swap_ins) / stats.counters.steps > 0


def test_they_can_be_read_at_a_glance() -> None:
    with two_prompts(swap="always") as engine:
        shown = str(engine.stats())
    assert "steps=" in shown
    assert "num_cached=" in shown
    assert len(shown) < 1500
