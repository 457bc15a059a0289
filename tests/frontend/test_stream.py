"""Streams: what happens in a run, in order and complete; the reader sets the pace, and leaving it ends the run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import aclosing, closing
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import radixrt as rx
from radixrt.frontend.backend import EngineBackend
from radixrt.frontend.driver import Driver
from radixrt.frontend.testing import Body, FaultyBackend, ScriptedBackend, plain, programs, tasks
from radixrt.runtime import Engine
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import MakeEngine, audit

ev = rx.events


@rx.program
def judge(s: rx.State, essay: str) -> list[str]:
    s += f"Essay: {essay}. "
    s.gen(name="summary", max_tokens=3)
    with s.fork(["style", "facts"]) as branches:

        def one(b: rx.State, what: str) -> str:
            b += f"Its {what}: "
            return b.gen(name=what, max_tokens=4).value

        marks = branches.map(one)
        s.adopt(branches[1])
    return marks


@rx.program
async def judge_async(s: rx.State, essay: str) -> list[str]:
    s += f"Essay: {essay}. "
    await s.gen(name="summary", max_tokens=3)
    async with s.fork(["style", "facts"]) as branches:

        async def one(b: rx.State, what: str) -> str:
            b += f"Its {what}: "
            return await b.gen(name=what, max_tokens=4)

        marks = await branches.map(one)
        s.adopt(branches[1])
    return marks


def read_sync(program: Any, engine: Any, *args: Any) -> list[Any]:
    return list(program.stream(engine, *args))


def read_async(program: Any, engine: Any, *args: Any) -> list[Any]:
    async def read() -> list[Any]:
        return [event async for event in program.astream(engine, *args)]

    return asyncio.run(read())


WAYS: list[Any] = [(program, read) for program in (judge, judge_async) for read in (read_sync, read_async)]
IDS = ["plain-sync", "plain-async", "tasks-sync", "tasks-async"]


def texts(events: list[Any]) -> dict[Any, str]:
    """The deltas of each slot, joined."""
    joined: dict[Any, str] = defaultdict(str)
    for event in events:
        if isinstance(event, ev.TextDelta):
            joined[event.where.path, event.number] += event.text
    return joined


def check_grammar(events: list[Any]) -> None:
    """Every slot and branch begins before it ends, ends once, and nothing happens outside of its branch's life."""
    assert isinstance(events[0], ev.RunStarted)
    assert isinstance(events[-1], ev.RunEnded)
    open_branches, open_slots, seen = {()}, set(), set()
    for event in events[1:-1]:
        path = event.where.path
        if isinstance(event, ev.BranchOpened):
            assert path[:-1] in open_branches
            open_branches.add(path)
            continue
        assert path in open_branches
        match event:
            case ev.BranchClosed():
                open_branches.remove(path)
            case ev.SlotStarted():
                assert (path, event.number) not in seen
                seen.add((path, event.number))
                open_slots.add((path, event.number))
            case ev.TextDelta():
                assert event.text
                assert (path, event.number) in open_slots
            case ev.SlotEnded():
                open_slots.remove((path, event.number))
    assert open_branches == {()}
    assert not open_slots


@pytest.mark.parametrize(("program", "read"), WAYS, ids=IDS)
def test_events_tell_the_whole_run(make_engine: MakeEngine, program: Any, read: Callable[..., list[Any]]) -> None:
    expected = program.run(make_engine(), "on cats")
    events = read(program, make_engine(), "on cats")
    check_grammar(events)
    assert events[-1].value == expected
    ends = {event.name: event for event in events if isinstance(event, ev.SlotEnded)}
    assert [ends["style"].text, ends["facts"].text] == expected
    assert {name: end.where.path for name, end in ends.items()} == {"summary": (), "style": (0,), "facts": (1,)}
    assert all(end.finish == "length" and end.usage is not None for end in ends.values())
    assert all(end.usage.completion_tokens == len(end.text) for end in ends.values() if end.usage)
    given = [(event.where.path, event.text) for event in events if isinstance(event, ev.TextGiven)]
    assert sorted(given) == [((), "Essay: on cats. "), ((0,), "Its style: "), ((1,), "Its facts: ")]
    closed = {event.where.path: event.adopted for event in events if isinstance(event, ev.BranchClosed)}
    assert closed == {(0,): False, (1,): True}
    deltas = [event for event in events if isinstance(event, ev.TextDelta)]
    assert len(deltas) == 3 + 4 + 4  # a token each, as they come


def test_deltas_add_up_whatever_is_held_back(make_engine: MakeEngine) -> None:
    """Bytes that are no whole characters yet, and what may be the beginning of a stop string."""

    @rx.program
    def gens(s: rx.State, stop: str) -> str:
        s += "a"
        return s.gen(max_tokens=60, stop=(stop, stop * 3)).value

    some_stopped = False
    for seed in range(12):
        for vocab, stop in ((256, "\x01"), (256, "é"), (110, "ab"), (110, "a")):
            engine = make_engine(HashModel(vocab=vocab))
            events = list(gens.options(seed=seed).stream(engine, stop))
            end = next(event for event in events if isinstance(event, ev.SlotEnded))
            assert texts(events) in ({((), 0): end.text}, {})
            assert end.text == gens.options(seed=seed).run(engine, stop)
            some_stopped |= end.finish == "stop"
    assert some_stopped


def test_a_character_of_many_tokens_comes_whole() -> None:
    """A backend that tells nothing before the end gives one delta."""
    backend = ScriptedBackend({"x": "smile \N{SMILING FACE WITH OPEN MOUTH} end"}, ByteTokenizer())

    @rx.program
    def asks(s: rx.State) -> str:
        s += "x"
        return s.gen(max_tokens=100).value

    deltas = [event.text for event in asks.stream(backend) if isinstance(event, ev.TextDelta)]
    assert deltas == ["smile \N{SMILING FACE WITH OPEN MOUTH} end"]


@pytest.mark.parametrize("read", [read_sync, read_async])
def test_an_error_is_raised_as_itself_behind_the_events(engine: Engine, read: Callable[..., list[Any]]) -> None:
    class Odd(Exception):
        pass

    @rx.program
    def fails(s: rx.State) -> None:
        s += "x"
        s.gen(max_tokens=2).value  # noqa: B018
        raise Odd

    @rx.program
    async def fails_async(s: rx.State) -> None:
        s += "x"
        await s.gen(max_tokens=2)
        raise Odd

    for program in (fails, fails_async):
        with pytest.raises(Odd) as caught:
            read(program, engine)
        assert any("program fails" in note for note in caught.value.__notes__)
    seen: list[Any] = []
    with pytest.raises(Odd):
        seen.extend(fails.stream(engine))
    assert not any(isinstance(event, ev.RunEnded) for event in seen)


@rx.program
def endless(s: rx.State) -> None:
    s += "x"
    s.gen(max_tokens=4)
    with s.fork(3) as branches:
        branches.map(lambda b: b.gen(max_tokens=2000).value)


@rx.program
async def endless_async(s: rx.State) -> None:
    s += "x"
    await s.gen(max_tokens=4)

    async def one(b: rx.State) -> str:
        return await b.gen(max_tokens=2000)

    async with s.fork(3) as branches:
        await branches.map(one)


@pytest.mark.parametrize("program", [endless, endless_async], ids=["plain", "tasks"])
def test_leaving_the_iterator_anywhere_ends_the_run(make_engine: MakeEngine, program: Any) -> None:
    before = threading.active_count()
    for stop_at in (0, 1, 2, 3, 5, 8, 9, 10, 11, 14, 20):
        engine = make_engine()
        with closing(program.stream(engine)) as events:
            for number, _ in enumerate(events):
                if number == stop_at:
                    break
        audit(engine)

        async def leave(engine: Engine, stop_at: int = stop_at) -> None:
            async with aclosing(program.astream(engine)) as events:
                number = 0
                async for _ in events:
                    if number == stop_at:
                        break
                    number += 1
            audit(engine)

        asyncio.run(leave(engine))
    assert threading.active_count() == before


def test_letting_go_of_the_iterator_ends_the_run(engine: Engine) -> None:
    for event in endless.stream(engine):
        if isinstance(event, ev.TextDelta):
            break
    del event
    audit(engine)


def test_a_stream_that_is_never_read_runs_nothing(engine: Engine) -> None:
    events = endless.stream(engine)
    events.close()
    assert engine.stats().counters.steps == 0


@pytest.mark.parametrize("program", [endless, endless_async], ids=["plain", "tasks"])
def test_a_reader_that_is_cancelled_ends_the_run(engine: Engine, program: Any) -> None:
    async def main() -> None:
        async def read() -> None:
            async with aclosing(program.astream(engine)) as events:
                async for _ in events:
                    pass

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await read()
        audit(engine)

    asyncio.run(main())


@pytest.mark.parametrize("program", [endless, endless_async], ids=["plain", "tasks"])
def test_the_engine_waits_for_the_reader(engine: Engine, program: Any) -> None:
    """While nobody asks for the next event, there is at most one step more."""

    def steps() -> int:
        return engine.stats().counters.steps

    with closing(program.stream(engine)) as events:
        for number, event in enumerate(events):
            if isinstance(event, ev.TextDelta):
                before = steps()
                time.sleep(0.02)
                assert steps() <= before + 1
            if number == 30:
                break

    async def main() -> None:
        async with aclosing(program.astream(engine)) as events:
            number = 0
            async for event in events:
                if isinstance(event, ev.TextDelta):
                    before = steps()
                    await asyncio.sleep(0.02)
                    assert steps() <= before + 1
                number += 1
                if number == 30:
                    break

    asyncio.run(main())


def test_a_reader_that_does_not_read_holds_up_nobody_else(engine: Engine) -> None:
    @rx.program
    def short(s: rx.State, n: int) -> str:
        s += f"y{n}"
        return s.gen(max_tokens=20).value

    alone = [short.run(engine, n) for n in range(3)]
    with closing(endless.stream(engine)) as events:
        next(event for event in events if isinstance(event, ev.TextDelta))
        assert [short.run(engine, n) for n in range(3)] == alone
        assert isinstance(next(events), ev.TextDelta)


def test_a_program_of_a_stream_may_stream_another(engine: Engine) -> None:
    @rx.program
    def outer(s: rx.State) -> list[str]:
        s += "z"
        s.gen(max_tokens=3)
        events = list(judge.stream(engine, "inner"))
        s.gen(max_tokens=3)
        found: list[str] = events[-1].value  # type: ignore[union-attr, assignment]
        return found

    *_, end = outer.stream(engine)
    assert isinstance(end, ev.RunEnded)
    assert end.value == judge.run(engine, "inner")


def test_many_streams_share_an_engine(engine: Engine) -> None:
    async def read(program: Any, essay: str) -> Any:
        return [event async for event in program.astream(engine, essay)][-1].value

    async def main() -> list[Any]:
        reads = [read(program, essay) for essay in ("a", "b", "c") for program in (judge, judge_async)]
        return list(await asyncio.gather(*reads))

    found = asyncio.run(main())
    assert found == [judge.run(engine, essay) for essay in ("a", "a", "b", "b", "c", "c")]


def test_an_async_program_runs_in_the_reader_s_loop(engine: Engine) -> None:
    @rx.program
    async def which(s: rx.State) -> bool:
        s += "x"
        await s.gen(max_tokens=1)
        return asyncio.get_running_loop() is loops[0]

    loops: list[Any] = []

    async def main() -> Any:
        loops.append(asyncio.get_running_loop())
        return [event async for event in which.astream(engine)][-1].value  # type: ignore[union-attr]

    assert asyncio.run(main()) is True


def test_a_stream_inside_of_an_event_loop(engine: Engine) -> None:
    """As in a notebook: a plain program streams there, an async one has a stream of its own."""

    async def main() -> None:
        assert list(judge.stream(engine, "x"))[-1].value == judge.run(engine, "x")  # type: ignore[union-attr]
        with pytest.raises(rx.StateMisuse, match="use astream"):
            next(judge_async.stream(engine, "x"))

    asyncio.run(main())


@pytest.mark.parametrize(("program", "read"), WAYS, ids=IDS)
def test_whatever_fails_is_raised_and_nothing_is_held(
    make_engine: MakeEngine, program: Any, read: Callable[..., list[Any]]
) -> None:
    class Interrupted(BaseException):
        pass

    errors = [OSError("device"), rx.InvalidRequest("refused"), Interrupted()]
    num_failed = 0
    for number in range(14):
        for error in errors:

            def fault(name: str, at: int, number: int = number, error: BaseException = error) -> None:
                if at == number and name != "finish":  # which is a generation's own failure
                    raise error

            engine = make_engine()
            try:
                check_grammar(read(program, Driver(FaultyBackend(EngineBackend(engine), fault)), "x"))
            except BaseException as raised:
                if raised is not error:
                    raise
                num_failed += 1
            audit(engine)
            assert not engine._loop.requests._ended, "every request was released"
    assert num_failed >= 8 * len(errors)


def test_a_rewind_is_told(engine: Engine) -> None:
    @rx.program
    def tries(s: rx.State) -> None:
        s += "a"
        mark = s.mark()
        for number in range(2):
            s += f"b{number}"
            s.gen(max_tokens=1)
            s.rewind(mark)
        s += "c"
        s.gen(max_tokens=1)

    told = [
        event.text if isinstance(event, ev.TextGiven) else type(event).__name__
        for event in tries.stream(engine)
        if isinstance(event, ev.TextGiven | ev.Rewound)
    ]
    assert told == ["a", "b0", "Rewound", "b1", "Rewound", "c"]


def test_random_programs_stream_what_they_are(profile: str) -> None:
    @settings(max_examples=2_000 if profile == "deep" else 60, suppress_health_check=list(HealthCheck))
    @given(programs(), st.sampled_from([plain, tasks]), st.sampled_from([read_sync, read_async]))
    def check(body: Body, program: Any, read: Callable[..., list[Any]]) -> None:
        def engine_of() -> Engine:
            model = HashModel(vocab=128, eos=frozenset(range(4)))
            return Engine(model, tokenizer=ByteTokenizer(), num_pages=512, page_size=4, poison=True)

        engine = engine_of()
        events = read(program, engine, body)
        check_grammar(events)
        assert events[-1].value == program.run(engine_of(), body)
        joined = texts(events)
        for event in events:
            if isinstance(event, ev.SlotEnded):
                assert joined[event.where.path, event.number] == event.text
        audit(engine)

    check()


def test_random_programs_can_be_left_anywhere(profile: str) -> None:
    @settings(max_examples=2_000 if profile == "deep" else 60, suppress_health_check=list(HealthCheck))
    @given(programs(), st.sampled_from([plain, tasks]), st.integers(0, 25))
    def check(body: Body, program: Any, num_read: int) -> None:
        model = HashModel(vocab=128, eos=frozenset(range(4)))
        engine = Engine(model, tokenizer=ByteTokenizer(), num_pages=512, page_size=4, poison=True)
        events: Iterator[Any] = program.stream(engine, body)
        for _ in zip(range(num_read), events, strict=False):
            pass
        del events
        audit(engine)
        assert not engine._loop.requests._ended, "every request was released"

    check()
