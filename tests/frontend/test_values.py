"""Values of types: what is generated is one, ends where it should, and what cannot be held to is refused."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from time import process_time
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional, assert_type
from uuid import UUID

import jsonschema
import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel, ConfigDict, Field, RootModel, TypeAdapter, field_validator
from typing_extensions import TypedDict

import radixrt as rx
from radixrt.frontend.testing import ScriptedBackend
from radixrt.frontend.values import form_of
from radixrt.runtime import Engine, load_model
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import MakeEngine, audit, default_tokenizer

EOS = 256
# What makes random texts end: quotes, closing brackets, the end itself.
ENDS = {34: 2.0, 93: 2.0, 125: 2.0, EOS: 2.0}


class Colour(Enum):
    RED = "red"
    DEEP_RED = "red wine"
    NONE = 0


class Mark(IntEnum):
    LOW = 1
    HIGH = 12


@dataclass(frozen=True)
class Place:
    name: str
    height: float = 0.0
    tags: tuple[str, ...] = ()


class Person(BaseModel):
    """A person of a family."""

    name: Annotated[str, Field(min_length=1, max_length=12)]
    age: Annotated[int, Field(ge=0, le=130)]
    colour: Colour
    home: Optional[Place] = None  # noqa: UP045  # both ways of writing it
    children: Annotated[list[Person], Field(max_length=1)] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Row(TypedDict):
    id: int
    note: NotRequired[str]


class Point(NamedTuple):
    x: int
    y: float = 0.5


class Marks(RootModel[dict[str, bool]]):
    pass


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Ordered(BaseModel):
    z: int = Field(alias="ZED")
    a: bool


@dataclass
class Nothing:
    pass


KINDS: list[Any] = [
    *(int, float, bool, Colour, Mark),
    *(Literal["yes", "no"], Literal["a", "ab", "abc"], Literal[1, 10, 100], Literal["é\n", '"', None, True, 2]),
    *(Literal[Colour.RED, "blue"], Literal[" spaced", "plain"]),
    *(Place, Person, Cat, Row, Point, Marks, Open, Ordered, Nothing),
    *(Cat | Dog, Annotated[Cat | Dog, Field(discriminator="kind")], int | None, Cat | None, int | str | bool),
    *(list[int], list[Place], list[list[bool]], tuple[int, str], tuple[bool, ...], dict[str, int], dict[str, Mark]),
    *(Annotated[int, Field(ge=1, le=5)], Annotated[int, Field(gt=-3, lt=30, multiple_of=7)]),
    *(Annotated[float, Field(ge=-1.5, lt=2.25)], Annotated[float, Field(multiple_of=0.25)], Annotated[str, Field()]),
    *(Annotated[str, Field(max_length=4)], Annotated[str, Field(pattern=r"^\w{3}\s\W\d$")]),
    *(Annotated[str, Field(pattern="^[a-z]+[0-9]*$", min_length=4, max_length=7)],),
    *(Annotated[list[int], Field(min_length=2, max_length=3)], Annotated[Decimal, Field(ge=0, le=99)]),
    *(date, UUID, datetime, Annotated[time, Field()], timedelta, type(None), Any),
]
PATTERNS = ["[ab]{2,4}", r"\d{3}-\d{4}", r"[\u0400-\u04ff]{1,5}", "(?P<year>[12][0-9]{3})(-[0-9]{2}){0,2}", "x+"]


def shown(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind) if isinstance(kind, type) else kind)[:60]


def make_model() -> HashModel:
    return HashModel(vocab=257, eos=frozenset([EOS]))


@rx.program
def generate(s: rx.State, kind: Any, before: str, n: int, max_tokens: int = 3000) -> list[tuple[Any, str]]:
    """Several values of a type and their texts, one after the other."""
    values = []
    for _ in range(n):
        s += before
        slot = s.gen(kind, max_tokens=max_tokens, logit_bias=ENDS)
        values.append((slot.value, slot.text))
    return values


def texts_of(kind: Any, value: Any, text: str) -> list[str]:
    """How a value of running text may be written."""
    if kind is bool:
        return ["yes", "Yes", "true", "True"] if value else ["no", "No", "false", "False"]
    if kind is float:
        return [text.removeprefix(" ")] if float(text) == value else []
    return [str(value.value if isinstance(value, Enum) else value)]


# -- what is generated is a value ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=shown)
def test_values_are_of_their_type(kind: Any, make_engine: MakeEngine, profile: str) -> None:
    engine = make_engine(make_model(), num_pages=4096)
    adapter = TypeAdapter(kind)
    for value, text in generate.run(engine, kind, "value: ", 20 if profile == "deep" else 2):
        if form_of(kind).grammar.kind == "json_schema":  # type: ignore[union-attr]
            assert adapter.validate_json(text) == value
            jsonschema.validate(json.loads(text), adapter.json_schema(), jsonschema.Draft202012Validator)
        else:
            assert adapter.validate_python(value, strict=True) == value
            assert text.removeprefix(" ") in texts_of(kind, value, text) or text in texts_of(kind, value, text)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_values_of_a_grammar_are_its_texts(pattern: str, make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())
    grammar = rx.Grammar.regex(pattern)
    for value, text in generate.run(engine, grammar, "text ", 4, 40):
        assert value == text
        assert re.fullmatch(pattern, value)


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    st.sampled_from([{"page_size": 1}, {"prefix_cache": False}, {"token_budget": 16}, {"keep_finished": 0}]),
    st.integers(0, 9),
)
def test_values_do_not_depend_on_what_is_cached_or_runs_beside_them(
    kinds: list[Any], given: dict[str, Any], seed: int
) -> None:
    """Branches of all kinds at once, cold and hot, and what is generated behind the one that is adopted."""

    @rx.program
    def tree(s: rx.State) -> list[Any]:
        s += "one of each: "
        values = [written(s, kinds[0])]
        with s.fork(kinds) as branches:
            values += branches.map(written)
            s.adopt(branches[-1])
        return [*values, s.gen(int).value, s.tokens]

    def written(s: rx.State, kind: Any) -> tuple[str, str]:
        slot = s.gen(kind, max_tokens=60, logit_bias=ENDS)
        try:
            return repr(slot.value), slot.text
        except rx.GenerationFailed as error:
            assert slot.finish == "length"
            return str(error), slot.text

    results = []
    for settings_ in ({}, given):
        engine = Engine(make_model(), tokenizer=ByteTokenizer(), num_pages=512, poison=True, **settings_)
        for _ in range(2):
            results.append(tree.options(seed=seed).run(engine))
        audit(engine)
    assert results == results[:1] * 4


def test_kinds_of_many_rows_do_not_mix(make_engine: MakeEngine) -> None:
    engine = make_engine(make_model(), num_pages=8192)
    rows = [{"kind": kind, "before": "v ", "n": 1} for kind in KINDS[:32]]
    for row, result in zip(rows, generate.batch(engine, rows), strict=True):
        assert result.ok
        [(value, text)] = result.value
        assert form_of(row["kind"]).read(text) == value


# -- where a value ends -------------------------------------------------------------------------------------------


def test_a_number_is_what_the_model_would_write_and_ends_where_it_goes_on_otherwise(make_engine: MakeEngine) -> None:
    digits = {code: 4.0 for code in b"0123456789"}

    @rx.program
    def number(s: rx.State, kind: Any) -> tuple[Any, str, str]:
        s += "n="
        slot = s.gen(kind, logit_bias=digits, max_tokens=40)
        text = s.text
        s += ";"
        s.gen(max_tokens=1)
        assert s.text.startswith(text + ";")
        return slot.value, slot.text, text

    engine = make_engine(make_model())
    lengths = set()
    for seed in range(20):
        value, text, after = number.options(seed=seed).run(engine, int)
        assert text.removeprefix(" ") == str(value)
        assert after == f"n={text}"  # what ended it is no part of the state
        params = rx.SamplingParams(max_tokens=40, logit_bias=digits, seed=seed)
        free = engine.generate("n=", params)[0].text
        if found := re.match("(0|[1-9][0-9]*)[^0-9]", free):
            assert str(value) == found[1]
            lengths.add(len(found[1]))
    assert len(lengths) > 2


def test_options_that_begin_with_one_another_can_all_be_chosen(make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())
    bias = {98: 6.0, 99: 6.0}

    @rx.program
    def choose(s: rx.State, number: int) -> str:
        s += f"{number}: "
        return str(s.gen(Literal["a", "ab", "abc"], logit_bias=bias).value)

    assert {choose.run(engine, number) for number in range(100)} == {"a", "ab", "abc"}


def test_texts_are_read_with_a_space_in_front_or_none() -> None:
    def read(kind: Any, text: str) -> Any:
        return form_of(kind).read(text)

    assert [read(int, text) for text in ("5", " 5", "-12", " 0")] == [5, 5, -12, 0]
    assert read(int, "9" * 400) == 10**400 - 1
    assert [read(float, text) for text in (" 5", "-1.5", "2.", "1e-3")] == [5.0, -1.5, 2.0, 0.001]
    assert [read(bool, text) for text in ("yes", " No", "true", " False")] == [True, False, True, False]
    assert read(Literal["a", " a"], " a") == " a"
    assert read(Colour, " red wine") is Colour.DEEP_RED
    assert read(Literal[Colour.RED, "blue"], "red") is Colour.RED
    assert read(Literal[1, True, None], "True") is True
    for kind, text in [(int, "5 "), (int, "1_000"), (int, "٣"), (float, "inf"), (float, "9" * 400), (bool, "maybe")]:
        with pytest.raises(ValueError, match=r"no|none|too large"):
            read(kind, text)


def test_a_slot_as_text_is_as_it_was_written(make_engine: MakeEngine) -> None:
    backend = ScriptedBackend({"n:": " 7", "p:": '{"name": "x"}', "t:": " hi"}, ByteTokenizer())

    @rx.program
    def echo(s: rx.State) -> list[str]:
        found = []
        for text, kind in (("n:", int), ("p:", Place), ("t:", str)):
            s += text
            found.append(f"{s.gen(kind)}")
        slot = s.gen(int, name="last") if s.text.endswith(":") else None
        assert slot is None
        s += "n:"
        s += s.gen(int)
        return [*found, s.text]

    assert echo.run(backend) == ["7", '{"name": "x"}', " hi", 'n: 7p:{"name": "x"}t: hin: 77']


# -- what is no value ---------------------------------------------------------------------------------------------


@given(st.sampled_from(KINDS), st.integers(1, 12), st.integers(0, 99))
def test_a_value_that_is_cut_is_an_error_and_leaves_the_state_as_it_was(kind: Any, max_tokens: int, seed: int) -> None:
    engine = Engine(make_model(), tokenizer=ByteTokenizer(), num_pages=64, poison=True)

    @rx.program
    def cut(s: rx.State) -> None:
        s += "begin "
        s.gen(max_tokens=2)
        before = s.tokens
        slot = s.gen(kind, name="it", max_tokens=max_tokens)
        if slot.finish == "length":
            with pytest.raises(rx.GenerationFailed, match=f"cut after {max_tokens} tokens") as caught:
                slot.value  # noqa: B018
            assert any("slot it, request" in note for note in caught.value.__notes__)
            assert len(slot.token_ids) == max_tokens
            assert s.tokens == before
            assert slot.usage.completion_tokens == max_tokens
        else:
            assert form_of(kind).read(slot.text) == slot.value
        s.gen(name="it" if slot.finish == "length" else None, max_tokens=1)
        assert s.cost.generations == 3

    cut.options(seed=seed).run(engine)
    audit(engine)


def test_a_cut_value_that_nobody_looked_at_is_raised_by_what_comes_next(engine: Engine) -> None:
    @rx.program
    def unseen(s: rx.State) -> None:
        s += "x"
        s.gen(Place, max_tokens=3)
        s += "y"

    @rx.program
    async def awaited(s: rx.State) -> Place:
        s += "x"
        return await s.gen(Place, max_tokens=3)

    for program in (unseen, awaited):
        with pytest.raises(rx.GenerationFailed, match="Place cut after 3 tokens"):
            program.run(engine)
    [failed] = unseen.batch(engine, [{}])
    assert not failed.ok
    assert '{\\"n' in str(failed.error)  # what there was of it


class Even(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("an odd number")
        if value == 4:
            raise RuntimeError("a bug")
        return value


def test_what_a_type_s_own_validator_raises_is_an_error_at_the_slot() -> None:
    replies = {"odd": '{"number": 3}', "even": '{"number": 2}', "bug": '{"number": 4}', "bad": "{"}
    backend = ScriptedBackend(replies, ByteTokenizer())

    @rx.program
    def ask(s: rx.State, what: str) -> int:
        s += what
        try:
            return s.gen(Even).value.number
        finally:
            assert s.text == (what + replies[what] if what == "even" else what)

    assert ask.run(backend, "even") == 2
    for what, said in [("odd", "an odd number"), ("bug", "a bug"), ("bad", "JSON")]:
        with pytest.raises(rx.GenerationFailed, match=said) as caught:
            ask.run(backend, what)
        assert caught.value.__cause__ is not None


def lax(depth: int) -> Any:
    kind: Any = int
    for _ in range(depth):
        kind = list[kind]
    return kind


class Wild(BaseModel):
    model_config = ConfigDict(json_schema_extra={"x-unknown": 1})
    a: int


class Empty(Enum):
    pass


class Odd(Enum):
    A = (1, 2)


make_enum: Any = Enum  # its functional form, which type checkers would read


class Late(BaseModel):
    a: Undefined  # type: ignore[name-defined]  # noqa: F821


REFUSED: dict[str, tuple[Any, str]] = {
    "set": (set[int], "uniqueItems"),
    "bytes": (bytes, "binary"),
    "complex": (complex, "complex numbers"),
    "keys that are numbers": (dict[int, str], "keys other than str"),
    "keys of a pattern": (dict[Annotated[str, Field(pattern="a")], int], "patternProperties"),
    "keys of a length": (dict[Annotated[str, Field(max_length=3)], int], "propertyNames"),
    "a late date": (Annotated[date, Field(ge=date(2020, 1, 1))], "ge of a date"),
    "a short time": (Annotated[timedelta, Field(le=timedelta(1))], "le of a timedelta"),
    "digits": (Annotated[Decimal, Field(max_digits=3)], "max_digits"),
    "a format": (Annotated[str, Field(json_schema_extra={"format": "phone"})], "format"),
    "a keyword": (Wild, "x-unknown"),
    "an open definition": (Late, "not fully defined"),
    "too deep": (lax(500), "recursion"),
    "a function": (Callable[[int], int], "no JSON form"),
    "a class of somebody": (Engine, "given as a type"),
    "no type": (5, "5; allowed: types that pydantic knows, such as int"),
    "a name": ("name", "`name=`"),
    "bytes to choose": (Literal[b"a"], "allowed: texts"),
    "two of one text": (Literal[1, "1"], "written '1'"),
    "an empty text": (Literal[""], "none of them empty"),
    "no members": (Empty, "no values"),
    "members of any kind": (Odd, "allowed: texts"),
    "an enum of 50,000": (make_enum("Many", {f"n{i}": f"option {i}" for i in range(50_000)}), "characters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_held_to_is_refused_at_once_and_harms_no_neighbour(name: str, make_engine: MakeEngine) -> None:
    engine = make_engine(make_model())
    kind, said = REFUSED[name]

    @rx.program
    def asks(s: rx.State) -> str:
        s += "x"
        with s.fork(2) as branches:
            slot = branches[0].gen(max_tokens=4)
            started = process_time()
            with pytest.raises(rx.InvalidRequest) as caught:
                branches[1].gen(kind, name="it")
            assert process_time() - started < 1
            assert said in str(caught.value)
            assert any("branch 1, slot it, before it had a request" in note for note in caught.value.__notes__)
            return slot.value

    @rx.program
    def alone(s: rx.State) -> str:
        s += "x"
        with s.fork(2) as branches:
            return branches[0].gen(max_tokens=4).value

    assert asks.run(engine) == alone.run(engine)


def test_a_stop_string_is_for_text(engine: Engine) -> None:
    @rx.program
    def stopped(s: rx.State, kind: Any) -> Any:
        s += "x"
        return s.gen(kind, stop="\n").value

    for kind in (int, Place, rx.Grammar.regex("a+")):
        with pytest.raises(rx.InvalidRequest, match="ends by itself"):
            stopped.run(engine, kind)


def test_forms_are_made_once() -> None:
    for kind in (int, Person, Literal["a"], Annotated[int, Field(ge=1)]):
        assert form_of(kind) is form_of(kind)
    assert form_of(Annotated[int, {"not": "hashable"}]).read("5") == 5
    assert form_of(Literal[1]).read("1") == 1
    assert form_of(Literal[True]).read("True") is True


def test_a_grammar_that_accepts_everything_leaves_the_tokens_as_they_are(engine: Engine) -> None:
    @rx.program
    def both(s: rx.State) -> tuple[tuple[int, ...], tuple[int, ...]]:
        s += "x"
        held = s.gen(rx.Grammar.regex("(?s:.*)"), max_tokens=30).token_ids
        with pytest.raises(rx.GenerationFailed, match="cut after 30"):
            s.gen()
        return held, s.gen(max_tokens=30).token_ids

    held, free = both.run(engine)
    assert held == free


# -- for type checkers --------------------------------------------------------------------------------------------


@rx.program
async def typed(s: rx.State) -> tuple[int, str]:
    s += "x"
    text = s.gen(max_tokens=1)
    assert_type(text, rx.Slot[str])
    assert_type(await text, str)
    assert_type(s.gen(str, max_tokens=1), rx.Slot[str])
    await s._branch.settled()
    number = await s.gen(int, max_tokens=40)
    assert_type(number, int)
    assert_type(await s.gen(rx.Grammar.choice(["a", "b"])), str)
    assert_type(await s.gen(Colour), Colour)
    assert_type(await s.gen(list[bool], max_tokens=400), list[bool])
    assert_type(await s.gen(Nothing), Nothing)
    assert_type(s.gen(Literal["a", "b"]), rx.Slot[Any])
    await s._branch.settled()
    return number, s.text


def test_types_are_inferred_and_async_programs_get_the_same_values(engine: Engine) -> None:
    number, text = typed.run(engine)
    assert (number, text) == asyncio.run(typed.arun(engine))
    assert not math.isnan(number)


# -- on the default model -----------------------------------------------------------------------------------------


@rx.program
def sensible(s: rx.State) -> list[Any]:
    values: list[Any] = []
    asked: Iterable[tuple[str, Any]] = (
        ("1 + 1 = 2, 2 + 2 =", int),
        (" and Paris is the capital of", Literal["Spain", "France", "Italy"]),
        (". Is fire hot? Answer yes or no:", bool),
        ("\nHalf of one, as a decimal number, is 0", rx.Grammar.regex(r"\.[0-9]")),
        ('.\nAnna is 31 years old. As JSON, {"name", "age"}: ', Place),
    )
    for text, kind in asked[:-1]:  # type: ignore[index]
        s += text
        values.append(s.gen(kind, temperature=0.0, max_tokens=24).value)
    return values


@pytest.fixture(scope="module")
def real_engine() -> Iterable[Engine]:
    default_tokenizer()  # skips where the model is not installed
    model, tokenizer = load_model("smollm2-135m")
    with Engine(model, tokenizer=tokenizer, num_pages=256) as engine:
        yield engine
        audit(engine)


def test_the_default_model_s_values_make_sense(real_engine: Engine) -> None:
    number, country, is_hot, half = sensible.run(real_engine)
    assert (number, country, is_hot, half) == (4, "France", True, ".5")


class Who(BaseModel):
    name: Annotated[str, Field(max_length=20)]
    age: Annotated[int, Field(ge=0, le=130)]


def test_the_default_model_reads_a_person(real_engine: Engine) -> None:
    @rx.program
    def extract(s: rx.State, text: str) -> Who:
        s += 'Bob is 52 years old.\n{"name": "Bob", "age": 52}\n\n' + text + "\n"
        return s.gen(Who, temperature=0.0).value

    assert extract.run(real_engine, "Anna is 31 years old.") == Who(name="Anna", age=31)
