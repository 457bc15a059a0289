"""Dead branches leave the cache, and nothing that anybody may still ask for: by the pages that are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from radixrt.radix import agreement
from radixrt.runtime import BeamParams, Engine, FinishEvent, Handle, InvalidRequest, Output, SamplingParams, ScoreParams
from radixrt.runtime.owners import Owners
from radixrt.runtime.testing import HashModel

from .conftest import MakeEngine, finish

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
VOCAB = 50


def cached(engine: Engine) -> int:
    return engine.stats().cache.num_cached


def nodes(paths: list[list[int]], page_size: int) -> int:
    """Pages that hold these paths: the nodes of their page trie, but for partly filled ones that another continues."""
    found = {tuple(path[: start + page_size]) for path in paths for start in range(0, len(path), page_size)}
    return sum(
        not any(len(other) > len(node) and other[: len(node)] == node for other in found)
        for node in found
        if len(node) % page_size
    ) + sum(len(node) % page_size == 0 for node in found)


paths = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(st.lists(st.tuples(paths, st.sampled_from(["", "a"])), max_size=8), paths, st.data())
def test_the_owner_that_agrees_furthest_is_found(owned: list[Any], wanted: list[int], data: st.DataObject) -> None:
    owners = Owners()
    for number, (path, namespace) in enumerate(owned):
        owners.own(number, np.array([9], np.int32), "a")
        owners.own(number, np.array(path, np.int32), namespace)
    for number in data.draw(st.sets(st.integers(0, 9))):
        owners.disown(number)
    lengths = [0]
    for owner in owners:
        assert isinstance(owner, int)
        path, namespace = owned[owner]
        agreed = 0
        while agreed < min(len(path), len(wanted)) and path[agreed] == wanted[agreed]:
            agreed += 1
        lengths.append(agreed if namespace == "" else 0)
    assert owners.owned_len(np.array(wanted, np.int32), "") == max(lengths)


class TestRelease:
    def test_of_one_of_two_that_are_equal(self, make_engine: MakeEngine) -> None:
        engine = make_engine(page_size=4)
        first, second = engine.generate([[1] * 8, [1] * 8], GREEDY)
        whole = [*first.prompt_token_ids, *first.choices[0].token_ids]
        engine.release(first.handle)
        assert engine.explain(whole).matched == 16, "the second has it too"
        engine.release(second.handle)
        assert engine.explain(whole).matched == 8
        assert cached(engine) == 2

    @pytest.mark.parametrize("fork_state", ["waits", "runs", "ended"])
    def test_of_a_parent_before_its_fork(self, make_engine: MakeEngine, fork_state: str) -> None:
        """What it generated stays as long as the fork needs it, and goes with that."""
        engine = make_engine(page_size=4)
        parent = engine.generate([[1] * 8], GREEDY)[0].handle
        (child,) = engine.fork(parent, params=GREEDY, text=[7, 7])
        if fork_state == "runs":
            engine.step()
        elif fork_state == "ended":
            finish(engine)
        engine.release(parent)
        finish(engine)
        counters = engine.stats().counters
        assert (counters.computed, counters.decoded) == (8 + 2, 8 + 1 + 8), "the parent's last token is fed by the fork"
        assert engine.stats().counters.recomputed_after_preemption == 0
        engine.release(child)
        assert cached(engine) == 2, "the prompt"

    def test_of_a_fork_leaves_its_text_to_the_parent(self, make_engine: MakeEngine) -> None:
        """Another try with the same text finds it; where the parent is gone, nobody will."""
        engine = make_engine(page_size=4)
        parent = engine.generate([[1] * 8], GREEDY)[0].handle
        for num_computed in (8 + 6, 8 + 6):
            (child,) = engine.fork(parent, params=GREEDY, text=[7] * 6)
            finish(engine)
            engine.release(child)
            assert engine.stats().counters.computed == num_computed
        (child,) = engine.fork(parent, params=GREEDY, text=[7] * 6)
        finish(engine)
        engine.release(parent)
        engine.release(child)
        assert cached(engine) == 2

    @pytest.mark.parametrize("page_size", [1, 4])
    @pytest.mark.parametrize("text", [None, [7]])
    def test_of_a_fork_leaves_what_it_fed_of_its_parent(
        self, make_engine: MakeEngine, page_size: int, text: list[int] | None
    ) -> None:
        """The parent's last token, which the next fork would have to feed again."""
        engine = make_engine(page_size=page_size)
        parent = engine.generate([[1] * 8], GREEDY)[0].handle
        for num_decoded in (8 + 9, 8 + 9 + 8):
            (child,) = engine.fork(parent, params=SamplingParams(max_tokens=9, seed=num_decoded), text=text)
            finish(engine)
            engine.release(child)
            assert engine.stats().counters.decoded == num_decoded

    @pytest.mark.parametrize("page_size", [1, 4])
    @pytest.mark.parametrize("is_first", [False, True])
    def test_takes_along_what_others_gave_behind_it(
        self, make_engine: MakeEngine, page_size: int, *, is_first: bool
    ) -> None:
        """In a fork's text or a prompt of their own; but a prompt that is there after it makes given text of it all."""
        engine = make_engine(page_size=page_size)
        output = engine.generate([[1] * 8], GREEDY)[0]
        (child,) = engine.fork(output.handle, params=GREEDY, text=[7] * 6)
        scored = engine.submit([1] * 8 + list(output.choices[0].token_ids) + [5] * 3, ScoreParams(start=17))
        finish(engine)
        others = [child, scored]
        for handle in [output.handle, *others] if is_first else [*others, output.handle]:
            engine.release(handle)
        whole = nodes([[1] * 8 + [2] * 9 + [7] * 6, [1] * 8 + [2] * 9 + [5] * 3], page_size)
        assert cached(engine) == (whole if is_first else 8 // page_size)

    def test_leaves_what_others_gave_behind_a_prompt(self, make_engine: MakeEngine) -> None:
        """In the page in which the prompt ends, too."""
        engine = make_engine(page_size=4)
        output = engine.generate([[1] * 9], SamplingParams(max_tokens=1, temperature=0.0))[0]
        texts = [[1] * 9 + [2, 1], [1] * 9 + [3, 1]]
        scored = [engine.submit(text, ScoreParams(start=9)) for text in texts]
        finish(engine)
        for handle in (*scored, output.handle):
            engine.release(handle)
        assert [engine._loop.cache.peek(text) for text in texts] == [11, 11]

    @pytest.mark.parametrize("page_size", [1, 4])
    def test_leaves_all_that_was_scored(self, make_engine: MakeEngine, page_size: int) -> None:
        """The last token too, which a generation would not have fed."""
        engine = make_engine(page_size=page_size)
        output = engine.generate([[1] * 8], GREEDY)[0]
        scored = [*output.prompt_token_ids, *output.choices[0].token_ids[:3]]
        engine.score([scored])
        engine.release(output.handle)
        assert engine._loop.cache.peek(scored) == 11

    def test_makes_room_without_eviction(self, make_engine: MakeEngine) -> None:
        """A live branch that is colder than a dead one stays."""
        engine = make_engine(page_size=4, num_pages=16, eviction="lru")
        live = engine.generate([[1] * 8], SamplingParams(max_tokens=9, temperature=0.0))[0]
        dead = engine.generate([[2] * 8], SamplingParams(max_tokens=17, temperature=0.0))[0]
        engine.release(dead.handle)
        engine.generate([[3] * 20], SamplingParams(max_tokens=9, temperature=0.0))
        assert engine.stats().cache.evicted_pages == 0
        assert engine.explain([*live.prompt_token_ids, *live.choices[0].token_ids]).matched == 16

    def test_a_request_forgotten_by_time_owns_nothing(self, make_engine: MakeEngine) -> None:
        engine = make_engine(page_size=4, keep_finished=1)
        engine.generate([[1] * 8], GREEDY)
        last = engine.generate([[1] * 8], GREEDY)[0]
        engine.release(last.handle)
        assert cached(engine) == 2
        with make_engine(page_size=4, keep_finished=0) as other:
            other.generate([[1] * 8], GREEDY, cache="prompt")
            assert cached(other) == 2
            other.check()


@pytest.mark.parametrize("use", ["prompt", "none"])
def test_what_is_not_worth_keeping_stays_for_who_has_it_too(make_engine: MakeEngine, use: Any) -> None:
    engine = make_engine(page_size=4)
    first = engine.generate([[1] * 8], GREEDY)[0]
    engine.generate([[1] * 8], GREEDY, cache=use)
    assert engine.explain([*first.prompt_token_ids, *first.choices[0].token_ids]).matched == 16


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_a_fork_computed_again_is_not_worth_keeping_either(make_engine: MakeEngine, page_size: int) -> None:
    engine = make_engine(page_size=page_size)
    parent = engine.submit([1] * 8, GREEDY, cache="none")
    finish(engine)
    assert cached(engine) == 0
    engine.fork(parent, params=GREEDY, text=[7, 7])
    finish(engine)
    assert cached(engine) == 0


class TestTruncate:
    @pytest.mark.parametrize("kept", [0, 1, 4, 5, 7])
    def test_what_it_cuts_off_is_dropped(self, make_engine: MakeEngine, kept: int) -> None:
        engine = make_engine(page_size=4)
        handle = engine.generate([[1] * 8], SamplingParams(max_tokens=13, temperature=0.0))[0].handle
        assert cached(engine) == 5
        engine.truncate(handle, 8 + kept)
        assert cached(engine) == 2 + (kept > 0) + (kept > 4), "the last token too: a fork will feed it again"
        engine.release(handle)
        assert cached(engine) == 2

    @pytest.mark.parametrize("kept", [1, 4, 6])
    def test_of_one_that_lives(self, make_engine: MakeEngine, kept: int) -> None:
        engine = make_engine(HashModel(vocab=VOCAB), page_size=4)
        handle = engine.submit([1] * 8, SamplingParams(max_tokens=14, seed=1))
        for _ in range(9):
            engine.step()
        engine.truncate(handle, 8 + kept)
        other = engine.submit([1] * 8, GREEDY)
        finish(engine)
        engine.release(other)
        assert cached(engine) == -(-(8 + 13) // 4)
        engine.release(handle)
        assert cached(engine) == 2


@pytest.mark.parametrize("is_ended", [False, True])
def test_what_is_fed_again_after_a_cut_is_no_loss(make_engine: MakeEngine, *, is_ended: bool) -> None:
    """It runs for its logits alone."""
    engine = make_engine(HashModel(vocab=VOCAB), page_size=1)
    handle = engine.submit([1, 2], SamplingParams(max_tokens=4, seed=1))
    for _ in range(9 if is_ended else 2):
        engine.step()
    engine.truncate(handle, 2)
    if is_ended:
        engine.fork(handle, params=GREEDY)
    finish(engine)
    counters = engine.stats().counters
    assert (counters.computed, counters.recomputed_for_logits, counters.recomputed_after_preemption) == (2, 1, 0)


def test_adopt_drops_what_lost(make_engine: MakeEngine) -> None:
    """The parent's old tail, and the other choices of the branch."""
    engine = make_engine(page_size=4)
    parent = engine.generate([[1] * 8], SamplingParams(max_tokens=13, temperature=0.0))[0].handle
    (branch,) = engine.fork(parent, params=SamplingParams(n=3, max_tokens=9, seed=2), at=12)
    finish(engine)
    assert cached(engine) == 5 + 3 * 2
    engine.adopt(parent, branch, branch_choice=1)
    assert cached(engine) == 3 + 2
    (child,) = engine.fork(parent, params=GREEDY)
    usage = finish(engine)[child].usage
    assert (usage.cached_tokens, usage.computed_tokens) == (20, 1)
    engine.release(parent)
    engine.release(child)
    assert cached(engine) == 2


def test_only_the_best_choices_stay(make_engine: MakeEngine) -> None:
    engine = make_engine(page_size=4)
    params = SamplingParams(n=2, best_of=6, max_tokens=9, seed=1)
    for prompt_len in (8, 10):
        output = engine.generate([[prompt_len] * prompt_len], params)[0]
        fed = [[*output.prompt_token_ids, *choice.token_ids[:-1]] for choice in output.choices]
        assert cached(engine) == nodes(fed, 4)
        engine.release(output.handle)
        engine.reset_cache()


@given(
    width=st.integers(1, 5),
    prompt_len=st.integers(1, 9),
    max_tokens=st.integers(1, 12),
    page_size=st.sampled_from([1, 2, 4]),
    stops=st.sampled_from([(), (3, 5, 7), range(0, VOCAB, 3)]),
    num_return=st.none() | st.integers(1, 2),
    preempt_every=st.sampled_from([0, 2, 3]),
)
def test_of_a_search_exactly_its_hypotheses_stay(
    *, width: int, prompt_len: int, max_tokens: int, page_size: int, stops: Any, preempt_every: int, **given: Any
) -> None:
    """And at any moment no more than they and the live beams; nothing that these need is lost."""
    returned = None if given["num_return"] is None else min(width, given["num_return"])
    params = BeamParams(width=width, max_tokens=max_tokens, stop_token_ids=stops, num_return=returned)
    prompt = list(range(prompt_len))
    with Engine(HashModel(vocab=VOCAB), num_pages=500, page_size=page_size, poison=True) as engine:
        handle = engine.submit(prompt, params)
        ended: list[Output] = []
        for step in range(200):
            ended = [event.output for event in engine.step() if isinstance(event, FinishEvent)]
            engine.check()
            if ended:
                break
            request = engine._loop.requests.of(handle.number)
            assert request.search is not None
            beams = [beam.tokens[: beam.high_water].tolist() for beam in request.branches]
            found = [[*prompt, *h.token_ids[:-1]] for h in request.search.hypotheses]
            full = [path[: len(path) // page_size * page_size] for path in beams]
            assert cached(engine) <= nodes([*full, *found, *beams], page_size)
            running = engine._loop.scheduler.running
            if preempt_every and running and step % preempt_every == 0:
                engine._loop.scheduler.preempt(running[step % len(running)])
        (output,) = ended
        fed = [[*prompt, *choice.token_ids[:-1]] for choice in output.choices]
        assert cached(engine) == nodes(fed, page_size)
        assert engine.stats().counters.recomputed_after_preemption == 0
        engine.release(handle)
        assert cached(engine) <= nodes([prompt], page_size) + (0 if prompt_len % page_size == 0 else width)


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_of_an_aborted_search_the_prompt_stays(make_engine: MakeEngine, steps: int) -> None:
    engine = make_engine(HashModel(vocab=VOCAB), page_size=4)
    handle = engine.submit([1] * 8, BeamParams(width=4, max_tokens=30, stop_token_ids=(3, 5, 7, 9)))
    for _ in range(steps):
        engine.step()
    search = engine._loop.requests.of(handle.number).search
    assert search is not None
    assert bool(search.hypotheses) == (steps > 1), "and what it has found goes too"
    engine.abort(handle)
    engine.step()
    assert cached(engine) == 2


@given(data=st.data())
def test_nothing_live_is_lost_and_nothing_dead_stays(data: st.DataObject) -> None:
    """Whatever is forked, adopted, truncated and released in whatever order, in a pool with room for all."""
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    with Engine(HashModel(vocab=4), num_pages=2_000, page_size=page_size, poison=True) as engine:
        handles: list[Handle] = []

        def release(handle: Handle) -> None:
            engine.release(handle)
            handles.remove(handle)

        def drawn() -> SamplingParams | BeamParams:
            n, max_tokens, temperature = data.draw(
                st.tuples(st.integers(1, 3), st.integers(1, 9), st.sampled_from([0, 1]))
            )
            if data.draw(st.integers(0, 3)) == 0:
                return BeamParams(width=n, max_tokens=max_tokens)
            return SamplingParams(n=1, best_of=n, max_tokens=max_tokens, temperature=temperature)

        for _ in range(data.draw(st.integers(3, 14))):
            ops = ["submit", "step", "finish", "fork", "fork", "truncate", "adopt", "release"]
            op = data.draw(st.sampled_from(ops)) if handles else "submit"
            handle = data.draw(st.sampled_from(handles)) if handles else Handle(0)
            try:
                match op:
                    case "submit":
                        prompt = [0, 1, 2, 3, 3, 2, 1, 0][: page_size * data.draw(st.integers(1, 8 // page_size))]
                        handles.append(engine.submit(prompt, drawn()))
                    case "fork":
                        branch = engine._loop.requests.find(handle).branch(0)
                        at = data.draw(st.integers(branch.given_len(), branch.num_tokens))
                        text = data.draw(st.sampled_from([None, [1, 2]])) if at > branch.given_len() else None
                        handles += engine.fork(handle, params=drawn(), at=at, text=text)
                    case "truncate":
                        branch = engine._loop.requests.find(handle).branch(0)
                        engine.truncate(handle, data.draw(st.integers(branch.output_start, branch.num_tokens)))
                    case "adopt":
                        other = data.draw(st.sampled_from(handles))
                        engine.adopt(handle, other)
                        handles.remove(other)
                    case "release":
                        release(handle)
                    case "finish":
                        finish(engine)
                    case "step":
                        engine.step()
            except InvalidRequest:
                assert op in ("adopt", "truncate")
            engine.check()
            assert engine.stats().counters.recomputed_after_preemption == 0
            for request in engine._loop.requests.kept():
                for branch in request.branches[: len(request.paths)]:
                    fed = min(branch.high_water, branch.num_tokens - 1)
                    assert engine._loop.cache.peek(branch.tokens[:fed], branch.namespace) == fed
        finish(engine)
        prompts = [engine._loop.requests.find(handle).branch(0) for handle in handles]
        for handle in data.draw(st.permutations(handles)):
            release(handle)
            engine.check()
        whole, given = [0, 1, 2, 3, 3, 2, 1, 0], []
        for tokens in engine._loop.cache.behind([]):
            stop = agreement(tokens, np.array(whole, np.int32))
            given.append(whole[:stop])
            while tokens[stop : stop + 2].tolist() == [1, 2]:  # a fork's text behind what another prompt had too
                given[-1] += [1, 2]
                stop += 2
        assert cached(engine) == nodes(given, page_size)
        assert all(branch.tokens.tolist()[: branch.given_len()] == whole[: branch.given_len()] for branch in prompts)
