"""Tiny random models of many architectures through the engine: the tokens of transformers' `generate`.

In float64 on plain torch, and with wider heads in float32 on the native kernel where that serves them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from radixrt.runtime import Engine, FinishEvent, Handle, Output, SamplingParams
from radixrt.runtime.transformer import TransformerModel

from . import tiny
from .conftest import audit

NEW_TOKENS = 8


def prompts() -> list[list[int]]:
    """Long and short, equal and prefixes of each other, diverging inside pages; windows are shorter than most."""
    rng = np.random.default_rng(7)
    base = rng.integers(3, tiny.VOCAB_SIZE, 30).tolist()
    return [base, base, base[:17], [*base[:21], 5, 6, 7], [9], [*base[:3], 4]]


def expected(hf_model: Any, prompt: list[int]) -> tuple[int, ...]:
    """What `generate` continues with; float64 models compare logits in float32, as it does."""
    ids = torch.tensor([prompt])
    out = hf_model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS)
    return tuple(out[0, len(prompt) :].tolist())


@pytest.fixture(scope="module", params=[*tiny.SERVED, *(f"{name} (native)" for name in tiny.WIDE)])
def pair(request: pytest.FixtureRequest) -> tuple[TransformerModel, list[tuple[int, ...]]]:
    """A model of ours, and the reference's answers to `prompts`."""
    name, native, _ = request.param.partition(" (native)")
    make = partial(tiny.wide, name) if native else tiny.SERVED[name]
    dtype = torch.float32 if native else torch.float64
    reference = tiny.build(make(), dtype=dtype)
    answers = [expected(reference, prompt) for prompt in prompts()]
    return TransformerModel(tiny.build(make(), dtype=dtype), cpu_kernel="native" if native else "torch"), answers


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "split at every token": {"prefill_chunk": 1},
    "one at a time": {"max_running": 1},
    "small pages": {"page_size": 1, "token_budget": 13},
    "odd pages and chunks": {"page_size": 5, "prefill_chunk": 7},
    "preempted": {"page_size": 2, "num_pages": 24},
    "no cache": {"prefix_cache": False},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_generate_cold_and_warm(pair: tuple[TransformerModel, list[tuple[int, ...]]], name: str) -> None:
    model, answers = pair
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    if model.dtype == torch.float32 and SETTINGS[name].get("page_size", 16) < 8:
        pytest.skip("outside the native kernel's domain")
    engine = Engine(model, **({"num_pages": 128, "poison": True} | SETTINGS[name]))
    assert model.describe()["attention"].startswith("native" if model.dtype == torch.float32 else "torch")
    for temperature in ("cold", "warm"):
        outputs = engine.generate(prompts(), params)
        assert [output.choices[0].token_ids for output in outputs] == answers, temperature
        engine.check()
    if name == "preempted" and all(len(answer) == NEW_TOKENS for answer in answers):
        assert engine.stats().counters.preemptions > 0
    audit(engine)


def test_forks_continue_as_the_parent(pair: tuple[TransformerModel, list[tuple[int, ...]]]) -> None:
    """A greedy fork inside a page, after a few tokens, ends as its parent does."""
    model, answers = pair
    engine = Engine(model, num_pages=128, poison=True)
    parent = engine.submit(prompts()[0], SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    for _ in range(3):
        engine.step()
    if engine.stats().num_running:  # unless the model ended it
        children = engine.fork(parent, n=2)
        ended: dict[Handle, Output] = {}
        while engine.stats().num_running:
            ended |= {e.handle: e.output for e in engine.step() if isinstance(e, FinishEvent)}
        for child in children:
            assert ended[child].choices[0].token_ids == answers[0][3:]
    audit(engine)


@pytest.mark.parametrize("window", ["llama", "mistral", "gemma2"])
def test_nan_ends_one_request_alone(window: str) -> None:
    """Real NaNs, from a token whose embedding is NaN, in chunk 2 of 4; who shares the sound rows before it goes on."""
    hf_model = tiny.build(tiny.SERVED[window]())
    sound = [*range(10, 33), 40, 41, 42]
    sick = [*range(10, 33), 9, 43, 44, *range(50, 70)]
    answers = [expected(hf_model, prompt) for prompt in (sound, [70, 71])]
    hf_model.get_input_embeddings().weight.data[9] = torch.nan
    engine = Engine(TransformerModel(hf_model), num_pages=64, page_size=4, token_budget=32, poison=True)
    outputs = engine.generate([sick, sound, [70, 71]], SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    assert outputs[0].choices[0].finish_reason == "error"
    assert [output.choices[0].token_ids for output in outputs[1:]] == answers
    assert engine.explain(sick).matched == 23, "nothing of the failed step was published but what others share"
    audit(engine)
