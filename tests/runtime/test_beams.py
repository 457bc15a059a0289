"""BeamSearch: the ids, order and scores of transformers' `generate`, on transformers models and on tables full of ties.

The driver has no engine, no pages and no KV cache: every step forwards whole sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given, strategies as st
from transformers.modeling_outputs import CausalLMOutput

from radixrt.runtime.beams import BeamSearch, Continuation, Hypothesis
from radixrt.runtime.params import BeamParams

from . import tiny

VOCAB_SIZE = 24  # few ids, so that ending ones come up
ARCHITECTURES = ("llama", "gemma3", "qwen2", "gpt2")
CLOSE = 1e-6  # a gap below it could be decided by rounding

Rows = Callable[[list[list[int]]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    prompt: list[int]
    params: BeamParams

    @property
    def ending_ids(self) -> frozenset[int]:
        return self.params.ending_token_ids(frozenset())


@dataclass(frozen=True, kw_only=True)
class Answer:
    hypotheses: tuple[Hypothesis, ...]
    num_steps: int
    gap: float  # the smallest that decided which beams go on


def rows_of(model: Any) -> Rows:
    """The logits after whole sequences of one length, as `generate` takes them: float32."""

    def rows(sequences: list[list[int]]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=torch.tensor(sequences), use_cache=False).logits
        return logits[:, -1].float().clone()

    return rows


def search(rows: Rows, case: Case) -> Answer:
    """Beam search as an engine drives it, audited at every step."""
    beams, gaps, num_steps = [case.prompt], [], 0
    state = BeamSearch(case.params, ending_token_ids=case.ending_ids, max_tokens=case.params.max_tokens)
    while not state.is_done:
        logits = rows(beams)
        gaps.append(deciding_gap(state, logits, case))
        before = logits.clone()
        continuations = state.advance(logits)
        assert torch.equal(logits, before), "the logits were changed"
        beams = [[*beams[c.parent], c.token_id] for c in continuations]
        num_steps += 1
        state.check()
    assert not beams
    assert state.num_beams == 0
    return Answer(hypotheses=state.hypotheses, num_steps=num_steps, gap=min(gaps))


def deciding_gap(state: BeamSearch, logits: torch.Tensor, case: Case) -> float:
    """How far the last beam that goes on is from the first that does not, endings counted and not; inf: none such."""
    sums = torch.log_softmax(logits, dim=-1) + torch.tensor(state.scores)[:, None]
    going_on = sums.clone()
    going_on[:, list(case.ending_ids)] = -torch.inf
    width = case.params.width
    best = [
        values.flatten().sort(descending=True).values[width - 1 : width + 1].double() for values in (sums, going_on)
    ]
    return min((float(pair[0] - pair[1]) for pair in best if len(pair) == 2 and pair[1].isfinite()), default=torch.inf)


def generated(model: Any, case: Case) -> list[tuple[tuple[int, ...], float]]:
    """The tokens after the prompt and the score of each sequence that `generate` returns, in its order."""
    params, ids = case.params, torch.tensor([case.prompt])
    settings: dict[str, Any] = {"max_new_tokens": params.max_tokens, "min_new_tokens": params.min_tokens}
    if params.width > 1:  # it warns about these where there is one beam
        settings |= {"length_penalty": params.length_penalty, "early_stopping": params.early_stopping}
        settings |= {"num_return_sequences": params.num_return or params.width}
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=params.width,
        eos_token_id=sorted(case.ending_ids) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **settings,
    )
    tokens = out.sequences[:, len(case.prompt) :].tolist()
    if params.width == 1:  # greedy: there are logits, and no score
        total = torch.tensor(0.0)
        for row, token_id in zip(out.logits, tokens[0], strict=True):
            total = total + torch.log_softmax(row[0].float(), dim=-1)[token_id]
        return [(tuple(tokens[0]), float(total / len(tokens[0]) ** params.length_penalty))]
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()  # the rest is padding
    return [
        (tuple(row[:length]), score)
        for row, length, score in zip(tokens, lengths, out.sequences_scores.tolist(), strict=True)
    ]


def assert_equal(answer: Answer, expected: list[tuple[tuple[int, ...], float]], case: Case, tolerance: float) -> None:
    assert [found.token_ids for found in answer.hypotheses] == [ids for ids, _ in expected], case
    for found, (ids, score) in zip(answer.hypotheses, expected, strict=True):
        assert found.score == pytest.approx(score, rel=tolerance, abs=tolerance), case
        assert found.finish_reason == ("stop" if ids[-1] in case.ending_ids else "length"), case


def random_case(random: Random, *, vocab_size: int = VOCAB_SIZE, max_tokens: int = 12) -> Case:
    width = random.randint(1, min(8, vocab_size - 1))
    num_ending = random.choice([0, 1, 2, 3, vocab_size // 3, vocab_size // 2])
    ending = random.sample(range(vocab_size), min(num_ending, vocab_size - width))
    length = random.randint(1, max_tokens)
    params = BeamParams(
        width=width,
        max_tokens=length,
        min_tokens=random.choice([0, 0, random.randint(0, length)]),
        length_penalty=random.choice([1.0, 1.0, 0.0, 0.5, 2.0, -0.5, -1.0, -2.0]),
        early_stopping=random.choice([False, True, "never"]),
        num_return=random.choice([None, random.randint(1, width)]),
        stop_token_ids=ending,
    )
    prompt = [random.randrange(1, vocab_size) for _ in range(random.randint(1, 12))]
    return Case(prompt=prompt, params=params)


def build(name: str, seed: int) -> Any:
    """A tiny model that ends at nothing by itself, with a small vocabulary."""
    config = tiny.SERVED[name]()
    config.vocab_size = VOCAB_SIZE
    config.eos_token_id = None
    model = tiny.build(config, seed=seed)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_generate(name: str, profile: str) -> None:
    """Also counts what the cases met: all kinds of endings, and hardly a decision that rounding could have made."""
    num_cases, num_models = (500, 10) if profile == "deep" else (50, 2)
    reasons, num_early, num_close, num_beaten = [], 0, 0, 0
    for seed in range(num_models):
        model, random = build(name, seed), Random(f"{name} {seed}")
        for _ in range(num_cases // num_models):
            case = random_case(random)
            answer = search(rows_of(model), case)
            assert_equal(answer, generated(model, case), case, 1e-6)
            reasons += [found.finish_reason for found in answer.hypotheses]
            num_early += answer.num_steps < case.params.max_tokens
            num_close += answer.gap < CLOSE
            num_beaten += any(len(found.token_ids) != answer.num_steps for found in answer.hypotheses)
    assert min(reasons.count("stop"), reasons.count("length")) >= num_cases / 2
    assert min(num_early, num_beaten) >= num_cases / 20
    assert num_close <= num_cases / 100


@pytest.mark.parametrize("alike", ["logits", "logits and embeddings"])
def test_tokens_that_tie_by_construction(alike: str, profile: str) -> None:
    """Ids that share a row of the head always tie; where they share an embedding too, so do whole beams."""
    num_ties = 0
    for seed in range(100 if profile == "deep" else 12):
        model, random = build("llama", seed), Random(seed)
        with torch.no_grad():
            for layer in [model.lm_head, model.model.embed_tokens][: 1 + ("embeddings" in alike)]:
                layer.weight[1::3] = layer.weight[::3]
                layer.weight[2::6] = layer.weight[::6]
        case = random_case(random)
        answer = search(rows_of(model), case)
        assert_equal(answer, generated(model, case), case, 1e-6)
        num_ties += answer.gap == 0
    assert num_ties >= 5


class Table(hf.PreTrainedModel, hf.GenerationMixin):  # type: ignore[no-untyped-call]
    """A model whose logits are looked up by the last two tokens: exact, fast, full of ties where levels are few."""

    config_class = hf.PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, seed: int, vocab_size: int, num_levels: int) -> None:
        config: dict[str, Any] = {"vocab_size": vocab_size, "num_hidden_layers": 1}
        super().__init__(hf.PretrainedConfig(**config))
        generator = torch.Generator().manual_seed(seed)
        levels = torch.randint(num_levels, (vocab_size, vocab_size, vocab_size), generator=generator)
        self.table = torch.nn.Parameter(levels / 2, requires_grad=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any) -> CausalLMOutput:
        before = input_ids[:, -2] if input_ids.shape[1] > 1 else input_ids[:, -1]
        return CausalLMOutput(logits=self.table[before, input_ids[:, -1]][:, None])

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}


@given(seed=st.integers(0, 2**32), vocab_size=st.integers(2, 24), num_levels=st.integers(1, 4))
def test_ties_everywhere_are_broken_as_generate_breaks_them(seed: int, vocab_size: int, num_levels: int) -> None:
    """Equal logits go through the same operations, so scores are equal to the bit."""
    model = Table(seed, vocab_size, num_levels)
    for attempt in range(2):
        case = random_case(Random(seed + attempt), vocab_size=vocab_size, max_tokens=16)
        assert_equal(search(rows_of(model), case), generated(model, case), case, 0.0)


def start(params: BeamParams, ending: tuple[int, ...] = (), max_tokens: int | None = None) -> BeamSearch:
    return BeamSearch(params, ending_token_ids=ending, max_tokens=max_tokens or params.max_tokens)


def logits_of(*rows: list[float]) -> torch.Tensor:
    """Logits whose softmax gives these probabilities."""
    return torch.tensor(rows).clamp(min=1e-12).log()


def test_one_row_first_then_one_for_each_beam() -> None:
    state = start(BeamParams(width=2, max_tokens=3))
    assert state.num_beams == 1
    assert state.advance(logits_of([0.1, 0.6, 0.3])) == [Continuation(0, 1), Continuation(0, 2)]
    assert state.scores == pytest.approx([math.log(0.6), math.log(0.3)])
    # Both go on from the second beam: nothing of the first is needed any more.
    assert state.advance(logits_of([0.34, 0.33, 0.33], [0.0, 0.1, 0.9])) == [Continuation(1, 2), Continuation(0, 0)]
    assert state.num_beams == 2
    assert not state.hypotheses
    assert state.advance(logits_of([0.0, 1.0, 0.0], [0.2, 0.2, 0.6])) == []
    assert [found.token_ids for found in state.hypotheses] == [(2, 2, 1), (1, 0, 2)]
    assert state.is_done
    state.check()


def test_a_better_hypothesis_takes_the_place_of_the_worst() -> None:
    """Beam by beam on a chain that ends with 0: what ended early is outdone by what went on."""
    state = start(BeamParams(width=2, max_tokens=9, early_stopping="never"), ending=(0,))
    state.advance(logits_of([0.3, 0.4, 0.2, 0.1]))
    assert [found.token_ids for found in state.hypotheses] == [(0,)]
    state.advance(logits_of([0.55, 0.45, 0.0, 0.0], [0.0, 0.01, 0.99, 0.0]))
    assert [found.token_ids for found in state.hypotheses] == [(1, 0), (0,)]
    assert not state.is_done
    state.advance(logits_of([0.98, 0.01, 0.01, 0.0], [0.0, 0.0, 0.99, 0.01]))
    assert [found.token_ids for found in state.hypotheses] == [(2, 2, 0), (1, 0)]
    assert [found.finish_reason for found in state.hypotheses] == ["stop", "stop"]


def test_never_stops_early_takes_the_present_length_where_longer_is_worse() -> None:
    """At the greatest length the live beam could not win; at the next one it does."""
    params = BeamParams(width=2, max_tokens=20, length_penalty=-1.0, early_stopping="never")
    state = start(params, ending=(0,))
    state.advance(logits_of([0.45, 0.4, 0.1, 0.05]))
    state.advance(logits_of([0.01, 0.01, 0.01, 0.97], [0.5, 0.2, 0.2, 0.1]))
    assert [found.token_ids for found in state.hypotheses] == [(0,), (2, 0)]
    assert not state.is_done
    state.advance(logits_of([0.97, 0.01, 0.01, 0.01], [0.01, 0.4, 0.4, 0.19]))
    assert [found.token_ids for found in state.hypotheses] == [(0,), (1, 3, 0)]


def test_a_context_that_ends_first_ends_all_beams() -> None:
    params = BeamParams(width=3, max_tokens=8, min_tokens=8, early_stopping="never")
    rows = rows_of(Table(0, 12, 4))
    short = start(params, max_tokens=3)
    beams = [[5]]
    while not short.is_done:
        beams = [[*beams[c.parent], c.token_id] for c in short.advance(rows(beams))]
    answer = search(rows, Case(prompt=[5], params=replace(params, max_tokens=3, min_tokens=3)))
    assert short.hypotheses == answer.hypotheses
    assert {found.finish_reason for found in short.hypotheses} == {"length"}


def test_scores_below_those_of_empty_slots_are_still_hypotheses() -> None:
    """`generate` returns nothing but padding here."""
    params = BeamParams(width=3, max_tokens=200, length_penalty=-4.0)
    answer = search(rows_of(Table(0, 12, 4)), Case(prompt=[5], params=params))
    assert [len(found.token_ids) for found in answer.hypotheses] == [200] * 3
    assert all(found.score < -1e9 for found in answer.hypotheses)


def test_one_beam_is_greedy_where_sums_would_hide_the_difference() -> None:
    """The larger of two logits wins although their sums with what came before are equal in float32."""
    state = start(BeamParams(width=1, max_tokens=60, min_tokens=60))
    for step in range(59):
        logits = torch.full((1, 1000), 0.0)
        logits[0, 7], logits[0, 900] = 1e-7, 2e-7
        assert state.advance(logits) == [Continuation(0, 900)], step
    assert state.scores[0] < -400


def test_what_could_not_be_served_is_an_error_of_the_caller() -> None:
    state = start(BeamParams(width=2, max_tokens=1))
    with pytest.raises(AssertionError, match="2 rows of logits for 1 beams"):
        state.advance(torch.zeros(2, 5))
    state.advance(torch.zeros(1, 5))
    with pytest.raises(AssertionError, match="over"):
        state.advance(torch.zeros(2, 5))
