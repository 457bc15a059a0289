"""No token is computed twice: `computed` equals the nodes of the prompts' trie, whatever the budget and the chunk."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from radixrt.runtime import Engine, Handle, SamplingParams, ScoreParams, trie_size
from radixrt.runtime.testing import HashModel

from .conftest import MakeEngine, finish

FIRST = SamplingParams(max_tokens=1, temperature=0.0)  # nothing is fed back, so every row is a prompt's


@st.composite
def prefix_trees(draw: st.DrawFn) -> list[list[int]]:
    """Prompts at the nodes of a random tree of depth up to 5: some equal, some prefixes of others."""
    prompts: list[list[int]] = [draw(st.lists(st.integers(0, 2), max_size=20))]
    depth = [0]
    for _ in range(draw(st.integers(1, 7))):
        parent = draw(st.integers(0, len(prompts) - 1))
        if depth[parent] < 5:
            kept = draw(st.integers(0, len(prompts[parent])))
            prompts.append(prompts[parent][:kept] + draw(st.lists(st.integers(0, 2), max_size=20)))
            depth.append(depth[parent] + 1)
    prompts += draw(st.lists(st.sampled_from(prompts), max_size=2))
    return [prompt or [0] for prompt in draw(st.permutations(prompts))]


@given(
    prompts=prefix_trees(),
    page_size=st.sampled_from([1, 2, 4, 16]),
    token_budget=st.sampled_from([1, 3, 16, 512]),
    prefill_chunk=st.sampled_from([None, 1, 5, 16]),
    max_running=st.sampled_from([1, 2, 64]),
)
def test_computed_is_ideal(prompts: list[list[int]], **given_settings: Any) -> None:
    with Engine(HashModel(), num_pages=600, poison=True, **given_settings) as engine:
        outputs = engine.generate(prompts, FIRST)
        engine.check()
        counters = engine.stats().counters
        assert counters.computed == trie_size(prompts)
        assert counters.recomputed_after_preemption == counters.decoded == 0
        assert counters.recomputed_for_logits <= len(prompts)
        for prompt, output in zip(prompts, outputs, strict=True):
            usage = output.usage
            assert usage.prompt_tokens == len(prompt)
            assert usage.cached_tokens + usage.computed_tokens + usage.recomputed_tokens == len(prompt)
        assert sum(o.usage.computed_tokens for o in outputs) == counters.computed
        assert sum(o.usage.cached_tokens for o in outputs) == counters.cached


@given(prompts=prefix_trees(), page_size=st.sampled_from([1, 2, 4, 16]), token_budget=st.sampled_from([1, 5, 512]))
def test_computed_is_ideal_while_others_decode(prompts: list[list[int]], **given_settings: Any) -> None:
    """Requests that come one by one, while those before them decode with half-filled pages."""
    params = SamplingParams(max_tokens=4, temperature=0.0, logit_bias={0: -100, 1: -100, 2: -100})
    with Engine(HashModel(), num_pages=600, poison=True, **given_settings) as engine:
        unfinished: set[Handle] = set()
        for prompt in prompts:
            unfinished.add(engine.submit(prompt, params))
            engine.step()
        while engine.stats().num_running + engine.stats().num_waiting:
            engine.step()
            engine.check()
        assert engine.stats().counters.computed == trie_size(prompts)


@given(
    prompts=prefix_trees(),
    data=st.data(),
    page_size=st.sampled_from([1, 2, 4, 16]),
    token_budget=st.sampled_from([1, 3, 16, 512]),
    prefill_chunk=st.sampled_from([None, 1, 5]),
)
def test_computed_is_ideal_where_some_are_scored(
    prompts: list[list[int]], data: st.DataObject, **given_settings: Any
) -> None:
    """From anywhere on and in waves, so that what is known runs again for log-probabilities beside what goes on."""
    with Engine(HashModel(), num_pages=600, poison=True, **given_settings) as engine:
        for prompt in prompts:
            start = data.draw(st.none() | st.integers(1, len(prompt)))
            engine.submit(prompt, FIRST if start is None else ScoreParams(start=start))
            for _ in range(data.draw(st.sampled_from([0, 0, 1, 9]))):
                engine.step()
        while engine.stats().num_running + engine.stats().num_waiting:
            engine.step()
            engine.check()
        counters = engine.stats().counters
        assert (counters.computed, counters.recomputed_after_preemption) == (trie_size(prompts), 0)


@pytest.mark.parametrize(
    "params",
    [[ScoreParams(start=8), FIRST], [FIRST, ScoreParams(start=8)], [ScoreParams(start=8), ScoreParams(start=3)]],
)
def test_one_that_runs_known_rows_again_computes_nothing_that_another_does(
    make_engine: MakeEngine, params: list[ScoreParams | SamplingParams]
) -> None:
    """They do not stand at the same place, and one waits for a step."""
    engine = make_engine(page_size=4)
    engine.generate([[1] * 9], FIRST)
    for one in params:
        engine.submit([*[1] * 9, *range(20, 40)], one)
    finish(engine)
    counters = engine.stats().counters
    assert counters.computed == 9 + 20
    assert counters.steps <= 1 + 2


def test_twins_in_one_step_share_the_logits_too(make_engine: MakeEngine) -> None:
    engine = make_engine()
    outputs = engine.generate([[1, 2, 3]] * 5, FIRST)
    assert engine.stats().counters.recomputed_for_logits == 0
    assert [o.usage.computed_tokens for o in outputs] == [3, 0, 0, 0, 0], "charged to the first submitted"
    assert [o.usage.cached_tokens for o in outputs] == [0, 3, 3, 3, 3]


def test_a_later_twin_recomputes_one_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate([[1, 2, 3]], FIRST)
    usage = engine.generate([[1, 2, 3]], FIRST)[0].usage
    assert (usage.cached_tokens, usage.computed_tokens, usage.recomputed_tokens) == (2, 0, 1)
    assert engine.stats().counters.recomputed_for_logits == 1


def test_32_prompts_share_2000_tokens_cold(make_engine: MakeEngine) -> None:
    shared = [i % 7 for i in range(2_000)]
    prompts = [[*shared, 100 + i, *range(i, i + 20)] for i in range(32)]
    engine = make_engine(num_pages=2_000)
    engine.generate(prompts, FIRST)
    assert engine.stats().counters.computed == trie_size(prompts) == 2_000 + 32 * 21
    assert engine.stats().counters.steps == 6, "four of 512 rows for the shared tokens, the rest in two more"


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_the_second_turn_finds_all_of_the_first(make_engine: MakeEngine, page_size: int) -> None:
    """Everything but the last token, which was sampled and never fed."""
    engine = make_engine(page_size=page_size)
    params = SamplingParams(max_tokens=9, temperature=0.0)
    first = engine.generate([[5] * 37], params)[0]
    turn = [*first.prompt_token_ids, *first.choices[0].token_ids, 8, 8, 8]
    second = engine.generate([turn], params)[0]
    assert second.usage.cached_tokens == 37 + 9 - 1
    assert second.usage.computed_tokens == 4


def test_rows_ride_along_without_budget(make_engine: MakeEngine) -> None:
    """A budget of 4 rows a step: twins advance beside each other, and nobody computes what another computes."""
    engine = make_engine(token_budget=4, page_size=16)
    engine.generate([[1] * 40] * 3, FIRST)
    assert engine.stats().counters.computed == 40
    assert engine.stats().counters.steps == 10


def test_without_the_cache_nothing_is_shared(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache=False)
    for _ in range(2):
        engine.generate([[1] * 40] * 3, FIRST)
    assert engine.stats().counters.computed == 6 * 40
    assert engine.stats().counters.cached == 0


def test_trie_size() -> None:
    assert trie_size([]) == 0
    assert trie_size([[1, 2, 3], [1, 2, 3], [1, 2], [1, 4], [2]]) == 5
