"""The sampler against a plain reference and against transformers; what a row's token may and may not depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixrt.kernels import draws
from radixrt.kernels.draws import draw_key, gumbel_noise
from radixrt.runtime import sampler
from radixrt.runtime.backends import choose_draw
from radixrt.runtime.params import SamplingParams
from radixrt.runtime.sampler import History, Sampled, SamplerRow, _largest

VOCAB = 24
EOS = frozenset({2})


def make_row(
    params: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = (), seed: int = 0, position: int = 0
) -> SamplerRow:
    history = History(np.array(prompt, dtype=np.int32))
    for token_id in output:
        history.add(token_id)
    return SamplerRow(
        params=params,
        history=history,
        seed=(seed,),
        path=(0,),
        position=position,
        num_generated=len(output),
        eos_token_ids=EOS,
    )


def sample(logits: torch.Tensor | Sequence[torch.Tensor], rows: Sequence[SamplerRow]) -> list[Sampled]:
    """What every drawer says that is there."""
    given = [row.numpy() for row in logits]
    expected = sampler.sample(given, rows, draws.draw)
    assert sampler.sample(given, rows, choose_draw().draw) == expected
    return expected


def choose(logits: Sequence[float] | np.ndarray[Any, Any], params: SamplingParams, **fields: Any) -> int:
    return sample(torch.tensor(np.array([logits]), dtype=torch.float32), [make_row(params, **fields)])[0].token_id


# -- the reference --------------------------------------------------------------------------------------------------


def reference(logits: list[float], row: SamplerRow, prompt: Sequence[int], output: Sequence[int]) -> int:
    """One row's token, one token id at a time."""
    params, scores = row.params, dict(enumerate(logits))
    for token_id, bias in dict(params.logit_bias).items():
        scores[token_id] += bias
    if len(output) < params.min_tokens:
        for token_id in params.ending_token_ids(EOS):
            scores[token_id] = -math.inf
    for token_id in {*prompt, *output}:
        worse = scores[token_id] < 0
        scores[token_id] *= params.repetition_penalty if worse else 1 / params.repetition_penalty
    for token_id in set(output):
        scores[token_id] -= params.presence_penalty + params.frequency_penalty * list(output).count(token_id)
    ranked = sorted(scores, key=lambda token_id: (-scores[token_id], token_id))
    if params.temperature == 0:
        return ranked[0]
    ranked = ranked[: params.top_k]
    weights = {i: math.exp((scores[i] - scores[ranked[0]]) / params.temperature) for i in ranked}
    total, mass, kept = sum(weights.values()), 0.0, []
    for token_id in ranked:
        if mass < params.top_p * total or params.top_p == 1:
            kept.append(token_id)
        mass += weights[token_id]
    kept = [token_id for token_id in kept if weights[token_id] >= params.min_p]
    noise = gumbel_noise(draw_key(row.seed, row.path, row.position), np.arange(len(logits)))
    return max(sorted(kept), key=lambda i: (scores[i] - scores[ranked[0]]) / params.temperature + noise[i])


TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB)  # many ties
PARAMS = st.builds(
    SamplingParams,
    min_tokens=st.sampled_from([0, 0, 3]),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
    top_k=st.none() | st.integers(1, VOCAB + 2),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.6]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 2.5, 100.0]), max_size=3),
    stop_token_ids=st.sets(st.integers(0, VOCAB - 1), max_size=3),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
CASES = st.tuples(LOGITS, PARAMS, TOKENS, st.lists(st.integers(0, VOCAB - 1), max_size=6), st.integers(0, 99))


def row_of(case: tuple[list[float], SamplingParams, list[int], list[int], int]) -> SamplerRow:
    return make_row(case[1], case[2], case[3], seed=case[4])


@given(CASES)
def test_equals_the_plain_reference(case: Any) -> None:
    row = row_of(case)
    [sampled] = sample(torch.tensor([case[0]]), [row])
    assert sampled.token_id == reference(case[0], row, case[2], case[3])


@given(st.lists(CASES, min_size=1, max_size=6), st.randoms())
def test_a_row_depends_on_neither_its_neighbours_nor_its_place(cases: list[Any], random: Any) -> None:
    logits, rows = torch.tensor([case[0] for case in cases]), [row_of(case) for case in cases]
    before = logits.clone()
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    order = random.sample(range(len(rows)), len(rows))
    assert sample(logits, rows) == alone
    assert sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 17])
def test_log_probabilities_have_the_same_bits_in_any_batch(num_rows: int) -> None:
    logits = torch.randn(num_rows, 5003, generator=torch.Generator().manual_seed(num_rows)) * 5
    rows = [make_row(SamplingParams(logprobs=20, top_p=0.9), seed=i) for i in range(num_rows)]
    assert sample(logits, rows) == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(num_rows)]


# -- whole vocabularies ---------------------------------------------------------------------------------------------

LARGE = 17_000  # more than one piece of words
NORMAL = np.random.default_rng(0).standard_normal(LARGE).astype(np.float32)
SHAPES = {
    "flat": np.zeros(LARGE, dtype=np.float32),
    "wide": NORMAL,
    "narrow": 4 * NORMAL,
    "peaked": np.where(np.arange(LARGE) == 16_999, 30, NORMAL).astype(np.float32),
    "tied": np.round(2 * NORMAL),
    "masked": np.where(np.arange(LARGE) % 1_000 < 990, -np.inf, NORMAL).astype(np.float32),
}
FILTERS: list[dict[str, Any]] = [
    *({}, {"temperature": 1e-300}, {"temperature": 1e-7}, {"temperature": 0.3}, {"temperature": 1e7}),
    *({"top_p": 1e-9}, {"top_p": 0.01}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_p": 1 - 1e-6}, {"top_p": 1 - 1e-16}),
    *({"top_k": 1}, {"top_k": 700}, {"top_k": LARGE - 1}, {"top_k": LARGE}, {"min_p": 1e-300}, {"min_p": 0.2}),
    *({"min_p": 1.0}, {"top_k": 9_000, "top_p": 0.6, "min_p": 0.3}, {"top_p": 0.5, "temperature": 1e308}),
    {"top_p": 0.7, "min_p": 0.01, "temperature": 1e-9},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_plain_reference_over_a_whole_vocabulary(shape: str, filters: dict[str, Any]) -> None:
    logits = SHAPES[shape]
    for position in range(2):
        row = make_row(SamplingParams(**filters), position=position)
        [sampled] = sample([torch.from_numpy(logits)], [row])
        assert sampled.token_id == reference(logits.tolist(), row, [], [])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9])
def test_draws_do_not_leave_the_nucleus(shape: str, top_p: float) -> None:
    logits = SHAPES[shape]
    probs = np.exp(logits.astype(np.float64) - float(logits.max()))
    order = np.argsort(-logits, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    nucleus = set(order[before < top_p * probs.sum()].tolist())
    rows = [make_row(SamplingParams(top_p=top_p), position=position) for position in range(100)]
    drawn = {token.token_id for token in sample([torch.from_numpy(logits)] * len(rows), rows)}
    assert drawn <= nucleus


@pytest.mark.parametrize("second", [-0.1, -0.4, -0.7, -1.0])
@pytest.mark.parametrize("off", [-1e-9, 1e-9])
def test_a_nucleus_ends_where_float64_says(second: float, off: float) -> None:
    """It is id 5 alone up to exactly its share, to which the unlikely ids count as well."""
    logits = np.full(LARGE, -15, dtype=np.float32)
    logits[[5, 9]] = 0, second
    share = 1 / float(np.exp(logits.astype(np.float64)).sum())
    assert kept_by(SamplingParams(top_p=share + off), logits, 60) == ({5} if off < 0 else {5, 9})


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_change_nothing(num_threads: int) -> None:
    rows = [make_row(SamplingParams(logprobs=5, **filters)) for filters in FILTERS]
    logits = [torch.from_numpy(SHAPES["narrow"])] * len(rows)
    expected, default = sample(logits, rows), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert sample(logits, rows) == expected
    finally:
        torch.set_num_threads(default)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(0, 32))
def test_the_largest_are_a_sort_s_first(values: list[int], count: int) -> None:
    order = np.argsort(-np.array(values), kind="stable")
    assert _largest(np.array(values, dtype=np.float32), count).tolist() == sorted(order[:count].tolist())


# -- transformers ---------------------------------------------------------------------------------------------------


def kept_by(params: SamplingParams, logits: np.ndarray[Any, Any], draws: int = 1_000) -> set[int]:
    """The ids that are ever drawn. Near-equal probabilities let 1,000 draws find all of a few."""
    return {choose(logits, params, position=position) for position in range(draws)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("fields", "warpers"),
    [
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.6}, [TopPLogitsWarper(0.6)]),
        ({"min_p": 0.6}, [MinPLogitsWarper(0.6)]),
        ({"top_k": 9, "top_p": 0.7, "min_p": 0.7}, [TopKLogitsWarper(9), TopPLogitsWarper(0.7), MinPLogitsWarper(0.7)]),
        ({"temperature": 0.3, "top_p": 0.8}, [TemperatureLogitsWarper(0.3), TopPLogitsWarper(0.8)]),
    ],
    ids=["top_k", "top_p", "min_p", "all", "temperature"],
)
def test_filters_keep_what_transformers_keeps(fields: Any, warpers: list[LogitsProcessor], seed: int) -> None:
    scores = torch.rand(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits = scores[0].numpy()
    for warper in warpers:
        scores = warper(torch.tensor([[0]]), scores)
    assert kept_by(SamplingParams(**fields), logits) == set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("penalty", [1.0, 1.1, 1.7, 0.6])
def test_greedy_with_a_repetition_penalty_takes_what_transformers_takes(penalty: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, VOCAB, generator=generator) * 3
    ids = torch.randint(0, VOCAB, (50, 12), generator=generator)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone()).argmax(dim=-1).tolist()
    params = SamplingParams(temperature=0, repetition_penalty=penalty)
    rows = [make_row(params, prompt=line[:7], output=line[7:]) for line in ids.tolist()]
    assert [sampled.token_id for sampled in sample(logits, rows)] == expected


# -- choices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=1)], ids=["greedy", "top_k=1"])
@pytest.mark.parametrize("fields", [{}, {"presence_penalty": 1.0}], ids=str)
def test_ties_go_to_the_lowest_id(params: SamplingParams, fields: Any) -> None:
    logits = torch.zeros(64, 49_152)
    best = torch.randint(0, 49_152, (64, 9), generator=torch.Generator().manual_seed(0))
    logits.scatter_(1, best, 1.0)
    sampled = sample(logits, [make_row(replace(params, **fields))] * 64)
    assert [token.token_id for token in sampled] == best.amin(dim=-1).tolist()


def test_top_k_of_equals_keeps_the_lowest_ids() -> None:
    assert kept_by(SamplingParams(top_k=3), np.array([0.0, 1, 0, 0, 0, 1])) == {0, 1, 5}
    assert kept_by(SamplingParams(top_p=0.5), np.zeros(8)) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300, 5e-324])
def test_low_temperatures_approach_greedy(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(size=(200, VOCAB)).astype(np.float32) * 30
    for position, line in enumerate(logits):
        drawn = choose(line, SamplingParams(temperature=temperature), position=position)
        assert drawn == line.argmax()


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e30])
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0, 1e308])
def test_extremes_neither_overflow_nor_warn(scale: float, temperature: float) -> None:
    logits = np.linspace(-scale, scale, VOCAB)
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1, repetition_penalty=100.0, logprobs=3)
    with np.errstate(all="raise", under="ignore"):
        assert 0 <= choose(logits, params, prompt=range(VOCAB)) < VOCAB


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.1, 0.2, 0.3, 0.4]),
        (SamplingParams(temperature=0.5), [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        (SamplingParams(top_k=2), [0, 0, 3 / 7, 4 / 7]),
        (SamplingParams(top_p=0.75), [0, 2 / 9, 3 / 9, 4 / 9]),
        (SamplingParams(min_p=0.3), [0, 2 / 9, 3 / 9, 4 / 9]),
        (SamplingParams(logit_bias={0: math.log(4)}), [4 / 13, 2 / 13, 3 / 13, 4 / 13]),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "logit_bias"],
)
def test_draws_follow_the_distribution(params: SamplingParams, expected: list[float]) -> None:
    logits = np.log([0.1, 0.2, 0.3, 0.4]) + 5
    draws = np.bincount([choose(logits, params, position=position) for position in range(4_000)], minlength=4) / 4_000
    assert draws == pytest.approx(expected, abs=0.035)
    assert all(draws[np.array(expected) == 0] == 0)


def test_what_ends_a_sequence_is_masked_until_min_tokens() -> None:
    logits = np.zeros(VOCAB)
    logits[[2, 5, 7]] = 30, 20, 10
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[5])
    assert [choose(logits, params, output=[0] * n) for n in range(4)] == [7, 7, 2, 2]
    assert choose(logits, replace(params, ignore_eos=True)) == 2


def test_penalties_look_at_what_they_should() -> None:
    logits, fields = np.array([1.0, 0.9, 0.5, 0.0]), {"prompt": [0], "output": [1]}
    assert choose(logits, SamplingParams(temperature=0, repetition_penalty=3.0), **fields) == 2
    assert choose(logits, SamplingParams(temperature=0, presence_penalty=1.0), **fields) == 0
    assert choose(logits, SamplingParams(temperature=0, presence_penalty=1.0), output=[0, 1]) == 2
    assert choose(logits, SamplingParams(temperature=0, frequency_penalty=0.3), output=[0, 0, 0, 1]) == 1


# -- log-probabilities ----------------------------------------------------------------------------------------------


def test_log_probabilities_are_raw() -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, -2.0]])
    params = SamplingParams(
        temperature=0.3, top_k=1, logprobs=3, repetition_penalty=2.0, logit_bias={3: 100.0}, presence_penalty=1.0
    )
    [sampled] = sample(logits, [make_row(params, prompt=[0])])
    raw = torch.log_softmax(logits, dim=-1)[0].tolist()
    assert sampled.token_id == 3
    assert sampled.logprobs is not None
    assert (sampled.logprobs.sampled.token_id, sampled.logprobs.sampled.logprob) == (3, raw[3])
    assert [(top.token_id, top.logprob) for top in sampled.logprobs.top] == [(0, raw[0]), (2, raw[2]), (1, raw[1])]


def test_log_probabilities_come_as_asked_for() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0]] * 3)
    asked = [make_row(SamplingParams(temperature=0, logprobs=count)) for count in (None, 0, 20)]
    none, chosen, top = sample(logits, asked)
    assert none == Sampled(token_id=0)
    assert chosen.logprobs is not None
    assert chosen.logprobs.top == ()
    assert top.logprobs is not None
    assert [entry.token_id for entry in top.logprobs.top] == [0, 1, 2]
    assert top.logprobs.top[0] == top.logprobs.sampled == chosen.logprobs.sampled


# -- history --------------------------------------------------------------------------------------------------------


@given(TOKENS, TOKENS, TOKENS, st.sampled_from(["early", "late"]))
def test_history_counts_and_copies_are_independent(
    prompt: list[int], output: list[int], more: list[int], asked: str
) -> None:
    history = History(np.array(prompt, dtype=np.int32))
    if asked == "early":
        assert history.distinct_ids.tolist() == sorted(set(prompt))
    for token_id in output:
        history.add(token_id)
    other = history.copy()
    for token_id in more:
        other.add(token_id)
    for each, tokens in ((history, output), (other, output + more)):
        assert each.distinct_ids.tolist() == sorted({*prompt, *tokens})
        ids, counts = each.output_counts
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {i: tokens.count(i) for i in tokens}


def test_no_rows() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []
