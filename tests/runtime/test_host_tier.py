"""Pages in host memory: no answer changes whatever their copies do, and moving them follows what it costs."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from radixrt.radix import LiveTables, RadixCache
from radixrt.runtime import Engine, FinishEvent, Handle, InvalidRequest, SamplingParams, replay
from radixrt.runtime.config import Swap
from radixrt.runtime.logprobs import LogprobStore
from radixrt.runtime.testing import HashModel
from radixrt.runtime.tier import Costs, HostTier
from radixrt.runtime.transformer import TransformerModel

from . import tiny
from .test_metamorphic import VOCAB, Work, alone, run, small_pool, works

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@st.composite
def delays(draw: st.DrawFn) -> Any:
    """What becomes of each copy: at once (None for all), late by so many questions, failing, or not even begun."""
    fates = draw(st.none() | st.lists(st.sampled_from([0, 0, 1, 3, 9, "fails", "raises"]), min_size=1, max_size=8))
    return None if fates is None else Fates(fates)


class Fates:
    """A fate for each copy in turn."""

    def __init__(self, fates: list[Any]) -> None:
        self.fates = fates
        self._next = cycle(fates)

    def __repr__(self) -> str:
        return f"Fates({self.fates})"

    def __call__(self) -> int | None:
        fate = next(self._next)
        if fate == "raises":
            raise RuntimeError("a copy that cannot begin")
        return None if fate == "fails" else fate


# -- no answer changes ------------------------------------------------------------------------------------------------


@given(
    work=works(),
    page_size=st.sampled_from([1, 2, 4]),
    slack=st.integers(0, 6),
    num_host_pages=st.sampled_from([1, 3, 40]),
    budget=st.sampled_from([2, 7, 512]),
    max_running=st.sampled_from([1, 3, 64]),
    swap=st.sampled_from(["always", "auto"]),
    copy_delay=delays(),
)
def test_no_copy_changes_an_answer(
    work: Work, page_size: int, slack: int, num_host_pages: int, budget: int, copy_delay: Any, **given_settings: Any
) -> None:
    """A small pool and a host tier, whose copies are late, overtake one another or fail: the answers of a lone run."""
    expected = [alone(p, s) for p, s in zip(work.prompts, work.params, strict=True)]
    engine = Engine(
        HashModel(vocab=VOCAB, copy_delay=copy_delay),
        num_pages=small_pool(work, page_size, slack),
        page_size=page_size,
        num_host_pages=num_host_pages,
        token_budget=budget,
        poison=True,
        **given_settings,
    )
    with engine:
        for _ in range(3):
            assert run(engine, work) == expected
    stats = engine.stats().cache
    engine.check()
    assert stats.num_swaps == stats.num_tables == 0
    assert stats.num_free + stats.num_cached == stats.num_pages
    assert stats.num_host_free + stats.num_host_cached == num_host_pages


@given(work=works(), data=st.data(), copy_delay=delays())
def test_aborts_during_copies_leak_nothing(work: Work, data: st.DataObject, copy_delay: Any) -> None:
    """Requests that end while their pages are on the way, in either direction."""
    expected = [alone(p, s) for p, s in zip(work.prompts, work.params, strict=True)]
    engine = Engine(
        HashModel(vocab=VOCAB, copy_delay=copy_delay),
        num_pages=small_pool(work, 2, 2),
        page_size=2,
        num_host_pages=20,
        swap="always",
        poison=True,
    )
    with engine:
        run(engine, work)
        handles = {engine.submit(p, s): i for i, (p, s) in enumerate(zip(work.prompts, work.params, strict=True))}
        victims = data.draw(st.sets(st.sampled_from(list(handles))))
        ended: dict[Handle, tuple[int, ...]] = {}
        for _ in range(2_000):
            for handle in victims:
                if data.draw(st.booleans()):
                    engine.abort(handle)
            for event in engine.step():
                if isinstance(event, FinishEvent):
                    ended[event.handle] = event.output.choices[0].token_ids
            engine.check()
            if len(ended) == len(handles):
                break
        for handle, i in handles.items():
            assert ended[handle] == expected[i][: len(ended[handle])]
            assert handle in victims or ended[handle] == expected[i]
    engine.check()
    assert engine.stats().cache.num_swaps == 0


def two_prompts(num_pages: int = 5, **settings: Any) -> Engine:
    """An engine after two prompts of five pages each, the first of which has left the device."""
    engine = Engine(
        HashModel(vocab=VOCAB), page_size=4, num_pages=num_pages, num_host_pages=12, poison=True, **settings
    )
    for token in (1, 2, 2 if num_pages == 5 else 4):
        engine.generate([[token] * 16], GREEDY)
    return engine


def test_a_prompt_comes_back_and_is_not_computed_again() -> None:
    with two_prompts(swap="always") as engine:
        before = engine.stats()
        assert before.transfers.swap_outs >= 3
        assert before.cache.num_host_cached >= 3
        (output,) = engine.generate([[1] * 16], GREEDY)
        after = engine.stats()
        assert output.choices[0].token_ids == alone([1] * 16, GREEDY)
        assert after.transfers.swap_ins >= 3
        assert after.transfers.bytes_moved == 64 * (after.transfers.swap_ins + after.transfers.swap_outs)
        assert after.counters.computed - before.counters.computed <= 4
        engine.check()


def test_a_pin_holds_what_is_on_the_device() -> None:
    """Host pages are not pinned; once the prompt has run again everything is, and stays there."""
    with two_prompts(num_pages=10, swap="always", pin_budget=1.0) as engine:
        matched = engine.explain([1] * 16)
        assert matched.host_len
        assert engine.pin([1] * 16).prefix_len == matched.matched // 4 * 4
        engine.generate([[1] * 16], GREEDY)
        assert engine.pin([1] * 16).prefix_len == 16
        for token in range(5, 15):
            engine.generate([[token] * 16], GREEDY)
            engine.check()
        assert engine.explain([1] * 16).matched == 16


def test_never_means_recompute() -> None:
    with two_prompts(swap="never") as engine:
        engine.generate([[1] * 16], GREEDY)
        assert engine.stats().transfers.swap_outs == engine.stats().cache.num_host_cached == 0
        assert engine.stats().counters.computed == 48


def test_a_late_copy_lets_others_go_ahead_and_stalls_nobody() -> None:
    """The request whose pages are on the way waits, one that needs none of them does not."""
    with two_prompts(num_pages=8, swap="always") as engine:
        model = engine.model
        assert isinstance(model, HashModel)
        model.copy_delay = lambda: 5
        first, second = engine.submit([1] * 16, GREEDY), engine.submit([3], GREEDY)
        ended = [event.handle for _ in range(12) for event in engine.step() if isinstance(event, FinishEvent)]
        assert ended == [second, first]
        assert engine.stats().transfers.swap_ins >= 3
        model.copy_delay = lambda: 10**4
        num_steps = 0
        engine.submit([2] * 16, GREEDY)
        while engine.stats().num_running + engine.stats().num_waiting:
            engine.step()
            num_steps += 1
        assert num_steps <= 6


def test_a_failed_copy_means_recompute_once() -> None:
    with two_prompts(swap="always") as engine:
        assert isinstance(engine.model, HashModel)
        engine.model.copy_delay = lambda: None
        (output,) = engine.generate([[1] * 16], GREEDY)
        assert output.choices[0].token_ids == alone([1] * 16, GREEDY)
        stats = engine.stats()
        assert stats.transfers.swap_ins == 0
        assert stats.transfers.swap_failures > 0
        assert stats.counters.computed == 48


@pytest.mark.parametrize("fate", ["fails", "raises"])
def test_copies_that_always_fail_are_tried_ever_less(fate: str) -> None:
    """And then nothing is held: an idle engine does not try one after the other for ever."""
    fates = Fates([fate])
    model = HashModel(vocab=VOCAB, copy_delay=fates)
    with Engine(model, num_pages=1, page_size=1, num_host_pages=3, swap="always") as engine:
        engine.generate([[1]], SamplingParams(max_tokens=1, temperature=0.0))
        for _ in range(200):
            engine.step()
        assert 3 <= engine.stats().transfers.swap_failures <= 8
        assert engine.stats().cache.num_held == 0
        engine.check()
        fates.fates = [0]
        fates._next = cycle([0])
        for _ in range(600):
            engine.step()
        assert engine.stats().transfers.swap_outs > 0, "it was tried again"


def test_reset_waits_for_copies_and_refuses_while_requests_live() -> None:
    with two_prompts(num_pages=8, swap="always") as engine:
        assert isinstance(engine.model, HashModel)
        engine.model.copy_delay = lambda: 100
        handle = engine.submit([1] * 16, GREEDY)
        engine.submit([3], GREEDY)
        engine.step()
        assert engine.stats().cache.num_swaps > 0
        with pytest.raises(LiveTables):
            engine.reset_cache()
        engine.abort(handle)
        while engine.stats().num_running:
            engine.step()
        engine.reset_cache()
        stats = engine.stats().cache
        assert (stats.num_free, stats.num_host_free, stats.num_swaps) == (8, 12, 0)


def test_what_an_interrupt_leaves_waits_for_copies_that_still_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_prompts(num_pages=8, swap="always") as engine:
        assert isinstance(engine.model, HashModel)
        engine.model.copy_delay = lambda: 3
        engine.submit([1] * 16, GREEDY)
        engine.submit([3], GREEDY)
        engine.step()
        assert engine.stats().cache.num_swaps > 0
        with monkeypatch.context() as patched:
            patched.setattr(HostTier, "poll", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        engine.check()
        prompts = [[1] * 16, [3]]
        answers = [output.choices[0].token_ids for output in engine.generate(prompts, GREEDY)]
        assert answers == [alone(prompt, GREEDY) for prompt in prompts]


def test_a_record_keeps_the_costs_it_decided_by(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with two_prompts(swap="auto", record=path) as engine:
        for token in (1, 2, 1, 3, 2, 1):
            engine.generate([[token] * 16], GREEDY)
    result = replay(path)
    assert result.difference is None
    assert result.num_steps > 20


def test_a_clock_that_fails_or_goes_back_changes_no_answer() -> None:
    """Nothing is measured then, and moving goes on as if it cost nothing."""
    ticks = iter(range(10**6, 0, -1))

    def broken() -> float:
        raise OSError("no clock here")

    for clock in (broken, lambda: float(next(ticks)), lambda: float("nan")):
        with two_prompts(clock=clock) as engine:
            (output,) = engine.generate([[1] * 16], GREEDY)
            assert output.choices[0].token_ids == alone([1] * 16, GREEDY)
            assert engine.tier.costs == Costs()
            assert engine.stats().transfers.swap_ins >= 3


@pytest.mark.parametrize("swap", ["always", "never"])
def test_what_was_in_host_memory_before_a_request_outlives_it(swap: Swap) -> None:
    """`cache="none"` lets go of what the request added; its prompt, brought back or computed anew, was there before."""
    with two_prompts(swap="always") as engine:
        engine.tier._swap = swap
        assert engine._loop.cache.match([1] * 16).host_len >= 12
        engine.generate([[1] * 16], GREEDY, cache="none")
        assert engine._loop.cache.peek([1] * 16) >= 12
        engine.check()


def test_released_output_leaves_both_memories() -> None:
    with two_prompts(num_pages=8, swap="always") as engine:
        handle = engine.submit([9] * 8, SamplingParams(max_tokens=9, temperature=0.0))
        while engine.stats().num_running + engine.stats().num_waiting:
            engine.step()
        cache, output = engine._loop.cache, engine._loop.requests.find(handle).branches[0].tokens
        engine.tier.spill(8)
        assert cache.match(output).host_len > 9, "the output lies in host memory"
        engine.release(handle)
        left = cache.match(output)
        assert (left.length + left.host_len, cache.stats().dropped_pages) == (8, 2)
        engine.check()


# -- what moves -------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass only when a copy or a step is made to take them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowModel(HashModel):
    """A hash model whose copies take `seconds` each page by a clock."""

    clock: Clock
    seconds: float

    def copy_out(self, device_pages: Any, host_pages: Any) -> Any:
        self.clock.now += self.seconds * len(device_pages)
        return HashModel.copy_out(self, device_pages, host_pages)

    def copy_in(self, host_pages: Any, device_pages: Any) -> Any:
        self.clock.now += self.seconds * len(device_pages)
        return HashModel.copy_in(self, host_pages, device_pages)


def a_tier(*, copy_seconds: float, token_seconds: float, num_host_pages: int = 100) -> tuple[RadixCache, HostTier]:
    """A full cache of single leaves, four tokens a page, and its tier, which has measured what a token costs."""
    model = SlowModel()
    model.clock, model.seconds = Clock(), copy_seconds
    model.allocate(100, 4, num_host_pages)
    cache = RadixCache(num_pages=100, page_size=4, num_host_pages=num_host_pages)
    for leaf in range(100):
        table = cache.open([leaf] * 4)
        assert cache.extend(table, [leaf] * 4) is not None
        cache.publish(table)
        cache.close(table)
    tier = HostTier(cache, model, LogprobStore(100 + num_host_pages, 4), clock=model.clock)
    compute(tier, 100, 100 * token_seconds)
    tier.poll()
    return cache, tier


def compute(tier: HostTier, num_rows: int, seconds: float) -> None:
    """A step that took so long."""
    clock = tier._clock
    assert isinstance(clock, Clock)
    begun = clock()
    clock.now += seconds
    tier.computed(num_rows, begun)


def test_pages_move_where_that_costs_less() -> None:
    cache, tier = a_tier(copy_seconds=1.0, token_seconds=1.0)
    for _ in range(10):
        tier.spill(3)
        tier.poll()
    assert (cache.num_free, tier.totals.swap_outs) == (30, 30)
    cache.check()


def test_pages_are_dropped_where_moving_costs_more_once_that_is_known() -> None:
    """The first move measures; after that one page now and then looks whether it still holds."""
    cache, tier = a_tier(copy_seconds=100.0, token_seconds=1.0)
    tier.spill(3)
    assert tier.totals.swap_outs == 3
    for _ in range(100):
        tier.poll()
        tier.spill(5)
        if cache.num_free:
            break
    moved = [tier.totals.swap_outs]
    for _ in range(99):
        tier.poll()
        tier.spill(5)
        moved.append(tier.totals.swap_outs)
    assert moved[-1] - 3 == 500 // 256


def test_costs_follow_what_is_measured() -> None:
    _, tier = a_tier(copy_seconds=100.0, token_seconds=1.0)
    tier.spill(1)
    tier.poll()
    assert not tier.costs.pays(4, out=True)
    for _ in range(100):
        compute(tier, 100, 100 * 1000.0)
    tier.poll()
    assert tier.costs.pays(4, out=True)


def test_bringing_back_costs_one_way() -> None:
    costs = Costs(move_out=3.0, move_in=3.0, token=1.0)
    assert [costs.pays(n, out=True) for n in (5, 6)] == [False, True]
    assert [costs.pays(n, out=False) for n in (2, 3)] == [False, True]
    assert Costs(move_out=1e9, move_in=1e9).pays(1, out=True)


def test_late_copies_begin_ahead_of_the_need_for_a_share_of_the_pool() -> None:
    """All the rest can be evicted at any time."""
    cache, tier = a_tier(copy_seconds=0.0, token_seconds=1.0)
    assert isinstance(tier._model, SlowModel)
    tier._model.copy_delay = lambda: 2
    for _ in range(3):
        tier.poll()
        tier.spill(40)
        assert (len(cache.swaps), cache.num_evictable) == (6, 94)
    table = cache.open([])
    assert cache.extend(table, [7] * 4 * 94) is not None
    cache.check()
    tier.poll()
    assert (len(cache.swaps), cache.num_free, tier.totals.swap_outs) == (0, 6, 6)


def test_without_host_pages_nothing_is_asked() -> None:
    cache, tier = a_tier(copy_seconds=0.0, token_seconds=1.0, num_host_pages=0)
    tier.spill(50)
    assert tier.fetch(np.full(4, 3, np.int32)) == ()
    assert cache.num_free == 0


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"swap": "sometimes"}, "swap: 'sometimes' given; allowed: 'auto' or 'always' or 'never'"),
        ({"num_host_pages": -1}, "num_host_pages"),
        ({"host_memory": "much"}, "host_memory: 'much' given"),
        ({"host_memory": -1}, "host_memory"),
    ],
)
def test_wrong_settings_are_refused(given_settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Engine(HashModel(), num_pages=4, **given_settings)


def test_host_memory_is_counted_in_pages() -> None:
    with Engine(HashModel(), num_pages=4, page_size=16, host_memory="1KiB") as engine:
        assert engine.stats().cache.num_host_pages == 4
    with Engine(HashModel(), num_pages=4) as engine:
        assert engine.stats().cache.num_host_pages == 0


# -- a real model -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["native", "torch"])
def llama(request: pytest.FixtureRequest) -> TransformerModel:
    model = tiny.build(tiny.wide("llama"), dtype=torch.float32)
    return TransformerModel(model, cpu_kernel=request.param)


def test_pages_of_a_real_model_come_back_bit_for_bit(llama: TransformerModel) -> None:
    llama.allocate(6, 16, 4)
    assert llama._pool is not None
    layers, generator = llama._pool._layers.values(), torch.Generator().manual_seed(0)
    for kv in layers:
        kv.k.copy_(torch.randn(kv.k.shape, generator=generator))
        kv.v.copy_(torch.randn(kv.v.shape, generator=generator))
    wanted = [(kv.k.clone(), kv.v.clone()) for kv in layers]
    pages, hosts = np.array([2, 5, 6]), np.array([10, 7, 8])
    assert llama.copy_out(pages, hosts).done()
    llama.poison_slots(np.concatenate([np.arange(16) + 16 * page for page in pages]))
    assert all(kv.k[pages].isnan().all() for kv in layers)
    llama.copy_in(hosts, pages).wait()
    assert all(torch.equal(kv.k, k) and torch.equal(kv.v, v) for kv, (k, v) in zip(layers, wanted, strict=True))
    llama.poison_slots(np.arange(16) + 16 * 7)
    assert llama.copy_in(hosts, pages).done()
    for kv in layers:
        assert [bool(kv.k[page].isnan().any()) for page in pages] == [False, True, False]


def test_a_real_model_answers_alike_with_pages_that_went_out_and_came_back(llama: TransformerModel) -> None:
    prompts = [[(7 * i + j) % tiny.VOCAB_SIZE for j in range(40)] for i in range(4)]
    with Engine(llama, num_pages=64, page_size=8) as engine:
        expected = [engine.generate([prompt], GREEDY)[0].choices[0].token_ids for prompt in prompts]
    with Engine(llama, num_pages=8, page_size=8, num_host_pages=64, swap="always", poison=True) as engine:
        for _ in range(3):
            answers = [engine.generate([prompt], GREEDY)[0].choices[0].token_ids for prompt in prompts]
            assert answers == expected
        assert engine.stats().transfers.swap_ins >= 30
        assert engine.stats().counters.computed <= 4 * 40 + 8 * 8
        engine.check()
