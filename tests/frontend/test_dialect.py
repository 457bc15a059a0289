"""What a server can do and what is asked of it: models, ids, fields, grammars, and text as ids."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

import radixrt as rx
from radixrt.frontend.answer import holds
from radixrt.frontend.plaintext import TextTokenizer
from radixrt.frontend.url import UrlBackend
from radixrt.runtime import Engine
from radixrt.runtime.testing import HashModel

from .conftest import default_tokenizer
from .loopback import Habits, once, serving, with_ids


def test_the_model_s_tokenizer_makes_a_server_what_an_engine_is() -> None:
    model, tokenizer = HashModel(vocab=49_152), default_tokenizer()

    def talk(where: Any) -> list[Any]:
        with rx.session(where, system="Be brief.") as chat:
            said: list[Any] = [chat.send(text, max_tokens=5, temperature=0.0).token_ids for text in ("Hi", "And, été?")]
            return [*said, chat.state.tokens, chat.messages]

    with (
        serving(model=model, tokenizer=tokenizer) as server,
        rx.connect(server.url, tokenizer="smollm2-135m") as client,
    ):
        assert talk(client) == talk(Engine(HashModel(vocab=49_152), tokenizer=tokenizer, num_pages=64))
        assert client._dialect.tells_ids("/completions")


def test_a_server_that_does_not_stream_answers_all_the_same() -> None:
    said: list[str] = []
    for habits in (Habits(streams=False), Habits()):
        with serving(habits) as one, rx.connect(one.url) as backend:
            said.append(once.run(backend, max_tokens=20))
    assert said[0] == said[1]


def test_deltas_add_up() -> None:
    with serving() as server, rx.connect(server.url, model="hash") as backend:
        params = rx.SamplingParams(max_tokens=30, seed=0, stop="a")
        handle = backend.submit(list(b"begin"), params, "", priority=0)
        events: list[Any] = []
        while not backend.is_idle:
            events += backend.step()
        [choice] = events[-1].output.choices
        assert events[-1].handle == handle
        assert "".join(event.text for event in events[:-1]) == choice.text
        assert tuple(event.token_id for event in events[:-2]) == choice.token_ids == tuple(choice.text.encode())


def test_a_tokenizer_that_is_not_there_is_refused() -> None:
    with pytest.raises(rx.ModelError, match="no such directory"):
        rx.connect("http://127.0.0.1", tokenizer="./not/there")


def test_the_model_is_the_only_one_or_named() -> None:
    with serving(Habits(models=("a", "b"))) as two:
        with rx.connect(two.url) as backend, pytest.raises(rx.InvalidRequest, match="the server has a, b; give model="):
            once.run(backend)
        with rx.connect(two.url, model="b") as backend:
            once.run(backend, max_tokens=1)
        assert two.bodies[-1]["model"] == "b"


def test_a_server_without_ids_and_a_tokenizer_that_is_not_its_own() -> None:
    with (
        serving(Habits(takes_ids=False)) as text_only,
        with_ids(text_only) as backend,
        pytest.raises(rx.ServerError, match="answered 400: prompt: no ids"),
    ):
        once.run(backend)
    with serving(Habits(tokenize=lambda text: list(text.encode()))) as right, with_ids(right) as backend:
        once.run(backend, max_tokens=1)
    with (
        serving(Habits(tokenize=lambda text: [1, 2, 3])) as other,
        with_ids(other) as backend,
        pytest.raises(rx.InvalidRequest, match="tokenizer: not that of"),
    ):
        once.run(backend)


def test_a_field_that_a_server_would_ignore_is_refused() -> None:
    with serving(Habits(has_extensions=False)) as bare, rx.connect(bare.url) as backend:
        with pytest.raises(rx.InvalidRequest, match=r"top_k: given, which .* does not know"):
            once.run(backend, top_k=3)
        with pytest.raises(rx.InvalidRequest, match="cache_salt"):
            once.options(namespace="tenant").run(backend)
        num_asked = len(bare.bodies)
        with pytest.raises(rx.InvalidRequest):
            once.run(backend, top_k=4)
        assert len(bare.bodies) == num_asked, "tried out once"
    with serving() as able, rx.connect(able.url) as backend:
        assert once.run(backend, max_tokens=5, top_k=1) == once.run(backend, max_tokens=5, temperature=0.0)


@pytest.mark.parametrize(
    "asked", [{"logprobs": 1}, {"boundary": "heal"}, {"logit_bias": {65: 1.0}}, {"stop_token_ids": [65]}]
)
def test_what_has_no_meaning_is_refused(asked: dict[str, Any]) -> None:
    with serving() as server, rx.connect(server.url) as backend, pytest.raises(rx.InvalidRequest):
        once.run(backend, "some text", **asked)


# -- grammars -----------------------------------------------------------------------------------------------------

GRAMMARS = [
    rx.Grammar.json_schema(
        {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    ),
    rx.Grammar.regex("[a-c]{3}x?"),
    rx.Grammar.choice(["yes", "no (really?)", "1+1"]),
]


def ask(backend: UrlBackend, grammar: rx.Grammar, max_tokens: int = 60, seed: int = 0) -> Any:
    params = rx.SamplingParams(max_tokens=max_tokens, seed=seed, grammar=grammar)
    backend.submit(list(b"begin"), params, "", priority=0)
    while True:
        for event in backend.step():
            if hasattr(event, "output"):
                return event.output.choices[0]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=[grammar.kind for grammar in GRAMMARS])
def test_a_server_holds_outputs_to_grammars_in_whatever_field_it_has(grammar: rx.Grammar) -> None:
    fields = ("response_format",) if grammar.kind == "json_schema" else ("guided_regex",)
    for spelled in (("response_format", "structured_outputs"), fields):
        with serving(Habits(grammars=spelled)) as able, rx.connect(able.url) as backend:
            for seed in range(3):
                choice = ask(backend, grammar, seed=seed)
                assert choice.finish_reason in ("stop", "length")
                assert choice.finish_reason == "length" or grammar.accepts(choice.text)


@pytest.mark.parametrize("grammar", [*GRAMMARS, rx.Grammar.lark('start: "a"')], ids=lambda grammar: grammar.kind)
def test_a_grammar_that_a_server_cannot_hold_to_is_refused(grammar: rx.Grammar) -> None:
    with (
        serving(Habits(grammars=())) as free,
        rx.connect(free.url) as backend,
        pytest.raises(rx.InvalidRequest, match="validate_and_retry"),
    ):
        ask(backend, grammar)


def test_a_server_that_does_not_do_what_it_says_is_found_out() -> None:
    with serving(Habits(disobeys=True)) as liar, rx.connect(liar.url) as backend:
        choice = ask(backend, GRAMMARS[1], max_tokens=300)
        assert choice.finish_reason == "error"
        assert "1 answers, none of which is of the regex" in choice.error


def test_validating_and_retrying_ends_with_what_holds_or_an_error() -> None:
    likely, never = rx.Grammar.regex(r"[\x00-\x3f](?s:.)*"), rx.Grammar.choice(["never this"])
    with serving(Habits(grammars=())) as free, rx.connect(free.url, validate_and_retry=8) as backend:
        choice = ask(backend, likely, max_tokens=3)
        assert likely.accepts(choice.text)
        seeds = [body["seed"] for body in free.bodies if "seed" in body]
        assert len(seeds) == len(set(seeds))
        num_asked = len(free.bodies)
        choice = ask(backend, never, max_tokens=3)
        assert choice.finish_reason == "error"
        assert "8 answers, none of which is of the choice" in choice.error
        tried = [body for body in free.bodies[num_asked:] if "seed" in body]
        assert len({body["seed"] for body in tried}) == 8


def test_an_answer_in_any_layout_of_json_holds() -> None:
    grammar = GRAMMARS[0]
    for text in ('{"n": 1}', '{"n":1}', ' {\n"n" : 1 }\n'):
        assert holds(grammar, text)
    for text in ("", '{"n": 1', '{"n": "1"}', '{"m": 1}', "[" * 100_000):
        assert not holds(grammar, text)


@given(st.text(max_size=5), st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=3))
def test_accepting_a_text_is_what_the_grammar_says(text: str, options: list[str]) -> None:
    if any("\ud800" <= char <= "\udfff" for char in "".join([text, *options])):
        return
    assert rx.Grammar.choice(options).accepts(text) == (text in options)
    assert rx.Grammar.choice(options).accepts(options[0])
    assert rx.Grammar.regex("(?s:.)*").accepts(text)


# -- text as ids --------------------------------------------------------------------------------------------------

ROLES = st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=4)


@given(ROLES, st.data())
def test_messages_survive_as_ids(roles: list[str], data: st.DataObject) -> None:
    words = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    messages = [{"role": role, "content": data.draw(words)} for role in roles]
    tokenizer = TextTokenizer()
    assert tokenizer.messages(tokenizer.chat(messages)) == [*messages, {"role": "assistant", "content": ""}]
    assert tokenizer.messages(tokenizer.encode("plain")) == []
