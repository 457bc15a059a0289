"""The engine's face on the hash model: events, ends, aborts, faults, forks, bad input."""

from __future__ import annotations

import gc
import itertools
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from radixrt.radix.errors import LiveTables
from radixrt.runtime import (
    ChoiceEvent,
    Engine,
    Event,
    FinishEvent,
    Forward,
    Handle,
    InvalidRequest,
    Output,
    SamplingParams,
    TokenEvent,
)
from radixrt.runtime.batch import Batch
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import MakeEngine

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def finish(engine: Engine, *handles: Handle, events: list[Event] | None = None) -> dict[Handle, Output]:
    """Step, audited, until these have ended."""
    ended: dict[Handle, Output] = {}
    for _ in range(10_000):
        for event in engine.step():
            if events is not None:
                events.append(event)
            if isinstance(event, FinishEvent):
                assert event.handle not in ended, "two terminal events"
                ended[event.handle] = event.output
        engine.check()
        if ended.keys() >= set(handles):
            return ended
    raise AssertionError("the engine stalls")


def answer(prompt: list[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
    with Engine(HashModel(), num_pages=64, prefix_cache=False) as engine:
        return engine.generate([prompt], params)[0].choices[0].token_ids


def told(events: list[Event], choice: int = 0) -> str:
    """The text of a choice in these events."""
    return "".join(e.text for e in events if not isinstance(e, FinishEvent) and e.choice == choice)


class TestEvents:
    def test_deltas_add_up_to_the_text(self, make_engine: MakeEngine) -> None:
        engine = make_engine(HashModel(vocab=256))
        events = list(engine.stream("hällo", SamplingParams(max_tokens=40, seed=3)))
        last = events[-1]
        assert isinstance(last, FinishEvent)
        assert told(events) == last.output.text
        tokens = [event.token_id for event in events if isinstance(event, TokenEvent)]
        assert tuple(tokens) == last.output.choices[0].token_ids
        assert last.output.text == ByteTokenizer().decode(tokens)

    def test_stream_equals_generate(self, make_engine: MakeEngine) -> None:
        engine = make_engine(HashModel(vocab=256))
        *_, last = engine.stream("abc", GREEDY)
        assert isinstance(last, FinishEvent)
        assert last.output.choices == engine.generate("abc", GREEDY)[0].choices

    def test_leaving_a_stream_aborts_it(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        for _ in engine.stream([1, 2, 3], GREEDY):
            break
        assert engine.stats().num_running == 0
        assert engine.step() == []

    def test_events_of_others_wait_for_step(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        handle = engine.submit([9, 9], GREEDY)
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=20, temperature=0.0))
        events = engine.step()
        assert {event.handle for event in events} == {handle}
        assert [type(event) for event in events] == [TokenEvent] * 8 + [ChoiceEvent, FinishEvent]

    def test_steps_inside_a_stream_take_nothing_from_it(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        other = engine.submit([9, 9], SamplingParams(max_tokens=3, temperature=0.0))
        theirs: list[Event] = []
        mine = []
        for event in engine.stream([1, 2, 3], GREEDY):
            mine.append(event)
            theirs += engine.step()
        assert [type(event) for event in mine] == [TokenEvent] * 8 + [ChoiceEvent, FinishEvent]
        assert {event.handle for event in theirs} == {other}

    def test_a_stream_that_is_read_late_misses_nothing(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        stream = engine.stream([1, 2, 3], GREEDY)
        for _ in range(20):
            assert engine.step() == []
        assert [type(event) for event in stream] == [TokenEvent] * 8 + [ChoiceEvent, FinishEvent]

    @pytest.mark.parametrize("let_go", ["close", "with", "del", "engine"])
    def test_a_stream_that_is_never_read_leaves_nothing(self, make_engine: MakeEngine, let_go: str) -> None:
        engine = make_engine()
        stream = engine.stream([1, 2, 3], GREEDY)
        engine.step()
        if let_go == "close":
            stream.close()
            stream.close()
            assert list(stream) == []
        elif let_go == "with":
            with stream:
                next(stream)
        elif let_go == "del":
            del stream
        else:
            engine.close()
            assert [type(event) for event in stream] == [TokenEvent, ChoiceEvent, FinishEvent]
            return
        assert engine.stats().num_running == 0
        assert engine.step() == []

    @pytest.mark.parametrize("moment", range(0, 1_300, 37))
    def test_a_stream_may_be_collected_at_any_moment(self, make_engine: MakeEngine, moment: int) -> None:
        """Whatever function the engine has just called; the others' answers and the state stay whole."""
        engine = make_engine(num_pages=12, page_size=2, num_host_pages=6, swap="always")
        params = SamplingParams(max_tokens=9, temperature=0.0)
        other = engine.submit([9] * 4, params)
        streams = [engine.stream([1, 2, 3, 4], params), engine.stream([1, 2, 5], params)]
        count = itertools.count()

        def drop(_frame: object, event: str, _argument: object) -> None:
            if event == "call" and next(count) == moment:
                streams.clear()

        events = []
        for _ in range(60):
            sys.setprofile(drop)
            try:
                events += engine.step()
            finally:
                sys.setprofile(None)
            engine.check()
        assert not streams, "the moment came"
        assert [event.handle for event in events] == [other] * 11
        with Engine(HashModel(), num_pages=64, prefix_cache=False) as lone:
            expected = lone.generate([[9] * 4], params)[0].choices[0].token_ids
        assert events[-1].output.choices[0].token_ids == expected  # type: ignore[union-attr]

    def test_a_stream_in_a_cycle_is_collected_in_the_model(self, make_engine: MakeEngine) -> None:
        def collect(_: object) -> None:
            gc.collect()

        model = HashModel()
        engine = make_engine(model)
        cycle: list[object] = [engine.stream([1, 2, 3], GREEDY)]
        cycle.append(cycle)
        gc.disable()
        try:
            del cycle
            model.before_forward = collect
            assert engine.step() == []
        finally:
            gc.enable()
        model.before_forward = None
        assert engine.stats().num_running == 0

    def test_an_abort_inside_a_stream_ends_it(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        events = []
        for event in engine.stream([1, 2, 3], GREEDY):
            events.append(event)
            engine.abort(event.handle)
        assert [type(event) for event in events] == [TokenEvent, ChoiceEvent, FinishEvent]

    def test_finish_reasons(self, make_engine: MakeEngine) -> None:
        tokens = answer([1, 2, 3])
        engine = make_engine(HashModel(eos=frozenset([tokens[2]])))
        stopped = engine.generate([[1, 2, 3]], GREEDY)[0].choices[0]
        assert (stopped.finish_reason, stopped.token_ids) == ("stop", tokens[:3])
        ignoring = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        assert engine.generate([[1, 2, 3]], ignoring)[0].choices[0].token_ids == tokens
        by_id = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=[tokens[1]], ignore_eos=True)
        assert engine.generate([[1, 2, 3]], by_id)[0].choices[0].token_ids == tokens[:2]
        least = SamplingParams(max_tokens=8, min_tokens=5, temperature=0.0)
        assert len(engine.generate([[1, 2, 3]], least)[0].choices[0].token_ids) >= 5

    def test_stop_strings_cut_the_text(self, make_engine: MakeEngine) -> None:
        engine = make_engine(HashModel(vocab=128))
        free = engine.generate("abc", SamplingParams(max_tokens=30, temperature=0.0))[0].text
        stop = free[11:13]
        choice = engine.generate("abc", SamplingParams(max_tokens=30, temperature=0.0, stop=stop))[0].choices[0]
        assert choice.text == free[: free.index(stop)]
        assert choice.finish_reason == "stop"

    def test_the_context_ends_a_request(self, make_engine: MakeEngine) -> None:
        choice = make_engine(HashModel(context=5)).generate([[1, 2, 3]], GREEDY)[0].choices[0]
        assert (choice.finish_reason, len(choice.token_ids)) == ("length", 3)

    def test_logprobs_are_raw_and_complete(self, make_engine: MakeEngine) -> None:
        params = SamplingParams(max_tokens=4, temperature=0.7, top_k=5, logprobs=3, seed=1)
        choice = make_engine().generate([[1, 2, 3]], params)[0].choices[0]
        assert choice.logprobs is not None
        assert tuple(entry.sampled.token_id for entry in choice.logprobs) == choice.token_ids
        assert all(len(entry.top) == 3 and entry.top[0].logprob >= entry.sampled.logprob for entry in choice.logprobs)

    def test_unseeded_requests_differ_and_a_rerun_repeats(self, make_engine: MakeEngine) -> None:
        params = SamplingParams(max_tokens=12)
        first, second = (make_engine().generate([[1, 2]] * 2, params) for _ in range(2))
        assert first[0].choices[0].token_ids != first[1].choices[0].token_ids
        assert [o.choices for o in first] == [o.choices for o in second]


class TestAbort:
    def test_in_every_state(self, make_engine: MakeEngine) -> None:
        """Waiting, after k chunks, decoding, ended; the prompt then runs as if nothing had been."""
        prompt = [i % 5 for i in range(40)]
        for steps in range(20):
            engine = make_engine(token_budget=8, page_size=4)
            handle = engine.submit(prompt, GREEDY)
            for _ in range(steps):
                engine.step()
            engine.abort(handle)
            engine.check()
            engine.abort(handle)
            assert sum(isinstance(event, FinishEvent) for event in engine.step()) <= 1
            assert engine.stats().num_running == engine.stats().num_waiting == 0
            assert engine.generate([prompt], GREEDY)[0].choices[0].token_ids == answer(prompt)

    def test_of_an_unknown_request(self, make_engine: MakeEngine) -> None:
        with pytest.raises(InvalidRequest, match="request 3 was never submitted"):
            make_engine().abort(Handle(3))

    def test_tells_what_there_was(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        handle = engine.submit([1, 2, 3], GREEDY)
        engine.step()
        engine.step()
        engine.abort(handle)
        *_, event = engine.step()
        assert isinstance(event, FinishEvent)
        assert event.output.choices[0].finish_reason == "abort"
        assert event.output.choices[0].token_ids == answer([1, 2, 3])[:2]


class Nan:
    """Marks the rows of one prompt's chunk as not finite."""

    def __init__(self, first_token: int, position: int) -> None:
        self.first_token, self.position = first_token, position

    def __call__(self, batch: Batch) -> npt.NDArray[np.bool_]:
        sound: npt.NDArray[np.bool_] = (batch.positions != self.position) | (batch.token_ids != self.first_token)
        return sound


class TestFaults:
    @pytest.mark.parametrize("beside", [False, True])
    def test_nan_in_chunk_2_of_4_ends_that_request_alone(self, make_engine: MakeEngine, *, beside: bool) -> None:
        model = HashModel(finite=Nan(77, 13))
        engine = make_engine(model, token_budget=16, prefill_chunk=8, page_size=4)
        sick = [*range(100, 113), 77, *range(114, 132)]
        handle = engine.submit(sick, GREEDY)
        other = engine.submit([5] * 30, GREEDY) if beside else None
        ended = finish(engine, handle, *([other] if other else []))
        choice = ended[handle].choices[0]
        assert choice.finish_reason == "error"
        assert choice.error is not None
        assert "NaN" in choice.error
        if other is not None:
            assert ended[other].choices[0].token_ids == answer([5] * 30)
        model.finite = None
        assert engine.explain(sick).matched == 8, "only chunk 1 was published"
        assert engine.generate([sick], GREEDY)[0].choices[0].token_ids == answer(sick)

    def test_who_shares_only_sound_rows_goes_on(self, make_engine: MakeEngine) -> None:
        engine = make_engine(HashModel(finite=Nan(77, 13)), page_size=4)
        shared = list(range(100, 113))
        sick = engine.submit([*shared, 77, 1], GREEDY)
        sound = engine.submit([*shared, 78, 1], GREEDY)
        ended = finish(engine, sick, sound)
        assert ended[sick].choices[0].finish_reason == "error"
        assert ended[sound].choices[0].token_ids == answer([*shared, 78, 1])

    def test_a_failed_step_is_run_again_one_by_one(self, make_engine: MakeEngine) -> None:
        """The one whose rows make the device fail ends; the others answer as if alone."""

        def fail(batch: Batch) -> None:
            if 77 in batch.token_ids:
                raise RuntimeError("device lost")

        engine = make_engine(HashModel(before_forward=fail), page_size=4)
        prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 77], [1, 2, 3, 4, 6], [8] * 9]
        handles = [engine.submit(prompt, GREEDY) for prompt in prompts]
        ended = finish(engine, *handles)
        for prompt, handle in zip(prompts, handles, strict=True):
            choice = ended[handle].choices[0]
            if 77 in prompt:
                assert choice.finish_reason == "error"
                assert choice.error == "the model failed: device lost"
            else:
                assert choice.token_ids == answer(prompt)

    @pytest.mark.parametrize("failing", range(1, 12))
    def test_any_single_failure_changes_no_answer(self, make_engine: MakeEngine, failing: int) -> None:
        """The n-th forward pass fails once; with more than one request in it, nobody is lost."""
        calls = 0

        def fail(_: Batch) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise RuntimeError("once")

        prompts = [[1] * 9, [1] * 9, [*[1] * 6, 2, 3], [4] * 11]
        engine = make_engine(HashModel(before_forward=fail), page_size=4, token_budget=6)
        handles = [engine.submit(prompt, GREEDY) for prompt in prompts]
        for handle, output in finish(engine, *handles).items():
            choice = output.choices[0]
            if choice.finish_reason != "error":
                assert choice.token_ids == answer(prompts[handle.number])
        assert calls >= failing

    def test_a_model_that_gives_too_little_ends_who_asked(self, make_engine: MakeEngine) -> None:
        class Short(HashModel):
            def forward(self, batch: Batch) -> Forward:
                forward = super().forward(batch)
                return Forward(logits=forward.logits[:-1], finite=forward.finite)

        engine = make_engine(Short())
        handles = [engine.submit(prompt, SamplingParams(max_tokens=2)) for prompt in ([1, 2], [3])]
        assert {output.choices[0].finish_reason for output in finish(engine, *handles).values()} == {"error"}
        assert engine.stats().cache.num_cached == 0, "nothing of the failed steps was published"

    def test_each_bad_request_costs_one_step(self, make_engine: MakeEngine) -> None:
        calls = failed = 0

        def fail(batch: Batch) -> None:
            nonlocal calls, failed
            calls += 1
            if 77 in batch.token_ids:
                failed += 1
                raise RuntimeError("device lost")

        engine = make_engine(HashModel(before_forward=fail))
        params = SamplingParams(max_tokens=1, logit_bias={77: -100})
        handles = [engine.submit([i, 77] if i % 2 else [i], params) for i in range(16)]
        ended = finish(engine, *handles)
        assert [ended[handle].choices[0].finish_reason for handle in handles] == ["length", "error"] * 8
        assert (calls, failed) == (17, 9)

    def test_an_interrupt_leaves_the_engine_whole(self, make_engine: MakeEngine) -> None:
        model = HashModel()
        engine = make_engine(model, page_size=4)
        handle = engine.submit([1, 2, 3, 4, 5, 6], GREEDY)
        engine.step()

        def interrupt(_: Batch) -> None:
            raise KeyboardInterrupt

        model.before_forward = interrupt
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.check()
        model.before_forward = None
        assert finish(engine, handle)[handle].choices[0].token_ids == answer([1, 2, 3, 4, 5, 6])

    def test_a_tokenizer_that_fails_ends_one_request(self, make_engine: MakeEngine) -> None:
        class Failing(ByteTokenizer):
            def token_bytes(self, token_id: int) -> bytes:
                if token_id == answer([1, 2, 3])[2]:
                    raise ValueError("no such token")
                return super().token_bytes(token_id)

        engine = make_engine(tokenizer=Failing())
        handles = [engine.submit(prompt, GREEDY) for prompt in ([1, 2, 3], [4, 5])]
        ended = finish(engine, *handles)
        first, second = (ended[handle].choices[0] for handle in handles)
        assert (first.finish_reason, first.error) == ("error", "its output failed: ValueError('no such token')")
        assert second.token_ids == answer([4, 5])


class TestFork:
    def test_children_share_what_the_parent_has(self, make_engine: MakeEngine) -> None:
        engine = make_engine(page_size=4)
        parent = engine.submit([1] * 16, GREEDY)
        engine.step()
        before = engine.stats().cache
        children = engine.fork(parent, n=4, params=SamplingParams(max_tokens=8, temperature=0.0))
        after = engine.stats().cache
        assert after.num_free == before.num_free, "a fork takes no page"
        ended = finish(engine, parent, *children)
        whole = answer([1] * 16, SamplingParams(max_tokens=9, temperature=0.0))
        assert ended[parent].choices[0].token_ids == whole[:8]
        for child in children:
            assert ended[child].choices[0].token_ids == whole[1:9]
            usage = ended[child].usage
            assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens) == (17, 16, 1)

    def test_of_a_waiting_request(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        parent = engine.submit([1, 2, 3], GREEDY)
        (child,) = engine.fork(parent)
        ended = finish(engine, parent, child)
        assert ended[child].choices[0].token_ids == ended[parent].choices[0].token_ids == answer([1, 2, 3])
        assert engine.stats().counters.computed == 3, "they share the prefill"

    def test_inherits_limits_and_draws_its_own(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        parent = engine.submit([1, 2, 3], SamplingParams(max_tokens=10, seed=5))
        for _ in range(4):
            engine.step()
        children = engine.fork(parent, n=3)
        ended = finish(engine, parent, *children)
        tails = [ended[child].choices[0].token_ids for child in children]
        assert [len(tail) for tail in tails] == [6, 6, 6]
        assert len({*tails, ended[parent].choices[0].token_ids[4:]}) == 4

    def test_of_a_preempted_request_adds_up(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_pages=14, page_size=4)
        handles = [engine.submit([i] * 5, SamplingParams(max_tokens=20, temperature=0.0)) for i in range(4)]
        while not engine.stats().counters.preemptions:
            engine.step()
        child = engine.fork(handles[-1], params=GREEDY)[0]
        output = finish(engine, *handles, child)[child]
        usage = output.usage
        assert usage.cached_tokens + usage.computed_tokens + usage.recomputed_tokens == usage.prompt_tokens
        assert output.choices[0].token_ids == answer(list(output.prompt_token_ids))

    @pytest.mark.parametrize("params", [None, SamplingParams(max_tokens=3, stop="ab", logit_bias={ord("b"): 100})])
    def test_text_goes_on_where_the_parents_stopped(
        self, make_engine: MakeEngine, params: SamplingParams | None
    ) -> None:
        """What the parent held back for a stop string is the child's to tell, or to stop at."""
        engine = make_engine(HashModel(vocab=128))
        parent = engine.submit("hi", SamplingParams(max_tokens=4, stop="ab", logit_bias={ord("a"): 100}))
        events: list[Event] = []
        for _ in range(2):
            events += engine.step()
        assert told(events) == "a", "the second one is held back"
        (child,) = engine.fork(parent, params=params)
        choice = finish(engine, parent, child)[child].choices[0]
        assert (choice.text, choice.finish_reason) == (("aaa", "length") if params is None else ("", "stop"))

    def test_of_an_ended_request(self, make_engine: MakeEngine) -> None:
        """It goes on where the other stopped, from the cache, with limits of its own, until it is released."""
        engine = make_engine(page_size=4)
        first = engine.generate([[1, 2]], GREEDY)[0]
        (child,) = engine.fork(first.handle)
        ended = finish(engine, child)[child]
        whole = answer([1, 2], SamplingParams(max_tokens=16, temperature=0.0))
        assert ended.choices[0].token_ids == whole[8:]
        assert ended.usage.cached_tokens == 2 + 8 - 1
        engine.release(first.handle)
        with pytest.raises(InvalidRequest, match="request 0 has ended and was released"):
            engine.fork(first.handle)

    def test_the_parents_abort_leaves_the_children(self, make_engine: MakeEngine) -> None:
        engine = make_engine(page_size=4)
        parent = engine.submit([1] * 10, GREEDY)
        engine.step()
        children = engine.fork(parent, n=2)
        grandchildren = engine.fork(children[0], n=2)
        engine.abort(parent)
        engine.abort(children[0])
        ended = finish(engine, children[1], *grandchildren)
        for handle in (children[1], *grandchildren):
            assert ended[handle].choices[0].token_ids == answer([1] * 10)[1:]

    @pytest.mark.parametrize("n", [0, -1, True, 1.5])
    def test_of_no_children(self, make_engine: MakeEngine, n: Any) -> None:
        engine = make_engine()
        handle = engine.submit([1], GREEDY)
        with pytest.raises(InvalidRequest, match=r"^n: .* given; allowed: an integer in \[1, 4096\]"):
            engine.fork(handle, n=n)


BAD_PROMPTS = [
    ([], "prompt: empty"),
    ("", "prompt: empty"),
    ([-1], r"token id -1 at 0 given, ids lie in \[0, 1000\)"),
    ([5, 1000], "token id 1000 at 1"),
    ([2**40], f"token id {2**40}"),
    ([2**70], "prompt: "),
    ([1.5], "flat list of integer token ids"),
    ([True, False], "flat list"),
    ([[1], [2, 3]], "flat list"),
    ([[1, 2]], "flat list"),
    (None, "prompt: None given"),
    (7, "prompt: 7 given"),
    ({"a": 1}, "prompt: "),
    ([1] * 10_000, "the model's context holds 8000"),
]


class TestBadInput:
    @pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
    def test_prompts_are_refused_at_submit(self, make_engine: MakeEngine, prompt: Any, message: str) -> None:
        engine = make_engine(HashModel(context=8_000))
        with pytest.raises(InvalidRequest, match=message):
            engine.submit(prompt, GREEDY)
        assert engine.stats().num_waiting == 0
        assert engine.step() == []

    @pytest.mark.parametrize("params", [{"max_tokens": 3}, 5, SamplingParams, "x"])
    def test_params_of_another_type(self, make_engine: MakeEngine, params: Any) -> None:
        engine = make_engine()
        handle = engine.submit([1], GREEDY)
        for refused in (lambda: engine.submit([1], params), lambda: engine.fork(handle, params=params)):
            with pytest.raises(InvalidRequest, match=r"^params: .* given; allowed: SamplingParams"):
                refused()
        assert engine.stats().num_waiting == 1

    @pytest.mark.parametrize("namespace", [5, None, ["a"], "\ud800", b"a", "x" * 1000, "a\n"])
    def test_namespaces(self, make_engine: MakeEngine, namespace: Any) -> None:
        engine = make_engine()
        for refused in (lambda: engine.submit([1], GREEDY, namespace), lambda: engine.explain([1], namespace)):
            with pytest.raises(InvalidRequest, match=r"^namespace: "):
                refused()
        assert engine.stats().num_waiting == 0

    @pytest.mark.parametrize("handle", [None, 0, "0", Handle(-1), Handle(99), [Handle(0)]])
    def test_handles(self, make_engine: MakeEngine, handle: Any) -> None:
        engine = make_engine()
        engine.submit([1], GREEDY)
        for refused in (engine.abort, engine.fork):
            with pytest.raises(InvalidRequest, match=r"^handle: "):
                refused(handle)
        assert engine.stats().num_waiting == 1

    def test_text_that_is_not_unicode(self, make_engine: MakeEngine) -> None:
        with pytest.raises(InvalidRequest, match=r"^prompt: .* without lone surrogates"):
            make_engine().submit("a\ud800", GREEDY)

    def test_what_can_never_fit_is_refused(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_pages=4, page_size=4)
        with pytest.raises(InvalidRequest, match=r"10 \+ 8 tokens given, which take 5 pages of 4; the pool holds 4"):
            engine.submit([1] * 10, GREEDY)
        assert engine.generate([[1] * 9], GREEDY)[0].choices[0].token_ids == answer([1] * 9), "the last is never fed"

    def test_the_whole_pool_can_be_used_again(self, make_engine: MakeEngine) -> None:
        """A request as long as the pool, whose own cached tail would need a page more to copy."""
        engine = make_engine(num_pages=4, page_size=4)
        for _ in range(3):
            assert engine.generate([[1] * 9], GREEDY)[0].choices[0].token_ids == answer([1] * 9)

    def test_a_tail_too_many_is_not_borrowed_again(self, make_engine: MakeEngine) -> None:
        """Copying the cached half page takes a third page of two; giving it up must last as long as the prompt."""
        engine = make_engine(num_pages=2, page_size=16, token_budget=7)
        engine.generate([[*[1] * 10, 2]], SamplingParams(max_tokens=1))
        prompt = [*[1] * 10, *[3] * 7]
        assert finish(engine, engine.submit(prompt, GREEDY))[Handle(1)].choices[0].token_ids == answer(prompt)
        assert engine.stats().counters.steps < 20

    def test_one_bad_prompt_leaves_nothing_of_the_others(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        with pytest.raises(InvalidRequest, match="prompt: empty"):
            engine.generate([[1, 2], [3, 4], []], GREEDY)
        assert engine.stats().num_waiting == 0
        assert engine.step() == []

    def test_ids_that_the_logits_do_not_have(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        with pytest.raises(InvalidRequest, match="logit_bias: 5000"):
            engine.submit([1], SamplingParams(logit_bias={5000: 1.0}))

    def test_text_without_a_tokenizer(self, make_engine: MakeEngine) -> None:
        engine = make_engine(tokenizer=None)
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            engine.submit("abc", GREEDY)
        with pytest.raises(InvalidRequest, match=r"^stop: "):
            engine.submit([1], SamplingParams(stop="x"))

    @pytest.mark.parametrize("prompts", [[], [1, 2], (), None, 5, b"ab", {1: 2}])
    def test_generate_needs_a_list_of_prompts(self, make_engine: MakeEngine, prompts: Any) -> None:
        with pytest.raises(InvalidRequest, match=r"^prompts: "):
            make_engine().generate(prompts)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"page_sise": 16}, "page_sise: no such engine setting; known are page_size"),
            ({"page_size": 0}, "page_size: 0 given"),
            ({"num_pages": -3}, "num_pages: -3 given"),
            ({"eviction": "mru"}, "eviction: 'mru' given; allowed: lru or lru2 or duel"),
            ({"eviction": ["lru"]}, "eviction: a value of type list of 1 items given; allowed: lru or lru2 or duel"),
            ({"num_pages": None, "kv_memory": "lots"}, "kv_memory: 'lots' given"),
            ({"num_pages": None, "kv_memory": "3B"}, "kv_memory: '3B' given; .* pages, which take 256 bytes each"),
            ({"num_pages": 2**31 - 1}, "kv_memory: a pool of .* pages cannot be allocated"),
            ({"token_budget": 1.5}, "token_budget: 1.5 given"),
            ({"seed": "x"}, "seed: 'x' given"),
            ({"prefix_cache": "no"}, "prefix_cache: 'no' given; allowed: True or False"),
            ({"record": 5}, "record: 5 given"),
            ({"record": "/nonexistent/run.jsonl"}, "record: /nonexistent/run.jsonl cannot be written"),
        ],
    )
    def test_settings(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidRequest, match=message):
            Engine(HashModel(), **settings)

    def test_reset_is_refused_while_a_request_holds_pages(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        handle = engine.submit([1, 2, 3], GREEDY)
        engine.step()
        with pytest.raises(LiveTables):
            engine.reset_cache()
        assert finish(engine, handle)[handle].choices[0].token_ids == answer([1, 2, 3])
        engine.reset_cache()
        assert engine.stats().cache.num_cached == 0

    def test_a_closed_engine(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.submit([1], GREEDY)
        engine.close()
        engine.close()
        with pytest.raises(InvalidRequest, match="it was closed"):
            engine.submit([1], GREEDY)


def test_an_idle_step_does_nothing(make_engine: MakeEngine) -> None:
    assert make_engine().step() == []


def test_a_late_request_is_not_starved(make_engine: MakeEngine) -> None:
    """A stream of requests with a hot prefix, and a cold one: it waits for a bounded number of admissions."""
    engine = make_engine(max_running=1, max_bypass=4)
    hot = [1] * 32
    engine.generate([hot], GREEDY)
    first = engine.submit([*hot, 2], GREEDY)
    cold = engine.submit([9] * 5, GREEDY)
    for i in range(20):
        engine.submit([*hot, 3, i], GREEDY)
    order: list[int] = []
    while cold.number not in order:
        order += [event.handle.number for event in engine.step() if isinstance(event, FinishEvent)]
    assert order[0] == first.number
    assert len(order) == 1 + 4 + 1


def test_riders_do_not_pass_for_ever(make_engine: MakeEngine) -> None:
    """Requests that share rows need no budget, and yet may overtake one that does only so often."""
    engine = make_engine(token_budget=1, max_bypass=2, page_size=4)
    shared = [1, 2] * 20
    first = SamplingParams(max_tokens=1)
    engine.submit(shared, first)
    engine.step()
    late = engine.submit([9, 9, 9], first)
    ended: list[int] = []
    for length in range(2, 60):
        if length < len(shared):
            engine.submit(shared[: length + 1], first)
        ended += [event.handle.number for event in engine.step() if isinstance(event, FinishEvent)]
    assert len([number for number in ended[: ended.index(late.number)] if number > late.number]) <= 2


def test_preempted_ones_come_first_wherever_they_wait(make_engine: MakeEngine) -> None:
    """More wait than one step looks at, and the one that was preempted has the last number."""
    engine = make_engine(num_pages=24, page_size=1, max_running=1)
    parent = engine.submit([1] * 4, SamplingParams(max_tokens=17, temperature=0.0))
    for i in range(300):
        engine.submit([2, i], SamplingParams(max_tokens=1, temperature=0.0))
    engine.step()
    (child,) = engine.fork(parent, params=SamplingParams(max_tokens=16, seed=1))
    ended: list[int] = []
    while child.number not in ended:
        ended += [event.handle.number for event in engine.step() if isinstance(event, FinishEvent)]
        engine.check()
    assert engine.stats().counters.preemptions > 0
    assert ended == [parent.number, child.number]


def test_explain_names_the_other_request(make_engine: MakeEngine) -> None:
    engine = make_engine(page_size=4)
    engine.generate([[1, 2, 3, 4, 5, 6]], SamplingParams(max_tokens=1))
    told = engine.explain([1, 2, 3, 4, 5, 7, 8])
    assert (told.matched, told.diverged_at, told.diverged_from) == (5, 5, "request 0")
    assert (told.expected, told.got) == (6, 7)
