"""Several choices of one request: what they share, what they draw, how each ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from radixrt.runtime import (
    BeamParams,
    ChoiceEvent,
    Engine,
    Event,
    FinishEvent,
    Handle,
    InvalidRequest,
    Output,
    SamplingParams,
    TokenEvent,
)
from radixrt.runtime.intake import branch_pages
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import MakeEngine


def held_pages(engine: Engine) -> int:
    """Distinct pages that live sequences hold."""
    tables = engine._loop.cache.tables
    return len(np.unique(np.concatenate([table.page_ids for table in tables]))) if tables else 0


def lone(prompt: list[int], params: SamplingParams) -> Output:
    """The request's output in an unlimited engine without a cache."""
    with Engine(HashModel(), num_pages=4096, page_size=4, prefix_cache=False, tokenizer=ByteTokenizer()) as engine:
        return engine.generate([prompt], params)[0]


def run(engine: Engine) -> list[Event]:
    """Step, audited, until nothing lives."""
    events: list[Event] = []
    for _ in range(10_000):
        events += engine.step()
        engine.check()
        stats = engine.stats()
        if not stats.num_running and not stats.num_waiting:
            return events
    raise AssertionError("the engine stalls")


@given(
    prompt_len=st.integers(1, 40),
    page_size=st.sampled_from([1, 4, 16]),
    n=st.integers(1, 32),
    num_tokens=st.integers(1, 9),
)
def test_branches_hold_the_pages_they_must_and_no_more(
    prompt_len: int, page_size: int, n: int, num_tokens: int
) -> None:
    """floor(P/b) + n (ceil((P+g)/b) - floor(P/b)) once they differ, ceil(P/b) before."""
    params = SamplingParams(n=n, max_tokens=num_tokens + 1, temperature=100.0, seed=n, ignore_eos=True)
    with Engine(HashModel(vocab=20_000), num_pages=2048, page_size=page_size) as engine:
        handle = engine.submit(list(range(prompt_len)), params)
        engine.step()
        assert held_pages(engine) == -(-prompt_len // page_size)
        firsts = {tuple(branch.tokens.tolist()) for branch in engine._loop.requests.find(handle).branches}
        assume(len(firsts) == n)
        for g in range(1, num_tokens):
            engine.step()
            full = prompt_len // page_size
            expected = full + n * (-(-(prompt_len + g) // page_size) - full)
            assert held_pages(engine) == expected == branch_pages(prompt_len, prompt_len + g, n, page_size)
        engine.check()
        assert engine.stats().counters.computed == prompt_len
        assert engine.stats().counters.forks == n - 1


@pytest.mark.parametrize("num_pages", [512, 26])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_are_what_as_many_requests_would_draw(
    make_engine: MakeEngine, *, prefix_cache: bool, num_pages: int
) -> None:
    """Choice i draws on path (i,), whatever the others do and however short pages are."""
    params = SamplingParams(n=5, max_tokens=8, seed=7)
    engine = make_engine(num_pages=num_pages, page_size=4, prefix_cache=prefix_cache)
    prompts = [[1] * 6, [2] * 9, [1] * 6 + [3]]
    outputs = engine.generate(prompts, params)
    assert num_pages > 26 or engine.stats().counters.preemptions
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == lone_like(output, prompt, params)
        assert len({choice.token_ids for choice in output.choices}) == 5
        first = lone(prompt, SamplingParams(max_tokens=8, seed=7))
        assert output.choices[0] == first.choices[0], "one choice is choice 0"


def lone_like(output: Output, prompt: list[int], params: SamplingParams) -> Output:
    """`lone`, with this handle and usage."""
    expected = lone(prompt, params)
    return Output(
        handle=output.handle,
        prompt_token_ids=expected.prompt_token_ids,
        choices=expected.choices,
        usage=output.usage,
    )


def test_each_choice_ends_on_its_own(make_engine: MakeEngine) -> None:
    model = HashModel(vocab=16, eos=frozenset({3, 4, 5}))
    engine = make_engine(model)
    handle = engine.submit([1, 2, 3], SamplingParams(n=6, max_tokens=12, seed=1))
    events = run(engine)
    last = events[-1]
    assert isinstance(last, FinishEvent)
    assert [choice.index for choice in last.output.choices] == list(range(6))
    assert {choice.finish_reason for choice in last.output.choices} == {"stop", "length"}
    lengths = {len(choice.token_ids) for choice in last.output.choices}
    assert len(lengths) > 1
    for choice in last.output.choices:
        mine = [e for e in events if not isinstance(e, FinishEvent) and e.choice == choice.index]
        assert tuple(e.token_id for e in mine if isinstance(e, TokenEvent)) == choice.token_ids
        (ended,) = (e for e in mine if isinstance(e, ChoiceEvent))
        assert ended is mine[-1]
        assert ended.finish_reason == choice.finish_reason
    usage = last.output.usage
    assert (usage.prompt_tokens, usage.computed_tokens, usage.cached_tokens) == (3, 3, 0)
    assert usage.completion_tokens == sum(len(choice.token_ids) for choice in last.output.choices)
    assert events.count(last) == 1
    assert last.handle == handle


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_abort_ends_all(make_engine: MakeEngine, steps: int) -> None:
    engine = make_engine(page_size=4)
    handle = engine.submit([1] * 9, SamplingParams(n=4, max_tokens=20, seed=1))
    for _ in range(steps):
        engine.step()
    engine.abort(handle)
    *_, last = engine.step()
    assert isinstance(last, FinishEvent)
    assert [choice.finish_reason for choice in last.output.choices] == ["abort"] * 4
    assert [len(choice.token_ids) for choice in last.output.choices] == [steps] * 4
    assert engine.stats().num_running == engine.stats().num_waiting == 0


class TestBestOf:
    def test_returns_the_most_probable(self, make_engine: MakeEngine) -> None:
        engine = make_engine(HashModel(vocab=50))
        params = SamplingParams(n=2, best_of=6, max_tokens=5, seed=3)
        all_params = SamplingParams(n=6, max_tokens=5, seed=3, logprobs=0)
        best, everything = engine.generate([[1, 2]], params)[0], engine.generate([[1, 2]], all_params)[0]

        def merit(token_ids: tuple[int, ...]) -> float:
            (choice,) = (c for c in everything.choices if c.token_ids == token_ids)
            assert choice.logprobs is not None
            return sum(token.sampled.logprob for token in choice.logprobs) / len(choice.logprobs)

        merits = sorted((merit(choice.token_ids) for choice in everything.choices), reverse=True)
        assert [merit(choice.token_ids) for choice in best.choices] == merits[:2]
        assert [choice.index for choice in best.choices] == [0, 1]
        assert all(choice.logprobs is None for choice in best.choices), "nobody asked for them"
        assert best.usage.completion_tokens == 30

    @given(
        best_of=st.integers(2, 6),
        n=st.integers(1, 3),
        steps=st.integers(0, 9),
        stop=st.booleans(),
        max_tokens=st.integers(1, 8),
    )
    def test_an_index_is_the_one_that_the_output_shows(
        self, *, best_of: int, n: int, steps: int, stop: bool, max_tokens: int
    ) -> None:
        """To fork, truncate and adopt; however it ends, and whether its choices have differed by then."""
        n = min(n, best_of)
        ends = range(0, 50, 4) if stop else ()
        params = SamplingParams(n=n, best_of=best_of, max_tokens=max_tokens, seed=best_of, stop_token_ids=ends)
        with Engine(HashModel(vocab=50), num_pages=200, page_size=4, poison=True) as engine:
            handle = engine.submit([1, 2, 3], params)
            events = [event for _ in range(steps) for event in engine.step()]
            engine.abort(handle)
            events += run(engine)
            (output,) = (event.output for event in events if isinstance(event, FinishEvent))
            assert [choice.index for choice in output.choices] == list(range(n))
            with pytest.raises(InvalidRequest, match="choice: "):
                engine.fork(handle, choice=n)
            forks = [engine.fork(handle, params=SamplingParams(max_tokens=1), choice=i)[0] for i in range(n)]
            ended = {event.handle: event.output for event in run(engine) if isinstance(event, FinishEvent)}
            for choice, fork in zip(output.choices, forks, strict=True):
                assert ended[fork].prompt_token_ids == (1, 2, 3, *choice.token_ids)
                if n == 1 or steps:
                    engine.adopt(handle, fork, choice=choice.index)
                    engine.truncate(handle, len(ended[fork].prompt_token_ids), choice=choice.index)
                    again = engine._loop.requests.find(handle).branch(choice.index).tokens
                    assert tuple(again.tolist()) == ended[fork].prompt_token_ids

    def test_a_fork_made_before_they_were_ranked_is_of_none(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        handle = engine.submit([1, 2], SamplingParams(n=2, best_of=4, max_tokens=6))
        for _ in range(2):
            engine.step()
        forks = [engine.fork(handle, choice=choice)[0] for choice in range(4)]
        run(engine)
        for fork in forks:
            with pytest.raises(InvalidRequest, match="of request 0 made after that had ended"):
                engine.adopt(handle, fork)

    def test_tells_at_the_end(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.submit([1, 2], SamplingParams(best_of=3, max_tokens=5, seed=3))
        assert [type(event) for event in run(engine)] == [FinishEvent]

    def test_is_at_least_n(self) -> None:
        with pytest.raises(InvalidRequest, match="best_of: 2 given; allowed: at least n, which is 3"):
            SamplingParams(n=3, best_of=2)


def test_what_can_never_fit_counts_every_choice(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=8, page_size=4)
    engine.submit([1] * 8, SamplingParams(n=3, max_tokens=9))  # 2 shared pages and 2 for each
    with pytest.raises(InvalidRequest, match=r"8 \+ 10 tokens in 3 choices given, which take 11 pages of 4"):
        engine.submit([1] * 8, SamplingParams(n=3, max_tokens=10))
    run(engine)


@given(data=st.data())
def test_choices_under_pressure_are_those_of_a_run_alone(data: st.DataObject) -> None:
    """In a pool that just holds the largest request, with aborts and forks of choices in between."""
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    params = [
        SamplingParams(n=data.draw(st.integers(1, 4)), max_tokens=data.draw(st.integers(1, 6)), seed=i)
        for i in range(data.draw(st.integers(1, 5)))
    ]
    prompts = [[1, 2, 3, 4, 5][: data.draw(st.integers(1, 5))] * data.draw(st.integers(1, 3)) for _ in params]
    need = max(
        branch_pages(len(prompt), len(prompt) + p.max_tokens - 1, p.n, page_size)
        for prompt, p in zip(prompts, params, strict=True)
    )
    slack, chunk = data.draw(st.integers(0, 6)), data.draw(st.sampled_from([None, 3]))
    with Engine(
        HashModel(vocab=50), num_pages=need + slack, page_size=page_size, poison=True, prefill_chunk=chunk
    ) as engine:
        handles = [engine.submit(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        aborted: set[Handle] = set()
        outputs: dict[Handle, Output] = {}
        for _ in range(2_000):
            if len(outputs) == len(handles):
                break
            if data.draw(st.integers(0, 9)) == 0:
                aborted.add(handle := data.draw(st.sampled_from(handles)))
                engine.abort(handle)
            for event in engine.step():
                if isinstance(event, FinishEvent):
                    assert event.handle not in outputs
                    outputs[event.handle] = event.output
            engine.check()
        assert len(outputs) == len(handles), "the engine stalls"
        for handle, prompt, p in zip(handles, prompts, params, strict=True):
            with Engine(HashModel(vocab=50), num_pages=512, page_size=page_size, prefix_cache=False) as other:
                expected = other.generate([prompt], p)[0].choices
            for ours, theirs in zip(outputs[handle].choices, expected, strict=True):
                assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)]
                assert ours.finish_reason == theirs.finish_reason or handle in aborted


@given(data=st.data())
def test_no_two_branches_draw_on_one_path(data: st.DataObject) -> None:
    """Whatever was forked, when, and into how many choices or beams: each has noise of its own."""

    def drawn() -> SamplingParams | BeamParams:
        count, max_tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
        if data.draw(st.booleans()):
            return BeamParams(width=count, max_tokens=max_tokens)
        return SamplingParams(best_of=count, max_tokens=max_tokens)

    with Engine(HashModel(vocab=50), num_pages=500, page_size=4) as engine:
        handles = [engine.submit([1, 2, 3], drawn())]
        for _ in range(data.draw(st.integers(2, 10))):
            for _ in range(data.draw(st.integers(0, 6))):
                engine.step()
            parent = data.draw(st.sampled_from(handles))
            choice = data.draw(st.integers(0, len(engine._loop.requests.find(parent).paths) - 1))
            handles += engine.fork(parent, data.draw(st.integers(1, 2)), drawn(), choice=choice)
        paths = [path for handle in handles for path in engine._loop.requests.find(handle).paths]
        assert len(set(paths)) == len(paths)
        run(engine)
        paths = [path for handle in handles for path in engine._loop.requests.find(handle).paths]
        assert len(set(paths)) == len(paths)


def test_forks_of_narrow_searches_differ(make_engine: MakeEngine) -> None:
    """Also where both searches found the same, so that what is sampled from there begins alike."""
    engine = make_engine()
    root = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))[0].handle
    searches = engine.fork(root, 2, BeamParams(width=1, max_tokens=2))
    run(engine)
    params = SamplingParams(max_tokens=8)
    sampled = [engine.fork(search, params=params)[0] for search in searches]
    ended = {event.handle: event.output for event in run(engine) if isinstance(event, FinishEvent)}
    first, second = (ended[handle] for handle in sampled)
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.choices[0].token_ids != second.choices[0].token_ids
