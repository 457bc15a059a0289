"""Forks of whatever a request is at the moment, and what else its handle is good for: adopt, truncate, release."""

from __future__ import annotations

from typing import Any

import pytest

from radixrt.runtime import BeamParams, Engine, FinishEvent, Handle, InvalidRequest, Output, SamplingParams
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import MakeEngine, finish

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def answer(prompt: list[int], max_tokens: int = 8) -> tuple[int, ...]:
    with Engine(HashModel(), num_pages=64, prefix_cache=False) as engine:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return engine.generate([prompt], params)[0].choices[0].token_ids


MOMENTS = ["waiting", "prefilling", "decoding", "preempted", "ended"]


def crowd(engine: Engine) -> None:
    """Three that leave a fourth too little room in a pool of 16 pages of 4."""
    for i in range(3):
        engine.submit([2 + i] * 5, SamplingParams(max_tokens=20, temperature=0.0))


def bring_to(engine: Engine, moment: str) -> Handle:
    """A request of [1] * 10 in that state."""
    if moment == "preempted":
        crowd(engine)
    handle = engine.submit([1] * 10, GREEDY)
    if moment == "prefilling":
        engine.step()
    elif moment == "decoding":
        for _ in range(5):
            engine.step()
    elif moment == "preempted":
        for _ in range(40):
            if engine.stats().counters.preemptions:
                break
            engine.step()
        assert engine.stats().counters.preemptions
    elif moment == "ended":
        finish(engine)
    return handle


@pytest.mark.parametrize("moment", MOMENTS)
class TestAtAnyMoment:
    def make(self, make_engine: MakeEngine, moment: str) -> tuple[Engine, Handle]:
        engine = make_engine(num_pages=16 if moment == "preempted" else 64, page_size=4, prefill_chunk=4)
        return engine, bring_to(engine, moment)

    def test_a_child_goes_on_from_what_is_there(self, make_engine: MakeEngine, moment: str) -> None:
        engine, handle = self.make(make_engine, moment)
        children = engine.fork(handle, n=2, params=SamplingParams(max_tokens=3, temperature=0.0))
        (grandchild,) = engine.fork(children[0], params=SamplingParams(max_tokens=3, temperature=0.0))
        outputs = finish(engine)
        for child in (*children, grandchild):
            prompt = list(outputs[child].prompt_token_ids)
            assert prompt == [1] * 10 + list(answer([1] * 10))[: len(prompt) - 10]
            assert outputs[child].choices[0].token_ids == answer(prompt, 3)

    def test_a_text_is_appended(self, make_engine: MakeEngine, moment: str) -> None:
        engine, handle = self.make(make_engine, moment)
        (child,) = engine.fork(handle, params=SamplingParams(max_tokens=3, temperature=0.0), text=[7, 8, 9])
        output = finish(engine)[child]
        prompt = list(output.prompt_token_ids)
        assert prompt[-3:] == [7, 8, 9]
        assert output.choices[0].token_ids == answer(prompt, 3)
        usage = output.usage
        assert usage.cached_tokens + usage.computed_tokens + usage.recomputed_tokens == usage.prompt_tokens

    @pytest.mark.parametrize("at", [0, 1, 4, 6, 10])
    def test_an_earlier_position(self, make_engine: MakeEngine, moment: str, at: int) -> None:
        engine, handle = self.make(make_engine, moment)
        params = SamplingParams(max_tokens=3, temperature=0.0)
        (child,) = engine.fork(handle, params=params, at=at, text=[5] if at == 0 else None)
        output = finish(engine)[child]
        assert list(output.prompt_token_ids) == [1] * at + [5] * (at == 0)
        assert output.choices[0].token_ids == answer(list(output.prompt_token_ids), 3)

    def test_several_choices(self, make_engine: MakeEngine, moment: str) -> None:
        engine, handle = self.make(make_engine, moment)
        (child,) = engine.fork(handle, params=SamplingParams(n=3, max_tokens=3, seed=2))
        output = finish(engine)[child]
        assert len({choice.token_ids for choice in output.choices}) == 3
        assert [len(choice.token_ids) for choice in output.choices] == [3] * 3


def test_a_fork_names_the_choice(make_engine: MakeEngine) -> None:
    engine = make_engine(page_size=4)
    parent = engine.submit([1, 2, 3], SamplingParams(n=3, max_tokens=6, seed=4))
    for _ in range(3):
        engine.step()
    children = [engine.fork(parent, choice=choice)[0] for choice in range(3)]
    outputs = finish(engine)
    for choice, child in enumerate(children):
        begun = outputs[parent].choices[choice].token_ids[:3]
        assert outputs[child].prompt_token_ids == (1, 2, 3, *begun)
        assert len(outputs[child].choices) == 1
        assert len(outputs[child].choices[0].token_ids) == 3, "the limits are the parent's"
    with pytest.raises(InvalidRequest, match=r"choice: 3 given; allowed: an integer in \[0, 2\]"):
        engine.fork(parent, choice=3)


def test_equal_programs_draw_equally(make_engine: MakeEngine) -> None:
    """Paths name the draws: the k-th fork of choice i draws on (i, k), whatever else was forked in between."""

    def run(*, with_others: bool) -> list[tuple[int, ...]]:
        engine = make_engine(seed=3)
        parent = engine.submit([1, 2, 3], SamplingParams(n=2, max_tokens=6, seed=9))
        engine.step()
        if with_others:
            engine.fork(parent, choice=0, n=3)
        children = engine.fork(parent, choice=1, n=2)
        outputs = finish(engine)
        return [outputs[child].choices[0].token_ids for child in children]

    assert run(with_others=True) == run(with_others=False)


class TestAdopt:
    def test_the_parent_goes_on_as_the_branch(self, make_engine: MakeEngine) -> None:
        engine = make_engine(page_size=4)
        parent = engine.generate([[1] * 5], GREEDY)[0].handle
        params = SamplingParams(max_tokens=4, temperature=0.0)
        branches = [engine.fork(parent, params=params, text=[i], at=7)[0] for i in range(3)]
        outputs = finish(engine)
        winner = outputs[branches[1]]
        engine.adopt(parent, branches[1])
        with pytest.raises(InvalidRequest, match="was released"):
            engine.fork(branches[1])
        (child,) = engine.fork(parent, params=params, text=[6])
        output = finish(engine)[child]
        assert output.prompt_token_ids == (*winner.prompt_token_ids, *winner.choices[0].token_ids, 6)
        assert output.usage.cached_tokens == len(output.prompt_token_ids) - 2, "all but the last token fed, and the 6"

    def test_of_a_stranger(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        first, second = (engine.generate([[i]], GREEDY)[0].handle for i in range(2))
        with pytest.raises(InvalidRequest, match="branch: request 1 given; allowed: a fork of choice 0 of request 0"):
            engine.adopt(first, second)

    def test_of_one_that_lives(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        parent = engine.generate([[1]], GREEDY)[0].handle
        (branch,) = engine.fork(parent)
        with pytest.raises(InvalidRequest, match="adopt: request 1 has not ended"):
            engine.adopt(parent, branch)
        finish(engine)
        engine.adopt(parent, branch)

    def test_of_one_that_left_the_prompt(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        parent = engine.generate([[1] * 9], GREEDY)[0].handle
        short, other = engine.fork(parent, at=2)[0], engine.fork(parent, at=2, text=[5] * 9)[0]
        same = engine.fork(parent, at=2, text=[1] * 7)[0]
        finish(engine)
        for branch in (short, other):
            with pytest.raises(InvalidRequest, match="parts from request 0 inside of its prompt of 9 tokens"):
                engine.adopt(parent, branch)
        engine.adopt(parent, same)
        engine.release(parent)

    @pytest.mark.parametrize("width", [1, 3])
    def test_of_a_beam_that_lived(self, make_engine: MakeEngine, width: int) -> None:
        """It is none of the hypotheses, whatever its index was; a fork of one of these is."""
        engine = make_engine()
        parent = engine.submit([1, 2], BeamParams(width=width, max_tokens=6))
        for _ in range(3):
            engine.step()
        branches = [engine.fork(parent, params=GREEDY, choice=choice)[0] for choice in range(width)]
        branches += [engine.fork(branch)[0] for branch in branches]
        finish(engine)
        for choice in range(width):
            for branch in branches:
                with pytest.raises(InvalidRequest, match="of request 0 made after that had ended"):
                    engine.adopt(parent, branch, choice=choice)
        (branch,) = engine.fork(parent, params=GREEDY, choice=width - 1)
        finish(engine)
        engine.adopt(parent, branch, choice=width - 1)

    def test_of_choices_that_never_differed(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        parent = engine.submit([1, 2], SamplingParams(n=2))
        engine.abort(parent)
        (branch,) = engine.fork(parent, choice=1, params=GREEDY)
        finish(engine)
        with pytest.raises(InvalidRequest, match="ended before its choices differed"):
            engine.adopt(parent, branch, choice=1)

    def test_penalties_count_what_was_adopted(self, make_engine: MakeEngine) -> None:
        """A fork of what was adopted, cut short, draws as one of the same tokens that were all generated."""
        engine = make_engine(HashModel(vocab=8))
        params = SamplingParams(max_tokens=6, temperature=0.0, frequency_penalty=1.5)
        parent = engine.generate([[1] * 3], params)[0].handle
        (branch,) = engine.fork(parent, params=params)
        finish(engine)
        engine.adopt(parent, branch)
        engine.truncate(parent, 3 + 8)
        (child,) = engine.fork(parent, params=params)
        output = finish(engine)[child]
        whole = engine.generate([[1] * 3], SamplingParams(max_tokens=14, temperature=0.0, frequency_penalty=1.5))[0]
        assert output.prompt_token_ids == (1, 1, 1, *whole.choices[0].token_ids[:8])
        assert output.choices[0].token_ids == whole.choices[0].token_ids[8:]


class TestTruncate:
    def test_of_beams_that_live(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        handle = engine.submit([1, 2], BeamParams(width=2, max_tokens=6))
        engine.step()
        with pytest.raises(InvalidRequest, match="truncate: request 0 searches with beams"):
            engine.truncate(handle, 3)
        finish(engine)
        engine.truncate(handle, 3)

    @pytest.mark.parametrize("kept", [0, 1, 3, 5])
    @pytest.mark.parametrize("moment", ["decoding", "preempted"])
    def test_one_that_lives_goes_on_from_there(self, make_engine: MakeEngine, kept: int, moment: str) -> None:
        """With the same draws: what it draws depends on the position alone."""
        engine = make_engine(page_size=4, num_pages=14 if moment == "preempted" else 64)
        if moment == "preempted":
            crowd(engine)
        params = SamplingParams(max_tokens=14, seed=3, frequency_penalty=1.0, logprobs=1)
        handle = engine.submit([1] * 3, params)
        for _ in range(6):
            engine.step()
        for _ in range(20):
            if moment == "preempted" and not engine.stats().counters.preemptions:
                engine.step()
        assert (moment == "preempted") == bool(engine.stats().counters.preemptions)
        engine.truncate(handle, 3 + kept)
        engine.check()
        output = finish(engine)[handle]
        with Engine(HashModel(), tokenizer=ByteTokenizer(), num_pages=64) as other:
            assert output.choices == other.generate([[1] * 3], params)[0].choices

    def test_one_that_ended_is_forked_from_there(self, make_engine: MakeEngine) -> None:
        engine = make_engine(page_size=4)
        handle = engine.generate([[1] * 3], GREEDY)[0].handle
        engine.truncate(handle, 5)
        (child,) = engine.fork(handle)
        output = finish(engine)[child]
        assert output.prompt_token_ids == (1, 1, 1, *answer([1] * 3)[:2])
        assert output.choices[0].token_ids == answer([1] * 3, 10)[2:]

    @pytest.mark.parametrize("num_tokens", [2, 12, -1])
    def test_beyond_its_output(self, make_engine: MakeEngine, num_tokens: int) -> None:
        engine = make_engine()
        handle = engine.generate([[1] * 3], GREEDY)[0].handle
        with pytest.raises(InvalidRequest, match=r"num_tokens: .* given; allowed: an integer in \[3, 11\]"):
            engine.truncate(handle, num_tokens)


class TestRelease:
    def test_what_it_generated_leaves_the_cache(self, make_engine: MakeEngine) -> None:
        engine = make_engine(page_size=4)
        output = engine.generate([[1] * 8], SamplingParams(max_tokens=9, temperature=0.0))[0]
        whole = [*output.prompt_token_ids, *output.choices[0].token_ids]
        assert engine.explain(whole).matched == 16
        engine.release(output.handle)
        engine.release(output.handle)
        assert engine.explain(whole).matched == 8, "the prompt stays"

    def test_what_others_go_on_from_stays(self, make_engine: MakeEngine) -> None:
        engine = make_engine(page_size=4)
        output = engine.generate([[1] * 8], SamplingParams(max_tokens=9, temperature=0.0))[0]
        engine.fork(output.handle, text=[5, 5], at=13)
        finish(engine)
        whole = [*output.prompt_token_ids, *output.choices[0].token_ids]
        engine.release(output.handle)
        assert engine.explain(whole).matched >= 12

    @pytest.mark.parametrize("moment", ["waiting", "decoding"])
    def test_aborts_what_lives(self, make_engine: MakeEngine, moment: str) -> None:
        engine = make_engine(page_size=4)
        handle = bring_to(engine, moment)
        engine.release(handle)
        *_, last = engine.step()
        assert isinstance(last, FinishEvent)
        assert last.output.choices[0].finish_reason == "abort"
        with pytest.raises(InvalidRequest, match="was released"):
            engine.fork(handle)

    def test_comes_where_too_many_have_ended(self, make_engine: MakeEngine) -> None:
        engine = make_engine(keep_finished=2)
        handles = [engine.generate([[i]], GREEDY)[0].handle for i in range(3)]
        with pytest.raises(InvalidRequest, match="request 0 has ended"):
            engine.fork(handles[0])
        engine.fork(handles[1])

    def test_comes_with_time(self, make_engine: MakeEngine) -> None:
        engine = make_engine(keep_finished=9, finished_ttl=20)
        handles = [engine.generate([[i]], GREEDY)[0].handle for i in range(3)]
        engine.fork(handles[2])
        for _ in range(3):
            engine.generate([[9]], GREEDY)
        with pytest.raises(InvalidRequest, match="request 2 has ended and was released, or its time was over"):
            engine.fork(handles[2])


@pytest.mark.parametrize(("cache", "matched"), [("all", 16), ("prompt", 8), ("none", 4)])
def test_what_is_worth_keeping(make_engine: MakeEngine, cache: Any, matched: int) -> None:
    """`cache="none"` leaves what was there before."""
    engine = make_engine(page_size=4)
    engine.generate([[1] * 4], SamplingParams(max_tokens=1))
    output = engine.generate([[1] * 8], SamplingParams(max_tokens=9, temperature=0.0), cache=cache)[0]
    assert engine.explain([*output.prompt_token_ids, *output.choices[0].token_ids]).matched == matched
    with pytest.raises(InvalidRequest, match=r'cache: .*; allowed: "all", "prompt" or "none"'):
        engine.submit([1], cache="output")  # type: ignore[arg-type]


class TestPin:
    def test_keeps_a_prefix_until_its_time_is_over(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_pages=16, page_size=4)
        engine.generate([[1] * 17], SamplingParams(max_tokens=1))
        pinned = engine.pin([1] * 17, ttl=60)
        assert pinned.prefix_len == 16
        for i in range(10):
            engine.generate([[2 + i] * 20], SamplingParams(max_tokens=4, ignore_eos=True))
        assert engine.explain([1] * 17).matched >= 16
        for i in range(20):
            engine.generate([[20 + i] * 20], SamplingParams(max_tokens=4, ignore_eos=True))
        assert engine.explain([1] * 17).matched == 0
        engine.unpin(pinned)

    def test_has_a_budget(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_pages=16, page_size=4, pin_budget=0.25)
        engine.generate([[1] * 30], SamplingParams(max_tokens=1))
        pinned = engine.pin([1] * 8)
        with pytest.raises(InvalidRequest, match="pin: a prompt of 30 tokens given; 2 pages are pinned"):
            engine.pin([1] * 30)
        engine.unpin(pinned)
        engine.unpin(pinned)
        engine.pin([1] * 16)

    def test_gives_way_to_one_that_could_not_go_on(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_pages=16, page_size=4, pin_budget=1.0)
        engine.generate([[1] * 30], SamplingParams(max_tokens=1))
        engine.pin([1] * 28)
        output = engine.generate([[2] * 40], SamplingParams(max_tokens=20, temperature=0.0))[0]
        assert output.choices[0].token_ids == answer([2] * 40, 20)

    def test_of_something_else(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        with pytest.raises(InvalidRequest, match="pinned: 'x' given; allowed: what pin returned"):
            engine.unpin("x")  # type: ignore[arg-type]


class TestPriority:
    def test_starts_first(self, make_engine: MakeEngine) -> None:
        engine = make_engine(max_running=1)
        handles = [engine.submit([i], GREEDY, priority=i % 3) for i in range(6)]
        order: list[int] = []
        while len(order) < 6:
            order += [handles.index(event.handle) for event in engine.step() if isinstance(event, FinishEvent)]
        assert order == [2, 5, 1, 4, 0, 3]

    def test_is_preempted_last(self, make_engine: MakeEngine) -> None:
        """Of four that do not fit the oldest stays; then the one of high priority ends before those of low."""
        engine = make_engine(num_pages=20, page_size=4)
        params = SamplingParams(max_tokens=30, temperature=0.0)
        handles = [engine.submit([i] * 5, params, priority=priority) for i, priority in enumerate([0, 0, 0, 5])]
        order: list[int] = []
        outputs: dict[Handle, Output] = {}
        while len(order) < 4:
            for event in engine.step():
                if isinstance(event, FinishEvent):
                    order.append(handles.index(event.handle))
                    outputs[event.handle] = event.output
            engine.check()
        assert engine.stats().counters.preemptions
        assert set(order[:2]) == {0, 3}
        for i, handle in enumerate(handles):
            assert outputs[handle].choices[0].token_ids == answer([i] * 5, 30)

    def test_low_ones_wait_a_bounded_time(self, make_engine: MakeEngine) -> None:
        engine = make_engine(max_running=1, max_bypass=3)
        low = engine.submit([0], GREEDY)
        done: list[Handle] = []
        for i in range(40):
            engine.submit([1 + i], SamplingParams(max_tokens=1), priority=9)
            done += [event.handle for event in engine.step() if isinstance(event, FinishEvent)]
        assert low in done
        assert done.index(low) <= 12


def test_one_that_does_not_fit_is_passed_but_not_for_ever(make_engine: MakeEngine) -> None:
    engine = make_engine(num_pages=16, page_size=4, max_bypass=3)
    first = engine.submit([1] * 8, SamplingParams(max_tokens=24, temperature=0.0))
    engine.step()
    large = engine.submit([2] * 44, SamplingParams(max_tokens=1, temperature=0.0))
    small = [engine.submit([3 + i], SamplingParams(max_tokens=2, temperature=0.0)) for i in range(8)]
    order: list[Handle] = []
    while len(order) < 10:
        order += [event.handle for event in engine.step() if isinstance(event, FinishEvent)]
        engine.check()
    assert order.index(small[2]) < order.index(first), "small ones go past it"
    assert order.index(large) < order.index(small[3]), "until it has been passed three times"
