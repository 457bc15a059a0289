"""Beam search through the engine: the dense search's hypotheses, whatever pages there are, and on real models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from radixrt.runtime import (
    BeamParams,
    Choice,
    Engine,
    FinishEvent,
    Forward,
    InvalidRequest,
    Output,
    SamplingParams,
    TokenEvent,
)
from radixrt.runtime.batch import Batch
from radixrt.runtime.beams import BeamSearch
from radixrt.runtime.intake import branch_pages
from radixrt.runtime.testing import ByteTokenizer, HashModel
from radixrt.runtime.transformer import TransformerModel

from . import tiny
from .conftest import MakeEngine
from .test_host_tier import delays

VOCAB = 40


class Spied:
    """A model whose last logits are kept."""

    def __init__(self, model: HashModel) -> None:
        self.model = model
        self.logits = torch.empty(0)

    def forward(self, batch: Batch) -> Forward:
        result = self.model.forward(batch)
        self.logits = result.logits[-1].clone()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def dense(prompt: list[int], params: BeamParams) -> list[tuple[tuple[int, ...], float]]:
    """The search over a hash model that computes every beam from its start, one by one."""
    search = BeamSearch(params, ending_token_ids=params.stop_token_ids, max_tokens=params.max_tokens)
    beams, model = [prompt], Spied(HashModel(vocab=VOCAB))
    with Engine(model, num_pages=512, page_size=4, prefix_cache=False) as engine:

        def row(tokens: list[int]) -> torch.Tensor:
            engine.generate([tokens], SamplingParams(max_tokens=1, temperature=0.0))
            return model.logits

        while not search.is_done:
            logits = torch.stack([row(beam) for beam in beams])
            beams = [[*beams[c.parent], c.token_id] for c in search.advance(logits)]
    return [(h.token_ids, h.score) for h in search.hypotheses]


def found(choices: tuple[Choice, ...]) -> list[tuple[tuple[int, ...], float]]:
    return [(choice.token_ids, choice.score if choice.score is not None else float("nan")) for choice in choices]


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_finds_what_a_dense_search_finds_under_any_pressure(data: st.DataObject) -> None:
    """In a pool that just holds the largest request, beside requests of other kinds, in chunks, with aborts."""
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    params = [
        BeamParams(
            width=data.draw(st.integers(1, 4)),
            max_tokens=data.draw(st.integers(1, 6)),
            early_stopping=data.draw(st.sampled_from([False, True, "never"])),
            length_penalty=data.draw(st.sampled_from([1.0, 0.0, -1.0])),
            stop_token_ids=data.draw(st.sampled_from([(), (3, 5, 7)])),
        )
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    prompts = [[1, 2, 3, 4, 5][: data.draw(st.integers(1, 5))] * data.draw(st.integers(1, 3)) for _ in params]
    need = max(
        branch_pages(len(prompt), len(prompt) + p.max_tokens - 1, p.width, page_size)
        for prompt, p in zip(prompts, params, strict=True)
    )
    pressed: dict[str, Any] = {
        "num_pages": need + data.draw(st.integers(0, 6)),
        "prefill_chunk": data.draw(st.sampled_from([None, 3])),
        "token_budget": data.draw(st.sampled_from([2, 512])),
        "prefix_cache": data.draw(st.booleans()),
        "num_host_pages": data.draw(st.sampled_from([0, 2, 20])),
        "swap": data.draw(st.sampled_from(["auto", "always"])),
    }
    model = HashModel(vocab=VOCAB, copy_delay=data.draw(delays()))
    with Engine(model, page_size=page_size, poison=True, **pressed) as engine:
        noise = SamplingParams(n=2, max_tokens=3, seed=1)
        others = [engine.submit([9] * 3, noise) for _ in range(2) if branch_pages(3, 5, 2, page_size) <= need]
        handles = [engine.submit(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        outputs: dict[Any, Output] = {}
        for _ in range(3_000):
            if len(outputs) == len(handles) + len(others):
                break
            for event in engine.step():
                assert not (isinstance(event, TokenEvent) and event.handle in handles), "told before it is known"
                if isinstance(event, FinishEvent):
                    outputs[event.handle] = event.output
            engine.check()
        assert len(outputs) == len(handles) + len(others), "the engine stalls"
        assert engine._loop.cache.stats().num_tables == 0
        for handle, prompt, p in zip(handles, prompts, params, strict=True):
            assert found(outputs[handle].choices) == dense(prompt, p)


@settings(max_examples=settings().max_examples // 2)
@given(
    prompt_len=st.integers(1, 20),
    page_size=st.sampled_from([1, 4, 16]),
    width=st.integers(1, 6),
    steps=st.integers(1, 12),
)
def test_live_beams_hold_the_nodes_of_their_page_trie(prompt_len: int, page_size: int, width: int, steps: int) -> None:
    """Nothing is copied that two beams have in common, and the last owner never copies."""
    with Engine(HashModel(vocab=VOCAB), num_pages=512, page_size=page_size) as engine:
        handle = engine.submit(list(range(prompt_len)), BeamParams(width=width, max_tokens=steps + 1))
        for _ in range(steps):
            engine.step()
            request = engine._loop.requests.live(handle)
            assert request is not None
            held = [beam.table for beam in request.branches if beam.table is not None]
            assert len(held) == len(request.branches)
            pages = {int(page) for table in held for page in table.page_ids}
            tokens = [table.tokens.tolist() for table in held]
            nodes = {
                tuple(t[: i + page_size]) for t in tokens for i in range(0, len(t), page_size)
            }  # a page is named by all tokens up to its end
            assert len(pages) == len(nodes)
        engine.check()
        assert engine.stats().counters.computed == prompt_len


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2", "gpt2"])
def test_equals_transformers(name: str) -> None:
    """Ids, order and scores, batched, with and without preemption."""
    prompts = [[5, 6, 7, 8, 9], [5, 6, 7], [11, 12, 13, 14, 15, 16, 17, 18]]
    params = BeamParams(width=4, max_tokens=10, length_penalty=0.7)
    hf_model = tiny.build(tiny.SERVED[name]())
    expected = [generate(hf_model, prompt, params) for prompt in prompts]
    with Engine(TransformerModel(tiny.build(tiny.SERVED[name]())), num_pages=256, page_size=4) as engine:
        for every in (100, 3):
            handles = [engine.submit(prompt, params) for prompt in prompts]
            outputs: dict[Any, Output] = {}
            for step in range(200):
                outputs |= {event.handle: event.output for event in engine.step() if isinstance(event, FinishEvent)}
                if step % every == every - 1 and len(engine._loop.scheduler.running) > 1:
                    engine._loop.scheduler.preempt(engine._loop.scheduler.running[step % 5 - 5])
                engine.check()
                if len(outputs) == len(prompts):
                    break
            for handle, answer in zip(handles, expected, strict=True):
                ours = found(outputs[handle].choices)
                assert [ids for ids, _ in ours] == [ids for ids, _ in answer]
                assert np.allclose([score for _, score in ours], [score for _, score in answer], atol=1e-5)
        assert engine.stats().counters.preemptions


def generate(hf_model: Any, prompt: list[int], params: BeamParams) -> list[tuple[tuple[int, ...], float]]:
    result = hf_model.generate(
        torch.tensor([prompt]),
        num_beams=params.width,
        num_return_sequences=params.width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    eos = hf_model.generation_config.eos_token_id
    answers = []
    for ids, score in zip(result.sequences[:, len(prompt) :].tolist(), result.sequences_scores.tolist(), strict=True):
        ids = ids[: ids.index(eos) + 1] if eos in ids else ids
        answers.append((tuple(ids), score))
    return answers


class TestAsARequest:
    def test_has_text_and_scores(self, make_engine: MakeEngine) -> None:
        engine = make_engine(HashModel(vocab=128))
        (output,) = engine.beam_search("abc", BeamParams(width=3, max_tokens=5, num_return=2))
        assert len(output.choices) == 2
        for choice in output.choices:
            assert choice.text == ByteTokenizer().decode(choice.token_ids)
            assert choice.finish_reason == "length"
        scores = [choice.score for choice in output.choices if choice.score is not None]
        assert scores == sorted(scores, reverse=True)
        assert output.usage.completion_tokens == 10
        assert (output.usage.prompt_tokens, output.usage.computed_tokens) == (3, 3)

    @pytest.mark.parametrize("steps", [0, 1, 3])
    def test_an_abort_ends_it_whole(self, make_engine: MakeEngine, steps: int) -> None:
        engine = make_engine(page_size=4)
        handle = engine.submit([1] * 9, BeamParams(width=3, max_tokens=20))
        for _ in range(steps):
            engine.step()
        engine.abort(handle)
        (event,) = engine.step()
        assert isinstance(event, FinishEvent)
        assert [choice.finish_reason for choice in event.output.choices] == ["abort"]
        assert engine.stats().num_running == engine.stats().num_waiting == 0

    def test_one_sick_beam_ends_it_whole_and_nobody_else(self, make_engine: MakeEngine) -> None:
        model = HashModel()
        engine = make_engine(model, page_size=4)
        sick = engine.submit([1] * 9, BeamParams(width=3, max_tokens=20))
        sound = engine.submit([2] * 9, SamplingParams(max_tokens=8, temperature=0.0))
        for _ in range(3):
            engine.step()
        model.finite = lambda batch: np.arange(batch.num_rows) != 1
        events = engine.step()
        model.finite = None
        (ended,) = (event for event in events if isinstance(event, FinishEvent))
        assert ended.handle == sick
        assert ended.output.choices[0].finish_reason == "error"
        engine.check()
        while engine.stats().num_running:
            events = engine.step()
        assert events[-1].handle == sound

    def test_a_hypothesis_forks(self, make_engine: MakeEngine) -> None:
        engine = make_engine(page_size=4)
        (output,) = engine.beam_search([[1] * 6], BeamParams(width=3, max_tokens=5))
        params = SamplingParams(max_tokens=3, temperature=0.0)
        children = [engine.fork(output.handle, params=params, choice=i, text=[7])[0] for i in range(3)]
        ended: dict[Any, Output] = {}
        while len(ended) < 3:
            ended |= {event.handle: event.output for event in engine.step() if isinstance(event, FinishEvent)}
        for child, choice in zip(children, output.choices, strict=True):
            assert ended[child].prompt_token_ids == (*[1] * 6, *choice.token_ids, 7)
        with pytest.raises(InvalidRequest, match="params: none given; a fork of a beam search needs its own"):
            engine.fork(output.handle)

    def test_what_can_never_fit_is_refused(self, make_engine: MakeEngine) -> None:
        engine = make_engine(num_pages=8, page_size=4)
        with pytest.raises(InvalidRequest, match=r"8 \+ 10 tokens in 3 choices given"):
            engine.submit([1] * 8, BeamParams(width=3, max_tokens=10))


def test_beams_that_wait_for_one_another_go_before_higher_priorities(make_engine: MakeEngine) -> None:
    """A preempted beam whose mates hold all places of those that may run is not left behind for what comes later."""
    engine = make_engine(HashModel(vocab=VOCAB), page_size=1, num_pages=22, max_running=2, token_budget=64)
    handles = [engine.submit([1] * 7, SamplingParams(max_tokens=6))]
    engine.step()
    handles.append(engine.submit([2] * 4, BeamParams(width=3, max_tokens=6)))
    for _ in range(3):
        engine.step()
    handles += [engine.submit([token] * 10, SamplingParams(max_tokens=2), priority=5) for token in (3, 4)]
    ended: list[Any] = []
    for _ in range(100):
        ended += [event.handle for event in engine.step() if isinstance(event, FinishEvent)]
        engine.check()
    assert sorted(ended, key=lambda handle: handle.number) == handles, "the engine stalls"
