"""Nothing but the prompt, the parameters and the seed may change an answer: on the hash model, exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from radixrt.kernels.plan import AttentionPlan
from radixrt.radix.testing import prefix_families
from radixrt.runtime import Engine, FinishEvent, Handle, Output, SamplingParams
from radixrt.runtime.batch import Batch
from radixrt.runtime.testing import HashModel

from ..plans import random_plan

VOCAB = 50


@dataclass(frozen=True)
class Work:
    """Some prompts and how to continue each."""

    prompts: list[list[int]]
    params: list[SamplingParams]


@st.composite
def works(draw: st.DrawFn) -> Work:
    prompts = draw(prefix_families(page_size=4, max_size=6))
    params = [
        SamplingParams(
            max_tokens=draw(st.integers(1, 12)),
            temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
            seed=draw(st.integers(0, 3)),
            stop_token_ids=draw(st.sampled_from([(), (7,), (3, 11)])),
        )
        for _ in prompts
    ]
    return Work([prompt or [0] for prompt in prompts], params)


@st.composite
def engine_settings(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "page_size": draw(st.sampled_from([1, 2, 3, 4, 16])),
        "token_budget": draw(st.sampled_from([1, 2, 7, 16, 512])),
        "prefill_chunk": draw(st.sampled_from([None, 1, 3, 16])),
        "max_running": draw(st.sampled_from([1, 2, 3, 64])),
        "max_bypass": draw(st.sampled_from([0, 1, 16])),
        "eviction": draw(st.sampled_from(["lru", "lru2", "duel"])),
        "prefix_cache": draw(st.booleans()),
        "num_pages": None,  # resolved by `small_pool`
        "poison": True,
    }


def small_pool(work: Work, page_size: int, slack: int) -> int:
    """The fewest pages that admit every request alone, and `slack` more."""
    return slack + max(
        -(-(len(p) + s.max_tokens - 1) // page_size) for p, s in zip(work.prompts, work.params, strict=True)
    )


def alone(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    """The answer of a fresh engine without a cache that runs nothing else."""
    with Engine(HashModel(vocab=VOCAB), num_pages=64, prefix_cache=False, poison=True) as engine:
        return engine.generate([prompt], params)[0].choices[0].token_ids


def run(engine: Engine, work: Work) -> list[tuple[int, ...]]:
    """All of it at once, audited after every step."""
    handles = [engine.submit(p, s) for p, s in zip(work.prompts, work.params, strict=True)]
    ended: dict[Handle, tuple[int, ...]] = {}
    for _ in range(5_000):
        for event in engine.step():
            if isinstance(event, FinishEvent):
                assert event.handle not in ended, "two terminal events"
                ended[event.handle] = event.output.choices[0].token_ids
        engine.check()
        if len(ended) == len(handles):
            return [ended[handle] for handle in handles]
    raise AssertionError("the engine stalls")


def test_the_hash_model_agrees_with_one_pass_by_hand() -> None:
    """The answers that all others are compared with do not depend on the engine."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    expected: list[int] = []
    for _ in range(10):
        model = HashModel(vocab=VOCAB)
        model.allocate(1, 64)
        tokens = np.array([*prompt, *expected])
        n = np.arange(len(tokens))
        one = np.array([0, 1])
        batch = Batch(
            token_ids=tokens, positions=n, write_rows=n, write_slots=64 + n, row_indptr=one * len(n), page_indptr=one,
            page_ids=np.array([1]), namespaces=("",), logit_rows=n[-1:],
        )  # fmt: skip
        expected.append(int(model.forward(batch).logits[0].argmax()))
    assert alone(prompt, SamplingParams(max_tokens=10, temperature=0.0)) == tuple(expected)


@given(work=works(), settings=engine_settings(), slack=st.integers(0, 12))
def test_no_setting_changes_an_answer(work: Work, settings: dict[str, Any], slack: int) -> None:
    """Any page size, budget, chunk, running limit, pool (preemption) and cache, cold and then warm."""
    expected = [alone(p, s) for p, s in zip(work.prompts, work.params, strict=True)]
    settings = settings | {"num_pages": small_pool(work, settings["page_size"], slack)}
    with Engine(HashModel(vocab=VOCAB), **settings) as engine:
        assert run(engine, work) == expected
        assert run(engine, work) == expected


@given(work=works(), settings=engine_settings(), seed=st.integers(0, 2**32))
def test_no_plan_changes_an_answer(work: Work, settings: dict[str, Any], seed: int) -> None:
    """Whatever legal forest the attention of a step reads through, and in whatever order its nodes come."""
    random = Random(seed)

    def planner(batch: Batch, page_size: int) -> AttentionPlan:
        step = (batch.positions, batch.row_indptr, batch.page_indptr, batch.page_ids)
        plan = random_plan(random, *step, page_size=page_size, exact=False)
        plan.check()
        return _shuffled(plan, random)

    expected = [alone(p, s) for p, s in zip(work.prompts, work.params, strict=True)]
    settings = settings | {"num_pages": small_pool(work, settings["page_size"], 12)}
    with Engine(HashModel(vocab=VOCAB, planner=planner), **settings) as engine:
        assert run(engine, work) == expected
        assert run(engine, work) == expected


def _shuffled(plan: AttentionPlan, random: Random) -> AttentionPlan:
    """The same nodes in another order: partial results may merge in any."""
    nodes = list(plan.nodes())
    random.shuffle(nodes)
    return AttentionPlan.of(nodes, plan.positions, page_size=plan.page_size, exact=plan.exact)


@pytest.mark.parametrize("starts", [(0, 8), (0, 4, 4), (0, 4, 8, 8), (4,), (0, 8, 4)])
def test_the_hash_model_sees_a_plan_that_reads_wrongly(starts: tuple[int, ...]) -> None:
    """A prompt of three pages, read in nodes of one page that leave one out, read one twice or take it for another."""
    prompt, params = list(range(12)), SamplingParams(max_tokens=4, temperature=0.0)

    def planner(batch: Batch, page_size: int) -> AttentionPlan:
        plan = batch.plan(page_size=page_size, exact=False, sharing_cost=1)
        if batch.num_rows == 1:
            return plan
        n = len(starts)
        pages, rows = np.resize(plan.page_ids, n), np.tile(plan.row_ids, n)
        at = [np.arange(n + 1), np.arange(n + 1) * batch.num_rows]
        return replace(plan, starts=np.array(starts), page_indptr=at[0], page_ids=pages, row_indptr=at[1], row_ids=rows)

    with Engine(HashModel(vocab=VOCAB, planner=planner), num_pages=64, page_size=4) as engine:
        answer = engine.generate([prompt], params)[0].choices[0].token_ids
    assert answer != alone(prompt, params)


@given(work=works(), data=st.data())
def test_arrival_changes_nothing(work: Work, data: st.DataObject) -> None:
    """Requests that come in any order, between any steps."""
    expected = [alone(p, s) for p, s in zip(work.prompts, work.params, strict=True)]
    order = data.draw(st.permutations(range(len(work.prompts))))
    handles: dict[Handle, int] = {}
    with Engine(HashModel(vocab=VOCAB), num_pages=64, page_size=4, token_budget=5, poison=True) as engine:
        ended: dict[int, tuple[int, ...]] = {}
        for i in order:
            handles[engine.submit(work.prompts[i], work.params[i])] = i
            for _ in range(data.draw(st.integers(0, 3))):
                collect(engine, handles, ended)
        while len(ended) < len(order):
            collect(engine, handles, ended)
    assert [ended[i] for i in range(len(order))] == expected


@given(work=works(), data=st.data())
def test_aborting_others_changes_nothing(work: Work, data: st.DataObject) -> None:
    """Aborts in every state: waiting, mid-chunk, decoding, preempted, ended."""
    expected = [alone(p, s) for p, s in zip(work.prompts, work.params, strict=True)]
    victims = data.draw(st.sets(st.integers(0, len(work.prompts) - 1), max_size=len(work.prompts) - 1))
    pages = small_pool(work, 2, 3)
    with Engine(HashModel(vocab=VOCAB), num_pages=pages, page_size=2, token_budget=6, poison=True) as engine:
        handles = {engine.submit(p, s): i for i, (p, s) in enumerate(zip(work.prompts, work.params, strict=True))}
        ended: dict[int, tuple[int, ...]] = {}
        while len(ended) < len(handles):
            for handle, i in handles.items():
                if i in victims and data.draw(st.booleans()):
                    engine.abort(handle)
            collect(engine, handles, ended)
    for i, tokens in ended.items():
        assert tokens == expected[i][: len(tokens)]
        if i not in victims:
            assert tokens == expected[i]


@given(work=works(), data=st.data())
def test_forks_equal_independent_runs(work: Work, data: st.DataObject) -> None:
    """A greedy fork at any moment continues as a new request would whose prompt is all that was committed."""
    pages = 4 * small_pool(work, 2, 20)
    with Engine(HashModel(vocab=VOCAB), num_pages=pages, page_size=2, token_budget=6, poison=True) as engine:
        handles = {engine.submit(p, s): i for i, (p, s) in enumerate(zip(work.prompts, work.params, strict=True))}
        ended: dict[int, tuple[int, ...]] = {}
        forks: dict[Handle, int] = {}
        greedy = SamplingParams(max_tokens=5, temperature=0.0)
        results: dict[Handle, Output] = {}
        while len(ended) < len(handles) or len(results) < len(forks):
            for handle, i in handles.items():
                if i not in ended and len(forks) < 8 and data.draw(st.booleans()):
                    forks.update(dict.fromkeys(engine.fork(handle, n=2, params=greedy), i))
            for event in engine.step():
                if isinstance(event, FinishEvent):
                    if event.handle in forks:
                        results[event.handle] = event.output
                    else:
                        ended[handles[event.handle]] = event.output.choices[0].token_ids
            engine.check()
    for output in results.values():
        assert output.choices[0].token_ids == alone(list(output.prompt_token_ids), greedy)


def collect(engine: Engine, handles: dict[Handle, int], ended: dict[int, tuple[int, ...]]) -> None:
    """One audited step; the answers of those that ended in it."""
    for event in engine.step():
        if isinstance(event, FinishEvent):
            assert handles[event.handle] not in ended, "two terminal events"
            ended[handles[event.handle]] = event.output.choices[0].token_ids
    engine.check()


@given(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=4, unique_by=tuple))
def test_namespaces_share_nothing(prompts: list[list[int]]) -> None:
    """The same prompts under other namespaces find nothing cached and answer otherwise."""
    params = SamplingParams(max_tokens=3, temperature=0.0)
    with Engine(HashModel(vocab=VOCAB), num_pages=256, page_size=2, poison=True) as engine:
        answers = []
        for namespace in ("", "a", "b"):
            outputs = engine.generate(prompts, params, namespace)
            computed = engine.stats().counters.computed
            answers.append([output.choices[0].token_ids for output in outputs])
            assert computed % len(answers) == 0, "a namespace found another's tokens"
    assert answers[0] != answers[1] != answers[2]


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 100), (2, 50), (16, 9)])
def test_preemption_happens_and_changes_nothing(page_size: int, num_pages: int) -> None:
    """Four that fit alone and not together: the pool is short on purpose, and it is seen to be."""
    params = SamplingParams(max_tokens=40, temperature=0.0)
    prompts = [[i] * 20 for i in range(4)]
    with Engine(HashModel(vocab=VOCAB), num_pages=num_pages, page_size=page_size, poison=True) as engine:
        work = Work(prompts, [params] * 4)
        assert run(engine, work) == [alone(prompt, params) for prompt in prompts]
        assert engine.stats().counters.preemptions > 0
