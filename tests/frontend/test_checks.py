"""What is given in place of something else: an error of the project's own tree, that says what would do."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import BaseModel, Field

import radixrt as rx
from radixrt.frontend.testing import ScriptedBackend
from radixrt.runtime import Engine
from radixrt.runtime.testing import ByteTokenizer, HashModel

Misuse = Callable[[Any], object]


def named(thing: object) -> str:
    """For a test's name, the same in each process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


@rx.program
def simple(s: rx.State, word: str = "x") -> str:
    s += word
    return s.gen(max_tokens=2).value


@rx.program
async def simple_async(s: rx.State, word: str = "x") -> str:
    s += word
    return await s.gen(max_tokens=2)


def fact(city: str) -> str:
    """Of a city."""
    return city


# -- states -----------------------------------------------------------------------------------------------------------


ON_STATES: dict[str, tuple[Misuse, str]] = {
    "fork 2.0": (
        lambda s: s.fork(2.0),
        r"fork: 2\.0 given; allowed: a sequence of items, or an integer in \[0, 4096\]",
    ),
    "fork None": (lambda s: s.fork(None), "fork: None given"),
    "fork text": (lambda s: s.fork("ab"), "fork: 'ab' given; allowed: a count, or a sequence of items"),
    "fork set": (lambda s: s.fork({"a", "b"}), "fork: a value of type set of 2 items given; allowed: a count"),
    "choose text": (lambda s: s.choose("ab"), "options: 'ab' given; allowed: a sequence of texts"),
    "choose set": (lambda s: s.choose({"a", "b"}), "options: a value of type set of 2 items given; allowed: a seq"),
    "fork -1": (lambda s: s.fork(-1), "fork: -1 given"),
    "branch": (lambda s: s.fork(2)[0], "branches: there are none yet, .*by `with`"),
    "branches": (lambda s: list(s.fork(["a"])), "branches: there are none yet"),
    "map": (lambda s: s.fork(2).map(3), "map: 3 given; allowed: a function of a branch"),
    "map items": (lambda s: s.fork(["a"]).map(None), "map: None given; allowed: a function of a branch and its item"),
    "map early": (lambda s: s.fork(2).map(len), "map: the scope is not open"),
    "half a character": (lambda s: s.__iadd__("a\ud83d"), "state: 'a.*' given; allowed: Unicode text without lone"),
    "half an option": (lambda s: s.choose(["a", "\ude00"]), "options: .* given; allowed: Unicode text without lone"),
    "rewind": (lambda s: s.rewind(3), r"rewind: 3 given; allowed: what mark\(\) of this state returned"),
    "splice": (lambda s: s.splice("text"), "splice: 'text' given; allowed: a branch of this state"),
    "adopt": (lambda s: s.adopt(3), "adopt: no branches live"),
    "pin": (lambda s: s.pin("x"), "ttl: 'x' given; allowed: None or an integer of at least 1"),
    "pin 0": (lambda s: s.pin(0), "ttl: 0 given"),
    "message": (lambda s: s.message(3).__enter__(), "message: 3 given; allowed: a role, such as system"),
    "choose": (lambda s: s.choose(3), "options: 3 given; allowed: a sequence of texts"),
    "choose None": (lambda s: s.choose(None), "options: None given"),
    "choose end": (lambda s: s.choose(["a"], score="prefix_free", end=3), "end: 3 given; allowed: a text"),
    "choose score": (lambda s: s.choose(["a"], score=3), "score: 3 given; allowed: sum, "),
    "choose name": (lambda s: s.choose(["a"], name=["x"]), "name: .* given; allowed: a text"),
    "choose temperature": (lambda s: s.choose(["a"], temperature="hot"), "temperature: 'hot' given"),
    "gen name": (lambda s: s.gen(name=["x"]), "name: .* given; allowed: a text"),
    "gen stop": (lambda s: s.gen(stop=3), "stop: 3 given"),
    "gen max_tokens": (lambda s: s.gen(max_tokens="x"), "max_tokens: 'x' given"),
    "gen boundary": (lambda s: s.gen(boundary=[]), "boundary: .* given"),
    "act": (lambda s: s.act(3), "tools: 3 given"),
    "act unhashable": (lambda s: s.act([{}]), "tools: {} given; allowed: functions"),
    "act answer": (lambda s: s.act([fact], answer=[1]), r"\[1\]: given as a type"),
    "act grammar": (lambda s: s.act([fact], answer=rx.Grammar.regex("a")), "given as a type; allowed: a type"),
    "act Grammar": (lambda s: s.act([fact], answer=rx.Grammar), "a Grammar, which is no type"),
}


@pytest.mark.parametrize(("misuse", "said"), ON_STATES.values(), ids=ON_STATES)
def test_a_state_says_what_would_do(engine: Engine, misuse: Misuse, said: str) -> None:
    """And is as before."""

    @rx.program
    def wrong(s: rx.State) -> str:
        s += "x"
        with pytest.raises((rx.InvalidRequest, rx.StateMisuse), match=said):
            misuse(s)
        assert s.text == "x"
        return s.gen(max_tokens=2).value

    assert wrong.run(engine) == simple.run(engine)


def test_integers_of_numpy_count(engine: Engine, tmp_path: Path) -> None:
    @rx.program
    def counts(s: rx.State) -> int:
        s += "x"
        s.pin(np.int32(5))  # type: ignore[arg-type]
        with s.fork(np.int64(3)) as branches:  # type: ignore[call-overload]
            return len(branches)

    trace = tmp_path / "runs.jsonl"
    assert counts.options(seed=np.uint8(7), priority=np.int8(1), trace=trace).run(engine) == 3
    assert rx.load_trace(trace).runs[0].start.seed == 7
    assert len(simple.batch(engine, [{}, {}], concurrency=np.int64(2))) == 2  # type: ignore[arg-type]


# -- types ------------------------------------------------------------------------------------------------------------


@dataclass
class Looks:
    ahead: Annotated[str, Field(pattern="a(?=b)")]


class HoldsClass(BaseModel):
    kind: type[int]


class Nothing(Enum):
    pass


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (BaseModel, "BaseModel itself"),
        (list[BaseModel], "BaseModel itself"),
        (type[int], "classes, which no text is"),
        (HoldsClass, "classes, which no text is"),
        (list[Nothing], "an Enum without members"),
        (Looks, "look-ahead"),
        (Annotated[str, Field(pattern="(?!a)b")], "look-ahead"),
        (Annotated[str, Field(pattern="(")], "unclosed group"),
        (Annotated[int, Field(multiple_of=0)], "multiple_of"),
        (list[rx.Grammar], "a Grammar, which is no type"),
        ({"name": str}, "given as a type"),
        (fact, "given as a type"),
        (len, "given as a type"),
    ],
    ids=named,
)
def test_a_type_whose_values_no_text_is_is_refused(engine: Engine, kind: Any, said: str) -> None:
    @rx.program
    def wrong(s: rx.State) -> None:
        s += "x"
        with pytest.raises(rx.InvalidRequest, match=said):
            s.gen(kind)
        with pytest.raises(rx.InvalidRequest, match=said):
            s.act([fact], answer=kind)

    wrong.run(engine)


def test_types_that_cannot_be_hashed_are_answers(engine: Engine) -> None:
    @rx.program
    def acts(s: rx.State) -> rx.Slot[Any]:
        s += "x"
        return s.act([fact], answer=Annotated[bool, Field(json_schema_extra={"examples": [True]})], max_tokens=60)

    assert acts.run(engine).text.startswith("{")


@pytest.mark.parametrize("thing", [3, [], {}, int, min, range, subprocess, len, lambda city: city], ids=named)
def test_what_is_no_tool_is_refused(thing: Any) -> None:
    for use in (rx.tool, lambda one: rx.describe([one])):
        with pytest.raises(rx.InvalidRequest, match=r"^tools?[ :]"):
            use(thing)


def test_a_tool_that_cannot_be_enforced_is_refused_where_it_is_made() -> None:
    def lookup(cities: set[str]) -> str:
        return str(cities)

    with pytest.raises(rx.InvalidRequest, match="uniqueItems") as raised:
        rx.tool(lookup)
    assert raised.value.__notes__ == ["in the JSON schema of tool lookup"]


# -- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", ["smollm2-135m", None, 3, Engine, HashModel(vocab=8), ByteTokenizer()], ids=named)
def test_what_is_no_engine_runs_nothing(thing: Any) -> None:
    uses: list[Callable[[], object]] = [
        lambda: simple.run(thing),
        lambda: simple_async.run(thing),
        lambda: list(simple.stream(thing)),
        lambda: simple.batch(thing, [{}]),
        lambda: rx.session(thing).__enter__(),
        *([lambda: simple.plan(thing)] if thing is not None else []),
    ]
    for use in uses:
        with pytest.raises(rx.InvalidRequest, match=r"engine: .* given; allowed: an rx\.Engine, which takes a model's"):
            use()


def test_only_an_engine_is_measured() -> None:
    with rx.connect("http://127.0.0.1:9") as server:
        for other in (server, ScriptedBackend({}, ByteTokenizer()), "name", None):
            with pytest.raises(rx.InvalidRequest, match=r"yardstick: .* given; allowed: an rx\.Engine"):
                rx.Yardstick(other)  # type: ignore[arg-type]


@pytest.mark.parametrize("program", [simple, simple_async], ids=["plain", "async"])
@pytest.mark.parametrize("thing", ["x", None, 3])
def test_a_program_is_called_with_a_state(program: Any, thing: Any) -> None:
    with pytest.raises(rx.InvalidRequest, match=rf"{program.name}: .* allowed: a state.*{program.name}\.run\(engine"):
        program(thing)


def yields(s: rx.State) -> Iterator[str]:
    yield ""


async def yields_async(s: rx.State) -> AsyncIterator[str]:
    yield ""


@pytest.mark.parametrize("thing", [3, None, "text", yields, yields_async], ids=named)
def test_a_program_is_a_function_that_returns(thing: Any) -> None:
    with pytest.raises(rx.InvalidRequest, match=r"program: .* given; allowed: a function"):
        rx.program(thing)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nope": 1, "seed": 1}, "options: nope given; allowed: seed, namespace, priority, trace, observers"),
        ({"trace": 3}, "trace: 3 given; allowed: a path"),
        ({"seed": "x"}, "seed: 'x' given"),
        ({"seed": 1.5}, r"seed: 1\.5 given"),
        ({"seed": None}, "seed: None given"),
        ({"seed": 2**70}, "seed: .* given"),
        ({"namespace": 3}, "namespace: 3 given"),
        ({"priority": "high"}, "priority: 'high' given"),
        ({"observers": rx.OpenTelemetry}, "observers: .* given; allowed: a list"),
        ({"observers": [3]}, "observers: 3 given"),
    ],
    ids=named,
)
def test_options_are_checked_where_they_are_given(engine: Engine, options: dict[str, Any], said: str) -> None:
    with pytest.raises(rx.InvalidRequest, match=said):
        simple.options(**options)
    with pytest.raises(rx.InvalidRequest, match=said):
        rx.session(engine, **options)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ttl": "x"}, "ttl: 'x' given; allowed: None or an integer of at least 1"),
        ({"ttl": 0}, "ttl: 0 given"),
        ({"system": 3}, "system: 3 given; allowed: a text"),
    ],
    ids=named,
)
def test_a_session_is_checked_where_it_is_made(engine: Engine, given: dict[str, Any], said: str) -> None:
    with pytest.raises(rx.InvalidRequest, match=said):
        rx.session(engine, **given)


def test_a_session_that_does_not_open_has_ended(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Observers hear of it, although no block was entered."""
    heard: list[Any] = []

    def fails(*_: Any) -> None:
        raise RuntimeError("no pins")

    class Watches:
        def tell(self, event: Any) -> None:
            heard.append(event)

        def close(self) -> None:
            heard.append("closed")

    monkeypatch.setattr(rx.State, "pin", fails)
    with pytest.raises(RuntimeError, match="no pins"):
        rx.session(engine, system="Be brief.", observers=[Watches]).__enter__()
    assert isinstance(heard[-2], rx.events.RunEnded)
    assert heard[-1] == "closed"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (3, "rows: 3 given"),
        ({"word": "x"}, "row 0: 'word' given; allowed: a mapping of arguments by name"),
        ([{}, "x"], "row 1: 'x' given"),
        ([{1: "x"}], "row 0: .* given"),
    ],
    ids=named,
)
def test_rows_are_checked_before_any_runs(engine: Engine, rows: Any, said: str) -> None:
    for use in (simple.batch, simple.plan):
        with pytest.raises(rx.InvalidRequest, match=said):
            use(engine, rows)
    assert engine.stats().counters.steps == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"concurrency": 0}, "concurrency: 0 given; allowed: an integer of at least 1"),
        ({"concurrency": True}, "concurrency: True given"),
        ({"concurrency": 2.0}, r"concurrency: 2\.0 given"),
        ({"resume": 3}, "resume: 3 given; allowed: a path"),
    ],
    ids=named,
)
def test_a_batch_is_checked_before_it_runs(engine: Engine, given: dict[str, Any], said: str) -> None:
    with pytest.raises(rx.InvalidRequest, match=said):
        simple.batch(engine, [{}], **given)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("verb", "instead"), [("run", "arun"), ("stream", "astream"), ("batch", "in a thread")])
def test_an_async_program_has_no_loop_within_a_loop(engine: Engine, verb: str, instead: str) -> None:
    async def main() -> None:
        with pytest.raises(rx.StateMisuse, match=f"{verb}: an event loop runs here, .*{instead}"):
            list(getattr(simple_async, verb)(engine, *([[{}]] if verb == "batch" else [])))

    asyncio.run(main())
