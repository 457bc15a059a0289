"""How texts of grammars end, and runs of tokens without a choice: cut, stopped, forked and counted like any others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from radixrt.runtime import Engine, FinishEvent, Grammar, Handle, Output, SamplingParams
from radixrt.runtime.constraint import Grammars
from radixrt.runtime.intake import branch_pages
from radixrt.runtime.params import GrammarEnd
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import MakeEngine, audit
from .test_grammar import ENDS, EOS, GRAMMARS, belongs, make_model

LETTERS = {code: 3.0 for code in b"abcdefghijklm"}


def run_to_the_end(engine: Engine) -> dict[Handle, Output]:
    """Step, with an audit behind each, until nothing is left to do."""
    outputs: dict[Handle, Output] = {}
    while engine.stats().num_running or engine.stats().num_waiting:
        outputs |= {event.handle: event.output for event in engine.step() if isinstance(event, FinishEvent)}
        engine.check()
    return outputs


# -- a text that ends at whatever else the model would say --------------------------------------------------------


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["[a-m]*", "[a-m]+", "([a-m]{2})+"]))
def test_it_is_what_the_model_says_anyway_up_to_where_that_leaves_the_grammar(
    seed: int, temperature: float, pattern: str
) -> None:
    with Engine(HashModel(vocab=128), tokenizer=ByteTokenizer(), num_pages=64) as engine:
        params = SamplingParams(max_tokens=30, temperature=temperature, logit_bias=LETTERS, seed=seed)
        free = engine.generate("text", params)[0].choices[0]
        held = SamplingParams(
            max_tokens=30,
            temperature=temperature,
            logit_bias=LETTERS,
            seed=seed,
            grammar=Grammar.regex(pattern),
            grammar_end="any",
        )
        choice = engine.generate("text", held)[0].choices[0]
    num_said = next((n for n, token_id in enumerate(free.token_ids) if token_id not in LETTERS), 30)
    if num_said == 30:
        assert (choice.token_ids, choice.finish_reason) == (free.token_ids, "length")
    elif (pattern.endswith("*") or num_said > 0) and (num_said % 2 == 0 or "{2}" not in pattern):
        assert (choice.token_ids, choice.finish_reason) == (free.token_ids[: num_said + 1], "stop")
        assert choice.text == bytes(free.token_ids[:num_said]).decode()
    else:  # it had to go on where the model would not have
        assert choice.token_ids[:num_said] == free.token_ids[:num_said]
        assert choice.token_ids[num_said] in LETTERS


def test_what_ends_it(make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())
    other = {98: 50.0}  # "b"

    def ends(pattern: str, **given: Any) -> tuple[str, str, int]:
        params = {"temperature": 0.0, "max_tokens": 20} | given
        (choice,) = engine.generate("t", SamplingParams(grammar=Grammar.regex(pattern), grammar_end="any", **params))[
            0
        ].choices
        return choice.text, choice.finish_reason, len(choice.token_ids)

    assert ends("a+", logit_bias=other) == ("a", "stop", 2)
    assert ends("a+", logit_bias=other, min_tokens=4) == ("aaaa", "stop", 5)
    assert ends("a+", logit_bias={EOS: 50.0}) == ("a", "stop", 2)
    assert ends("a+", logit_bias={EOS: 50.0}, ignore_eos=True) == ("a", "stop", 2)  # it cannot go on with the text
    assert ends("a+", logit_bias={97: 50.0}) == ("a" * 20, "length", 20)
    assert ends("a+", logit_bias={97: 50.0}, stop="aaa") == ("", "stop", 3)
    assert ends("a{5}", logit_bias=other) == ("aaaaa", "stop", 5)  # complete: nothing more is drawn
    assert ends("a{5}", max_tokens=5) == ("aaaaa", "stop", 5)
    assert ends("a{5}", max_tokens=4) == ("aaaa", "length", 4)
    assert ends("a{2}|a{4}", logit_bias=other) == ("aa", "stop", 3)


def test_an_ended_text_forks_from_within_and_not_from_behind(make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())
    params = SamplingParams(grammar=Grammar.regex("[a-m]{2,9}"), grammar_end="any", logit_bias=LETTERS, seed=1)
    (output,) = engine.generate("text", params)
    ids = output.choices[0].token_ids
    assert ids[-1] not in LETTERS
    (child,) = engine.fork(output.handle, at=4 + 1)
    text = bytes(ids[:1]).decode() + run_to_the_end(engine)[child].text
    assert belongs(text, Grammar.regex("[a-m]{2,9}"))
    with pytest.raises(ValueError, match="does not go on"):
        engine.fork(output.handle)


def test_a_character_that_was_left_unfinished_before_it_is_no_part_of_it(make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())
    params = SamplingParams(grammar=Grammar.choice(["x\N{REPLACEMENT CHARACTER}", "yy"]), seed=0)
    begun = list("é".encode()[:1])
    (output,) = engine.generate([[97, *begun]], params)
    assert output.text in ("x\N{REPLACEMENT CHARACTER}", "yy")
    parent = engine.generate("t", SamplingParams(max_tokens=1, logit_bias={begun[0]: 50.0}))[0]
    assert parent.choices[0].token_ids == tuple(begun)
    (child,) = engine.fork(parent.handle, params=params)
    assert run_to_the_end(engine)[child].text in ("x\N{REPLACEMENT CHARACTER}", "yy")


# -- tokens without a choice --------------------------------------------------------------------------------------


@given(
    grammar=st.sampled_from(GRAMMARS),
    grammar_end=st.sampled_from(["eos", "any"]),
    limits=st.tuples(st.integers(1, 30), st.integers(0, 30)),
    stop=st.sampled_from(["", '"', '": ', "a", "ae", "on", "x"]),
    page_size=st.sampled_from([1, 4, 16]),
    token_budget=st.sampled_from([3, 64]),
    slack=st.integers(0, 3),
    n=st.sampled_from([1, 3]),
    prefix_cache=st.booleans(),
)
def test_they_are_cut_and_stopped_like_any_others(
    *,
    grammar: Grammar,
    grammar_end: GrammarEnd,
    limits: tuple[int, int],
    stop: str,
    page_size: int,
    token_budget: int,
    slack: int,
    n: int,
    prefix_cache: bool,
) -> None:
    """Asking for log-probabilities gives each a row of its own: the same tokens, text and end."""

    def run(logprobs: int | None, num_pages: int) -> tuple[list[Any], list[tuple[int, int]]]:
        settings: dict[str, Any] = {"page_size": page_size, "token_budget": token_budget, "prefix_cache": prefix_cache}
        engine = Engine(make_model(), tokenizer=ByteTokenizer(), num_pages=num_pages, poison=True, **settings)
        params = SamplingParams(
            n=n,
            grammar=grammar,
            grammar_end=grammar_end,
            max_tokens=max(limits),
            min_tokens=min(limits),
            stop=stop or (),
            logit_bias=ENDS,
            logprobs=logprobs,
            seed=7,
        )
        for prompt in ("ab", "abc"):
            engine.submit(prompt, params)
        outputs = sorted(run_to_the_end(engine).items(), key=lambda item: item[0].number)
        audit(engine)
        told = [(one.text, one.token_ids, one.finish_reason) for _, out in outputs for one in out.choices]
        return told, [(out.usage.prompt_tokens, out.usage.completion_tokens) for _, out in outputs]

    few = branch_pages(3, 3 + max(limits), n, page_size) + slack
    together = run(None, few)
    assert together == run(0, 1000)
    for _, token_ids, reason in together[0]:
        assert len(token_ids) <= max(limits)
        assert reason == "stop" or len(token_ids) == max(limits)


class Merging(ByteTokenizer):
    """Bytes, and ids past them for texts that begin with one another."""

    __slots__ = ()
    MERGED = (b"aa", b"aab", b"ab", b"abc", b'{"', b'{"a', b'":', b'": ')

    def encode(self, text: str) -> list[int]:
        ids, data = list[int](), text.encode()
        while data:
            size = max([1, *(len(token) for token in self.MERGED if data.startswith(token))])
            ids.append(256 + self.MERGED.index(data[:size]) if size > 1 else data[0])
            data = data[size:]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return self.MERGED[token_id - 256] if token_id >= 256 else bytes([token_id])


@given(
    st.sampled_from(["aab", "aabc(ab){3}a", "(aa|b)abc", "a{7}b?", "(abc){2}|abd"]) | st.none(), st.integers(0, 2**32)
)
def test_text_without_a_choice_has_one_where_a_token_is_the_beginning_of_another(
    pattern: str | None, seed: int
) -> None:
    """Which tokens spell a text is the model's to say, though the text is not."""
    vocab = 256 + len(Merging.MERGED)
    schema = {"properties": {"ab": {"const": 1}}, "required": ["ab"], "additionalProperties": False, "type": "object"}
    grammar = Grammar.regex(pattern) if pattern is not None else Grammar.json_schema(schema)

    def run(logprobs: int | None) -> tuple[int, ...]:
        with Engine(HashModel(vocab=vocab), tokenizer=Merging(), num_pages=64, poison=True) as engine:
            params = SamplingParams(grammar=grammar, grammar_end="any", seed=seed, logprobs=logprobs)
            [output] = engine.generate([[1, 2]], params)
            assert output.choices[0].finish_reason == "stop"
            return output.choices[0].token_ids

    assert run(None) == run(0)


def test_they_are_decoded_tokens_of_one_step(make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())
    grammar = Grammar.regex("x{20}[yz]x{20}")
    (output,) = engine.generate("text", SamplingParams(grammar=grammar, seed=0))
    counters = engine.stats().counters
    assert (counters.steps, counters.computed, counters.decoded) == (2, 4, 20)
    assert output.usage.completion_tokens == 41
    assert output.usage.computed_tokens == 4


# -- many at once -------------------------------------------------------------------------------------------------


def test_grammars_of_many_requests_do_not_mix(make_engine: MakeEngine) -> None:
    """32 at once, each as it is alone."""
    ends: list[GrammarEnd] = ["eos", "any"] * 16
    params = [
        SamplingParams(grammar=grammar, logit_bias=ENDS, max_tokens=200, seed=number, grammar_end=end)
        for number, (grammar, end) in enumerate(zip(GRAMMARS[:32], ends, strict=True))
    ]
    engine = make_engine(make_model(), num_pages=1024)
    handles = [engine.submit(f"text {number % 3}", one) for number, one in enumerate(params)]
    outputs = run_to_the_end(engine)
    for number, (handle, one) in enumerate(zip(handles, params, strict=True)):
        (choice,) = outputs[handle].choices
        assert choice.finish_reason == "length" or belongs(choice.text, one.grammar or GRAMMARS[0])
        (alone,) = engine.generate(f"text {number % 3}", one)[0].choices
        assert alone.token_ids == choice.token_ids


def test_masks_found_on_several_threads_are_those_found_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def masks(num_threads: int) -> list[Any]:
        monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
        grammars = Grammars(ByteTokenizer(), 256)
        places = [grammars.start(grammar, frozenset([0]), []) for grammar in GRAMMARS]
        found = []
        for _ in range(6):
            for place in places:
                place.advance(int(place.continuing.argmax()))
            grammars.look(places)
            places = [place for place in places if place.continuing.any()]
            found += [(np.packbits(place.allowed).tobytes(), place.forced, place.error) for place in places]
        return found

    assert masks(4) == masks(1)
