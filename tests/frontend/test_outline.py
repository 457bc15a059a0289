"""Plans: what the source says every run begins with, and that nothing of the author's is run to find out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import Any

import pytest

import radixrt as rx
from radixrt.frontend.source import MAX_STATEMENTS, Source
from radixrt.runtime import Engine, trie_size

from .conftest import MakeEngine


@dataclass(frozen=True)
class Shot:
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Slotted:
    question: str
    answer: str


INTRO = "Answer briefly.\n"
SHOTS = (Shot("2 + 2?", "4"), Shot("3 + 3?", "6"))


@rx.program
def few_shot(s: rx.State, question: str, shots: Any = SHOTS) -> str:
    """Its docstring is no text."""
    s += INTRO
    for shot in shots:
        s += f"Q: {shot.question}\nA: {shot.answer}\n"
    s += f"Q: {question}\nA:"
    return s.gen(stop="\n", max_tokens=8).value.strip()


KNOWN = "Answer briefly.\nQ: 2 + 2?\nA: 4\nQ: 3 + 3?\nA: 6\nQ: "


def test_the_static_prefix_is_found(engine: Engine) -> None:
    plan = few_shot.plan(engine)
    assert plan.text == KNOWN
    assert not plan.is_whole
    assert plan.end.endswith(": question")
    [gen] = plan.calls
    assert (gen.method, gen.count, gen.repeats) == ("gen", 8, False)
    assert engine.stats().counters.steps == 0


def test_given_arguments_are_known(engine: Engine) -> None:
    for shots in ([Slotted("1?", "1")], [Shot("1?", "1")]):
        plan = few_shot.plan(engine, question="5?", shots=shots)
        assert plan.text == "Answer briefly.\nQ: 1?\nA: 1\nQ: 5?\nA:"
        assert plan.is_whole
        assert plan.tokens == len(plan.text)
    assert few_shot.plan(question="5?").tokens is None
    with pytest.raises(rx.InvalidRequest, match="questions given; allowed: question, shots"):
        few_shot.plan(questions="5?")


def test_what_is_known_is_what_runs_begin_with(make_engine: MakeEngine) -> None:
    """The tokens of every run begin with the plan's, and where the plan is whole they are its first prompt."""

    @rx.program
    def tells(s: rx.State, question: str) -> tuple[int, ...]:
        few_shot(s, question)
        return s.tokens

    engine = make_engine()
    tokens = [tells.run(engine, question) for question in ("a", "b c", "Q")]
    plan = few_shot.plan(engine)
    assert plan.tokens is not None
    assert 0 < plan.tokens <= len(plan.text)
    for found in tokens:
        assert bytes(found[: plan.tokens]) == plan.text.encode()[: plan.tokens]


def test_rows_say_how_much_they_share(make_engine: MakeEngine) -> None:
    rows = [{"question": question} for question in ("one?", "two?", "one more?")]
    engine = make_engine()
    plan = few_shot.plan(engine, rows)
    assert plan.rows is not None
    prompts = [list(f"{KNOWN}{row['question']}\nA:".encode()) for row in rows]
    assert (plan.rows.tokens, plan.rows.distinct) == (sum(map(len, prompts)), trie_size(prompts))
    few_shot.batch(engine, rows)
    assert engine.stats().counters.computed == plan.rows.distinct
    assert "each is used 2." in str(plan)
    varied = few_shot.plan(engine, [{"question": "a", "shots": []}, {"question": "b"}])
    assert varied.text == INTRO  # not even the shots are of every run


def test_nothing_of_the_author_s_is_run(engine: Engine) -> None:
    def forbidden(*_: object) -> Any:
        raise AssertionError("a plan ran it")

    class Loud(str):
        __format__ = __str__ = __repr__ = __len__ = __iter__ = __add__ = __eq__ = forbidden
        __hash__ = str.__hash__

    class Trap:
        __bool__ = __iter__ = __getitem__ = __format__ = __str__ = __repr__ = __eq__ = forbidden
        __hash__ = object.__hash__

        @property
        def text(self) -> str:
            return str(forbidden())

        def __getattr__(self, name: str) -> str:
            return str(forbidden())

    class Everything:
        def __getattribute__(self, name: str) -> Any:
            forbidden()

    @rx.program
    def plain(s: rx.State, x: Any) -> None:
        s += "known "
        s += f"{x}"

    @rx.program
    def deep(s: rx.State, x: Any) -> None:
        s += "known "
        s += f"{x.text}"

    @rx.program
    def looped(s: rx.State, x: Any) -> None:
        s += "known "
        for y in x:
            s += y

    @rx.program
    def tested(s: rx.State, x: Any) -> None:
        s += "known "
        if x:
            s += "y"

    @rx.program
    def called(s: rx.State, x: Any) -> None:
        s += "known "
        y = forbidden(x)
        s += y

    @rx.program
    def indexed(s: rx.State, x: Any) -> None:
        s += "known "
        s += x[0]

    @rx.program
    def decorated(s: rx.State, x: Any) -> None:
        s += "known "

        @forbidden
        def inner() -> None:
            pass

    for program in (plain, deep, looped, tested, called, indexed, decorated):
        for value in (Trap(), Everything(), Loud("abc")):
            plan = program.plan(engine, x=value)
            assert plan.text == "known "
            assert not plan.is_whole
            assert "known" in str(plan)


def test_messages_are_laid_out(make_engine: MakeEngine) -> None:
    @rx.program
    def chat(s: rx.State, question: str) -> tuple[int, ...]:
        with s.system():
            s += "Be brief."
        with s.user():
            s += f"Say: {question}"
        with s.assistant():
            tokens = s.tokens
            s.gen(max_tokens=2)
        return tokens

    engine = make_engine()
    tokens = chat.run(engine, "what?")
    plan = chat.plan(engine, question="what?")
    assert plan.is_whole
    assert plan.tokens == len(tokens)
    unknown = chat.plan(engine)
    assert unknown.tokens is not None
    assert not unknown.is_whole
    assert 0 < unknown.tokens < len(tokens)
    assert plan.text == "Be brief.Say: what?"

    @rx.program
    def straight(s: rx.State, question: str) -> str:
        with s.user():
            s += question
        with s.assistant():
            return s.gen(max_tokens=2).value

    whole = straight.plan(engine, question="what?")
    assert whole.is_whole
    before = engine.stats().counters.computed
    straight.run(engine, "what?")
    assert engine.stats().cache.num_tables == 0
    assert whole.tokens is not None
    assert engine.stats().counters.computed - before <= whole.tokens


def test_loops_forks_and_limits_are_counted() -> None:
    @rx.program
    async def tree(s: rx.State, task: str, width: int, depth: int = 2) -> None:
        s += f"Task: {task}"
        for _ in range(depth):
            async with s.fork(width) as branches:

                async def step(b: rx.State) -> None:
                    await b.gen(max_tokens=24)
                    with b.scratch() as probe:
                        await probe.gen(max_tokens=width)

                await branches.map(step)
        async with s.fork(["a", "b", "c"]):
            pass
        width = 5
        await s.gen()

    calls = {(call.method, call.line): call for call in tree.plan(width=3).calls}
    found = [
        (method, call.count, call.repeats) for (method, _), call in sorted(calls.items(), key=lambda one: one[0][1])
    ]
    # `width` is assigned later on, so it is not known
    assert found == [
        ("fork", None, True),
        ("gen", 24, True),
        ("scratch", None, True),
        ("gen", None, True),
        ("fork", 3, False),
        ("gen", 64, False),
    ]


def prefix(function: Any, **known: Any) -> str:
    return Source(function).prefix(known).text


def test_what_is_read_and_where_reading_stops() -> None:
    def conversions(s: Any, x: Any) -> None:
        s += f"{x!r:>5}|{x}|{3.14159:.2f}|{x!a}"

    def branches(s: Any, x: Any) -> None:
        if x:
            s += "yes"
        else:
            s += "no"
        s += "."

    def locals_(s: Any, x: Any) -> None:
        y = x + 1
        z: str = f"<{y}>"
        unknown = s
        s += z + "end"
        s += unknown

    def nested(s: Any, x: Any) -> None:
        for a, b in x:
            for c in range(a):
                s += f"{b}{c}"

    def items(s: Any, x: Any) -> None:
        s += x["a"][0]
        s += x["b"]

    def shadowed(s: Any, x: Any) -> None:
        range = x
        for _ in range(3):
            s += "y"

    def endless(s: Any, x: Any) -> None:
        for _ in range(1_000_000_000):
            s += ""

    assert prefix(conversions, x="é") == "  'é'|é|3.14|'\\xe9'"
    assert (prefix(branches, x=[]), prefix(branches, x=1), prefix(branches)) == ("no.", "yes.", "")
    assert prefix(locals_, x=1) == "<2>end"
    assert prefix(nested, x=[(2, "p"), (1, "q")]) == "p0p1q0"
    assert prefix(nested, x=[(2, "p"), (1,)]) == "p0p1"
    assert prefix(items, x={"a": ["1"], "b": 2}) == "1"
    assert prefix(shadowed, x=3) == ""
    assert prefix(endless, x=1) == ""
    assert MAX_STATEMENTS - 2 <= len(Source(endless).prefix({}).parts) <= MAX_STATEMENTS


def test_a_source_that_cannot_be_read_is_said_to_be_unknown(engine: Engine) -> None:
    space: dict[str, Any] = {}
    exec("def made(s, x):\n    s += 'a'\n", space)
    made: Any = rx.program(space["made"])
    plan = made.plan(engine)
    assert (plan.text, plan.tokens, plan.calls) == ("", 0, ())
    assert "cannot be read" in str(plan)

    def loud(function: Any) -> Any:
        @wraps(function)
        def wrapper(s: Any) -> Any:
            s += "first: "
            return function(s)

        return wrapper

    @rx.program
    @loud
    def wrapped(s: rx.State) -> None:
        s += "second"

    assert wrapped.plan(engine).text == ""  # the wrapper comes first, and could do anything


def test_a_plan_is_readable(engine: Engine) -> None:
    lines = str(few_shot.plan(engine, [{"question": "a"}, {"question": "b"}])).splitlines()
    assert lines[0].startswith("few_shot begins with ")
    assert "(not known from there on)" in lines[0]
    assert lines[1].startswith("  'Answer briefly.")
    assert lines[2].startswith("  gen on line ")
    assert lines[2].endswith(", at most 8 tokens")
    assert lines[3].startswith("2 rows: ")
