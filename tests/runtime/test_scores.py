"""Log-probabilities of prompts: the same whatever is cached, shared, cut, preempted or moved, and computed once."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from radixrt.radix.testing import prefix_families
from radixrt.runtime import (
    Engine,
    FinishEvent,
    Forward,
    Handle,
    InvalidRequest,
    SamplingParams,
    Score,
    ScoreParams,
    replay,
    trie_size,
)
from radixrt.runtime.batch import Batch
from radixrt.runtime.logprobs import logprobs_of
from radixrt.runtime.params import params_from_dict
from radixrt.runtime.testing import HashModel
from radixrt.runtime.transformer import TransformerModel

from . import tiny
from .conftest import MakeEngine
from .test_host_tier import delays
from .test_metamorphic import engine_settings

VOCAB = 50
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def direct(prompt: list[int], *, vocab: int = VOCAB) -> list[float]:
    """One pass over the whole prompt, by hand, and log-softmax as its definition says."""
    model = HashModel(vocab=vocab)
    model.allocate(1, len(prompt))
    n, one = np.arange(len(prompt)), np.array([0, 1])
    batch = Batch(
        token_ids=np.array(prompt), positions=n, write_rows=n, write_slots=len(prompt) + n,
        row_indptr=one * len(prompt), page_indptr=one, page_ids=np.array([1]), namespaces=("",), logit_rows=n,
    )  # fmt: skip
    logits = model.forward(batch).logits.double().numpy()
    totals = np.log(np.exp(logits).sum(axis=1))
    return [float(logits[t - 1, prompt[t]] - totals[t - 1]) for t in range(1, len(prompt))]


def close(score: Score, prompt: list[int]) -> bool:
    """Whether these are the log-probabilities of the prompt from `start` on."""
    assert score.error is None
    assert score.token_ids == tuple(prompt)
    expected = direct(prompt)[score.start - 1 :]
    assert len(score.logprobs) == len(expected) == len(prompt) - score.start
    return bool(np.allclose(score.logprobs, expected, rtol=0, atol=1e-9))


def families(max_size: int = 6) -> st.SearchStrategy[list[list[int]]]:
    return prefix_families(page_size=4, max_size=max_size).map(lambda many: [one or [0] for one in many])


def values(scores: list[Score]) -> list[tuple[float, ...]]:
    return [score.logprobs for score in scores]


# -- no answer changes ------------------------------------------------------------------------------------------------


@given(prompts=families(), given_settings=engine_settings(), slack=st.integers(0, 12), data=st.data())
def test_no_setting_changes_a_log_probability(
    prompts: list[list[int]], given_settings: dict[str, Any], slack: int, data: st.DataObject
) -> None:
    """Any page size, budget, chunk, pool (preemption) and cache; cold, hot, and in any order: to the bit."""
    pages = max(-(-(len(prompt) + 4) // given_settings["page_size"]) for prompt in prompts)
    order = data.draw(st.permutations(range(len(prompts))))
    starts = [data.draw(st.integers(1, len(prompt))) for prompt in prompts]
    with Engine(HashModel(vocab=VOCAB), **given_settings | {"num_pages": pages + slack}) as engine:
        cold = engine.score(prompts)
        assert all(close(score, prompt) for score, prompt in zip(cold, prompts, strict=True))
        engine.check()
        hot = engine.score([prompts[i] for i in order])
        assert values(hot) == [cold[i].logprobs for i in order]
        parts = engine.score(prompts, start=starts)
        assert values(parts) == [one.logprobs[at - 1 :] for one, at in zip(cold, starts, strict=True)]
        engine.check()


@given(prompts=families(), given_settings=engine_settings(), slack=st.integers(0, 12), data=st.data())
def test_whatever_runs_beside_them(
    prompts: list[list[int]], given_settings: dict[str, Any], slack: int, data: st.DataObject
) -> None:
    """Generations of the same prompts, forks and aborts, between any steps."""
    pages = max(-(-(len(prompt) + 12) // given_settings["page_size"]) for prompt in prompts)
    with Engine(HashModel(vocab=VOCAB), **given_settings | {"num_pages": pages + slack}) as engine:
        wanted: dict[Handle, list[int]] = {}
        others: list[Handle] = []
        for prompt in data.draw(st.permutations(prompts)):
            match data.draw(st.sampled_from(["score", "generate", "fork", "abort"])):
                case "score":
                    start = data.draw(st.integers(1, len(prompt)))
                    wanted[engine.submit(prompt, ScoreParams(start=start))] = prompt
                case "generate":
                    others.append(engine.submit(prompt, GREEDY))
                case "fork" if others:
                    parent = data.draw(st.sampled_from(others))
                    sequence = engine._loop.requests.find(parent).branches[0]
                    at, text = data.draw(st.integers(1, sequence.num_tokens)), data.draw(st.lists(st.integers(0, 2)))
                    whole = [*sequence.tokens[:at].tolist(), *text[:4]]
                    params = ScoreParams(start=data.draw(st.integers(1, len(whole))))
                    [fork] = engine.fork(parent, params=params, text=text[:4] or None, at=at)
                    wanted[fork] = whole
                case "abort":
                    engine.abort(engine.submit(prompt, ScoreParams()))
            for _ in range(data.draw(st.integers(0, 3))):
                check_ended(engine, wanted)
        for _ in range(2_000):
            if not wanted and not engine.stats().num_running + engine.stats().num_waiting:
                break
            check_ended(engine, wanted)
        assert not wanted, "the engine stalls"


def check_ended(engine: Engine, wanted: dict[Handle, list[int]]) -> None:
    """One audited step; who ended in it was right."""
    for event in engine.step():
        if isinstance(event, FinishEvent) and event.handle in wanted:
            assert event.output.score is not None
            assert close(event.output.score, wanted.pop(event.handle))
    engine.check()


@given(
    prompts=families(),
    page_size=st.sampled_from([1, 2, 4]),
    slack=st.integers(0, 6),
    num_host_pages=st.sampled_from([1, 3, 40]),
    budget=st.sampled_from([2, 7, 512]),
    swap=st.sampled_from(["always", "auto"]),
    copy_delay=delays(),
)
def test_pages_that_move_take_them_along(
    prompts: list[list[int]], page_size: int, slack: int, budget: int, copy_delay: Any, **given_settings: Any
) -> None:
    """A small pool and a host tier, whose copies are late, overtake one another or fail."""
    engine = Engine(
        HashModel(vocab=VOCAB, copy_delay=copy_delay),
        num_pages=max(-(-len(prompt) // page_size) for prompt in prompts) + slack,
        page_size=page_size,
        token_budget=budget,
        poison=True,
        **given_settings,
    )
    with engine:
        for _ in range(3):
            scores = engine.score(prompts)
            assert all(close(score, prompt) for score, prompt in zip(scores, prompts, strict=True))
            engine.check()
    engine.check()


def test_what_is_known_on_the_host_need_not_come_back() -> None:
    first, second = list(range(16)), list(range(20, 36))
    with Engine(HashModel(vocab=VOCAB), page_size=4, num_pages=5, num_host_pages=12, swap="always") as engine:
        cold = engine.score([first])
        engine.score([second])
        before = engine.stats()
        assert before.transfers.swap_outs >= 3
        assert values(engine.score([first])) == values(cold)
        after = engine.stats()
        assert after.counters.steps == before.counters.steps
        assert after.transfers.swap_ins == 0
        [fresh] = engine.score([[*first, 7]])  # this has to go on from there
        assert close(fresh, [*first, 7])
        assert engine.stats().transfers.swap_ins > 0
        assert engine.stats().counters.computed == before.counters.computed + 1


def test_requests_that_end_in_any_order_leave_what_is_right(make_engine: MakeEngine, profile: str) -> None:
    """Public reports of scores that depend on the order of requests: every permutation, against no cache at all."""
    prompts = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 9], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    expected = values(make_engine(HashModel(vocab=VOCAB), prefix_cache=False).score(prompts))
    random = Random(0)
    for _ in range(200 if profile == "deep" else 20):
        engine = make_engine(HashModel(vocab=VOCAB), page_size=random.choice([1, 3, 4]), num_pages=12)
        for _ in range(4):
            order = random.sample(range(4), random.randint(1, 4))
            for i in order if random.random() < 0.5 else []:
                engine.generate([prompts[i]], GREEDY)
            assert values(engine.score([prompts[i] for i in order])) == [expected[i] for i in order]


def test_a_slot_that_other_tokens_come_into_is_not_known(make_engine: MakeEngine) -> None:
    """A fork takes a part of a page that was scored, its owner ends unpublished, and the fork writes on in place."""
    engine = make_engine(HashModel(vocab=VOCAB), page_size=8, prefill_chunk=4)
    scored = engine.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], ScoreParams())
    engine.step()
    [fork] = engine.fork(scored, params=GREEDY, at=3, text=[9])
    table = engine._loop.requests.find(fork).branches[0].table
    assert table is not None, "it holds the page"
    engine._loop.lives.end(engine._loop.requests.find(scored).branches[0], "error")
    engine.step()
    engine.step()
    [score] = engine.score([[1, 2, 3, 9]])
    assert close(score, [1, 2, 3, 9])


# -- what it costs ----------------------------------------------------------------------------------------------------


@given(
    prompts=families(max_size=8),
    page_size=st.sampled_from([1, 3, 4, 16]),
    token_budget=st.sampled_from([1, 2, 7, 512]),
    prefill_chunk=st.sampled_from([None, 1, 3]),
    max_running=st.sampled_from([1, 2, 64]),
    data=st.data(),
)
def test_a_cold_batch_computes_its_trie_and_a_hot_one_nothing(
    prompts: list[list[int]], data: st.DataObject, **given_settings: Any
) -> None:
    starts: Any = data.draw(st.sampled_from([1, [data.draw(st.integers(1, len(prompt))) for prompt in prompts]]))
    with Engine(HashModel(vocab=VOCAB), num_pages=512, poison=True, **given_settings) as engine:
        scores = engine.score(prompts, start=starts)
        cold = engine.stats().counters
        assert cold.computed == trie_size(prompts)
        assert cold.recomputed_for_scores == cold.recomputed_after_preemption == 0
        assert cold.recomputed_for_logits == cold.decoded == 0
        assert sum(score.usage.computed_tokens for score in scores) == cold.computed
        for score in scores:
            usage = score.usage
            assert usage.prompt_tokens == usage.cached_tokens + usage.computed_tokens + usage.recomputed_tokens
        again = engine.score(data.draw(st.permutations(prompts)), start=len(min(prompts, key=len)))
        assert engine.stats().counters.steps == cold.steps or starts != 1
        assert sum(score.usage.computed_tokens for score in again) == 0


@given(
    prompts=families(),
    page_size=st.sampled_from([1, 4, 16]),
    token_budget=st.sampled_from([1, 2, 7, 512]),
    prefill_chunk=st.sampled_from([None, 1, 3]),
    max_running=st.sampled_from([1, 2, 64]),
    generated=st.randoms(use_true_random=False),
)
def test_so_does_one_with_generations_of_the_same_prompts(
    prompts: list[list[int]], generated: Random, **given_settings: Any
) -> None:
    with Engine(HashModel(vocab=VOCAB), num_pages=512, poison=True, **given_settings) as engine:
        for prompt in prompts:
            ways: list[SamplingParams | ScoreParams] = [GREEDY, ScoreParams()]
            for params in generated.sample(ways, generated.randint(1, 2)):
                engine.submit(prompt, params)
        while engine.stats().num_running + engine.stats().num_waiting:
            engine.step()
            engine.check()
        counters = engine.stats().counters
        trie = trie_size(prompts)
        assert trie - counters.decoded <= counters.computed
        assert counters.computed <= trie, "what was generated may be what another prompt says"
        assert counters.recomputed_for_scores == counters.recomputed_after_preemption == 0
        assert counters.recomputed_for_logits <= len(prompts)


def test_cached_rows_run_again_for_what_nobody_asked(make_engine: MakeEngine) -> None:
    prompt = list(range(10))
    engine = make_engine(HashModel(vocab=VOCAB), page_size=4)
    engine.generate([prompt], GREEDY)
    [score] = engine.score([prompt], start=7)
    assert engine.stats().counters.recomputed_for_scores == score.usage.recomputed_tokens == 4  # rows 6 to 9
    [score] = engine.score([[*prompt[:8], 30]], start=8)  # token 9 differs: the row before it is asked once more
    assert engine.stats().counters.recomputed_for_scores == 5
    assert score.usage.computed_tokens == 1
    [score] = engine.score([prompt])
    assert engine.stats().counters.recomputed_for_scores == 15
    assert engine.stats().counters.computed == 11
    before = engine.stats().counters.steps
    engine.score([prompt, [*prompt[:8], 30]])
    assert engine.stats().counters.steps == before


def test_shares_rows_with_one_that_came_earlier(make_engine: MakeEngine) -> None:
    """Submitted while the first is between two chunks: it goes on beside it."""
    engine = make_engine(HashModel(vocab=VOCAB), page_size=4, prefill_chunk=3)
    prompt = list(range(11))
    engine.submit(prompt, ScoreParams())
    engine.step()
    handle = engine.submit([*prompt, 40], ScoreParams())
    wanted = {handle: [*prompt, 40]}
    while wanted:
        check_ended(engine, wanted)
    counters = engine.stats().counters
    assert (counters.computed, counters.recomputed_for_scores) == (12, 0)


def test_learns_from_the_pages_of_one_that_still_runs(make_engine: MakeEngine) -> None:
    """Its neighbours in the order of tokens know nothing of what came before their `start`."""
    engine = make_engine(HashModel(vocab=VOCAB), page_size=4, prefill_chunk=6)
    prompt = list(range(30))
    engine.submit(prompt, ScoreParams())
    for token in (40, 42):
        engine.submit([*prompt[:25], token], ScoreParams(start=25))
    for _ in range(3):
        engine.step()
    wanted = {engine.submit([*prompt[:25], 41], ScoreParams()): [*prompt[:25], 41]}
    while wanted:
        check_ended(engine, wanted)
    assert engine.stats().counters.recomputed_for_scores <= 1  # the last row of the chunk before, for the next token


def test_a_copied_page_is_known_as_far_as_it_was_copied(make_engine: MakeEngine) -> None:
    """A generation that parts from a scored prompt inside of a page."""
    engine = make_engine(HashModel(vocab=VOCAB), page_size=8)
    engine.score([[1, 2, 3, 4, 5, 6]])
    engine.generate([[1, 2, 3, 4, 9, 9]], GREEDY)
    [score] = engine.score([[1, 2, 3, 4, 9, 9]])
    assert close(score, [1, 2, 3, 4, 9, 9])
    assert engine.stats().counters.recomputed_for_scores == 3  # rows 3 to 5


@pytest.mark.parametrize("cache", ["none", "prompt"])
def test_nothing_is_kept_that_the_caller_does_not_want(make_engine: MakeEngine, cache: Any) -> None:
    engine = make_engine(HashModel(vocab=VOCAB))
    engine.score([[1, 2, 3], [4, 2, 3]], cache=cache)
    assert (engine.stats().cache.num_cached == 0) == (cache == "none")


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_row_that_is_nan_ends_its_own_request(make_engine: MakeEngine) -> None:
    model = HashModel(vocab=VOCAB, finite=lambda batch: batch.token_ids != 13)
    engine = make_engine(model, page_size=4)
    sick, well = engine.score([[1, 2, 13, 4], [1, 2, 3, 4]])
    assert sick.error is not None
    assert "NaN" in sick.error
    assert sick.logprobs == ()
    assert close(well, [1, 2, 3, 4])


def test_logits_that_are_nan_end_who_asked_for_them(make_engine: MakeEngine) -> None:
    """A generation that shares the row does not ask for its logits, and goes on."""

    class Sick(HashModel):
        def forward(self, batch: Batch) -> Forward:
            given = HashModel.forward(self, batch)
            return Forward(logits=given.logits, finite=given.finite, logprobs=given.logprobs * np.nan)

    engine = make_engine(Sick(vocab=VOCAB))
    generating = engine.submit([1, 2, 3], GREEDY)
    scoring = engine.submit([1, 2, 3], ScoreParams())
    ended: dict[Handle, Any] = {}
    while len(ended) < 2:
        ended |= {event.handle: event.output for event in engine.step() if isinstance(event, FinishEvent)}
    assert ended[generating].choices[0].finish_reason == "length"
    assert ended[scoring].score.error is not None


def test_a_model_that_gives_too_few_is_found_out(make_engine: MakeEngine) -> None:
    """No log-probability is ever made up: a report of chance-level scores that nobody noticed."""

    class Short(HashModel):
        def forward(self, batch: Batch) -> Forward:
            given = HashModel.forward(self, batch)
            return Forward(logits=given.logits, finite=given.finite)

    [score] = make_engine(Short(vocab=VOCAB)).score([[1, 2, 3]])
    assert score.error is not None
    assert "gave 0 log-probabilities where 2 were asked for" in score.error


def test_a_step_that_fails_takes_only_who_fails_alone(make_engine: MakeEngine) -> None:
    def fail(batch: Batch) -> None:
        if 13 in batch.token_ids:
            raise RuntimeError("device")

    engine = make_engine(HashModel(vocab=VOCAB, before_forward=fail), page_size=4)
    prompts = [[1, 2, 13], [1, 2, 3], [1, 2, 3, 4, 5]]
    sick, *well = engine.score(prompts)
    assert sick.error is not None
    assert "device" in sick.error
    assert all(close(score, prompt) for score, prompt in zip(well, prompts[1:], strict=True))
    assert values(engine.score(prompts[1:])) == values(well)


def test_interrupted_steps_leave_the_engine_as_before(make_engine: MakeEngine) -> None:
    interrupts = iter([None, KeyboardInterrupt(), None, None, KeyboardInterrupt()])

    def interrupt(_: Batch) -> None:
        if (error := next(interrupts, None)) is not None:
            raise error

    engine = make_engine(HashModel(vocab=VOCAB, before_forward=interrupt), page_size=4, prefill_chunk=2)
    prompt = list(range(12))
    wanted = {engine.submit(prompt, ScoreParams()): prompt}
    while wanted:
        try:
            check_ended(engine, wanted)
        except KeyboardInterrupt:
            engine.check()


def test_what_cannot_be_asked_is_refused(engine: Engine) -> None:
    starts: list[tuple[Any, str]] = [(0, "an integer in"), (4, "at most 3"), ([1, 1], "one for each of 1")]
    for start, allowed in starts:
        with pytest.raises(InvalidRequest, match=f"start: .*{allowed}"):
            engine.score([[1, 2, 3]], start=start)
    with pytest.raises(InvalidRequest, match="known: start"):
        ScoreParams(begin=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="prompt: empty"):
        engine.score([list[int]()])
    handle = engine.submit([1, 2, 3], ScoreParams())
    with pytest.raises(InvalidRequest, match="a fork of a score request needs its own"):
        engine.fork(handle)
    [fork] = engine.fork(handle, params=GREEDY)
    outputs: dict[Handle, Any] = {}
    while len(outputs) < 2:
        outputs |= {event.handle: event.output for event in engine.step() if isinstance(event, FinishEvent)}
    assert outputs[fork].choices[0].token_ids == engine.generate([[1, 2, 3]], GREEDY)[0].choices[0].token_ids
    assert outputs[handle].choices[0].token_ids == ()
    engine.abort(handle)
    assert engine.step() == []


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(HashModel(vocab=VOCAB))


def test_one_token_has_nothing_before_it(engine: Engine) -> None:
    [score] = engine.score([[5]])
    assert (score.token_ids, score.logprobs, score.start) == ((5,), (), 1)


def test_parameters_survive_json() -> None:
    assert params_from_dict(ScoreParams(start=3).to_dict()) == ScoreParams(start=3)


def test_a_record_of_scores_replays(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    random = Random(1)
    with Engine(HashModel(vocab=VOCAB), num_pages=9, page_size=4, prefill_chunk=5, record=path) as engine:
        for _ in range(30):
            prompt = [random.randrange(2) for _ in range(random.randint(1, 16))]
            params = GREEDY if random.random() < 0.4 else ScoreParams()
            handle = engine.submit(prompt, params)
            for _ in range(random.randrange(4)):
                engine.step()
            if random.random() < 0.3:
                engine.release(handle)
        while engine.stats().num_running + engine.stats().num_waiting:
            engine.step()
    assert replay(path).difference is None


# -- real models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny.SERVED)
def test_equals_a_direct_scorer(name: str) -> None:
    """To 1e-9 when computed where all of the model is float64, and to the bit when read back, whatever the chunks."""
    random = Random(0)
    shared = [random.randrange(3, tiny.VOCAB_SIZE) for _ in range(20)]
    prompts = [shared + [random.randrange(3, tiny.VOCAB_SIZE) for _ in range(n)] for n in (1, 7, 7, 30)]
    untouched = tiny.build(tiny.SERVED[name]())
    expected = [tiny.logprobs(untouched, prompt) for prompt in prompts]
    model = TransformerModel(tiny.build(tiny.SERVED[name]()))
    for chunk in (None, 11):
        with Engine(model, num_pages=32, page_size=4, prefill_chunk=chunk, poison=True) as engine:
            fresh = engine.score(prompts)
            for score, one in zip(fresh, expected, strict=True):
                np.testing.assert_allclose(score.logprobs, one, rtol=0, atol=1e-6 if name in tiny.NARROWED else 1e-9)
            assert engine.stats().counters.computed == trie_size(prompts)
            assert values(engine.score(prompts[::-1])[::-1]) == values(fresh)
            assert engine.stats().counters.recomputed_for_scores == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_depend_on_the_prompt_alone(dtype: torch.dtype) -> None:
    """Alone, together, in chunks, hot, for a part, with more rows than are in memory at once."""
    random = Random(0)
    prompts = [[random.randrange(3, tiny.VOCAB_SIZE) for _ in range(n)] for n in (150, 3, 64, 65)]
    prompts += [[*prompts[0][:100], 5, 6, 7], prompts[0][:130]]
    model = TransformerModel(tiny.build(tiny.wide("llama"), dtype=dtype), exact=True)
    alone = []
    for prompt in prompts:
        with Engine(model, num_pages=64, page_size=4, prefix_cache=False) as engine:
            alone += values(engine.score([prompt]))
    ways: list[dict[str, Any]] = [{}, {"token_budget": 37}, {"prefill_chunk": 16, "max_running": 2}]
    for way in ways:
        with Engine(model, num_pages=200, page_size=4, **way) as engine:
            engine.generate([prompts[1]], GREEDY)
            assert values(engine.score(prompts)) == alone
            assert values(engine.score(prompts, start=2)) == [one[1:] for one in alone]


def test_rows_are_summed_each_by_itself() -> None:
    """The one reduction over the vocabulary does not depend on how many rows stand beside."""
    logits = torch.randn(200, 49_152, generator=torch.Generator().manual_seed(0)) * 4
    rows, ids = np.arange(200), np.arange(200) * 200
    together = logprobs_of(lambda chunk: logits[torch.from_numpy(chunk)], rows, ids)
    alone = [logprobs_of(lambda chunk: logits[torch.from_numpy(chunk)], rows[i : i + 1], ids[i : i + 1]) for i in rows]
    assert together.tolist() == [float(one[0]) for one in alone]


@settings(max_examples=settings().max_examples // 3)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=30))
def test_a_row_may_be_asked_for_several_tokens(pairs: list[tuple[int, int]]) -> None:
    logits = torch.randn(10, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = sorted(pairs)
    rows, ids = np.array([row for row, _ in pairs], np.int64), np.array([i for _, i in pairs], np.int64)
    found = logprobs_of(lambda chunk: logits[torch.from_numpy(chunk)], rows, ids)
    np.testing.assert_allclose(found, [float(logits[r].log_softmax(-1)[i]) for r, i in pairs], rtol=0, atol=1e-12)
