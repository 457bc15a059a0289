"""SamplingParams and BeamParams: what is accepted and how it is stored, what is refused and in which words."""

from __future__ import annotations

import json
import math
import pickle
import time
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any, overload

import numpy as np
import pytest
from hypothesis import given, strategies as st

from radixrt.runtime.errors import InvalidRequest
from radixrt.runtime.params import MAX_STOP_CHARS, MAX_STOPS, BeamParams, SamplingParams


class Endless(Sequence[Any]):
    """A sequence that says it holds 10**9 items and fails when one is looked at."""

    def __len__(self) -> int:
        return 10**9

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        raise AssertionError("looked at an item")


NAN, INF = math.nan, math.inf

REFUSED: list[tuple[str, list[Any]]] = [
    ("max_tokens", [0, -1, 2**31, 10**5000, 1.0, True, None, "5", [5], NAN]),
    ("min_tokens", [-1, 65, 10**9, 0.0, False, None, "0"]),
    ("temperature", [-0.1, -1e-300, NAN, INF, -INF, True, None, "1", 10**400, 1j, [1.0]]),
    ("top_k", [0, -1, 1.0, True, "1", NAN, 2**31]),
    ("top_p", [0, 0.0, -0.5, 1.0000001, 2, NAN, INF, None, True, "0.5"]),
    ("min_p", [-1e-9, 1.1, NAN, INF, None, False]),
    ("repetition_penalty", [0, 0.0, -1, NAN, INF, 1e-300, 1e300, None, True]),
    ("presence_penalty", [-2.1, 2.1, NAN, INF, None, True, "0"]),
    ("frequency_penalty", [-2.1, 2.1, NAN, -INF, None, True]),
    ("ignore_eos", [0, 1, None, "yes"]),
    ("grammar_end", [0, True, None, "EOS", ["any"]]),
    ("logprobs", [-1, 21, 10**9, True, 1.0, "5"]),
    ("seed", [2**64, -(2**63) - 1, 10**5000, 1.5, True, "1"]),
    ("stop", ["", [""], ["a", ""], [1], 5, None, b"a", {"a"}, "a" * 257, ["a"] * 17, "\ud800", Endless()]),
    ("stop_token_ids", [[-1], [2**31], [2**63], [1.0], [True], ["1"], 5, None, "12", [1] * 129, Endless()]),
    (
        "logit_bias",
        [
            *({-1: 1.0}, {2**31: 1.0}, {0: NAN}, {0: INF}, {0: 101.0}, {0: "1"}, {"0": 1.0}, {True: 1.0}, {0: True}),
            *([(0, 1.0, 2.0)], [5], [(0, 1.0), (0, 2.0)], None, 5, "0", dict.fromkeys(range(1025), 1.0), Endless()),
        ],
    ),
]


BEAM_REFUSED: list[tuple[str, list[Any]]] = [
    ("width", [0, -1, 257, 1.0, True, None, "4", [4]]),
    ("max_tokens", [0, -1, 2**31, 1.0, True, None]),
    ("min_tokens", [-1, 65, 0.0, False, None]),
    ("length_penalty", [-4.1, 4.1, NAN, INF, -INF, None, True, "1", 10**400]),
    ("early_stopping", [0, 1, None, "always", "", np.zeros(3), [True]]),
    ("num_return", [0, 5, -1, 1.0, True, "1"]),
    ("stop_token_ids", [[-1], [2**31], [1.0], ["1"], 5, None, [1] * 129, Endless()]),
    ("ignore_eos", [0, 1, None, "yes"]),
]
ALL_REFUSED = [(SamplingParams, *row) for row in REFUSED] + [(BeamParams, *row) for row in BEAM_REFUSED]


@pytest.mark.parametrize(
    ("kind", "field", "values"), ALL_REFUSED, ids=[f"{kind.__name__}-{field}" for kind, field, _ in ALL_REFUSED]
)
def test_refusals_are_one_line_that_names_field_given_and_allowed(kind: Any, field: str, values: list[Any]) -> None:
    for value in values:
        start = time.perf_counter()
        with pytest.raises(InvalidRequest) as caught:
            kind(**{field: value})
        assert time.perf_counter() - start < 1
        line = str(caught.value)
        assert line.startswith(f"{field}: ")
        assert " given; allowed: " in line
        assert len(line) < 250
        assert line.isprintable()


def test_unknown_fields_are_refused_with_close_names() -> None:
    with pytest.raises(InvalidRequest, match=r"'max_token': no such field; known: max_tokens"):
        SamplingParams(**{"max_token": 5})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="known: n, best_of, max_tokens, min_tokens, temperature"):
        SamplingParams(**{"x" * 10**6: 5})  # type: ignore[arg-type]


def test_values_are_stored_plain() -> None:
    params = SamplingParams(
        max_tokens=np.int64(5),  # type: ignore[arg-type]
        temperature=1,
        top_p=np.float32(0.5),  # type: ignore[arg-type]
        stop="END",
        stop_token_ids=[7, 3, 7],
        logit_bias={9: -1, 2: 0.5},
    )
    assert (type(params.max_tokens), type(params.temperature), type(params.top_p)) == (int, float, float)
    assert params.stop == ("END",)
    assert params.stop_token_ids == (3, 7)
    assert params.logit_bias == ((2, 0.5), (9, -1.0))
    assert hash(params) == hash(replace(params))


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(top_p=1.0, min_p=1.0, repetition_penalty=0.01, presence_penalty=2.0, frequency_penalty=-2.0)
    SamplingParams(top_p=5e-324, temperature=5e-324, min_tokens=64, logprobs=20, seed=2**64 - 1, top_k=1)
    SamplingParams(stop=["a" * MAX_STOP_CHARS] * MAX_STOPS, stop_token_ids=range(128), seed=-(2**63), logprobs=0)
    SamplingParams(logit_bias=dict.fromkeys(range(1024), 100.0), stop=[], temperature=1e300)


def test_what_is_given_is_not_kept() -> None:
    stop, bias = ["a"], {1: 1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 2.0
    assert params == SamplingParams(stop="a", logit_bias={1: 1.0})
    with pytest.raises(FrozenInstanceError):
        params.seed = 5  # type: ignore[misc]


def test_replace_checks_again() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens: 5 given; allowed: at most max_tokens, which is 4"):
        replace(SamplingParams(min_tokens=5), max_tokens=4)


@pytest.mark.parametrize(
    ("params", "line"),
    [
        (SamplingParams(stop_token_ids=[9, 10]), "stop_token_ids: 10 given; allowed: ids in [0, 10)"),
        (SamplingParams(logit_bias={10: 1.0}), "logit_bias: 10 given; allowed: ids in [0, 10)"),
        (SamplingParams(min_tokens=1, stop_token_ids=range(9)), "min_tokens: 1 given; allowed: 0 where every token"),
        (SamplingParams(stop="a"), "stop: a value of type tuple of 1 items given; allowed: none where the engine"),
    ],
)
def test_checks_that_need_the_model(params: SamplingParams, line: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params.check_against(10, has_text=False, eos_token_ids=frozenset({9}))
    assert str(caught.value).startswith(line)
    params.check_against(11, has_text=True, eos_token_ids=frozenset({9}))


def test_what_ends_a_sequence() -> None:
    eos = frozenset({2})
    assert SamplingParams(stop_token_ids=[5]).ending_token_ids(eos) == {2, 5}
    assert SamplingParams(stop_token_ids=[5], ignore_eos=True).ending_token_ids(eos) == {5}
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.integers(50, 100),
        min_tokens=st.integers(0, 50),
        temperature=st.floats(0, 1e308),
        top_k=st.none() | st.integers(1, 100),
        top_p=st.floats(0, 1, exclude_min=True),
        logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=5),
        stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=3),
        stop_token_ids=st.sets(st.integers(0, 99), max_size=5),
        ignore_eos=st.booleans(),
        grammar_end=st.sampled_from(["eos", "any"]),
        logprobs=st.none() | st.integers(0, 20),
        seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    )
)
def test_round_trips(params: SamplingParams) -> None:
    assert SamplingParams(**json.loads(json.dumps(params.to_dict()))) == params
    assert pickle.loads(pickle.dumps(params)) == params


def test_beams_that_a_vocabulary_cannot_fill_are_refused() -> None:
    params = BeamParams(width=6, stop_token_ids=[3, 4])
    params.check_against(9, eos_token_ids=frozenset({3, 5}))
    with pytest.raises(InvalidRequest, match=r"width: 6 given; allowed: at most 5, the number of token ids that end"):
        params.check_against(8, eos_token_ids=frozenset({3, 5}))
    replace(params, ignore_eos=True).check_against(8, eos_token_ids=frozenset({3, 5}))
    with pytest.raises(InvalidRequest, match=r"stop_token_ids: 4 given; allowed: ids in \[0, 4\)"):
        params.check_against(4)


def test_unknown_beam_fields_are_refused_with_close_names() -> None:
    with pytest.raises(InvalidRequest, match=r"'num_returned': no such field; known: num_return"):
        BeamParams(**{"num_returned": 5})  # type: ignore[arg-type]


@given(
    st.builds(
        BeamParams,
        width=st.integers(8, 256),
        max_tokens=st.integers(50, 100),
        min_tokens=st.integers(0, 50),
        length_penalty=st.floats(-4, 4),
        early_stopping=st.sampled_from([False, True, "never"]),
        num_return=st.none() | st.integers(1, 8),
        stop_token_ids=st.sets(st.integers(0, 99), max_size=5),
        ignore_eos=st.booleans(),
    )
)
def test_beam_params_round_trip(params: BeamParams) -> None:
    assert BeamParams(**json.loads(json.dumps(params.to_dict()))) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(replace(params))
