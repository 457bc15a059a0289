"""Tools: one generation calls one of them or answers, arguments stay as they were written, errors say where."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, assert_type

import jsonschema
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel, Field

import radixrt as rx
from radixrt.frontend.testing import ScriptedBackend
from radixrt.frontend.tools import form_of_turn
from radixrt.runtime import Engine
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import MakeEngine, audit

EOS = 256
ENDS = {34: 2.0, 93: 2.0, 125: 2.0, EOS: 2.0}


@dataclass(frozen=True)
class Place:
    lat: float
    lon: float


class Forecast(BaseModel):
    sky: Literal["blue", "grey"]


def weather(city: str, unit: Literal["c", "f"] = "c", at: Place | None = None) -> str:
    """The weather of a city.

    In Celsius unless said otherwise.
    """
    return f"{city}, {unit}, {at}"


@rx.tool
def divide(a: int, *, by: Annotated[int, Field(ge=0, le=9)] = 2) -> float:
    """a over by."""
    return a / by


@rx.tool
async def wait(answer: str, arguments: list[int]) -> int:
    """Parameters named like the parts of a call."""
    await asyncio.sleep(0)
    return sum(arguments) // len(answer)


@rx.tool
def now() -> str:
    return "noon"


TOOLS: list[Callable[..., object]] = [weather, divide, wait, now]


def make_model() -> HashModel:
    return HashModel(vocab=257, eos=frozenset([EOS]))


def read(text: str, answer: Any = str) -> Any:
    return form_of_turn(TOOLS, answer).read(text)


def test_a_call_has_its_arguments_as_values_and_as_the_model_wrote_them() -> None:
    call = read('{"name": "weather", "arguments": {"city": "}\\u00e9\\"\\n", "at": {"lat": 1, "lon": -2.50}}}')
    assert isinstance(call, rx.Call)
    assert (call.name, call.tool.function) == ("weather", weather)
    assert call.text == '{"city": "}\\u00e9\\"\\n", "at": {"lat": 1, "lon": -2.50}}'
    assert call.arguments == {"city": '}é"\n', "unit": "c", "at": Place(1.0, -2.5)}
    assert call.run() == '}é"\n, c, Place(lat=1.0, lon=-2.5)'
    assert read('{"name": "divide", "arguments": {"a": 7}}').run() == 3.5
    assert read('{"name": "now", "arguments": {}}').run() == "noon"
    assert read('{"name": "now", "arguments": {}}').text == "{}"
    call = read('{"name": "wait", "arguments": {"answer": "\\"answer\\": ", "arguments": [1, 20]}}')
    assert call.text == '{"answer": "\\"answer\\": ", "arguments": [1, 20]}'
    assert asyncio.run(call.run()) == 2


def test_an_answer_is_a_value_of_its_type() -> None:
    assert read('{"answer": "it is {fine}}"}') == rx.Answer("it is {fine}}")
    assert read('{"answer": {"sky": "blue"}}', Forecast) == rx.Answer(Forecast(sky="blue"))
    assert read('{"answer": [1, null]}', list[int | None]) == rx.Answer([1, None])


def test_what_a_tool_raises_stays_what_it_is_and_says_where() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        read('{"name": "divide", "arguments": {"a": 7, "by": 0}}').run()
    assert caught.value.__notes__ == ['in tool divide, called with {"a": 7, "by": 0}']

    async def main() -> None:
        await read('{"name": "wait", "arguments": {"answer": "", "arguments": []}}').run()

    with pytest.raises(ZeroDivisionError) as caught:
        asyncio.run(main())
    assert caught.value.__notes__ == ['in tool wait, called with {"answer": "", "arguments": []}']


@pytest.mark.parametrize("answer", [str, int, Forecast, list[bool]], ids=str)
def test_whatever_the_model_says_is_one_turn(answer: Any, make_engine: MakeEngine, profile: str) -> None:
    engine = make_engine(make_model(), num_pages=1024)

    @rx.program
    def turns(s: rx.State) -> list[tuple[Any, str]]:
        said: list[tuple[Any, str]] = []
        for _ in range(100 if profile == "deep" else 20):
            s += "turn: "
            slot = s.act(TOOLS, answer, max_tokens=2000, logit_bias=ENDS)
            said.append((slot.value, slot.text))
            assert s.text.endswith(slot.text)
        return said

    schemas = {tool.name: tool.schema for tool in (rx.tool(weather), divide, wait, now)}
    kinds = set()
    for turn, text in turns.run(engine):
        whole = json.loads(text)
        if isinstance(turn, rx.Answer):
            assert list(whole) == ["answer"]
            kinds.add("answer")
            continue
        assert list(whole) == ["name", "arguments"]
        kinds.add(whole["name"])
        jsonschema.validate(whole["arguments"], schemas[whole["name"]], jsonschema.Draft202012Validator)
        assert text == f'{{"name": "{turn.name}", "arguments": {turn.text}}}'
        order = list(schemas[turn.name]["properties"])
        assert list(whole["arguments"]) == [name for name in order if name in whole["arguments"]]
    assert len(kinds) > 2


@settings(max_examples=settings().max_examples // 2)
@given(st.integers(0, 2**32), st.sampled_from([1, 4, 16]))
def test_what_was_written_is_never_encoded_or_computed_again(seed: int, page_size: int) -> None:
    """The ids of a turn stay in the state, and the next one computes only the result that was appended."""
    engine = Engine(make_model(), tokenizer=ByteTokenizer(), num_pages=2048, page_size=page_size, poison=True)

    @rx.program
    def loop(s: rx.State) -> None:
        s += "a question"
        given = len("a question")
        for _ in range(3):
            slot = s.act([now, divide], int, max_tokens=600, logit_bias=ENDS)
            before = s.tokens
            assert before[-len(slot.token_ids) :] == slot.token_ids
            s += " -> done; "
            given += len(" -> done; ")
            s.gen(max_tokens=1)
            assert s.tokens[: len(before)] == before
            assert engine.stats().counters.computed == given

    loop.options(seed=seed).run(engine)
    audit(engine)


def test_a_loop_of_turns() -> None:
    replies = {
        "12 / 4?": '{"name": "divide", "arguments": {"a": 12, "by": 4}}',
        "= 3.0;": '{"answer": 3}',
        "boom?": '{"name": "divide", "arguments": {"a": 12, "by": 0}}',
        "what?": '{"name": "nothing", "arguments": {}}',
    }
    backend = ScriptedBackend(replies, ByteTokenizer())

    @rx.program
    def react(s: rx.State, question: str) -> int | None:
        s += rx.describe([divide]) + question
        for _ in range(3):
            turn = s.act([divide], int).value
            if isinstance(turn, rx.Answer):
                return turn.value
            s += f" = {turn.run()};"
        return None

    assert react.run(backend, "12 / 4?") == 3
    assert backend.asked[-1].endswith('12 / 4?{"name": "divide", "arguments": {"a": 12, "by": 4}} = 3.0;')
    with pytest.raises(ZeroDivisionError) as caught:
        react.run(backend, "boom?")
    assert caught.value.__notes__ == ['in tool divide, called with {"a": 12, "by": 0}', "in program react"]
    with pytest.raises(rx.GenerationFailed, match="nothing"):  # a backend that holds to no grammar
        react.run(backend, "what?")


def test_a_turn_that_is_cut_is_an_error(engine: Engine) -> None:
    @rx.program
    def cut(s: rx.State) -> str:
        s += "x"
        slot = s.act([now], max_tokens=5)
        with pytest.raises(rx.GenerationFailed, match="turn with now cut after 5 tokens"):
            slot.value  # noqa: B018
        return s.text

    assert cut.run(engine) == "x"


def test_descriptions_are_the_docs_and_the_types() -> None:
    lines = rx.describe([divide, weather]).splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["divide", "weather"]
    assert json.loads(lines[0]) == {
        "name": "divide",
        "description": "a over by.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "by": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    assert json.loads(lines[1])["description"].endswith("\n\nIn Celsius unless said otherwise.")
    assert rx.describe([divide, weather]) == rx.describe([divide, weather])


def untyped(a, b: int) -> None:  # type: ignore[no-untyped-def]
    pass


def many(*numbers: int) -> None:
    pass


def named(**numbers: int) -> None:
    pass


def placed(a: int, /) -> None:
    pass


def unknown(a: Undefined) -> None:  # type: ignore[name-defined]  # noqa: F821
    pass


def unordered(a: set[int]) -> None:
    pass


def calls_back(a: Callable[[], None]) -> None:
    pass


REFUSED: list[tuple[Any, str]] = [
    ([], "at least one"),
    ("weather", "at least one"),
    ([5], "functions"),
    ([lambda a: a], "with a name"),
    ([untyped], "parameter a has no type"),
    ([many], "by name"),
    ([named], "by name"),
    ([placed], "by name"),
    ([unknown], "Undefined"),
    ([unordered], "uniqueItems"),
    ([calls_back], "tool calls_back"),
    ([divide, rx.tool(divide.function)], "one name"),
]


@pytest.mark.parametrize(("tools", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_is_no_tool_is_refused(tools: Any, said: str, engine: Engine) -> None:
    @rx.program
    def asks(s: rx.State) -> None:
        s += "x"
        s.act(tools)

    with pytest.raises(rx.InvalidRequest, match=said) as caught:
        asks.run(engine)
    assert any("program asks, slot" in note for note in caught.value.__notes__)


def test_types_are_inferred(make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())

    @rx.program
    def typed(s: rx.State) -> None:
        s += "x"
        assert_type(s.act([now], max_tokens=400, logit_bias=ENDS), rx.Slot[rx.Call | rx.Answer[str]])
        assert_type(s.act([now], Forecast, max_tokens=400, logit_bias=ENDS), rx.Slot[rx.Call | rx.Answer[Forecast]])
        assert_type(divide(8, by=4), float)

    typed.run(engine)
