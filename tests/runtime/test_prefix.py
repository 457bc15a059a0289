"""A prefix: what an output begins with, in whichever tokens, and that everything else counts from its end."""

from __future__ import annotations

from typing import Any

import pytest

import radixrt as rx
from radixrt.runtime.testing import HashModel

from .conftest import MakeEngine

GRAMMARS = [
    rx.Grammar.regex("(?i)yes|no"),
    rx.Grammar.choice(["7", "(8)"]),
    rx.Grammar.json_schema({"enum": ["a", 1]}),
]


@pytest.mark.parametrize("prefix", [" a\n", 'say "', " é日"])
@pytest.mark.parametrize("grammar", [None, *GRAMMARS], ids=["free", "regex", "choice", "json"])
def test_an_output_begins_with_its_prefix(prefix: str, grammar: rx.Grammar | None, make_engine: MakeEngine) -> None:
    engine = make_engine(HashModel(vocab=300, eos=frozenset([299])))
    params = rx.SamplingParams(prefix=prefix, grammar=grammar, max_tokens=30, n=2, seed=1, stop="\n")
    [output] = engine.generate("begin", params)
    for choice in output.choices:
        data = bytes(token_id for token_id in choice.token_ids if token_id < 256)
        assert data.startswith(prefix.encode())
        assert "\n" not in choice.text
        if grammar is not None:
            assert grammar.accepts(choice.text)


def test_behind_a_prefix_anything_goes(make_engine: MakeEngine) -> None:
    """Bytes that are no text and ids that add nothing come as they would without it."""
    engine = make_engine(HashModel(vocab=400))
    prefix, params = " prefix", rx.SamplingParams(max_tokens=40, temperature=0.0)
    [healed] = engine.generate("begin", rx.SamplingParams(max_tokens=40, temperature=0.0, prefix=prefix))
    [plain] = engine.generate("begin" + prefix, params)
    assert healed.choices[0].token_ids == (*prefix.encode(), *plain.choices[0].token_ids)
    assert healed.text == plain.text
    assert any(token_id >= 256 for token_id in healed.choices[0].token_ids)


def test_limits_count_what_is_behind_a_prefix(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = rx.SamplingParams(max_tokens=3, min_tokens=2, prefix=" prefix", stop=[chr(n) for n in range(33, 45)])
    [output] = engine.generate("begin", params)
    assert 2 <= len(output.choices[0].token_ids) - len(" prefix") <= 3
    engine = make_engine(HashModel(vocab=128, context=9))
    [output] = engine.generate("begin", params)
    assert (output.text, output.choices[0].finish_reason) == ("", "length")


def test_forks_inside_and_behind_a_prefix(make_engine: MakeEngine) -> None:
    engine = make_engine(HashModel(vocab=400))
    params = rx.SamplingParams(max_tokens=20, temperature=0.0, prefix=" prefix")
    [whole] = engine.generate("begin", params)
    handle = engine.submit("begin", params)
    children: list[rx.Handle] = []
    for _ in range(12):
        children += engine.fork(handle)
        engine.step()
    outputs: dict[rx.Handle, rx.Output] = {}
    while engine.stats().num_running or engine.stats().num_waiting:
        outputs |= {event.handle: event.output for event in engine.step() if hasattr(event, "output")}
    [inside] = engine.fork(children[0], at=8)  # three tokens into the prefix
    [anew] = engine.fork(handle, params=params)
    while engine.stats().num_running or engine.stats().num_waiting:
        outputs |= {event.handle: event.output for event in engine.step() if hasattr(event, "output")}
    assert outputs[handle].text == whole.text
    for child in children:
        assert (
            whole.choices[0].token_ids[-len(outputs[child].choices[0].token_ids) :]
            == outputs[child].choices[0].token_ids
        )
        assert whole.text.endswith(outputs[child].text)
    said = outputs[inside].choices[0].token_ids
    assert bytes(said[:4]) == b"efix"
    assert bytes(outputs[anew].choices[0].token_ids[:7]) == b" prefix"
    for output in outputs.values():
        engine.release(output.handle)
    other = engine.submit("begin", params)
    with pytest.raises(rx.InvalidRequest, match="has a prefix"):
        engine.truncate(other, 5)
    engine.release(other)


@pytest.mark.parametrize("prefix", [1, "\ud800", "x" * 2000])
def test_a_prefix_is_text(prefix: Any) -> None:
    with pytest.raises(rx.InvalidRequest, match="prefix"):
        rx.SamplingParams(prefix=prefix)


def test_a_prefix_is_refused_where_it_cannot_be_held(make_engine: MakeEngine) -> None:
    with pytest.raises(rx.InvalidRequest, match="Lark"):
        make_engine().generate("x", rx.SamplingParams(prefix="a", grammar=rx.Grammar.lark('start: "a"')))
    with pytest.raises(rx.InvalidRequest, match="tokenizer"):
        make_engine(tokenizer=None).generate([[1]], rx.SamplingParams(prefix="a"))


def test_pressure_and_company_change_nothing_of_a_prefix(make_engine: MakeEngine) -> None:
    prompts = [f"{'shared by all ' * 3}{number}" for number in range(6)]
    params = rx.SamplingParams(max_tokens=40, prefix=" so, é", seed=3)
    alone = [make_engine().generate(prompt, params)[0].choices for prompt in prompts]
    engine = make_engine(num_pages=30, page_size=4, token_budget=16)
    assert [output.choices for output in engine.generate(prompts, params)] == alone
    assert engine.stats().counters.preemptions
