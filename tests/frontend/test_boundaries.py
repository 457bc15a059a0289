"""What stands between a text and what is generated behind it: raw, healed or exact."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

import radixrt as rx
from radixrt.frontend.codec import Codec
from radixrt.frontend.testing import ScriptedBackend
from radixrt.runtime import Engine
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import MakeEngine, audit, default_tokenizer
from .test_codec import SPECIAL, TEXTS, WORDS, byte_pair_codecs


def engine_of(codec: Codec) -> Engine:
    return Engine(HashModel(vocab=codec._vocab_size), tokenizer=codec._tokenizer, num_pages=64, page_size=4)


@rx.program
def healed(s: rx.State, pieces: list[str]) -> tuple[str, tuple[int, ...], str, tuple[int, ...]]:
    for piece in pieces:
        s += piece
    before = s.tokens
    slot = s.gen(boundary="heal", max_tokens=6)
    return slot.value, slot.token_ids, s.text, (*before, -1, *s.tokens)


@settings(suppress_health_check=list(HealthCheck))
@given(byte_pair_codecs(), TEXTS, st.data())
def test_what_is_healed_begins_with_the_text_however_it_was_split(codec: Codec, text: str, data: st.DataObject) -> None:
    assume(text)
    engine = engine_of(codec)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    value, ids, after, tokens = healed.run(engine, [text])
    assert after.startswith(text)
    assert after == text + value
    kept, rest = codec.healed(text, is_first=True)
    assert codec.decode(kept) + rest == text
    at = tokens.index(-1) + 1
    assert list(tokens[at : at + len(kept)]) == kept
    assert tokens[at + len(kept) :][: len(ids)] == ids[: len(tokens) - at - len(kept)]
    assert healed.run(engine, pieces) == (value, ids, after, tokens)
    audit(engine)


@settings(suppress_health_check=list(HealthCheck))
@given(byte_pair_codecs(), TEXTS.filter(bool), TEXTS, st.integers(0, 20))
def test_a_fork_before_a_healed_generation_changes_nothing(codec: Codec, a: str, b: str, page_size: int) -> None:
    engine = engine_of(codec)

    @rx.program
    def whole(s: rx.State) -> tuple[str, tuple[int, ...]]:
        s += a + b
        return s.gen(boundary="heal", max_tokens=5, temperature=0.0).value, s.tokens

    @rx.program
    def parts(s: rx.State) -> tuple[str, tuple[int, ...]]:
        s += a
        with s.fork(2) as branches:
            s.adopt(branches[1])
        s += b
        return s.gen(boundary="heal", max_tokens=5, temperature=0.0).value, s.tokens

    assert whole.run(engine) == parts.run(engine)


def test_what_cannot_change_is_all_that_is_sent() -> None:
    tokenizer = default_tokenizer()
    engine = Engine(HashModel(vocab=49_152), tokenizer=tokenizer, num_pages=64, page_size=1)
    text = "The capital of France is Par"

    @rx.program
    def asks(s: rx.State) -> tuple[str, int]:
        s += text
        slot = s.gen(boundary="heal", max_tokens=1)
        return s.text, slot.usage.prompt_tokens

    said, prompt_len = asks.run(engine)
    assert said.startswith(text)
    stable = tokenizer.encode("The capital of France is")
    assert prompt_len == len(stable)
    audit(engine)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_special_token_at_the_end_stays(page_size: int) -> None:
    tokenizer = default_tokenizer()
    engine = Engine(HashModel(vocab=49_152), tokenizer=tokenizer, num_pages=256, page_size=page_size)
    for text, more in (("def f(x):<|endoftext|>", ""), ("a b<|im_end|>", ""), ("a <|im_start|>", "user")):
        tokens = healed.run(engine, [text + more])[3]
        after, sent = tokens[tokens.index(-1) + 1 :], tokenizer.encode(text)
        assert after[: len(sent)] == tuple(sent)

    @rx.program
    def chat(s: rx.State) -> tuple[tuple[int, ...], tuple[int, ...]]:
        with s.user():
            s += "Hi"
        with s.assistant():
            before = s.tokens
            s.gen(boundary="heal", max_tokens=3)
            return before, s.tokens

    before, after = chat.run(engine)
    assert any(not tokenizer.token_bytes(token_id) for token_id in before)
    last = max(at for at, token_id in enumerate(before) if not tokenizer.token_bytes(token_id))
    assert after[: last + 1] == before[: last + 1]


def test_a_special_token_at_the_end_stays_in_random_vocabularies() -> None:
    @settings(suppress_health_check=list(HealthCheck), max_examples=settings().max_examples // 2)
    @given(byte_pair_codecs(), TEXTS, TEXTS)
    def check(codec: Codec, a: str, b: str) -> None:
        ids = codec.encode(a + SPECIAL)
        kept, rest = codec.healed(a + SPECIAL + b)
        assert kept[: len(ids)] == ids
        assert b.endswith(rest)

    check()


@given(WORDS.filter(bool))
def test_the_real_tokenizer_heals_the_last_word(text: str) -> None:
    if any("\ud800" <= char <= "\udfff" for char in text):
        return
    codec = Codec(default_tokenizer(), 49_152)
    kept, rest = codec.healed(text, plain=True, is_first=True)
    ids = codec.encode(text, plain=True)
    assert kept or not ids
    assert ids[: len(kept)] == kept
    assert codec.decode(kept) + rest == codec.decode(ids)


def test_stop_strings_count_in_what_is_new_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()

    @rx.program
    def stopped(s: rx.State) -> tuple[str, str]:
        s += "x Q: what?\nA:"
        slot = s.gen(boundary="heal", stop=["\n", "a"], max_tokens=40)
        return slot.value, s.text

    value, text = stopped.run(engine)
    assert text == "x Q: what?\nA:" + value
    assert "a" not in value


def test_exact_refuses_what_could_change(make_engine: MakeEngine) -> None:
    engine = make_engine(HashModel(vocab=310), page_size=4)

    @rx.program
    def strict(s: rx.State) -> str:
        s += "some text"
        with pytest.raises(rx.InvalidRequest, match=r"boundary: exact.*' text'"):
            s.gen(boundary="exact")
        s.gen(max_tokens=2)
        return s.gen(boundary="exact", max_tokens=2).value  # behind generated tokens

    assert strict.run(engine)

    @rx.program
    def wrong(s: rx.State) -> None:
        s += "x"
        s.gen(boundary="soft")  # type: ignore[call-overload]

    with pytest.raises(rx.InvalidRequest, match="boundary: 'soft'"):
        wrong.run(engine)


def test_a_scripted_answer_goes_on_behind_the_text() -> None:
    backend = ScriptedBackend({"Par": "is.", "is.": " Yes."}, ByteTokenizer())

    @rx.program
    def asks(s: rx.State) -> str:
        s += "It is Par"
        s.gen(boundary="heal")
        s.gen()
        return s.text

    assert asks.run(backend) == "It is Paris. Yes."


def test_a_token_that_spans_the_end_of_a_prefix_counts() -> None:
    tokenizer = default_tokenizer()
    [spanning] = tokenizer.encode(" Paris")
    engine = Engine(HashModel(vocab=49_152), tokenizer=tokenizer, num_pages=64)
    params = rx.SamplingParams(max_tokens=1, prefix=" Par", logit_bias={spanning: 100.0}, temperature=0.0)
    [output] = engine.generate("The capital of France is", params)
    assert (output.choices[0].token_ids, output.text) == ((spanning,), "is")


def test_the_real_model_goes_on_with_a_word_that_was_begun() -> None:
    default_tokenizer()  # or the model is not installed

    @rx.program
    def ask(s: rx.State, text: str) -> str:
        s += text
        return s.gen(boundary="heal", max_tokens=3, temperature=0.0).value

    with rx.Engine("smollm2-135m", num_pages=64) as engine:
        assert ask.run(engine, "The capital of France is ").startswith("Paris")
        assert ask.run(engine, "Two plus two is fo").startswith("ur")
        assert ask.run(engine, "See https:").startswith("//www")
